"""The data of a run, from its configuration: read, tokenise, lay out, put in order. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.config.schema import Config
from samestep.data.order import GlobalOrder, permutation
from samestep.data.rows import Rows, build_rows, split_documents, split_tail, tokenize
from samestep.data.sources import read_documents
from samestep.data.tokenize import Tokenizer, build_tokenizer
from samestep.errors import DataError
from samestep.families import resolve_model
from samestep.plan import DataFacts


@dataclass(frozen=True)
class Data:
    """The samples of a run and the tokenizer they were made with; `evaluation` is None where none was asked for."""

    tokenizer: Tokenizer
    train: Rows
    evaluation: Rows | None


def load_data(config: Config, tokenizer: Tokenizer | None = None) -> Data:
    """Read, tokenise and lay out the data of a run.

    Args:
        tokenizer: use this one instead of what the config names (a resumed run keeps its own).

    Raises:
        DataError: no document, no row, or a token id beyond `model.vocab_size`.
    """
    dataset = config.train_dataset
    documents = read_documents(dataset)
    if tokenizer is None:
        tokenizer = build_tokenizer(config.tokenizer, documents)
    length = config.model.seq_length
    store = tokenize(documents, tokenizer)
    evaluation: Rows | None = None
    if config.eval_dataset.path is not None:
        held_out = tokenize(read_documents(config.eval_dataset, "eval_dataset"), tokenizer)
        evaluation = build_rows(held_out, config.eval_dataset, length, "eval_dataset")
    elif dataset.split is not None:
        if dataset.split == "tail":
            store, held_out = split_tail(store, dataset.eval_fraction)
        else:
            order = permutation(len(store.ends), config.training.seed, 0)
            store, held_out = split_documents(store, dataset.eval_fraction, order)
        evaluation = build_rows(held_out, dataset, length, "validation part of train_dataset")
    data = Data(tokenizer, build_rows(store, dataset, length), evaluation)
    _check_vocabulary(config, data)
    return data


def _check_vocabulary(config: Config, data: Data) -> None:
    spec = resolve_model(config.model, data.tokenizer.vocab_size)
    for rows in filter(None, (data.train, data.evaluation)):
        if rows.largest_id() >= spec.vocab_size:
            raise DataError(f"token id {rows.largest_id()} is beyond model.vocab_size {spec.vocab_size}")


def make_order(config: Config, data: Data) -> GlobalOrder:
    """The global batches of the run."""
    training = config.training
    return GlobalOrder(
        len(data.train),
        training.global_batch_size,
        training.seed,
        shuffle=config.train_dataset.shuffle,
        drop_last=training.last_batch == "drop",
    )


def data_facts(config: Config, data: Data) -> DataFacts:
    """What the plan wants to know; the first global batch stands for all."""
    lengths, targets = data.train.lengths(), data.train.targets()
    size = min(config.training.global_batch_size, len(data.train))
    epoch = GlobalOrder(len(data.train), size, config.training.seed, shuffle=config.train_dataset.shuffle)
    first = epoch.next(0).rows
    return DataFacts(
        samples=len(data.train),
        tokens=int(lengths.sum()),
        targets=int(targets.sum()),
        step_lengths=tuple(int(n) for n in lengths[first]),
        step_targets=tuple(int(n) for n in targets[first]),
        vocab_size=data.tokenizer.vocab_size,
    )

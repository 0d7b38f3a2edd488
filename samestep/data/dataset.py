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
from samestep.length import DataFacts


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
        DataError: no document, no row, or no target.
        ConfigError: `model.vocab_size` is less than the tokenizer's, or the tokenizer cannot be made.
    """
    dataset = config.train_dataset
    documents = read_documents(dataset)
    if tokenizer is None:
        tokenizer = build_tokenizer(config.tokenizer, documents)
    resolve_model(config.model, tokenizer.vocab_size)  # before the slow part: every id must have an embedding
    length = config.model.seq_length
    store = tokenize(documents, tokenizer)
    if dataset.rows == "cut" and len(store.tokens) <= length:
        raise DataError(
            f"train_dataset.path: the text has {len(store.tokens)} tokens, which do not fill a row of model.seq_length "
            f"{length}\n  fix: give more text, lower model.seq_length, or write rows: documents"
        )
    evaluation: Rows | None = None
    held_out_name = "eval_dataset"
    if config.eval_dataset.path is not None:
        held_out = tokenize(read_documents(config.eval_dataset, held_out_name), tokenizer)
        evaluation = build_rows(held_out, config.eval_dataset, length, held_out_name)
    elif dataset.split is not None:
        if dataset.split == "tail":
            store, held_out = split_tail(store, dataset.eval_fraction)
        else:
            order = permutation(len(store.ends), config.training.seed, 0)
            store, held_out = split_documents(store, dataset.eval_fraction, order)
        held_out_name = "validation part of train_dataset"
        evaluation = build_rows(held_out, dataset, length, held_out_name)
    data = Data(tokenizer, build_rows(store, dataset, length), evaluation)
    _check_targets(data.train, "train_dataset")
    if evaluation is not None:
        _check_targets(evaluation, held_out_name)
    return data


def _check_targets(rows: Rows, section: str) -> None:
    if not rows.targets().any():
        raise DataError(
            f"{section}: no token of its {len(rows)} samples is a target, so there is nothing to learn or measure\n"
            "  fix: write targets: all, or chat rows with an assistant's turn within model.seq_length"
        )


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
    seed, shuffle = config.training.seed, config.train_dataset.shuffle
    first = GlobalOrder(len(data.train), size, seed, shuffle=shuffle).next(0).rows
    epochs = GlobalOrder(len(data.train), len(data.train), seed, shuffle=shuffle)
    return DataFacts(
        samples=len(data.train),
        tokens=int(lengths.sum()),
        targets=int(targets.sum()),
        step_lengths=tuple(int(n) for n in lengths[first]),
        step_targets=tuple(int(n) for n in targets[first]),
        vocab_size=data.tokenizer.vocab_size,
        epoch_lengths=lambda epoch: lengths[epochs.next(epoch * len(lengths)).rows],
    )

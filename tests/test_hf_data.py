"""Windows: every sample once a pass, the tail a window of its own, whatever the source."""

import pytest
import torch
from datasets import Dataset
from hf_cases import arguments, cut, difference, logged, rows, tiny_llama, true_run, weights
from torch.utils.data import DataLoader
from transformers import default_data_collator

from samestep.errors import DataError
from samestep.hf import Trainer
from samestep.hf.data import Cursor, EvalBatches, MapWindows, Order, RankBatches, Shape


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples, self.passes = samples, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.samples)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return {"row": torch.tensor(row)}


def windows(count, ranks, micro=2, accumulation=2, cursor=None, **order):
    """Rows of every window of an epoch, by rank, and how many micro-batches each is said to have."""
    found = []
    for rank in range(ranks):
        shape = Shape(micro, accumulation, ranks, rank)
        batches = RankBatches(Order(count, "random", 5), shape, drop_last=order.get("drop_last", False))
        loader = DataLoader(Rows(count), batch_sampler=batches, collate_fn=default_data_collator)
        dealt = MapWindows(loader, batches, shape).after(cursor or Cursor())
        found.append([([batch["row"].tolist() for batch in window.batches], window.count) for window in dealt])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 5, 12, 23])
def test_every_sample_is_in_one_window_and_windows_do_not_depend_on_ranks(count, ranks):
    size = 12 // ranks
    by_rank = windows(count, ranks, micro=2, accumulation=size // 2)
    order = Order(count, "random", 5).rows(0)
    for number, together in enumerate(zip(*by_rank, strict=True)):
        dealt = [row for batches, _ in together for batch in batches for row in batch]
        assert sorted(dealt) == sorted(order[number * 12 : number * 12 + 12])
        assert {most for _, most in together} == {max(len(batches) for batches, _ in together)}
    assert sum(len(batch) for rank in by_rank for batches, _ in rank for batch in batches) == count


def test_the_order_is_that_of_transformers(tmp_path):
    """Of RandomSampler in accelerate: a pure function of seed and epoch."""
    from accelerate.data_loader import SeedableRandomSampler

    for epoch in (0, 3):
        sampler = SeedableRandomSampler(range(19), data_seed=42)
        sampler.set_epoch(epoch)
        assert Order(19, "random", 42).rows(epoch) == list(sampler)
    assert Order(4, "sequential", 42).rows(9) == [0, 1, 2, 3]


def test_windows_begin_anywhere():
    whole = windows(23, 2)
    rest = windows(23, 2, cursor=Cursor(0, 16, 4))
    assert [rank[2:] for rank in whole] == rest


def test_drop_last_leaves_out_what_fills_no_micro_batch_on_every_rank():
    """As transformers does: 23 samples, 4 of them a micro-batch on both ranks."""
    found = windows(23, 2, drop_last=True)
    assert sum(len(batch) for rank in found for batches, _ in rank for batch in batches) == 20
    with pytest.raises(DataError, match="dataloader_drop_last=False"):
        windows(3, 2, drop_last=True)


def test_similar_lengths_come_together():
    lengths = [1 + 7 * number % 50 for number in range(200)]
    order = Order(200, "group_by_length", 1, lengths=lengths, group=8).rows(2)
    assert sorted(order) == list(range(200))
    spread = [max(g) - min(g) for g in cut([lengths[row] for row in order], 8)]
    assert sum(spread) / len(spread) < 15


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_evaluation_takes_every_sample_once_in_order(ranks):
    shares = [list(EvalBatches(13, 2, ranks, rank)) for rank in range(ranks)]
    assert [row for share in shares for batch in share for row in batch] == list(range(13))


def test_a_stream_of_two_passes(tmp_path):
    """D5: the tail is a step of its own and nothing of it reaches the next pass."""
    data = rows(11, uneven=True)
    model, truth = tiny_llama(dtype=torch.float64), tiny_llama(dtype=torch.float64)
    stream = Stream(data)
    args = arguments(tmp_path, gradient_accumulation_steps=2, max_steps=5)
    trainer = Trainer(model=model, args=args, train_dataset=stream)
    trainer.train()
    losses = true_run(truth, (cut(data, 4) * 2)[:5])
    assert logged(trainer) == pytest.approx(losses, rel=1e-12)
    assert difference(weights(model), weights(truth)) < 1e-12
    assert stream.passes == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_resumed_at_its_sample(workers, tmp_path):
    """In the second pass, where transformers would begin it again."""
    data = rows(11, uneven=True)
    settings = {"gradient_accumulation_steps": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    settings |= {"dataloader_num_workers": workers}
    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path, **settings), train_dataset=Stream(data))
    trainer.train()
    for step in (3, 4):
        again = Trainer(model=tiny_llama(3), args=arguments(tmp_path / "b", **settings), train_dataset=Stream(data))
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert difference(weights(again.model), weights(trainer.model)) == 0


def test_a_stream_needs_a_length(tmp_path):
    with pytest.raises(ValueError, match="max_steps"):
        Trainer(model=tiny_llama(), args=arguments(tmp_path, num_train_epochs=1), train_dataset=Stream(rows(3)))


def test_a_stream_may_tell_its_length(tmp_path):
    class Sized(Stream):
        def __len__(self):
            return len(self.samples)

    args = arguments(tmp_path, num_train_epochs=2, gradient_accumulation_steps=2)
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=Sized(rows(11)))
    trainer.train()
    assert trainer.state.global_step == 6 and trainer.state.epoch == 2


def test_a_stream_that_ends_for_ever_is_told(tmp_path):
    class Once(torch.utils.data.IterableDataset):
        def __init__(self):
            self.left = iter(rows(4))

        def __iter__(self):
            return self.left

    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path, max_steps=5), train_dataset=Once())
    with pytest.raises(DataError, match="after 2 of 5 steps"):
        trainer.train()


def test_a_loader_of_the_users_own(tmp_path):
    data = rows(11, uneven=True)

    class Own(Trainer):
        def get_train_dataloader(self):
            return DataLoader(data, batch_size=2, collate_fn=default_data_collator)

    model, truth = tiny_llama(dtype=torch.float64), tiny_llama(dtype=torch.float64)
    trainer = Own(
        model=model, args=arguments(tmp_path, gradient_accumulation_steps=2, num_train_epochs=2), train_dataset=data
    )
    trainer.train()
    true_run(truth, cut(data, 4) * 2)
    assert trainer.state.global_step == 6 and trainer.state.epoch == 2
    assert difference(weights(model), weights(truth)) < 1e-12


@pytest.mark.parametrize("workers", [0, 2])
def test_a_table_with_columns_that_the_model_does_not_take(workers, tmp_path):
    data = rows(10, uneven=True)
    table = Dataset.from_list([{name: column.tolist() for name, column in row.items()} | {"note": "x"} for row in data])
    truth = tiny_llama()
    args = arguments(tmp_path, num_train_epochs=1, per_device_train_batch_size=4, dataloader_num_workers=workers)
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=table)
    trainer.train()
    losses = true_run(truth, cut(data, 4))
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)


def test_tokens_are_counted(tmp_path):
    data = [{**row, "attention_mask": torch.ones(8, dtype=torch.int64)} for row in rows(5)]
    data[0]["attention_mask"][6:] = 0
    for kind, wanted in (("all", 40), ("non_padding", 38)):
        args = arguments(tmp_path, num_train_epochs=1, include_num_input_tokens_seen=kind)
        trainer = Trainer(model=tiny_llama(), args=args, train_dataset=data)
        trainer.train()
        assert trainer.state.num_input_tokens_seen == wanted


def test_epochs_may_be_parts(tmp_path):
    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path, num_train_epochs=1.5), train_dataset=rows(8))
    trainer.train()
    assert trainer.state.global_step == 6 and trainer.state.epoch == 1.5


def test_another_batch_size_goes_on_with_the_next_sample(tmp_path):
    """From windows of 4 to windows of 6, in the middle of 16 samples."""
    data = rows(16, uneven=True)
    settings = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 2}
    Trainer(
        model=tiny_llama(dtype=torch.float64),
        args=arguments(tmp_path, gradient_accumulation_steps=2, **settings),
        train_dataset=data,
    ).train()
    again = Trainer(
        model=tiny_llama(dtype=torch.float64),
        args=arguments(tmp_path / "b", gradient_accumulation_steps=3, **settings),
        train_dataset=data,
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    truth = tiny_llama(dtype=torch.float64)
    true_run(truth, [data[:4], data[4:8], data[8:14], data[14:]])
    assert again.state.global_step == 4
    assert difference(weights(again.model), weights(truth)) < 1e-12

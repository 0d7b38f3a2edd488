"""Sharded checkpoints: written by some ranks, read by others, bit for bit; in the background; failures on one rank."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samestep.errors import CheckpointError
from samestep.launch import run_ranks
from samestep.parallel.mesh import Mesh, join
from samestep.plan import Layout, resolve_layout
from samestep.run import checkpoint, storage
from samestep.run.setup import build_model, load_updater, load_weights, stored_weights
from samestep.run.trainer import Events, Trainer
from samestep.step.schedule import make_schedule
from samestep.step.update import Updater

pytestmark = pytest.mark.usefixtures("workers")

CPU = torch.device("cpu")
SHAPES = [(1,), (3,), (5,), (33,), (5, 3), (33, 7), (1, 4), (4, 2, 3), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]
LAYOUTS = {"replicate": (4, 1), "fsdp": (1, 4), "hsdp": (2, 2)}
"""Name -> degrees of replicate and shard."""


def wholes() -> dict[str, torch.Tensor]:
    """What is in every checkpoint here."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"layers.{'x'.join(map(str, shape))}.{str(dtype)[6:]}": (torch.randn(shape, generator=generator) * 99).to(dtype)
        for shape in SHAPES
        for dtype in DTYPES
    }
    return {**tensors, "count": torch.tensor(3.0), "number.steps": torch.tensor(2**60 + 1)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def make_mesh(replicate: int, shard: int) -> Mesh:
    world = join(timeout=60)
    return Mesh(Layout(world.size, world.size, replicate, shard, 1, 1, 1), world, CPU)


def spread(tensors: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Tensors laid over the shard axis of the mesh by PyTorch; single numbers are on every rank."""
    if mesh.weights is None:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    placements = [Replicate()] * (mesh.weights.ndim - 1) + [Shard(0)]
    return {
        name: distribute_tensor(tensor, mesh.weights, placements, src_data_rank=None) if tensor.ndim else tensor.clone()
        for name, tensor in tensors.items()
    }


def save(root: Path, step: int, mesh: Mesh, **changes) -> Path:
    tensors = spread(wholes(), mesh)
    arguments = {"model": tensors, "optimizer": tensors, "state": {"run": step}, "texts": {"a.txt": "b"}, "keep": 9}
    return checkpoint.save(root, step, **(arguments | changes), mesh=mesh)


def content(file: Path) -> tuple[dict, bytes]:
    """Header and tensors of a safetensors file, which writes the keys of its header in any order."""
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    return json.loads(whole[8:end]), whole[end:].rstrip()


def refuse(*_, **__):
    raise AssertionError("a pickle was read")


# ---- on some ranks, off others


def save_on_all_layouts(root: Path) -> None:
    for name, degrees in LAYOUTS.items():
        mesh = make_mesh(*degrees)
        save(root / name, 1, mesh)
        saver = checkpoint.Saver(root / "later" / name, mesh, keep=9, in_background=True, on_saved=lambda *_: None)
        tensors = spread(wholes(), mesh)
        saver.save(1, model=tensors, optimizer=tensors, state={"run": 1}, texts={"a.txt": "b"})
        for tensor in tensors.values():
            tensor.fill_(0)  # as training would
        saver.wait()


def wrong_tensors(root: Path, shard: int) -> list[str]:
    """Read all checkpoints, into tensors laid over this many ranks; names of those that are not what was saved."""
    mesh = make_mesh(1, shard)
    pickle.load = pickle.loads = torch.load = refuse
    wrong, truth = [], wholes()
    for name in LAYOUTS:
        loaded = checkpoint.open_checkpoint(root / name / "step-00000001")
        for part in ("model", "optimizer"):
            targets = spread({name: torch.full_like(tensor, 77) for name, tensor in truth.items()}, mesh)
            loaded.read(part, targets)
            for key, tensor in targets.items():
                whole = tensor if mesh.weights is None or not tensor.ndim else tensor.full_tensor()
                if not same(whole, truth[key]):
                    wrong.append(f"{name} {part} {key}")
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_on_all_layouts, 4, root)
    return root


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_saved_on_four_ranks_and_read_on_fewer(ranks, saved):
    assert run_ranks(wrong_tensors, ranks, saved, ranks) == [[]] * ranks


def test_every_rank_writes_about_its_share_of_the_weights(saved):
    for name in LAYOUTS:
        files = sorted((saved / name / "step-00000001" / "model").iterdir())
        assert [file.name[:12] for file in files] == [f"shard-0000{rank}-" for rank in (1, 2, 3, 4)]
        content = sum(tensor.numel() * tensor.element_size() for tensor in wholes().values())
        names = len(wholes()) * 250  # bytes of a header
        assert sum(file.stat().st_size for file in files) < content + 4 * names


def test_names_and_shapes_are_known_without_reading(saved):
    loaded = checkpoint.open_checkpoint(saved / "fsdp" / "step-00000001")
    wanted = {name: storage.Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in wholes().items()}
    assert loaded.model == loaded.optimizer == wanted
    assert loaded.state == {"format": checkpoint.FORMAT, "run": 1}


@pytest.mark.parametrize("name", LAYOUTS)
def test_written_in_the_background_it_has_the_same_content(name, saved):
    now, later = saved / name / "step-00000001", saved / "later" / name / "step-00000001"
    files = sorted(file.relative_to(now) for file in now.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(later) for file in later.rglob("*") if file.is_file())
    assert (now / "state.json").read_bytes() == (later / "state.json").read_bytes()
    assert all(content(now / file) == content(later / file) for file in files if file.suffix == ".safetensors")


def test_any_flipped_bit_is_found(saved, tmp_path):
    folder = tmp_path / "step-00000001"
    shutil.copytree(saved / "hsdp" / "step-00000001", folder)
    checkpoint.verify(folder)
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != storage.MARKER]
    assert len(files) == 4 + 4 + 2
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"{file.relative_to(folder)} is corrupted"):
            checkpoint.verify(folder)
        file.write_bytes(content)
    shutil.copy(files[0], folder / "model" / "shard-00009-model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"shard-00009.* is not in complete.json"):
        checkpoint.verify(folder)


def test_what_does_not_fit_is_refused(saved):
    loaded = checkpoint.open_checkpoint(saved / "fsdp" / "step-00000001")
    with pytest.raises(CheckpointError, match=r"(?s)fsdp.*model could not be read.*\[33, 7\].*\[33, 8\]"):
        loaded.read("model", {"layers.33x7.float32": torch.zeros(33, 8)})
    with pytest.raises(CheckpointError, match="nowhere"):
        loaded.read("model", {"nowhere": torch.zeros(1)})


def test_another_format_is_refused(tmp_path):
    folder = save(tmp_path, 1, Mesh.alone())
    (folder / checkpoint.STATE_FILE).write_text(json.dumps({"format": 2}))
    with pytest.raises(CheckpointError, match=r"has format 2, but this version reads 3\n  fix: "):
        checkpoint.open_checkpoint(folder)


# ---- failures


def fail_on_one_rank(root: Path, rank: int, in_background: bool) -> str:
    mesh = make_mesh(1, 2)
    save(root, 1, mesh)
    if mesh.world.rank == rank:
        HuggingFaceStorageWriter.write_data = no_space
    if not in_background:
        with pytest.raises(CheckpointError) as caught:
            save(root, 2, mesh)
        return str(caught.value)
    told = []
    saver = checkpoint.Saver(root, mesh, keep=1, in_background=True, on_saved=lambda *saved: told.append(saved))
    tensors = spread(wholes(), mesh)
    saver.save(2, model=tensors, optimizer=None, state={}, texts={})
    with pytest.raises(CheckpointError) as caught:
        saver.save(3, model=tensors, optimizer=None, state={}, texts={})
    saver.poll()  # it was raised once
    assert told == []
    return str(caught.value)


def no_space(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_write_fails_all(rank, in_background, tmp_path):
    messages = run_ranks(fail_on_one_rank, 2, tmp_path, rank, in_background)
    assert messages[0] == messages[1]
    assert f"rank {rank}: [Errno 28] No space left on device" in messages[0]
    assert "step-00000002 could not be written" in messages[0] and "fix:" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoint.verify(tmp_path / "step-00000001")


# ---- random states


def states_come_back() -> None:
    mesh = make_mesh(2, 1)
    torch.manual_seed(mesh.world.rank)
    states = json.loads(json.dumps(mesh.gather(checkpoint.random_states())))
    wanted = torch.rand(3)
    checkpoint.set_random_states(states, mesh.world)
    assert torch.equal(torch.rand(3), wanted)
    before = torch.get_rng_state()
    checkpoint.set_random_states(states[:1], mesh.world)
    checkpoint.set_random_states(states * 2, mesh.world)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_rank_has_its_random_states_back():
    run_ranks(states_come_back, 2)


# ---- optimizers

OPTIMIZERS = [
    ("optimizer.type=AdamW",),
    ("model.params_dtype=bfloat16", "model.embedding_params_dtype=float32"),
    (
        "model.params_dtype=bfloat16",
        "optimizer.master_weights=stochastic_rounding",
        "optimizer.state_dtype=bfloat16",
    ),
    ("optimizer.type=SGD",),
    ("optimizer.type=Muon",),
]


def updated(updater: Updater, mesh: Mesh, seed: int) -> None:
    """Take a step with gradients that are the same however they are split."""
    generator = torch.Generator().manual_seed(seed)
    gradients = {n: torch.randn(p.shape, generator=generator) for n, p in sorted(updater.parameters.items())}
    updater.apply(spread(gradients, mesh), torch.ones((), dtype=torch.float64), torch.tensor(False))
    updater.updates += 1


def built(config, mesh: Mesh):
    model = build_model(config, 65, mesh)
    schedule = make_schedule(config.lr_scheduler, 9)
    return model, Updater(model.named_parameters(), config.optimizer, schedule, model.stored_dtype)


def gathered(model, updater: Updater) -> dict[str, torch.Tensor]:
    tensors = {**{f"weight.{name}": tensor for name, tensor in stored_weights(model).items()}, **updater.state()}
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in tensors.items()}


def save_and_go_on(config, root: Path, with_tensors: bool) -> dict[str, torch.Tensor]:
    """Save after a step, take a second; do that again from the checkpoint. What was saved, whole."""
    world = join(timeout=60)
    mesh = Mesh(resolve_layout(config.parallelism, world.size), world, CPU)
    model, updater = built(config, mesh)
    updated(updater, mesh, 1)
    told = gathered(model, updater)
    state = {"run": {"updates": 1}}
    weights = stored_weights(model)
    folder = checkpoint.save(
        root, 1, model=weights, optimizer=updater.state(), state=state, texts={}, keep=1, mesh=mesh
    )
    updated(updater, mesh, 2)
    wanted = gathered(model, updater)
    model, updater = built(config, mesh)
    loaded = checkpoint.open_checkpoint(folder)
    load_weights(model, loaded)
    load_updater(updater, loaded)
    updated(updater, mesh, 2)
    found = gathered(model, updater)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not same(found[name], wanted[name])] == []
    return told if with_tensors else {}


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=lambda settings: ",".join(settings))
def test_a_sharded_optimizer_goes_on_to_the_same_bits_and_alone(settings, tiny, tmp_path):
    config = tiny(*settings, "parallelism.data_parallel_shard=-1")
    wanted = run_ranks(save_and_go_on, 2, config, tmp_path, True)[0]
    model, updater = built(config, Mesh.alone())
    loaded = checkpoint.open_checkpoint(tmp_path / "step-00000001")
    load_weights(model, loaded)
    load_updater(updater, loaded)
    found = gathered(model, updater)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not same(found[name], wanted[name])] == []
    updated(updater, Mesh.alone(), 2)
    model, updater = built(config, Mesh.alone())
    updated(updater, Mesh.alone(), 1)
    for name, tensor in gathered(model, updater).items():  # the same roundings, but for a last bit in float32
        assert tensor.dtype != torch.bfloat16 or (tensor == wanted[name]).float().mean() > 0.99, name


# ---- a run that saves in the background


class Watch(Events):
    def __init__(self):
        self.paths = []

    def on_save(self, trainer, path):
        self.paths.append(path.name)
        checkpoint.verify(path)


def test_a_run_that_saves_in_the_background_saves_the_same(tiny, tmp_path):
    often = ("checkpoint.save_interleaved_steps=2", "checkpoint.save_max=3")
    names = [f"step-0000000{step}" for step in (2, 4, 6, 8)]
    for kind in ("false", "true"):
        watch = Watch()
        fields = (*often, f"checkpoint.async_save={kind}", f"output_dir={tmp_path / kind}")
        Trainer(tiny(*fields), listeners=[watch]).train()
        assert watch.paths == names
        assert sorted(path.name for path in (tmp_path / kind / "checkpoints").iterdir()) == names[1:]
    for file in (tmp_path / "false" / "checkpoints").rglob("*.safetensors"):
        assert content(file) == content(tmp_path / "true" / file.relative_to(tmp_path / "false"))
    events = map(json.loads, (tmp_path / "true" / "events.jsonl").read_text().splitlines())
    assert [row["step"] for row in events if row["event"] == "checkpoint"] == [2, 4, 6, 8]


def test_a_failure_in_the_background_ends_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_inventory", no_space)
    config = tiny("checkpoint.async_save=true", "training.steps=2")
    with pytest.raises(CheckpointError, match="No space left on device"):
        Trainer(config, listeners=[]).train()


def test_a_write_does_not_hold_up_training(tmp_path):
    """The thread waits for what happens only after `save` has returned."""
    gate = tmp_path / "gate"

    class Slow(dict):
        def items(self):
            while not gate.exists():
                pass
            return super().items()

    told = []
    saver = checkpoint.Saver(
        tmp_path / "root", Mesh.alone(), keep=1, in_background=True, on_saved=lambda *saved: told.append(saved)
    )
    saver.save(1, model={"a": torch.ones(2)}, optimizer=None, state={}, texts=Slow(a="b"), best=checkpoint.Best(1, 0.5))
    saver.poll()
    assert told == []
    gate.touch()
    saver.wait()
    assert told == [(1, tmp_path / "root" / "step-00000001", True)]

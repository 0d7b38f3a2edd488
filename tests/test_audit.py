"""The dtype audit: what hooks see is what the configuration says, for any mix of dtypes, or the run says so."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import TINY
from test_recompute import batch_of

from samestep.config.load import from_dict
from samestep.config.schema import Config
from samestep.dtypes import expected_dtypes, kind_of, takes_int8
from samestep.errors import TrainingError
from samestep.launch import run_ranks
from samestep.length import in_steps
from samestep.model.decoder import Decoder
from samestep.ops import has_native_matmul, parse_dtype
from samestep.ops.gradient_sink import GradientSink
from samestep.parallel.mesh import Mesh, join
from samestep.run.audit import DtypeAudit, Observer, on_device, seen_compute
from samestep.run.setup import build_model, build_step
from samestep.run.trainer import Events, Trainer
from samestep.step.update import Updater

pytestmark = pytest.mark.usefixtures("workers")

NAMES = ("float32", "bfloat16", "float16")
FIELDS = ("params", "compute", "layernorm_compute", "softmax_compute", "rotary", "embedding_params")
KINDS = {
    "hidden states": "compute",
    "norm": "layernorm_compute",
    "attention products": "compute",
    "rotary": "rotary",
    "attention softmax": "softmax_compute",
    "mlp": "compute",
    "head": "compute",
}
"""Kinds of modules -> the field that decides what they compute in."""


PAIRS = (
    "000000", "011111", "022222", "100112", "111220", "122001", "201021", "212102", "220210",
    "002211", "010022", "021100", "101202", "112010", "120121", "202120", "210201", "221012",
)  # fmt: skip
"""An orthogonal array (Taguchi's L18): in every two columns each pair of levels occurs twice."""


def combinations(count: int) -> list[tuple[str, ...]]:
    """Each field in each dtype, the others in float32; then every two fields in all nine ways."""
    single = [tuple(dtype if i == at else "float32" for i in range(count)) for at in range(count) for dtype in NAMES]
    return list(dict.fromkeys([*single, *(tuple(NAMES[int(level)] for level in row[:count]) for row in PAIRS)]))


def test_every_two_fields_meet_in_all_ways():
    for count in (5, 6):
        rows = combinations(count)
        for first, second in itertools.combinations(range(count), 2):
            assert len({(row[first], row[second]) for row in rows}) == 9


def config_of(family: str, **dtypes: str) -> Config:
    model = {**TINY["model"], "model_type": family, "num_hidden_layers": 1, "vocab_size": 61}
    if family == "gpt2":
        del model["num_key_value_heads"]
    model |= {f"{name}_dtype": dtype for name, dtype in dtypes.items()}
    return from_dict({"train_dataset": {"path": "x.txt"}, "model": model}).config


def build(config: Config) -> Decoder:
    """With random weights for norms and biases: ones and zeros are numbers of every dtype."""
    model = build_model(config, 61, Mesh.alone()).train()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=draw))
    return model


def observe(config: Config, model: Decoder) -> Observer:
    observer = Observer(model, operators=True)
    with observer.watching():
        loss = model.losses(batch_of(9, 5), 0.0)[0]
    loss.backward()
    return observer


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_hooks_see_is_what_the_configuration_says(family: str):
    fields = FIELDS if family == "llama" else tuple(field for field in FIELDS if field != "rotary")
    for row in combinations(len(fields)):
        given = dict(zip(fields, row, strict=True))
        config = config_of(family, **given)
        model = build(config)
        seen = observe(config, model)
        table = on_device(expected_dtypes(config, model.spec, 1), torch.device("cpu"), torch.float32)
        assert {r.kind for r in table} == {"embedding", "loss", *KINDS} - (set() if family == "llama" else {"rotary"})
        for entry in table:
            seen_compute(entry, seen)
            wanted = given[KINDS[entry.kind]] if entry.kind in KINDS else "float32"
            common = frozenset.intersection(*(found.dtypes for found in seen.compute[entry.kind].values()))
            assert parse_dtype(wanted) in common, (given, entry.kind)
            stored = "float32"
            if entry.weights:
                tables = entry.kind == "embedding" or (entry.kind == "head" and family == "gpt2")
                stored = given["embedding_params" if tables else "params"]
                assert entry.weights == stored
                assert seen.weights[entry.kind] == {parse_dtype(stored)}
            # Two settings come to the same operations only where no weight is left to be rounded.
            assert len(common) == 1 or stored != "float32", (given, entry.kind)
            if entry.kind in ("attention products", "mlp", "head"):
                compute = parse_dtype(given["compute"])
                upcast = not has_native_matmul(compute, "cpu") or (entry.kind == "head" and compute is not BF16)
                assert seen.products[entry.kind] == {torch.float32 if upcast else compute}


BF16 = torch.bfloat16


def patch(kind: str, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one operator of a model in float32 compute in bfloat16."""
    layer = model.layers["0"]
    if kind == "norm":
        model.norm.compute_dtype = BF16
    elif kind == "attention products":
        layer.self_attn.o_proj.compute_dtype = BF16
    elif kind == "mlp":
        layer.mlp.down_proj.compute_dtype = BF16
    elif kind == "attention softmax":
        layer.self_attn.attention_core.softmax_dtype = BF16
    elif kind == "rotary":
        model.rope_cos, model.rope_sin = model.rope_cos.to(BF16), model.rope_sin.to(BF16)
    elif kind == "head":
        model.loss_head.precision = model.precision.raised(BF16)
    elif kind == "embedding":
        monkeypatch.setattr(model, "_rows", lambda table, ids: F.embedding(ids, table.weight.to(BF16)))
    elif kind == "hidden states":
        layer.mlp.register_forward_hook(lambda module, inputs, result: result.to(BF16))
        layer.forward = lambda x, context, forward=layer.forward: forward(x, context).to(BF16)


@pytest.mark.parametrize("kind", ["embedding", *KINDS])
def test_an_operator_in_another_dtype_is_found(kind: str, monkeypatch: pytest.MonkeyPatch):
    config = config_of("llama", compute="float32")
    config = from_dict(config.model_dump(), ["model.num_hidden_layers=2"]).config
    model = build(config)
    patch(kind, model, monkeypatch)
    seen = observe(config, model)
    wrong = {}
    for row in expected_dtypes(config, model.spec, 1):
        try:
            seen_compute(row, seen)
        except TrainingError as error:
            wrong[row.kind] = str(error)
    assert kind in wrong
    assert f"{kind}: compute should be float32, but the first step used bfloat16 (" in wrong[kind]


def test_a_kernel_that_runs_the_softmax_itself_is_told_by_its_sums():
    """The fused kernel takes bfloat16 and has float32 inside; the twin rounds the scores."""
    for softmax in ("float32", "bfloat16"):
        config = config_of("llama", compute="bfloat16", softmax_compute=softmax)
        seen = observe(config, build(config)).compute["attention softmax"]
        assert set(seen) == {frozenset({parse_dtype(softmax)})}


# ---- in a run


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == kind]


@pytest.mark.parametrize("extra", [(), ("recompute.mode=full", "training.micro_batch=packed")])
def test_a_run_logs_what_its_first_step_used(extra, tiny, tmp_path):
    low = ("model.compute_dtype=bfloat16", "model.params_dtype=bfloat16", "optimizer.state_dtype=bfloat16")
    trainer = Trainer(tiny("training.steps=2", "monitor.watch_steps=1", *low, *extra))
    objective = trainer.step.objective
    trainer.train()
    (event,) = events(tmp_path / "run", "dtype_audit")
    assert event["step"] == 1
    assert event["compute_not_seen"] == []
    planned = json.loads((tmp_path / "run" / "plan.json").read_text())["dtypes"]
    assert event["kinds"] == planned
    mlp = next(row for row in planned if row["kind"] == "mlp")
    assert mlp["products"] == (None if has_native_matmul(torch.bfloat16, "cpu") else "float32")
    assert [mlp[name] for name in ("weights", "gradients", "reduction", "masters", "state")] == [
        "bfloat16", "float32", None, "float32", "bfloat16"
    ]  # fmt: skip
    assert trainer.step.objective is objective
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())


def test_a_run_warns_of_a_difference(tiny, tmp_path, capsys):
    trainer = Trainer(tiny())
    trainer.model.layers["1"].mlp.down_proj.compute_dtype = BF16
    trainer.train()
    (event,) = events(tmp_path / "run", "dtype_audit")
    assert re.search(r"mlp: compute should be float32.*layers\.1\.mlp\.down_proj", event["difference"])


def test_sums_of_gradients_in_another_dtype_are_a_difference(tiny, tmp_path):
    trainer = Trainer(tiny())
    trainer.step.sink = GradientSink(trainer.model.named_parameters(), torch.float64)
    trainer.train()
    (event,) = events(tmp_path / "run", "dtype_audit")
    assert re.search(r"accumulation of gradients should be float32, but .* used float64", event["difference"])


def test_float8_is_seen_in_the_layers_and_not_in_the_head():
    pytest.importorskip("torchao")
    config = config_of("llama", compute="float8")
    model = build(config)
    seen = observe(config, model)
    table = on_device(expected_dtypes(config, model.spec, 1), torch.device("cpu"), torch.float32)
    for row in table:
        assert seen_compute(row, seen) == row.compute
        assert seen.compute[row.kind]
    wanted = {"attention products": torch.float8_e4m3fn, "mlp": torch.float8_e4m3fn, "head": torch.float32}
    assert dict(seen.products) == {kind: {dtype} for kind, dtype in wanted.items()}
    assert {row.kind: row.products for row in table if row.kind in wanted} == {
        "attention products": "float8", "mlp": "float8", "head": "float32"
    }  # fmt: skip


# ---- state in eight bits


def audit_of_int8(state: str) -> tuple[DtypeAudit, Updater]:
    """An audit that expects state in int8, and an updater with state in another dtype, after a step."""
    wide = from_dict(config_of("llama", compute="float32").model_dump(), ["model.hidden_size=64"]).config
    expected, used = (
        from_dict(wide.model_dump(), [f"optimizer.state_dtype={name}"]).config for name in ("int8", state)
    )
    model = build(wide)
    step = build_step(in_steps(used, 2), model, Mesh.alone(), "once_per_step")
    step([batch_of(9, 5)])
    table = expected_dtypes(expected, model.spec, 1)
    states = {row.kind: row.state for row in table if row.state}
    # 64 x 64 numbers of queries are in int8; 48 x 64 and fewer cannot be.
    assert states == dict.fromkeys(("embedding", "norm", "mlp", "head"), "float32") | {"attention products": "int8"}
    return DtypeAudit(on_device(table, model.device, torch.float32), model, ranks=1, is_compiled=False), step.updater


def test_only_small_state_may_be_wider_than_int8():
    audit, updater = audit_of_int8("float32")
    with pytest.raises(TrainingError, match=r"attention products: optimizer state should be int8, .* used float32"):
        audit.check(updater)
    assert takes_int8(64 * 64) and not takes_int8(64 * 63) and not takes_int8(64 * 64 + 64)


def test_int8_state_is_what_it_should_be():
    pytest.importorskip("torchao")
    audit, updater = audit_of_int8("int8")
    audit.check(updater)
    weight = updater.trained("layers.0.self_attn.q_proj.weight")
    updater.optimizer.state[weight]["exp_avg"] = torch.zeros(64, 64)
    with pytest.raises(TrainingError, match=r"optimizer state should be int8, .* used float32 or int8"):
        audit.check(updater)


# ---- what listeners send


class Talks(Events):
    """Sums tensors of its own over the ranks, in a dtype that no gradient is summed in."""

    def on_micro_batch(self, *_) -> None:
        dist.all_reduce(torch.ones(99, dtype=torch.float64))

    def on_gradients(self, *_) -> None:
        dist.all_reduce(torch.ones(99, dtype=torch.float64))


def run_with_a_listener(config: Config) -> None:
    join(timeout=30)
    Trainer(config, listeners=[Talks()]).train()


@pytest.mark.parametrize("shard", [1, 2])
def test_what_listeners_send_is_not_taken_for_gradients(shard, tiny, tmp_path):
    config = tiny("training.steps=2", f"parallelism.data_parallel_shard={shard}", "checkpoint.enable_save=false")
    run_ranks(run_with_a_listener, 2, config, timeout=60)
    (event,) = events(tmp_path / "run", "dtype_audit")
    assert event["sent"] == ["float32"]


def test_kinds_of_names():
    names = {
        "embed_positions.weight": "embedding",
        "layers.3.self_attn.q_norm.weight": "q/k norm",
        "layers.3.post_attention_layernorm": "norm",
        "layers.3.self_attn.attention_core": "attention products",
        "layers.3.self_attn": None,
        "layers.3": None,
        "layers.12.mlp.gate_proj.weight": "mlp",
        "norm.bias": "norm",
        "loss_head.weight": "head",
    }
    assert {name: kind_of(name) for name in names} == names

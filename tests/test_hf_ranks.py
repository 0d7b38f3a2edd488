"""Objectives of Hugging Face models on two ranks, replicated and sharded: the step of one process."""

from __future__ import annotations

import pickle

import pytest
import torch
from hf_models import (
    CASES,
    SMOOTHING,
    adapters,
    causal,
    error,
    llama,
    micro_batches,
    mixtral,
    one_step,
    smoothed,
    texts,
    truth,
    truth_of_mixture,
    with_labels,
)
from test_hf_objectives import Foreign, MyTrainer, foreign, of_outputs, of_shifted_outputs, over_targets
from torch.distributed.fsdp import fully_shard

from samestep.errors import ConfigError
from samestep.hf.heads import unwrapped
from samestep.hf.objectives import objective_for
from samestep.launch import run_ranks
from samestep.parallel.data import add_up, whole
from samestep.parallel.mesh import Mesh, join
from samestep.plan import Layout

pytestmark = pytest.mark.usefixtures("workers")


def mesh_of(shards: int) -> Mesh:
    world = join(timeout=60)
    return Mesh(Layout(world.size, world.size, world.size // shards, shards, 1, 1, 1), world, torch.device("cpu"))


def own_batches(samples, rank: int):
    """Three micro-batches of a global batch: two for the first rank; one for the second, and an empty one."""
    batches = micro_batches(samples, 3)
    return batches[:2] if rank == 0 else [batches[2], batches[2].empty()]


def skewed():
    """D7: the last rows, those of the second rank, have 1 to 4 targets; the others up to 18."""
    return with_labels(texts(), keep=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.1))


def error_on_ranks(model, samples, wanted, mesh, **options) -> float:
    report, found = one_step(model, objective_for(model, **options), own_batches(samples, mesh.world.rank), mesh)
    assert report.samples == len(samples)
    return error({name: whole(gradient) for name, gradient in found.items()}, wanted)


USERS = {
    "function": {"compute_loss_func": of_shifted_outputs},
    "override, scaled": {"compute_loss": MyTrainer().scaled, "loss_is_scaled_for_ga": True},
    "override, not said": {"compute_loss": MyTrainer().scaled},
    "override, mean": {"compute_loss": MyTrainer().mean, "loss_is_scaled_for_ga": False},
}
"""Losses of the user's own for a causal language model."""

HEADS = ("masked", "tokens", "class of a decoder", "classes", "number", "answer", "t5", "bart")


def truths() -> dict[str, dict[str, torch.Tensor]]:
    found = {name: truth(make(), data(), terms)[1] for name, (make, data, terms) in CASES.items() if name in HEADS}
    found["causal"] = truth(llama(), skewed(), causal)[1]
    found["smoothed"] = truth(llama(), skewed(), smoothed)[1]
    found["adapters"] = truth(adapters(), skewed(), causal)[1]
    found["tied"] = truth(llama(tie_word_embeddings=True), skewed(), causal)[1]
    found["balance"] = truth_of_mixture(mixtral(), skewed())[1]
    found["unknown"] = truth(Foreign(over_targets), skewed(), foreign)[1]
    return found


def replicated(wanted) -> dict[str, float]:
    """Name -> error of the gradients, as this rank has them."""
    mesh, samples = mesh_of(1), skewed()
    errors = {name: error_on_ranks(CASES[name][0](), CASES[name][1](), wanted[name], mesh) for name in HEADS}
    errors["causal"] = error_on_ranks(llama(), samples, wanted["causal"], mesh)
    options = {"label_smoothing_factor": SMOOTHING}
    errors["smoothed"] = error_on_ranks(llama(), samples, wanted["smoothed"], mesh, **options)
    errors["adapters"] = error_on_ranks(adapters(), samples, wanted["adapters"], mesh)
    errors["balance"] = error_on_ranks(mixtral(), samples, wanted["balance"], mesh)
    errors["unknown"] = error_on_ranks(Foreign(over_targets), samples, wanted["unknown"], mesh)
    for name, options in USERS.items():
        errors[name] = error_on_ranks(llama(), samples, wanted["causal"], mesh, **options)
    make, data, _ = CASES["class of a decoder"]
    options = {"compute_loss_func": of_outputs}
    errors["function of classes"] = error_on_ranks(make(), data(), wanted["class of a decoder"], mesh, **options)
    return errors


def sharded(wanted) -> dict[str, float]:
    mesh, errors, samples = mesh_of(2), {}, skewed()
    cases = {
        "causal": (llama, {}),
        "tied": (lambda: llama(tie_word_embeddings=True), {}),
        "balance": (mixtral, {}),
        "smoothed": (llama, {"label_smoothing_factor": SMOOTHING}),
        "adapters": (adapters, {}),
        **{name: (llama, options) for name, options in USERS.items() if name in ("function", "override, not said")},
    }
    for name, (make, options) in cases.items():
        model = make()
        for layer in unwrapped(model).model.layers:
            fully_shard(layer, mesh=mesh.weights)
        fully_shard(model, mesh=mesh.weights, reshard_after_forward=name != "causal")
        add_up(model)
        errors[f"{name}, sharded"] = error_on_ranks(model, samples, wanted.get(name, wanted["causal"]), mesh, **options)
        objective = objective_for(model)
        one_step(model, objective, own_batches(samples, mesh.world.rank), mesh)
        assert not objective.has_logits
    return errors


def message_of_a_mean() -> str:
    """The second rank has no targets, and cannot see that the loss is a mean."""
    mesh, model = mesh_of(1), llama()
    first, second = micro_batches(skewed(), 4)
    own = [first] if mesh.world.rank == 0 else [second.empty()]
    try:
        one_step(model, objective_for(model, compute_loss=MyTrainer().mean), own, mesh)
    except ConfigError as error:
        return str(error)
    return ""


def work(sent: bytes):
    wanted = pickle.loads(sent)
    return replicated(wanted) | sharded(wanted), message_of_a_mean()


def test_two_ranks_take_the_step_of_one():
    sent = pickle.dumps(truths())  # tensors by themselves would be sent as open files, more than a process may hand on
    for errors, message in run_ranks(work, 2, sent, timeout=120):
        assert {name: value for name, value in errors.items() if not value <= 1e-6} == {}
        assert "should be divided by num_items_in_batch" in message

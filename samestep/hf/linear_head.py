"""The loss of a causal language model from the inputs of its head, so that logits never exist at full size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.ops import linear_cross_entropy
from samestep.ops.precision import wide


def plain_head(model: Any) -> nn.Linear | None:
    """The layer that makes the logits of a model, if it is no more than a product with a matrix.

    Args:
        model: without wrappers.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and head.bias is None:
        return head
    return None


def gives_its_outputs(run: Callable[[], Any], head: nn.Linear, shape: torch.Size) -> bool:
    """Whether the logits that a model gives are what its head gives, for every position once and nothing done to them:
    not capped, scaled, rounded or cut.

    Args:
        run: one pass of the model.
        shape: of its targets.
    """
    calls = []

    def known(hidden: Tensor, weight: Tensor) -> Tensor:
        ladder = torch.linspace(-999.9, 999.9, 64, dtype=wide(hidden.dtype), device=hidden.device)
        calls.append((hidden.shape[:-1], ladder.view(1, 1, -1)))
        return calls[-1][1]

    with torch.no_grad(), _replaced(head, known):
        outputs = run()
    logits = outputs.get("logits") if isinstance(outputs, dict) else None
    if len(calls) != 1 or not isinstance(logits, Tensor):
        return False
    seen, ladder = calls[0]
    return seen == shape and logits.dtype == ladder.dtype and torch.equal(logits, ladder)


def cross_entropy_by(run: Callable[[], Any], head: nn.Linear, targets: Tensor, smoothing: float) -> tuple[Tensor, Any]:
    """Sum of the cross-entropy over the targets, and the outputs of the model, whose logits are that sum.

    The sum is formed while the head would run, where its weight is whole on every layout, and takes the place of the
    logits: whatever waits for the model's outputs to get gradients, such as FSDP, sees it.

    Args:
        run: one pass of the model, of which `gives_its_outputs` is true.
        targets: int64 [B, S]; -100 does not count.
    """

    def summed(hidden: Tensor, weight: Tensor) -> Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        compute = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        with torch.autocast(device, enabled=False):
            total, _, _ = linear_cross_entropy(
                hidden.flatten(0, -2),
                weight,
                targets.flatten(),
                compute_dtype=compute,
                label_smoothing=smoothing,
                loss_dtype=wide(hidden.dtype),
            )
        return total.expand(1, 1, 1).clone()  # FSDP warns of views

    with _replaced(head, summed):
        outputs = run()
    return outputs["logits"].sum(), outputs


@contextmanager
def _replaced(head: nn.Linear, function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """The head gives `function(its input, its weight)`, and multiplies no more than one position."""
    inputs: list[Tensor] = []

    def shrink(module: nn.Module, arguments: Any) -> Any:
        if not arguments or arguments[0].ndim != 3:
            return None
        inputs.append(arguments[0])
        return (arguments[0][:1, :1], *arguments[1:])

    def replace(module: nn.Linear, arguments: Any, output: Tensor) -> Tensor:
        return function(inputs.pop(), module.weight) if inputs else output

    hooks = [head.register_forward_pre_hook(shrink), head.register_forward_hook(replace)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

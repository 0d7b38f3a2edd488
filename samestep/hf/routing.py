"""The load-balancing loss of mixtures of experts, over the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samestep.ops.precision import wide

TERM = "aux_loss"


class BalanceLoss:
    """How evenly the tokens are spread over the experts (Fedus et al. 2021, equations 4 to 6; all layers in one).

        aux_loss = E * sum over experts e of f_e * P_e

    with f_e the share of the tokens that were routed to e (k a token), and P_e the mean probability of e. Both are
    means over the tokens of all layers, padding aside. The routed shares have no gradient: once they are known for the
    global batch, they are constants, and the rest is a sum over tokens.

    Args:
        coefficient: weight of the term.
        experts_per_token: k.
    """

    def __init__(self, coefficient: float, experts_per_token: int):
        self.coefficient, self.experts_per_token = coefficient, experts_per_token

    def routed(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """How often each expert was chosen, and the number of tokens times layers: float64 [E + 1]."""
        probabilities, kept = self._probabilities(outputs, inputs)
        chosen = probabilities.topk(self.experts_per_token).indices
        counts = torch.zeros(probabilities.shape[-1], dtype=torch.float64, device=kept.device)
        counts.index_add_(0, chosen.flatten(), kept.double().repeat_interleave(self.experts_per_token))
        return torch.cat([counts, kept.double().sum().reshape(1)])

    def share(self, outputs: Any, inputs: Mapping[str, Any], routed: Tensor) -> Tensor:
        """What a micro-batch adds to the loss of the batch in which the experts were chosen so often.

        Args:
            routed: as `routed` gives it, summed over that batch.
        """
        probabilities, kept = self._probabilities(outputs, inputs)
        tokens = routed[-1].clamp(min=1)
        means = (probabilities * kept[:, None]).sum(0) / tokens.to(probabilities.dtype)
        return len(means) * ((routed[:-1] / tokens).to(means.dtype) * means).sum()

    def _probabilities(self, outputs: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Of each token in each layer [layers * tokens, E], and which are not padding, as 0 and 1 [layers * tokens]."""
        layers = [layer.flatten(0, -2) for layer in outputs["router_logits"] if layer is not None]
        logits = torch.cat([layer.to(wide(layer.dtype)) for layer in layers])
        mask = inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return logits.softmax(-1), torch.ones(len(logits), dtype=logits.dtype, device=logits.device)
        return logits.softmax(-1), (mask != 0).flatten().to(logits).repeat(len(layers))


def balance_of(model: nn.Module) -> BalanceLoss | None:
    """The balance loss that a model's configuration asks for (`output_router_logits`), as its own head would add it.

    Args:
        model: without wrappers.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        return None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    coefficient = getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", None))
    per_token = getattr(model, "num_experts_per_tok", getattr(config, "num_experts_per_tok", None))
    if not getattr(config, "output_router_logits", False) or not coefficient or per_token is None:
        return None
    return BalanceLoss(float(coefficient), int(per_token))

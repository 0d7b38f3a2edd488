"""The MLP of a decoder layer."""

from __future__ import annotations

import torch
from torch import nn

from samestep.families import ModelSpec
from samestep.model.linear import Linear
from samestep.ops import Precision, SiLU, get_activation, swiglu


class FeedForward(nn.Module):
    """Gated: down(act(gate(x)) * up(x)) (Shazeer 2020); else down(act(up(x))). x is [B, S, hidden]."""

    def __init__(self, spec: ModelSpec, precision: Precision):
        super().__init__()
        hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        self.gate_proj = Linear(hidden, inner, precision, bias) if spec.gated else None
        self.up_proj = Linear(hidden, inner, precision, bias)
        self.down_proj = Linear(inner, hidden, precision, bias)
        # `fusedswiglu` names the operator that computes every gated silu.
        self.activation = get_activation("silu" if spec.hidden_act == "fusedswiglu" else spec.hidden_act)

    def forward(self, x_BSC: torch.Tensor) -> torch.Tensor:
        up_BSF = self.up_proj(x_BSC)
        if self.gate_proj is None:
            return self.down_proj(self.activation(up_BSF))
        gate_BSF = self.gate_proj(x_BSC)
        if isinstance(self.activation, SiLU):
            return self.down_proj(swiglu(gate_BSF, up_BSF))
        return self.down_proj(self.activation(gate_BSF) * up_BSF)

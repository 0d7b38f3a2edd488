"""The operators as Triton kernels: each pass over memory once, arithmetic in float32.

Only imported where `dispatch.use_triton` says so. Operands are float32, bfloat16 or float16. Offsets are int64
wherever a tensor may have more than 2^31 elements.

Shape letters: N rows, D features, R = pairs of dimensions that turn together, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TILE = 4096
"""Elements that a program works on at a time: 8 or 16 a thread, which leaves registers for several arrays."""


def _warps(elements: int) -> int:
    return min(16, max(1, elements // 512))


def _programs(device: torch.device, tiles: int) -> int:
    """How many programs share the rows where each keeps a sum of its own."""
    wanted = 4 if device.type == "cpu" else 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return min(tiles, wanted)


# ---------------------------------------------------------------- RMSNorm


@triton.jit
def _rms_norm_forward(
    x_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    rows,
    features,
    eps,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature_D = tl.arange(0, FEATURES)
    in_D = feature_D < features
    in_N = row_N < rows
    in_ND = in_N[:, None] & in_D[None, :]
    offset_ND = row_N.to(tl.int64)[:, None] * features + feature_D[None, :]
    x_ND = tl.load(x_ptr + offset_ND, mask=in_ND, other=0.0).to(COMPUTE).to(tl.float32)
    weight_D = tl.load(weight_ptr + feature_D, mask=in_D, other=0.0).to(COMPUTE).to(tl.float32)
    # Correctly rounded: the approximate forms would put the same error on a whole row.
    mean_N = tl.div_rn(tl.sum(x_ND * x_ND, 1), tl.zeros([ROWS], tl.float32) + features)
    scale_N = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.sqrt_rn(mean_N + eps))
    y_ND = x_ND * scale_N[:, None] * weight_D[None, :]
    tl.store(scale_ptr + row_N, scale_N, mask=in_N)
    tl.store(y_ptr + offset_ND, y_ND.to(COMPUTE).to(y_ptr.dtype.element_ty), mask=in_ND)


@triton.jit
def _rms_norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    dx_ptr,
    dweight_ptr,
    rows,
    features,
    tiles,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    program = tl.program_id(0)
    feature_D = tl.arange(0, FEATURES)
    in_D = feature_D < features
    weight_D = tl.load(weight_ptr + feature_D, mask=in_D, other=0.0).to(COMPUTE).to(tl.float32)
    dweight_D = tl.zeros([FEATURES], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        row_N = tile * ROWS + tl.arange(0, ROWS)
        in_N = row_N < rows
        in_ND = in_N[:, None] & in_D[None, :]
        offset_ND = row_N.to(tl.int64)[:, None] * features + feature_D[None, :]
        scale_N = tl.load(scale_ptr + row_N, mask=in_N, other=0.0)
        x_ND = tl.load(x_ptr + offset_ND, mask=in_ND, other=0.0).to(COMPUTE).to(tl.float32)
        grad_ND = tl.load(grad_ptr + offset_ND, mask=in_ND, other=0.0).to(tl.float32)
        unit_ND = x_ND * scale_N[:, None]
        product_ND = grad_ND * unit_ND
        dweight_D += tl.sum(product_ND, 0)
        projection_N = tl.sum(product_ND * weight_D[None, :], 1) / features
        dx_ND = (grad_ND * weight_D[None, :] - unit_ND * projection_N[:, None]) * scale_N[:, None]
        tl.store(dx_ptr + offset_ND, dx_ND.to(dx_ptr.dtype.element_ty), mask=in_ND)
    tl.store(dweight_ptr + program.to(tl.int64) * features + feature_D, dweight_D, mask=in_D)


def _row_tiles(features: int) -> tuple[int, int]:
    """Rows and features of a tile, both powers of two."""
    width = triton.next_power_of_2(features)
    return max(1, _TILE // width), width


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[..., D]` -> the normalized x, and `1 / rms` of each row in float32 `[..., 1]`."""
    x, weight_D = x.contiguous(), weight_D.contiguous()
    features = x.shape[-1]
    rows = x.numel() // features
    y, scale = torch.empty_like(x), torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    tile_rows, width = _row_tiles(features)
    if rows:
        with torch.cuda.device_of(x):
            _rms_norm_forward[(triton.cdiv(rows, tile_rows),)](
                x,
                weight_D,
                y,
                scale,
                rows,
                features,
                eps,
                COMPUTE=_TYPES[compute],
                ROWS=tile_rows,
                FEATURES=width,
                num_warps=_warps(tile_rows * width),
            )
    return y, scale


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, scale: Tensor, compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, each in its dtype; the latter summed in float32. `scale` as `rms_norm` returned
    it."""
    grad, x, weight_D = grad.contiguous(), x.contiguous(), weight_D.contiguous()
    features = x.shape[-1]
    rows = x.numel() // features
    dx = torch.empty_like(x)
    tile_rows, width = _row_tiles(features)
    tiles = triton.cdiv(rows, tile_rows)
    programs = _programs(x.device, tiles)
    dweight_PD = torch.empty(programs, features, dtype=torch.float32, device=x.device)
    if rows:
        with torch.cuda.device_of(x):
            _rms_norm_backward[(programs,)](
                grad,
                x,
                weight_D,
                scale,
                dx,
                dweight_PD,
                rows,
                features,
                tiles,
                COMPUTE=_TYPES[compute],
                ROWS=tile_rows,
                FEATURES=width,
                num_warps=_warps(2 * tile_rows * width),
            )
    return dx, dweight_PD.sum(0).to(weight_D.dtype)


# ---------------------------------------------------------------- SwiGLU

_ELEMENTS = 1024


@triton.jit
def _swiglu_forward(gate_ptr, up_ptr, out_ptr, size, limit, CLAMPED: tl.constexpr, SIZE: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = offset < size
    gate = tl.load(gate_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, size, limit, CLAMPED: tl.constexpr, SIZE: tl.constexpr
):
    offset = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = offset < size
    grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:
        gate_is_out = gate > limit
        up_is_out = (up > limit) | (up < -limit)
        gate = tl.where(gate_is_out, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = grad * gate * sigmoid
    if CLAMPED:
        dgate = tl.where(gate_is_out, 0.0, dgate)
        dup = tl.where(up_is_out, 0.0, dup)
    tl.store(dgate_ptr + offset, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + offset, dup.to(dup_ptr.dtype.element_ty), mask=inside)


def _over_elements(kernel: Any, tensors: list[Tensor], limit: float | None) -> None:
    size = tensors[0].numel()
    if size:
        with torch.cuda.device_of(tensors[0]):
            kernel[(triton.cdiv(size, _ELEMENTS),)](
                *tensors, size, float(limit or 0), CLAMPED=limit is not None, SIZE=_ELEMENTS, num_warps=4
            )


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """`silu(gate) * up`, clamped as in `activation.swiglu`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _over_elements(_swiglu_forward, [gate, up, out], limit)
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _over_elements(_swiglu_backward, [grad, gate, up, dgate, dup], limit)
    return dgate, dup


# ---------------------------------------------------------------- rotary embedding


@triton.jit
def _rope(
    x_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    out_ptr,
    positions,
    tokens,
    heads,
    pairs,
    x_row,
    x_token,
    x_head,
    position_row,
    position_token,
    direction,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = index // tokens
    token = index % tokens
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair_R = tl.arange(0, PAIRS)
    in_HR = (head_H < heads)[:, None] & (pair_R < pairs)[None, :]
    position = tl.load(position_ptr + row * position_row + token * position_token)
    # A position beyond the tables may not read what lies there; NaN makes it seen.
    table_R = position.to(tl.int64) * pairs + pair_R
    in_R = (pair_R < pairs) & (table_R >= 0) & (table_R < positions * pairs)
    cos_R = tl.load(cos_ptr + table_R, mask=in_R, other=float("nan"))
    sin_R = tl.load(sin_ptr + table_R, mask=in_R, other=float("nan")) * direction
    x_HR = x_ptr + row * x_row + token * x_token + head_H[:, None] * x_head + pair_R[None, :]
    first_HR = tl.load(x_HR, mask=in_HR, other=0.0).to(tl.float32)
    second_HR = tl.load(x_HR + pairs, mask=in_HR, other=0.0).to(tl.float32)
    out_HR = out_ptr + index * heads * pairs * 2 + head_H[:, None] * pairs * 2 + pair_R[None, :]
    turned_HR = first_HR * cos_R[None, :] - second_HR * sin_R[None, :]
    tl.store(out_HR, turned_HR.to(out_ptr.dtype.element_ty), mask=in_HR)
    turned_HR = second_HR * cos_R[None, :] + first_HR * sin_R[None, :]
    tl.store(out_HR + pairs, turned_HR.to(out_ptr.dtype.element_ty), mask=in_HR)


def rope(x_BSHD: Tensor, cos_PR: Tensor, sin_PR: Tensor, position_ids_BS: Tensor, direction: float) -> Tensor:
    """Turns x by its positions, or back where `direction` is -1; the tables are float32. The result is contiguous.

    A token whose position is not in the tables becomes NaN.
    """
    x_BSHD = x_BSHD if x_BSHD.stride(-1) == 1 else x_BSHD.contiguous()
    cos_PR, sin_PR = cos_PR.contiguous(), sin_PR.contiguous()
    out_BSHD = torch.empty(x_BSHD.shape, dtype=x_BSHD.dtype, device=x_BSHD.device)
    batch, tokens, heads, dim = x_BSHD.shape
    position_ids_BS = position_ids_BS.expand(batch, tokens)
    pairs = triton.next_power_of_2(dim // 2)
    group = min(triton.next_power_of_2(heads), max(1, _TILE // 2 // pairs))
    if x_BSHD.numel():
        with torch.cuda.device_of(x_BSHD):
            _rope[(batch * tokens, triton.cdiv(heads, group))](
                x_BSHD,
                cos_PR,
                sin_PR,
                position_ids_BS,
                out_BSHD,
                cos_PR.shape[0],
                tokens,
                heads,
                dim // 2,
                *x_BSHD.stride()[:3],
                *position_ids_BS.stride(),
                direction,
                HEADS=group,
                PAIRS=pairs,
                num_warps=_warps(group * pairs),
            )
    return out_BSHD


# ---------------------------------------------------------------- cross-entropy of logits


@triton.jit
def _tanh(x):
    """To the last bits for small x, too (Cephes): logits are mostly small against their cap."""
    z = x * x
    inner = -5.70498872745e-3 * z + 2.06390887954e-2
    inner = (inner * z - 5.37397155531e-2) * z + 1.33314422036e-1
    small = x + x * z * (inner * z - 3.33332819422e-1)
    outer = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -outer, outer))


@triton.jit
def _token_losses(
    logits_ptr,
    gradient_ptr,
    label_ptr,
    label_logit_ptr,
    weight_ptr,
    cross_entropy_ptr,
    logsumexp_ptr,
    vocabulary,
    z_loss_weight,
    smoothing,
    softcap,
    CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GRADIENT: tl.constexpr,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * vocabulary
    gradient_row_ptr = gradient_ptr + token * vocabulary
    label = tl.load(label_ptr + token)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sum_of_logits = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, SIZE):
        column_V = start + tl.arange(0, SIZE)
        in_V = column_V < vocabulary
        logit_V = tl.load(row_ptr + column_V, mask=in_V, other=0.0)
        if CAPPED:
            logit_V = softcap * _tanh(logit_V / softcap)
        sum_of_logits += tl.sum(tl.where(in_V, logit_V, 0.0), 0)
        logit_V = tl.where(in_V, logit_V, float("-inf"))
        larger = tl.maximum(largest, tl.max(logit_V, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logit_V - larger), 0)
        largest = larger
    label_logit = tl.load(label_logit_ptr + token)
    if CAPPED:
        label_logit = softcap * _tanh(label_logit / softcap)
    logsumexp = tl.log(total) + largest
    expected = label_logit * (1.0 - smoothing) + sum_of_logits / vocabulary * smoothing
    tl.store(cross_entropy_ptr + token, logsumexp - expected)
    tl.store(logsumexp_ptr + token, logsumexp)
    if GRADIENT:
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weight_ptr + token)
        factor = (1.0 + 2.0 * z_loss_weight * logsumexp) * weight / total
        spread = weight * smoothing / vocabulary
        at_label = weight * (1.0 - smoothing)
        for start in range(0, vocabulary, SIZE):
            column_V = start + tl.arange(0, SIZE)
            in_V = column_V < vocabulary
            logit_V = tl.load(row_ptr + column_V, mask=in_V, other=0.0)
            slope_V = tl.full([SIZE], 1.0, tl.float32)
            if CAPPED:
                tanh_V = _tanh(logit_V / softcap)
                slope_V = 1.0 - tanh_V * tanh_V
                logit_V = softcap * tanh_V
            gradient_V = tl.exp(logit_V - largest) * factor - tl.where(column_V == label, at_label, 0.0) - spread
            gradient_V = (gradient_V * slope_V).to(gradient_ptr.dtype.element_ty)
            tl.store(gradient_row_ptr + column_V, gradient_V, mask=in_V)


def token_losses_(
    logits_CV: Tensor,
    labels_C1: Tensor,
    weights_C1: Tensor | None,
    gradient_CV: Tensor | None,
    *,
    z_loss_weight: float,
    label_smoothing: float,
    softcap: float | None,
    rounds: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and logsumexp `[C, 1]` of each token, unweighted. The gradient of the weighted loss by the logits
    goes to `gradient_CV`, of any dtype, which may be `logits_CV` itself; None: not wanted. `rounds`: its numbers are
    rounded to bfloat16. Logits are float32."""
    assert logits_CV.is_contiguous() and logits_CV.dtype == torch.float32
    assert gradient_CV is None or gradient_CV.is_contiguous()
    labels_C1 = labels_C1.contiguous()
    # By PyTorch, which refuses a label outside the vocabulary.
    label_logits_C1 = logits_CV.gather(1, labels_C1)
    cross_entropy_C1, logsumexp_C1 = torch.empty_like(label_logits_C1), torch.empty_like(label_logits_C1)
    vocabulary = logits_CV.shape[1]
    size = min(triton.next_power_of_2(vocabulary), 2 * _TILE)
    if len(logits_CV):
        with torch.cuda.device_of(logits_CV):
            _token_losses[(len(logits_CV),)](
                logits_CV,
                logits_CV if gradient_CV is None else gradient_CV,
                labels_C1,
                label_logits_C1,
                label_logits_C1 if weights_C1 is None else weights_C1.contiguous(),
                cross_entropy_C1,
                logsumexp_C1,
                vocabulary,
                z_loss_weight,
                label_smoothing,
                float(softcap or 1),
                CAPPED=softcap is not None,
                WEIGHTED=weights_C1 is not None,
                GRADIENT=gradient_CV is not None,
                SIZE=size,
                num_warps=_warps(size),
            )
    if rounds and gradient_CV is not None:
        gradient_CV.copy_(gradient_CV.bfloat16())
    return cross_entropy_C1, logsumexp_C1

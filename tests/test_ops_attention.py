"""Attention against the naive twin and closed forms."""

import math
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep import ops

attention_module = sys.modules["samestep.ops.attention"]  # the package has a function of that name

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
TIGHT = {F32: 3e-6, F64: 1e-12}
SPANS = [(0, 0, 5), (1, 0, 3), (1, 3, 8), (1, 9, 10), (2, 0, 10)]  # row 0: 5..9 and row 1: 8 in no span


@pytest.fixture(autouse=True)
def _fixed_random_numbers(either_implementation):
    torch.manual_seed(99)


def qkv(dtype, batch=3, queries=10, keys=10, heads=9, key_heads=3, dim=8, v_dim=8):
    shapes = (batch, queries, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, v_dim)
    return [torch.randn(shape, dtype=F64).to(dtype) for shape in shapes]


def run(function, inputs, grad, **kwargs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def distance(got, truth):
    return ((got.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def plain(q, k, v, *, spans=None, scale=None, **_):
    """What one writes without thinking: products and their rounding in the input dtype, softmax in float32."""
    batch, queries, heads = q.shape[:3]
    keys = k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (k, v))
    seen = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    for row, start, stop in spans or [(row, 0, keys) for row in range(batch)]:
        first = 0 if spans is None else start
        last = queries if spans is None else stop
        seen[row, 0, first:last, start:stop] = True
    seen &= torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    scores = (q.transpose(1, 2) @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    weights = scores.float().masked_fill(~seen, -1e30).softmax(-1).masked_fill(~seen, 0.0).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def check(inputs, function=ops.attention, **kwargs):
    dtype = inputs[0].dtype
    grad = torch.randn(*inputs[0].shape[:3], inputs[2].shape[-1], dtype=F64).to(dtype)
    truth = run(ops.reference_attention, [x.double() for x in inputs], grad, **{**kwargs, "softmax_dtype": F64})
    got = run(function, inputs, grad, **kwargs)
    eager = run(plain, inputs, grad, **kwargs)
    for g, e, t in zip(got, eager, truth, strict=True):
        assert g.dtype == dtype and g.shape == t.shape
        assert distance(g, t) <= TIGHT.get(dtype, 1.5 * distance(e, t) + 1e-6)
    return got


def by_hand(q, k, v, spans, scale, window=1000):
    """Query by query in float64."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=F64)
    group = q.shape[2] // k.shape[2]
    for row, start, stop in spans:
        for i in range(start, stop):
            seen = slice(max(start, i - window + 1), i + 1)
            for head in range(q.shape[2]):
                scores = k[row, seen, head // group] @ q[row, i, head] * scale
                out[row, i, head] = scores.softmax(0) @ v[row, seen, head // group]
    return out


def test_twin_against_a_loop_over_queries():
    q, k, v = qkv(F64)
    for spans in (None, SPANS):
        loops = spans or [(row, 0, 10) for row in range(3)]
        expected = by_hand(q, k, v, loops, 1 / math.sqrt(8))
        assert distance(ops.reference_attention(q, k, v, spans=spans), expected) < 1e-14
    expected = by_hand(q, k, v, SPANS, 0.3)
    assert distance(ops.reference_attention(q, k, v, spans=SPANS, scale=0.3), expected) < 1e-14


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
@pytest.mark.parametrize("spans", [None, SPANS, [(0, 0, 10), (1, 0, 10), (2, 0, 10)], [(2, 4, 7)]])
def test_fused_against_twin(dtype, spans):
    """9 query heads on 3 key heads; softmax in float32, or float64 for float64."""
    softmax = F64 if dtype == F64 else F32
    check(qkv(dtype), spans=spans, softmax_dtype=softmax)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv(dtype)]
    check(strided, spans=spans, softmax_dtype=softmax, scale=0.2)
    check(qkv(dtype, heads=2, key_heads=2, dim=7, v_dim=5), spans=spans, softmax_dtype=softmax)


def test_tokens_in_no_span_have_zero_output_and_gradient():
    q, k, v = qkv(F32)
    outside = torch.ones(3, 10, dtype=torch.bool)
    for row, start, stop in SPANS:
        outside[row, start:stop] = False
    for function in (ops.attention, ops.reference_attention):
        k_nan = k.clone()
        results = run(function, [q, k_nan, v], torch.randn(3, 10, 9, 8), spans=SPANS, softmax_dtype=F32)
        assert all(r[outside].abs().max() == 0 and r.isfinite().all() for r in results)
        results = run(function, [q, k, v], torch.randn(3, 10, 9, 8), spans=[], softmax_dtype=F32)
        assert all(r.abs().max() == 0 for r in results)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_document_does_not_see_another(dtype):
    """Changing one document moves no other output and no other gradient by a single bit."""
    q, k, v = qkv(dtype, batch=2)
    spans = [(0, 0, 4), (0, 4, 10), (1, 0, 6), (1, 6, 10)]
    grad = torch.randn(2, 10, 9, 8)
    before = run(ops.attention, [q, k, v], grad, spans=spans, softmax_dtype=F32)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[0, :4] = 1e3 * torch.randn_like(x[0, :4])
    after = run(ops.attention, changed, grad, spans=spans, softmax_dtype=F32)
    for b, a in zip(before, after, strict=True):
        assert torch.equal(b[0, 4:], a[0, 4:]) and torch.equal(b[1], a[1])
        assert not torch.equal(b[0, :4], a[0, :4])
    # Nor does a later token move an earlier one.
    causal = [x.clone() for x in (q, k, v)]
    for x in causal:
        x[0, 7] += 1
    later = ops.attention(*causal, spans=spans, softmax_dtype=F32)
    assert torch.equal(later[0, :7], before[0][0, :7])


def test_packed_documents_equal_rows_of_their_own():
    q, k, v = qkv(F64, batch=1, queries=12, keys=12)
    packed = ops.attention(q, k, v, spans=[(0, 0, 5), (0, 5, 12)], softmax_dtype=F64)
    for start, stop in ((0, 5), (5, 12)):
        alone = ops.attention(q[:, start:stop], k[:, start:stop], v[:, start:stop], softmax_dtype=F64)
        assert distance(packed[:, start:stop], alone) < 1e-14


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_decoding_with_a_cache(queries, dtype):
    """The last queries alone give what they give within the whole sequence."""
    softmax = F64 if dtype == F64 else F32
    q, k, v = qkv(dtype)
    whole = ops.attention(q, k, v, softmax_dtype=softmax)
    last = ops.attention(q[:, -queries:], k, v, softmax_dtype=softmax)
    assert distance(last, whole[:, -queries:].double()) < (1e-2 if dtype == BF16 else TIGHT[dtype])
    check([q[:, -queries:], k, v], softmax_dtype=softmax)


def test_low_softmax_dtype_takes_the_naive_path():
    q, k, v = qkv(F32)
    low = ops.attention(q, k, v, softmax_dtype=BF16)
    assert torch.equal(low, ops.reference_attention(q, k, v, softmax_dtype=BF16))
    assert 1e-4 < distance(low, ops.attention(q, k, v, softmax_dtype=F32).double()) < 2e-2
    assert low.dtype == F32


def test_dropout_depends_on_tokens_only():
    q, k, v = qkv(F64, batch=2)
    row = torch.arange(2)[:, None].expand(2, 10)
    keys = ops.token_keys(row, torch.zeros_like(row), torch.arange(10).expand(2, 10))
    kwargs = {"softmax_dtype": F64, "dropout_p": 0.3, "dropout_key": ops.random_key("a")}
    out = ops.attention(q, k, v, token_keys_BS=keys, **kwargs)
    assert distance(out, ops.attention(q, k, v, softmax_dtype=F64)) > 0.1
    swapped = ops.attention(q.flip(0), k.flip(0), v.flip(0), token_keys_BS=keys.flip(0), **kwargs)
    assert torch.equal(swapped.flip(0), out)
    # Two rows packed into one: the same tokens, hence the same mask.
    packed = [x.reshape(1, 20, *x.shape[2:]) for x in (q, k, v)]
    spans = [(0, 0, 10), (0, 10, 20)]
    together = ops.attention(*packed, spans=spans, token_keys_BS=keys.view(1, 20), **kwargs)
    assert distance(together.view_as(out), out) < 1e-14
    # Key head 1 alone, as a rank of tensor parallel would hold it.
    part = ops.attention(q[:, :, 3:6], k[:, :, 1:2], v[:, :, 1:2], token_keys_BS=keys, first_head=3, **kwargs)
    assert distance(part, out[:, :, 3:6]) < 1e-14
    last = ops.attention(q[:, 7:], k, v, token_keys_BS=keys, **kwargs)
    assert distance(last, out[:, 7:]) < 1e-14
    with pytest.raises(ValueError, match="token_keys_BS"):
        ops.attention(q, k, v, **kwargs)
    many = [
        ops.attention(q, k, v, token_keys_BS=keys, **{**kwargs, "dropout_key": ops.random_key(i)}) for i in range(400)
    ]
    mean = torch.stack(many).mean(0)
    assert distance(mean, ops.attention(q, k, v, softmax_dtype=F64)) < 0.06  # unbiased


@pytest.mark.parametrize(
    "spans", [[(0, 0, 11)], [(3, 0, 2)], [(0, 4, 4)], [(0, 0, 4), (0, 3, 6)], [(0, -1, 3)], [(1, 2, 5), (1, 2, 5)]]
)
def test_bad_spans_are_refused(spans):
    with pytest.raises(ValueError, match="span"):
        ops.attention(*qkv(F32), spans=spans, softmax_dtype=F32)


def test_bad_shapes_are_refused():
    q, k, v = qkv(F32)
    with pytest.raises(ValueError, match="multiple"):
        ops.attention(q[:, :, :8], k, v)
    with pytest.raises(ValueError, match="keys a row"):
        ops.attention(q, k[:, :9], v[:, :9])
    with pytest.raises(ValueError, match="keys a row"):
        ops.attention(q[:, :9], k, v, spans=[(0, 0, 4)])
    with pytest.raises(ValueError, match="do not fit"):
        ops.attention(q, k[:2], v[:2])


def test_plan_made_in_inference_mode_serves_training():
    q, k, v = qkv(F32)
    spans = [(0, 0, 6), (2, 1, 4)]
    with torch.inference_mode():
        ops.attention(q, k, v, spans=spans)
    q.requires_grad_()
    ops.attention(q, k, v, spans=spans).sum().backward()
    assert q.grad.isfinite().all()


# ---------------------------------------------------------------------------------------------- sliding window


@pytest.mark.parametrize("window", [1, 3, 9, 10, 50])
def test_a_window_against_a_loop_over_queries(window):
    q, k, v = qkv(F64)
    for spans in (None, SPANS):
        loops = spans or [(row, 0, 10) for row in range(3)]
        expected = by_hand(q, k, v, loops, 1 / math.sqrt(8), window)
        for function in (ops.attention, ops.reference_attention):
            assert distance(function(q, k, v, spans=spans, window=window), expected) < 1e-14


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
@pytest.mark.parametrize("spans", [None, SPANS, [(1, 2, 9)]])
@pytest.mark.parametrize("block", [1, 2, 4])
def test_blocks_of_a_window_against_the_twin(dtype, spans, block, monkeypatch):
    """Forward and backward, where a row is many blocks, the last one short."""
    monkeypatch.setattr(attention_module, "_LEAST_BLOCK", block)
    monkeypatch.setattr(attention_module, "_LARGEST_BLOCK", block)
    softmax = F64 if dtype == F64 else F32
    grad = torch.randn(3, 10, 9, 8, dtype=F64).to(dtype)
    for window in (2, 3, 5):
        inputs = qkv(dtype)
        kwargs = {"spans": spans, "window": window, "softmax_dtype": softmax}
        truth = run(ops.reference_attention, [x.double() for x in inputs], grad, **{**kwargs, "softmax_dtype": F64})
        for got, expected in zip(run(ops.attention, inputs, grad, **kwargs), truth, strict=True):
            assert distance(got, expected) <= TIGHT.get(dtype, 1e-2)


def test_gradients_of_a_window_against_differences(monkeypatch):
    monkeypatch.setattr(attention_module, "_LEAST_BLOCK", 2)
    monkeypatch.setattr(attention_module, "_LARGEST_BLOCK", 2)
    inputs = [x.requires_grad_() for x in qkv(F64, batch=1, queries=7, keys=7, heads=2, key_heads=1, dim=3, v_dim=3)]
    for spans in (None, [(0, 0, 2), (0, 2, 7)]):
        assert torch.autograd.gradcheck(lambda *x, s=spans: ops.attention(*x, spans=s, window=3), inputs)


@pytest.mark.parametrize("queries", [1, 4, 7])
def test_a_window_over_a_cache(queries, monkeypatch):
    monkeypatch.setattr(attention_module, "_LEAST_BLOCK", 3)
    q, k, v = qkv(F64)
    whole = ops.attention(q, k, v, window=4)
    assert distance(ops.attention(q[:, -queries:], k, v, window=4), whole[:, -queries:]) < 1e-14
    assert distance(ops.reference_attention(q[:, -queries:], k, v, window=4), whole[:, -queries:]) < 1e-14


def test_a_long_row_needs_no_square_mask():
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    inputs = qkv(F32, batch=1, queries=4096, keys=4096, heads=1, key_heads=1, dim=4, v_dim=4)
    with Largest():
        run(ops.attention, inputs, torch.ones(1, 4096, 1, 4), window=100)
    assert largest < 4096 * 4096 / 100


def test_dropout_in_a_window():
    q, k, v = qkv(F64, batch=1)
    zeros = torch.zeros(1, 10, dtype=torch.int64)
    keys = ops.token_keys(zeros, zeros, torch.arange(10)[None])
    kwargs = {"token_keys_BS": keys, "dropout_p": 0.3, "dropout_key": ops.random_key("a"), "window": 3}
    changed = [x.clone() for x in (q, k, v)]
    for x in changed[1:]:
        x[:, :5] += 1
    out, moved = ops.attention(q, k, v, **kwargs), ops.attention(*changed, **kwargs)
    assert torch.equal(out[:, 7:], moved[:, 7:]) and not torch.equal(out[:, :7], moved[:, :7])
    assert distance(out, ops.attention(q, k, v, window=3)) > 0.1


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window of 0"):
        ops.attention(*qkv(F32), window=0)

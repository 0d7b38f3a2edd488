"""Norms, activations, dtypes, the linear layer, rotary embedding and dropout against their twins in float64."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from samestep import ops
from samestep.errors import ConfigError
from samestep.ops import precision as precision_module
from samestep.ops.gradient_sink import GradientSink

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
ALL = [F32, F64, BF16, F16]
LOW = [BF16, F16]
TIGHT = {F32: 3e-6, F64: 1e-12}


@pytest.fixture(autouse=True)
def _fixed_random_numbers(either_implementation):
    torch.manual_seed(1234)


def run(function, inputs, grad=None):
    """[output, gradient of each input]; `inputs` are copied, strides kept."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    grad = torch.ones_like(out) if grad is None else grad.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def distance(got, truth):
    truth = truth.double()
    return ((got.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def check(function, twin, inputs, eager=None):
    """Forward and backward against the twin in float64.

    float64 and float32 must be tight; bfloat16 and float16 no worse than 1.5 times `eager` in that dtype.
    """
    dtype = inputs[0].dtype
    grad = torch.randn_like(twin(*inputs), dtype=F64).to(dtype)
    truth = run(twin, [x.double() for x in inputs], grad)
    got = run(function, inputs, grad)
    assert [x.dtype for x in got] == [dtype] + [x.dtype for x in inputs]
    plain = run(eager or twin, inputs, grad) if dtype in LOW else got
    for g, p, t in zip(got, plain, truth, strict=True):
        assert g.shape == t.shape
        bound = 1.5 * distance(p, t) + 1e-7 if dtype in LOW else TIGHT[dtype]
        assert distance(g, t) <= bound


def layouts(dtype, *shape):
    """A contiguous and two strided tensors of one shape."""
    yield torch.randn(shape, dtype=F64).to(dtype)
    yield torch.randn(*shape[:-1], 2 * shape[-1], dtype=F64).to(dtype)[..., ::2]
    yield torch.randn(shape[::-1], dtype=F64).to(dtype).permute(*reversed(range(len(shape))))


# ---------------------------------------------------------------- dtypes


def test_parse_dtype_knows_both_spellings():
    for names, dtype in [
        (("float32", "fp32"), F32),
        (("bfloat16", "bf16"), BF16),
        (("float16", "fp16"), F16),
        (("float64", "fp64"), F64),
    ]:
        assert [ops.parse_dtype(name) for name in names] == [dtype, dtype]


@pytest.mark.parametrize("name", ["int8", "", None, 16])
def test_parse_dtype_refuses_the_rest_and_lists_the_names(name):
    with pytest.raises(ConfigError, match="float32, fp32, bfloat16, bf16, float16, fp16, float64, fp64"):
        ops.parse_dtype(name)


def test_precision_defaults_config_and_raising():
    p = ops.Precision()
    assert (p.params, p.compute) == (F32, BF16)
    assert {p.layernorm, p.softmax, p.rotary, p.gradient, p.reduce, p.loss} == {F32}
    config = SimpleNamespace(compute_dtype="fp16", rotary_dtype="bfloat16", softmax_compute_dtype=None)
    assert ops.Precision.from_config(config) == ops.Precision(compute=F16, rotary=BF16)
    assert set(vars(p.raised(F64)).values()) == {F64}
    with pytest.raises(ConfigError, match=r"model\.layernorm_compute_dtype"):
        ops.Precision.from_config(SimpleNamespace(layernorm_compute_dtype="half"))


# ---------------------------------------------------------------- linear


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("params", [F32, BF16])
@pytest.mark.parametrize("compute", LOW)
@pytest.mark.parametrize("x_dtype", [F32, BF16])
def test_low_linear_against_float64_of_the_rounded_operands(monkeypatch, native, params, compute, x_dtype):
    monkeypatch.setattr(precision_module, "has_native_matmul", lambda *_: native)
    x, w, b = torch.randn(3, 5, 33).to(x_dtype), torch.randn(17, 33).to(params), torch.randn(17).to(params)
    grad = torch.randn(3, 5, 17).to(compute)
    got = run(lambda *a: ops.linear(*a, compute), [x, w, b], grad)
    truth = run(lambda *a: ops.reference_linear(*a, compute, out_dtype=F64), [x.double(), w.double(), b.double()], grad)
    assert got[0].dtype == compute
    assert [g.dtype for g in got[1:]] == [x_dtype, params, params]
    step = {F32: 1e-6, BF16: 2**-8, F16: 2**-11}
    for g, t, dtype in zip(got, truth, (compute, x_dtype, params, params), strict=True):
        assert distance(g, t) <= step[dtype]


def test_float32_weight_gradient_is_not_rounded_on_the_way():
    """Adding two micro-batches equals the whole batch to float32 accuracy although the product is bfloat16."""
    x, w = torch.randn(8, 32).bfloat16(), torch.randn(16, 32)
    grad = torch.randn(8, 16).bfloat16()
    whole = run(lambda w: ops.linear(x, w, None, BF16), [w], grad)[1]
    parts = [run(lambda w, h=h: ops.linear(x[h], w, None, BF16), [w], grad[h])[1] for h in (slice(3), slice(3, 8))]
    assert distance(parts[0] + parts[1], whole) < 1e-6


@pytest.mark.parametrize("compute", [F32, F64])
def test_wide_linear(compute):
    x, w, b = torch.randn(2, 3, 9), torch.randn(4, 9), torch.randn(4)
    got = run(lambda *a: ops.linear(*a, compute), [x, w, b])
    truth = run(lambda *a: ops.reference_linear(*a, compute), [t.double() for t in (x, w, b)])
    assert got[0].dtype == compute
    assert all(distance(g, t) < 1e-6 for g, t in zip(got, truth, strict=True))


def test_linear_of_no_tokens_and_without_input_gradient():
    w = torch.randn(4, 8, requires_grad=True)
    ops.linear(torch.randn(0, 8), w, None, BF16).sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_native_units_question_is_answered_for_wide_dtypes():
    assert ops.has_native_matmul(F32, "cpu") and ops.has_native_matmul(F64, torch.device("cpu"))
    assert ops.has_native_matmul(BF16, "cuda")
    assert isinstance(ops.has_native_matmul(BF16, "cpu"), bool)


# ---------------------------------------------------------------- norms


def norms(name, dim, **kwargs):
    """(fused, twin) with equal random parameters."""
    fused, twin = ops.get_norm_cls(name)(dim, **kwargs), ops.get_norm_cls(name, fused_norm=False)(dim, **kwargs)
    with torch.no_grad():
        for p, q in zip(fused.parameters(), twin.parameters(), strict=True):
            q.copy_(p.add_(torch.randn(dim)))
    return fused, twin


def torch_norm(name, x, weight, bias=None, eps=1e-5):
    if name == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norm_defaults(name):
    for fused, prefix in ((True, "Fused"), (False, "")):
        cls = ops.get_norm_cls(name, fused)
        norm = cls(8)
        assert cls.__name__ == prefix + name
        assert (norm.eps, norm.compute_dtype, norm.weight.dtype) == (1e-5, F32, F32)
        assert list(dict(norm.named_parameters())) == (["weight", "bias"] if name == "LayerNorm" else ["weight"])
        assert torch.equal(norm.weight, torch.ones(8))
        assert name == "RMSNorm" or torch.equal(norm.bias, torch.zeros(8))
        assert cls(8, params_dtype=BF16).weight.dtype == BF16
    assert ops.get_norm_cls() is ops.FusedRMSNorm


@pytest.mark.parametrize("name", ["rmsnorm", "BatchNorm", ""])
def test_other_norms_are_refused(name):
    with pytest.raises(ConfigError, match=r"model\.normalization.*LayerNorm and RMSNorm"):
        ops.get_norm_cls(name)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", ALL)
def test_norm_forward_and_backward(name, dtype):
    """Input dtype in, input dtype out; inside float32, or float64 for float64."""
    compute = F64 if dtype == F64 else F32
    for x in layouts(dtype, 3, 7, 33):
        fused, twin = norms(name, 33, compute_dtype=compute, params_dtype=compute)
        truth_norm = norms(name, 33, compute_dtype=F64, params_dtype=F64)[1]
        truth_norm.load_state_dict(fused.state_dict())
        grad = torch.randn(3, 7, 33, dtype=F64).to(dtype)
        results = []
        for norm, x_in in ((fused, x), (twin, x), (truth_norm, x.double())):
            leaf = x_in.detach().requires_grad_()
            out = norm(leaf)
            out.backward(grad.to(out.dtype))
            results.append([out.detach(), leaf.grad, *(p.grad for p in norm.parameters())])
        assert results[0][0].dtype == dtype and results[0][1].dtype == dtype
        closed = torch_norm(name, x.double(), *(p.detach() for p in truth_norm.parameters()))
        assert distance(results[2][0], closed) < 1e-14
        for got, plain, truth in zip(*results, strict=True):
            bound = 1.5 * distance(plain, truth) + 1e-6 if dtype in LOW else TIGHT[dtype]
            assert distance(got, truth) <= bound


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norm_computes_in_compute_dtype(name):
    """A float32 input is rounded to a bfloat16 `compute_dtype`, and a bfloat16 input is not computed in bfloat16."""
    x = torch.randn(4, 64)
    low = norms(name, 64, compute_dtype=BF16)[0](x)
    assert low.dtype == F32 and torch.equal(low, low.bfloat16().float())
    fused, twin = norms(name, 64)
    assert distance(fused(x.bfloat16()), twin(x.bfloat16().float())) < 2**-8
    large = torch.full((1, 64), 300.0, dtype=F16)  # its square is beyond float16
    assert ops.FusedRMSNorm(64)(large).float().sub(1).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norm_eps_is_used_and_low_compute_follows_the_twin(name):
    x = torch.randn(5, 16, dtype=F64) * 1e-3
    fused = ops.get_norm_cls(name)(16, eps=1e-2, compute_dtype=F64, params_dtype=F64)
    centre = x.mean(-1, keepdim=True) if name == "LayerNorm" else 0.0
    closed = (x - centre) / ((x - centre).square().mean(-1, keepdim=True) + 1e-2).sqrt()
    assert distance(fused(x), closed) < 1e-13
    fused, twin = norms(name, 16, compute_dtype=BF16)
    assert distance(fused(x.float()), twin(x.float())) < 2**-8
    with pytest.raises(ValueError, match="16 features"):
        fused(torch.randn(3, 1))


# ---------------------------------------------------------------- activations


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", ALL)
def test_gelu(approximate, dtype):
    for x in layouts(dtype, 3, 7, 11):
        check(ops.GELU(approximate), lambda x: ops.reference_gelu(x, approximate), [x])
    assert ops.GELU().approximate == "none"


def test_gelu_refuses_other_forms():
    with pytest.raises(ConfigError, match="none or tanh"):
        ops.GELU("sigmoid")


@pytest.mark.parametrize("dtype", ALL)
def test_silu(dtype):
    for x in layouts(dtype, 3, 7, 11):
        check(ops.SiLU(), ops.reference_silu, [x])
        check(lambda x: ops.SiLU(inplace=True)(x * 1), ops.reference_silu, [x])


def test_silu_in_place_overwrites_its_input():
    x = torch.randn(5)
    assert not ops.SiLU().inplace and ops.SiLU()(x) is not x
    expected, pointer = ops.reference_silu(x), x.data_ptr()
    y = ops.SiLU(inplace=True)(x)
    assert y.data_ptr() == pointer and torch.allclose(x, expected)


@pytest.mark.parametrize("dtype", ALL)
def test_swiglu(dtype):
    for gate, up in zip(layouts(dtype, 3, 7, 11), layouts(dtype, 3, 7, 11), strict=True):
        check(ops.swiglu, ops.reference_swiglu, [gate, up], eager=lambda g, u: F.silu(g) * u)
    for dim, shape in ((-1, (3, 5, 14)), (1, (3, 6, 5))):
        for x in layouts(dtype, *shape):
            check(
                lambda x, dim=dim: ops.FusedSwiGlu()(x, dim=dim),
                lambda x, dim=dim: ops.reference_swiglu(*x.chunk(2, dim)),
                [x],
                eager=lambda x, dim=dim: F.silu(x.chunk(2, dim)[0]) * x.chunk(2, dim)[1],
            )


@pytest.mark.parametrize("dtype", ALL)
def test_clamped_swiglu(dtype):
    """In float64 against clamps of PyTorch; the limit is no number of the low dtypes, and some inputs lie beyond it."""
    limit = 1.003

    def eager(gate, up):
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    def twin(gate, up):
        return ops.reference_swiglu(gate, up, limit)

    for gate, up in zip(layouts(dtype, 3, 7, 11), layouts(dtype, 3, 7, 11), strict=True):
        check(lambda g, u: ops.swiglu(g, u, limit), twin, [gate, up], eager=eager)
        wide = [gate.double(), up.double()]
        for got, truth in zip(run(twin, wide), run(eager, wide), strict=True):
            assert distance(got, truth) < 1e-14
        _, dgate, dup = run(lambda g, u: ops.swiglu(g, u, limit), [gate, up])
        assert (gate > limit).any() and (gate < -limit).any() and (up < -limit).any()
        assert torch.equal(dgate == 0, gate.double() > limit) and torch.equal(dup == 0, up.double().abs() > limit)
    halves = torch.cat([gate, up], -1)
    assert torch.equal(ops.get_activation("fusedswiglu", limit=limit)(halves), ops.swiglu(gate, up, limit))
    with pytest.raises(ValueError, match="limit 0 is not above 0"):
        ops.swiglu(gate, up, 0)


def test_swiglu_saves_only_its_inputs_and_refuses_what_does_not_fit():
    saved = []
    gate, up = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        ops.swiglu(gate, up)
    assert saved == [gate.data_ptr(), up.data_ptr()]
    with pytest.raises(ValueError, match="odd"):
        ops.FusedSwiGlu()(torch.randn(2, 7))
    with pytest.raises(ValueError, match="one shape"):
        ops.swiglu(gate, up[:, :1])


def test_get_activation():
    assert set(ops.ACTIVATION_MAP) == {"gelu", "silu", "fusedswiglu", "gelu_tanh"}
    assert ops.get_activation("GELU_tanh").approximate == "tanh"
    assert isinstance(ops.get_activation("SiLU"), ops.SiLU)
    assert isinstance(ops.get_activation("FusedSwiGLU"), ops.FusedSwiGlu)
    assert ops.get_activation("gelu", approximate="tanh").approximate == "tanh"
    with pytest.raises(ConfigError, match=r"model\.hidden_act[\s\S]*gelu, silu, fusedswiglu"):
        ops.get_activation("relu")


# ---------------------------------------------------------------- rotary embedding


def test_rope_tables():
    cos, _ = ops.rope_tables(50, 10, 1e4, F64)
    angle = 37 * 1e4 ** (-2 * 3 / 10)
    assert cos.shape == (50, 5) and abs(cos[37, 3].item() - torch.tensor(angle, dtype=F64).cos().item()) < 1e-14
    single = ops.rope_tables(5000, 64, 1e4, F32)
    inverse = 1.0 / (1e4 ** (torch.arange(0, 64, 2).float() / 64))
    assert torch.equal(single[1], (torch.arange(5000).float()[:, None] * inverse).sin())
    low = ops.rope_tables(5000, 64, 1e4, BF16)
    assert torch.equal(low[0], single[0].bfloat16())
    with pytest.raises(ValueError, match="odd"):
        ops.rope_tables(4, 5, 1e4, F32)


@pytest.mark.parametrize("dtype", ALL)
def test_rope(dtype):
    table = F64 if dtype == F64 else F32
    cos, sin = ops.rope_tables(40, 6, 1e4, table)
    positions = torch.randint(0, 40, (2, 7))
    for x in layouts(dtype, 2, 7, 3, 6):
        check(
            lambda x: ops.apply_rope(x, cos, sin, positions),
            lambda x: ops.reference_rope(x, cos, sin, positions),
            [x],
        )
    rows = ops.rope_rows(cos, sin, positions)
    assert torch.equal(ops.apply_rope(x, *rows, None), ops.apply_rope(x, cos, sin, positions))
    assert torch.equal(ops.reference_rope(x, *rows, None), ops.reference_rope(x, cos, sin, positions))
    low_cos, low_sin = ops.rope_tables(40, 6, 1e4, BF16)
    assert ops.apply_rope(x, low_cos, low_sin, positions).dtype == dtype


def test_rope_is_the_rotate_half_convention():
    cos, sin = ops.rope_tables(9, 8, 1e4, F64)
    x, positions = torch.randn(2, 5, 3, 8, dtype=F64), torch.randint(0, 9, (2, 5))
    c, s = (torch.cat([t, t], -1)[positions].unsqueeze(2) for t in (cos, sin))
    expected = x * c + torch.cat([-x[..., 4:], x[..., :4]], -1) * s
    assert distance(ops.apply_rope(x, cos, sin, positions), expected) < 1e-15
    with pytest.raises(IndexError):
        ops.apply_rope(x, cos, sin, positions + 9)
    with pytest.raises(ValueError, match="does not fit"):
        ops.apply_rope(x[..., :6], cos, sin, positions)
    with pytest.raises(ValueError, match="head dimension 6"):
        ops.apply_rope(x[..., :6], *ops.rope_rows(cos, sin, positions), None)


# ---------------------------------------------------------------- dropout


def splitmix64(state):
    """One output of the generator in plain integers, as published."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def signed(n):
    return n - 2**64 if n >= 2**63 else n


def keys(batch, length):
    sample = torch.arange(batch)[:, None].expand(batch, length)
    position = torch.arange(length).expand(batch, length)
    return ops.token_keys(sample, torch.zeros_like(sample), position)


def test_hash_is_splitmix64():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # first output of the published generator for state 0
    ids = torch.tensor([[3, -1, 2**62]]), torch.tensor([[0, 7, 1]]), torch.tensor([[5, 0, 2**31]])
    got = ops.token_keys(*ids)[0].tolist()
    for i, key in enumerate(got):
        h = 0
        for part in ids:
            h = splitmix64((h + part[0, i].item()) % 2**64)
        assert key == signed(h)
    key, token, p = 12345, got[1], 0.3
    mask = ops.dropout_mask(p, key, torch.tensor([[token]]), 50)[0, 0].tolist()
    state = splitmix64((token ^ key) % 2**64)
    gamma = 0x9E3779B97F4A7C15
    assert mask == [signed(splitmix64((state + d * gamma) % 2**64)) >= round(p * 2**64) - 2**63 for d in range(50)]


def test_random_key_is_stable_and_unambiguous():
    assert ops.random_key("mlp", 3, 17) == ops.random_key("mlp", 3, 17)
    different = [("ab", "c"), ("a", "bc"), ("1",), (1,), (1, 1), (11,), (), ("",), ("1:1", 1), (-1,)]
    values = {ops.random_key(*parts) for parts in different}
    assert len(values) == len(different) and all(0 <= v < 2**63 for v in values)
    code = "from samestep.ops import random_key; print(random_key('mlp', 3, 17))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == ops.random_key("mlp", 3, 17)
    with pytest.raises(TypeError, match="float"):
        ops.random_key(1.5)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_statistics(p):
    batch, length, dim = 8, 64, 128
    kept = ops.dropout_mask(p, ops.random_key("a"), keys(batch, length), dim).double()
    other = ops.dropout_mask(p, ops.random_key("b"), keys(batch, length), dim).double()
    n, q = kept.numel(), 1 - p
    assert abs(kept.mean() - q) < 4.5 * (p * q / n) ** 0.5
    centred = (kept - q) / (p * q) ** 0.5
    pairs = {
        "feature": (centred[..., 1:] * centred[..., :-1]),
        "position": (centred[:, 1:] * centred[:, :-1]),
        "sample": (centred[1:] * centred[:-1]),
        "key": centred * (other - q) / (p * q) ** 0.5,
        "diagonal": (centred[:, 1:, 1:] * centred[:, :-1, :-1]),
    }
    for name, product in pairs.items():
        assert abs(product.mean()) < 4.5 / product.numel() ** 0.5, name
    # Each feature and each token alone keeps its share too.
    assert (kept.mean((0, 1)) - q).abs().max() < 5 * (p * q / (batch * length)) ** 0.5
    assert (kept.mean(-1) - q).abs().max() < 5 * (p * q / dim) ** 0.5


def test_dropout_mask_follows_the_token_not_its_place(monkeypatch):
    key, token_keys = ops.random_key("x", 1), keys(4, 6)
    mask = ops.dropout_mask(0.5, key, token_keys, 10)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(ops.dropout_mask(0.5, key, token_keys[order], 10), mask[order])
    packed = ops.dropout_mask(0.5, key, token_keys.reshape(1, 24), 10)
    assert torch.equal(packed.view(4, 6, 10), mask)
    assert torch.equal(ops.dropout_mask(0.5, key, token_keys, 4, first_feature=6), mask[..., 6:])
    assert torch.equal(ops.dropout_mask(0.5, key, token_keys[:, 5:], 10), mask[:, 5:])
    assert len({row.tobytes() for row in mask.view(24, 10).numpy()}) > 20
    monkeypatch.setattr(sys.modules["samestep.ops.dropout"], "_TEMPORARY_ELEMENTS", 35)
    assert torch.equal(ops.dropout_mask(0.5, key, token_keys, 10), mask)


@pytest.mark.parametrize("dtype", ALL)
def test_dropout_scales_and_backward_uses_the_same_mask(dtype):
    x, key, token_keys = torch.randn(2, 5, 7).to(dtype), ops.random_key("k"), keys(2, 5)
    out, grad = run(lambda x: ops.dropout(x, 0.25, key, token_keys), [x])
    kept = ops.dropout_mask(0.25, key, token_keys, 7)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), x.double() * kept / 0.75, rtol=1e-2 if dtype in LOW else 1e-6)
    assert torch.allclose(grad.double(), kept.double() / 0.75, rtol=1e-2 if dtype in LOW else 1e-6)
    assert ops.dropout(x, 0.0, key, token_keys) is x
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="probability"):
            ops.dropout(x, p, key, token_keys)


def test_attention_dropout_mask():
    key, token_keys, p = ops.random_key("attention"), keys(3, 40), 0.2
    mask = ops.attention_dropout_mask(p, key, token_keys, token_keys, 4)
    assert mask.shape == (3, 4, 40, 40)
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1.25).item()}
    centred = (mask.double() / 1.25 - 0.8) / 0.4
    assert abs(centred.mean()) < 4.5 / mask.numel() ** 0.5
    for a, b in (
        (centred[:, 1:], centred[:, :-1]),
        (centred[:, :, 1:], centred[:, :, :-1]),
        (centred[..., 1:], centred[..., :-1]),
        (centred, centred.transpose(-1, -2)),
    ):
        product = (a * b)[..., ~torch.eye(*a.shape[-2:], dtype=torch.bool)]
        assert abs(product.mean()) < 6.5 / product.numel() ** 0.5  # the transpose counts every pair twice
    later = ops.attention_dropout_mask(p, key, token_keys[:, 30:], token_keys, 2, first_head=2, dtype=F64)
    assert later.dtype == F64 and torch.allclose(later.float(), mask[:, 2:, 30:])
    swapped = ops.attention_dropout_mask(p, key, token_keys[[1, 0, 2]], token_keys[[1, 0, 2]], 4)
    assert torch.equal(swapped, mask[[1, 0, 2]])


# ---------------------------------------------------------------- torch.compile


def test_a_block_of_operators_compiles_without_a_break():
    cos, sin = ops.rope_tables(6, 16, 1e4, F32)
    positions, token_keys, norm = torch.arange(6).expand(2, -1), keys(2, 6), ops.FusedRMSNorm(48)

    def block(x, w):
        heads = ops.linear(norm(x), w, None, BF16).unflatten(-1, (3, 16))
        heads = ops.apply_rope(heads, cos, sin, positions)
        mixed = ops.attention(heads, heads, heads).flatten(2)
        return ops.dropout(ops.swiglu(mixed, x.to(mixed.dtype)), 0.1, 5, token_keys)

    inputs = [torch.randn(2, 6, 48), torch.randn(48, 48)]
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for got, expected in zip(run(compiled, inputs), run(block, inputs), strict=True):
        assert distance(got, expected) < 1e-2


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "swiglu", "embedding", "linear"])
def test_a_second_derivative_is_refused_and_not_lost(name):
    """Also where the gradient that comes in is a constant, which autograd's own check lets pass."""
    x, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    functions = {
        "swiglu": lambda: ops.swiglu(x, up),
        "embedding": lambda: ops.embedding(x, torch.tensor([0, 2])),
        "linear": lambda: ops.linear(x, torch.randn(4, 8), None, torch.bfloat16),
    }
    out = functions[name]() if name in functions else ops.get_norm_cls(name)(8)(x)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad((out * torch.randn(out.shape)).sum(), x, create_graph=True)


def test_a_table_is_looked_up_as_pytorch_looks_it_up():
    for ids in (torch.tensor([[4, 1, 4]]), torch.tensor([[4, 1, 4]], dtype=torch.int32)):
        for padding_idx in (None, 4, -1):
            ours, theirs = (torch.ones(5, 3, requires_grad=True) for _ in range(2))
            ops.embedding(ours, ids, padding_idx=padding_idx).sum().backward()
            F.embedding(ids, theirs, padding_idx=padding_idx).sum().backward()
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradient_of_a_row_looked_up_often_loses_no_digits(sparse):
    """PyTorch's, which adds one occurrence after another in float32, would be 1e-6 off."""
    table, ids = torch.randn(5, 64, requires_grad=True), torch.arange(40_000).view(8, -1) % 3
    grad = torch.randn(*ids.shape, 64)
    ops.embedding(table, ids, sparse=sparse).backward(grad)
    truth = torch.zeros(5, 64, dtype=torch.float64).index_add_(0, ids.flatten(), grad.double().flatten(0, 1))
    assert table.grad.is_sparse == sparse
    assert distance(table.grad.to_dense(), truth) < 6e-8


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "linear"])
def test_gradients_added_up_over_many_rows_lose_no_digits(name, compiled, compute):
    """PyTorch's LayerNorm, and all that it compiles, would be 1e-6 off: they add row after row."""
    x, grad = torch.randn(8192, 64).to(compute).float(), torch.randn(8192, 64).to(compute).float()
    if name == "linear":
        weight, bias = torch.randn(64, 64), torch.zeros(64, requires_grad=True)
        function, parameters = lambda x: ops.linear(x, weight, bias, compute).float(), [bias]
        truth = [grad.double().sum(0)]
    else:
        function = ops.get_norm_cls(name)(64, compute_dtype=compute)
        parameters, unit = list(function.parameters()), x.double()
        if name == "LayerNorm":
            unit = unit - unit.mean(-1, keepdim=True)
        unit = unit * torch.rsqrt(unit.square().mean(-1, keepdim=True) + function.eps)
        truth = [(grad.double() * unit).sum(0), grad.double().sum(0)]
    function = torch.compile(function, dynamic=False) if compiled else function
    function(x).backward(grad)
    for parameter, expected in zip(parameters, truth, strict=False):
        assert distance(parameter.grad, expected) < 2.5e-7


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_kept_wide_is_as_exact_as_one_in_float32(compiled, transposed):
    """Also in units for bfloat16, which sum in float32, where the CPU has them; and only this product is in them."""
    a, b = torch.randn(64, 300), torch.randn(300, 40)
    low_a = a.t().contiguous().t().bfloat16() if transposed else a.bfloat16()
    multiply = torch.compile(precision_module.wide_matmul) if compiled else precision_module.wide_matmul
    product = multiply(low_a, b.bfloat16())
    assert product.dtype is torch.float32
    assert distance(product, low_a.double() @ b.bfloat16().double()) < 3e-7
    assert not precision_module.cpu_rounds_to_bfloat16()
    assert distance(a @ b, a.double() @ b.double()) < 1e-6


def test_units_for_bfloat16_are_left_as_they_were_found():
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="inside"), precision_module.in_bfloat16_units(torch.bfloat16, cpu):
        assert precision_module.cpu_rounds_to_bfloat16() == precision_module.has_native_matmul(torch.bfloat16, cpu)
        raise RuntimeError("inside")
    for dtype in (torch.float32, torch.float64, torch.float16):
        with precision_module.in_bfloat16_units(dtype, cpu):
            assert not precision_module.cpu_rounds_to_bfloat16()
    one, other = (precision_module.in_bfloat16_units(torch.bfloat16, cpu) for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)  # as threads may
    other.__exit__(None, None, None)
    assert not precision_module.cpu_rounds_to_bfloat16()


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_sparse_gradients_of_a_table_add_up_in_the_sink(tied, padding_idx):
    """To the same bits as dense ones; also of repeated ids, and where the head is the same matrix."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 8, generator=generator)
    found = {}
    for sparse in (False, True):
        table = torch.nn.Parameter(weight.clone())
        sink = GradientSink([("table", table)], torch.float32)
        ids = torch.randint(0, 50, (5, 40), generator=torch.Generator().manual_seed(1))
        for micro_batch in (ids, ids % 7):
            rows = ops.embedding(table, micro_batch, padding_idx=padding_idx, sparse=sparse)
            hidden = rows.square().sum(1)
            (hidden @ table.T if tied else hidden.sin()).square().sum().backward()
        found[sparse] = sink.gradients()["table"]
    assert found[True].layout == torch.strided
    assert torch.equal(found[True], found[False])

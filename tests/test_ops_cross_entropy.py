"""The head with its loss against full logits in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from samestep import ops
from samestep.ops import cross_entropy as cross_entropy_module

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _fixed_random_numbers(either_implementation):
    torch.manual_seed(7)


def case(dtype, tokens=23, dim=12, vocabulary=37, params=None):
    hidden = torch.randn(tokens, dim, dtype=F64).to(dtype)
    weight = torch.randn(vocabulary, dim, dtype=F64).to(params or dtype)
    labels = torch.randint(0, vocabulary, (tokens,))
    labels[::4] = -100
    return hidden, weight, labels


def run(function, hidden, weight, labels, factor=1.0, **kwargs):
    leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    results = function(*leaves, labels, **kwargs)
    return [*(r.detach() for r in results), *torch.autograd.grad(results[0] * factor, leaves)]


def distance(got, truth):
    truth = truth.double()
    return ((got.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


class Shapes(TorchDispatchMode):
    """Remembers the shape of every tensor that an operator returned."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        self.seen |= {tuple(tensor.shape) for tensor in results if isinstance(tensor, torch.Tensor)}
        return result


@pytest.mark.parametrize("z_loss_weight", [0.0, 1e-2])
@pytest.mark.parametrize(("dtype", "bound"), [(F32, 3e-6), (F64, 1e-12)])
def test_against_closed_form(dtype, bound, z_loss_weight):
    hidden, weight, labels = case(dtype)
    got = run(
        ops.linear_cross_entropy,
        hidden,
        weight,
        labels,
        factor=0.37,
        compute_dtype=dtype,
        loss_dtype=dtype,
        z_loss_weight=z_loss_weight,
    )
    leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    logits = (leaves[0] @ leaves[1].T)[labels != -100]
    log_sum = logits.exp().sum(1).log()
    cross_entropy = (log_sum - logits.gather(1, labels[labels != -100, None])[:, 0]).sum()
    z_loss = (log_sum**2).sum()
    total = cross_entropy + z_loss_weight * z_loss
    truth = [total, cross_entropy, z_loss, *torch.autograd.grad(0.37 * total, leaves)]
    twin = run(
        ops.reference_linear_cross_entropy,
        hidden,
        weight,
        labels,
        factor=0.37,
        compute_dtype=dtype,
        loss_dtype=dtype,
        z_loss_weight=z_loss_weight,
    )
    for g, r, t in zip(got, twin, truth, strict=True):
        assert g.dtype == dtype
        assert distance(g, t) <= bound and distance(r, t) <= bound
    assert (got[3][labels == -100] == 0).all()


TERMS = {
    "smoothing": {"label_smoothing": 0.1},
    "all_smooth": {"label_smoothing": 1.0},
    "cap": {"softcap": 1.5},
    "weights": {"weights": True},
    "everything": {"label_smoothing": 0.2, "softcap": 3.0, "weights": True, "z_loss_weight": 1e-2},
}


def with_weights(terms, tokens=23):
    """Some weights are negative, some 0."""
    terms = dict(terms)
    if terms.pop("weights", False):
        terms["weights_T"] = torch.linspace(-0.5, 2, tokens, dtype=F64) * (torch.arange(tokens) % 5 != 1)
    return terms


def pytorch_losses(hidden, weight, labels, label_smoothing=0.0, softcap=None, weights_T=None, z_loss_weight=0.0):
    """The three sums in float64 from `F.cross_entropy` on full logits, token by token."""
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    weights_T = torch.ones(len(labels), dtype=F64) if weights_T is None else weights_T
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    cross_entropy = (losses * weights_T).sum()
    z_loss = (logits.exp().sum(1).log() ** 2 * weights_T)[labels != -100].sum()
    return cross_entropy + z_loss_weight * z_loss, cross_entropy, z_loss


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize(("dtype", "bound"), [(F32, 3e-6), (F64, 1e-12)])
def test_terms_against_pytorch(name, dtype, bound):
    hidden, weight, labels = case(dtype)
    terms = with_weights(TERMS[name])
    truth = run(pytorch_losses, hidden.double(), weight.double(), labels, factor=0.37, **terms)
    terms.update(compute_dtype=dtype, loss_dtype=dtype)
    for chunk in (None, 1, 7):
        got = run(ops.linear_cross_entropy, hidden, weight, labels, factor=0.37, chunk_tokens=chunk, **terms)
        assert all(distance(g, t) <= bound for g, t in zip(got, truth, strict=True))
    twin = run(ops.reference_linear_cross_entropy, hidden, weight, labels, factor=0.37, **terms)
    assert all(distance(t, truth_) <= bound for t, truth_ in zip(twin, truth, strict=True))


def assert_rounded_once(got, truth, compute):
    """Sums as in float32, gradients as their dtype allows. In units for bfloat16 the gradient of the logits is an
    operand, too."""
    step = {F32: 3e-6, BF16: 2**-8, F16: 2**-11}
    rounds = compute is BF16 and ops.has_native_matmul(BF16, "cpu")
    bounds = [3e-6] * 3 + [step[BF16] if rounds and g.dtype is F32 else step[g.dtype] for g in got[3:]]
    assert all(distance(g, t) <= bound for g, t, bound in zip(got, truth, bounds, strict=True))


@pytest.mark.parametrize("compute", [BF16, F16])
def test_terms_in_low_compute(compute):
    hidden, weight, labels = case(compute, params=F32)
    kwargs = {"compute_dtype": compute, **with_weights(TERMS["everything"])}
    got = run(ops.linear_cross_entropy, hidden, weight, labels, **kwargs)
    truth = run(ops.reference_linear_cross_entropy, hidden.double(), weight.double(), labels, **kwargs)
    assert_rounded_once(got, truth, compute)


def test_terms_far_beyond_the_cap():
    """No worse than PyTorch in float32 where tanh saturates."""
    hidden, weight, labels = case(F32)
    hidden *= 20
    terms = {"softcap": 2.0, "label_smoothing": 0.1}
    got = run(ops.linear_cross_entropy, hidden, weight, labels, compute_dtype=F32, **terms)
    truth = run(pytorch_losses, hidden.double(), weight.double(), labels, **terms)
    plain = run(pytorch_losses, hidden, weight, labels, **terms)
    for g, p, t in zip(got, plain, truth, strict=True):
        assert distance(g, t) <= 1.5 * distance(p, t) + 1e-6


def test_gradcheck_of_all_terms():
    hidden, weight, labels = case(F64, tokens=5, dim=3, vocabulary=4)
    terms = with_weights(TERMS["everything"], tokens=5)

    def total(h, w):
        return ops.linear_cross_entropy(h, w, labels, compute_dtype=F64, loss_dtype=F64, chunk_tokens=2, **terms)[0]

    assert torch.autograd.gradcheck(total, (hidden.requires_grad_(), weight.requires_grad_()))


def test_weight_zero_is_an_ignored_label():
    hidden, weight, labels = case(F32)
    weights = torch.ones(23)
    weights[3:9] = 0
    ignored = labels.clone()
    ignored[3:9] = -100
    broken = hidden.clone()
    broken[3:9] = float("nan")  # never reaches the head
    got = run(ops.linear_cross_entropy, broken, weight, labels, compute_dtype=F32, weights_T=weights)
    expected = run(ops.linear_cross_entropy, hidden, weight, ignored, compute_dtype=F32)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_terms_keep_a_chunk_within_its_memory(monkeypatch):
    """A cap needs a second buffer of the logits' size, so that a chunk has half the tokens."""
    hidden, weight, labels = case(F32, tokens=40, dim=3, vocabulary=512)
    monkeypatch.setitem(cross_entropy_module._CHUNK_BYTES, "cpu", 8 * 512 * 4)
    for terms, tokens in (({}, 8), ({"label_smoothing": 0.1}, 8), ({"softcap": 5.0}, 4)):
        with Shapes() as shapes:
            run(ops.linear_cross_entropy, hidden, weight, labels, compute_dtype=F32, **terms)
        assert max(shape[0] for shape in shapes.seen if shape[1:] == (512,)) == tokens


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing 1.5 is not between 0 and 1"),
        ({"label_smoothing": float("nan")}, "label_smoothing nan"),
        ({"softcap": 0.0}, "softcap 0.0 is not above 0"),
        ({"weights_T": torch.ones(22)}, r"weights \(22,\) must be constants"),
        ({"weights_T": torch.ones(23, requires_grad=True)}, "must be constants"),
    ],
)
def test_terms_that_make_no_sense(wrong, message):
    hidden, weight, labels = case(F32)
    with pytest.raises(ValueError, match=message):
        ops.linear_cross_entropy(hidden, weight, labels, compute_dtype=F32, **wrong)


@pytest.mark.parametrize("params", [F32, "same"])
@pytest.mark.parametrize("compute", [BF16, F16])
def test_low_compute_rounds_operands_and_nothing_else(compute, params):
    hidden, weight, labels = case(compute, params=None if params == "same" else params)
    kwargs = {"compute_dtype": compute, "z_loss_weight": 1e-3}
    got = run(ops.linear_cross_entropy, hidden, weight, labels, **kwargs)
    truth = run(ops.reference_linear_cross_entropy, hidden.double(), weight.double(), labels, **kwargs)
    assert [g.dtype for g in got] == [F32, F32, F32, compute, weight.dtype]
    assert_rounded_once(got, truth, compute)

    def eager(hidden, weight, labels, **_):
        loss = F.cross_entropy(F.linear(hidden, weight.to(compute)).float(), labels, reduction="sum")
        return (loss,)

    plain = run(eager, hidden, weight, labels)
    mine = run(ops.linear_cross_entropy, hidden, weight, labels, compute_dtype=compute)
    exact = run(ops.reference_linear_cross_entropy, hidden.double(), weight.double(), labels, compute_dtype=compute)
    for m, p, e in ((mine[0], plain[0], exact[0]), *zip(mine[3:], plain[1:], exact[3:], strict=True)):
        assert distance(m, e) <= 1.5 * distance(p, e) + 1e-6


@pytest.mark.parametrize("chunk", [1, 2, 7, 17, 100])
def test_chunks_do_not_matter(chunk):
    for dtype, bound in ((F32, 1e-6), (F64, 1e-14)):
        hidden, weight, labels = case(dtype)
        kwargs = {"compute_dtype": dtype, "loss_dtype": dtype, "z_loss_weight": 1e-2}
        whole = run(ops.linear_cross_entropy, hidden, weight, labels, **kwargs)
        parts = run(ops.linear_cross_entropy, hidden, weight, labels, chunk_tokens=chunk, **kwargs)
        assert all(distance(p, w) <= bound for p, w in zip(parts, whole, strict=True))


def test_gradcheck():
    hidden, weight, labels = case(F64, tokens=5, dim=3, vocabulary=4)

    def total(h, w):
        return ops.linear_cross_entropy(
            h, w, labels, compute_dtype=F64, loss_dtype=F64, z_loss_weight=0.1, chunk_tokens=2
        )[0]

    assert torch.autograd.gradcheck(total, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("tokens", [0, 6])
def test_no_label_counts(tokens):
    hidden, weight, _ = case(F32, tokens=tokens)
    labels = torch.full((tokens,), -100)
    results = run(ops.linear_cross_entropy, hidden, weight, labels, compute_dtype=BF16, z_loss_weight=1.0)
    assert all(torch.equal(r, torch.zeros_like(r)) for r in results)


def test_another_ignore_index_and_strided_input():
    hidden, weight, labels = case(F64)
    labels[labels == -100] = 3
    wide = torch.randn(23, 24, dtype=F64)
    kwargs = {"compute_dtype": F64, "loss_dtype": F64, "ignore_index": 3}
    for h, w in ((wide[:, ::2], weight), (hidden, weight.T.contiguous().T)):
        got = run(ops.linear_cross_entropy, h, w, labels, **kwargs)
        truth = run(ops.reference_linear_cross_entropy, h, w, labels, **kwargs)
        assert all(distance(g, t) < 1e-12 for g, t in zip(got, truth, strict=True))


@pytest.mark.parametrize("bad", [37, -1, 4000])
def test_label_outside_the_vocabulary(bad):
    hidden, weight, labels = case(F32)
    labels[5] = bad
    with pytest.raises(IndexError, match=f"label {bad} of token 5 .* 37"):
        ops.linear_cross_entropy(hidden, weight, labels, compute_dtype=F32)


def test_shapes_that_do_not_fit():
    hidden, weight, labels = case(F32)
    for arguments in ((hidden[:, :5], weight, labels), (hidden, weight, labels[:4]), (hidden[None], weight, labels)):
        with pytest.raises(ValueError, match="do not fit"):
            ops.linear_cross_entropy(*arguments, compute_dtype=F32)


def test_backward_twice_is_right():
    hidden, weight, labels = case(F32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    total = ops.linear_cross_entropy(*leaves, labels, compute_dtype=F32)[0]
    first = torch.autograd.grad(total, leaves, torch.tensor(1.0), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(total, leaves, torch.tensor(3.0), retain_graph=True)
    third = torch.autograd.grad(total, leaves, torch.tensor(0.5))
    for a, k, b, c in zip(first, kept, second, third, strict=True):
        assert torch.equal(a, k) and torch.allclose(b, 3 * k) and torch.allclose(c, 0.5 * k)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, leaves)


def test_only_total_is_differentiable_and_evaluation_forms_no_gradient():
    hidden, weight, labels = case(F32)
    weight.requires_grad_()
    total, cross_entropy, z_loss = ops.linear_cross_entropy(hidden, weight, labels, compute_dtype=F32)
    assert total.requires_grad and not cross_entropy.requires_grad and not z_loss.requires_grad
    assert [s is None for s in total.grad_fn.saved_tensors] == [True, False]  # hidden wants none
    with torch.no_grad():
        quiet = ops.linear_cross_entropy(hidden, weight, labels, compute_dtype=F32)
    assert not quiet[0].requires_grad and torch.equal(quiet[0], total)


def test_micro_batches_add_up_to_the_whole():
    hidden, weight, labels = case(BF16, params=F32)
    whole = run(ops.linear_cross_entropy, hidden, weight, labels, compute_dtype=BF16)
    parts = [
        run(ops.linear_cross_entropy, hidden[s], weight, labels[s], compute_dtype=BF16)
        for s in (slice(0, 9), slice(9, 23))
    ]
    assert distance(parts[0][0] + parts[1][0], whole[0]) < 1e-6
    assert distance(parts[0][4] + parts[1][4], whole[4]) < 1e-6


def test_extreme_logits_stay_finite():
    hidden, weight, labels = case(F32)
    results = run(ops.linear_cross_entropy, hidden * 1e4, weight, labels, compute_dtype=F32)
    assert all(r.isfinite().all() for r in results)


@pytest.mark.parametrize("compute", [F32, F64, BF16, F16])
def test_logits(compute):
    hidden, weight, _ = case(F32)
    hidden = hidden.view(1, *hidden.shape).requires_grad_()
    out = ops.logits(hidden, weight, compute)
    truth = ops.reference_linear(hidden, weight, None, compute, out_dtype=F64)
    assert out.dtype == (F64 if compute == F64 else F32) and distance(out, truth) < 1e-6
    grad = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, hidden, grad)
    (expected,) = torch.autograd.grad(truth, hidden, grad.double())
    assert distance(got, expected) < 1e-2 if compute in (BF16, F16) else 1e-6

"""The dtypes that the first step really uses, against those that the plan expects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.data.batch import Batch
from samestep.dtypes import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    HEAD_NORM,
    LOSS,
    NORM,
    PRODUCTS,
    ROTARY,
    SOFTMAX,
    STREAM,
    KindDtypes,
    kind_of,
    takes_int8,
)
from samestep.errors import TrainingError
from samestep.model.attention import Attention, AttentionCore
from samestep.model.decoder import Decoder, Layer, LossHead
from samestep.model.linear import Linear
from samestep.ops import float8, has_native_matmul, parse_dtype, wide
from samestep.ops.dispatch import reference_ops, watch_kernels
from samestep.ops.gradient_sink import ExactSink, GradientSink
from samestep.ops.precision import cpu_rounds_to_bfloat16, is_narrow
from samestep.parallel.data import is_distributed, local
from samestep.step.objective import Objective
from samestep.step.step import TrainStep
from samestep.step.update import Updater
from samestep.torch_private import watch_operators

_MATRIX = {"aten.mm", "aten.addmm", "aten.addmm_", "aten.bmm", "aten.baddbmm"}
_FUSED_ATTENTION = "aten._scaled_dot_product"
_SOFTMAX = {"aten._softmax", "aten._safe_softmax"}
_ROTATION = {"aten.mul", "aten.mul_", "aten.addcmul", "aten.addcmul_"}
_LOSS = {"aten.amax", "aten.exp", "aten.exp_", "aten.log", "aten._log_softmax"}
_CASTS = {"aten._to_copy", "aten.copy_"}
_MOVES = {"aten.clone", "aten.index", "aten.index_select", "aten.gather", "aten.cat", "aten.repeat"}
"""Operators whose result has the values of their input."""
_NORMALIZATION = {
    "aten.native_layer_norm",
    "aten._fused_rms_norm",
    *(f"aten.{name}" for name in ("mul", "mul_", "pow", "mean", "var_mean", "add", "sub", "div", "rsqrt")),
}
_REDUCTIONS = ("c10d.allreduce_", "c10d._reduce_scatter_base_", "c10d.reduce_scatter_")
_LEAST_MESSAGE = 64
"""Elements of a message of gradients; losses are fewer."""
_SAMPLE = 1024
"""Elements by which a tensor is found to hold only numbers of a narrower dtype."""
_UNITS = ("norm", "loss_head")
"""Modules besides the layers whose weights may be gathered on their own."""
_WIDTHS = (torch.float32, torch.bfloat16, torch.float16)


def on_device(rows: Iterable[KindDtypes], device: torch.device, loss: torch.dtype) -> tuple[KindDtypes, ...]:
    """The expected dtypes with what products run in on a device that cannot multiply in the compute dtype.

    Args:
        loss: `Precision.loss`.
    """
    return tuple(replace(row, products=_products(row, device, loss)) for row in rows)


def _products(row: KindDtypes, device: torch.device, loss: torch.dtype) -> str | None:
    compute = parse_dtype(row.compute)
    if row.products is not None:  # float8
        return row.products
    if row.kind == HEAD:
        low = compute is torch.bfloat16 and has_native_matmul(compute, device) and loss is torch.float32
        runs = compute if low else wide(compute, loss)
    elif row.kind in PRODUCTS:
        runs = compute if has_native_matmul(compute, device) else wide(compute)
    else:
        return None
    return None if runs == compute else _name(runs)


def _name(dtype: torch.dtype) -> str:
    return float8.NAME if dtype is float8.FLOAT8 else str(dtype).removeprefix("torch.")


class _Origin(NamedTuple):
    """Where the values of a tensor came from: the call of a module, whether it computed them (or only cast and moved
    what it was given), and the narrower dtype that it rounded them to."""

    call: int
    made: bool
    narrowed: torch.dtype | None


class Seen(NamedTuple):
    """The dtypes that a module may have been asked for, so that it did what was seen; and where that was."""

    dtypes: frozenset[torch.dtype]
    where: str


class Observer:
    """Watches forward passes of a decoder inside `watching`.

    The dtype that operands were rounded to is not always the one in which they are multiplied: rounded numbers may be
    widened again. It is told from the casts inside the module, and from the values. Where two settings come to the very
    same operations, both are seen.

    Args:
        operators: watch single operators, not only what modules pass on. Not possible in compiled ones.

    Attributes:
        compute: kind -> what was seen, by the dtypes.
        products: kind -> dtypes in which its linear layers multiplied.
        weights: kind -> dtypes of its weights in the pass.
        sent: dtypes of the messages in which tensors were summed over ranks.
    """

    def __init__(self, model: Decoder, *, operators: bool):
        self._model, self._operators = model, operators
        self.compute: dict[str, dict[frozenset[torch.dtype], Seen]] = defaultdict(dict)
        self.products: dict[str, set[torch.dtype]] = defaultdict(set)
        self.weights: dict[str, set[torch.dtype]] = defaultdict(set)
        self.sent: set[torch.dtype] = set()
        self._is_aside = False
        self._stack: list[tuple[str, nn.Module, int]] = []
        self._origins: dict[int, _Origin] = {}
        self._calls = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the forward passes in here."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if name and (self._operators or isinstance(module, Layer) or name in _UNITS):
                    stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                    stack.callback(module.register_forward_hook(self._leaving(), always_call=True).remove)
            if self._operators:
                stack.enter_context(watch_operators(self._before, self._after))
                stack.enter_context(watch_kernels(self._after_kernel))
            try:
                yield
            finally:
                self._stack.clear()
                self._origins.clear()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Observe what is sent in here."""
        with watch_operators(self._before_sending, lambda *_: None):
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is sent in here is none of the step's: a listener may use collectives of its own."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    # ---- modules

    def _entering(self, name: str):
        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._calls += 1
            self._stack.append((name, module, self._calls))
            if isinstance(module, Layer):
                self._note(STREAM, {inputs[0].dtype}, f"input of {name}")
                everything = self._model.named_parameters(remove_duplicate=False)  # a tied head has its table's
                self._note_weights(pair for pair in everything if not pair[0].startswith("layers."))
            if isinstance(module, Layer) or name in _UNITS:
                self._note_weights(module.named_parameters(prefix=name))

        return enter

    def _leaving(self):
        def leave(module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
            name, *_ = self._stack.pop()
            kind = kind_of(name)
            if isinstance(module, Linear) and kind and isinstance(result, Tensor):
                self._note(kind, {result.dtype}, f"output of {name}")

        return leave

    def _note_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in parameters:
            kind = kind_of(name)
            if kind is not None and not is_distributed(parameter):  # gathered, in its unit and not before
                self.weights[kind].add(parameter.dtype)

    def _note(self, kind: str, dtypes: set[torch.dtype], where: str) -> None:
        self.compute[kind].setdefault(frozenset(dtypes), Seen(frozenset(dtypes), where))

    # ---- operators

    def _before(self, operator: str, arguments: tuple[Any, ...]) -> None:
        if not self._stack:
            if operator == "aten.embedding":
                self._note(EMBEDDING, {arguments[0].dtype}, operator)
            return
        name, module, _ = self._stack[-1]
        kind, where = kind_of(name), f"{operator} in {name}"
        if isinstance(module, LossHead):
            if operator in _LOSS:
                self._note(LOSS, {arguments[0].dtype}, where)
        elif isinstance(module, Attention):
            if operator in _ROTATION:
                self._note_operands(ROTARY, arguments, where)
            return
        elif isinstance(module, AttentionCore):
            if operator in _SOFTMAX:
                self._note(SOFTMAX, {arguments[0].dtype}, where)
            elif operator.startswith(_FUSED_ATTENTION):
                self._note_operands(ATTENTION, arguments[:3], where)
        if operator in _MATRIX and kind in PRODUCTS and (wrapped := _wrapped_dtypes(arguments)):
            self.products[kind] |= wrapped
        elif operator in _MATRIX and kind in PRODUCTS:
            self._note_operands(kind, arguments, where)
            if not isinstance(module, AttentionCore):
                self.products[kind].add(_arithmetic(arguments))
        elif kind in (NORM, HEAD_NORM) and operator in _NORMALIZATION:
            self._note_operands(kind, arguments, where)

    def _note_operands(self, kind: str, arguments: Sequence[Any], where: str) -> None:
        """What was given to the module, not what it has computed from that."""
        arithmetic = _arithmetic(arguments)
        for tensor in _floating(arguments):
            origin = self._origin(tensor)
            if not origin.made:
                self._note(kind, _candidates(tensor, arithmetic, origin.narrowed), where)

    def _origin(self, tensor: Tensor) -> _Origin:
        call = self._stack[-1][2]
        found = self._origins.get(_place(tensor))
        return found if found is not None and found.call == call else _Origin(call, False, None)

    def _after(self, operator: str, arguments: tuple[Any, ...], result: Any) -> None:
        name, module, call = self._stack[-1] if self._stack else ("", None, 0)
        if isinstance(module, AttentionCore) and operator.startswith(_FUSED_ATTENTION) and "math" not in operator:
            # The second result is the logarithm of the softmax's sums, in the softmax's own dtype.
            self._note(SOFTMAX, {result[1].dtype}, f"{operator} in {name}")
        if not self._stack:
            return
        given = _floating(arguments)
        places = {_place(tensor) for tensor in given}
        for tensor in _floating(result if isinstance(result, tuple | list) else (result,)):
            place = _place(tensor)
            if operator in _CASTS and given:
                self._origins[place] = self._cast(given[-1], tensor)
            elif operator in _MOVES and given:
                self._origins[place] = self._origin(given[0])
            elif operator.endswith("_") or place not in places:  # else a view
                self._origins[place] = _Origin(call, True, None)

    def _after_kernel(self, kernel: str, arguments: tuple[Any, ...], result: Any) -> None:
        if not self._stack:
            return
        name, _, call = self._stack[-1]
        kind, where = kind_of(name), f"{kernel} in {name}"
        if kernel == "rms_norm" and kind in (NORM, HEAD_NORM):
            self._note(kind, {arguments[3]}, where)
        elif kernel == "layer_norm" and kind in (NORM, HEAD_NORM):
            self._note(kind, {arguments[0].dtype}, where)
        elif kernel == "rope":
            self._note(ROTARY, {arguments[1].dtype}, where)
        elif kernel == "attention":
            self._note_operands(ATTENTION, arguments[:3], where)
            self._note(SOFTMAX, {result[1].dtype}, where)
        elif kernel == "token_losses_":
            self._note(LOSS, {arguments[0].dtype}, where)
        for tensor in _floating(result if isinstance(result, tuple) else (result,)):
            self._origins[_place(tensor)] = _Origin(call, True, None)

    def _cast(self, source: Tensor, target: Tensor) -> _Origin:
        origin = self._origin(source)
        narrows = target.dtype != source.dtype and (is_narrow(target.dtype) or source.dtype is torch.float64)
        return origin._replace(narrowed=target.dtype) if narrows else origin

    def _before_sending(self, operator: str, arguments: tuple[Any, ...]) -> None:
        if operator in _REDUCTIONS and not self._is_aside:
            flat = [t for part in arguments for t in (part if isinstance(part, list | tuple) else [part])]
            self.sent |= {t.dtype for t in flat if isinstance(t, Tensor) and t.numel() >= _LEAST_MESSAGE}


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _floating(values: Iterable[Any]) -> list[Tensor]:
    """Those with memory of their own."""
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.ndim]
    return [tensor for tensor in tensors if not _is_wrapper(tensor)]


def _is_wrapper(value: Any) -> bool:
    """Whether it is a tensor made of others, such as one in float8 with its scales."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")


def _wrapped_dtypes(values: Iterable[Any]) -> set[torch.dtype]:
    """Of what wrappers hold: torchao's tell the dtype that their numbers had before."""
    wrappers = [value for value in values if _is_wrapper(value)]
    return {getattr(wrapper, wrapper.__tensor_flatten__()[0][0]).dtype for wrapper in wrappers}


def _arithmetic(arguments: Iterable[Any]) -> torch.dtype:
    """The dtype that operands of several are widened to, or rounded to by the units they are multiplied in."""
    found = _floating(arguments)
    dtype = found[0].dtype if found else torch.float32
    for tensor in found:
        dtype = torch.promote_types(dtype, tensor.dtype)
    rounds = dtype is torch.float32 and any(t.is_cpu for t in found) and cpu_rounds_to_bfloat16()
    return torch.bfloat16 if rounds else dtype


def _candidates(tensor: Tensor, arithmetic: torch.dtype, narrowed: torch.dtype | None) -> set[torch.dtype]:
    """The dtypes to which an operand may have been rounded."""
    if is_narrow(arithmetic):
        return {arithmetic}
    if narrowed is not None:
        return {narrowed}
    narrower = {dtype for dtype in _WIDTHS if dtype.itemsize < tensor.dtype.itemsize and _holds(dtype, tensor)}
    return {arithmetic, tensor.dtype} | narrower


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether the elements of a sample are all numbers of a narrower dtype."""
    if not tensor.numel():
        return True
    count = tensor.numel()
    spread = torch.linspace(0, count - 1, min(_SAMPLE, count), dtype=torch.float64, device=tensor.device).long()
    place: list[Tensor] = []  # `torch.unravel_index` imports sympy, a second
    for size in reversed(tensor.shape):
        place.insert(0, spread % size)
        spread = spread // size
    values = tensor.detach()[tuple(place)]
    return bool((values.to(dtype).to(values.dtype) == values).all())


class _Observed:
    """An objective whose forward passes are observed until one has reached the loss, and listened to from the last
    micro-batch on."""

    def __init__(self, objective: Objective, audit: DtypeAudit, micro_batches: int):
        self._objective, self._audit, self._left = objective, audit, micro_batches
        self.weights = objective.weights

    def counts(self, batch: Batch) -> dict[str, int]:
        return self._objective.counts(batch)

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        self._left -= 1
        if self._left <= 0:
            self._audit.listen()
        if self._audit.has_seen_loss:
            return self._objective.sums(model, batch)
        with self._audit.observer.watching():
            sums = self._objective.sums(model, batch)
        self._audit.has_seen_loss = batch.targets > 0
        return sums


class DtypeAudit:
    """Compares what the first step used with what was expected, once.

    Put the step inside of `first_step`, give it `on_gradients` as a hook, then `check`.

    The inside of compiled modules is not seen: the result names the kinds of which nothing was. Twins
    (`SAMESTEP_REFERENCE_OPS=1`) compute in float64, so they are left out likewise.
    """

    def __init__(self, expected: Sequence[KindDtypes], model: Decoder, *, ranks: int, is_compiled: bool):
        self._expected = expected
        # A compiled backward pass would not run under it.
        self._may_listen = ranks > 1 and not is_compiled
        self.observer = Observer(model, operators=not (is_compiled or reference_ops()))
        self.is_done = False
        self.has_seen_loss = False
        self._gradients: dict[str, set[torch.dtype]] = defaultdict(set)
        self._ears = ExitStack()

    @contextmanager
    def first_step(self, step: TrainStep, micro_batches: int) -> Iterator[None]:
        """Observe the step that is taken in here, until `check`."""
        if self.is_done:
            yield
            return
        objective = step.objective
        step.objective = _Observed(objective, self, micro_batches)
        try:
            yield
        finally:
            step.objective = objective
            self._ears.close()

    def listen(self) -> None:
        """From here on gradients may be sent."""
        if self._may_listen:
            self._may_listen = False
            self._ears.enter_context(self.observer.listening())

    def on_gradients(self, gradients: Mapping[str, Tensor], sink: GradientSink | ExactSink) -> None:
        self._ears.close()
        if self.is_done:
            return
        for name, gradient in gradients.items():
            kind = kind_of(name)
            if kind is not None:
                summed = sink.total.dtype if isinstance(sink, ExactSink) else local(gradient).dtype
                self._gradients[kind].add(summed)

    def check(self, updater: Updater) -> dict[str, Any]:
        """After the first update: what was seen, for the log.

        Raises:
            TrainingError: a dtype differs from what was expected.
        """
        self.is_done = True
        masters, state = _of_optimizer(updater, {row.kind: row.state for row in self._expected})
        seen = []
        for row in self._expected:
            found = replace(
                row,
                compute=seen_compute(row, self.observer),
                products=_seen_products(row, self.observer),
            )
            if row.weights is not None:
                _compare(row.kind, "storage of weights", row.weights, self.observer.weights[row.kind])
                _compare(row.kind, "accumulation of gradients", row.gradients, self._gradients[row.kind])
                _compare(row.kind, "master weights", row.masters, masters[row.kind])
                _compare(row.kind, "optimizer state", row.state, state[row.kind])
                if self.observer.sent:
                    _compare(row.kind, "reduction of gradients", row.reduction, self.observer.sent)
            seen.append(found)
        unseen = [row.kind for row in self._expected if not self.observer.compute[row.kind]]
        sent = sorted(map(_name, self.observer.sent))
        return {"kinds": [asdict(row) for row in seen], "compute_not_seen": unseen, "sent": sent}


def seen_compute(row: KindDtypes, observer: Observer) -> str:
    """The expected compute dtype, which everything seen agrees with.

    Raises:
        TrainingError: something does not.
    """
    wanted = parse_dtype(row.compute)
    for dtypes, where in observer.compute[row.kind].values():
        if wanted not in dtypes:
            raise _difference(row.kind, "compute", row.compute, dtypes, where)
    return row.compute


def _seen_products(row: KindDtypes, observer: Observer) -> str | None:
    _compare(row.kind, "matrix products", row.products or row.compute, observer.products[row.kind])
    return row.products


def _compare(kind: str, what: str, expected: str | None, found: set[torch.dtype]) -> None:
    """Nothing was seen where the set is empty."""
    if not {_name(dtype) for dtype in found} <= {expected}:
        raise _difference(kind, what, expected or "none", found)


def _difference(
    kind: str, what: str, expected: str, found: Iterable[torch.dtype], where: str | None = None
) -> TrainingError:
    seen = " or ".join(sorted(map(_name, found)))
    return TrainingError(
        f"{kind}: {what} should be {expected}, but the first step used {seen}{f' ({where})' if where else ''}\n"
        "  fix: look for an operator or a module that was replaced by another; if there is none, this is a bug: please "
        "report it with config.resolved.yaml"
    )


def _of_optimizer(
    updater: Updater, expected: Mapping[str, str | None]
) -> tuple[dict[str, set[torch.dtype]], dict[str, set[torch.dtype]]]:
    """Dtypes of master weights and of state, by kind. Single numbers, such as a count of steps, are no state; nor is
    what int8 state, where it is expected, has to leave in float32.

    Args:
        expected: kind -> dtype of the state.
    """
    masters: dict[str, set[torch.dtype]] = defaultdict(set)
    state: dict[str, set[torch.dtype]] = defaultdict(set)
    for name in updater.parameters:
        kind = kind_of(name)
        if kind is None:
            continue
        if name in updater.masters:
            masters[kind].add(updater.masters[name].dtype)
        trained = updater.trained(name)
        stays_wide = expected.get(kind) == "int8" and not takes_int8(trained.numel())
        for value in updater.optimizer.state.get(trained, {}).values():
            if isinstance(value, Tensor) and value.ndim:
                is_coded = hasattr(value, "codes")  # torchao's state in blocks of eight bits
                dtype = torch.int8 if is_coded else local(value).dtype
                if not (stays_wide and dtype is torch.float32):
                    state[kind].add(dtype)
    return masters, state

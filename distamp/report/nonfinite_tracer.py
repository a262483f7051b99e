"""NonFiniteTracer: the ops from which numbers that are not finite spread through a step.

An op that returns such a number for finite inputs is an origin. An op that reads one passes it on,
by the storage of its tensors. Only origins that reach the loss or a gradient count. A collective is
an origin only if no rank passed such a number to it, so the results of all ranks are merged.
"""

from __future__ import annotations

import linecache
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from distamp.module_names import module_names
from distamp.report.collectives import CollectiveCall
from distamp.report.nonfinite import NonFiniteOrigin, TensorRange
from distamp.report.tensors import (
    ModelTensor,
    flatten_tensors,
    local_tensor,
    model_tensors,
    shape_of,
    storage_key,
    stored_elements,
)
from distamp.report.tracing import OpCall, OpContext, OpInfo, TraceListener, in_backward

__all__ = ["NonFiniteTracer", "TraceResult", "floating_tensors", "merge_ranks", "tensor_range"]

# Ops that return memory with the contents that it happens to have.
_UNINITIALIZED = frozenset(
    """
    empty empty_like new_empty empty_strided new_empty_strided empty_permuted resize_ resize_as_
    set_
    """.split()  # noqa: SIM905
)
# Ops that write an infinity which is one of their arguments, as masks do.
_FILLS = frozenset(
    """
    full full_like new_full fill fill_ masked_fill masked_fill_ where scalar_tensor constant_pad_nd
    index_fill index_fill_
    """.split()  # noqa: SIM905
)
# Parts of the names of ops that turn the -inf of a mask into 0.
_MASK_CONSUMERS = ("softmax", "attention", "logsumexp", "exp")


@dataclass(eq=False, slots=True)
class _Origin:
    """The origin of a non-finite number on one rank.

    Args:
        description: The op or tensor.
        order: The number of ops that ran on its rank before it.
        is_mask: Whether it is the infinity of a mask, which is named only if there is no other
            origin.
        key: The key of a collective, equal on all its ranks.
    """

    description: NonFiniteOrigin
    order: int
    is_mask: bool = False
    key: tuple[Any, ...] = ()


_Key = tuple[Any, ...]
_Origins = frozenset[_Origin]


@dataclass(slots=True)
class _Inputs:
    """The tensors of an op before it runs.

    Args:
        tensors: Floating point tensors with their argument names.
        ranges: Ranges of tensors that the op reads and then writes, by id.
        origins: An origin for each transfer between ranks.
    """

    tensors: list[tuple[str, Tensor]]
    ranges: dict[int, TensorRange] = field(default_factory=dict)
    origins: list[_Origin] = field(default_factory=list)

    def mutated(self, op: OpInfo) -> list[Tensor]:
        """Return the tensors that the op writes."""
        return [tensor for name, tensor in self.tensors if name in op.mutated]


class TraceResult(NamedTuple):
    """The result of one rank's trace, which the ranks exchange.

    Attributes:
        collective_inputs: The origins of non-finite inputs of collectives, by the call's key.
        reached: The results that are not finite, by origin.
        total: The sum of the largest numbers of the forward pass, which is equal in two equal
            replays.
        ran_compiled: Whether compiled code ran eagerly.
    """

    collective_inputs: dict[_Key, _Origins]
    reached: dict[_Origin, list[str]]
    total: float
    ran_compiled: bool


class NonFiniteTracer(TraceListener):
    """Listener that follows non-finite numbers through one step of one rank.

    Args:
        model: The model of the step.
    """

    needs_lines = True
    needs_inputs = True

    def __init__(self, model: nn.Module) -> None:
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._model_tensors: dict[object, list[ModelTensor]] = {}
        for row in model_tensors(module_names(model)):
            local = local_tensor(row.tensor)
            storage = storage_key(local)
            rows = self._model_tensors.setdefault(storage, [])
            rows.append(ModelTensor(row.kind, row.name, row.module, local))
        # A key keeps its storage's number from being used again.
        self._origins: dict[object, _Origins] = {}
        self._order = 0
        self._collective_counts: Counter[_Key] = Counter()
        self._running: dict[int, _Inputs] = {}
        self._total = 0.0
        self._collective_inputs: dict[_Key, _Origins] = {}
        self._reached: dict[_Origin, list[str]] = {}

    @property
    def result(self) -> TraceResult:
        """The result so far."""
        return TraceResult(
            self._collective_inputs, self._reached, self._total, self.tracer.ran_compiled
        )

    def unwraps(self, types: Iterable[type]) -> bool:
        """See the ops of a DTensor on this rank's part."""
        return any(map(is_traceable_wrapper_subclass_type, types))

    def before_backward(self, loss: Tensor) -> None:
        """Check a loss."""
        self.check_result("loss", loss)

    def before_op(self, call: OpCall) -> None:
        """Look at the inputs that the op may overwrite or send."""
        self._order += 1
        tensors = []
        for name, value in call.arguments.items():
            for tensor in floating_tensors(value):
                tensors.append((name, tensor))
        inputs = _Inputs(tensors)
        if call.collectives:
            inputs.origins = [self._send(call, collective) for collective in call.collectives]
        elif not call.op.overwrites:
            for tensor in inputs.mutated(call.op):
                inputs.ranges[id(tensor)] = tensor_range("", tensor)
        self._running[id(call)] = inputs

    def after_op(self, call: OpCall) -> None:
        """Look at the outputs."""
        inputs = self._running[id(call)]
        if call.collectives:
            return
        del self._running[id(call)]
        if not call.op.is_view:
            self._check_outputs(call, inputs)

    def on_collective(self, call: OpCall, collective: CollectiveCall) -> None:
        """Mark the outputs of a collective, which may receive their values later."""
        inputs = self._running[id(call)]
        origin = inputs.origins.pop(0)
        self._mark(floating_tensors(collective.outputs), frozenset({origin}))
        if not inputs.origins:
            del self._running[id(call)]

    def check_result(self, name: str, values: Any) -> None:
        """Record the origins of a loss or gradient that is not finite.

        Args:
            name: ``"loss"``, or the parameter of a gradient.
            values: Tensors in any nesting.
        """
        local_tensors = list(map(local_tensor, flatten_tensors(values)))
        for tensor in floating_tensors(local_tensors):
            value_range = tensor_range(name, tensor)
            if not value_range.finite:
                place = self._describe(name, self.tracer.current_context())
                for origin in self._origins_of(tensor, value_range, place):
                    self._reached.setdefault(origin, []).append(name)

    def _describe(self, kernel: str, context: OpContext) -> NonFiniteOrigin:
        """Return an op as an origin without values."""
        op = context.function or kernel.strip("_")
        parameter = ""
        direction = "forward"
        if context.phase == "backward":
            direction = "backward"
            variable = getattr(context.node, "variable", None)
            parameter, _ = self.tracer.params.get(id(variable), ("", ""))
            if isinstance(context.node, torch.autograd.function.BackwardCFunction):
                op = type(context.node).__name__.removesuffix("Backward")
        return NonFiniteOrigin(
            kind="op",
            op=op,
            kernel=kernel,
            module=context.module,
            parameter=parameter,
            direction=direction,
            ranks=(self._rank,),
            micro_batch=context.micro_batch,
            line=context.line,
        )

    def _check_outputs(self, call: OpCall, inputs: _Inputs) -> None:
        """Record the origins of outputs that are not finite."""
        outputs = call.output
        if call.op.name == "all_gather_copy_in":
            # The second output is the whole buffer, and this rank has filled only its part.
            outputs = outputs[:1]
        written = {}
        for tensor in (*floating_tensors(outputs), *inputs.mutated(call.op)):
            written[id(tensor)] = tensor
        if call.op.name in _UNINITIALIZED:
            self._mark(written.values(), frozenset())
            return
        nonfinite = []
        ranges = []
        for tensor in written.values():
            value_range = tensor_range("", tensor)
            if not value_range.finite:
                nonfinite.append(tensor)
                ranges.append(value_range)
            elif not in_backward():
                self._total += value_range.high
        if nonfinite:
            place = replace(self._describe(call.op.name, call.context), output=ranges[0])
            self._mark(nonfinite, self._origins_of_output(call, inputs, place, nonfinite))
        elif any(part in call.op.name for part in _MASK_CONSUMERS):
            self._note_masks(tensor for _, tensor in inputs.tensors)

    def _note_masks(self, tensors: Iterable[Tensor]) -> None:
        """Note as masks the origins of -inf that a softmax turned into 0."""
        for tensor in tensors:
            for origin in self._origins.get(storage_key(tensor), ()):
                output = origin.description.output
                if output is not None and output.is_mask:
                    origin.is_mask = True

    def _origins_of_output(
        self, call: OpCall, inputs: _Inputs, place: NonFiniteOrigin, nonfinite: Sequence[Tensor]
    ) -> _Origins:
        """Return the origins of an op's outputs: the origins of its inputs, or the op itself."""
        ranges: list[TensorRange] = []
        origins: _Origins = frozenset()
        fills_uninitialized = False
        output_storages = {storage_key(tensor) for tensor in nonfinite}
        for name, tensor in inputs.tensors:
            is_mutated = name in call.op.mutated
            if is_mutated and call.op.overwrites:
                continue
            value_range = inputs.ranges.get(id(tensor)) or tensor_range("", tensor)
            value_range = replace(value_range, name=name)
            ranges.append(value_range)
            storage = storage_key(tensor)
            known_origins = self._origins.get(storage)
            # Some ops return an input without declaring the alias, and the input then shows the
            # output.
            shows_output = storage in output_storages
            is_input = is_mutated or known_origins is not None or not shows_output
            if is_input and not value_range.finite:
                origins |= self._origins_of(tensor, value_range, place)
                if is_mutated and known_origins == frozenset():
                    fills_uninitialized = True
        output_is_nan = place.output is not None and place.output.is_nan
        nan_is_new = output_is_nan and not any(value_range.is_nan for value_range in ranges)
        is_origin = not origins and not fills_uninitialized
        if nan_is_new and all(origin.is_mask for origin in origins):
            is_origin = True
        if is_origin:
            place = replace(place, inputs=tuple(ranges))
            is_mask = _fills_infinity(call) and not output_is_nan
            origins |= {_Origin(place, self._order, is_mask)}
        return origins

    def _send(self, call: OpCall, collective: CollectiveCall) -> _Origin:
        """Record the inputs of a collective; return the origin of its outputs on all ranks."""
        place = self._describe(collective.name, call.context)
        self._collective_counts[collective.key] += 1
        key = (*collective.key, self._collective_counts[collective.key])
        ranges = []
        if collective.is_sender:
            for tensor in floating_tensors(collective.inputs):
                value_range = tensor_range(f"rank {self._rank}", tensor)
                ranges.append(value_range)
                if not value_range.finite:
                    origins = self._origins_of(tensor, value_range, place)
                    earlier = self._collective_inputs.get(key, frozenset())
                    self._collective_inputs[key] = earlier | origins
        place = replace(place, kind="collective", inputs=tuple(ranges))
        return _Origin(place, self._order, key=key)

    def _mark(self, tensors: Iterable[Tensor], origins: _Origins) -> None:
        for tensor in tensors:
            self._origins[storage_key(tensor)] = origins

    def _origins_of(
        self, tensor: Tensor, value_range: TensorRange, place: NonFiniteOrigin
    ) -> _Origins:
        """Return the origins of a tensor that is not finite.

        A tensor without an origin held the number before the step.
        """
        storage = storage_key(tensor)
        known_origins = self._origins.get(storage)
        if known_origins is not None:
            return known_origins
        kind, name, module = "input", "", place.module
        for row in self._model_tensors.get(storage, ()):
            if not tensor_range("", row.tensor).finite:
                kind, name = row.kind, row.name
                module = name.rpartition(".")[0]
                break
        if kind == "input" and self._collective_inputs:
            # Threads without a trace, such as a hook's, pass on the result of a collective.
            return frozenset().union(*self._collective_inputs.values())
        is_infinite_scalar = tensor.dim() == 0 and math.isinf(value_range.low)
        is_mask = kind != "parameter" and (value_range.is_mask or is_infinite_scalar)
        place = replace(
            place,
            kind=kind,
            parameter=name,
            module=module,
            inputs=(value_range,),
            output=value_range,
        )
        origins = frozenset({_Origin(place, self._order, is_mask)})
        self._mark([tensor], origins)
        return origins


def _fills_infinity(call: OpCall) -> bool:
    """Return whether an op writes an infinity that is one of its arguments."""
    if call.op.name not in _FILLS:
        return False
    values = call.arguments.values()
    return any(isinstance(value, float) and math.isinf(value) for value in values)


def floating_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested values that may contain NaN or inf."""
    tensors = []
    for tensor in flatten_tensors(values):
        if not tensor.is_floating_point() and not tensor.is_complex():
            continue
        # float4 has neither NaN nor infinity.
        if tensor.device.type == "meta" or tensor.dtype is torch.float4_e2m1fn_x2:
            continue
        if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass_type(type(tensor)):
            continue
        tensors.append(tensor)
    return tensors


def tensor_range(name: str, tensor: Tensor) -> TensorRange:
    """Return the range of a tensor's elements, in any layout."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = tensor.detach()
    if values.is_sparse:
        # Elements at equal places count as their sum.
        values = values.coalesce()
    values = stored_elements(values)
    if values.layout is not torch.strided:
        # The opaque layout of oneDNN has no elements to read.
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.dtype.itemsize == 1:
        values = values.float()
    low = high = 0.0
    if values.numel():
        low, high = torch.stack(torch.aminmax(values)).tolist()
    return TensorRange(name, shape_of(tensor), dtype, low, high)


def _origins_by_collective(results: Sequence[TraceResult]) -> dict[_Key, set[_Origin]]:
    """Return the origins of the inputs of each collective on all ranks."""
    origins_by_key: dict[_Key, set[_Origin]] = {}
    for result in results:
        for key, origins in result.collective_inputs.items():
            origins_by_key.setdefault(key, set()).update(origins)
    return origins_by_key


def merge_ranks(results: Sequence[TraceResult]) -> NonFiniteOrigin | None:
    """Return the first origin on all ranks, or None if no result is non-finite."""
    origins = _trace_back(results)
    if not origins:
        return None
    first = origins[0].description
    similar = []
    for origin in origins:
        if _place(origin.description) == _place(first):
            similar.append(origin.description)
    path, _, number = first.line.rpartition(":")
    line = first.line
    code = linecache.getline(path, int(number or 0)).strip()
    if code:
        line = f"{line}: {code}"
    inputs: list[TensorRange] = []
    ranks: set[int] = set()
    reached: dict[str, None] = {}
    carried_by: dict[str, None] = {}
    for description in similar:
        inputs += description.inputs
        ranks.update(description.ranks)
        reached.update(dict.fromkeys(description.reached))
        carried_by.update(dict.fromkeys(description.carried_by))
    if first.kind != "collective":
        inputs = list(first.inputs)
    return replace(
        first,
        line=line,
        inputs=tuple(inputs),
        ranks=tuple(sorted(ranks)),
        reached=tuple(reached),
        carried_by=tuple(carried_by),
    )


def _place(origin: NonFiniteOrigin) -> tuple[Any, ...]:
    """Return the fields that equal origins on several ranks share."""
    return (
        origin.kind,
        origin.kernel,
        origin.module,
        origin.parameter,
        origin.direction,
        origin.micro_batch,
        origin.line,
    )


class _Reach(NamedTuple):
    """An origin with the results that it reached, and the collectives between them."""

    origin: _Origin
    names: tuple[str, ...]
    path: tuple[str, ...] = ()


def _trace_back(results: Sequence[TraceResult]) -> list[_Origin]:
    """Return the origins of all non-finite results, the most likely first.

    An origin that is a collective is replaced by the origins of its inputs on all ranks.
    """
    senders = _origins_by_collective(results)
    queue = []
    for result in results:
        for origin, reached_names in result.reached.items():
            queue.append(_Reach(origin, tuple(reached_names)))
    paths: dict[_Origin, dict[str, None]] = {}
    reached: dict[_Origin, dict[str, None]] = {}
    visited = set()
    # The loop appends to the queue.
    for origin, names, path in queue:
        if (origin, names) in visited:
            continue
        visited.add((origin, names))
        if origin.key in senders:
            _, group_description = origin.key[0]
            collective = f"{origin.description.kernel} over {group_description}"
            longer_path = (*path, collective)
            for sender in senders[origin.key]:
                queue.append(_Reach(sender, names, longer_path))
        else:
            paths.setdefault(origin, {}).update(dict.fromkeys(path))
            reached.setdefault(origin, {}).update(dict.fromkeys(names))
    for origin, path_names in paths.items():
        origin.description = replace(
            origin.description, carried_by=tuple(path_names), reached=tuple(reached[origin])
        )
    return sorted(reached, key=_likelihood)


def _likelihood(origin: _Origin) -> tuple[Any, ...]:
    """Return a sort key by which masks come last."""
    return origin.is_mask, origin.order, origin.description.ranks

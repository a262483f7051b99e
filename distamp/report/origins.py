"""One rank's watch of a step: where each non-finite number was born, and what it spoilt.

A kernel that makes a non-finite number of finite ones is an origin; one that is given one passes it
on, by the storage of its tensors. Only origins that reach the loss or a gradient count, and ranks
put together what they saw: a collective is an origin only where no rank fed it such a number.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from distamp.report.following import (
    Follower,
    Kernel,
    Owner,
    elements_of,
    group_of,
    held_by,
    local_of,
    shape_of,
    storage_of,
    tensors_in,
)
from distamp.report.nonfinite import NonFiniteOrigin, TensorRange

__all__ = ["Watch", "first_of", "floats_in", "range_of"]

_in_backward = torch._C._current_graph_task_id
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
# What gives memory as it is found.
_EMPTY = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
    + ("resize_", "resize_as_", "set_")
)
# What writes an infinity that it was given: masks do.
_FILLS = frozenset(
    ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where")
    + ("scalar_tensor", "constant_pad_nd", "index_fill", "index_fill_")
)
# What turns a -inf into a 0, which is what a mask is for.
_ABSORBS = ("softmax", "attention", "logsumexp", "exp")


@dataclass(eq=False, slots=True)
class _Origin:
    """Where a non-finite number was born, on one rank.

    Args:
        found: What is known of it.
        order: How many kernels ran before, on its rank.
        weak: A mask's infinity: named only if there is nothing else.
        key: Of a collective: its group, name and number, alike on all ranks.
    """

    found: NonFiniteOrigin
    order: int
    weak: bool = False
    key: tuple[Any, ...] = ()


_Origins = frozenset[_Origin]


class Watch(Follower):
    """Sees one step of one rank.

    Args:
        model: Whose names count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        # By storage, what the model holds.
        self._held: dict[object, list[tuple[str, str, Tensor]]] = {}
        for kind, name, _, tensor in held_by(self.names):
            local = local_of(tensor)
            self._held.setdefault(storage_of(local), []).append((kind, name, local))
        # By storage, the origins of what is not finite in it. While it is a key, no other has its
        # number.
        self._origins: dict[object, _Origins] = {}
        self._order = self._calls = self._backwards = 0
        self._meetings: Counter[tuple[Any, ...]] = Counter()
        #: The sum of the largest numbers that forward made: whether two replays are the same.
        self.total = 0.0
        #: What this rank fed to collectives, and what its losses and gradients are spoilt by.
        self.fed: dict[tuple[Any, ...], _Origins] = {}
        self.reached: dict[_Origin, list[str]] = {}

    # -- where ---------------------------------------------------------------------------------

    def opens(self, types: Iterable[type]) -> bool:
        """See what a DTensor runs on what this rank holds."""
        return any(map(is_traceable_wrapper_subclass_type, types))

    def entered(self, module: nn.Module) -> None:
        """Count the calls of the model."""
        whole = self.names[module] == "" and len(self.frames()) == 1
        self._calls += whole and self.frames()[0].phase == "forward"

    def function(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Look at each loss before its backward pass."""
        backward = func is Tensor.backward
        if backward:
            self.reach(args[0], "loss")
        out = super().function(func, args, kwargs)
        self._backwards += backward
        return out

    def _micro_batch(self) -> int:
        return self._calls - 1 if self._calls else self._backwards

    def maker(self) -> Owner:
        """Add the line and the micro-batch, which backward kernels are told by."""
        module, function, cause, *_ = super().maker()
        return Owner(module, function, cause, _user_line(), self._micro_batch())

    def _place(self, kernel: str) -> NonFiniteOrigin:
        """Where the kernel runs that runs."""
        owner, phase, node = self.running()
        op, parameter = owner.function or kernel.strip("_"), ""
        if phase == "backward":
            parameter = self.parameters.get(id(getattr(node, "variable", None)), ("", ""))[0]
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                op = type(node).__name__.removesuffix("Backward")
        return NonFiniteOrigin(
            kind="op",
            op=op,
            kernel=kernel,
            module=owner.module,
            parameter=parameter,
            direction="backward" if phase == "backward" else "forward",
            ranks=(self._rank,),
            micro_batch=owner.micro_batch if owner.micro_batch >= 0 else self._micro_batch(),
            line=_user_line() or owner.line,
        )

    # -- what ----------------------------------------------------------------------------------

    def run(self, kernel: Kernel, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one kernel, and look at what it gives."""
        with torch._C.DisableTorchFunction():
            self._order += 1
            named = [*zip(kernel.arguments, args, strict=False), *kwargs.items()]
            given = [(name, each) for name, value in named for each in floats_in(value)]
            written = [each for name, each in given if name in kernel.written]
            if kernel.meets:
                origin = self._feed(kernel, dict(named), given)
                out = func(*args, **kwargs)
                # It is looked at where it is used: it may come later.
                self._note([*written, *floats_in(out)], frozenset({origin}))
                return out
            before = {} if kernel.overwrites else {id(each): range_of("", each) for each in written}
            out = func(*args, **kwargs)
            if not kernel.view:
                # The other is the whole buffer, of which this rank has filled its part.
                outputs = floats_in(out[:1] if kernel.name == "all_gather_copy_in" else out)
                made = [*{id(each): each for each in (*outputs, *written)}.values()]
                infinite = any(isinstance(each, float) and math.isinf(each) for _, each in named)
                fills = kernel.name in _FILLS and infinite
                self._look(kernel, given, before, made, fills)
            return out

    def _look(
        self,
        kernel: Kernel,
        given: list[tuple[str, Tensor]],
        before: dict[int, TensorRange],
        made: list[Tensor],
        fills: bool,
    ) -> None:
        """Note the origins of what a kernel made that is not finite."""
        if kernel.name in _EMPTY:
            self._note(made, frozenset())
            return
        ranges = [range_of("", each) for each in made]
        if _in_backward() == -1:
            self.total += sum(found.high for found in ranges if found.finite)
        bad = [(each, it) for each, it in zip(made, ranges, strict=True) if not it.finite]
        if bad:
            place = replace(self._place(kernel.name), output=bad[0][1])
            tensors = [each for each, _ in bad]
            self._note(tensors, self._made_by(kernel, place, given, before, tensors, fills))
        elif any(word in kernel.name for word in _ABSORBS):
            # A -inf that a softmax turned to 0 did what a mask does.
            for origin in frozenset().union(*(self._known(each) or () for _, each in given)):
                output = origin.found.output
                origin.weak |= (
                    output is not None and output.low == -math.inf < output.high < math.inf
                )

    def _made_by(
        self,
        kernel: Kernel,
        place: NonFiniteOrigin,
        given: Iterable[tuple[str, Tensor]],
        before: dict[int, TensorRange],
        bad: Iterable[Tensor],
        fills: bool,
    ) -> _Origins:
        """The origins of what a kernel made that is not finite: of its inputs, or the kernel."""
        inputs, origins, partly = [], frozenset[_Origin](), False
        storages = {*map(storage_of, bad)}
        for name, each in given:
            if name in kernel.written and kernel.overwrites:
                continue
            found = replace(before.get(id(each)) or range_of("", each), name=name)
            inputs.append(found)
            known = self._known(each)
            # Where a kernel returns what it was given without a word, its input shows what it made.
            own = name in kernel.written or known is not None or storage_of(each) not in storages
            if own and not found.finite:
                origins |= self._of(each, found, place)
                # It wrote into a part of what nobody had filled.
                partly |= name in kernel.written and known == frozenset()
        nan = place.output is not None and place.output.is_nan
        new = nan and not any(each.is_nan for each in inputs)
        if (not origins and not partly) or (new and all(each.weak for each in origins)):
            place = replace(place, inputs=tuple(inputs))
            origins |= {_Origin(place, self._order, weak=fills and not nan)}
        return origins

    def _feed(
        self, kernel: Kernel, named: dict[str, Any], given: Iterable[tuple[str, Tensor]]
    ) -> _Origin:
        """Note what this rank feeds to a collective; return what comes out of it, for all ranks."""
        place = self._place(kernel.name)
        group = group_of([named.get("process_group", named.get("group_name"))])
        me = group.rank()
        pair = {"send": (me, named.get("dst")), "recv": (named.get("src"), me)}.get(kernel.meets)
        # The same on all ranks, with the number of the meeting.
        key: tuple[Any, ...] = (group.group_name, group.group_desc)
        key = (key, *pair, named.get("tag")) if pair else (key, kernel.name)
        self._meetings[key] += 1
        key = (*key, self._meetings[key])
        source = named.get("root_rank", named.get("src", me)) if "broadcast" in kernel.name else me
        feeds = kernel.meets != "recv" and source == me
        fed = [each for at, each in given if feeds and (at.startswith("input") or at == "tensors")]
        inputs = [range_of(f"rank {self._rank}", each) for each in fed]
        for each, found in zip(fed, inputs, strict=True):
            if not found.finite:
                self.fed[key] = self.fed.get(key, frozenset()) | self._of(each, found, place)
        place = replace(place, kind="collective", inputs=tuple(inputs))
        return _Origin(place, self._order, key=key)

    def _known(self, tensor: Tensor) -> _Origins | None:
        """The origins of what is not finite in a tensor's storage, if it was seen."""
        return self._origins.get(storage_of(tensor))

    def _note(self, tensors: Iterable[Tensor], origins: _Origins) -> None:
        self._origins |= dict.fromkeys(map(storage_of, tensors), origins)

    def _of(self, tensor: Tensor, found: TensorRange, place: NonFiniteOrigin) -> _Origins:
        """The origins of a tensor that is not finite; what nobody made was there before."""
        known = self._known(tensor)
        if known is not None:
            return known
        held = self._held.get(storage_of(tensor), ())
        bad = [(kind, name) for kind, name, each in held if not range_of("", each).finite]
        if not bad and self.fed:
            # Threads that are not seen, such as a hook's, pass on what came by a collective.
            return frozenset().union(*self.fed.values())
        kind, name = bad[0] if bad else ("input", "")
        module = name.rpartition(".")[0] if bad else place.module
        mask = found.low == -math.inf and math.isfinite(found.high)
        weak = kind != "parameter" and (mask or (not tensor.dim() and math.isinf(found.low)))
        place = replace(place, kind=kind, parameter=name, module=module)
        origin = _Origin(replace(place, inputs=(found,), output=found), self._order, weak)
        self._note([tensor], frozenset({origin}))
        return frozenset({origin})

    def reach(self, values: Any, what: str) -> None:
        """Note by what losses or gradients are spoilt, if they are."""
        for each in floats_in([local_of(it) for it in tensors_in(values)]):
            found = range_of(what, each)
            if not found.finite:
                for origin in self._of(each, found, self._place(what)):
                    self.reached.setdefault(origin, []).append(what)


def floats_in(value: Any) -> list[Tensor]:
    """The tensors in nested values that can be other than finite."""
    return [
        each
        for each in tensors_in(value)
        if (each.is_floating_point() or each.is_complex())
        and each.device.type != "meta"
        and each.dtype is not torch.float4_e2m1fn_x2  # has neither NaN nor infinity
        and not isinstance(each, FakeTensor)
        and not is_traceable_wrapper_subclass_type(type(each))
    ]


def range_of(name: str, tensor: Tensor) -> TensorRange:
    """The range of what is in a tensor."""
    about = name, shape_of(tensor), str(tensor.dtype).removeprefix("torch.")
    values = tensor.detach()
    # Elements of a sparse tensor that is not coalesced count as their sum.
    values = elements_of(values.coalesce() if values.is_sparse else values)
    if values.layout is not torch.strided:  # oneDNN's opaque layout
        values = values.to_dense()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.float() if values.dtype.itemsize == 1 else values
    low, high = torch.stack(torch.aminmax(values)).tolist() if values.numel() else (0.0, 0.0)
    return TensorRange(*about, low, high)


def _user_line() -> str:
    """The innermost line outside of torch; in a backward pass only one that runs in it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        path = frame.f_code.co_filename
        if not path.startswith((_TORCH, _OURS, contextlib.__file__, "<")):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _resolve(seen: Sequence[tuple[dict[Any, _Origins], dict[_Origin, list[str]]]]) -> list[_Origin]:
    """The origins on all ranks of what reached something: a collective only if nobody fed it."""
    todo: list[tuple[_Origin, tuple[str, ...], tuple[str, ...]]]
    todo = [(origin, (), tuple(names)) for _, each in seen for origin, names in each.items()]
    found: dict[_Origin, tuple[dict[str, None], dict[str, None]]] = {}
    visited = set()
    for origin, path, names in todo:
        if (origin, names) in visited:
            continue
        visited.add((origin, names))
        fed = {each for by_key, _ in seen for each in by_key.get(origin.key, ())}
        step = f"{origin.found.kernel} over {origin.key[0][1]}" if origin.key else ""
        todo += [(each, (*path, step), names) for each in fed]
        if not fed:
            paths, reached = found.setdefault(origin, ({}, {}))
            paths.update(dict.fromkeys(path))
            reached.update(dict.fromkeys(names))
    for origin, (paths, reached) in found.items():
        origin.found = replace(origin.found, carried_by=tuple(paths), reached=tuple(reached))
    return sorted(found, key=lambda it: (it.weak, it.order, it.found.ranks))


def first_of(
    seen: Sequence[tuple[dict[Any, _Origins], dict[_Origin, list[str]]]],
) -> NonFiniteOrigin | None:
    """The first origin of all, with every rank where it was born; of `Watch`'s fed and reached."""
    origins = _resolve(seen)
    if not origins:
        return None
    first = origins[0].found

    def place(it: NonFiniteOrigin) -> tuple[Any, ...]:
        return it.kind, it.kernel, it.module, it.parameter, it.direction, it.micro_batch, it.line

    same = [each.found for each in origins if place(each.found) == place(first)]
    path, _, number = first.line.rpartition(":")
    if code := linecache.getline(path, int(number or 0)).strip():
        first = replace(first, line=f"{first.line}: {code}")
    if first.kind == "collective":
        first = replace(first, inputs=tuple([it for each in same for it in each.inputs]))
    return replace(
        first,
        ranks=tuple(sorted({rank for each in same for rank in each.ranks})),
        reached=tuple(dict.fromkeys([it for each in same for it in each.reached])),
        carried_by=tuple(dict.fromkeys([it for each in same for it in each.carried_by])),
    )

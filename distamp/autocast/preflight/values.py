"""Values on the simulated device: what is known of them is kept on the CPU.

Fake tensors have no values, and most models read some: whether a mask is all ones, how long a
sequence is, which expert a token goes to. So the memory of the simulated device is kept on the CPU
as far as it follows from real values (inputs, buffers, constants) and is small. Where an op's
result or its shape depends on values that do not (activations, weights on the meta device), made-up
ones stand in: fp32 numbers between 0 and 1, integer ones, True.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["Values"]

# Elements up to which a result is worked out at once, and up to which it is where it is read.
_SMALL, _LARGEST = 2**14, 2**25
# A floating point tensor of the model or its inputs has its real values up to this size.
_SMALL_FLOAT = 2**12
_MEMORY = "_distamp_memory"
_aten = torch.ops.aten
_NO_FAKE_KERNEL = (
    UnsupportedOperatorException,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
_FAILURES = RuntimeError, NotImplementedError, IndexError, ValueError, TypeError


def _norm(func: Any, weight: int) -> Callable[..., Any]:
    """A norm whose statistics are fp32 beside fp32 weights, where torch's fake kernel forgets."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        out, *statistics = func(*args, **kwargs)
        if args[weight] is not None and args[weight].dtype == torch.float32:
            statistics = [torch.empty_like(t, dtype=torch.float32) for t in statistics]
        return out, *statistics

    return fake


def _group_norm_backward(grad: Any, x: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    out, *grads = _aten.native_group_norm_backward.default(grad, x, *args, **kwargs)
    return out if out is None else torch.empty_like(out, dtype=x.dtype), *grads


def _gru_cell(x: Any, h: Any, hx: Any, *biases: Any) -> tuple[Any, Any]:
    return torch.empty_like(hx), x.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    gates = [workspace.new_empty(grad.shape[0], 3 * grad.shape[1]) for _ in "xh"]
    biases = [gates[0].new_empty(3 * grad.shape[1]) if has_bias else None for _ in "xh"]
    return *gates, torch.empty_like(grad), *biases


def _grouped_mm(
    a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape.insert(0, a.shape[0] if a.dim() == 3 else offs.shape[0])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


# What torch has no fake kernels for, or fake kernels that take or give other dtypes.
_KERNELS = {
    _aten.native_layer_norm.default: _norm(_aten.native_layer_norm.default, 2),
    _aten.native_group_norm.default: _norm(_aten.native_group_norm.default, 1),
    _aten.native_batch_norm.default: _norm(_aten.native_batch_norm.default, 1),
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten._grouped_mm.default: _grouped_mm,
    _aten._thnn_fused_gru_cell.default: _gru_cell,
    _aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}


class _Place(NamedTuple):
    """How a tensor lies in its storage; keeping the tensor itself would keep the storage."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        return cls(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class _Memory:
    """What is known of a storage: its contents, or the call that gives them."""

    def __init__(self, call: _Call | None = None) -> None:
        self.contents: torch.UntypedStorage | None = None
        self.made_up = False
        self.call = call


class _Call(NamedTuple):
    """A call that gave an integer or bool result, run again should that result be read."""

    func: Any
    args: Any
    kwargs: Any
    # Of its tensors, when it was made: one that was written to since has other values.
    versions: tuple[int, ...]
    # Which of its results, and how it lies in its storage.
    at: int
    place: _Place


class Values(TorchDispatchMode):
    """Runs each op on fake tensors, and on values where they are known or needed.

    Args:
        fake_mode: Makes fake tensors of real ones.
        replaced: ``id`` of a real tensor to the fake one that stands for it.
        made_up: Called where values that decide a result were made up.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        replaced: dict[int, torch.Tensor],
        made_up: Callable[[], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode
        self._replaced = replaced
        self._made_up = made_up
        self._kept: list[torch.Tensor] = []
        # Where a real tensor that meets fake ones is taken to be; None leaves it where it is.
        self.device: torch.device | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) or func.namespace == "prim":
            return func(*args, **kwargs)
        if func is _aten.lift_fresh.default:
            # A constant, such as torch.tensor(3).
            out = func(*args)
            self.load(out, args[0])
            return out
        args, kwargs = tree_map_only(torch.Tensor, self.fake, (args, kwargs))
        if func is _aten.masked_select.default:
            # Only the mask decides; what it selects from may be large.
            source, mask = torch.broadcast_tensors(*args)
            func, args = _aten.index.Tensor, (source, [mask])
        if func is _aten.index.Tensor:
            args = (args[0], self._positions(args[1]))
        if func._schema.name.startswith("aten::_use_"):
            # Whether cuDNN or MIOpen can do it: torch's own kernel is of the same dtype.
            return False
        # Never run on values: other ranks need not be here.
        collective = func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
        if _reads_values(func) and not collective and func is not _aten.index.Tensor:
            return self._from_values(func, args, kwargs)
        try:
            out = _KERNELS.get(func, func)(*args, **kwargs)
        except _NO_FAKE_KERNEL:
            if collective:
                raise
            # For its shapes: some ops have a kernel for the CPU, but none for fake tensors.
            with suppress(*_FAILURES):
                return self._from_values(func, args, kwargs)
            raise
        if collective:
            for tensor in _tensors((args, kwargs)):
                _remember(tensor, _Memory())
        elif not func.is_view:
            self._note(func, args, kwargs, out)
        return out

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor that stands for a real one."""
        if isinstance(tensor, FakeTensor):
            return tensor
        found = self._replaced.get(id(tensor))
        if found is None:
            # On the meta device stands what would be on the CPU, had it been allocated.
            at = torch.device("cpu") if tensor.is_meta else None
            if self.device is not None and tensor.dim():
                at = self.device
            if at is None:
                found = self._fake_mode.from_tensor(tensor)
            else:
                place = tensor.shape, tensor.stride()
                found = torch.empty_strided(*place, dtype=tensor.dtype, device=at)
            self._replaced[id(tensor)] = found
            self._kept.append(tensor)
            self.load(found, tensor)
        return found

    def load(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Give a fake tensor the values of a real one, if they can matter."""
        small = _SMALL_FLOAT if real.is_floating_point() or real.is_complex() else _LARGEST
        if real.is_meta or isinstance(real, FakeTensor) or real.numel() > small:
            return
        with _for_real():
            _store(fake, _Place.of(fake), real.detach().to("cpu"))

    def array(self, tensor: torch.Tensor) -> Any:
        """The values of a fake tensor as a NumPy array, made up if unknown."""
        with _for_real():
            return self._value(tensor).numpy().copy()

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a fake tensor, made up if unknown."""
        with _for_real():
            return self._value(tensor)

    # -- one op

    def _positions(self, indices: Any) -> Any:
        """Indices with masks as the positions of their True, whose number the fake op must know."""
        out: list[Any] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                out += self._from_values(_aten.nonzero.default, (index,), {}).unbind(1)
            else:
                out.append(index)
        return out

    def _from_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on values alone, and make fake tensors of its results."""
        with _for_real():
            result, made_up = self._call(func, args, kwargs)
        tensors = _tensors((args, kwargs))
        # A floating point input (of ctc_loss, say) need not decide anything.
        decides = any(_memory(t).made_up and not _inexact(t) for t in tensors)
        if decides or (made_up and not _tensors(result)):
            self._made_up()
        # Lengths stay on the CPU, say, beside a sequence on the device.
        devices = {t.dtype: t.device for t in reversed(tensors)}

        def fake(real: torch.Tensor) -> torch.Tensor:
            device = devices.get(real.dtype, tensors[0].device)
            out = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
            with _for_real():
                _store(out, _Place.of(out), real, made_up)
            return out

        return tree_map_only(torch.Tensor, fake, result)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keep what is known of the results, and of the tensors written to."""
        inputs, written = _tensors((args, kwargs)), _written(func, args, kwargs)
        old = {id(t.untyped_storage()) for t in inputs}
        outputs = _tensors(out)
        fresh = [(i, t) for i, t in enumerate(outputs) if id(t.untyped_storage()) not in old]
        if not fresh and not written:
            return
        size = max(t.numel() for t in (*inputs, *outputs, *written))
        known = size <= _SMALL and all(_memory(t).contents is not None for t in inputs)
        # Counts and masks that are written to are worth working out; activations are not.
        exact = written and not any(_inexact(t) for t in written) and size <= _LARGEST
        if (known or exact) and self._run(func, args, kwargs, fresh):
            return
        for tensor in written:
            _remember(tensor, _Memory())
        if written or torch.Tag.nondeterministic_seeded in func.tags:
            return
        versions = tuple(t._version for t in inputs)
        for at, tensor in fresh:
            if not _inexact(tensor):
                call = _Call(func, args, kwargs, versions, at, _Place.of(tensor))
                _remember(tensor, _Memory(call))

    def _run(
        self, func: Any, args: Any, kwargs: Any, fresh: list[tuple[int, torch.Tensor]]
    ) -> bool:
        """Run an op on values too; False if it cannot be."""
        try:
            with _for_real():
                result, made_up = self._call(func, args, kwargs)
                results = _tensors(result)
                for at, out in fresh:
                    _store(out, _Place.of(out), results[at], made_up)
        except _FAILURES:
            return False
        for tensor in _written(func, args, kwargs):
            _memory(tensor).made_up |= made_up
        return True

    # -- memory; inside _for_real

    def _call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """What an op gives on the CPU, and whether any of its values was made up."""
        if func is _aten.rand.default and math.prod(args[0]) == 1:
            # One draw mostly decides whether to leave a layer out: it stays.
            return torch.full(args[0], 0.5, dtype=kwargs.get("dtype")), False
        args_here, kwargs_here = tree_map(self._here, (args, kwargs))
        result = func(*args_here, **kwargs_here)
        if "empty" in func._schema.name:
            result.zero_()
        return result, any(_memory(t).made_up for t in _tensors((args, kwargs)))

    def _here(self, value: Any) -> Any:
        """An argument of a call on the CPU that leaves every generator as it was."""
        if isinstance(value, FakeTensor):
            return self._value(value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = _memory(tensor)
        call, memory.call = memory.call, None
        if call is not None:
            tensors = _tensors((call.args, call.kwargs))
            as_then = tuple(t._version for t in tensors) == call.versions
            size = max(t.numel() for t in (*tensors, tensor))
            if as_then and size <= _LARGEST:
                with suppress(*_FAILURES):
                    result, made_up = self._call(call.func, call.args, call.kwargs)
                    memory = _store(tensor, call.place, _tensors(result)[call.at], made_up)
        if memory.contents is None:
            memory = _make_up(tensor)
        assert memory.contents is not None
        return _Place.of(tensor).view(memory.contents)


def _make_up(tensor: torch.Tensor) -> _Memory:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    if count > _LARGEST:
        raise DataDependentOutputException(_aten._local_scalar_dense.default)
    if tensor.is_floating_point():
        # The same for the same shape: a forward that is recomputed goes the same way.
        made = torch.rand(count, generator=torch.Generator().manual_seed(count)).to(tensor.dtype)
    else:
        made = torch.ones(count, dtype=tensor.dtype)
    memory = _Memory()
    memory.contents, memory.made_up = made.untyped_storage(), True
    return _remember(tensor, memory)


def _store(
    tensor: torch.Tensor, place: _Place, values: torch.Tensor, made_up: bool = False
) -> _Memory:
    """Write values to the place in the memory of a fake tensor, all else in which is unknown."""
    if values.shape != place.shape:
        raise ValueError(f"values of shape {values.shape} for a tensor of {place.shape}")
    memory = _Memory()
    memory.contents = torch.UntypedStorage(tensor.untyped_storage().nbytes())
    memory.made_up = made_up
    place.view(memory.contents).copy_(values)
    return _remember(tensor, memory)


def _memory(tensor: torch.Tensor) -> _Memory:
    return getattr(tensor.untyped_storage(), _MEMORY, None) or _Memory()


def _remember(tensor: torch.Tensor, memory: _Memory) -> _Memory:
    setattr(tensor.untyped_storage(), _MEMORY, memory)
    return memory


@contextmanager
def _for_real() -> Iterator[None]:
    """Run what follows on real tensors, seen by no mode."""
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
    ):
        yield


@cache
def _reads_values(func: Any) -> bool:
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(tags.intersection(func.tags))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the op writes to."""
    given = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_names(func)]
    return _tensors(given)


@cache
def _written_names(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results; a sparse one has no storage to speak of."""
    leaves = tree_leaves(values)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def _inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

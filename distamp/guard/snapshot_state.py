"""The state in a snapshot: copies in host memory, and the code that writes them back in place."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distamp import device_utils
from distamp.errors import ConfigError
from distamp.fsdp_unit import FSDPUnit, free_gathered_flat_params
from distamp.grads import dtensor_class, is_dtensor, to_local
from distamp.module_names import has_extra_state
from distamp.observers import SnapshotSource
from distamp.optim_utils import describe_optimizer, params_of, view_of

__all__ = [
    "ExtraState",
    "GeneratorStates",
    "HostCopies",
    "ModelState",
    "OptimizerState",
    "SnapshotPart",
    "SourceState",
    "clear_gradients",
    "reshard",
]

#: The scales of torchao's float8 weights, which are computed from the weights after each step.
_PRECOMPUTED_SCALE = "_precomputed_scale"
#: The attribute with the buffers of a module, also with the names of buffers that are None.
_BUFFERS = "_buffers"


# -- copies in host memory -------------------------------------------------------------------------


class _Saved(Protocol):
    """A value in a snapshot."""

    def restore(self, current: Any) -> Any:
        """Return the value: ``current`` if it could be written in place, else a new object."""


class _SavedTensor:
    """A plain tensor.

    Attributes:
        source: The tensor to copy; None after `copy`.
        device: The device of the tensor.
        values: The copy in host memory; None before `allocate`.
    """

    def __init__(self, source: Tensor) -> None:
        self.source: Tensor | None = source.detach()
        self.device = source.device
        self.values: Tensor | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """The properties that two tensors have in common if one buffer serves both."""
        tensor = self.source if self.values is None else self.values
        assert tensor is not None
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        return tensor.layout, tensor.dtype, tensor.shape, strides, self.device.type

    def allocate(self) -> None:
        assert self.source is not None
        is_pinned = self.device.type not in ("cpu", "meta")
        self.values = torch.empty_like(self.source, device="cpu", pin_memory=is_pinned)

    def copy(self) -> None:
        assert self.values is not None
        assert self.source is not None
        self.values.copy_(self.source, non_blocking=True)
        self.source = None

    def restore(self, current: Any) -> Any:
        assert self.values is not None
        if self._fits(current):
            current.copy_(self.values, non_blocking=True)
            return current
        tensor = torch.empty_like(self.values, device=self.device)
        return tensor.copy_(self.values, non_blocking=True)

    def _fits(self, current: Any) -> bool:
        assert self.values is not None
        if not isinstance(current, Tensor) or is_dtensor(current):
            return False
        return current.shape == self.values.shape and current.dtype == self.values.dtype


class _SavedDTensor:
    """A DTensor with the part of this rank."""

    def __init__(self, source: Any, local: _Saved) -> None:
        self._local = local
        self._mesh = source.device_mesh
        self._placements = source.placements
        self._shape = source.shape
        self._stride = source.stride()

    def restore(self, current: Any) -> Any:
        if is_dtensor(current) and current.placements == self._placements:
            local = _held_local_tensor(current)
            if self._local.restore(local) is local:
                return current
        return dtensor_class().from_local(
            self._local.restore(None),
            self._mesh,
            self._placements,
            run_check=False,
            shape=self._shape,
            stride=self._stride,
        )


def _held_local_tensor(dtensor: Any) -> Any:
    """Return the very local tensor of a DTensor, because ``to_local`` may return a view of it.

    Weights of torchao store their precomputed scale as an attribute of that tensor.
    """
    names, _ = dtensor.__tensor_flatten__()
    return getattr(dtensor, names[0])


class _SavedSubclass:
    """A tensor that consists of others, such as a weight or an optimizer state of torchao."""

    def __init__(self, source: Any, parts: Mapping[str, _Saved], context: Any) -> None:
        self._type = type(source)
        self._parts = parts
        self._context = context
        self._shape = source.shape
        self._stride = source.stride()

    def restore(self, current: Any) -> Any:
        if type(current) is self._type and current.shape == self._shape:
            for name, saved in self._parts.items():
                part = getattr(current, name)
                restored = saved.restore(part)
                if restored is not part:
                    setattr(current, name, restored)
            if getattr(current, _PRECOMPUTED_SCALE, None) is not None:
                setattr(current, _PRECOMPUTED_SCALE, None)
            return current
        parts = {name: saved.restore(None) for name, saved in self._parts.items()}
        return self._type.__tensor_unflatten__(parts, self._context, self._shape, self._stride)


class _SavedDict:
    """A dict, also of a subclass."""

    def __init__(self, source: dict[Any, Any], items: dict[Any, _Saved]) -> None:
        self._empty = copy.copy(source)
        self._empty.clear()
        self._items = items

    def restore(self, current: Any) -> Any:
        restored = current
        if type(current) is not type(self._empty):
            restored = copy.copy(self._empty)
        for key in list(restored):
            if key not in self._items:
                del restored[key]
        for key, saved in self._items.items():
            restored[key] = saved.restore(restored.get(key))
        return restored


class _SavedSequence:
    """A list or a tuple, also a named one."""

    def __init__(self, source: Any, items: list[_Saved]) -> None:
        self._type = type(source)
        self._items = items

    def restore(self, current: Any) -> Any:
        if type(current) is not self._type or len(current) != len(self._items):
            current = [None] * len(self._items)
        restored = []
        for saved, value in zip(self._items, current, strict=True):
            restored.append(saved.restore(value))
        if self._type is list and isinstance(current, list):
            current[:] = restored
            return current
        if hasattr(self._type, "_fields"):
            return self._type(*restored)
        return self._type(restored)


class _SavedObject:
    """A number, a text, or another object without tensors that a snapshot finds."""

    def __init__(self, source: Any) -> None:
        self._value = copy.deepcopy(source)

    def restore(self, current: Any) -> Any:
        return copy.deepcopy(self._value)


class HostCopies:
    """The tensors of one snapshot: first they are added, then memory is allocated, then copied.

    So the number of bytes is known before any memory is allocated, and a rank without memory can
    report that before another rank copies. Memory for tensors on a device is pinned.

    Attributes:
        tensors: The plain tensors of the snapshot.
    """

    def __init__(self) -> None:
        self.tensors: list[_SavedTensor] = []
        # By identity, because one tensor may have several names. The tensor itself is stored, too,
        # so that no other tensor gets its identity.
        self._saved_by_id: dict[int, tuple[Tensor, _Saved]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes in host memory."""
        nbytes = 0
        for saved in self.tensors:
            tensor = saved.source if saved.values is None else saved.values
            assert tensor is not None
            nbytes += tensor.numel() * tensor.element_size()
        return nbytes

    def add(self, value: Any) -> _Saved:
        """Add a value with all tensors in its dicts, lists and tuples; copy other objects now."""
        if isinstance(value, Tensor):
            if id(value) not in self._saved_by_id:
                self._saved_by_id[id(value)] = value, self._add_tensor(value)
            return self._saved_by_id[id(value)][1]
        if isinstance(value, dict):
            return _SavedDict(value, {key: self.add(entry) for key, entry in value.items()})
        if isinstance(value, list | tuple):
            return _SavedSequence(value, [self.add(entry) for entry in value])
        return _SavedObject(value)

    def _add_tensor(self, tensor: Any) -> _Saved:
        if is_dtensor(tensor):
            return _SavedDTensor(tensor, self.add(to_local(tensor)))
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts: dict[str, _Saved] = {}
            for name in names:
                if name != _PRECOMPUTED_SCALE:
                    parts[name] = self.add(getattr(tensor, name))
            return _SavedSubclass(tensor, parts, context)
        saved = _SavedTensor(tensor)
        self.tensors.append(saved)
        return saved

    def allocate(self, recycled: HostCopies | None) -> None:
        """Allocate the memory.

        Args:
            recycled: Copies with memory to use again. They stay valid until `copy`.

        Raises:
            MemoryError, RuntimeError: There is not enough memory.
        """
        buffers: dict[tuple[object, ...], list[Tensor | None]] = {}
        if recycled is not None:
            for saved in recycled.tensors:
                buffers.setdefault(saved.key, []).append(saved.values)
        for saved in self.tensors:
            free_buffers = buffers.get(saved.key)
            if free_buffers:
                saved.values = free_buffers.pop()
            else:
                saved.allocate()

    def copy(self) -> None:
        """Copy the tensors as they are now, without a wait for a device."""
        for saved in self.tensors:
            saved.copy()
        self._saved_by_id.clear()

    def wait(self) -> None:
        """Wait for copies from and to devices."""
        devices = {saved.device for saved in self.tensors}
        for device in devices:
            if not device_utils.is_cpu(device):
                torch.accelerator.synchronize(device)


# -- the parts of a snapshot -----------------------------------------------------------------------


class SnapshotPart:
    """A part of the state of a run, which knows its live objects."""

    def save(self, copies: HostCopies) -> Any:
        """Add the live tensors to ``copies``; return the saved state."""
        raise NotImplementedError

    def check(self, saved: Any) -> None:
        """Refuse a saved state that does not fit the live objects any more.

        Raises:
            ConfigError: It does not fit.
        """

    def restore(self, saved: Any) -> None:
        """Write the saved state into the live objects."""
        raise NotImplementedError


class ModelState(SnapshotPart):
    """The parameters, buffers and extra states of a model, in any layout."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def save(self, copies: HostCopies) -> Any:
        """See `SnapshotPart.save`."""
        reshard(self._model)
        saved: list[tuple[nn.Module, dict[str, _Saved], dict[str, _Saved | None]]] = []
        extra_states: list[tuple[nn.Module, _Saved]] = []
        for module in self._model.modules():
            params: dict[str, _Saved] = {}
            for name, param in module.named_parameters(recurse=False):
                params[name] = copies.add(param)
            buffers: dict[str, _Saved | None] = {}
            for name, buffer in vars(module)[_BUFFERS].items():
                buffers[name] = None if buffer is None else copies.add(buffer)
            saved.append((module, params, buffers))
            if has_extra_state(module):
                extra_states.append((module, copies.add(module.get_extra_state())))
        return saved, extra_states

    def check(self, saved: Any) -> None:
        """See `SnapshotPart.check`."""
        for module, params, _ in saved[0]:
            names = {name for name, _ in module.named_parameters(recurse=False)}
            missing = sorted(params.keys() - names)
            if missing:
                raise ConfigError(
                    f"The parameter {missing[0]!r} of a {type(module).__name__} is gone, and the "
                    "snapshot has it. Create the Snapshots after all changes to the model."
                )

    def restore(self, saved: Any) -> None:
        """See `SnapshotPart.restore`."""
        reshard(self._model)
        modules, extra_states = saved
        for module, params, buffers in modules:
            live_params = dict(module.named_parameters(recurse=False))
            for name, saved_param in params.items():
                param = live_params[name]
                if saved_param.restore(param) is not param:
                    raise ConfigError(
                        f"The parameter {name!r} of a {type(module).__name__} has another shape, "
                        "dtype or layout than in the snapshot. Create the Snapshots after all "
                        "changes to the model."
                    )
            live_buffers = vars(module)[_BUFFERS]
            for name, saved_buffer in buffers.items():
                buffer = live_buffers.get(name)
                restored = None if saved_buffer is None else saved_buffer.restore(buffer)
                if restored is not buffer:
                    setattr(module, name, restored)
        for module, extra_state in extra_states:
            module.set_extra_state(extra_state.restore(None))


class OptimizerState(SnapshotPart):
    """The state and the groups of an optimizer and of the optimizers inside of it; its masters."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def _optimizers(self) -> list[Any]:
        """Return all optimizers, from the outermost one on."""
        optimizers: list[Any] = []
        _collect_optimizers(self._optimizer, optimizers, set())
        return optimizers

    def save(self, copies: HostCopies) -> Any:
        """See `SnapshotPart.save`."""
        view = view_of(self._optimizer)
        # First, because it creates missing masters, which are keys of the optimizer's state.
        view.take_over_writes()
        masters = copies.add(view.snapshot_state())
        optimizers: list[tuple[list[dict[str, Any]], list[tuple[Any, _Saved]]]] = []
        for optimizer in self._optimizers():
            groups: list[dict[str, Any]] = []
            for group in optimizer.param_groups:
                groups.append(_save_group(group, copies))
            states: list[tuple[Any, _Saved]] = []
            for key, state in optimizer.state.items():
                states.append((key, copies.add(state)))
            optimizers.append((groups, states))
        return masters, optimizers

    def check(self, saved: Any) -> None:
        """See `SnapshotPart.check`."""
        _, saved_optimizers = saved
        optimizers = self._optimizers()
        is_same = len(optimizers) == len(saved_optimizers)
        for optimizer, (groups, _) in zip(optimizers, saved_optimizers, strict=False):
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            is_same = is_same and sizes == [group["params"] for group in groups]
        if not is_same:
            raise ConfigError(
                f"The groups of {describe_optimizer(self._optimizer)} have changed since the "
                "snapshot, by add_param_group() for example. Create new Snapshots after such a "
                "change."
            )

    def restore(self, saved: Any) -> None:
        """See `SnapshotPart.restore`."""
        saved_masters, saved_optimizers = saved
        for optimizer, (groups, states) in zip(self._optimizers(), saved_optimizers, strict=True):
            for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
                _restore_group(group, saved_group)
            saved_by_id = {id(key): saved_state for key, saved_state in states}
            for key in list(optimizer.state):
                if id(key) not in saved_by_id:
                    del optimizer.state[key]
            for key, saved_state in states:
                optimizer.state[key] = saved_state.restore(optimizer.state.get(key))
        view = view_of(self._optimizer)
        view.load_snapshot_state(saved_masters.restore(view.snapshot_state()))


def _collect_optimizers(candidate: Any, optimizers: list[Any], seen_ids: set[int]) -> None:
    """Append an optimizer, and the optimizers in its attributes, to a list.

    Wrappers that show the state of the optimizer inside are left out.
    """
    if id(candidate) in seen_ids:
        return
    seen_ids.add(id(candidate))
    state = getattr(candidate, "state", None)
    has_groups = isinstance(getattr(candidate, "param_groups", None), list)
    is_new = all(state is not optimizer.state for optimizer in optimizers)
    if isinstance(state, Mapping) and has_groups and is_new:
        optimizers.append(candidate)
    for value in list(getattr(candidate, "__dict__", {}).values()):
        for entry in value if isinstance(value, list | tuple) else (value,):
            if isinstance(entry, torch.optim.Optimizer):
                _collect_optimizers(entry, optimizers, seen_ids)


def _save_group(group: dict[str, Any], copies: HostCopies) -> dict[str, Any]:
    """Save the settings of a group, with the number of its parameters."""
    saved: dict[str, Any] = {"params": len(group["params"])}
    for key, value in group.items():
        if key == "params":
            continue
        has_parts = isinstance(value, Tensor | dict | list | tuple)
        # Other values, such as process groups and functions, never change, and may have no copy.
        saved[key] = copies.add(value) if has_parts else _Reference(value)
    return saved


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in list(group):
        if key not in saved:
            del group[key]
    for key, value in saved.items():
        if key != "params":
            group[key] = value.restore(group.get(key))


class _Reference:
    """A value that is not copied."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def restore(self, current: Any) -> Any:
        return self._value


class SourceState(SnapshotPart):
    """The state of a `SnapshotSource`: a guard, a scaler, or a communication hook."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source

    def save(self, copies: HostCopies) -> Any:
        """See `SnapshotPart.save`."""
        return copies.add(self._source.snapshot_state())

    def restore(self, saved: Any) -> None:
        """See `SnapshotPart.restore`."""
        self._source.load_snapshot_state(saved.restore(self._source.snapshot_state()))


class ExtraState(SnapshotPart):
    """The state dict of an object of the user, or the state of a generator."""

    def __init__(self, stateful: Any) -> None:
        self._stateful = stateful

    def save(self, copies: HostCopies) -> Any:
        """See `SnapshotPart.save`."""
        if isinstance(self._stateful, torch.Generator):
            return self._stateful.get_state()
        state = self._stateful.state_dict()
        try:
            return copies.add(state)
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"The state_dict() of {type(self._stateful).__name__} in extra= contains an object "
                f"that cannot be copied ({error}). Leave it out of extra=."
            ) from error

    def restore(self, saved: Any) -> None:
        """See `SnapshotPart.restore`."""
        if isinstance(self._stateful, torch.Generator):
            self._stateful.set_state(saved)
        else:
            # A new copy, because many objects take over the very tensors of a state.
            self._stateful.load_state_dict(saved.restore(None))


class GeneratorStates(SnapshotPart):
    """The default random generators of Python, of NumPy if it is imported, and of torch."""

    def save(self, copies: HostCopies) -> Any:
        """See `SnapshotPart.save`."""
        states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            states["numpy"] = numpy.random.get_state()
        device_module = _initialized_device_module()
        if device_module is not None:
            devices = range(device_module.device_count())
            states["devices"] = [device_module.get_rng_state(device) for device in devices]
        return states

    def restore(self, saved: Any) -> None:
        """See `SnapshotPart.restore`."""
        random.setstate(saved["python"])
        torch.set_rng_state(saved["cpu"])
        if "numpy" in saved:
            sys.modules["numpy"].random.set_state(saved["numpy"])
        device_module = _initialized_device_module()
        for device, state in enumerate(saved.get("devices", ())):
            device_module.set_rng_state(state, device)


def _initialized_device_module() -> Any:
    """Return torch's module of the accelerator; None without one, and before its first use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    device_module = torch.get_device_module(accelerator)
    is_initialized = getattr(device_module, "is_initialized", lambda: True)
    return device_module if is_initialized() else None


# -- the live state --------------------------------------------------------------------------------


def reshard(model: nn.Module) -> None:
    """Let FSDP's modules free gathered parameters, so that only the shards are written and read."""
    for module in model.modules():
        if _is_fsdp2(module):
            FSDPUnit(module).reshard()
        else:
            free_gathered_flat_params(module)


def _is_fsdp2(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def clear_gradients(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
    """Clear all gradients, also of masters, and gradients that FSDP2 has not reduced yet."""
    params: list[Tensor] = []
    # fairscale's buckets hold the gradients.
    set_to_none = True
    for model in models:
        params += model.parameters()
        for module in model.modules():
            if _is_fsdp2(module):
                FSDPUnit(module).drop_unreduced_gradients()
            elif type(module).__name__ == "ShardedDataParallel":
                set_to_none = False
    for optimizer in optimizers:
        view = view_of(optimizer)
        view.release_grads()
        params += view.model_params()
        params += params_of(view.holder)
    for tensor in params:
        if set_to_none or tensor.grad is None:
            tensor.grad = None
        else:
            tensor.grad.zero_()

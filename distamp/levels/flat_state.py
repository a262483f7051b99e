"""Weights, optimizer state and optimizer settings under flat names, which no layout changes."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distamp.errors import ConfigError
from distamp.grads import is_dtensor, to_local
from distamp.levels.rank_errors import raise_on_every_rank
from distamp.levels.weight_copies import (
    SEPARATE_STATES,
    check_weight_copies,
    is_wrapper_subclass,
)
from distamp.levels.wrappers import inspect_wrapper
from distamp.module_names import has_extra_state
from distamp.optim_utils import OptimizerView, unwrap_optimizer, view_of, zero_local_optimizer
from distamp.process_group import GroupLike, resolve_process_group
from distamp.scaler import masters_of

__all__ = ["FlatState"]

_logger = logging.getLogger("distamp.levels")
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
_NAMED_LAYOUTS = (None, "DistributedDataParallel", "DataParallel", "fully_shard")
#: Entries of a group with its parameters, and with the choice of the kernel that steps them.
_NOT_SAVED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_NUMBERS = (int, float, complex, str, bytes, type(None))
_PLAIN_TENSORS = (Tensor, nn.Parameter)
#: The name that ``state_dict`` gives to the result of a module's ``get_extra_state``.
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class _SteppedWeight:
    """One weight, and the optimizer that steps it.

    Args:
        name: The weight's flat name, ``model.NAME``.
        tensor: The tensor that the optimizer steps: the parameter or its master.
        source: The optimizer's source of gradients, which knows the values of masters.
        optimizer: The optimizer.
        group: The group of the optimizer that has the weight.
    """

    name: str
    tensor: Tensor
    source: OptimizerView
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]

    @property
    def record_name(self) -> str:
        """The flat name of the weight's record, and the beginning of its states' names."""
        return f"optimizer.{self.name.partition('.')[2]}"

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of this weight, which may be empty."""
        state: Mapping[str, Any] = self.optimizer.state.get(self.tensor, {})
        return state


class FlatState:
    """Models and their optimizers as named tensors, for one call.

    Like torch's ``get_state_dict`` with ``flatten_optimizer_state_dict``, but masters have the
    names of their parameters. Each weight has a record with its optimizer's states: a tuple of
    the states' keys and a tuple of the group's settings. A state that is a tensor subclass is saved
    as the plain tensors in it, and its record has the class. The extra state of a module is saved
    in a tuple, because ``torch.distributed.checkpoint`` saves a tuple as one object.

    Args:
        models: Models, wrapped or not.
        optimizers: Optimizers over their parameters, with masters or without.
        process_group: The ranks that have a part of the models.

    Raises:
        ConfigError: A layout has no tensor for each name (FSDP1, ZeRO, OSS).
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        process_group: GroupLike = None,
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self._process_group = process_group
        self._weights: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._extra_modules: dict[str, nn.Module] = {}

    def get(self) -> dict[str, Any]:
        """Return all live tensors by name; see `Amp.flat_state_dict`.

        Collective: every rank of ``process_group`` must call this.
        """
        state: dict[str, Any] = {}
        error: Exception | None = None
        try:
            state = self._collect()
        except Exception as raised:
            error = raised  # raised below, after every rank knows of it
        group = resolve_process_group(self._process_group)
        raise_on_every_rank("amp.flat_state_dict()", error, group)
        weights = {name: state[name] for name in self._weights}
        check_weight_copies(weights, group)
        return state

    def get_empty(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return live weights, and places for the optimizer states that a checkpoint has."""
        self._name_tensors()
        state = self._model_state()
        stepped_weights = {weight.record_name: weight for weight in self._stepped_weights()}
        for weight in stepped_weights.values():
            state[weight.name] = weight.source.fp32_value(weight.tensor)
        for name in self._extra_modules.keys() & saved.keys():
            state[name] = ()
        for name, metadata in saved.items():
            record_name = name
            while record_name and record_name not in stepped_weights:
                record_name = record_name.rpartition(".")[0]
            if record_name:
                weight = stepped_weights[record_name]
                key = name.removeprefix(record_name).lstrip(".")
                state[name] = _make_destination(weight, key, metadata, saved.get(weight.name))
        return state

    @torch.no_grad()
    def set(self, state: Mapping[str, Any]) -> None:
        """Load a result of `get` or `get_empty`; see `Amp.load_flat_state_dict`."""
        self._name_tensors()
        stepped_weights = list(self._stepped_weights())
        state = {**state, **_make_missing_records(state, stepped_weights)}
        loaded = []
        without_state = []
        for weight in stepped_weights:
            if _has_states(state, weight):
                loaded.append(weight)
            else:
                without_state.append(weight.name)
        settings = _merge_settings(state, loaded)
        tensors = {**self._weights, **self._buffers}
        loaded_names = tensors.keys() & state.keys()
        loaded_extra = self._extra_modules.keys() & state.keys()
        with contextlib.ExitStack() as stack:
            for masters in filter(None, map(masters_of, self._optimizers)):
                # The values that dcp.load wrote in place to masters with storage.
                masters.write_back()
                stack.enter_context(masters.materialized())
            for name in loaded_names:  # a no-op for the very tensors that get() returned
                tensors[name].copy_(state[name])
            for weight in stepped_weights:
                if weight.name in loaded_names and weight.tensor is not tensors[weight.name]:
                    weight.tensor.copy_(state[weight.name])
            for weight in loaded:
                _load_states(state, weight)
        for name in loaded_extra:
            (extra_state,) = state[name]
            self._extra_modules[name].set_extra_state(extra_state)
        for group, values in settings:
            for key, value in values.items():
                group[key] = _replace_setting(group.get(key), value)
        not_loaded = (tensors.keys() | self._extra_modules.keys()) - loaded_names - loaded_extra
        missing = sorted(not_loaded)
        if missing:
            _logger.warning("the state has no %s and %d more", missing[0], len(missing) - 1)
        if without_state:
            _logger.warning(
                "the state has no optimizer state of %d weights, first %s. Their optimizer keeps "
                "the state and the settings that it has. To load a checkpoint, pass what it has: "
                "amp.flat_state_dict(saved)",
                len(without_state),
                without_state[0],
            )

    def _name_tensors(self) -> None:
        """Find the name of every parameter, and of all else that a state dict has."""
        for index, model in enumerate(self._models):
            prefix = "model" if len(self._models) == 1 else f"model.{index}"
            wrapper, inner, _ = inspect_wrapper(model)
            if wrapper not in _NAMED_LAYOUTS:
                raise ConfigError(
                    "amp.save() and amp.flat_state_dict() need one tensor for each parameter, and "
                    f"{wrapper} has flat or wrapped ones. Save {SEPARATE_STATES}. "
                    "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) "
                    "returns the first two. Or use fully_shard."
                )
            # FSDP2 reshards the gathered weights when its state_dict() is called.
            saved_names = inner.state_dict(keep_vars=True).keys()
            for name, parameter in inner.named_parameters():
                self._weights[f"{prefix}.{_WRAPPERS.sub('', name)}"] = parameter
            for name, buffer in inner.named_buffers():
                if name in saved_names:
                    self._buffers[f"{prefix}.{_WRAPPERS.sub('', name)}"] = buffer
            for name, module in inner.named_modules():
                if has_extra_state(module):
                    path = f"{prefix}.{name}.{_EXTRA_STATE}" if name else f"{prefix}.{_EXTRA_STATE}"
                    self._extra_modules[_WRAPPERS.sub("", path)] = module
        for optimizer in self._optimizers:
            _check_optimizer(optimizer)

    def _stepped_weights(self) -> Iterator[_SteppedWeight]:
        """Yield each weight that an optimizer has, in the order of the groups."""
        names = {id(tensor): name for name, tensor in self._weights.items()}
        for optimizer in self._optimizers:
            source = view_of(optimizer)
            parameters = {id(stepped): parameter for parameter, stepped in source.param_pairs()}
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    name = names.get(id(parameters.get(id(tensor))))
                    if name is None:
                        raise ConfigError(
                            f"A flat state takes names from the models, and "
                            f"{type(optimizer).__name__} steps a parameter of shape "
                            f"{tuple(tensor.shape)} that no model of initialize has. Save "
                            f"{SEPARATE_STATES} instead"
                        )
                    yield _SteppedWeight(name, tensor, source, optimizer, group)

    def _model_state(self) -> dict[str, Any]:
        return {
            name: tensor.detach() for name, tensor in {**self._weights, **self._buffers}.items()
        }

    def _collect(self) -> dict[str, Any]:
        self._name_tensors()
        state = self._model_state()
        for name, module in self._extra_modules.items():
            state[name] = (module.get_extra_state(),)
        settings: dict[int, tuple[tuple[str, Any], ...]] = {}
        for weight in self._stepped_weights():
            state[weight.name] = weight.source.fp32_value(weight.tensor)
            group = weight.group
            if id(group) not in settings:
                settings[id(group)] = _read_settings(weight.optimizer, group)
            specs: list[tuple[str, Any]] = []
            for key, value in weight.state.items():
                _check_state(weight, key, value)
                name = f"{weight.record_name}.{key}"
                if is_dtensor(value) or not is_wrapper_subclass(value):
                    state[name] = value
                    specs.append((key, None))
                    continue
                parts, spec = _flatten_subclass(value)
                state |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
                specs.append((key, spec))
            state[weight.record_name] = tuple(specs), settings[id(group)]
        return state


# -- states ----------------------------------------------------------------------------------------


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps more than the states of its parameters and its groups."""
    kind = type(optimizer).__name__
    if zero_local_optimizer(unwrap_optimizer(optimizer)) is not None:
        raise ConfigError(
            f"amp.save() and amp.flat_state_dict() need the state of every parameter on every "
            f"rank, and {kind} has a share on each. Save {SEPARATE_STATES}, after "
            "optimizer.consolidate_state_dict() on every rank"
        )
    reason = None
    for name, value in vars(optimizer).items():
        leaves = () if name in ("state", "param_groups") else tree_leaves(value)
        optimizers = [leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)]
        if any(inner.state is not optimizer.state for inner in optimizers):
            reason = f"it has another optimizer in {name!r}, which keeps separate states"
    strangers = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if strangers:
        reason = f"it keeps a state under {strangers[0]!r}, which is no parameter"
    extra_keys = sorted(optimizer.state_dict().keys() - {"state", "param_groups"})
    if extra_keys:
        reason = f"its state_dict() has {extra_keys[0]!r} beside 'state' and 'param_groups'"
    if reason is not None:
        raise ConfigError(
            f"A flat state cannot contain all that {kind} keeps: {reason}. Save "
            f"{SEPARATE_STATES} instead"
        )


def _check_state(weight: _SteppedWeight, key: str, value: Any) -> None:
    """Refuse a value that a checkpoint does not restore unchanged in this layout."""
    stepped = weight.tensor
    kind = type(value).__name__
    reason = None
    if not isinstance(value, Tensor):
        if not _is_number(value):
            reason = f"it is a {kind}, and not a tensor or a number"
    elif is_dtensor(value):
        local = type(to_local(value))
        if local not in _PLAIN_TENSORS:
            reason = f"it is a DTensor of {local.__name__}"
        elif not is_dtensor(stepped) or value.shape != stepped.shape:
            reason = f"it is a DTensor of shape {tuple(value.shape)}, unlike the weight"
        elif value.placements != stepped.placements:
            reason = f"it is placed as {value.placements}, and the weight as {stepped.placements}"
    elif is_dtensor(stepped) and (value.numel() > 1 or type(value) not in _PLAIN_TENSORS):
        reason = f"it is a {kind} of shape {tuple(value.shape)}, and the weight is a DTensor"
    elif is_wrapper_subclass(value):
        parts, _ = _flatten_subclass(value)
        if not all(type(part) in _PLAIN_TENSORS for part in parts.values()):
            reason = f"it is a {kind}, whose parts are not plain tensors"
    elif type(value) not in _PLAIN_TENSORS or value.layout is not torch.strided:
        reason = f"it is a {kind} of layout {value.layout}, and not a plain tensor"
    if reason is not None:
        raise _refused_state(weight, key, reason)


def _refused_state(weight: _SteppedWeight, key: str, reason: str) -> ConfigError:
    return ConfigError(
        f"A flat state cannot contain the state {key!r} that "
        f"{type(weight.optimizer).__name__} has of {weight.name}: {reason}. Save {SEPARATE_STATES} "
        "instead"
    )


def _make_destination(
    weight: _SteppedWeight, key: str, metadata: Any, saved_weight: Any
) -> Tensor | None:
    """Return a tensor for ``dcp.load`` to fill; None for a value that is no tensor.

    A state of the weight's shape has the weight's layout. Its dtype is that of the weight here if
    it was that of the weight in the checkpoint, which may be of another level; else it is the
    state's own.
    """
    size = getattr(metadata, "size", None)
    if size is None:
        return None
    stepped = weight.tensor
    dtype = metadata.properties.dtype
    is_part = "." in key  # of a tensor subclass
    is_like_weight = size == stepped.shape and not is_part and key != "step"
    saved_properties = getattr(saved_weight, "properties", None)
    if is_like_weight and saved_properties is not None and saved_properties.dtype == dtype:
        dtype = stepped.dtype
    current = weight.state.get(key)
    if isinstance(current, Tensor) and current.shape == size and current.dtype == dtype:
        return current
    if is_like_weight:
        return torch.zeros_like(stepped, dtype=dtype)
    if is_dtensor(stepped) and (is_part or size.numel() > 1):
        reason = f"the checkpoint has it in shape {tuple(size)}, and the weight here is a DTensor"
        raise _refused_state(weight, key, reason)
    return torch.zeros(size, dtype=dtype, device=_state_device(weight, key))


def _state_device(weight: _SteppedWeight, key: str) -> torch.device:
    """Return the device that torch's ``Optimizer.load_state_dict`` moves a state to."""
    if key != "step" or weight.group.get("fused") or weight.group.get("capturable"):
        return weight.tensor.device
    return torch.device("cpu")


def _make_missing_records(
    state: Mapping[str, Any], weights: Sequence[_SteppedWeight]
) -> dict[str, Any]:
    """Return records of weights from a checkpoint that was written before there were records.

    Such a checkpoint has the states of an optimizer and no settings of its groups. A weight without
    a state in it was never stepped if another weight of the optimizer has one. The states of a
    weight are loaded if they replace all states that the optimizer has of the weight.
    """
    keys: dict[str, list[str]] = {}
    for name in state:
        record_name, _, key = name.rpartition(".")
        keys.setdefault(record_name, []).append(key)
    without_record = [weight for weight in weights if weight.record_name not in state]
    with_states = {id(weight.optimizer) for weight in without_record if weight.record_name in keys}
    records: dict[str, Any] = {}
    for weight in without_record:
        saved_keys = keys.get(weight.record_name, [])
        is_complete = set(weight.state).issubset(saved_keys)
        if is_complete and id(weight.optimizer) in with_states:
            settings: tuple[tuple[str, Any], ...] = ()
            records[weight.record_name] = tuple((key, None) for key in saved_keys), settings
    return records


def _has_states(state: Mapping[str, Any], weight: _SteppedWeight) -> bool:
    """Return whether a flat state has the weight's record, and all states in the record."""
    record = state.get(weight.record_name)
    if record is None:
        return False
    specs, _ = record
    for key, spec in specs:
        name = f"{weight.record_name}.{key}"
        names = [name] if spec is None else [f"{name}.{part}" for part in spec[2]]
        if any(part_name not in state for part_name in names):
            return False
    return True


def _load_states(state: Mapping[str, Any], weight: _SteppedWeight) -> None:
    """Give the optimizer exactly the states that the weight's record names."""
    values: dict[str, Any] = {}
    specs, _ = state[weight.record_name]
    for key, spec in specs:
        name = f"{weight.record_name}.{key}"
        if spec is not None:
            parts = {part: state[f"{name}.{part}"] for part in spec[2]}
            value = _unflatten_subclass(weight, key, parts, spec)
        else:
            value = state[name]
        if isinstance(value, Tensor) and not is_dtensor(value):
            if is_dtensor(weight.tensor) and value.numel() > 1:
                reason = "the state has a plain tensor, and the weight here is a DTensor"
                raise _refused_state(weight, key, reason)
            if key != "step":
                value = value.to(weight.tensor.device)
        values[key] = value
    if values:
        weight.optimizer.state[weight.tensor] = values
    else:
        weight.optimizer.state.pop(weight.tensor, None)


#: Module and name of a tensor subclass, the names of its tensors, its context, size and stride.
_SubclassSpec = tuple[str, str, tuple[str, ...], Any, tuple[int, ...], tuple[int, ...]]


def _flatten_subclass(value: Tensor) -> tuple[dict[str, Tensor], _SubclassSpec]:
    """Return the tensors in a traceable tensor subclass, and a spec to rebuild it from them."""
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(value, name) for name in names}
    kind = type(value)
    size, stride = tuple(value.shape), tuple(value.stride())
    return parts, (kind.__module__, kind.__qualname__, tuple(names), context, size, stride)


def _unflatten_subclass(
    weight: _SteppedWeight, key: str, parts: Mapping[str, Tensor], spec: _SubclassSpec
) -> Tensor:
    """Rebuild a tensor subclass of a module that is imported already.

    A checkpoint must not decide about imports of Python.
    """
    module, name, _, context, size, stride = spec
    kind = getattr(sys.modules.get(module), name, None)
    if not isinstance(kind, type) or not issubclass(kind, Tensor):
        reason = f"it is a {name} of the module {module}, which this process has not imported"
        raise _refused_state(weight, key, reason)
    device = weight.tensor.device
    moved = {part: tensor.to(device) for part, tensor in parts.items()}
    rebuilt: Tensor = kind.__tensor_unflatten__(moved, context, size, stride)  # type: ignore[attr-defined]
    return rebuilt


# -- settings of groups ----------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    """Return whether a value is a number, a text or None, or a tuple or list of such."""
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return isinstance(value, _NUMBERS)


def _read_settings(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """Return the settings of a group that are numbers; a tensor with one element is a number."""
    settings: list[tuple[str, Any]] = []
    for key, value in group.items():
        if key in _NOT_SAVED:
            continue
        number = _to_number(value)
        if _is_number(number):
            settings.append((key, number))
        elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise ConfigError(
                f"A flat state contains numbers of an optimizer's groups, and "
                f"{type(optimizer).__name__} has tensors of several elements in {key!r}. Save "
                f"{SEPARATE_STATES} instead"
            )
    return tuple(settings)


def _to_number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return tuple(map(_to_number, value))
    return value


def _merge_settings(
    state: Mapping[str, Any], weights: Sequence[_SteppedWeight]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each group with the settings that its weights were saved with."""
    merged: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for weight in weights:
        _, values = merged.setdefault(id(weight.group), (weight.group, {}))
        _, settings = state[weight.record_name]
        for key, value in settings:
            first = values.setdefault(key, value)
            if repr(first) != repr(value):  # NaN is equal to NaN here
                raise ConfigError(
                    f"{weight.name} was saved with {key}={value!r}, and a weight that shares its "
                    f"group in {type(weight.optimizer).__name__} here with {key}={first!r}. Give "
                    "the optimizer the groups that it was saved with"
                )
    return list(merged.values())


def _replace_setting(current: Any, value: Any) -> Any:
    """Return a saved setting in the tensor that the group has, or in its type of sequence."""
    if isinstance(current, Tensor):
        return current.fill_(value)
    if isinstance(current, tuple | list) and isinstance(value, tuple):
        padded = current if len(current) == len(value) else value
        return type(current)(map(_replace_setting, padded, value))
    return value

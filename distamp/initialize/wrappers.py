"""How a model is wrapped: what stands around it, what that casts, and how its sync is paused."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed._composable_state as composable_state
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from distamp.errors import StageError
from distamp.gradients import is_dtensor

__all__ = [
    "DDP",
    "SHARDED_DDP",
    "OnePassEach",
    "Wrapping",
    "compute_device",
    "norms_cast_along",
    "pause_sync",
    "pins_cast_along",
    "recognise",
]

DDP, SHARDED_DDP = "DistributedDataParallel", "fairscale's ShardedDataParallel"
_FSDP1, _FSDP2 = "FullyShardedDataParallel", "fully_shard"
# By package and class, so that nothing is imported to look for it.
_NAMES = {
    ("torch", "FSDPModule"): _FSDP2,
    ("torch", "FullyShardedDataParallel"): _FSDP1,
    ("torch", "DistributedDataParallel"): DDP,
    ("torch", "DataParallel"): "DataParallel",
    ("fairscale", "ShardedDataParallel"): SHARDED_DDP,
}


class Wrapping(NamedTuple):
    """One model and what stands around it.

    Args:
        name: Of the wrapper; None for a plain model.
        inner: The user's own module, whose forward is the model's.
        policies: In which dtypes FSDP's own mixed precision gathers parameters and reduces
            gradients, for each part that it casts.
    """

    name: str | None
    inner: nn.Module
    policies: frozenset[tuple[torch.dtype, torch.dtype | None]]


def recognise(model: nn.Module) -> Wrapping:
    """Return what stands around ``model``: DDP, FSDP1, FSDP2, OSS's wrapper, DataParallel, nothing.

    A model of which only parts are sharded counts as sharded, and is its own inner module.
    """
    model = _uncompiled(model)
    named = [(name, part) for part in model.modules() if (name := _name(part)) is not None]
    if not named:
        return Wrapping(None, model, frozenset())
    name, outermost = named[0]
    wraps = outermost is model and name != _FSDP2
    inner = _uncompiled(model.get_submodule("module")) if wraps else model
    policies = frozenset((dtype, _policy(p)[1]) for _, p in named if (dtype := _policy(p)[0]))
    return Wrapping(name, inner, policies)


def compute_device(model: nn.Module) -> torch.device | None:
    """Return where a model computes, which under CPU offload is not where its parameters rest.

    None for a model without parameters. Of a DTensor it is the device type of its mesh.
    """
    for part in model.modules():
        if _name(part) == _FSDP1:
            return part.compute_device  # type: ignore[return-value]
    for parameter in model.parameters():
        if is_dtensor(parameter):
            return torch.device(parameter.device_mesh.device_type)
        return parameter.device
    return None


def norms_cast_along(
    module: nn.Module, name: str = "", dtype: torch.dtype | None = None
) -> Iterator[str]:
    """Yield the batch norms whose weights FSDP's mixed precision casts with the modules around.

    Args:
        module: Where to begin.
        name: Its name.
        dtype: What the wrapper around it casts to, if any.
    """
    if _name(module) in (_FSDP1, _FSDP2):
        dtype = _policy(module)[0]
    if isinstance(module, _BatchNorm) and module.affine and dtype not in (None, torch.float32):
        yield name
    for child_name, child in module.named_children():
        yield from norms_cast_along(child, f"{name}.{child_name}".lstrip("."), dtype)


def pins_cast_along(model: nn.Module, fp32: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules pinned to float32 that FSDP's mixed precision computes otherwise.

    FSDP1 has views of a flat parameter in place of weights, which cannot be taken in float32; and
    a unit inside of a pinned module casts what it is given.
    """
    for module in model.modules():
        half = _policy(module)[0] not in (None, torch.float32)
        if half and _name(module) == _FSDP1:
            kept = {part for part in module.modules() if _name(part) == _FSDP1} - {module}
            others = {part for each in kept for part in each.modules()}
            yield from (p for p in module.modules() if p in fp32 and p not in others)
        if module in fp32:
            inside = [part for part in module.modules() if part is not module]
            yield from (module for part in inside if _policy(part)[0] not in (None, torch.float32))


@contextlib.contextmanager
def pause_sync(model: nn.Module) -> Iterator[None]:
    """Leave gradients unreduced in what runs inside, forward and backward, whatever the wrapper."""
    model = _uncompiled(model)
    if hasattr(model, "no_sync"):  # DDP, FSDP1, ShardedDataParallel
        with model.no_sync():  # type: ignore[operator]
            yield
        return
    sharded: list[Any] = [part for part in model.modules() if _name(part) == _FSDP2]
    for part in sharded:
        part.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for part in sharded:
            part.set_requires_gradient_sync(True, recurse=False)


class OnePassEach:
    """Watches the outputs of DistributedDataParallel.

    torch reduces gradients in the first backward pass through an output and leaves those of a
    second one as each rank has them: the ranks diverge silently.

    Args:
        models: The wrappers themselves.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._pass: object | None = None
        for model in models:
            model.register_forward_hook(self._watch)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Stand around one backward pass that is to be reduced."""
        self._pass = object()
        try:
            yield
        finally:
            self._pass = None

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        reduced_in: list[object] = []

        def arrived(gradient: Tensor) -> None:
            now = self._pass
            if now is None or now in reduced_in:
                return
            if reduced_in:
                raise StageError(
                    "a second backward() through one forward pass of DistributedDataParallel: it "
                    "reduces the first alone, and the ranks would part. Add the losses up before "
                    "backward(), or run the forward pass once for each"
                )
            reduced_in.append(now)

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(arrived)


def _name(module: nn.Module) -> str | None:
    kinds = [(kind.__module__.split(".")[0], kind.__name__) for kind in type(module).__mro__]
    return next((_NAMES[kind] for kind in kinds if kind in _NAMES), None)


def _policy(module: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes that FSDP gathers and reduces one module in; None for the parameters'."""
    if _name(module) == _FSDP2:  # torch has no public way to ask
        policy = getattr(composable_state._get_module_state(module), "_mp_policy", None)
    else:
        policy = getattr(module, "mixed_precision", None)
    return getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)


def _uncompiled(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper
    return inner if isinstance(inner, nn.Module) else model

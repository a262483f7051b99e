"""Which optimizer this is, as a number that every rank can compare."""

from __future__ import annotations

import gc
import zlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distamp.scaler.gradients import parameters_of

__all__ = ["describe", "fingerprints", "living_fingerprints", "sampled_values"]

_SAMPLED_PARAMETERS = 8
_SAMPLED_VALUES = 64


def fingerprints(optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    """Return 32 bits for each that agree on all ranks and differ between optimizers; never 0.

    Class, parameter names, global shapes and dtypes make it. Where this process holds several
    optimizers that are alike in all of these, a sample of the parameter values is added.
    """
    shapes = Counter(map(_shape_fingerprint, _living_optimizers()))
    return [_fingerprint(optimizer, shapes) for optimizer in optimizers]


def living_fingerprints() -> set[int]:
    """Return the fingerprint of every optimizer in this process; slow, for diagnosis alone."""
    return set(fingerprints(_living_optimizers()))


def _fingerprint(optimizer: torch.optim.Optimizer, shapes: Counter[int]) -> int:
    shape = _shape_fingerprint(optimizer)
    if shapes[shape] <= 1:
        return shape or 1
    # Shards differ between ranks by nature and would tell nothing apart.
    first = parameters_of(optimizer)[:_SAMPLED_PARAMETERS]
    return zlib.crc32(sampled_values([p for p in first if not _is_shard(p)]), shape) or 1


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Return class, number of parameters and elements, for messages to people."""
    parameters = parameters_of(optimizer)
    elements = sum(p.numel() for p in parameters)
    return f"{type(optimizer).__name__} over {len(parameters)} parameters ({elements:,} elements)"


def _living_optimizers() -> list[torch.optim.Optimizer]:
    # Nothing in torch lists optimizers. This walk runs when an optimizer is first named.
    kinds = _subclasses(torch.optim.Optimizer)
    return [o for o in gc.get_objects() if type(o) in kinds]


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _shape_fingerprint(optimizer: torch.optim.Optimizer) -> int:
    words = [type(optimizer).__qualname__]
    for group in getattr(optimizer, "param_groups", ()):
        words.append(str(group.get("param_names")))
        words.extend(f"{_global_shape(p)}{p.dtype}" for p in group["params"])
    return zlib.crc32("|".join(words).encode())


def _is_shard(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) or hasattr(parameter, "_unpadded_unsharded_size")


def _global_shape(parameter: Tensor) -> str:
    # FSDP1's flat parameter knows its whole size; its views have this rank's shape and a mark.
    whole = getattr(parameter, "_unpadded_unsharded_size", None)
    if whole is not None:
        return str(tuple(whole))
    return "flat" if hasattr(parameter, "_fsdp_flattened") else str(tuple(parameter.shape))


def sampled_values(parameters: list[Tensor]) -> bytes:
    """Return some values that this rank holds of the first few parameters, to tell them apart."""
    with torch.no_grad():
        samples = [
            str(local.flatten()[:_SAMPLED_VALUES].double().tolist())
            for p in parameters[:_SAMPLED_PARAMETERS]
            if (local := p.to_local() if isinstance(p, DTensor) else p).device.type != "meta"
        ]
    return "|".join(samples).encode()

"""Which optimizer this is, as a number that every rank can compare."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distamp.gradients import is_dtensor, local_of
from distamp.optimizers import parameters_of
from distamp.scaler.optimizer_state import OptimizerState

__all__ = ["name"]

_SAMPLED_PARAMETERS = 8
_SAMPLED_VALUES = 64


def name(optimizers: Sequence[Any], states: Sequence[OptimizerState]) -> None:
    """Give each optimizer the number that names it in messages, at the first of them.

    Class, parameter names, global shapes and dtypes, a sample of the values of plain parameters and
    the order of first sight make it; the order distinguishes what is alike in all else.
    """
    for optimizer, state in zip(optimizers, states, strict=True):
        if not state.fingerprint:
            state.fingerprint = _fingerprint(optimizer)
            state.identity = hash((state.fingerprint, state.index))


def _fingerprint(optimizer: Any) -> int:
    parts = [type(optimizer).__qualname__]
    for group in optimizer.param_groups:
        parts.append(str(group.get("param_names")))
        parts.extend(f"{_global_shape(p)}{p.dtype}" for p in group["params"])
    return zlib.crc32(_sample(parameters_of(optimizer)), zlib.crc32("|".join(parts).encode())) or 1


def _global_shape(parameter: Tensor) -> str:
    # FSDP1's flat parameter knows its whole size; its views have this rank's shape and a mark.
    whole = getattr(parameter, "_unpadded_unsharded_size", None)
    if whole is not None:
        return str(tuple(whole))
    return "flat" if hasattr(parameter, "_fsdp_flattened") else str(tuple(parameter.shape))


@torch.no_grad()
def _sample(parameters: Sequence[Tensor]) -> bytes:
    """Return some values of the first few plain parameters."""
    samples = [
        local_of(p).flatten()[:_SAMPLED_VALUES].double()
        for p in parameters[:_SAMPLED_PARAMETERS]
        if not _is_shard(p) and p.device.type != "meta" and not p.is_complex()
    ]
    if not samples:
        return b""
    device = samples[0].device
    return str(torch.cat([s.to(device) for s in samples]).tolist()).encode()


def _is_shard(parameter: Tensor) -> bool:
    # Shards differ between ranks by nature and would distinguish nothing.
    marks = ("_unpadded_unsharded_size", "_fsdp_flattened", "_ddp_ignored", "_is_sharded")
    return is_dtensor(parameter) or any(hasattr(parameter, mark) for mark in marks)

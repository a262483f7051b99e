"""The norm of a gradient whose parts lie on many ranks: partial sums, and how they add up."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distamp.scaler.gradients import summed_values
from distamp.scaler.identity import sampled_values

__all__ = ["WORDS", "Parts", "local_words", "scale_by", "total_norm"]

WORDS = 5
_RELATIVE = 1e-6


@dataclass(frozen=True)
class Parts:
    """The parameters of one call, told apart by how their gradients are spread over ranks.

    Args:
        plain: Ordinary tensors: replicated (DDP), or a pipeline stage of this rank's own.
        local: This rank's own: FSDP1's shards, parameters that DDP ignores, and DTensors sharded
            over a mesh that is smaller than the group.
        sharded: DTensors over the whole group, which say themselves how they are spread.
        plain_key: A number that replicas of ``plain`` share.
        local_key: A number that replicas of ``local`` share.
    """

    plain: list[Tensor]
    local: list[Tensor]
    sharded: list[Tensor]
    plain_key: float
    local_key: float

    @classmethod
    def of(cls, parameters: list[Tensor], group_size: int, *, own: bool = False) -> Parts:
        """Sort ``parameters``; reads a sample of their values, so call it once.

        Args:
            parameters: Those whose gradients are to be measured.
            group_size: Ranks that agree.
            own: Whether plain tensors among them are known to be this rank's own.
        """
        plain: list[Tensor] = []
        local: list[Tensor] = []
        sharded: list[Tensor] = []
        for parameter in parameters:
            if isinstance(parameter, DTensor) and parameter.device_mesh.size() == group_size:
                sharded.append(parameter)
            elif own or _is_own(parameter):
                local.append(parameter)
            else:
                plain.append(parameter)
        return cls(plain, local, sharded, _key(plain), _key(local))


def local_words(parts: Parts, norm_type: float, device: torch.device) -> Tensor:
    """Return this rank's five float64 words: three partial sums and two keys.

    A partial sum is the sum of the ``norm_type``-th powers of magnitudes, or their maximum for inf.
    Where a DTensor is replicated over a mesh dimension, each replica counts for its fraction.
    """
    words = [
        _power_sum([p.grad for p in parts.plain], norm_type, device),
        _power_sum([p.grad for p in parts.local], norm_type, device),
        _power_sum([p.grad for p in parts.sharded], norm_type, device, shared=True),
        torch.full((), parts.plain_key, dtype=torch.float64, device=device),
        torch.full((), parts.local_key, dtype=torch.float64, device=device),
    ]
    return torch.stack(words)


def total_norm(words: Tensor, norm_type: float) -> Tensor:
    """Return the norm of the whole gradient from the words of all ranks, as 0-d float32.

    Ranks are replicas of each other where key and partial sum agree; a set of replicas counts once.
    So the result is that of the unsharded model under DDP, FSDP, tensor and pipeline parallel and
    their mixtures, and no host has to wait for it.

    Args:
        words: float64 of shape (ranks, 5).
        norm_type: The order of the norm; inf for the largest magnitude.
    """
    if math.isinf(norm_type):
        return words[:, :3].max().float()
    total = words[:, 2].sum()
    for part, key in ((0, 3), (1, 4)):
        value, keys = words[:, part], words[:, key]
        near = (value[:, None] - value).abs() <= _RELATIVE * value.abs()
        replicas = (near & (keys[:, None] == keys)).sum(1).clamp_(min=1)
        total = total + (value / replicas).sum()
    return total.pow(1.0 / norm_type).float()


def scale_by(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients so that ``norm`` becomes at most ``max_norm``, as torch's clip does.

    A norm that is not finite changes nothing: the step will be skipped, and what overflowed stays
    to be reported.
    """
    coefficient = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    coefficient = torch.where(norm.isfinite(), coefficient, 1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, group in by_device.items():
        torch._foreach_mul_(group, coefficient.to(device, non_blocking=True))


def _power_sum(
    gradients: list[Tensor | None], p: float, device: torch.device, *, shared: bool = False
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[float]]] = {}
    for gradient in gradients:
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local = summed_values(local) if local.is_sparse else local
        if local.numel():
            tensors, weights = alike.setdefault((local.device, local.dtype), ([], []))
            tensors.append(local)
            weights.append(_share(gradient) if shared else 1.0)
    for (there, dtype), (tensors, weights) in alike.items():
        # float16 squares overflow from 256 on.
        wide = torch.float32 if dtype.itemsize < 4 else None
        norms = torch.stack(torch._foreach_norm(tensors, p, wide)).double()
        if math.isinf(p):
            total = torch.maximum(total, norms.max().to(device))
        else:
            powers = norms.pow(p) * torch.tensor(weights, dtype=torch.float64, device=there)
            total = total + powers.sum().to(device)
    return total


def _share(gradient: Tensor) -> float:
    assert isinstance(gradient, DTensor)
    mesh = gradient.device_mesh
    replicas = [mesh.size(i) for i, p in enumerate(gradient.placements) if p.is_replicate()]
    return 1.0 / math.prod(replicas)


def _is_own(parameter: Tensor) -> bool:
    if isinstance(parameter, DTensor):
        return any(not placement.is_replicate() for placement in parameter.placements)
    return (
        hasattr(parameter, "_fsdp_flattened")  # torch FSDP1
        or getattr(parameter, "_ddp_ignored", False)
        or getattr(parameter, "_is_sharded", False)  # fairscale FSDP
    )


def _key(parameters: list[Tensor]) -> float:
    return float(zlib.crc32(sampled_values(parameters)))

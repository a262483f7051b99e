"""What a step does by the norm of all that it is about: skip, clip, or both."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from distamp import clipping, host
from distamp.errors import ConfigError
from distamp.guard.ranks import Flag

__all__ = ["NO_VERDICT", "ByNorm", "Verdict", "declared_text"]


class ByNorm(NamedTuple):
    """What a step does by the norm of all that it is about.

    Args:
        max_norm: Gradients are multiplied so that the norm is at most this.
        skip_norm_above: The step is skipped where the norm is larger.
        is_replicated_fn: Says of a parameter that every rank holds the same.
        shard_group_fn: Says over which ranks a parameter is cut.
    """

    max_norm: float | None
    skip_norm_above: float | Tensor | None
    is_replicated_fn: clipping.Declared | None = None
    shard_group_fn: clipping.Declared | None = None

    def checked(self, read_limit: bool = False) -> ByNorm:
        """Return the same with numbers that are within their range.

        Args:
            read_limit: Whether the host must know a limit on a device, to tell other ranks.
        """
        max_norm, limit = self.max_norm, self.skip_norm_above
        if max_norm is not None:
            max_norm = clipping.positive("max_norm", max_norm, or_zero=True)
        if isinstance(limit, Tensor):
            if limit.numel() != 1:
                raise ConfigError(f"skip_norm_above must be one number, not of shape {limit.shape}")
            limit = limit.detach().reshape(())
            limit = limit.item() if read_limit or host.is_host(limit.device) else limit
        if limit is not None and not isinstance(limit, Tensor):
            limit = clipping.positive("skip_norm_above", limit)
        return ByNorm(max_norm, limit, self.is_replicated_fn, self.shard_group_fn)

    @property
    def late_limit(self) -> Tensor | None:
        """The limit where it lies on a device, 0-d float32: the host does not wait for it."""
        return self.skip_norm_above.float() if isinstance(self.skip_norm_above, Tensor) else None

    @property
    def declared(self) -> list[bool]:
        """Which of the two declarations were given."""
        return [self.is_replicated_fn is not None, self.shard_group_fn is not None]

    @property
    def text(self) -> str:
        """The arguments as ranks compare them, without a limit that lies on a device."""
        text = declared_text(self.is_replicated_fn, self.shard_group_fn)
        if self.max_norm is None and self.skip_norm_above is None:
            text += "\nall_or_none=True"
        if self.max_norm is not None:
            text += f"\nmax_norm={self.max_norm}"
        if isinstance(self.skip_norm_above, Tensor):
            text += "\nskip_norm_above=a tensor"
        elif self.skip_norm_above is not None:
            text += f"\nskip_norm_above={self.skip_norm_above}"
        return text

    def verdict(self, total: float | Tensor) -> Verdict:
        """Return what follows from the square of the norm, the same on all ranks."""
        if not isinstance(total, Tensor):
            norm = math.sqrt(total) if total >= 0.0 else math.nan
            limit = math.inf if self.skip_norm_above is None else float(self.skip_norm_above)
            finite = math.isfinite(norm)
            is_above_limit = finite and norm > limit
            factor = 1.0
            if self.max_norm is not None and finite and not is_above_limit:
                factor = min(1.0, self.max_norm / (norm + 1e-6))
            return Verdict(norm, not finite, is_above_limit, factor, limit)
        exact = total.sqrt()
        is_finite = exact.isfinite()
        clip = torch.ones_like(exact)
        if self.max_norm is not None:
            clip = torch.where(is_finite, (self.max_norm / (exact + 1e-6)).clamp_(max=1.0), 1.0)
        spike: Flag = False
        above: float | Tensor = math.inf
        if self.skip_norm_above is not None:
            above = self.skip_norm_above
            above = host.moved(above, exact.device) if isinstance(above, Tensor) else above
            is_above = (exact > above).logical_and_(is_finite)
            clip = torch.where(is_above, 1.0, clip)
            spike = is_above.float()
        is_not_finite = is_finite.logical_not()
        return Verdict(exact.float(), is_not_finite.float(), spike, clip.float(), above)


def declared_text(
    is_replicated_fn: clipping.Declared | None, shard_group_fn: clipping.Declared | None
) -> str:
    """Return a line for each declaration that was given, as ranks compare them."""
    text = ""
    if is_replicated_fn is not None:
        text += "\nis_replicated_fn=..."
    if shard_group_fn is not None:
        text += "\nshard_group_fn=..."
    return text


class Verdict(NamedTuple):
    """What a norm decided for all that it was measured over; numbers where the host knows.

    Args:
        norm: A number, or 0-d float32.
        found: Whether it is not finite.
        spike: Whether it lies above the limit.
        factor: What gradients are multiplied by; at most 1, and 1 where the step is skipped.
        limit: The value of ``skip_norm_above``; inf without one.
    """

    norm: float | Tensor
    found: Flag
    spike: Flag
    factor: float | Tensor
    limit: float | Tensor = math.inf


#: Where no norm decides.
NO_VERDICT = Verdict(math.nan, False, False, 1.0)

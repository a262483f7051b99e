"""How much memory a rank has held at most."""

from __future__ import annotations

import resource
import sys

import torch

from launch.ranks import Ranks

__all__ = ["largest_peak", "peak_memory"]


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held at once, since it started.

    On an accelerator: in tensors, on the device that holds most of them. On the CPU: the peak of
    the process's resident set, the interpreter and torch's libraries included.
    """
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    there = range(torch.accelerator.device_count())
    return max(torch.accelerator.max_memory_allocated(index) for index in there)


def largest_peak(device: torch.device, ranks: Ranks) -> str:
    """Say the largest peak over the ranks; every rank calls this."""
    peaks = ranks.gather(peak_memory(device))
    most = max(peaks)
    what = "resident, torch and Python included" if device.type == "cpu" else "in tensors"
    where = "" if len(peaks) == 1 else f" on rank {peaks.index(most)}"
    return f"{most / 1e6:,.0f} MB at most{where} ({what})"

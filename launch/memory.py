"""How much memory a rank needs in its layout, what would fit, and its measured peak."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from distamp.precision import Precision
from launch.config import Config
from launch.errors import UsageError
from launch.levels import stepped_in
from launch.ranks import Ranks

__all__ = [
    "ModelSize",
    "Needs",
    "Shares",
    "check_memory",
    "largest_peak",
    "needs",
    "peak_memory",
    "return_freed_memory",
]


# As <malloc.h> has it.
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Shares:
    """Over how many ranks a layout divides what a parameter takes.

    Attributes:
        weights: And gradients, which lie where the weights do.
        state: Of the optimizer, fp32 masters included.
        built_whole: Whether a rank builds the whole model before it is divided.
    """

    weights: int = 1
    state: int = 1
    built_whole: bool = True


@dataclass(frozen=True)
class Needs:
    """Bytes that one rank holds at its peak, but for activations, and for torch itself.

    Attributes:
        weights: Its part of the parameters.
        gradients: Its part of them.
        state: Its part of AdamW's moments and the fp32 masters.
        gathered: Two blocks whole, the one at work and the next, one block's gradients, before and
            after they are cast to be reduced, and what is outside of blocks.
        built: What building takes: the whole model, or the largest parameter beside the weights.
    """

    weights: int
    gradients: int
    state: int
    gathered: int
    built: int

    @property
    def total(self) -> int:
        """The most that is there at once: while it is built, or while it is trained."""
        return max(self.built, self.weights + self.gradients + self.state + self.gathered)

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "AdamW": self.state}
        parts |= {"gathered blocks": self.gathered} if self.gathered else {}
        listed = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in parts.items())
        return f"{self.total / 1e6:,.0f} MB on each rank before activations ({listed})"


@dataclass(frozen=True)
class ModelSize:
    """Numbers of elements of a model.

    Attributes:
        parameters: All of them.
        block: In the largest block, which is gathered as one.
        outside: In no block.
        largest: In the largest parameter.
    """

    parameters: int
    block: int = 0
    outside: int = 0
    largest: int = 0


def needs(size: ModelSize, level: Precision, shares: Shares, gather: torch.dtype) -> Needs:
    """Return what one rank needs.

    Args:
        size: Of the model.
        level: Of precision.
        shares: Of the layout.
        gather: The dtype in which blocks are gathered.
    """
    stepped = stepped_in(level).itemsize
    masters = stepped if level.master_weights else 0
    weights = -(-size.parameters * level.param.itemsize // shares.weights)
    gradients = -(-size.parameters * stepped // shares.weights)
    state = -(-size.parameters * (2 * stepped + masters) // shares.state)
    gathered = 0
    if shares.weights > 1:
        each = 2 * gather.itemsize + gather.itemsize + level.reduce.itemsize
        gathered = size.block * each + size.outside * level.param.itemsize
    # Weights are drawn in fp32, whatever they are cast to.
    built = size.parameters * 4 if shares.built_whole else weights + size.largest * 4
    return Needs(weights, gradients, state, gathered, built)


def check_memory(
    size: ModelSize, config: Config, device: torch.device, ranks: Ranks, found: Needs, says: str
) -> None:
    """Refuse a model that cannot fit, whatever is trained on.

    Args:
        size: Of the model.
        config: The run's settings.
        device: Where the model is to be.
        ranks: Those that train it.
        found: What one rank needs.
        says: What the layout is called.

    Raises:
        UsageError: Naming what a rank needs, what is there and what would fit.
    """
    have = _available(device)
    if found.total <= have:
        return
    here = _ranks_here(device)
    among = "" if here == 1 else f" for each of the {here} ranks here"
    raise UsageError(
        f"--model {config.model}: {size.parameters:.3g} parameters under {says} need"
        f" {found.total / 2**30:.3g} GiB on each of {ranks.world_size} ranks, and there are"
        f" {have / 2**30:.3g}{among}; {_what_fits(size, config.level, have)}"
    )


def _what_fits(size: ModelSize, level: Precision, have: float) -> str:
    gather = level.compute if level.autocasts else level.param
    for ranks in (2**power for power in range(1, 17)):
        each = needs(size, level, Shares(ranks, ranks, built_whole=False), gather)
        if each.total <= have:
            return (
                f"--strategy fsdp2 on {ranks} ranks with that much each would fit"
                f" ({each.total / 2**30:.3g} GiB), activations aside"
            )
    return "no number of ranks would do: a block does not fit; make --width smaller"


def _available(device: torch.device) -> float:
    return _memory(device) / _ranks_here(device)


def _ranks_here(device: torch.device) -> int:
    # The ranks of one machine share its memory; each has a GPU of its own.
    return 1 if device.type != "cpu" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _memory(device: torch.device) -> int:
    """Return the bytes of a device's memory; for the CPU, what this machine or container has."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(have, int(text)) if text.isdigit() else have


def return_freed_memory(needed: Needs, device: torch.device) -> None:
    """Have malloc give freed tensors of 1 MiB and more back to the system at once, where it counts.

    glibc keeps those below 32 MB in its heap, in pieces that gathered blocks and gradients do not
    fit: at its peak a rank then has a quarter more than it needs. Giving them back costs the system
    time, so it is done where a rank needs a quarter of its memory or more.
    """
    if device.type != "cpu" or needed.total < _available(device) / 4:
        return
    with contextlib.suppress(OSError, AttributeError):  # a malloc that is not glibc's
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def peak_memory(device: torch.device) -> int:
    """Return the peak of this process's memory in bytes, since it started.

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

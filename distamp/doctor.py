"""A page about this machine for a bug report: ``python -m distamp doctor``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

import distamp

__all__ = ["Diagnosis", "diagnose"]

# Optional packages that distamp works with. Their versions are read without importing them.
_PACKAGES = ("triton", "fairscale", "torchao", "lightning", "accelerate", "transformers", "trl")


@dataclass(frozen=True)
class Diagnosis:
    """The versions, devices and problems that :func:`diagnose` found; ``str`` makes the page.

    Like ``python -m torch.utils.collect_env``, the page lists versions, and contains no names of
    hosts or people. In addition it lists the differences between ranks.

    Attributes:
        facts: Versions and devices by name; under torchrun rank 0's.
        ranks: The number of ranks that answered; 1 without torchrun.
        problems: A sentence for each fact that differs between ranks, with the value of each rank,
            and for ranks that do not answer.
    """

    facts: Mapping[str, str]
    ranks: int
    problems: Sequence[str]

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        rows = {**self.facts, "ranks": str(self.ranks)}
        rows["problems"] = "\n          ".join(self.problems) or "none"
        lines = ["distamp doctor"]
        for name, row in rows.items():
            lines.append(f"{name:9} {row}")
        return "\n".join(lines)


def diagnose(timeout: float = 30.0) -> Diagnosis:
    """Return the versions and devices of this machine, and the differences between ranks.

    Collective under torchrun: every rank must call this, before it creates a process group.

    Args:
        timeout: Seconds that ranks wait for each other; a rank that does not answer is a problem.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if accelerator is None else accelerator.type
    facts = {"distamp": distamp.__version__, "torch": torch.__version__}
    system = f"{platform.system()} {platform.machine()}"
    facts |= {"python": platform.python_version(), "system": system}
    for name in _PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    capability = torch.backends.cpu.get_cpu_capability()
    num_threads = torch.get_num_threads()
    facts["cpu"] = f"{capability}, {num_threads} threads"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        version = torch.version.cuda or torch.version.hip
        count = torch.cuda.device_count()
        gib = properties.total_memory / 2**30
        facts["cuda"] = f"{version}: {count} x {properties.name} with {gib:.0f} GiB"
    elif accelerator is not None:
        count = torch.accelerator.device_count()
        facts[device] = f"{count} devices"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        ranks, problems = _compare(facts, timeout)
        return Diagnosis(facts, ranks, problems)
    return Diagnosis(facts, ranks=1, problems=[])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _compare(facts: Mapping[str, str], timeout: float) -> tuple[int, list[str]]:
    """Return the number of ranks that answered, and a sentence for each problem."""
    world_size = int(os.environ["WORLD_SIZE"])
    timeout_delta = timedelta(seconds=timeout)
    gathered: list[Mapping[str, str]] = [{} for _ in range(world_size)]
    try:
        dist.init_process_group("gloo", timeout=timeout_delta)
        dist.monitored_barrier(timeout=timeout_delta, wait_all_ranks=True)
        dist.all_gather_object(gathered, facts)
    except Exception as error:
        rank = os.environ["RANK"]
        reason = _first_line(error)
        return 1, [f"rank {rank} does not reach the {world_size} ranks: {reason}"]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    names: set[str] = set()
    for rank_facts in gathered:
        names.update(rank_facts)
    problems: list[str] = []
    for name in sorted(names):
        ranks_by_value: dict[str, list[int]] = {}
        for rank_index, rank_facts in enumerate(gathered):
            value = rank_facts.get(name, "missing")
            ranks_by_value.setdefault(value, []).append(rank_index)
        if len(ranks_by_value) > 1:
            values = ", ".join(f"{value} on {ranks}" for value, ranks in ranks_by_value.items())
            problems.append(f"{name} differs between ranks: {values}")
    return world_size, problems


# Without this, `python -m distamp.doctor` would print nothing and exit with 0, as on success.
if __name__ == "__main__":
    raise SystemExit("distamp: the command is python -m distamp doctor")

"""What works on this machine, as one page for a bug report: ``python -m distamp doctor``."""

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

# What distamp works with where it is installed; none is imported to find out.
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
        page = "".join(f"\n{name:9} {row}" for name, row in rows.items())
        return f"distamp doctor{page}"


def diagnose(timeout: float = 30.0) -> Diagnosis:
    """Look at this machine; under torchrun every rank calls it, before it makes a process group.

    Args:
        timeout: Seconds that ranks wait for each other; a rank that does not come is a problem.
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
    facts["cpu"] = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        version, count = torch.version.cuda or torch.version.hip, torch.cuda.device_count()
        gib = about.total_memory / 2**30
        facts["cuda"] = f"{version}: {count} x {about.name} with {gib:.0f} GiB"
    elif accelerator is not None:
        facts[device] = f"{torch.accelerator.device_count()} devices"
    ranks, problems = 1, list[str]()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        ranks, problems = _compare(facts, timeout)
    return Diagnosis(facts, ranks, problems)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _compare(facts: Mapping[str, str], timeout: float) -> tuple[int, list[str]]:
    """Return how many ranks answered, and what differs between them."""
    size, limit = int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout)
    answers: list[Mapping[str, str]] = [{} for _ in range(size)]
    try:
        dist.init_process_group("gloo", timeout=limit)
        dist.monitored_barrier(timeout=limit, wait_all_ranks=True)
        dist.all_gather_object(answers, facts)
    except Exception as error:
        rank, reason = os.environ["RANK"], _first_line(error)
        return 1, [f"rank {rank} does not reach the {size} ranks: {reason}"]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    problems = []
    for name in sorted({name for answer in answers for name in answer}):
        ranks_by_value: dict[str, list[int]] = {}
        for number, answer in enumerate(answers):
            ranks_by_value.setdefault(answer.get(name, "missing"), []).append(number)
        if len(ranks_by_value) > 1:
            values = ", ".join(f"{value} on {ranks}" for value, ranks in ranks_by_value.items())
            problems.append(f"{name} differs between ranks: {values}")
    return size, problems


if __name__ == "__main__":  # else it would end with 0, as where all is well
    raise SystemExit("distamp: the command is python -m distamp doctor")

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
from torch import nn
from torch.utils.benchmark import Timer

import distamp
from distamp.autocast import autocast

__all__ = ["Diagnosis", "advice", "diagnose", "milliseconds"]

# What distamp works with where it is installed; none is imported to find out.
_PACKAGES = ("triton", "fairscale", "torchao", "lightning", "accelerate", "transformers", "trl")
_LEVELS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Diagnosis:
    """What distamp finds on this machine; ``str`` makes the page.

    Like ``python -m torch.utils.collect_env``, it lists versions, and no names of hosts or people;
    beyond that it times each precision and compares ranks.

    Args:
        facts: Versions and devices by name; under torchrun rank 0's.
        precisions: Milliseconds of one small training step in each dtype, or why there is none.
        ranks: How many ranks answered; 1 without torchrun.
        problems: Facts that differ between ranks, with who has what, and ranks that do not answer.
        advice: Which precisions are slow here, and which level to take.
    """

    facts: Mapping[str, str]
    precisions: Mapping[str, float | str]
    ranks: int
    problems: Sequence[str]
    advice: Sequence[str] = ()

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        rows = {**self.facts, "ranks": str(self.ranks)}
        for name, took in self.precisions.items():
            rows[name] = took if isinstance(took, str) else f"{took:.3g} ms for a small step"
        rows["advice"] = "\n          ".join(self.advice) or "none"
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
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    precisions = {str(d).removeprefix("torch."): milliseconds(device, d) for d in dtypes}
    ranks, problems = 1, list[str]()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        ranks, problems = _compare(facts, timeout)
    return Diagnosis(facts, precisions, ranks, problems, advice(precisions))


def advice(precisions: Mapping[str, float | str]) -> list[str]:
    """Return a sentence for each half precision that takes longer than float32.

    Args:
        precisions: As `Diagnosis` has them.
    """
    took = {name: ms for name, ms in precisions.items() if not isinstance(ms, str)}
    full = took.get("float32", float("inf"))
    best = min(took, key=lambda name: took[name], default="float32")
    return [
        f"{name} takes {ms / full:.1f} times as long as float32 here: take level {_LEVELS[best]}"
        for name, ms in took.items()
        if ms > 1.2 * full
    ]


def milliseconds(device: str, dtype: torch.dtype) -> float | str:
    """Return how long a small step takes under autocast, or the error that it ends in."""
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32 * 14 * 14, 64))
    model, images = model.to(device), torch.rand(8, 16, 16, 16, device=device)

    def step() -> None:
        with autocast(device, dtype=dtype, enabled=dtype is not torch.float32):
            outputs = model(images)
        if outputs.dtype is not dtype:
            raise RuntimeError(f"computes in {outputs.dtype}")
        outputs.float().sum().backward()

    try:
        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=0.2).median * 1000
    except (RuntimeError, TypeError, ValueError) as error:
        return _first_line(error)


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
        mine, reason = os.environ["RANK"], _first_line(error)
        return 1, [f"rank {mine} does not reach the {size} ranks: {reason}"]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    problems = []
    for name in sorted({name for each in answers for name in each}):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(answers):
            ranks.setdefault(each.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            have = ", ".join(f"{value} on {some}" for value, some in ranks.items())
            problems.append(f"{name} differs between ranks: {have}")
    return size, problems


if __name__ == "__main__":  # else it would end with 0, as where all is well
    raise SystemExit("distamp: the command is python -m distamp doctor")

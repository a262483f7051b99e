"""The table of versions that a run of these tests writes (`make test-trainers`)."""

from __future__ import annotations

import collections
import datetime
import platform
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

__all__ = ["Count", "markdown", "packages_of"]

# The packages that a module of tests runs, and those that its tests of some names run beside.
MODULES = {
    "test_lightning": ("lightning",),
    "test_fabric": ("lightning",),
    "test_accelerate": ("accelerate",),
    "test_transformers": ("transformers", "accelerate"),
    "test_ray_train": ("ray",),
}
NAMED = {
    "SFTTrainer": ("trl",),
    "DPOTrainer": ("trl",),
    "GRPOTrainer": ("trl",),
    "lightning": ("lightning",),
    "fabric": ("lightning",),
    "accelerate": ("accelerate",),
    "transformers": ("transformers", "accelerate"),
    "trl": ("trl", "transformers", "accelerate"),
    "install": ("timm",),
    "mmengine": ("mmengine",),
    "torchtitan": ("torchtitan",),
    "torchtitan_loop": ("torchtitan",),
    "schedule_free": ("schedulefree",),
    "bitsandbytes": ("bitsandbytes",),
}

Count = collections.Counter


def packages_of(test: str) -> set[str]:
    """The packages that a test runs, by its pytest name."""
    found: set[str] = set()
    module = re.search(r"(\w+)\.py::", test)
    name = re.search(r"\[(\w+)\]", test)
    if module is not None:
        found |= set(MODULES.get(module.group(1), ()))
    if name is not None:
        found |= set(NAMED.get(name.group(1), ()))
    return found


def markdown(outcomes: Mapping[str, Iterable[str]], seconds: float) -> str:
    """The page: for each package its version and how its tests ended.

    Args:
        outcomes: The names of the tests that passed, failed and were skipped.
        seconds: How long the run took.
    """
    counts: dict[str, Count[str]] = collections.defaultdict(collections.Counter)
    for outcome, tests in outcomes.items():
        for test in tests:
            for package in packages_of(test):
                counts[package][outcome] += 1
    rows = [
        f"| {package} | {_version(package)} | {count['passed']} | {count['failed']} |"
        for package, count in sorted(counts.items())
        if count["passed"] or count["failed"]
    ]
    head = (
        f"{datetime.date.today()}, torch {_version('torch')}, Python {platform.python_version()}, "
        f"2 gloo ranks on {platform.machine()}, {seconds:.0f} s."
    )
    lines = [
        "# Trainers that were tried",
        "",
        head,
        "",
        "    make test-trainers",
        "",
        "Each test runs the package itself, most of them on two ranks of which one overflows.",
        "torchvision is installed without the CUDA build of torch that its wheel asks for, and its",
        "kernels are not used.",
        "",
        "| Package | Version | Tests that passed | that failed |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

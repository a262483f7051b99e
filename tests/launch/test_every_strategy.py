"""Every strategy in every precision: it trains and goes on where it was, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.strategies import STRATEGIES
from tests.launch import jobs, pooled
from tests.launch.jobs import TIMEOUT_S
from tests.launch.pooled import Rows
from tests.launch.test_strategies import SMALL, _agree
from tests.ranks import RankPool

pytestmark = [pytest.mark.xdist_group("every strategy"), pytest.mark.timeout(1500)]

# At a scale of 2^19 gradients overflow: the first steps are skipped and the others are taken.
PRECISIONS = {
    "fp32": ("--precision", "fp32"),
    "fp16": ("--precision", "fp16", "--init-scale", 2.0**19),
    "bf16": ("--precision", "bf16"),
}
# These make groups of groups; two ranks are one.
FOUR = ("hsdp", "fsdp2+tp")
REFUSED = {name: s.device for name, s in STRATEGIES.items() if s.device is not None}
TRAINED = [name for name in STRATEGIES if name not in REFUSED]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


def _world(strategy: str) -> int:
    if not STRATEGIES[strategy].several:
        return 1
    return 4 if strategy in FOUR else 2


def _overflows(folder: Path, step: int) -> dict[str, list[int]]:
    path = folder / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    counts: dict[str, list[int]] = json.loads(path.read_text())["overflows"]
    return counts


def _there_and_back(folder: Path, *flags: object) -> tuple[Rows, Rows, dict[str, Any]]:
    """Train; train again from the middle. The records of both, and what overflowed in them."""
    straight = pooled.train(folder, flags)
    counted = {"straight": _overflows(folder, 6)}
    middle = folder / "checkpoints" / "step-00000003"
    counted["middle"] = _overflows(folder, 3)
    resumed = pooled.train(folder, (*flags, "--resume", middle))
    return straight, resumed, {**counted, "resumed": _overflows(folder, 6)}


def _most(counts: dict[str, list[int]]) -> set[str]:
    """The names that overflowed in the most steps."""
    most = max(steps for steps, _ in counts.values())
    return {name for name, (steps, _) in counts.items() if steps == most}


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process comes to on the same batches."""
    folder = tmp_path_factory.mktemp("alone")
    flags = ("--data", text, *SMALL, "--checkpoint-every", 3, "--keep-checkpoints", 9)
    return {
        name: _there_and_back(folder / name, *flags, *precision)
        for name, precision in PRECISIONS.items()
    }


# In fp32 test_strategies.py compares most of them on four ranks. In bf16 there is no scaler, and
# strategies differ in what they gather and reduce alone.
CELLS = [
    pytest.param(
        strategy,
        precision,
        marks=()
        if precision == "fp16" or (precision == "bf16" and strategy in ("none", "ddp", "fsdp2"))
        else pytest.mark.slow,
    )
    for precision in PRECISIONS
    for strategy in TRAINED
]


@pytest.mark.parametrize(("strategy", "precision"), CELLS)
def test_it_trains_as_one_process_does_and_goes_on_where_it_was(
    ranks: Callable[[int], RankPool], alone, text, tmp_path, strategy, precision
):
    flags = ("--data", text, *SMALL, *PRECISIONS[precision], "--strategy", strategy)
    flags = (*flags, "--checkpoint-every", 3, "--keep-checkpoints", 9)
    if (world := _world(strategy)) == 1:
        straight, resumed, counted = _there_and_back(tmp_path, *flags)
    else:
        straight, resumed, counted = ranks(world).run(
            _there_and_back, tmp_path, *flags, timeout=TIMEOUT_S
        )[0]

    expected, _, expected_counts = alone[precision]
    assert len(straight) == 6 + 3
    if (strategy, precision) != ("dp", "fp16"):
        # Its replicas add over half the examples each, and overflow at half the scale less often.
        _agree(straight, expected, precision)
    assert resumed == straight
    assert (0 < straight[-2]["skipped"] < 6) == (precision == "fp16")

    # Which parameters overflowed: every strategy finds them, and a resumed run keeps count.
    assert counted["resumed"] == counted["straight"]
    found, there = counted["straight"], expected_counts["straight"]
    assert bool(found) == bool(there) == (precision == "fp16")
    if found:
        assert counted["middle"]
        assert max(steps for steps, _ in found.values()) == straight[-2]["skipped"]
        # Not every name must agree where ranks add over fewer examples, but those that overflow
        # most do so everywhere.
        assert _most(found) & _most(there)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", REFUSED)
def test_what_this_machine_cannot_do_is_refused_by_name(ranks2, text, strategy, precision):
    flags = ("--data", text, *SMALL, *PRECISIONS[precision], "--strategy", strategy)
    refusals = ranks2.run(pooled.refusal, *flags, "--device", "cpu")
    assert refusals == [f"--strategy {strategy}: it needs {REFUSED[strategy]} and this is cpu"] * 2


def test_there_is_no_other():
    assert set(TRAINED) | set(REFUSED) == set(STRATEGIES)
    assert set(REFUSED) == {"fairscale_fsdp"}

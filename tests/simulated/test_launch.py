"""launch/train.py with --device sim: in each layout the losses that it has on the CPU."""

from collections import Counter
from pathlib import Path

import pytest

from tests.launch import jobs
from tests.launch.jobs import TINY, Rows
from tests.simulated.device import ALL_SYNCS, counted

RUN = (*TINY, "--steps", 4)
SHOWN = ("step", "loss", "gradient_norm", "validation_loss")

pytestmark = pytest.mark.xdist_group("simulated launch")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


def _same(found: Rows, expected: Rows) -> None:
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        shown = [{k: v for k, v in row.items() if k in SHOWN} for row in (mine, theirs)]
        assert shown[0] == pytest.approx(shown[1], rel=1e-5)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        pytest.param(2, "--comm-hook int8", marks=pytest.mark.slow),
        (2, "--shard -1 --comm-hook fp16"),
        pytest.param(4, "--shard 2 --tp 2", marks=pytest.mark.slow),
    ],
)
def test_a_run_on_ranks_is_as_on_the_cpu(sim_ranks, ranks, text, tmp_path, size, flags):
    args = ("--data", text, *RUN, *flags.split())
    expected = ranks(size).run(jobs.train, tmp_path / "cpu", (*args, "--device", "cpu"))
    given = (*args, "--device", "sim")
    found = sim_ranks(size).run(jobs.train, tmp_path / "sim", given, schedule="random")
    _same(found[0], expected[0])


def _waits(folder: Path, args: tuple[object, ...]) -> Counter[str]:
    """How often a run waits for its device; its records come at its end."""
    with counted() as found:
        jobs.train(folder, args)
    return Counter({kind: count for kind, count in found.items() if kind in ALL_SYNCS})


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_no_step_waits_for_its_device(sim, text, tmp_path, precision):
    """But where a record is written: twice as many steps wait no more often."""
    args = (
        *("--data", text, *TINY, "--device", "sim", "--precision", precision, "--log-every", 99),
        *("--eval-every", 99, "--save-every", 99, "--keep-checkpoints", 0, "--no-check-precision"),
    )
    few = sim.one(_waits, tmp_path / "few", (*args, "--steps", 4))
    assert sim.one(_waits, tmp_path / "many", (*args, "--steps", 8)) == few


@pytest.mark.parametrize(
    ("before", "after"), [("sim", "cpu"), pytest.param("cpu", "sim", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_on_another_device(sim, text, tmp_path, before, after):
    args = ("--data", text, *RUN, "--save-every", 2)
    expected = sim.one(jobs.train, tmp_path / "straight", (*args, "--device", "cpu"))
    half = ("--resume", tmp_path / "run" / "checkpoints" / "step-00000002", "--device", after)
    found = sim.one(jobs.train, tmp_path / "run", (*args, "--device", before), half)
    _same(found, expected)

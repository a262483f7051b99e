"""launch/train.py with --device sim has the losses of the CPU in each layout."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.launch import jobs
from tests.launch.jobs import TINY, Rows
from tests.ranks import RankPool
from tests.simulated.device import counted
from tests.simulated.pools import SimPool

RUN = (*TINY, "--steps", 4)
SHOWN = ("step", "loss", "gradient_norm", "validation_loss")

pytestmark = pytest.mark.xdist_group("simulated launch")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return jobs.text_file(tmp_path)


def _shown_values(row: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a record that do not depend on the device."""
    return {name: row[name] for name in SHOWN if name in row}


def _assert_same_records(rows: Rows, expected_rows: Rows) -> None:
    """Assert that two runs wrote the same records, except times and memory."""
    assert len(rows) > 0
    for row, expected in zip(rows, expected_rows, strict=True):
        assert _shown_values(row) == pytest.approx(_shown_values(expected), rel=1e-5)


def _compare_with_cpu(sim_pool: SimPool, cpu_pool: RankPool, text: Path, flags: str) -> None:
    """Train with flags on the CPU and on devices, and compare the records."""
    args = ("--data", text, *RUN, *flags.split(), "--device")
    cpu_rows = cpu_pool.run(jobs.train, text.parent / "cpu", (*args, "cpu"))
    scheduled = sim_pool.under("random")
    sim_rows = scheduled.run(jobs.train, text.parent / "sim", (*args, "sim"))
    _assert_same_records(sim_rows[0], cpu_rows[0])


@pytest.mark.slow
def test_ddp_with_a_hook_has_the_records_of_the_cpu(sim2, ranks2, text):
    _compare_with_cpu(sim2, ranks2, text, "--comm-hook int8")


@pytest.mark.slow
def test_fsdp_with_a_hook_has_the_records_of_the_cpu(sim2, ranks2, text):
    _compare_with_cpu(sim2, ranks2, text, "--shard -1 --comm-hook fp16")


@pytest.mark.slow
def test_tensor_parallel_shards_have_the_records_of_the_cpu(sim_ranks, ranks4, text):
    _compare_with_cpu(sim_ranks(4), ranks4, text, "--shard 2 --tp 2")


def _count_waits(folder: Path, args: tuple[object, ...]) -> Counter[str]:
    """Run the launcher; return the number of host syncs by kind."""
    with counted() as counts:
        jobs.train(folder, args)
    waits = Counter(counts)
    del waits["no_meta"]  # The simulation alone has this kind.
    return waits


# Without these flags a run waits for the device where it writes a record.
WITHOUT_RECORDS = """
    --device sim --log-every 99 --eval-every 99 --save-every 99 --keep-checkpoints 0
    --no-check-precision
"""


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_no_step_waits_for_its_device(sim, text, tmp_path, precision):
    """A run of twice as many steps waits no more often."""
    flags = WITHOUT_RECORDS.split()
    args = ("--data", text, *TINY, *flags, "--precision", precision, "--steps")
    waits_of_4_steps = sim.one(_count_waits, tmp_path / "4", (*args, 4))
    waits_of_8_steps = sim.one(_count_waits, tmp_path / "8", (*args, 8))
    assert waits_of_8_steps == waits_of_4_steps


def _resume_on(device: str, pool: SimPool, text: Path, first_device: str) -> None:
    """Train two steps on one device and the rest on another; compare with a run on the CPU."""
    folder = text.parent
    args = ("--data", text, *RUN, "--save-every", 2, "--device")
    expected_rows = pool.one(jobs.train, folder / "uninterrupted", (*args, "cpu"))
    checkpoint = folder / "run" / "checkpoints" / "step-00000002"
    resume = ("--resume", checkpoint, "--device", device)
    rows = pool.one(jobs.train, folder / "run", (*args, first_device), resume)
    _assert_same_records(rows, expected_rows)


@pytest.mark.slow
def test_a_run_on_the_device_resumes_on_the_cpu(sim, text):
    _resume_on("cpu", sim, text, first_device="sim")


@pytest.mark.slow
def test_a_run_on_the_cpu_resumes_on_the_device(sim, text):
    _resume_on("sim", sim, text, first_device="cpu")

"""Where no record is written, no step waits for the device, counted on a simulated accelerator."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from launch.command_line import read
from launch.job import prepare
from launch.ranks import Ranks
from launch.train import train as train_job
from tests.launch import jobs, pooled
from tests.launch.test_strategies import _agree

pytestmark = [pytest.mark.xdist_group("simulated"), pytest.mark.timeout(1500)]

SMALL = (
    *("--layers", 1, "--width", 16, "--heads", 2, "--block", 16, "--batch", 8, "--warmup", 2),
    *("--validation-windows", 8, "--evaluate-every", 100, "--keep-checkpoints", 0),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


def _waits(folder: Path, *flags: object) -> dict[str, int]:
    """The host syncs of a whole run by kind, and the collectives over gloo among its ranks."""
    from tests.simulated import device

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = Ranks(rank, rank, world if dist.is_initialized() else 1)
    args = [*map(str, (*SMALL, "--device", "sim", *flags)), "--run-dir", str(folder)]
    sums = 0
    with contextlib.redirect_stdout(io.StringIO()):
        job = prepare(read(args, quiet=True), ranks)
        add = Ranks.sum

        def counting(self: Ranks, *values: object) -> object:
            nonlocal sums
            sums += 1
            return add(self, *values)  # type: ignore[arg-type]

        Ranks.sum = counting  # type: ignore[assignment,method-assign]
        try:
            with device.counted() as counts, job.report:
                train_job(job)
        finally:
            Ranks.sum = add  # type: ignore[method-assign]
    if dist.is_initialized():
        pooled._keep_groups()
    return {**counts, "messages": sums}


def _of_four_steps(pool, folder: Path, *flags: object) -> dict[str, int]:
    """What four steps more add to a run."""
    short = pool.one(_waits, folder / "short", *flags, "--steps", 4, timeout=300.0)
    long = pool.one(_waits, folder / "long", *flags, "--steps", 8, timeout=300.0)
    more = {kind: long[kind] - short.get(kind, 0) for kind in long}
    return {kind: count for kind, count in more.items() if count}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_without_a_record_waits_for_nothing(sim, text, tmp_path, precision):
    flags = ("--data", text, "--precision", precision, "--accumulate", 2)
    found = _of_four_steps(sim, tmp_path, *flags, "--log-every", 100)
    # The launcher waits for nothing; the scaler may copy the weights of a norm to the device.
    assert found.keys() <= {"h2d"}, found
    assert found.get("h2d", 0) <= 4
    with_records = _of_four_steps(sim, tmp_path / "each", *flags, "--log-every", 1)
    assert with_records["messages"] == 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_nor_does_it_among_ranks(sim2, text, tmp_path, strategy):
    flags = ("--data", text, "--precision", "fp16", "--strategy", strategy)
    # Once a step, for the scaler's message, which also says whether replicas still had one norm.
    found = _of_four_steps(sim2, tmp_path, *flags, "--log-every", 100)
    assert found.keys() <= {"event", "h2d"}, found
    assert found.get("event", 0) <= 4
    assert found.get("h2d", 0) <= 8


def _losses(folder: Path, *flags: object) -> pooled.Rows:
    _waits(folder, *flags)
    return jobs.without_speed(jobs.records(folder))


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_skipped_steps_hold_the_learning_rate_back_whoever_knows_of_them(
    sim, text, tmp_path, schedule
):
    flags = ("--data", text, "--precision", "fp16", "--init-scale", 2.0**18, "--steps", 8)
    known = pooled.train(tmp_path / "cpu", (*SMALL, *flags))
    rows = sim.one(_losses, tmp_path / "sim", *flags, schedule=schedule, timeout=300.0)
    few = sim.one(
        _losses, tmp_path / "few", *flags, "--log-every", 4, schedule=schedule, timeout=300.0
    )
    assert 0 < known[-2]["skipped"] < 8
    # On the device the learning rate is a float32.
    rates = [[row.pop("learning_rate", 0.0) for row in each] for each in (rows, known)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)
    _agree(rows, known, "fp16")
    for row in few:
        row.pop("learning_rate", None)
    assert few == [row for row in rows if row["step"] in (0, 4, 8)]

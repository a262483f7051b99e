"""launch/train.py with --device sim: in each strategy the losses that it has on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.strategies import STRATEGIES
from tests.launch import jobs, pooled

SMALL = (
    *("--layers", 2, "--width", 16, "--heads", 2, "--block", 16, "--batch", 16, "--warmup", 2),
    *("--lr", 1e-2, "--validation-windows", 8, "--evaluate-every", 3, "--steps", 4),
)
# Of the numbers of a run, those that a device must not change.
SHOWN = ("step", "loss", "scale", "skipped", "gradient_norm", "validation_loss")
TWO_RANKS = ["ddp", "zero1", "oss", "sharded_ddp", "fsdp1", "fsdp2"]
FOUR_RANKS = ["hsdp", "fsdp2+tp"]

pytestmark = pytest.mark.xdist_group("simulated launch")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


def _shown(rows: pooled.Rows) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k in SHOWN} for row in rows]


def _same(found: pooled.Rows, expected: pooled.Rows) -> None:
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(_shown(found), _shown(expected), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("strategy", TWO_RANKS)
def test_a_run_on_two_ranks_is_as_on_the_cpu(sim2, ranks2, text, tmp_path, strategy):
    assert strategy in STRATEGIES
    args = ("--data", text, *SMALL, "--strategy", strategy, "--precision", "fp32")
    expected = ranks2.run(pooled.train, tmp_path / "cpu", (*args, "--device", "cpu"))
    found = sim2.run(pooled.train, tmp_path / "sim", (*args, "--device", "sim"))
    _same(found[0], expected[0])


@pytest.mark.parametrize("strategy", FOUR_RANKS)
def test_a_run_on_four_ranks_is_as_on_the_cpu(sim_ranks, ranks4, text, tmp_path, strategy):
    args = ("--data", text, *SMALL, "--strategy", strategy, "--precision", "fp32")
    expected = ranks4.run(pooled.train, tmp_path / "cpu", (*args, "--device", "cpu"))
    found = sim_ranks(4).run(pooled.train, tmp_path / "sim", (*args, "--device", "sim"))
    _same(found[0], expected[0])


@pytest.mark.parametrize(("strategy", "wire"), [("ddp", "int8"), ("fsdp2", "fp16")])
def test_a_run_through_a_hook_is_as_on_the_cpu(sim2, ranks2, text, tmp_path, strategy, wire):
    args = ("--data", text, *SMALL, "--strategy", strategy, "--comm-hook", wire)
    expected = ranks2.run(pooled.train, tmp_path / "cpu", (*args, "--device", "cpu"))
    found = sim2.run(pooled.train, tmp_path / "sim", (*args, "--device", "sim"), schedule="random")
    _same(found[0], expected[0])


@pytest.mark.parametrize(("before", "after"), [("sim", "cpu"), ("cpu", "sim")])
def test_a_run_goes_on_on_another_device(sim, text, tmp_path, before, after):
    args = ("--data", text, *SMALL, "--precision", "fp32", "--checkpoint-every", 2)
    expected = sim.one(pooled.train, tmp_path / "straight", (*args, "--device", "cpu"))
    half = (*args, "--device", before)
    middle = ("--resume", tmp_path / "run" / "checkpoints" / "step-00000002")
    found = sim.one(pooled.train, tmp_path / "run", half, (*args, *middle, "--device", after))
    _same(found, expected)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_run_of_one_process_is_as_on_the_cpu(sim, text, tmp_path, precision):
    args = ("--data", text, *SMALL, "--precision", precision)
    expected = sim.one(pooled.train, tmp_path / "cpu", (*args, "--device", "cpu"))
    found = sim.one(pooled.train, tmp_path / "sim", (*args, "--device", "sim"), schedule="random")
    if precision == "fp32":
        _same(found, expected)
    else:  # the CPU has autocast lists of its own
        assert [row["loss"] for row in found if "loss" in row] == pytest.approx(
            [row["loss"] for row in expected if "loss" in row], rel=2e-2
        )


def test_data_parallel_over_the_devices_of_one_process(sim, text, tmp_path):
    args = ("--data", text, *SMALL, "--strategy", "dp", "--replicas", 2, "--precision", "fp32")
    expected = sim.one(pooled.train, tmp_path / "cpu", (*args, "--device", "cpu"))
    found = sim.one(pooled.train, tmp_path / "sim", (*args, "--device", "sim"))
    _same(found, expected)

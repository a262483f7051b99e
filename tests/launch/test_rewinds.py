"""A run that goes back after an error is the run without the batches that it passed over."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.program import UsageError
from tests.launch import jobs
from tests.launch.faults import Faults
from tests.ranks import RankPool

slow = pytest.mark.slow
STEPS = 24
# The errors of planted faults, by their kind.
ERRORS = {
    "nan": "NonFiniteWeightsError",
    "flip": "ReplicaMismatchError",
    "poison": "NonFiniteGradientsError",
}
REWINDING = f"""
--precision bf16 --schedule constant --ema 0.9 --check-replicas-every 2 --on-mismatch raise
--rewind-every 4 --max-rewinds 9 --save-every {STEPS} --eval-every {STEPS}
"""


def make_args(text: Path, flags: str = "") -> list[str]:
    """Return the flags of a tiny run that goes back, and more flags."""
    return jobs.make_flags(text, f"{REWINDING} {flags}")


def train_with(folder: Path, planted: dict[str, Any], *args: Any) -> jobs.Rows:
    """Do a run with planted faults on this rank, and return its records."""
    planted = {"once": str(folder.parent), **planted}
    with contextlib.ExitStack() as stack:
        for patch in Faults(planted).patches():
            stack.enter_context(patch)
        return jobs.train(folder, args)


def length_flags(steps: int) -> list[str]:
    """Return the flags of a run of some steps with one checkpoint at its end."""
    flags = f"--steps {steps} --save-every {steps}"
    return flags.split()


def compare_with_clean_run(
    pool: RankPool,
    folder: Path,
    planted: dict[str, Any],
    args: list[str],
    steps: int,
) -> None:
    """Compare a run that goes back after faults with a run without the batches it passed over."""
    faulty_run = folder / "faults"
    faulty_args = args + length_flags(steps)
    rows = pool.run(train_with, faulty_run, planted, *faulty_args)[0]
    errors = [row["error"] for row in rows if "rewound" in row]
    assert errors == [ERRORS[kind] for kind in planted]
    dropped = jobs.passed_over(rows)
    clean_run = folder / "clean"
    clean_steps = steps - len(dropped)
    clean_args = args + length_flags(clean_steps)
    pool.run(train_with, clean_run, {"dropped": dropped}, *clean_args)
    for kind in ("model.", "ema.", "optimizer."):
        rewound = jobs.weights(faulty_run, steps, kind)
        expected = jobs.weights(clean_run, clean_steps, kind)
        assert torch.equal(rewound, expected)


@slow
# A snapshot is due after step 12.
@pytest.mark.parametrize(
    "planted",
    [
        {"nan": [11]},
        {"flip": [6]},
        {"poison": [14, 15, 16]},
        {"nan": [2], "flip": [10]},
        {"nan": [12]},
        {"flip": [12]},
    ],
    ids=str,
)
def test_a_run_that_goes_back_equals_a_run_without_the_batches_it_passed_over(
    ranks2, text, tmp_path, planted
):
    args = make_args(text)
    compare_with_clean_run(ranks2, tmp_path, planted, args, STEPS)


# A snapshot is due after step 4.
@pytest.mark.parametrize("step", [4, 5])
def test_a_short_run_that_goes_back_equals_a_run_without_the_batches_it_passed_over(
    ranks2, text, tmp_path, step
):
    args = make_args(text)
    compare_with_clean_run(ranks2, tmp_path, {"nan": [step]}, args, 8)


@slow
def test_without_the_flag_the_run_ends(ranks2, text, tmp_path):
    args = make_args(text, f"--rewind-every 0 --check-update --steps {STEPS}")
    with pytest.raises(Exception, match="step 12: After step 11 of the steps taken by AdamW"):
        ranks2.run(train_with, tmp_path / "run", {"nan": [11]}, *args)


@slow
def test_after_the_last_rewind_the_run_ends(text, tmp_path):
    args = make_args(text, f"--max-rewinds 1 --steps {STEPS}")
    with pytest.raises(UsageError, match="The run has gone back --max-rewinds 1 times"):
        train_with(tmp_path / "run", {"nan": [5, 11]}, *args)


@slow
def test_a_run_that_was_resumed_after_a_rewind_has_the_same_end(text, tmp_path):
    planted = {"nan": [11]}
    args = make_args(text, "--save-every 8")
    all_steps = ["--steps", STEPS]
    uninterrupted = train_with(tmp_path / "uninterrupted", planted, *args, *all_steps)
    # The fault wrote this file so that it does not strike a second time.
    (tmp_path / "nan-11").unlink()
    run = tmp_path / "resumed"
    train_with(run, planted, *args, "--steps", 16)
    resumed = train_with(run, planted, "--resume", run, *all_steps)
    assert jobs.training_records(resumed) == jobs.training_records(uninterrupted)


@slow
def test_a_run_that_was_resumed_between_poisoned_steps_skips_them_and_goes_on(text, tmp_path):
    poison = {"poison": [7, 8, 9]}
    args = make_args(text, "--save-every 8")
    run = tmp_path / "resumed"
    train_with(run, poison, *args, "--steps", 8)
    all_steps = ["--steps", STEPS]
    resumed = train_with(run, poison, "--resume", run, *all_steps)
    assert not any("rewound" in row for row in resumed)
    # A run for comparison does the same without the resume.
    without_limit = {"dropped": [], **poison}
    clean = train_with(tmp_path / "clean", without_limit, *args, *all_steps)
    assert jobs.training_records(resumed) == jobs.training_records(clean)


@slow
def test_no_checkpoint_is_written_of_weights_with_nan(text, tmp_path):
    args = make_args(text, "--rewind-every 0 --save-every 4 --steps 4")
    with pytest.raises(UsageError, match="no checkpoint of step 4 was written: Weights or"):
        train_with(tmp_path / "run", {"nan": [4]}, *args)
    assert not list((tmp_path / "run").glob("checkpoints/step*"))

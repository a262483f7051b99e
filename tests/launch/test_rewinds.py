"""A run that goes back after an error is the run without the batches that it passed over."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.program import UsageError
from tests.launch import jobs
from tests.launch.faults import Faults

STEPS = 24
FLAGS = (
    *(*jobs.TINY, "--precision", "bf16", "--schedule", "constant", "--ema", 0.9),
    *("--check-replicas-every", 2, "--on-mismatch", "raise", "--rewind-every", 4),
    *("--max-rewinds", 9, "--save-every", STEPS, "--eval-every", STEPS),
)


def train_with(folder: Path, planted: dict[str, Any], *args: Any) -> jobs.Rows:
    """Do a run with planted faults on this rank, and return its records."""
    planted = {"once": str(folder.parent), **planted}
    with contextlib.ExitStack() as stack:
        for patch in Faults(planted).patches():
            stack.enter_context(patch)
        return jobs.train(folder, args)


@pytest.mark.parametrize(
    ("planted", "error"),
    [
        ({"nan": [11]}, "NonFiniteWeightsError"),
        ({"flip": [6]}, "ReplicaMismatchError"),
        ({"poison": [14, 15, 16]}, "NonFiniteGradientsError"),
        ({"nan": [2, 17], "flip": [10]}, "NonFiniteWeightsError"),
    ],
    ids=["nan update", "flipped bit", "poisoned batches", "several"],
)
def test_a_run_that_goes_back_equals_a_run_without_the_batches_it_passed_over(
    ranks2, text, tmp_path, planted, error
):
    args = ("--data", text, *FLAGS)
    rows = ranks2.run(train_with, tmp_path / "faults", planted, *args, "--steps", STEPS)[0]
    dropped = jobs.passed_over(rows)
    assert [row["error"] for row in rows if "rewound" in row][-1] == error
    steps = STEPS - len(dropped)
    others = {"dropped": dropped}
    ranks2.run(
        train_with, tmp_path / "clean", others, *args, "--steps", steps, "--save-every", steps
    )
    for kind in ("model.", "ema.", "optimizer."):
        with_faults = jobs.weights(tmp_path / "faults", STEPS, kind)
        without = jobs.weights(tmp_path / "clean", steps, kind)
        assert torch.equal(with_faults, without)


def test_without_the_flag_the_run_ends(ranks2, text, tmp_path):
    args = ("--data", text, *FLAGS, "--rewind-every", 0, "--check-update", "--steps", STEPS)
    with pytest.raises(Exception, match="step 12: After step 11 of the steps taken by AdamW"):
        ranks2.run(train_with, tmp_path / "run", {"nan": [11]}, *args)


def test_after_the_last_rewind_the_run_ends(text, tmp_path):
    args = ("--data", text, *FLAGS, "--max-rewinds", 1, "--steps", STEPS)
    with pytest.raises(UsageError, match="The run has gone back --max-rewinds 1 times"):
        train_with(tmp_path / "run", {"nan": [5, 11]}, *args)


def test_a_run_that_was_resumed_after_a_rewind_has_the_same_end(text, tmp_path):
    args = ("--data", text, *FLAGS, "--save-every", 8)
    whole = train_with(tmp_path / "whole", {"nan": [11]}, *args, "--steps", STEPS)
    (tmp_path / "nan-11").unlink()
    train_with(tmp_path / "parts", {"nan": [11]}, *args, "--steps", 16)
    resume = ("--resume", tmp_path / "parts", "--steps", STEPS)
    parts = train_with(tmp_path / "parts", {"nan": [11]}, *resume)
    assert [row for row in parts if "loss" in row] == [row for row in whole if "loss" in row]


def test_no_checkpoint_is_written_of_weights_with_nan(text, tmp_path):
    args = ("--data", text, *FLAGS, "--rewind-every", 0, "--save-every", 4, "--steps", 4)
    with pytest.raises(UsageError, match="no checkpoint of step 4 was written: Weights or"):
        train_with(tmp_path / "run", {"nan": [4]}, *args)
    assert not list((tmp_path / "run").glob("checkpoints/step*"))

"""Gradients sent in fewer bytes by the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distamp.initialize import Amp
from launch import checkpoint, residuals
from launch import job as launch_job
from launch.job import Job
from launch.ranks import Ranks
from launch.strategies import STRATEGIES
from launch.train import train as train_job
from tests.launch import jobs, pooled, test_checkpoint
from tests.launch.pooled import Rows
from tests.launch.test_checkpoint import straight
from tests.launch.test_strategies import PRECISIONS, SMALL, _agree, alone, text

__all__ = ["alone", "straight", "text"]

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]


HOOKED = [n for n, s in STRATEGIES.items() if s.hooked]


def _trained(folder: Path, flags: tuple[object, ...]) -> Job:
    job = pooled.job("--run-dir", folder, *flags)
    with job.report:
        train_job(job)
    dist.barrier()
    pooled._keep_groups()
    return job


def _train_and_sum_up(folder: Path, flags: tuple[object, ...]) -> tuple[Rows, str]:
    job = _trained(folder, flags)
    return jobs.without_speed(jobs.records(folder)), job.summary()["Gradients"]


@pytest.mark.parametrize("strategy", HOOKED)
def test_gradients_sent_in_fp16_train_as_those_sent_in_fp32(
    ranks4, alone, text, tmp_path, strategy
):
    flags = ("--data", text, *SMALL, *PRECISIONS["fp16"], "--strategy", strategy)
    flags = (*flags, "--comm-hook", "fp16", "--checkpoint-every", 3, "--keep-checkpoints", 9)
    rows, shown = ranks4.run(_train_and_sum_up, tmp_path, flags)[0]
    # What travels is rounded to fp16, as autocast's own gradients are.
    _agree(rows, alone["fp16"], "fp16")
    assert "as fp16" in shown
    assert "saved" in shown
    assert " x " not in shown, "something went another way"
    middle = ("--resume", tmp_path / "checkpoints" / "step-00000003")
    assert ranks4.run(pooled.train, tmp_path, (*flags, *middle))[0] == rows


@pytest.mark.parametrize(("before", "after"), [("hsdp", "fsdp1"), ("ddp", "hsdp")])
def test_a_run_that_overflows_goes_on_with_other_hooks(
    ranks4, straight, text, tmp_path, before, after
):
    flags = ("--data", text, *test_checkpoint.SMALL, *test_checkpoint.FP16, "--comm-hook", "fp16")
    ranks4.run(pooled.train, tmp_path, (*flags, "--strategy", before, "--keep-checkpoints", 9))
    resume = ("--resume", tmp_path / "checkpoints" / "step-00000004")
    rows = ranks4.run(pooled.train, tmp_path, (*flags, "--strategy", after, *resume))[0]
    # Two steps are skipped before it and two taken: one rank that missed it would show.
    _agree(rows, straight, "fp16")


def test_a_hook_for_what_takes_none_is_refused(ranks4, text):
    flags = ("--data", text, *SMALL, "--comm-hook", "fp16")
    shown = ranks4.run(pooled.refusal, *flags, "--strategy", "sharded_ddp")[0]
    assert shown == (
        "--comm-hook fp16: it is for ddp, fsdp1, fsdp2, hsdp, zero1, and this is sharded_ddp"
    )
    assert "and this is none" in pooled.refusal(*flags)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_auto_says_what_it_chose(ranks4, text, tmp_path, strategy):
    flags = ("--data", text, *SMALL, "--strategy", strategy, "--comm-hook", "auto")
    rows, shown = ranks4.run(_train_and_sum_up, tmp_path, flags)[0]
    assert rows
    assert shown.startswith("auto chose ")
    assert "fp16 " in shown


def test_replicas_may_send_with_error_feedback(ranks4, text, tmp_path):
    flags = ("--data", text, *SMALL, "--comm-hook", "int8")
    _, shown = ranks4.run(_train_and_sum_up, tmp_path, (*flags, "--strategy", "ddp"))[0]
    assert "as int8" in shown


def _left_of_the_mean(job: Job) -> dict[str, Tensor]:
    """What rounding took from the mean of each parameter's gradients over these ranks."""
    found = job.run.amp.comm_hooks[0].state_dict()["residuals"]
    due = {}
    for name, parameter in job.run.model.named_parameters():
        mine, owned = found.get(name, torch.zeros(2, parameter.numel()))
        due[name] = mine / dist.get_world_size() + owned
        dist.all_reduce(due[name])
    return due


def _train_and_measure(folder: Path, flags: tuple[object, ...]) -> dict[str, Tensor]:
    return _left_of_the_mean(_trained(folder, flags))


def _resume_and_measure(folder: Path, flags: tuple[object, ...]) -> dict[str, Tensor]:
    job = pooled.job("--run-dir", folder, *flags, "--resume", folder, "--steps", 9)
    pooled._keep_groups()
    return _left_of_the_mean(job)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_what_rounding_took_comes_to_the_same_mean_on_any_number_of_ranks(
    ranks, text, tmp_path, strategy
):
    flags = ("--data", text, *SMALL, "--comm-hook", "int8", "--strategy", strategy)
    due = ranks(4).run(_train_and_measure, tmp_path, flags)[0]
    assert all(tensor.any() for tensor in due.values())
    for size in (4, 2, 8):
        for found in ranks(size).run(_resume_and_measure, tmp_path, flags):
            assert found.keys() == due.keys()
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, due[name])


@pytest.mark.parametrize("wire", ["int8"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_with_error_feedback_goes_on_as_if_never_stopped(
    ranks4, text, tmp_path, wire, precision
):
    flags = ("--data", text, *SMALL, *PRECISIONS[precision], "--comm-hook", wire)
    flags = (*flags, "--checkpoint-every", 3, "--keep-checkpoints", 9)
    straight = ranks4.run(pooled.train, tmp_path, flags)[0]
    middle = ("--resume", tmp_path / "checkpoints" / "step-00000003")
    assert ranks4.run(pooled.train, tmp_path, (*flags, *middle))[0] == straight


def _train_as_before(folder: Path, flags: tuple[object, ...]) -> Rows:
    """Write checkpoints whose residuals have the name that they had at first."""

    def former(amp: Amp, ranks: Ranks) -> dict[str, Tensor]:
        found = residuals.residuals(amp, ranks)
        return {f"owed.{name.split('.', 1)[1]}": tensor for name, tensor in found.items()}

    def save(path: Path, ranks: Ranks, tensors: Any, about: dict[str, Any], keep: int) -> None:
        about = {**about, "owed": about["residuals"]}
        del about["residuals"]
        assert about["owed"]
        save_as_now(path, ranks, tensors, about, keep)

    save_as_now = checkpoint.save
    with (
        mock.patch.object(launch_job, "residuals", former),
        mock.patch.object(checkpoint, "save", save),
    ):
        return pooled.train(folder, flags)


def test_residuals_are_read_under_their_former_name(ranks2, text, tmp_path):
    flags = ("--data", text, *SMALL, "--comm-hook", "int8")
    flags = (*flags, "--checkpoint-every", 3, "--keep-checkpoints", 9)
    straight = ranks2.run(_train_as_before, tmp_path, flags)[0]
    middle = ("--resume", tmp_path / "checkpoints" / "step-00000003")
    assert ranks2.run(pooled.train, tmp_path, (*flags, *middle))[0] == straight


def test_a_run_without_error_feedback_drops_residuals(ranks, text, tmp_path):
    flags = ("--data", text, *SMALL, "--strategy", "ddp")
    ranks(2).run(_train_and_measure, tmp_path, (*flags, "--comm-hook", "int8"))
    for wire in (("--comm-hook", "fp16"), ()):
        steps = [*range(7, 10)]
        again = (*flags, *wire, "--resume", tmp_path, "--steps", 9)
        rows = ranks(2).run(pooled.train, tmp_path / (wire[-1] if wire else "none"), again)[0]
        assert [row["step"] for row in rows if row["step"] > 6 and "loss" in row] == steps


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "hsdp"])
def test_shards_are_refused_what_needs_error_feedback(ranks4, text, tmp_path, strategy):
    flags = ("--data", text, *SMALL, "--comm-hook", "int8", "--strategy", strategy)
    refused = ranks4.run(pooled.refusal, *flags, "--run-dir", tmp_path / "run")
    shown = (
        "--comm-hook int8: it needs error feedback, which sharded gradients have not; it is for"
        f" ddp and zero1, and this is {strategy}"
    )
    assert refused == [shown] * 4
    assert not (tmp_path / "run").exists()

"""Gradients sent in fewer bytes by the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from launch.strategies import STRATEGIES
from launch.train import train as train_job
from tests.launch import jobs, pooled
from tests.launch.pooled import Rows
from tests.launch.test_strategies import PRECISIONS, SMALL, _agree, alone, text

__all__ = ["alone", "text"]

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]


HOOKED = [n for n, s in STRATEGIES.items() if s.hooked]


def _train_and_sum_up(folder: Path, flags: tuple[object, ...]) -> tuple[Rows, str]:
    job = pooled.job("--run-dir", folder, *flags)
    with job.report:
        train_job(job)
    dist.barrier()
    pooled._keep_groups()
    return jobs.without_speed(jobs.records(folder)), job.summary()["Gradients"]


@pytest.mark.parametrize("strategy", HOOKED)
def test_gradients_sent_in_fp16_train_as_those_sent_in_fp32(
    ranks4, alone, text, tmp_path, strategy
):
    flags = ("--data", text, *SMALL, *PRECISIONS["fp16"], "--strategy", strategy)
    flags = (*flags, "--comm-hook", "fp16", "--checkpoint-every", 3, "--keep-checkpoints", 9)
    rows, said = ranks4.run(_train_and_sum_up, tmp_path, flags)[0]
    # What travels is rounded to fp16, as autocast's own gradients are.
    _agree(rows, alone["fp16"], "fp16")
    assert "as fp16" in said
    assert "saved" in said
    middle = ("--resume", tmp_path / "checkpoints" / "step-00000003")
    assert ranks4.run(pooled.train, tmp_path, (*flags, *middle))[0] == rows


def test_a_hook_for_what_takes_none_is_refused(ranks4, text):
    flags = ("--data", text, *SMALL, "--comm-hook", "fp16")
    said = ranks4.run(pooled.refusal, *flags, "--strategy", "sharded_ddp")[0]
    assert said == (
        "--comm-hook fp16: it is for ddp, fsdp1, fsdp2, hsdp, zero1, and this is sharded_ddp"
    )
    assert "and this is none" in pooled.refusal(*flags)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_auto_says_what_it_chose(ranks4, text, tmp_path, strategy):
    flags = ("--data", text, *SMALL, "--strategy", strategy, "--comm-hook", "auto")
    rows, said = ranks4.run(_train_and_sum_up, tmp_path, flags)[0]
    assert rows
    assert said.startswith("auto chose ")
    assert "fp16 " in said


def test_replicas_may_send_with_error_feedback(ranks4, text, tmp_path):
    flags = ("--data", text, *SMALL, "--comm-hook", "int8")
    _, said = ranks4.run(_train_and_sum_up, tmp_path, (*flags, "--strategy", "ddp"))[0]
    assert "as int8" in said


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "hsdp"])
def test_shards_are_refused_what_needs_error_feedback(ranks4, text, tmp_path, strategy):
    flags = ("--data", text, *SMALL, "--comm-hook", "int8", "--strategy", strategy)
    refused = ranks4.run(pooled.refusal, *flags, "--run-dir", tmp_path / "run")
    said = (
        "--comm-hook int8: it needs error feedback, which sharded gradients have not; it is for"
        f" ddp and zero1, and this is {strategy}"
    )
    assert refused == [said] * 4
    assert not (tmp_path / "run").exists()

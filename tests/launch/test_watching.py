"""Traces, precision reports and backends: what is asked for comes, and changes no number."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.train import main
from tests.launch import jobs, pooled
from tests.launch.finished import SKIPPING, finish
from tests.launch.jobs import TIMEOUT_S
from tests.launch.test_checkpoint import _files_at_most
from tests.launch.test_strategies import SMALL

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


# -- traces ---------------------------------------------------------------------------------------


def _ranges(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return [e["name"] for e in events if e.get("cat") == "user_annotation"]


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp2"])
def test_a_trace_of_each_rank_names_what_a_step_does(ranks, text, tmp_path, strategy):
    flags = ("--data", text, *SMALL, "--steps", 8, "--profile", "--strategy", strategy)
    world = 1 if strategy == "none" else 2
    ended = (
        [finish(tmp_path, *flags)]
        if world == 1
        else ranks(2).run(finish, tmp_path, *flags, timeout=TIMEOUT_S)
    )
    assert ended[0]["summary"]["Trace"].startswith("profile/rank-*.json, ")
    paths = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in paths] == [f"rank-{rank}.json" for rank in range(world)]
    for path in paths:
        ranges = _ranges(path)
        for name in ("data", "forward", "backward", "step"):
            assert ranges.count(name) == 3, name
        steps = [name for name in ranges if name.startswith("ProfilerStep#")]
        assert steps == ["ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"]


def test_a_trace_changes_no_number(text, tmp_path):
    flags = ("--data", text, *SMALL, "--steps", 8)
    finish(tmp_path / "traced", *flags, "--profile")
    traced = jobs.without_speed(jobs.records(tmp_path / "traced"))
    assert traced == pooled.train(tmp_path / "plain", flags)


def test_a_run_too_short_for_a_trace_says_so(text, tmp_path):
    ended = finish(tmp_path, "--data", text, *SMALL, "--steps", 3, "--profile")
    assert ended["summary"]["Trace"] == "none: the run ended before the steps to trace"
    assert not (tmp_path / "profile").exists()


def _full_disk_for_rank_1(folder: Path, *flags: object) -> dict[str, Any]:
    full = _files_at_most(600_000) if dist.get_rank() == 1 else contextlib.nullcontext()
    with full:
        return finish(folder, *flags)


def test_a_trace_that_cannot_be_written_whole_is_a_warning_and_the_run_goes_on(
    ranks2, text, tmp_path
):
    flags = ("--data", text, *SMALL, "--steps", 8, "--profile")
    ended = ranks2.run(_full_disk_for_rank_1, tmp_path, *flags, timeout=TIMEOUT_S)
    shown = {each["summary"]["Trace"] for each in ended}
    assert shown == {"rank 1 cannot write rank-1.json (is the disk full?)"}
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-0.json"]
    assert ended[0]["manifest"]["progress"]["step"] == 8


# -- precision reports ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["none", "dp", "ddp", "fsdp1", "fsdp2"])
def test_a_report_says_what_computed_in_which_precision_and_changes_no_number(
    ranks, text, tmp_path, strategy
):
    flags = ("--data", text, *SMALL, *SKIPPING, "--strategy", strategy)

    def run(*more: object) -> dict[str, Any]:
        if strategy in ("none", "dp"):
            return finish(tmp_path, *flags, *more)
        ended: dict[str, Any] = ranks(2).run(finish, tmp_path, *flags, *more, timeout=TIMEOUT_S)[0]
        return ended

    run()
    rows = jobs.without_speed(jobs.records(tmp_path))
    ended = run("--report", "--resume", tmp_path / "checkpoints" / "step-00000003")
    assert ended["summary"]["Precisions"] == "precision.txt, .json, .png"
    assert jobs.without_speed(jobs.records(tmp_path)) == rows
    _check_report(tmp_path)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_report_is_of_the_first_step_alone(text, tmp_path, microbatches):
    flags = ("--data", text, *SMALL, *SKIPPING, "--accumulate", microbatches)
    finish(tmp_path, *flags, "--report", "--steps", 2)
    rows = _check_report(tmp_path)
    calls = sum(
        row["calls"]
        for row in rows
        if (row["module"], row["op"], row["phase"]) == ("blocks.0.qkv", "addmm", "forward")
    )
    assert calls == microbatches


def _check_report(folder: Path) -> list[dict[str, Any]]:
    """A product of the first block ran in fp16 and a norm in fp32, forward and backward."""
    shown = (folder / "precision.txt").read_text()
    assert shown.startswith("Precision report: ")
    rows: list[dict[str, Any]] = json.loads((folder / "precision.json").read_text())["rows"]
    phases = set()
    for row in rows:
        module = re.sub(r"_fsdp_wrapped_module\.|^module\.", "", row["module"])
        if module == "blocks.0.qkv" and row["op"] in ("mm", "addmm"):
            phases.add(row["phase"])
            assert row["outputs"] == ["float16"], row
    assert phases == {"forward", "backward"}
    assert (folder / "precision.png").read_bytes().startswith(b"\x89PNG")
    return rows


def test_without_the_flag_there_is_no_report(text, tmp_path):
    ended = finish(tmp_path, "--data", text, *SMALL)
    assert "Precisions" not in ended["summary"]
    assert not list(tmp_path.glob("precision.*"))


# -- backends -------------------------------------------------------------------------------------


NO_NCCL = "--backend nccl: it needs a CUDA device and a torch built with NCCL"


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL may be here")
def test_nccl_without_a_gpu_is_refused_on_every_rank(ranks2, text, tmp_path, capsys):
    run = ("--data", text, *SMALL, "--run-dir", tmp_path / "run", "--backend", "nccl")
    assert ranks2.run(pooled.refusal, *run) == [NO_NCCL] * 2
    assert main([*map(str, run)]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {NO_NCCL}\n")
    assert not (tmp_path / "run").exists()


def _command(port: int, *args: object) -> tuple[int, str]:
    """The whole command on this rank, as torchrun starts it; its code and what it printed."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    shown, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(wrong):
        code = main([*map(str, args)])
    return code, wrong.getvalue()


@pytest.mark.parametrize(
    ("flags", "code", "shown"),
    [
        (("--backend", "gloo"), 0, ""),
        (("--backend", "nccl"), 2, f"error: {NO_NCCL}\n"),
        (("--backend", "mpi"), 2, "error: invalid choice 'mpi' for argument '--backend'"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL may be here")
def test_two_ranks_take_gloo_and_say_once_what_they_do_not_take(
    new_ranks, text, tmp_path, flags, code, shown
):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = ("--data", text, *SMALL, "--run-dir", tmp_path, *flags)
    ended = new_ranks(2).run(_command, store.port, *run, group="none", timeout=TIMEOUT_S)
    assert [each for each, _ in ended] == [code] * 2
    assert ended[0][1].startswith(shown)
    assert ended[0][1].count("\n") == (code > 0)
    assert ended[1][1] == ""
    assert bool(jobs.records(tmp_path)) == (code == 0)

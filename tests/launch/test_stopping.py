"""A run that is asked to stop, by a signal to any rank, and one that loses a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launch.command_line import read
from launch.lost_rank import RankRegistry
from launch.stopping import Preempted, Stop
from launch.train import main
from launch.train import train as train_job
from tests.launch import chaos, jobs, pooled
from tests.launch.test_strategies import SMALL

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


class SignalAt:
    """A reporter's method that sends this process a signal once a step is done."""

    def __init__(self, job: Any, step: int, number: signal.Signals) -> None:
        self.inner, self.step, self.number = job.report.step, step, number

    def __call__(self, record: dict[str, Any], tokens: int) -> None:
        self.inner(record, tokens)
        if record["step"] == self.step:
            os.kill(os.getpid(), self.number)


def _train_and_stop(
    folder: Path, data: Path, strategy: str, who: int, number: signal.Signals
) -> tuple[int, int]:
    """Train until a rank gets a signal during step 2; return the code and the last step."""
    with Stop().listening() as stop:
        job = pooled.job(
            "--data", data, *SMALL, "--strategy", strategy, "--run-dir", folder, stop=stop
        )
        if job.ranks.rank == who:
            job.report.step = SignalAt(job, 2, number)  # type: ignore[method-assign]
        try:
            with job.report:
                train_job(job)
        except Preempted as preempted:
            return preempted.code, job.run.progress.step
        finally:
            if dist.is_initialized():
                pooled._keep_groups()
    return 0, job.run.progress.step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_loses_nothing(
    ranks2, text, tmp_path, strategy, who
):
    # The signal comes after step 2 has been agreed on, so that the next step is the last.
    shown = ranks2.run(_train_and_stop, tmp_path, text, strategy, who, signal.SIGTERM)
    assert shown == [(143, 3), (143, 3)]

    flags = ("--data", text, *SMALL, "--strategy", strategy)
    resumed = ranks2.run(pooled.train, tmp_path, (*flags, "--resume", tmp_path))[0]
    straight = ranks2.run(pooled.train, tmp_path / "straight", flags)[0]
    assert resumed == straight


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_one_process_finishes_its_step_and_exits_as_a_shell_expects(text, tmp_path, number, code):
    assert _train_and_stop(tmp_path, text, "none", 0, number) == (code, 3)


def test_the_command_returns_that_code_says_where_to_go_on_and_does(
    text, tmp_path, monkeypatch, capsys
):
    run = ["--data", str(text), *map(str, SMALL), "--run-dir", str(tmp_path)]
    before = signal.getsignal(signal.SIGTERM)
    original = Stop.listening

    def asked_already(self: Stop) -> Any:
        self._ask(signal.SIGTERM, None)  # as if the signal had come while the job was made ready
        return original(self)

    with monkeypatch.context() as patched:
        patched.setattr(Stop, "listening", asked_already)
        assert main(run) == 143
    assert f"Stopped as asked after step 1; go on with --resume {tmp_path}" in (
        capsys.readouterr().out
    )
    assert signal.getsignal(signal.SIGTERM) is before
    assert main([*run, "--resume", str(tmp_path)]) == 0
    assert jobs.records(tmp_path)[-1]["step"] == 6


def test_a_second_ctrl_c_does_not_wait():
    stop = Stop()
    stop._ask(signal.SIGINT, None)
    stop._ask(signal.SIGINT, None)  # torchrun passes on what the terminal has sent already
    stop._since -= 60
    with pytest.raises(KeyboardInterrupt):
        stop._ask(signal.SIGINT, None)


# -- a rank is gone -------------------------------------------------------------------------------


def _lose_rank_1(port: int) -> str:
    """Kill rank 1 in the middle of a run of collectives; say what the others make of it."""
    ranks = pooled.here()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    registry = RankRegistry(store, ranks.rank, ranks.world_size)
    registry.register()
    dist.barrier()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(100):
            ranks.sum(1.0)
    except RuntimeError as error:
        return str(registry.explain(error))
    return "went on"


def test_ranks_say_which_of_them_is_gone(new_ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shown = new_ranks(3).run(_lose_rank_1, store.port, may_die=[1])
    assert [shown[0], shown[2]] == ["rank 1 was killed or crashed"] * 2


def test_an_error_that_is_not_about_ranks_is_left_alone():
    store = dist.HashStore()
    assert RankRegistry(store, 0, 2).explain(RuntimeError("mat1 and mat2 shapes differ")) is None


def test_a_killed_rank_is_named_and_torchrun_goes_on_by_itself(text, tmp_path):
    flags = ("--data", text, *jobs.TINY, "--steps", 40, "--checkpoint-every", 5)
    folder = tmp_path / "run"
    with (tmp_path / "log").open("wb") as log:
        started = jobs.start(2, *flags, "--run-dir", folder, max_restarts=3, output=log)
        jobs.wait_for_step(folder, 12)
        os.kill(started.workers()[-1], signal.SIGKILL)
        assert started.process.wait(jobs.TIMEOUT_S) == 0, (tmp_path / "log").read_text()
    shown = (tmp_path / "log").read_text()
    lines = [line for line in shown.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, shown
    assert "rank 1 was killed or crashed in step " in lines[0]
    assert f"go on with --resume {folder}" in lines[0]
    assert f"Going on from {folder} at step " in shown
    assert [r["step"] for r in jobs.records(folder) if "loss" in r] == list(range(1, 41))


def test_a_run_troubled_by_chance_writes_the_losses_of_one_left_in_peace(tmp_path):
    run, agree = chaos.compare(tmp_path, kills=3, seed=5, ranks=2, seconds=1200)
    assert agree
    assert sum(run.done.values()) == 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thirty_troubles_change_no_loss(tmp_path):
    run, agree = chaos.compare(tmp_path, kills=30, seed=0, ranks=2, seconds=7000)
    assert agree
    assert sum(run.done.values()) == 30


def test_a_flag_that_cannot_be_read_is_kept_until_the_ranks_can_say_it_together():
    error = read(["--steps", "many"])
    assert "invalid literal" in str(error)


# -- nobody is there to read ----------------------------------------------------------------------


def test_a_run_whose_output_is_closed_trains_to_its_end(text, tmp_path):
    command = [sys.executable, str(jobs.SCRIPT), "--data", text, *SMALL, "--run-dir", tmp_path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*map(str, command)], text=True, **pipes) as process:
        process.stdout.close()  # as of "| head"
        _, err = process.communicate(timeout=jobs.TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    assert jobs.records(tmp_path)[-1]["step"] == 6


def test_a_second_ctrl_c_ends_the_command_without_a_traceback(text, tmp_path, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.train.run", interrupted)
    assert main(["--data", str(text), *map(str, SMALL), "--run-dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err == ""


def test_a_terminal_that_is_closed_asks_to_stop():
    stop = Stop()
    # The tests themselves may run under nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.asked
    assert stop.preempted.code == 129


def test_under_nohup_it_does_not():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = Stop()
    try:
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not stop.asked

"""Jobs of the launcher end: by SIGKILL, by SIGTERM, and by a flag that torchrun passes on."""

import contextlib
import io
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from launch.train import main
from tests.launch import jobs
from tests.launch.jobs import FP16, TINY
from tests.ranks import RankError, RankPool

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(600)]

RUN = (*TINY, *FP16, "--dropout", 0.1, "--steps", 15, "--save-every", 3)
RESTARTED_RUN = (*TINY, "--steps", 2, "--keep-checkpoints", 0)


def call_main(*args: object) -> int:
    """Call the launcher with these flags, and return its exit code."""
    return main([str(arg) for arg in args])


def train_and_kill(pool: RankPool, run: Path, args: Sequence[object], num_records: int) -> None:
    """Continue a run, and kill all ranks with SIGKILL soon after it has this many records."""
    delay = random.uniform(0, 0.02)

    def kill() -> None:
        while len(jobs.records(run)) < num_records:
            time.sleep(0.005)
        time.sleep(delay)
        pool.kill()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RankError, match="exit code -9"):
        pool.run(jobs.train, run, args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kill_at_records"),
    [
        # The first kill comes before the first checkpoint.
        pytest.param("--comm-hook int8", (1, 9), id="ddp, int8"),
        pytest.param("--comm-hook int8", (9,), id="ddp, int8, after a checkpoint"),
        pytest.param("--shard -1 --async-save", (9,), id="fsdp2"),
    ],
)
def test_run_killed_anywhere_has_the_losses_of_one_that_was_not(
    ranks2, new_ranks, text, tmp_path, layout, kill_at_records
):
    args = ("--data", text, *RUN, *layout.split(), "--auto-resume")
    uninterrupted = ranks2.run(jobs.train, tmp_path / "uninterrupted", args)[0]
    run = tmp_path / "run"
    pool = new_ranks(2)
    for num_records in kill_at_records:
        train_and_kill(pool, run, args, num_records)
        assert num_records <= len(jobs.records(run)) < len(uninterrupted)
    # Ranks that run already save the start of two processes in place of the killed ones.
    assert ranks2.run(jobs.train, run, args)[0] == uninterrupted


def train_until_sigterm(run: Path, args: Sequence[object]) -> int:
    """Train on this rank, send SIGTERM to rank 1 after five steps, and return the exit code."""

    def send_sigterm() -> None:
        jobs.until(run, 5)
        os.kill(os.getpid(), signal.SIGTERM)

    if dist.get_rank() == 1:
        threading.Thread(target=send_sigterm, daemon=True).start()
    with jobs.pool_rank():
        return call_main(*args, "--run-dir", run)


@pytest.mark.slow
def test_run_that_one_rank_is_asked_to_end_saves_and_exits_with_0(new_ranks, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 100_000, "--async-save", "--save-every", 3)
    assert new_ranks(2).run(train_until_sigterm, tmp_path, args) == [0, 0]
    last = jobs.records(tmp_path)[-1]["step"]
    assert last < 100_000
    assert (tmp_path / "checkpoints" / f"step-{last:08d}" / ".metadata").exists()


def start_grandchild(run: Path, args: Sequence[object]) -> tuple[int, int]:
    """Train in a child of a child, and return the process of the child and a pipe.

    The child stands for torchrun. The pipe contains the process of the rank, and it closes when
    the rank ends.
    """
    reader, writer = os.pipe()
    torchrun = os.fork()
    if torchrun != 0:
        os.close(writer)
        return torchrun, reader
    if os.fork() == 0:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
        os.write(writer, str(os.getpid()).encode())
        with jobs.pool_rank():
            call_main(*args, "--run-dir", run)
        os._exit(0)
    time.sleep(jobs.TIMEOUT_S)
    os._exit(1)


def outlives_torchrun(run: Path, args: Sequence[object]) -> bool:
    """Kill the parent of a rank that trains, and return whether the rank goes on."""
    torchrun, reader = start_grandchild(run, args)
    rank = int(os.read(reader, 32))
    jobs.until(run, 3)
    os.kill(torchrun, signal.SIGKILL)
    os.waitpid(torchrun, 0)
    ended, _, _ = select.select([reader], [], [], 20.0)
    if not ended:
        os.kill(rank, signal.SIGKILL)
    return not ended


def test_ranks_end_with_a_torchrun_that_was_killed(new_ranks, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 100_000)
    assert new_ranks(1).run(outlives_torchrun, tmp_path, args, group="none") == [False]


@pytest.fixture
def restarted(monkeypatch) -> Iterator[None]:
    """Let this process be the first rank of a torchrun that has restarted its ranks once."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield
    del store


@pytest.fixture(scope="module")
def other_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Rows]:
    """The folder and the records of a run that another torchrun started."""
    folder = tmp_path_factory.mktemp("other")
    return folder, jobs.train(folder, ("--data", text, *RESTARTED_RUN))


def test_restart_goes_on_with_its_own_run_and_leaves_others_alone(
    other_run, restarted, text, tmp_path
):
    other, rows = other_run
    args = ("--data", text, *RESTARTED_RUN)
    assert "the folder has a run" in jobs.refusal(*args, "--run-dir", other)
    jobs.train(tmp_path, args)
    # The restarted torchrun has a run now, and still must not touch the run of another torchrun.
    assert "the folder has a run" in jobs.refusal(*args, "--run-dir", other)
    assert jobs.records(other) == rows
    # The run has no checkpoint yet, and starts again.
    saved = jobs.train(tmp_path, (*args, "--keep-checkpoints", 1))
    assert saved == rows
    # Now it has a checkpoint and continues from there.
    continued = jobs.train(tmp_path, (*args, "--steps", 3))
    assert continued[: len(saved)] == saved
    assert continued[-1]["step"] == 3


def call_main_with_a_bad_flag(folder: Path) -> tuple[int, str]:
    """Return the exit code of this rank and the text that it printed to stderr.

    Rank 1 would wait for the SIGTERM of a torchrun, so its handler and its wait are left out.
    """
    printed = io.StringIO()
    local_rank = {"LOCAL_RANK": str(dist.get_rank())}
    with (
        jobs.pool_rank(),
        mock.patch.dict(os.environ, local_rank),
        mock.patch("launch.program.signal.signal"),
        mock.patch("launch.program.time.sleep"),
        contextlib.redirect_stderr(printed),
    ):
        code = call_main("--lr", "x", "--run-dir", folder)
    return code, printed.getvalue()


def test_bad_flag_is_one_sentence_and_every_rank_exits_with_2(ranks2, tmp_path):
    results = ranks2.run(call_main_with_a_bad_flag, tmp_path / "run")
    (first_code, first_message), (second_code, second_message) = results
    assert first_message.startswith("error: --lr x: this is not a number.")
    assert first_message.count("error: ") == 1
    assert second_message == ""
    assert (first_code, second_code) == (2, 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_bad_flag_is_one_sentence_under_torchrun(tmp_path):
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    command = [*torchrun.split(), str(jobs.ROOT / "launch" / "train.py"), "--lr", "x"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)}
    for name, value in os.environ.items():
        if not name.endswith(("RANK", "WORLD_SIZE")):
            environment.setdefault(name, value)
    job = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert job.stderr.count("error: ") == 1
    assert "error: --lr x: this is not a number." in job.stderr
    # Ranks that wait for the signal of torchrun exit with 2 too.
    assert set(re.findall(r"exitcode +: (\d+)", job.stderr)) == {"2"}
    assert not (tmp_path / "runs").exists()

"""The launcher as a job: killed, asked to end, and given a bad flag under torchrun."""

import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from launch.train import main
from tests.launch import jobs
from tests.launch.jobs import FP16, TINY
from tests.ranks import RankError, RankPool

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(600)]

RUN = (*TINY, *FP16, "--dropout", 0.1, "--steps", 15, "--save-every", 3)


def killed_after(
    pool: RankPool, run: Path, args: Sequence[object], done: Collection[int], seconds: float
) -> None:
    """Go on with a run; kill all ranks with SIGKILL when its records are no more in ``done``."""

    def kill() -> None:
        while len(jobs.records(run)) in done:
            time.sleep(0.005)
        time.sleep(seconds)
        pool.kill()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RankError, match="exit code -9"):
        pool.run(jobs.train, run, args)


# The first time there is no checkpoint yet.
@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("--comm-hook int8", (1, 9)),
        pytest.param("--shard -1 --async-save", (9,), marks=pytest.mark.slow),
    ],
)
def test_run_killed_anywhere_has_the_losses_of_one_that_was_not(
    ranks2, new_ranks, text, tmp_path, layout, counts
):
    args = ("--data", text, *RUN, *layout.split(), "--auto-resume")
    whole = ranks2.run(jobs.train, tmp_path / "whole", args)[0]
    run, pool = tmp_path / "run", new_ranks(2)
    for count in counts:
        killed_after(pool, run, args, range(count), random.uniform(0, 0.02))
        assert count <= len(jobs.records(run)) < len(whole)
    assert pool.run(jobs.train, run, args)[0] == whole


def check_stop(run: Path, args: Sequence[object]) -> int:
    """Train on this rank; the last one is sent SIGTERM after five steps."""

    def ask() -> None:
        jobs.until(run, 5)
        os.kill(os.getpid(), signal.SIGTERM)

    if dist.get_rank() == 1:
        threading.Thread(target=ask, daemon=True).start()
    with jobs.pool_rank():
        return main([*map(str, args), "--run-dir", str(run)])


def test_run_that_one_rank_is_asked_to_end_saves_and_exits_with_0(new_ranks, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 100_000, "--async-save", "--save-every", 3)
    assert new_ranks(2).run(check_stop, tmp_path, args) == [0, 0]
    last = jobs.records(tmp_path)[-1]["step"]
    assert last < 100_000
    assert (tmp_path / "checkpoints" / f"step-{last:08d}" / ".metadata").exists()


def outlives_torchrun(run: Path, args: Sequence[object]) -> bool:
    """Train in a grandchild, whose parent is killed as a torchrun would be."""
    here, there = os.pipe()
    if (torchrun := os.fork()) == 0:
        if os.fork() == 0:
            os.environ["TORCHELASTIC_RUN_ID"] = "none"
            os.write(there, str(os.getpid()).encode())
            with jobs.pool_rank():
                main([*map(str, args), "--run-dir", str(run)])
            os._exit(0)
        time.sleep(jobs.TIMEOUT_S)
    os.close(there)
    rank = int(os.read(here, 32))
    jobs.until(run, 3)
    os.kill(torchrun, signal.SIGKILL)
    os.waitpid(torchrun, 0)
    ended, _, _ = select.select([here], [], [], 20.0)  # the other end closes with its process
    if not ended:
        os.kill(rank, signal.SIGKILL)
    return not ended


def test_ranks_end_with_a_torchrun_that_was_killed(new_ranks, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 100_000)
    assert new_ranks(1).run(outlives_torchrun, tmp_path, args, group="none") == [False]


def test_restart_goes_on_with_its_own_run_and_leaves_others_alone(text, tmp_path, monkeypatch):
    args = ("--data", text, *TINY, "--steps", 2, "--keep-checkpoints", 0)
    rows = jobs.train(tmp_path / "other", args)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
        ("TORCHELASTIC_RUN_ID", "none"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(store.port)),
    ):
        monkeypatch.setenv(name, value)
    assert "the folder has a run" in jobs.refusal(*args, "--run-dir", tmp_path / "other")
    jobs.train(tmp_path / "own", args)
    assert "the folder has a run" in jobs.refusal(*args, "--run-dir", tmp_path / "other")
    assert jobs.records(tmp_path / "other") == rows
    # Without a checkpoint it starts again, with one it goes on.
    saved = jobs.train(tmp_path / "own", (*args, "--keep-checkpoints", 1))
    again = jobs.train(tmp_path / "own", (*args, "--steps", 3))
    assert again[: len(saved)] == saved == rows
    assert again[-1]["step"] == 3


def test_bad_flag_is_one_sentence_and_every_rank_exits_with_2(tmp_path):
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    command = [*torchrun.split(), str(jobs.ROOT / "launch" / "train.py"), "--lr", "x"]
    environment = {k: v for k, v in os.environ.items() if not k.endswith(("RANK", "WORLD_SIZE"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)}
    job = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert job.stderr.count("error: ") == 1
    assert "error: --lr x: this is not a number." in job.stderr
    # torchrun stops a rank that has not ended when another has.
    assert set(re.findall(r"exitcode +: (\d+)", job.stderr)) == {"2"}
    assert not (tmp_path / "runs").exists()

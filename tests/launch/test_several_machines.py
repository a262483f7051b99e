"""The launcher on two hosts with networks of their own: by torchrun as documented, and by Slurm."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.folder import list_checkpoints
from tests import netns
from tests.launch import jobs
from tests.launch.jobs import ROOT, TINY, until

# Each test starts up to sixteen processes that import torch.
pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("launch"), pytest.mark.timeout(1200)]

RUN = (
    *(*TINY, "--steps", 12, "--save-every", 5, "--precision", "fp16", "--init-scale", 2.0**24),
    *("--dropout", 0.1),
)
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    # Else a host that joins later waits for an address that is written once, before round one.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@pytest.fixture
def hosts() -> Iterator[netns.Hosts]:
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.Hosts(2, rate="1gbit") as two:
        yield two


@pytest.fixture
def one_host(ranks4, text: Path, tmp_path: Path) -> jobs.Rows:
    """The records of four ranks on one host."""
    rows: jobs.Rows = ranks4.run(jobs.train, tmp_path / "one", ("--data", text, *RUN))[0]
    assert any(not row.get("taken", True) for row in rows)
    return rows


def documented() -> list[str]:
    """The command of the page on several machines, without its --run-dir."""
    page = (ROOT / "docs" / "howto" / "several_machines.md").read_text()
    command = "torchrun --nnodes 2" + page.partition("    torchrun --nnodes 2")[2]
    words = shlex.split(command.partition("\n\n")[0].replace("\\\n", " "))
    assert words[-2] == "--run-dir"
    return [str(ROOT / word) if word == "launch/train.py" else word for word in words[:-2]]


def test_two_hosts_write_the_records_of_one(hosts, one_host, text, tmp_path):
    before = [host.sent() for host in hosts]
    flags = ["--data", text, "--run-dir", tmp_path / "run", *RUN]
    there = ["env", f"--chdir={tmp_path}", *documented(), *map(str, flags)]
    started = [host.popen(there, env=ENVIRONMENT) for host in hosts]
    assert [process.wait(timeout=500) for process in started] == [0, 0]
    assert jobs.records(tmp_path / "run") == one_host
    assert all(host.sent() - then > 1e5 for host, then in zip(hosts, before, strict=True))


# srun starts a command on every node, and passes SIGTERM on to every process of it.
SRUN = """#!{python}
import json, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
entries = json.loads({entries!r})
started = [subprocess.Popen([*entry, *command]) for entry in entries]
def pass_on(number, frame):
    for entry in entries:
        subprocess.run([*entry, "sh", "-c", "kill -TERM $(pgrep -f launch/train.py)"])
signal.signal(signal.SIGTERM, pass_on)
sys.exit(max(abs(process.wait()) for process in started))
"""
SCONTROL = """#!/bin/sh
case "$1" in
    show) [ "$3" = "host[0-1]" ] && printf '{names}\\n' ;;
    *) echo "$@" >> {log} ;;
esac
"""


def test_slurm_puts_a_job_whose_time_is_over_back_and_it_goes_on(hosts, one_host, text, tmp_path):
    programs, repository, log = tmp_path / "bin", tmp_path / "repository", tmp_path / "scontrol"
    programs.mkdir()
    repository.mkdir()
    for name in ("launch", "distamp"):
        (repository / name).symlink_to(ROOT / name)
    entries = json.dumps([[*host.enter(["env", f"--chdir={repository}"])] for host in hosts])
    names = "\\n".join(host.name for host in hosts)
    (programs / "srun").write_text(SRUN.format(python=sys.executable, entries=entries))
    (programs / "scontrol").write_text(SCONTROL.format(names=names, log=log))
    for program in programs.iterdir():
        program.chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(repository),
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "PROCESSES": "2",
        "PATH": f"{programs}:{ENVIRONMENT['PATH']}",
    }
    script = ["bash", str(ROOT / "launch" / "slurm.sh"), "--data", str(text), *map(str, RUN)]
    first = subprocess.Popen(script, env={**ENVIRONMENT, **slurm})
    until(repository / "runs" / "4321", 3)
    first.send_signal(signal.SIGUSR1)
    first.wait(timeout=300)
    assert log.read_text() == "requeue 4321\n"
    assert subprocess.run(script, env={**ENVIRONMENT, **slurm}, timeout=500).returncode == 0
    assert log.read_text() == "requeue 4321\n"
    assert jobs.records(repository / "runs" / "4321") == one_host


def test_the_others_go_on_without_a_host_that_is_lost_and_with_it_again(hosts, text, tmp_path):
    def until_world(ranks: int) -> None:
        """Wait for a checkpoint that so many ranks have written."""
        end, world = time.monotonic() + jobs.TIMEOUT_S, 0
        while world != ranks:
            assert time.monotonic() < end, f"{world} ranks, not {ranks}"
            time.sleep(0.2)
            for path in list_checkpoints(run)[:1]:
                world = len({file.name.split("_")[2] for file in path.glob("*.distcp")})

    run = tmp_path / "run"
    args = ("--data", text, *TINY, "--steps", 100_000, "--save-every", 20, "--timeout", "20s")
    command = (
        "torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 5 --rdzv-backend c10d "
        "--rdzv-id lost --rdzv-endpoint host0:29602 "
        f"--rdzv-conf join_timeout=300,last_call_timeout=3 {ROOT / 'launch' / 'train.py'}"
    )
    words = [*command.split(), *map(str, args), "--eval-every", "100000", "--run-dir", str(run)]
    started = [host.popen(words, env=ENVIRONMENT) for host in hosts]
    try:
        until_world(4)
        hosts.cut(1)
        until_world(2)
        hosts.switch_off(1)
        started[1].wait(timeout=60)
        hosts.join(1)
        started.append(hosts[1].popen(words, env=ENVIRONMENT))
        until_world(4)
        steps = [row["step"] for row in jobs.records(run) if "loss" in row]
        assert steps == list(range(1, len(steps) + 1))
    finally:
        for index, _ in enumerate(hosts):
            hosts.switch_off(index)
        for each in started:
            each.wait(timeout=60)

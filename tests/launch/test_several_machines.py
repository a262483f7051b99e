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

FLAGS = "--steps 12 --save-every 5 --precision fp16 --init-scale 16777216 --dropout 0.1"
RUN = (*TINY, *FLAGS.split())


def make_environment() -> dict[str, str]:
    """Return the environment of a host, with the programs of this Python in its path."""
    environment = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    programs = Path(sys.executable).parent
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    environment["OMP_NUM_THREADS"] = "1"
    # Otherwise a host that joins later waits for an address that is written only before round one.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return environment


ENVIRONMENT = make_environment()


@pytest.fixture
def hosts() -> Iterator[netns.Hosts]:
    """Two hosts with a network between them."""
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.Hosts(2, rate="1gbit") as hosts:
        yield hosts


@pytest.fixture
def one_host(ranks4, text: Path, tmp_path: Path) -> jobs.Rows:
    """The records of four ranks on one host."""
    rows: jobs.Rows = ranks4.run(jobs.train, tmp_path / "one", ("--data", text, *RUN))[0]
    assert any(not row.get("taken", True) for row in rows)
    return rows


def read_documented_command() -> list[str]:
    """Return the command of the page on several machines, without its --run-dir."""
    page = (ROOT / "docs" / "howto" / "several_machines.md").read_text()
    start = "torchrun --nnodes 2"
    _, _, text = page.partition(f"    {start}")
    arguments, _, _ = text.partition("\n\n")
    words = shlex.split(start + arguments.replace("\\\n", " "))
    assert words[-2] == "--run-dir"
    command = words[:-2]
    script = command.index("launch/train.py")
    command[script] = str(ROOT / "launch/train.py")
    return command


def test_two_hosts_write_the_records_of_one(hosts, one_host, text, tmp_path):
    run = tmp_path / "run"
    sent_before = [host.sent() for host in hosts]
    flags = [str(flag) for flag in ("--data", text, "--run-dir", run, *RUN)]
    command = ["env", f"--chdir={tmp_path}", *read_documented_command(), *flags]
    processes = [host.popen(command, env=ENVIRONMENT) for host in hosts]
    exit_codes = [process.wait(timeout=500) for process in processes]
    assert exit_codes == [0, 0]
    assert jobs.records(run) == one_host
    for host, bytes_before in zip(hosts, sent_before, strict=True):
        assert host.sent() - bytes_before > 1e5


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


def write_slurm_programs(folder: Path, hosts: netns.Hosts, repository: Path, log: Path) -> None:
    """Write the programs srun and scontrol, which start processes on the hosts and keep a log."""
    folder.mkdir()
    entries = [list(host.enter(["env", f"--chdir={repository}"])) for host in hosts]
    names = "\\n".join(host.name for host in hosts)
    srun = folder / "srun"
    scontrol = folder / "scontrol"
    srun.write_text(SRUN.format(python=sys.executable, entries=json.dumps(entries)))
    scontrol.write_text(SCONTROL.format(names=names, log=log))
    srun.chmod(0o755)
    scontrol.chmod(0o755)


def test_slurm_puts_a_job_whose_time_is_over_back_and_it_goes_on(hosts, one_host, text, tmp_path):
    programs = tmp_path / "bin"
    repository = tmp_path / "repository"
    log = tmp_path / "scontrol"
    repository.mkdir()
    for name in ("launch", "distamp"):
        (repository / name).symlink_to(ROOT / name)
    write_slurm_programs(programs, hosts, repository, log)
    slurm = {
        "SLURM_SUBMIT_DIR": str(repository),
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "PROCESSES": "2",
        "PATH": f"{programs}:{ENVIRONMENT['PATH']}",
    }
    environment = {**ENVIRONMENT, **slurm}
    flags = [str(flag) for flag in ("--data", text, *RUN)]
    script = ["bash", str(ROOT / "launch" / "slurm.sh"), *flags]
    run = repository / "runs" / "4321"
    first_job = subprocess.Popen(script, env=environment)
    until(run, 3)
    first_job.send_signal(signal.SIGUSR1)
    first_job.wait(timeout=300)
    assert log.read_text() == "requeue 4321\n"
    second_job = subprocess.run(script, env=environment, timeout=500)
    assert second_job.returncode == 0
    assert log.read_text() == "requeue 4321\n"
    assert jobs.records(run) == one_host


def count_writers(run: Path) -> int:
    """Return the number of ranks that wrote the last checkpoint of a run."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        return 0
    ranks = {file.name.split("_")[2] for file in checkpoints[0].glob("*.distcp")}
    return len(ranks)


def wait_for_writers(run: Path, num_ranks: int) -> None:
    """Wait for a checkpoint that this number of ranks has written."""
    end = time.monotonic() + jobs.TIMEOUT_S
    num_writers = 0
    while num_writers != num_ranks:
        assert time.monotonic() < end, f"{num_writers} ranks, not {num_ranks}"
        time.sleep(0.2)
        num_writers = count_writers(run)


ELASTIC_TORCHRUN = """
torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 5 --rdzv-backend c10d --rdzv-id lost
--rdzv-endpoint host0:29602 --rdzv-conf join_timeout=300,last_call_timeout=3
"""


def test_the_others_go_on_without_a_host_that_is_lost_and_with_it_again(hosts, text, tmp_path):
    run = tmp_path / "run"
    intervals = "--steps 100000 --save-every 20 --timeout 20s --eval-every 100000"
    script = str(ROOT / "launch" / "train.py")
    flags = [str(flag) for flag in ("--data", text, *TINY, "--run-dir", run)]
    command = [*ELASTIC_TORCHRUN.split(), script, *flags, *intervals.split()]
    processes = [host.popen(command, env=ENVIRONMENT) for host in hosts]
    try:
        wait_for_writers(run, 4)
        hosts.cut(1)
        wait_for_writers(run, 2)
        hosts.switch_off(1)
        processes[1].wait(timeout=60)
        hosts.join(1)
        processes.append(hosts[1].popen(command, env=ENVIRONMENT))
        wait_for_writers(run, 4)
        steps = [row["step"] for row in jobs.training_records(jobs.records(run))]
        assert steps == list(range(1, len(steps) + 1))
    finally:
        for index, _ in enumerate(hosts):
            hosts.switch_off(index)
        for process in processes:
            process.wait(timeout=60)

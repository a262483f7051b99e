"""The launcher on two hosts with networks of their own: by torchrun as documented, and by Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import netns
from tests.launch import jobs
from tests.launch.jobs import ROOT, TINY

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("launch")]
# Each test starts up to sixteen processes that import torch.
pytestmark = [*pytestmark, pytest.mark.timeout(1200)]

RUN = (*TINY, "--steps", "12", "--evaluate-every", "6", "--checkpoint-every", "5")
RUN = (*RUN, "--precision", "fp16", "--init-scale", "1e6", "--dropout", "0.1")
# Without what torchrun of this test itself may have set, and with the programs of this Python.
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[netns.Hosts]:
    if reason := netns.missing():
        pytest.skip(reason)
    with netns.Hosts(2, rate="1gbit") as two:
        yield two


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def one_host(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The losses of four ranks on one host."""
    folder = tmp_path_factory.mktemp("one_host")
    done = jobs.run(4, "--data", text, "--run-dir", folder, *RUN)
    assert done.returncode == 0, done.stderr
    return jobs.without_speed(jobs.records(folder))


def documented() -> list[str]:
    """The command of the page on several machines, without its --run-dir."""
    page = (ROOT / "docs" / "several_machines.md").read_text()
    _, _, rest = page.partition("    torchrun --nnodes 2")
    command, _, _ = ("torchrun --nnodes 2" + rest).partition("\n\n")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[-2] == "--run-dir"
    return [str(ROOT / word) if word == "launch/train.py" else word for word in words[:-2]]


def on_both(
    hosts: netns.Hosts, folders: list[Path], *flags: object
) -> list[subprocess.CompletedProcess[str]]:
    """Run the documented command on both hosts, each started in a folder of its own."""
    command = [*documented(), *map(str, flags)]
    started = [
        host.popen(
            command,
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host, folder in zip(hosts, folders, strict=True)
    ]
    said = [process.communicate(timeout=500) for process in started]
    return [
        subprocess.CompletedProcess(command, process.returncode, *each)
        for process, each in zip(started, said, strict=True)
    ]


def test_two_hosts_write_the_losses_of_one(hosts, one_host, text, tmp_path):
    sent = hosts.sent()

    both = on_both(hosts, [tmp_path, tmp_path], "--data", text, "--run-dir", tmp_path / "run", *RUN)

    assert [done.returncode for done in both] == [0, 0], both[0].stderr + both[1].stderr
    assert jobs.without_speed(jobs.records(tmp_path / "run")) == one_host
    assert one_host[-1]["step"] == 12
    assert any(not row.get("stepped", True) for row in one_host), "fp16 never overflowed"
    # The gradients did travel between the hosts.
    steps, parameters = 12, 8000
    for before, after in zip(sent, hosts.sent(), strict=True):
        assert (after - before).payload > steps * parameters * 4


def test_two_hosts_go_on_where_one_host_was_stopped(hosts, one_host, text, tmp_path):
    run = ("--data", text, "--run-dir", tmp_path / "run", *RUN)
    started = jobs.start(4, *run)
    jobs.wait_for_step(tmp_path / "run", 6, seconds=300)
    started.kill(everything=True)

    both = on_both(hosts, [tmp_path, tmp_path], *run, "--resume", tmp_path / "run")

    assert [done.returncode for done in both] == [0, 0], both[0].stderr + both[1].stderr
    assert jobs.without_speed(jobs.records(tmp_path / "run")) == one_host


def test_a_folder_that_is_not_shared_is_refused_on_both(hosts, text, tmp_path):
    folders = [tmp_path / "zero", tmp_path / "one"]
    for folder in folders:
        folder.mkdir()

    both = on_both(hosts, folders, "--data", text, "--run-dir", "run", *RUN)

    assert all(done.returncode != 0 for done in both)
    said = both[0].stderr + both[1].stderr
    assert said.count("checkpoints need a folder that all machines share") == 1, said


# srun starts a command on every node of the job, with the environment of the job's script.
SRUN = """#!{python}
import json, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
entries = json.loads({entries!r})
started = [subprocess.Popen([*entry, *command]) for entry in entries]
sys.exit(max(process.wait() for process in started))
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_slurm_script_trains_on_all_nodes_and_goes_on_when_requeued(
    hosts, one_host, text, tmp_path
):
    programs, repository = tmp_path / "bin", tmp_path / "repository"
    programs.mkdir()
    repository.mkdir()
    (repository / "launch").symlink_to(ROOT / "launch")
    (repository / "distamp").symlink_to(ROOT / "distamp")
    entries = json.dumps([[*host.enter(["env", f"--chdir={repository}"])] for host in hosts])
    write_program(programs / "srun", SRUN.format(python=sys.executable, entries=entries))
    names = "\\n".join(host.name for host in hosts)
    write_program(programs / "scontrol", f'#!/bin/sh\n[ "$3" = "host[0-1]" ] && echo "{names}"\n')
    job = {
        **ENVIRONMENT,
        "PATH": f"{programs}:{ENVIRONMENT['PATH']}",
        "PROCESSES": "2",
        "SLURM_SUBMIT_DIR": str(repository),
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    script = ["bash", str(ROOT / "launch" / "slurm.sh"), "--data", str(text), *map(str, RUN)]

    first = subprocess.Popen(script, env=job, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    jobs.wait_for_step(repository / "runs" / "4321", 6, seconds=300)
    for host in hosts:
        for process in host.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    first.wait(timeout=120)
    assert first.returncode != 0
    again = subprocess.run(
        script, env=job, capture_output=True, text=True, timeout=500, check=False
    )

    assert again.returncode == 0, again.stderr
    assert "Going on from" in again.stdout
    assert jobs.without_speed(jobs.records(repository / "runs" / "4321")) == one_host


def test_slurm_script_is_bash_and_asks_for_what_it_uses():
    script = ROOT / "launch" / "slurm.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    options = [line.split()[1] for line in script.read_text().splitlines() if "#SBATCH" in line]
    assert "--ntasks-per-node=1" in options, "one torchrun on each node"
    assert "--signal=TERM@120" in options
    assert "--requeue" in options

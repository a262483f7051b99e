"""The launcher on two hosts with networks of their own: by torchrun as documented, and by Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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
    shown = [process.communicate(timeout=500) for process in started]
    return [
        subprocess.CompletedProcess(command, process.returncode, *each)
        for process, each in zip(started, shown, strict=True)
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
    shown = both[0].stderr + both[1].stderr
    assert shown.count("checkpoints need a folder that all machines share") == 1, shown


# srun starts a command on every node of the job, with the environment of the job's script, and
# passes SIGTERM on to every process of it.
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
# scontrol knows the nodes of a job, and writes down what else it is asked to do.
SCONTROL = """#!/bin/sh
case "$1" in
    show) [ "$3" = "host[0-1]" ] && printf '{names}\\n' ;;
    *) echo "$@" >> {log} ;;
esac
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@dataclass
class Slurm:
    """A job of two nodes, whose programs are stand-ins."""

    repository: Path
    environment: dict[str, str]
    script: list[str]
    log: Path


def slurm_job(hosts: netns.Hosts, text: Path, tmp_path: Path) -> Slurm:
    programs, repository = tmp_path / "bin", tmp_path / "repository"
    programs.mkdir()
    repository.mkdir()
    (repository / "launch").symlink_to(ROOT / "launch")
    (repository / "distamp").symlink_to(ROOT / "distamp")
    entries = json.dumps([[*host.enter(["env", f"--chdir={repository}"])] for host in hosts])
    write_program(programs / "srun", SRUN.format(python=sys.executable, entries=entries))
    names = "\\n".join(host.name for host in hosts)
    log = tmp_path / "scontrol.log"
    write_program(programs / "scontrol", SCONTROL.format(names=names, log=log))
    job = {
        **ENVIRONMENT,
        "PATH": f"{programs}:{ENVIRONMENT['PATH']}",
        "PROCESSES": "2",
        "SLURM_SUBMIT_DIR": str(repository),
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "6",
    }
    script = ["bash", str(ROOT / "launch" / "slurm.sh"), "--data", str(text), *map(str, RUN)]
    return Slurm(repository, job, script, log)


def test_slurm_script_puts_a_job_whose_time_is_over_back_and_it_goes_on(
    hosts, one_host, text, tmp_path
):
    job = slurm_job(hosts, text, tmp_path)
    run = job.repository / "runs" / "4321"
    with (tmp_path / "first.log").open("wb") as log:
        first = subprocess.Popen(
            job.script, env=job.environment, stdout=log, stderr=subprocess.STDOUT
        )
        jobs.wait_for_step(run, 3, seconds=300)
        first.send_signal(signal.SIGUSR1)
        assert first.wait(timeout=300) != 0
    shown = (tmp_path / "first.log").read_text()
    assert "Stopped as asked after step " in shown, shown
    assert job.log.read_text() == "requeue 4321\n"
    again = subprocess.run(
        job.script, env=job.environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "Going on from" in again.stdout
    assert job.log.read_text() == "requeue 4321\n"
    assert jobs.without_speed(jobs.records(run)) == one_host


def test_slurm_script_trains_on_all_nodes_and_goes_on_when_requeued(
    hosts, one_host, text, tmp_path
):
    slurm = slurm_job(hosts, text, tmp_path)
    repository, job, script = slurm.repository, slurm.environment, slurm.script

    first = subprocess.Popen(script, env=job, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    jobs.wait_for_step(repository / "runs" / "4321", 6, seconds=300)
    for index in range(len(hosts)):
        hosts.switch_off(index)
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
    assert "--signal=B:USR1@120" in options
    assert "--requeue" in options
    assert "export SRUN_CPUS_PER_TASK=" in script.read_text()


# -- a host that vanishes -------------------------------------------------------------------------

# Four ranks of two hosts, or two of one. Where torchrun shares its store, a host that joins later
# waits for the address of the first rank, which is written down once, before the first round.
ELASTIC_ENVIRONMENT = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ELASTIC = (*TINY, "--steps", "40", "--evaluate-every", "40", "--checkpoint-every", "5")
ELASTIC = (*ELASTIC, "--timeout", "20")


def elastic(nodes: str, restarts: int, port: int, processes: int = 2) -> list[str]:
    start = ["torchrun", "--nnodes", nodes, "--nproc-per-node", str(processes)]
    start += ["--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-id", f"run-{port}"]
    start += ["--rdzv-conf", "join_timeout=300,last_call_timeout=3"]
    return [*start, "--rdzv-endpoint", f"host0:{port}", str(ROOT / "launch" / "train.py")]


@contextlib.contextmanager
def on_hosts(
    hosts: netns.Hosts, command: list[str], folder: Path
) -> Iterator[tuple[list[subprocess.Popen[Any]], list[Path]]]:
    """Start a command on every host, with a log for each; end what is left of it."""
    logs = [folder / f"{host.name}.log" for host in hosts]
    started = []
    with contextlib.ExitStack() as stack:
        for host, log in zip(hosts, logs, strict=True):
            output = stack.enter_context(log.open("wb"))
            where = {"cwd": folder, "env": ELASTIC_ENVIRONMENT}
            options = {**where, "stdout": output, "stderr": output}
            started.append(host.popen(command, **options))
        try:
            yield started, logs
        finally:
            for index in range(len(hosts)):
                hosts.switch_off(index)
            for each in started:
                each.wait(timeout=60)


def test_ranks_of_a_host_whose_link_is_cut_are_named_within_the_timeout(text, tmp_path):
    with netns.Hosts(2, rate="1gbit") as hosts:
        folder = tmp_path / "run"
        command = [*elastic("2", 0, 29601), "--data", str(text), "--run-dir", str(folder), *ELASTIC]
        with on_hosts(hosts, command, tmp_path) as (started, logs):
            jobs.wait_for_step(folder, 7, seconds=300)
            hosts.cut(1)
            assert started[0].wait(timeout=300) != 0
            shown = logs[0].read_text()
            lost = [line for line in shown.splitlines() if line.startswith("error:")]
            assert len(lost) == 1, shown
            assert "did not answer (on host1)" in lost[0]
            assert f"go on with --resume {folder}" in lost[0]


def _going_on(log: Path, ranks: str) -> int:
    """Wait until a run goes on with another number of ranks; return the step it goes on from."""
    jobs.wait_for_text(log, f"with other settings: ranks {ranks}", seconds=300)
    steps = re.findall(rf"Going on from .* at step (\d+), .* ranks {ranks}", log.read_text())
    assert len(steps) == 1, log.read_text()
    return int(steps[0])


def _losses(folder: Path, after: int, end: int) -> list[dict[str, Any]]:
    rows = jobs.without_speed(jobs.records(folder))
    return [row for row in rows if "loss" in row and after < row["step"] <= end]


def test_the_others_go_on_without_a_host_that_is_gone_and_with_one_that_comes_back(text, tmp_path):
    with netns.Hosts(2, rate="1gbit") as hosts:
        folder = tmp_path / "run"
        run = ("--data", text, *ELASTIC, "--steps", 100_000, "--evaluate-every", 100_000)
        run = (*run, "--checkpoint-every", 50, "--keep-checkpoints", 9999)
        command = [*elastic("1:2", 5, 29602), *map(str, (*run, "--run-dir", folder))]
        with on_hosts(hosts, command, tmp_path) as (started, logs):
            jobs.wait_for_step(folder, 51, seconds=300)
            hosts.cut(1)
            first = _going_on(logs[0], "4 -> 2")
            assert "did not answer (on host1)" in logs[0].read_text()
            hosts.switch_off(1)
            started[1].wait(timeout=60)
            hosts.join(1)
            with (tmp_path / "again.log").open("wb") as log:
                where = {"cwd": tmp_path, "env": ELASTIC_ENVIRONMENT}
                options = {**where, "stdout": log, "stderr": log}
                again = hosts[1].popen(command, **options)
                second = _going_on(logs[0], "2 -> 4")
                end = second + 20
                jobs.wait_for_step(folder, end, seconds=300)
            assert second > first
        assert again.wait(timeout=60) != 0  # ended with its host
        # Each part has the losses of a run that was resumed by hand, on as many ranks of one host.
        for step, last, ranks in ((first, second, 2), (second, end, 4)):
            checkpoint = folder / "checkpoints" / f"step-{step:08d}"
            by_hand = tmp_path / str(step)
            more = ("--run-dir", by_hand, "--keep-checkpoints", 0)
            resumed = jobs.start(ranks, "--resume", checkpoint, *more)
            jobs.wait_for_step(by_hand, last)
            resumed.kill(everything=True)
            expected = _losses(by_hand, step, last)
            assert len(expected) == last - step
            assert _losses(folder, step, last) == expected


# -- bytes that leave an interface ----------------------------------------------------------------

# Two blocks, and what is outside of them: bytes, places, norm and head.
WIDTH, BLOCKS = 128, 2
IN_BLOCKS = BLOCKS * (12 * WIDTH**2 + 13 * WIDTH)
OUTSIDE = (256 + 16 + 256 + 2) * WIDTH
SHARDED = ("--layers", BLOCKS, "--width", WIDTH, "--heads", 2, "--block", 16, "--batch", 2)
SHARDED = (*SHARDED, "--strategy", "fsdp2", "--precision", "bf16", "--evaluate-every", 100)
SHARDED = (*SHARDED, "--keep-checkpoints", 0, "--warmup", 0)
PASS = 64  # held-out sequences in one pass of two ranks


def _sent(hosts: netns.Hosts, folder: Path, port: int, *flags: object) -> int:
    """What the first of two hosts, a rank each, gave to the network in a run."""
    folder.mkdir()
    command = [*elastic("2", 0, port, 1), *map(str, (*SHARDED, "--run-dir", folder / "run"))]
    before = hosts[0].sent()
    with on_hosts(hosts, [*command, *map(str, flags)], folder) as (started, logs):
        for process, log in zip(started, logs, strict=True):
            assert process.wait(timeout=300) == 0, log.read_text()
        return (hosts[0].sent() - before).payload


@pytest.mark.parametrize(("more", "size"), [((), 2), (("--gather-fp32",), 4)], ids=["bf16", "fp32"])
def test_bytes_that_sharding_gathers_and_reduces_on_the_interface(hosts, tmp_path, more, size):
    data = ("--data", jobs.text_file(tmp_path, kilobytes=160), *more)
    port = 29610 + 10 * size
    one = _sent(hosts, tmp_path / "one", port, *data, "--steps", 1, "--validation-windows", PASS)
    flags = ("--steps", 1, "--validation-windows", 11 * PASS)
    passes = _sent(hosts, tmp_path / "passes", port + 1, *data, *flags)
    flags = ("--steps", 21, "--validation-windows", PASS)
    steps = _sent(hosts, tmp_path / "steps", port + 2, *data, *flags)
    gathered, step = (passes - one) / 20, (steps - one) / 20
    print(f"a pass {gathered:,.0f} bytes, a step {step:,.0f}")
    # A validation before the first step and one after the last; of two ranks each sends half. What
    # is outside of blocks stays gathered between passes without a step.
    assert gathered == pytest.approx(IN_BLOCKS * size / 2, rel=0.02)
    # Blocks are gathered for the backward pass too, and all gradients are reduced in fp32: gloo
    # reduces them as a whole, so that each rank sends all of them.
    gathers = (2 * IN_BLOCKS * size + OUTSIDE * 4) / 2
    assert step == pytest.approx(gathers + (IN_BLOCKS + OUTSIDE) * 4, rel=0.02)

"""Start the launcher as its users do, through torchrun, and look at what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "train.py"
# A model small enough that starting the processes is most of a run.
TINY = ("--layers", "1", "--width", "16", "--heads", "2", "--block", "16", "--batch", "12")
TINY = (*TINY, "--validation-windows", "16", "--warmup", "5")


# No run here takes a tenth of this, but on a machine that has much else to do.
TIMEOUT_S = 600.0


def text_file(folder: Path, kilobytes: int = 32) -> Path:
    """A text with something to learn in it."""
    path = folder / "text.txt"
    rows = (f"row {i}: {i} times {i % 7} is {i * (i % 7)}\n" for i in range(60 * kilobytes))
    path.write_text("".join(rows)[: kilobytes * 1024])
    return path


def torchrun(
    processes: int, *args: object, script: Path = SCRIPT, max_restarts: int = 0
) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += ["--max-restarts", str(max_restarts), "--nproc-per-node", str(processes)]
    return [*start, str(script), *map(str, args)]


def _environment(path: str = "") -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**ours, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run(
    processes: int, *args: object, script: Path = SCRIPT, timeout: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run to the end, in a folder that is not the repository's.

    Args:
        script: what to start in the place of the launcher's own; it can import ``launch``.
    """
    return subprocess.run(
        torchrun(processes, *args, script=script),
        capture_output=True,
        text=True,
        env=_environment("" if script is SCRIPT else str(ROOT)),
        cwd="/",
        timeout=timeout,
        check=False,
    )


@dataclass
class Started:
    """A run that is still going."""

    process: subprocess.Popen[bytes]

    def workers(self) -> list[int]:
        """Process ids of the ranks."""
        found = []
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
            for pid in [int(pid) for task in tasks for pid in task.read_text().split()]:
                with contextlib.suppress(OSError):
                    if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return found

    def kill(self, *, everything: bool) -> None:
        """SIGKILL one rank, or torchrun and every rank; wait until all of them are gone."""
        workers = self.workers()
        if everything:
            self.process.kill()
        for pid in workers if everything else workers[-1:]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=TIMEOUT_S)
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            time.sleep(0.01)


def start(
    processes: int, *args: object, max_restarts: int = 0, output: IO[bytes] | None = None
) -> Started:
    """Start a run; what it prints goes to ``output``, or nowhere."""
    return Started(
        subprocess.Popen(
            torchrun(processes, *args, max_restarts=max_restarts),
            stdout=output or subprocess.DEVNULL,
            stderr=output or subprocess.DEVNULL,
            env=_environment(),
            cwd="/",
        )
    )


def records(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, but for what a killed run had half written."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def without_speed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what depends on the machine's load."""
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def wait_for_text(log: Path, text: str, seconds: float = TIMEOUT_S) -> None:
    """Wait until a log has a text in it."""
    end = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def wait_for_step(folder: Path, step: int, seconds: float = TIMEOUT_S) -> None:
    """Wait until a run has written a record of this step."""
    end = time.monotonic() + seconds
    while not any(row["step"] >= step for row in records(folder)):
        assert time.monotonic() < end, f"no step {step} in {seconds} s"
        time.sleep(0.005)

"""The folder of a run: its checkpoints, who began it, and who writes to it now."""

import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from launch.program import UsageError, convert_to_usage_error, require

# Of the word that says which torchrun a run belongs to, in the store of its agent.
_KEY = "launch/run"
# What a run writes now and then, beside what each run writes.
_REPORTS = ("nonfinite.jsonl", "precision.txt", "precision.toml", "tokenizer.json")


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is there whole, or as it was before."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def list_checkpoints(run: Path) -> list[Path]:
    """Return the whole checkpoints of a run, the newest first: torch writes .metadata last."""
    return sorted((p.parent for p in run.glob("checkpoints/step-*/.metadata")), reverse=True)


def find_run_dir(resume: Path) -> Path:
    """Return the folder of the run that is named, or whose checkpoint is."""
    resume = resume.absolute()
    return resume.parents[1] if resume.name.startswith("step-") else resume


def find_checkpoint(resume: Path, flag: str = "") -> tuple[Path, Path]:
    """Return the folder of a run, and its newest checkpoint or the one that is named.

    Raises:
        UsageError: There is no whole one.
    """
    resume, run = resume.absolute(), find_run_dir(resume)
    named = [path for path in list_checkpoints(run) if resume in (run, path)]
    reason = "no whole checkpoint there" if resume.is_dir() else "no such run"
    require(named, f"{flag}{resume}: {reason}")
    return run, named[0]


def read_data_json(path: Path) -> dict[str, Any]:
    """Return what a run, or the run of a checkpoint, has written of its data.

    Raises:
        UsageError: There is none.
    """
    with convert_to_usage_error(f"{path}: no run there", OSError):
        return dict(json.loads((find_run_dir(path) / "data.json").read_text(encoding="utf-8")))


def started_by_this_torchrun(run: Path) -> bool:
    """Whether the torchrun that started this process has begun the run in a folder, or resumed it.

    So a restart of its ranks tells its own run from another's. Its agents keep a random word in
    their store as long as they live, and the run has the same.
    """
    lock, store = run / "lock", _agent_store()
    if store is not None:
        word = store.get(_KEY).decode() if store.check([_KEY]) else None
    else:
        word = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # --rdzv-id
    lines = lock.read_text(encoding="utf-8").splitlines() if lock.exists() else []
    return word not in (None, "none") and word in lines[1:]


def _agent_store() -> dist.Store | None:
    """Return what outlives the ranks; there is none with TORCH_DISABLE_SHARE_RDZV_TCP_STORE."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False, wait_for_workers=False)


def begin(run: Path, after: int | None) -> IO[str]:
    """Take a folder for a run of this process; on the first rank alone.

    Args:
        run: The folder.
        after: The step after which the run that is there goes on; None: what is there is replaced.

    Returns:
        The file whose lock holds the folder, until it is closed or the process ends.

    Raises:
        UsageError: Another process holds it.
    """
    with convert_to_usage_error(f"--run-dir {run}", OSError):
        run.mkdir(parents=True, exist_ok=True)
    lock = (run / "lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.readline().strip() or "another process"
        raise UsageError(f"--run-dir {run}: {holder} trains there; end it first") from None
    except OSError as error:  # a file system without locks
        print(f"Warning: {run} cannot be locked: {error.strerror}", file=sys.stderr, flush=True)
    word = secrets.token_hex(8)
    if store := _agent_store():  # first, so that no restart takes for its own what it is not
        store.set(_KEY, word)
    else:
        word = os.environ.get("TORCHELASTIC_RUN_ID", word)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n{word}\n")
    lock.flush()
    for path in run.glob("checkpoints/step-" + "[0-9]" * 8):
        if after is None or int(path.name.removeprefix("step-")) > after:
            remove(path)
    if after is None:
        for path in (*run.glob("tensorboard/events.*"), *map(run.joinpath, _REPORTS)):
            path.unlink(missing_ok=True)
    return lock


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; one that is half gone is none."""
    (checkpoint / ".metadata").unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)

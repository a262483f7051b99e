"""The folder of a run: its checkpoints, its lock, and the torchrun that started it."""

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

from launch.program import UsageError, convert_to_usage_error

# The agents of torchrun keep the token of their run under this key of their store.
_STORE_KEY = "launch/run"
# Files that only some runs write. A new run removes those of the run before it.
_OPTIONAL_FILES = ("nonfinite.jsonl", "precision.txt", "precision.toml", "tokenizer.json")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader finds either the old text or the complete new text."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the newest first."""
    # torch writes .metadata last, so a checkpoint without it is incomplete.
    index_files = run_dir.glob("checkpoints/step-*/.metadata")
    return sorted((file.parent for file in index_files), reverse=True)


def find_run_dir(path: Path) -> Path:
    """Return the folder of a run, from that folder or from one of its checkpoints."""
    path = path.absolute()
    if path.name.startswith("step-"):
        return path.parents[1]
    return path


def find_checkpoint(path: Path, prefix: str = "") -> tuple[Path, Path]:
    """Return the folder of a run and a checkpoint: this one, or the newest one of this run.

    Args:
        path: The folder of a run, or a checkpoint.
        prefix: Begins the message of an error, such as the flag that gave the path.

    Raises:
        UsageError: There is no complete checkpoint.
    """
    path = path.absolute()
    run_dir = find_run_dir(path)
    for checkpoint in list_checkpoints(run_dir):
        if path in (run_dir, checkpoint):
            return run_dir, checkpoint
    reason = "no complete checkpoint there" if path.is_dir() else "no such run"
    raise UsageError(f"{prefix}{path}: {reason}")


def read_data_json(path: Path) -> dict[str, Any]:
    """Return the description of the data that a run wrote to data.json.

    Args:
        path: The folder of the run, or one of its checkpoints.

    Raises:
        UsageError: There is no such file.
    """
    with convert_to_usage_error(f"{path}: no run there", OSError):
        text = (find_run_dir(path) / "data.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def started_by_this_torchrun(run_dir: Path) -> bool:
    """Return whether the torchrun of this process started or resumed the run in a folder.

    A restarted rank resumes the run that its torchrun started, and refuses any other run. The
    agents of a torchrun keep a random token in their store until they end, and the lock file of
    the run contains the same token.
    """
    store = _agent_store()
    token = None
    if store is None:
        # This is --rdzv-id, or "none" without that flag.
        token = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    elif store.check([_STORE_KEY]):
        token = store.get(_STORE_KEY).decode()
    lock = run_dir / "lock"
    if token in (None, "none") or not lock.exists():
        return False
    return token in lock.read_text(encoding="utf-8").splitlines()[1:]


def _agent_store() -> dist.Store | None:
    """Return the store of torchrun's agents, which outlives the ranks.

    There is none with TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or without torchrun.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False)


def acquire_run_dir(run_dir: Path, resumed_step: int | None) -> IO[str]:
    """Lock a folder for the run of this process and remove the files that the run replaces.

    Only the first rank calls this.

    Args:
        run_dir: The folder.
        resumed_step: The step of the checkpoint from which the run in this folder resumes.
            Checkpoints of later steps are removed. None replaces the run in this folder.

    Returns:
        The lock file. The lock holds until the file is closed or the process ends.

    Raises:
        UsageError: Another process trains in this folder.
    """
    with convert_to_usage_error(f"--run-dir {run_dir}", OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / "lock").open("a+", encoding="utf-8")
    _lock_file(lock, run_dir)
    # The store gets the token before the file, so that a restart in between finds a foreign run.
    token = _publish_token()
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n{token}\n")
    lock.flush()
    _remove_replaced_files(run_dir, resumed_step)
    return lock


def _lock_file(lock: IO[str], run_dir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.readline().strip() or "another process"
        raise UsageError(f"--run-dir {run_dir}: {holder} trains there. End it first.") from None
    except OSError as error:
        # Some file systems have no locks.
        message = f"Warning: {run_dir} cannot be locked: {error.strerror}"
        print(message, file=sys.stderr, flush=True)


def _publish_token() -> str:
    """Return the token of this torchrun, after putting a new one into the store of its agents."""
    token = secrets.token_hex(8)
    store = _agent_store()
    if store is None:
        return os.environ.get("TORCHELASTIC_RUN_ID", token)
    store.set(_STORE_KEY, token)
    return token


def _remove_replaced_files(run_dir: Path, resumed_step: int | None) -> None:
    eight_digits = "[0-9]" * 8
    for checkpoint in run_dir.glob(f"checkpoints/step-{eight_digits}"):
        step = int(checkpoint.name.removeprefix("step-"))
        if resumed_step is None or step > resumed_step:
            remove_checkpoint(checkpoint)
    if resumed_step is not None:
        return
    for path in run_dir.glob("tensorboard/events.*"):
        path.unlink()
    for name in _OPTIONAL_FILES:
        (run_dir / name).unlink(missing_ok=True)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, its index first, so that a partly removed one counts as incomplete."""
    (checkpoint / ".metadata").unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)

"""The folder a run writes to: whose it is, whether it will do, and what is in it already."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from launch import checkpoint
from launch.checkpoint import Manifest
from launch.command_line import flags_of
from launch.config import Config
from launch.data import Data
from launch.errors import UsageError
from launch.places import CHECKPOINTS
from launch.ranks import Ranks
from launch.reporting import METRICS, RunReporter, read_metrics

__all__ = ["Lock", "Origin", "begin", "check_shared", "check_space", "claim", "find_origin"]

# fp32 parameters and AdamW's two moments.
_BYTES_PER_PARAMETER = 12
_JOB, _LOCK = "job.json", ".lock"
CONFIG = "config.json"


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run goes on from.

    Attributes:
        run: The folder it was found through.
        path: Its own folder.
        broken: A line about each newer one that is not whole.
        asked: Whether the command line named it; else it is this job's own, after a restart.
        flags: What the run was asked to do; None where its config.json cannot be read.
    """

    run: Path
    path: Path
    manifest: Manifest
    broken: tuple[str, ...]
    asked: bool
    flags: Config | None

    @property
    def folder(self) -> Path:
        """The folder of the run that wrote it."""
        return self.path.absolute().parent.parent

    @property
    def step(self) -> int:
        """Steps done in it."""
        step: int = self.manifest["progress"]["step"]
        return step

    def advised(self, own: Path) -> Path:
        """Return what to resume from while a run in ``own`` has no newer checkpoint."""
        return own if self.folder.resolve() == own.resolve() else self.path


def find_origin(config: Config, ranks: Ranks) -> Origin | None:
    """Return what to go on from; None for a new run. Every rank calls this.

    A group of processes that torchrun started anew goes on from what it has written itself.

    Raises:
        UsageError: On every rank, if ``--resume`` names no checkpoint, or none is whole.
    """
    own = config.folder
    restarted = ranks.restarts > 0 or ranks.gather(_is_this_job(own))[0]
    # One that has no checkpoint yet goes on from what was asked for, or from the start. One whose
    # checkpoints cannot be read does not: it would write over them.
    if (restarted or config.auto_resume) and ranks.gather(checkpoint.any_in(own))[0]:
        path, manifest, broken = checkpoint.find(own, ranks)
        return _origin(own, path, manifest, broken, asked=False)
    if config.resume is None:
        return None
    path, manifest, broken = checkpoint.find(config.resume, ranks)
    return _origin(config.resume, path, manifest, broken, asked=True)


def _origin(run: Path, path: Path, manifest: Manifest, broken: list[str], *, asked: bool) -> Origin:
    flags = flags_of(path.absolute().parent.parent / CONFIG)
    return Origin(run, path, manifest, tuple(broken), asked, flags)


def check_space(config: Config, parameters: int, ranks: int) -> None:
    """Refuse what is no folder, and a disk that the checkpoints of so many ranks cannot fit on.

    Raises:
        UsageError: Naming what is no folder; or what they need and what is there.
    """
    place = config.folder.absolute()
    with _writing(config.folder):
        while not place.exists():
            place = place.parent
    if not place.is_dir():
        raise UsageError(f"--run-dir {config.folder}: {place} is no folder")
    if config.keep_checkpoints == 0:
        return
    # The new one is written before the oldest is removed.
    each = _BYTES_PER_PARAMETER
    wire = config.wire
    if wire is not None and wire.needs_error_feedback:
        each += 8 * ranks
    need = (config.keep_checkpoints + 1) * parameters * each
    # Those that are there are among them, or make room for them.
    have = shutil.disk_usage(place).free + checkpoint.size_in(config.folder)
    if need > have:
        keep = config.keep_checkpoints
        raise UsageError(
            f"--run-dir {config.folder}: {keep} checkpoint{'s' * (keep > 1)} and the next one need"
            f" {_shown(need)}, and there are {_shown(have)} free; --keep-checkpoints says how many"
        )


def _shown(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**29 else f"{size / 2**20:.3g} MiB"


def claim(config: Config, origin: Origin | None, restarted: bool) -> Lock:
    """Make the run's folder and lock it; what is in it stays as it is.

    Args:
        config: The run's settings.
        origin: What it goes on from.
        restarted: Whether torchrun has started this group of processes anew.

    Raises:
        UsageError: If it holds another run, one is being written there, or nothing can be.
    """
    folder = config.folder
    mine = restarted or config.auto_resume or _is_this_job(folder)
    same = origin is not None and origin.folder.resolve() == folder.resolve()
    if _holds_run(folder) and not (same or config.overwrite or mine):
        raise UsageError(
            f"--run-dir {folder}: it already holds a run; pass --resume {folder} to go on with it,"
            " --overwrite to start again, or another --run-dir"
        )
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if config.keep_checkpoints > 0:
            (folder / CHECKPOINTS).mkdir(exist_ok=True)
        lock = Lock(folder / _LOCK)
    if lock.owner and not (restarted or _is_this_job(folder)):
        raise UsageError(
            f"--run-dir {folder}: another run is writing there ({lock.owner}); let it end, or pass"
            " another --run-dir"
        )
    if config.overwrite and origin is None and not mine:
        # At once: should torchrun start the ranks anew, these would be taken for the run's own.
        checkpoint.forget_after(folder / CHECKPOINTS, 0)
    return lock


def begin(config: Config, origin: Origin | None, data: Data, lock: Lock) -> RunReporter:
    """Begin a run's records with what happened before the checkpoint, and remove what came after.

    Raises:
        UsageError: If nothing can be written there.
    """
    folder = config.folder
    step = 0 if origin is None else origin.step
    history = [] if origin is None else read_metrics(origin.folder / METRICS, until=step)
    with _writing(folder):
        _write(folder / CONFIG, json.dumps(asdict(config), indent=2, default=str))
        _write(folder / _JOB, json.dumps({"torchelastic_run_id": _run_id()}))
        report = RunReporter(folder, config, data.kind, history, step, lock.close)
        checkpoint.forget_after(folder / CHECKPOINTS, step)
    return report


def _holds_run(folder: Path) -> bool:
    metrics = folder / METRICS
    return checkpoint.any_in(folder) or (metrics.is_file() and metrics.stat().st_size > 0)


class Lock:
    """A run's folder, locked against other processes while this one writes there.

    A process that ends, however that is, leaves no lock. File systems without locks have none.

    Attributes:
        owner: The process that has locked it, if another one has.
    """

    def __init__(self, path: Path) -> None:
        self.owner = ""
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            self.owner = self._file.read().strip() or "unknown"
            self._file.close()
            return
        except OSError:
            pass
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def close(self) -> None:
        """Unlock the folder."""
        with contextlib.suppress(OSError):
            self._file.close()


def check_shared(config: Config, ranks: Ranks) -> None:
    """Refuse a folder that is not the same on every machine; every rank calls this.

    Raises:
        UsageError: On every rank, if any rank does not see what rank 0 writes there.
    """
    token = ranks.gather(uuid.uuid4().hex)[0]
    path = config.folder / f".shared-{token}"
    try:
        with ranks.together():
            if ranks.is_main:
                with _writing(config.folder):
                    _write(path, token)
        with ranks.together():
            if not path.exists():
                raise UsageError(
                    f"--run-dir {config.folder}: rank {ranks.rank} does not see what rank 0 writes"
                    " there; checkpoints need a folder that all machines share"
                )
    finally:
        if ranks.is_main:
            path.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that is there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(f"{text}\n", encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--run-dir {folder}: cannot write there ({error.strerror})") from None


def _is_this_job(folder: Path) -> bool:
    """Whether a folder was begun by the torchrun that started this process.

    Its restarts are counted, but not those after a machine joined or left.
    """
    try:
        begun_by = json.loads((folder / _JOB).read_text(encoding="utf-8"))["torchelastic_run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return begun_by is not None and begun_by == _run_id()


def _run_id() -> str | None:
    # "none" is what torchrun calls every job that was given no --rdzv-id.
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run_id in (None, "none", "") else run_id

"""The folder a run writes to: whose it is, whether it will do, and what is in it already."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from launch import checkpoint
from launch.checkpoint import Manifest
from launch.command_line import flags_of
from launch.config import Config
from launch.data import Data
from launch.errors import UsageError
from launch.ranks import Ranks
from launch.reporting import METRICS, RunReporter, read_metrics

__all__ = ["Origin", "check_shared", "check_space", "claim", "find_origin"]

# fp32 parameters and AdamW's two moments.
_BYTES_PER_PARAMETER = 12
_JOB = "job.json"
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
    def step(self) -> int:
        """Steps done in it."""
        step: int = self.manifest["progress"]["step"]
        return step

    def advised(self, own: Path) -> Path:
        """Return what to resume from while a run in ``own`` has no newer checkpoint."""
        return own if self.path.parent.parent.absolute() == own.absolute() else self.path


def find_origin(config: Config, ranks: Ranks) -> Origin | None:
    """Return what to go on from; None for a new run. Every rank calls this.

    A group of processes that torchrun started anew goes on from what it has written itself.

    Raises:
        UsageError: On every rank, if ``--resume`` names no checkpoint.
    """
    own = config.folder
    restarted = ranks.restarts > 0 or ranks.gather(_is_this_job(own))[0]
    if restarted or config.auto_resume:
        # Where none of its checkpoints is whole: from the start, or from what was asked for.
        with contextlib.suppress(UsageError):
            path, manifest, broken = checkpoint.find(own, ranks)
            return _origin(own, path, manifest, broken, asked=False)
    if config.resume is None:
        return None
    path, manifest, broken = checkpoint.find(config.resume, ranks)
    return _origin(config.resume, path, manifest, broken, asked=True)


def _origin(run: Path, path: Path, manifest: Manifest, broken: list[str], *, asked: bool) -> Origin:
    flags = flags_of(path.parent.parent / CONFIG)
    return Origin(run, path, manifest, tuple(broken), asked, flags)


def check_space(config: Config, parameters: int, ranks: int) -> None:
    """Refuse what is no folder, and a disk that the checkpoints of so many ranks cannot fit on.

    Raises:
        UsageError: Naming what is no folder; or what they need and what is there.
    """
    place = config.folder.absolute()
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
    have = shutil.disk_usage(place).free
    if need > have:
        raise UsageError(
            f"--run-dir {config.folder}: {config.keep_checkpoints} checkpoints and the next one"
            f" need {need / 2**30:.3g} GiB, and there are {have / 2**30:.3g} free"
        )


def claim(config: Config, origin: Origin | None, data: Data, restarted: bool) -> RunReporter:
    """Make the run's folder, and begin its metrics with what happened before the checkpoint.

    Raises:
        UsageError: If it holds another run, or cannot be written to.
    """
    folder = config.folder
    history = []
    step = 0
    if origin is not None:
        step = origin.step
        from_folder = origin.path.parent.parent
        history = read_metrics(from_folder / METRICS, until=step)
    mine = restarted or config.auto_resume or _is_this_job(folder)
    if (folder / METRICS).exists() and origin is None and not (config.overwrite or mine):
        raise UsageError(
            f"--run-dir {folder}: it already holds a run; pass --resume {folder} to go on with it,"
            " --overwrite to start again, or another --run-dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.forget_after(folder / checkpoint.FOLDER, step)
        _write(folder / CONFIG, asdict(config))
        _write(folder / _JOB, {"torchelastic_run_id": _run_id()})
        return RunReporter(folder, config, data.kind, history, step)
    except OSError as error:
        raise UsageError(f"--run-dir {folder}: cannot write there ({error.strerror})") from None


def check_shared(config: Config, ranks: Ranks) -> None:
    """Refuse a folder that is not the same on every machine; every rank calls this.

    Raises:
        UsageError: On every rank, if any rank does not see what rank 0 writes there.
    """
    if ranks.world_size == 1:
        return
    token = ranks.gather(uuid.uuid4().hex)[0]
    path = config.folder / f".shared-{token}"
    try:
        with ranks.together():
            if ranks.is_main:
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


def _write(path: Path, value: object) -> None:
    try:
        path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--run-dir {path.parent}: cannot write there ({error.strerror})"
        ) from None


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

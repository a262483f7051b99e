"""Checkpoints that any number of ranks can read, of which half a one never counts.

A checkpoint is a folder that torch.distributed.checkpoint wrote, each rank its own file, and a
manifest that names every file with its size and digest. It is written beside the others under
another name, and gets its own in one step, once all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from launch.errors import UsageError
from launch.places import CHECKPOINTS, is_checkpoint, run_of
from launch.ranks import Ranks

__all__ = ["Manifest", "any_in", "find", "forget_after", "read", "save", "size_in"]

Manifest = dict[str, Any]
_MANIFEST = "manifest.json"
# Of all that the manifest says; those of before it had one lack it.
_DIGEST = "digest"
_NEEDED = {"progress", "scaler", "model", "settings", "data", "files"}
_PARTIAL = ".partial"
_FORMAT = "distamp launch checkpoint 2"


def save(
    folder: Path, ranks: Ranks, tensors: dict[str, Tensor], about: Manifest, keep: int
) -> Path:
    """Write a checkpoint, and then remove all but the ``keep`` newest; every rank calls this.

    Args:
        folder: The folder of checkpoints; every rank must see the same one.
        ranks: Those that write.
        tensors: This rank's part, by name.
        about: What else is to be known; ``about["progress"]["step"]`` names the checkpoint.
        keep: How many stay.

    Raises:
        UsageError: On every rank, if any rank cannot write. What was there before is untouched.
    """
    partial, target = folder / _PARTIAL, folder / f"step-{about['progress']['step']:08d}"
    with ranks.together():
        if ranks.is_main:
            with _writing(partial):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
    try:
        with _quietly():
            writer = FileSystemWriter(partial)
            dcp_save(tensors, storage_writer=writer, no_dist=ranks.world_size == 1)
    except CheckpointException as failed:
        raise UsageError(f"cannot write {target}: {_reason(failed)}") from None
    with ranks.together(), _writing(target):
        mine = {path.name: _fingerprint(path) for path in _own_files(partial, ranks)}
    files = {name: what for part in ranks.gather(mine) for name, what in part.items()}
    with ranks.together():
        if ranks.is_main:
            with _writing(target):
                manifest = {"format": _FORMAT, **about, "files": files}
                _finish(partial, target, {**manifest, _DIGEST: _digest(manifest)})
                for old in _candidates(folder)[keep:]:
                    shutil.rmtree(old, ignore_errors=True)
    return target


def find(resume: Path, ranks: Ranks) -> tuple[Path, Manifest, list[str]]:
    """Return the newest whole checkpoint of a run, the same on every rank.

    Args:
        resume: The folder of a run, that of its checkpoints, or one checkpoint.
        ranks: Those that look; each reads a share of the files.

    Returns:
        Its folder, its manifest, and a line about each newer one that is not whole.

    Raises:
        UsageError: If there is none.
    """
    run = run_of(resume) or resume
    one = is_checkpoint(resume)
    candidates = ranks.gather([resume] if one else _candidates(run / CHECKPOINTS))[0]
    broken: list[str] = []
    for path in candidates:
        manifest, fault = _check(path, ranks)
        fault = next(filter(None, ranks.gather(fault)), "")
        if not fault:
            return path, manifest, broken
        broken.append(f"{path.name} is not whole ({fault}) and was passed over")
    if broken:
        raise UsageError(f"--resume {resume}: {broken[0]}, and there is no other")
    what = "no checkpoint in it" if resume.is_dir() else "no such run"
    raise UsageError(f"--resume {resume}: {what}")


def read(path: Path, ranks: Ranks, tensors: dict[str, Tensor]) -> None:
    """Fill tensors from a checkpoint, however many ranks wrote it; every rank calls this.

    Raises:
        UsageError: If it holds no such tensors.
    """
    try:
        with _quietly():
            reader = FileSystemReader(path)
            dcp_load(tensors, storage_reader=reader, no_dist=ranks.world_size == 1)
    except CheckpointException as failed:
        raise UsageError(f"--resume {path}: {_reason(failed)}") from None


def any_in(run: Path) -> bool:
    """Whether a run's folder has checkpoints, whole or not."""
    return bool(_candidates(run / CHECKPOINTS))


def size_in(run: Path) -> int:
    """Return the bytes of the checkpoints in a run's folder, whole or not."""
    files = (p for found in _candidates(run / CHECKPOINTS) for p in found.glob("*"))
    return sum(path.stat().st_size for path in files)


def forget_after(folder: Path, step: int) -> None:
    """Remove what is newer than this step, and what was never finished."""
    shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
    for path in _candidates(folder):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path, ignore_errors=True)


def _candidates(folder: Path) -> list[Path]:
    """Return what is named like a checkpoint, the newest first."""
    found = [p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def _check(path: Path, ranks: Ranks) -> tuple[Manifest, str]:
    """Return the manifest, and what this rank finds to be wrong with its share of the files."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            return {}, "it is of another format"
        lacking = _NEEDED - manifest.keys()
        if lacking or manifest.get(_DIGEST) not in (None, _digest(manifest)):
            return {}, f"{_MANIFEST} is not as it was written"
        for name in sorted(manifest["files"])[ranks.rank :: ranks.world_size]:
            if _fingerprint(path / name) != manifest["files"][name]:
                return {}, f"{name} is not as it was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = error.strerror if isinstance(error, OSError) else "it cannot be read"
        return {}, f"{_MANIFEST}: {text}" if isinstance(error, OSError) else str(text)
    return manifest, ""


def _own_files(partial: Path, ranks: Ranks) -> list[Path]:
    """Return the files of this rank; torch names them by rank, and rank 0 writes the index."""
    mine = list(partial.glob(f"__{ranks.rank}_*"))
    return [*mine, partial / ".metadata"] if ranks.is_main else mine


def _fingerprint(path: Path) -> list[Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return [os.fstat(file.fileno()).st_size, digest.hexdigest()]


def _digest(manifest: Manifest) -> str:
    """Return a digest of a manifest, its own aside."""
    rest = json.loads(json.dumps({k: v for k, v in manifest.items() if k != _DIGEST}))
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _finish(partial: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest, and give the folder the name that counts."""
    with (partial / _MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    # One of the same step is there only if it was not whole, or is to be replaced.
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    """Names are on the disk only once their folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process is one process; it is no mistake.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _reason(failed: CheckpointException) -> str:
    """Return what the first rank that failed says, in one line."""
    error = failed.failures[min(failed.failures)][0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]

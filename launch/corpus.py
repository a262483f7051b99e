"""Text as bytes: what is read, and what of it is held out."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launch.errors import UsageError

__all__ = ["Corpus", "load_corpus"]

# Distributions ship the standard library without its tests, and with folders for other people's
# packages inside it; what is left is the same text everywhere for one Python version.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# Git's own sign of a binary file: a NUL among the first bytes.
_SNIFFED_BYTES = 8000
_SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Text in two parts that share no byte.

    Attributes:
        name: What it is, for people.
        train: 1-D uint8, what is trained on.
        validation: 1-D uint8, the last tenth, never trained on.
        digest: Of both parts, to see whether two ranks, or two runs, read the same text.
    """

    name: str
    train: Tensor
    validation: Tensor
    digest: str


def load_corpus(path: Path | None) -> Corpus:
    """Read a text file, a folder of them, or (None) the Python standard library's own source.

    Files are put in an order that depends on their names alone but mixes folders, copies of a
    file already taken are left out, and the last tenth of the bytes is held out. So the validation
    text is of the same kind as the rest, on every machine the same, and in no training window.

    Raises:
        UsageError: If there is nothing to read.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        name = f"the Python {platform.python_version()} standard library"
        files = [f for f in _walk(root, _NOT_STDLIB) if f.suffix == ".py"]
    elif path.is_dir():
        root, name, files = path, str(path), list(_walk(path))
    elif path.exists():
        root, name, files = path.parent, str(path), [path]
    else:
        raise UsageError(f"--data {path}: no such file or folder")
    text = _join(root, files)
    if not text:
        what = "it is empty or not text" if path is not None and path.is_file() else "no text in it"
        raise UsageError(f"--data {path or root}: {what}")
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(text) - len(text) // 10
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return Corpus(name, whole[:cut], whole[cut:], digest)


def _walk(root: Path, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files under a folder, but for hidden ones and folders of the given names."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in without and s[0] != "."]
        yield from (Path(folder, name) for name in names if name[0] != ".")


def _join(root: Path, files: list[Path]) -> bytes:
    def place(file: Path) -> bytes:
        return hashlib.blake2b(file.relative_to(root).as_posix().encode(errors="replace")).digest()

    taken: dict[bytes, bytes] = {}
    for file in sorted(files, key=place):
        try:
            content = file.read_bytes() if file.is_file() else b""
        except OSError as error:
            raise UsageError(f"--data: cannot read {file}: {error.strerror}") from None
        if content.strip() and b"\0" not in content[:_SNIFFED_BYTES]:
            taken.setdefault(hashlib.blake2b(content).digest(), content)
    return _SEPARATOR.join(taken.values())

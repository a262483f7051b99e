"""Pictures with a class each: scikit-learn's digits, or a folder with a folder for each class."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.errors import UsageError

__all__ = ["Pictures", "holds_images", "load_digits", "load_folder"]

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"})


@dataclass(frozen=True)
class Pictures:
    """Pictures in an order that mixes their classes.

    Attributes:
        name: What they are, for people.
        pixels: uint8 (pictures, channels, height, width).
        labels: int64 (pictures,), indices into ``classes``.
        classes: Their names.
        white: The largest value a pixel can have.
    """

    name: str
    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    white: int


def load_digits() -> Pictures:
    """Return 1797 scans of handwritten digits, 8 by 8 pixels, that scikit-learn brings along.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    if find_spec("sklearn") is None:
        raise UsageError("--data digits: no scikit-learn here; pip install -e '.[train]' brings it")
    digits: Any = importlib.import_module("sklearn.datasets").load_digits()
    pixels = torch.from_numpy(digits.images).to(torch.uint8)[:, None]
    labels = torch.from_numpy(digits.target).long()
    # Those of one writer lie together; the validation split should have some of every writer's.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    names = tuple(map(str, digits.target_names))
    return Pictures("scikit-learn's digits", pixels[order], labels[order], names, 16)


def holds_images(folder: Path) -> bool:
    """Return whether a folder, or one right below it, holds a picture."""
    found = (*folder.glob("*"), *folder.glob("*/*"))
    return any(path.suffix.lower() in _SUFFIXES for path in found)


def load_folder(folder: Path, size: int) -> Pictures:
    """Read a folder that has a folder of pictures for each class; each becomes RGB, size by size.

    Files are put in an order that depends on their names alone but mixes classes.

    Raises:
        UsageError: Pillow is not installed, there are fewer than two classes, or a file cannot be
            read.
    """
    if find_spec("PIL") is None:
        raise UsageError(f"--data {folder}: no Pillow here; pip install -e '.[train]' brings it")
    files = [
        (path, group.name)
        for group in folder.iterdir()
        if group.is_dir() and not group.name.startswith(".")
        for path in group.rglob("*")
        if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
    ]
    classes = tuple(sorted({name for _, name in files}))
    if len(classes) < 2:
        raise UsageError(
            f"--data {folder}: pictures of {len(classes)} classes; put those of each class into a"
            " folder of its own, and have two or more"
        )

    def place(file: tuple[Path, str]) -> bytes:
        name = file[0].relative_to(folder).as_posix()
        return hashlib.blake2b(name.encode(errors="replace")).digest()

    files.sort(key=place)
    pixels = torch.stack([_read(path, size) for path, _ in files])
    labels = torch.tensor([classes.index(name) for _, name in files])
    return Pictures(str(folder), pixels, labels, classes, 255)


def _read(path: Path, size: int) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path) as image:
            rgb = image.convert("RGB").resize((size, size))
            data = bytearray(rgb.tobytes())
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"--data: cannot read {path}: {error}") from None
    return torch.frombuffer(data, dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)

"""What is trained on: which examples there are, what is held out, and which comes when."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from launch.config import Config
from launch.corpus import Corpus, load_corpus
from launch.errors import UsageError
from launch.images import Pictures, holds_images, load_digits, load_folder

__all__ = ["Data", "Images", "Text", "TrainingWindows", "load_data", "validation_windows"]


class Data(Protocol):
    """Examples in a fixed random order, addressed by how many were taken before.

    Attributes:
        name: What it is, for people.
        kind: What it is made of, for people: text or images.
        classes: How many classes there are to choose from.
        tokens: How many targets there are in one example.
        digest: To see whether two ranks, or two runs, read the same.
        sample: The input of one example, with a batch dimension of 1.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def classes(self) -> int: ...  # noqa: D102
    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def digest(self) -> str: ...  # noqa: D102
    @property
    def sample(self) -> Tensor: ...  # noqa: D102

    def __len__(self) -> int:
        """Training examples in one epoch."""

    def take(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` training examples from ``position`` on, and their targets."""

    def validation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return up to ``count`` examples that are held out, and their targets."""

    def sizes(self) -> tuple[str, str]:
        """Say how much is trained on, and how much is held out."""

    def check(self, config: Config) -> None:
        """Refuse what these data are too few for."""


def load_data(config: Config, kind: str | None) -> Data:
    """Read what ``--data`` names.

    Args:
        config: The run's settings.
        kind: ``"text"`` or ``"images"``, where the model says which; None: as the data are.

    Raises:
        UsageError: If there is nothing to read, or it is of the other kind.
    """
    try:
        return _load_data(config, kind)
    except OSError as error:
        raise UsageError(f"--data {config.data}: cannot read it ({error.strerror})") from None


def _load_data(config: Config, kind: str | None) -> Data:
    given = config.data
    if given == "":
        raise UsageError("--data: it names nothing; leave it out for the default")
    path = None if given in (None, "digits") else Path(given).expanduser()
    is_images = given == "digits" or (path is not None and path.is_dir() and holds_images(path))
    if given is None:
        is_images = kind == "images"
    elif kind is not None and is_images != (kind == "images"):
        what = "images" if is_images else "text"
        if path is not None and not path.exists():
            raise UsageError(f"--data {given}: no such file or folder")
        raise UsageError(f"--data {given}: {what}, and --model {config.model} is for {kind}")
    if not is_images:
        corpus = load_corpus(path)
        return Text(corpus, config.shape.block, config.seed)
    pictures = load_digits() if path is None else load_folder(path, config.shape.image_size)
    return Images(pictures, config.seed)


@dataclass
class TrainingWindows:
    """Every training window in a fixed random order, addressed by how many were taken before.

    An epoch reads every window of ``block`` bytes once, shuffled; the next epoch shuffles again,
    cut at other places. The order is a function of the seed alone, so one number, the position,
    is the whole state, and it means the same for any number of ranks.

    Args:
        text: 1-D uint8.
        block: Bytes per window.
        seed: Fixes the order.
    """

    text: Tensor
    block: int
    seed: int
    _epoch: int = field(default=-1, init=False)
    _starts: Tensor = field(default_factory=lambda: torch.empty(0), init=False)

    def __len__(self) -> int:
        """Windows in one epoch; one fewer than fit, as the first may start late."""
        return max(0, len(self.text) // self.block - 1)

    def take(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` windows from ``position`` on, and what follows each of their bytes.

        Returns:
            Two int64 tensors of shape (count, block).
        """
        starts = torch.stack([self._start(position + i) for i in range(count)])
        return _windows(self.text, starts, self.block)

    def _start(self, position: int) -> Tensor:
        epoch, place = divmod(position, len(self))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            offset = torch.randint(self.block, (1,), generator=generator)
            self._starts = torch.randperm(len(self), generator=generator) * self.block + offset
            self._epoch = epoch
        return self._starts[place]


def validation_windows(text: Tensor, block: int, count: int) -> tuple[Tensor, Tensor]:
    """Return up to ``count`` windows spread evenly over the text, none overlapping another.

    Returns:
        Two int64 tensors of shape (windows, block): bytes, and what follows each of them.
    """
    available = (len(text) - 1) // block
    count = min(count, available)
    starts = torch.arange(count) * available // count * block
    return _windows(text, starts, block)


def _windows(text: Tensor, starts: Tensor, block: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(block + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class Text:
    """Windows of bytes; the target of each byte is the byte that follows it."""

    kind = "text"
    classes = 256

    def __init__(self, corpus: Corpus, block: int, seed: int) -> None:
        self.corpus = corpus
        self.tokens = block
        self.windows = TrainingWindows(corpus.train, block, seed)

    @property
    def name(self) -> str:
        """The corpus's."""
        return self.corpus.name

    @property
    def digest(self) -> str:
        """The corpus's."""
        return self.corpus.digest

    @cached_property
    def sample(self) -> Tensor:
        """The first window."""
        return self.take(0, 1)[0]

    def __len__(self) -> int:
        return len(self.windows)

    def take(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Return two int64 tensors of shape (count, block)."""
        return self.windows.take(position, count)

    def validation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return two int64 tensors of shape (windows, block), of the held-out text."""
        return validation_windows(self.corpus.validation, self.tokens, count)

    def sizes(self) -> tuple[str, str]:
        """Return megabytes or kilobytes."""
        train, held_out = len(self.corpus.train), len(self.corpus.validation)
        return _size(train), _size(held_out)

    def check(self, config: Config) -> None:
        """Refuse a text too short for one window of validation or one batch of training.

        Raises:
            UsageError: Naming the flag and what there is.
        """
        if len(self.corpus.validation) <= self.tokens:
            raise UsageError(
                f"--block {self.tokens}: the last tenth of {self.name}, which is held out, has"
                f" {len(self.corpus.validation)} bytes; pass a --block below that, or more text"
            )
        if config.batch > len(self):
            raise UsageError(
                f"--batch {config.batch}: {self.name} has {len(self)} training windows of"
                f" {self.tokens} bytes"
            )


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


class Images:
    """Pictures of equal size; the target of each is its class. The last tenth is held out."""

    kind = "images"
    tokens = 1

    def __init__(self, pictures: Pictures, seed: int) -> None:
        self.name = pictures.name
        self.pictures = pictures
        self.seed = seed
        self.classes = len(pictures.classes)
        self.held_out = math.ceil(len(pictures.labels) / 10)
        self.digest = hashlib.blake2b(
            pictures.pixels.numpy().tobytes() + pictures.labels.numpy().tobytes(), digest_size=16
        ).hexdigest()
        self._epoch = -1
        self._order = torch.empty(0)

    @cached_property
    def sample(self) -> Tensor:
        """The first picture."""
        return self.take(0, 1)[0]

    def __len__(self) -> int:
        return len(self.pictures.labels) - self.held_out

    def take(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Return float32 (count, channels, height, width) and int64 (count,)."""
        return self._pictures(torch.stack([self._place(position + i) for i in range(count)]))

    def validation(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the same of the held-out pictures."""
        return self._pictures(torch.arange(len(self), len(self) + min(count, self.held_out)))

    def sizes(self) -> tuple[str, str]:
        """Return how many pictures."""
        return f"{len(self)} in {self.classes} classes", f"{self.held_out}"

    def check(self, config: Config) -> None:
        """Refuse a batch larger than an epoch.

        Raises:
            UsageError: Naming the flag and what there is.
        """
        if config.batch > len(self):
            raise UsageError(f"--batch {config.batch}: {self.name} has {len(self)} to train on")

    def _place(self, position: int) -> Tensor:
        epoch, place = divmod(position, len(self))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            self._order = torch.randperm(len(self), generator=generator)
            self._epoch = epoch
        return self._order[place]

    def _pictures(self, places: Tensor) -> tuple[Tensor, Tensor]:
        pixels = self.pictures.pixels[places].float() / (0.5 * self.pictures.white) - 1.0
        return pixels, self.pictures.labels[places]

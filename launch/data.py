"""What is trained on: bytes, tokens or datasets of the user's own, and which example comes when."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from launch.config import Config, UsageError, load_own, require

# What distributions put among the standard library, and what they leave out of it.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text; the target of each token is the token that follows it.

    Args:
        tokens: 1-D integers, in memory or memory-mapped.
        block: Tokens in a window.
    """

    def __init__(self, tokens: np.ndarray[Any, Any], block: int) -> None:
        self.tokens = tokens
        self.block = block

    def __len__(self) -> int:
        return int(max(0, len(self.tokens) - 1) // self.block)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block
        window = torch.from_numpy(self.tokens[start : start + self.block + 1].astype(np.int64))
        return window[:-1], window[1:]


@dataclass(frozen=True)
class Data:
    """Examples to train on, and held-out ones.

    Attributes:
        name: What it is, for people.
        train: What is trained on: pairs of an input and its target, as torch's datasets have them.
        held_out: What is not.
        classes: How many classes, or tokens, there are to choose from.
        encode: From text to tokens, where the data are text.
        decode: Back.
        of_bytes: Whether each token is a byte, whose loss is known in bits.
    """

    name: str
    train: Any
    held_out: Any
    classes: int
    encode: Callable[[str], list[int]] | None = None
    decode: Callable[[list[int]], str] | None = None
    of_bytes: bool = False

    @cached_property
    def targets(self) -> int:
        """How many targets one example has."""
        return int(self.train[0][1].numel())


@dataclass(frozen=True)
class Order(Sampler[list[int]]):
    """Which examples a rank's microbatches have, from a position on: every epoch another shuffle.

    The order is a function of the seed alone, so that one integer, how many examples all ranks
    have read, is the whole state, and means the same on any number of ranks.

    Args:
        length: Examples in an epoch.
        seed: Fixes the order.
        position: Examples read before, over all ranks.
        count: Examples in one microbatch of one rank.
        rank: This rank among those that read different examples.
        world: How many of those there are.
    """

    length: int
    seed: int
    position: int
    count: int
    rank: int = 0
    world: int = 1

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = -1, torch.empty(0)
        at = self.position + self.rank * self.count
        while True:
            found = []
            for place in range(at, at + self.count):
                if place // self.length != epoch:
                    epoch = place // self.length
                    generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
                    order = torch.randperm(self.length, generator=generator)
                found.append(int(order[place % self.length]))
            yield found
            at += self.world * self.count


def batches(
    examples: Any, order: Order, device: torch.device, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a rank's microbatches on its device; the copy there is not waited for."""
    loader: Any = DataLoader(
        examples,
        batch_sampler=order,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else it draws from the one that dropout goes on with
    )
    for inputs, targets in loader:
        yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


# -- what --data names -----------------------------------------------------------------------------


def load_data(config: Config) -> Data:
    """Read what ``--data`` names.

    Raises:
        UsageError: There is nothing to read, or too little.
    """
    try:
        data = _load(config)
    except OSError as error:
        raise UsageError(f"--data {config.data}: cannot read it ({error.strerror})") from None
    for examples, what, needed in (
        (data.train, "train on", config.batch),
        (data.held_out, "hold out", 1),
    ):
        sizes = f"--batch {config.batch} of --block {config.block} needs {needed}"
        there = f"{data.name} has {len(examples)} examples to {what}"
        require(len(examples) >= needed, f"--data: {there}, and {sizes}; take smaller ones")
    return data


def _load(config: Config) -> Data:
    name = config.data
    path = None if name is None else Path(name).expanduser()
    if name is not None and path is not None and not path.exists():
        require(":" in name, f"--data {name}: no such file or folder")
        return _own(name)
    if path is not None and (path.suffix == ".bin" or (path / "train.bin").exists()):
        return _tokens(path, config)
    return _text(path, config)


def _own(name: str) -> Data:
    found = load_own("--data", name)()
    right = isinstance(found, tuple) and len(found) == 3
    require(right, f"--data {name}: it must return (train, held out, number of classes)")
    return Data(name, *found)


def _tokens(path: Path, config: Config) -> Data:
    """NanoGPT's files: nothing but tokens, one after the other."""
    folder = path if path.is_dir() else path.parent
    train = np.memmap(folder / "train.bin" if path.is_dir() else path, config.token_dtype, "r")
    if path.is_dir() and (folder / "val.bin").exists():
        held_out = np.memmap(folder / "val.bin", config.token_dtype, "r")
    else:
        train, held_out = _split(train)
    if config.tokenizer is None:
        classes = 1 + max(int(part.max(initial=0)) for part in (train, held_out))
        return _windows(str(path), train, held_out, config.block, classes)
    encode, decode, classes = _tokenizer(config.tokenizer)
    return _windows(str(path), train, held_out, config.block, classes, encode, decode)


def _text(path: Path | None, config: Config) -> Data:
    if path is None:
        name, root = f"the Python {platform.python_version()} library", sysconfig.get_path("stdlib")
        files = [f for f in _walk(Path(root), _NOT_STDLIB) if f.suffix == ".py"]
    else:
        name, root = str(path), str(path if path.is_dir() else path.parent)
        files = list(_walk(path)) if path.is_dir() else [path]
    text = _join(Path(root), files)
    require(text, f"--data {config.data}: no text in it")
    if config.tokenizer is None:
        parts = _split(np.frombuffer(text, np.uint8))
        return _windows(name, *parts, config.block, 256, _to_bytes, _to_text, of_bytes=True)
    encode, decode, classes = _tokenizer(config.tokenizer)
    tokens = np.array(encode(text.decode(errors="replace")), np.uint32)
    return _windows(name, *_split(tokens), config.block, classes, encode, decode)


def _windows(
    name: str,
    train: np.ndarray[Any, Any],
    held_out: np.ndarray[Any, Any],
    block: int,
    classes: int,
    encode: Callable[[str], list[int]] | None = None,
    decode: Callable[[list[int]], str] | None = None,
    of_bytes: bool = False,
) -> Data:
    both = Windows(train, block), Windows(held_out, block)
    return Data(name, *both, classes, encode, decode, of_bytes)


def _split(tokens: Any) -> tuple[Any, Any]:
    cut = len(tokens) - len(tokens) // 10
    return tokens[:cut], tokens[cut:]


def _to_bytes(text: str) -> list[int]:
    return list(text.encode())


def _to_text(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def _tokenizer(path: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str], int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("--tokenizer: pip install -e '.[hf]' brings tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises no other class
        raise UsageError(f"--tokenizer {path}: {error}") from None
    return lambda text: tokenizer.encode(text).ids, tokenizer.decode, tokenizer.get_vocab_size()


def _walk(root: Path, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in without and s[0] != "."]
        yield from (Path(folder, name) for name in names if name[0] != ".")


def _join(root: Path, files: list[Path]) -> bytes:
    """Join texts in an order that their names alone decide, and that mixes folders."""

    def place(file: Path) -> bytes:
        return hashlib.sha256(str(file.relative_to(root)).encode(errors="replace")).digest()

    contents = [file.read_bytes() for file in sorted(files, key=place) if file.is_file()]
    # Git's own sign of a binary file is a zero among its first bytes.
    texts = (content for content in contents if content.strip() and b"\0" not in content[:8000])
    return b"\0".join(dict.fromkeys(texts))

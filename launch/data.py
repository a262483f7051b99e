"""What is trained on: bytes, tokens or datasets of the user's own, and which example comes when."""

import hashlib
import importlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from launch.config import Config
from launch.stop import die_with_parent
from launch.usage import UsageError, load_own, require

Tokens = np.ndarray[Any, Any]
# What distributions put among the standard library, and what they leave out of it.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text; the target of each token is the token that follows it.

    Args:
        tokens: 1-D integers, in memory or memory-mapped.
        block: Tokens in a window.
    """

    def __init__(self, tokens: Tokens, block: int) -> None:
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
        encode: From a str to a list of tokens, where the data are text; else None.
        decode: Back.
    """

    name: str
    train: Any
    held_out: Any
    classes: int
    encode: Any = None
    decode: Any = None

    @property
    def of_text(self) -> bool:
        """Whether what is read can be written as text, and back."""
        return bool(self.encode and self.decode)

    @property
    def of_bytes(self) -> bool:
        """Whether each token is a byte, whose loss is known in bits."""
        return self.decode is _to_text

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
        worker_init_fn=die_with_parent,
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
    except (OSError, ValueError) as error:
        raise UsageError(f"--data {config.data}: cannot read it ({error})") from None
    there = f"{data.name} has {len(data.train)} examples to train on, {len(data.held_out)} held out"
    sizes = f"--batch {config.batch} of --block {config.block} needs {config.batch} and 1"
    enough = len(data.train) >= config.batch and len(data.held_out) > 0
    require(enough, f"--data: {there}, and {sizes}; take smaller ones")
    return data


def _load(config: Config) -> Data:
    name, path = config.data, None if config.data is None else Path(config.data).expanduser()
    if name is not None and path is not None and not path.exists():
        require(":" in name, f"--data {name}: no such file or folder")
        found = load_own("--data", name)()
        right = isinstance(found, tuple) and len(found) == 3
        require(right, f"--data {name}: it must return (train, held out, number of classes)")
        return Data(name, *found)
    text_of = _tokenizer(config.tokenizer)
    if path is not None and (path.suffix == ".bin" or (path / "train.bin").exists()):
        train, held_out = _tokens(path, config.token_dtype)
        if config.tokenizer is None:  # they are no bytes; whose they are is not known
            largest = max(int(part.max(initial=0)) for part in (train, held_out))
            text_of = 1 + largest, None, None
    else:
        name, text = _text(path)
        require(text, f"--data {config.data}: no text in it")
        whole = np.frombuffer(text, np.uint8)
        if config.tokenizer is not None:
            whole = np.array(text_of[1](text.decode(errors="replace")), np.uint32)
        train, held_out = _split(whole)
    both = Windows(train, config.block), Windows(held_out, config.block)
    return Data(str(name), *both, *text_of)


def _tokens(path: Path, dtype: str) -> tuple[Tokens, Tokens]:
    """Map nanoGPT's files, which are tokens and nothing else."""
    files = [file for file in (path, path / "train.bin", path / "val.bin") if file.is_file()]
    parts = [np.memmap(file, dtype, "r") for file in files]
    return (parts[0], parts[1]) if len(parts) > 1 else _split(parts[0])


def _text(path: Path | None) -> tuple[str, bytes]:
    """Return what the texts are called, and all of them, one after the other."""
    if path is not None and path.is_file():
        return str(path), path.read_bytes()
    if path is not None:
        return str(path), _join(path, list(_walk(path)))
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, _NOT_STDLIB) if file.suffix == ".py"]
    return f"the Python {platform.python_version()} library", _join(root, files)


def _split(tokens: Tokens) -> tuple[Tokens, Tokens]:
    cut = len(tokens) - len(tokens) // 10
    return tokens[:cut], tokens[cut:]


def _tokenizer(path: Path | None) -> tuple[int, Any, Any]:
    """Return how many tokens there are, and what makes them of text, and text of them."""
    if path is None:
        return 256, _to_bytes, _to_text
    try:
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))
    except ImportError:
        raise UsageError("--tokenizer: pip install -e '.[hf]' brings tokenizers") from None
    except Exception as error:  # it raises no other class
        raise UsageError(f"--tokenizer {path}: {error}") from None
    return tokenizer.get_vocab_size(), lambda text: tokenizer.encode(text).ids, tokenizer.decode


def _to_bytes(text: str) -> list[int]:
    return list(text.encode())


def _to_text(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


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

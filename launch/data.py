"""What is trained on: bytes, tokens or datasets of the user's own, and which example comes when."""

import functools
import hashlib
import importlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate

from launch.config import Config
from launch.program import convert_to_usage_error, die_with_parent, import_object, require

Tokens = np.ndarray[Any, Any]
# What distributions put among the standard library, and what they leave out of it.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# Which entry of an example that is a dict is its target.
_TARGETS = ("labels", "label", "targets", "target")


@dataclass(frozen=True, eq=False)
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text; the target of each token is the token that follows it.

    Attributes:
        tokens: 1-D integers, in memory or memory-mapped.
        block: Tokens in a window.
    """

    tokens: Tokens
    block: int

    def __len__(self) -> int:
        return int(max(0, len(self.tokens) - 1) // self.block)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block
        window = torch.from_numpy(self.tokens[start : start + self.block + 1].astype(np.int64))
        return window[:-1], window[1:]


@dataclass(frozen=True)
class Batch:
    """Examples, one after the other in each tensor.

    Attributes:
        inputs: What the model is called with, by position.
        named: The same by name.
        targets: What it should return.
    """

    inputs: tuple[Any, ...]
    named: Mapping[str, Any]
    targets: Tensor

    @classmethod
    def of(cls, collated: Any, device: torch.device) -> Self:
        """Tell inputs and targets apart, and move them; the copy is not waited for.

        The target is the last entry of a tuple or a named tuple, and ``labels``, ``label``,
        ``targets`` or ``target`` of a dict. One input is handed over by position, and several of a
        dict by name.

        Raises:
            UsageError: They are no such examples.
        """
        collated = tree_map_only(Tensor, lambda each: each.to(device, non_blocking=True), collated)
        if isinstance(collated, Mapping):
            name = next((name for name in _TARGETS if name in collated), None)
            require(name, f"--data: an example has {', '.join(collated)}; call its target 'labels'")
            inputs = {key: value for key, value in collated.items() if key != name}
            one = len(inputs) == 1
            return cls(tuple(inputs.values()) if one else (), {} if one else inputs, collated[name])
        pair = isinstance(collated, list | tuple) and len(collated) > 1
        require(pair, "--data: an example must be (input, target), or a dict with 'labels'")
        return cls((*collated[:-1],), {}, collated[-1])


@dataclass(frozen=True)
class Text:
    """How text becomes tokens and tokens text.

    Attributes:
        classes: How many tokens there are.
        encode: From a str to a list of tokens.
        decode: Back.
    """

    classes: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


@dataclass(frozen=True)
class Data:
    """Examples to train on, and held-out ones.

    Attributes:
        name: What it is, for people.
        train: What is trained on: a dataset of examples, which `Batch.of` takes apart.
        held_out: What is not.
        classes: How many classes, or tokens, there are to choose from.
        text: How its tokens are text, where that is known.
    """

    name: str
    train: Any
    held_out: Any
    classes: int
    text: Text | None = None

    def first(self, device: torch.device) -> Batch:
        """Return a batch of the first example: what a batch looks like."""
        # A run that goes on draws the numbers of one that did not stop.
        with torch.random.fork_rng([]):
            return Batch.of(default_collate([self.train[0]]), device)


@functools.lru_cache(maxsize=2)
def _shuffled(length: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    return torch.randperm(length, generator=generator)


def order(
    length: int, seed: int, position: int, count: int, rank: int = 0, world: int = 1
) -> Iterator[list[int]]:
    """Yield the examples of a rank's microbatches, from a position on: every epoch another shuffle.

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
    for start in itertools.count(position + rank * count, world * count):
        places = (divmod(place, length) for place in range(start, start + count))
        yield [int(_shuffled(length, seed, epoch)[place]) for epoch, place in places]


def batches(
    examples: Any, chosen: Iterable[list[int]], device: torch.device, workers: int = 0
) -> Iterator[Batch]:
    """Yield the batches of chosen examples on a device."""
    loader: Any = DataLoader(
        examples,
        batch_sampler=chosen,
        num_workers=workers,
        worker_init_fn=die_with_parent,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else it draws from the one that dropout goes on with
    )
    return (Batch.of(collated, device) for collated in loader)


# -- what --data names -----------------------------------------------------------------------------


def load_data(config: Config) -> Data:
    """Read what ``--data`` names.

    Raises:
        UsageError: There is nothing to read, or too little.
    """
    named = f"--data {config.data}"
    path = None if config.data is None else Path(config.data)
    with convert_to_usage_error(f"{named}: cannot read it", OSError, ValueError, TypeError):
        if path is not None and not path.exists():
            data = _own(config.data or "")
        elif path is not None and (path.suffix == ".bin" or (path / "train.bin").exists()):
            data = _tokens(path, config)
        else:
            data = _text(path, config)
        train, held_out = len(data.train), len(data.held_out)
    sizes = f"{data.name} has {train} examples to train on, {held_out} held out"
    batch = config.global_batch_size
    needed = f"--global-batch-size {batch} needs {batch} examples of --seq-len {config.seq_len}"
    require(
        train >= batch and held_out > 0,
        f"--data: {sizes}. {needed} to train on, and 1 held-out example. Make a flag smaller.",
    )
    return data


def _own(name: str) -> Data:
    """Call a function of the user's own."""
    require(":" in name, f"--data {name}: no such file or folder")
    returned = import_object("--data", name)()
    right = isinstance(returned, tuple) and len(returned) == 3
    require(right, f"--data {name}: it must return (train, held out, number of classes)")
    return Data(name, *returned)


def _tokens(path: Path, config: Config) -> Data:
    """Map nanoGPT's files, which are tokens and nothing else; whose they are, --tokenizer says."""
    files = [file for file in (path, path / "train.bin", path / "val.bin") if file.is_file()]
    parts = [np.memmap(file, config.token_dtype, "r") for file in files]
    train, held_out = parts if len(parts) > 1 else _split(parts[0])
    text = load_text_codec(config.tokenizer) if config.tokenizer else None
    classes = text.classes if text else 1 + max(int(p.max(initial=0)) for p in (train, held_out))
    windows = Windows(train, config.seq_len), Windows(held_out, config.seq_len)
    return Data(str(path), *windows, classes, text)


def _text(path: Path | None, config: Config) -> Data:
    """Read a text, a folder of texts, or Python's standard library."""
    if path is None:
        name = f"the Python {platform.python_version()} library"
        content = _joined(Path(sysconfig.get_path("stdlib")), ".py", without=_NOT_STDLIB)
    else:
        name, content = str(path), path.read_bytes() if path.is_file() else _joined(path)
    require(content, f"--data {name}: no text in it")
    text = load_text_codec(config.tokenizer)
    train, held_out = _split(_encoded(content, config.tokenizer, text))
    windows = Windows(train, config.seq_len), Windows(held_out, config.seq_len)
    return Data(name, *windows, text.classes, text)


def _split(tokens: Tokens) -> tuple[Tokens, Tokens]:
    cut = len(tokens) - len(tokens) // 10
    return tokens[:cut], tokens[cut:]


def load_text_codec(tokenizer: Path | None) -> Text:
    """Return how a tokenizer.json reads text; without one, each byte is a token.

    Raises:
        UsageError: It cannot be read.
    """
    if tokenizer is None:
        return Text(
            classes=256,
            encode=lambda text: list(text.encode()),
            decode=lambda tokens: bytes(tokens).decode(errors="replace"),
        )
    with convert_to_usage_error(
        "--tokenizer: pip install -e '.[hf]' brings tokenizers", ImportError
    ):
        tokenizers: Any = importlib.import_module("tokenizers")
    with convert_to_usage_error(f"--tokenizer {tokenizer}", Exception):  # it raises no other class
        read = tokenizers.Tokenizer.from_file(str(tokenizer))
    return Text(read.get_vocab_size(), lambda text: list(read.encode(text).ids), read.decode)


def _encoded(content: bytes, tokenizer: Path | None, text: Text) -> Tokens:
    """Return the tokens of texts; a tokenizer's are kept, by the first process that makes them."""
    if tokenizer is None:
        return np.frombuffer(content, np.uint8)
    digest = hashlib.sha256(tokenizer.read_bytes() + b"\0" + content).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    path = cache / "distamp" / "tokens" / f"{digest}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # the others wait
        if not path.exists():
            tokens = np.array(text.encode(content.decode(errors="replace")), np.uint32)
            tokens.tofile(path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
    return np.memmap(path, np.uint32, "r")


def _joined(root: Path, suffix: str = "", without: Iterable[str] = ()) -> bytes:
    """Join the texts of a folder in an order that their names alone decide, and that mixes folders.

    Hidden files, what is there twice, and binary files are left out; git's own sign of those is a
    zero among their first bytes.
    """
    names: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in without and name[0] != "."]
        shown = [name for name in files if name.endswith(suffix) and name[0] != "."]
        names += [Path(folder, name).relative_to(root) for name in shown]
    names.sort(key=lambda name: hashlib.sha256(str(name).encode(errors="replace")).digest())
    contents = [(root / name).read_bytes() for name in names if (root / name).is_file()]
    texts = (content for content in contents if content.strip() and b"\0" not in content[:8000])
    return b"\0".join(dict.fromkeys(texts))

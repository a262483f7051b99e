"""What is trained on: bytes, tokens or datasets of the user's own, and which example comes when."""

import fcntl
import hashlib
import importlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from launch.config import Config
from launch.stop import die_with_parent
from launch.usage import UsageError, load_own, refusing, require

Tokens = np.ndarray[Any, Any]
# What distributions put among the standard library, and what they leave out of it.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# Which entry of an example that is a dict is its target.
_TARGETS = ("labels", "label", "targets", "target")


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
    def of(cls, examples: list[Any], device: torch.device) -> Self:
        """Put examples together; see `split`."""
        return cls.split(default_collate(examples), device)

    @classmethod
    def split(cls, collated: Any, device: torch.device) -> Self:
        """Tell inputs and targets apart.

        The target is the last entry of a tuple or a named tuple, and ``labels``, ``label``,
        ``targets`` or ``target`` of a dict. One input is handed over by position, and several of a
        dict by name.

        Raises:
            UsageError: They are no such examples.
        """
        collated = _to(collated, device)
        if isinstance(collated, Mapping):
            name = next((name for name in _TARGETS if name in collated), None)
            require(name, f"--data: an example has {', '.join(collated)}; call its target 'labels'")
            inputs = {key: value for key, value in collated.items() if key != name}
            one = len(inputs) == 1
            return cls(tuple(inputs.values()) if one else (), {} if one else inputs, collated[name])
        pair = isinstance(collated, list | tuple) and len(collated) > 1
        require(pair, "--data: an example must be (input, target), or a dict with 'labels'")
        return cls((*collated[:-1],), {}, collated[-1])


def _to(collated: Any, device: torch.device) -> Any:
    """Move what a batch holds; the copy is not waited for."""
    if isinstance(collated, Tensor):
        return collated.to(device, non_blocking=True)
    if isinstance(collated, Mapping):
        return {key: _to(value, device) for key, value in collated.items()}
    if isinstance(collated, list | tuple):
        return [_to(value, device) for value in collated]
    return collated


@dataclass(frozen=True)
class Text:
    """How text becomes tokens and tokens text.

    Attributes:
        classes: How many tokens there are.
        encode: From a str to a list of tokens.
        decode: Back.
        of_bytes: Whether each token is a byte, whose loss is known in bits.
    """

    classes: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    of_bytes: bool = False


@dataclass(frozen=True)
class Data:
    """Examples to train on, and held-out ones.

    Attributes:
        name: What it is, for people.
        train: What is trained on: a dataset of examples, which `Batch.split` takes apart.
        held_out: What is not.
        classes: How many classes, or tokens, there are to choose from.
        text: How its tokens are text, where that is known.
    """

    name: str
    train: Any
    held_out: Any
    classes: int
    text: Text | None = None

    @cached_property
    def targets(self) -> int:
        """How many targets one example has."""
        return Batch.of([self.train[0]], torch.device("cpu")).targets.numel()


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
        first = self.position + self.rank * self.count
        while True:
            microbatch = []
            for place in range(first, first + self.count):
                if place // self.length != epoch:
                    epoch = place // self.length
                    generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
                    order = torch.randperm(self.length, generator=generator)
                microbatch.append(int(order[place % self.length]))
            yield microbatch
            first += self.world * self.count


def batches(examples: Any, order: Order, device: torch.device, workers: int) -> Iterator[Batch]:
    """Yield a rank's microbatches on its device; the copy there is not waited for."""
    loader: Any = DataLoader(
        examples,
        batch_sampler=order,
        num_workers=workers,
        worker_init_fn=die_with_parent,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else it draws from the one that dropout goes on with
    )
    for collated in loader:
        yield Batch.split(collated, device)


# -- what --data names -----------------------------------------------------------------------------


def load_data(config: Config) -> Data:
    """Read what ``--data`` names.

    Raises:
        UsageError: There is nothing to read, or too little.
    """
    with refusing(f"--data {config.data}: cannot read it", OSError, ValueError):
        data = _load(config)
    sized = all(hasattr(part, "__len__") for part in (data.train, data.held_out))
    require(sized, f"--data {config.data}: its datasets must have a length, and be read by index")
    sizes = f"{data.name} has {len(data.train)} examples to train on, {len(data.held_out)} held out"
    needed = f"--batch {config.batch} of --block {config.block} needs {config.batch} and 1"
    enough = len(data.train) >= config.batch and len(data.held_out) > 0
    require(enough, f"--data: {sizes}, and {needed}; take smaller ones")
    return data


def _load(config: Config) -> Data:
    name, path = config.data, None if config.data is None else Path(config.data).expanduser()
    if name is not None and path is not None and not path.exists():
        require(":" in name, f"--data {name}: no such file or folder")
        with refusing(f"--data {name}", TypeError):
            returned = load_own("--data", name)()
        right = isinstance(returned, tuple) and len(returned) == 3
        require(right, f"--data {name}: it must return (train, held out, number of classes)")
        return Data(name, *returned)
    text: Text | None = text_of(config.tokenizer)
    if path is not None and (path.suffix == ".bin" or (path / "train.bin").exists()):
        name, (train, held_out) = str(path), _tokens(path, config.token_dtype)
        if config.tokenizer is None:  # they are no bytes; whose they are is not known
            text = None
    else:
        name, content = _content(path)
        require(content, f"--data {config.data}: no text in it")
        train, held_out = _split(_encoded(content, config.tokenizer))
    classes = text.classes if text else 1 + max(int(p.max(initial=0)) for p in (train, held_out))
    parts = Windows(train, config.block), Windows(held_out, config.block)
    return Data(name, *parts, classes, text)


def _tokens(path: Path, dtype: str) -> tuple[Tokens, Tokens]:
    """Map nanoGPT's files, which are tokens and nothing else."""
    files = [file for file in (path, path / "train.bin", path / "val.bin") if file.is_file()]
    parts = [np.memmap(file, dtype, "r") for file in files]
    return (parts[0], parts[1]) if len(parts) > 1 else _split(parts[0])


def _content(path: Path | None) -> tuple[str, bytes]:
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


def text_of(tokenizer: Path | None) -> Text:
    """Return how a tokenizer.json reads text; without one, each byte is a token.

    Raises:
        UsageError: It cannot be read.
    """
    if tokenizer is None:
        decode: Any = lambda tokens: bytes(tokens).decode(errors="replace")  # noqa: E731
        return Text(256, lambda text: list(text.encode()), decode, of_bytes=True)
    try:
        read: Any = importlib.import_module("tokenizers").Tokenizer.from_file(str(tokenizer))
    except ImportError:
        raise UsageError("--tokenizer: pip install -e '.[hf]' brings tokenizers") from None
    except Exception as error:  # it raises no other class
        raise UsageError(f"--tokenizer {tokenizer}: {error}") from None
    return Text(read.get_vocab_size(), lambda text: list(read.encode(text).ids), read.decode)


def _encoded(content: bytes, tokenizer: Path | None) -> Tokens:
    """Return the tokens of texts; a tokenizer's are kept, by the first process that makes them."""
    if tokenizer is None:
        return np.frombuffer(content, np.uint8)
    digest = hashlib.sha256(tokenizer.read_bytes() + b"\0" + content).hexdigest()[:32]
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "distamp" / "tokens"
    path = folder / f"{digest}.bin"
    folder.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait
        if not path.exists():
            tokens = text_of(tokenizer).encode(content.decode(errors="replace"))
            np.array(tokens, np.uint32).tofile(path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
    return np.memmap(path, np.uint32, "r")


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

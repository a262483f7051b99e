"""Data sets for training: bytes of text, tokens, or the user's own, in a reproducible order."""

import functools
import hashlib
import importlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
# Folders that some distributions put into the standard library, and others leave out.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# Keys under which an example that is a dict may have its target.
_TARGET_KEYS = ("labels", "label", "targets", "target")


@dataclass(frozen=True, eq=False)
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text. The target of each token is the token that follows it.

    Attributes:
        tokens: 1-D integers, in memory or memory-mapped.
        seq_len: Number of tokens in a window.
    """

    tokens: Tokens
    seq_len: int

    def __len__(self) -> int:
        num_targets = max(0, len(self.tokens) - 1)
        return int(num_targets // self.seq_len)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.seq_len
        end = start + self.seq_len + 1
        window = torch.from_numpy(self.tokens[start:end].astype(np.int64))
        return window[:-1], window[1:]


@dataclass(frozen=True)
class Batch:
    """Examples that are stacked in each tensor.

    Attributes:
        inputs: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        targets: The targets of the examples.
    """

    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: Tensor

    @classmethod
    def from_collated(cls, collated: Any, device: torch.device) -> Self:
        """Separate inputs from targets and start to copy them to a device.

        The target is the last entry of a tuple, or the entry ``labels``, ``label``, ``targets`` or
        ``target`` of a dict. A single input is passed to the model by position, and several inputs
        of a dict by name.

        Raises:
            UsageError: The examples have no such target.
        """
        on_device = tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), collated)
        if isinstance(on_device, Mapping):
            return cls._from_mapping(on_device)
        is_sequence = isinstance(on_device, list | tuple)
        require(
            is_sequence and len(on_device) > 1,
            "--data: an example must be (input, target), or a dict with 'labels'",
        )
        *inputs, targets = on_device
        return cls(tuple(inputs), {}, targets)

    @classmethod
    def _from_mapping(cls, collated: Mapping[str, Any]) -> Self:
        inputs = dict(collated)
        for key in _TARGET_KEYS:
            if key in inputs:
                targets = inputs.pop(key)
                break
        else:
            keys = ", ".join(collated)
            require(False, f"--data: an example has {keys}. Name its target 'labels'.")
        if len(inputs) == 1:
            return cls(tuple(inputs.values()), {}, targets)
        return cls((), inputs, targets)


@dataclass(frozen=True)
class TextCodec:
    """A conversion between text and tokens.

    Attributes:
        classes: Number of different tokens.
        encode: Converts a str to a list of tokens.
        decode: Converts a list of tokens to a str.
    """

    classes: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


@dataclass(frozen=True)
class Data:
    """A data set to train on, and a held-out one.

    Attributes:
        name: A name for the user.
        train: The data set to train on. `Batch.from_collated` describes its examples.
        held_out: The data set for evaluations.
        classes: Number of classes or tokens that a target can be.
        text: The conversion between its tokens and text, or None if it is unknown.
    """

    name: str
    train: Any
    held_out: Any
    classes: int
    text: TextCodec | None = None

    def first_batch(self, device: torch.device) -> Batch:
        """Return a batch of the first example, for the shapes and dtypes of a batch."""
        # The example may draw random numbers, and a resumed run must draw the same ones.
        with torch.random.fork_rng([]):
            collated = default_collate([self.train[0]])
        return Batch.from_collated(collated, device)


# -- the order of the examples ---------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _shuffle(length: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed((seed << 20) + epoch)
    return torch.randperm(length, generator=generator)


def batch_indices(
    length: int, seed: int, position: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[list[int]]:
    """Yield the indices of the examples in each microbatch of a rank, in a new order every epoch.

    The order depends only on the seed. The whole state of the data is therefore one integer: the
    number of examples that all ranks have read. It has the same meaning on any number of ranks.

    Args:
        length: Number of examples in an epoch.
        seed: Seed of the order.
        position: Number of examples that all ranks have read before.
        batch_size: Number of examples in one microbatch of one rank.
        rank: This rank, among the ranks that read different examples.
        world_size: Number of ranks that read different examples.
    """
    first = position + rank * batch_size
    for start in itertools.count(first, world_size * batch_size):
        indices = []
        for place in range(start, start + batch_size):
            epoch, index = divmod(place, length)
            indices.append(int(_shuffle(length, seed, epoch)[index]))
        yield indices


def load_batches(
    examples: Any, indices: Iterable[list[int]], device: torch.device, workers: int = 0
) -> Iterator[Batch]:
    """Yield the batches of these indices on a device."""
    loader: Any = DataLoader(
        examples,
        batch_sampler=indices,
        num_workers=workers,
        worker_init_fn=die_with_parent,
        pin_memory=device.type == "cuda",
        # By default the loader draws from the generator that dropout uses.
        generator=torch.Generator(),
    )
    return (Batch.from_collated(collated, device) for collated in loader)


# -- the sources of --data -------------------------------------------------------------------------


def load_data(config: Config) -> Data:
    """Read the data of ``--data``.

    Raises:
        UsageError: The data cannot be read, or are too few.
    """
    path = None if config.data is None else Path(config.data)
    subject = f"--data {config.data}: cannot read it"
    with convert_to_usage_error(subject, OSError, ValueError, TypeError):
        if path is None:
            data = _load_standard_library(config)
        elif not path.exists():
            data = _load_from_function(str(config.data))
        elif path.suffix == ".bin" or (path / "train.bin").exists():
            data = _load_token_files(path, config)
        else:
            data = _load_text(path, config)
    batch_size = config.global_batch_size
    train_size = len(data.train)
    held_out_size = len(data.held_out)
    require(
        train_size >= batch_size and held_out_size > 0,
        f"--data: {data.name} has {train_size} examples to train on, {held_out_size} held out. "
        f"--global-batch-size {batch_size} needs {batch_size} examples of --seq-len "
        f"{config.seq_len} to train on, and 1 held-out example. Make a flag smaller.",
    )
    return data


def _load_from_function(name: str) -> Data:
    """Call a function of the user."""
    require(":" in name, f"--data {name}: no such file or folder")
    result = import_object("--data", name)()
    require(
        isinstance(result, tuple) and len(result) == 3,
        f"--data {name}: it must return (train, held out, number of classes)",
    )
    return Data(name, *result)


def _load_token_files(path: Path, config: Config) -> Data:
    """Map the files of nanoGPT, which contain tokens only.

    The tokenizer of the tokens is that of ``--tokenizer``, if any.
    """
    if path.is_file():
        train, held_out = _split(np.memmap(path, config.token_dtype, "r"))
    elif (path / "val.bin").is_file():
        train = np.memmap(path / "train.bin", config.token_dtype, "r")
        held_out = np.memmap(path / "val.bin", config.token_dtype, "r")
    else:
        train, held_out = _split(np.memmap(path / "train.bin", config.token_dtype, "r"))
    codec = None
    if config.tokenizer is not None:
        codec = load_text_codec(config.tokenizer)
        classes = codec.classes
    else:
        largest_token = max(train.max(initial=0), held_out.max(initial=0))
        classes = 1 + int(largest_token)
    return _make_text_data(str(path), train, held_out, config.seq_len, classes, codec)


def _load_standard_library(config: Config) -> Data:
    """Read the source of Python's standard library."""
    name = f"the Python {platform.python_version()} library"
    content = _join_files(Path(sysconfig.get_path("stdlib")), ".py", _NOT_STDLIB)
    return _encode_text(name, content, config)


def _load_text(path: Path, config: Config) -> Data:
    """Read a text, or a folder of texts."""
    content = path.read_bytes() if path.is_file() else _join_files(path)
    return _encode_text(str(path), content, config)


def _encode_text(name: str, content: bytes, config: Config) -> Data:
    require(content, f"--data {name}: no text in it")
    codec = load_text_codec(config.tokenizer)
    if config.tokenizer is None:
        tokens: Tokens = np.frombuffer(content, np.uint8)
    else:
        tokens = _tokenize_once(content, config.tokenizer, codec)
    train, held_out = _split(tokens)
    return _make_text_data(name, train, held_out, config.seq_len, codec.classes, codec)


def _make_text_data(
    name: str,
    train: Tokens,
    held_out: Tokens,
    seq_len: int,
    classes: int,
    codec: TextCodec | None,
) -> Data:
    return Data(name, Windows(train, seq_len), Windows(held_out, seq_len), classes, codec)


def _split(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Hold out the last tenth."""
    num_train = len(tokens) - len(tokens) // 10
    return tokens[:num_train], tokens[num_train:]


def load_text_codec(tokenizer: Path | None) -> TextCodec:
    """Return the text conversion of a tokenizer.json; without one, each byte is a token.

    Raises:
        UsageError: The file cannot be read.
    """
    if tokenizer is None:
        return TextCodec(256, _encode_bytes, _decode_bytes)
    hint = "--tokenizer: pip install -e '.[hf]' brings tokenizers"
    with convert_to_usage_error(hint, ImportError):
        tokenizers: Any = importlib.import_module("tokenizers")
    # The tokenizers package raises plain Exception.
    with convert_to_usage_error(f"--tokenizer {tokenizer}", Exception):
        loaded = tokenizers.Tokenizer.from_file(str(tokenizer))
    classes = loaded.get_vocab_size()
    return TextCodec(classes, lambda text: list(loaded.encode(text).ids), loaded.decode)


def _encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def _decode_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def _tokenize_once(content: bytes, tokenizer: Path, codec: TextCodec) -> Tokens:
    """Return the tokens of a text from the cache; the first process puts them there."""
    digest = hashlib.sha256(tokenizer.read_bytes() + b"\0" + content).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    path = cache / "distamp" / "tokens" / f"{digest}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Other processes wait here until the tokens are written.
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            text = content.decode(errors="replace")
            partial = path.with_suffix(".partial")
            np.array(codec.encode(text), np.uint32).tofile(partial)
            partial.replace(path)
    return np.memmap(path, np.uint32, "r")


def _join_files(root: Path, suffix: str = "", excluded_folders: Collection[str] = ()) -> bytes:
    """Join the texts of a folder in an order that mixes its folders and depends on names only.

    Hidden files, second copies of a text and binary files are left out. Git recognises a binary
    file in the same way, by a zero among its first bytes.
    """
    paths = []
    for folder, subfolders, files in os.walk(root):
        # os.walk visits only the folders that are left in this list.
        subfolders[:] = [name for name in subfolders if name not in excluded_folders]
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in files:
            if name.endswith(suffix) and not name.startswith("."):
                paths.append(Path(folder, name).relative_to(root))
    paths.sort(key=_name_digest)
    # A dict keeps the first copy of each text, in order.
    texts: dict[bytes, None] = {}
    for path in paths:
        if not (root / path).is_file():
            continue
        text = (root / path).read_bytes()
        is_binary = b"\0" in text[:8000]
        if text.strip() and not is_binary:
            texts[text] = None
    return b"\0".join(texts)


def _name_digest(path: Path) -> bytes:
    name = str(path).encode(errors="replace")
    return hashlib.sha256(name).digest()

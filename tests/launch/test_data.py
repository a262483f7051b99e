"""What is read, what is held out, and which window comes when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.corpus import load_corpus
from launch.data import TrainingWindows, validation_windows
from launch.errors import UsageError


def _folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def _text(root: Path) -> bytes:
    corpus = load_corpus(root)
    return bytes(torch.cat([corpus.train, corpus.validation]).tolist())


def test_standard_library_is_megabytes_of_python_and_nobody_elses_packages():
    corpus = load_corpus(None)
    text = bytes(corpus.train.numpy())
    assert len(text) > 5e6
    assert b"class OrderedDict(dict):" in text + bytes(corpus.validation.numpy())
    assert b"class DistributedDataParallel" not in text


def test_last_tenth_is_held_out(tmp_path):
    content = bytes(range(32, 122)) * 10 + b"x" * 100
    corpus = load_corpus(_folder(tmp_path, {"a.txt": content}) / "a.txt")
    assert bytes(corpus.train.tolist()) == content[:900]
    assert bytes(corpus.validation.tolist()) == b"x" * 100


def test_order_of_files_depends_on_names_alone(tmp_path):
    files = {f"{i % 3}/{i}.txt": f"file {i};".encode() for i in range(20)}
    one = _text(_folder(tmp_path / "one", files))
    other = _text(_folder(tmp_path / "other", dict(reversed(files.items()))))
    assert one == other
    assert sorted(one.split(b"\0")) == sorted(files.values())
    assert one.split(b"\0") != sorted(files.values())


def test_copies_binaries_empty_and_hidden_files_are_left_out(tmp_path):
    files = {"a": b"once", "copy of a": b"once", "b": b"\x7fELF\0", "c": b" \n", ".git/d": b"no"}
    assert _text(_folder(tmp_path, files)) == b"once"


def test_a_users_own_tests_are_read(tmp_path):
    assert _text(_folder(tmp_path, {"tests/a.py": b"assert True"})) == b"assert True"


def test_unreadable_data_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no such file or folder"):
        load_corpus(tmp_path / "missing")


def test_digest_changes_with_the_text(tmp_path):
    one = load_corpus(_folder(tmp_path / "one", {"a": b"some text"}))
    other = load_corpus(_folder(tmp_path / "other", {"a": b"some test"}))
    assert one.digest != other.digest


def test_an_epoch_reads_every_window_once_and_the_next_shuffles_again():
    # Bytes count up, so that a window's first byte says where it starts.
    windows = TrainingWindows(torch.arange(250, dtype=torch.uint8), block=10, seed=3)
    tokens, targets = windows.take(0, 2 * len(windows))
    assert torch.equal(tokens + 1, targets)
    first, second = tokens[:, 0].split(len(windows))
    for epoch in (first, second):
        assert torch.equal(epoch.sort().values.diff(), torch.full((len(windows) - 1,), 10))
    assert first.tolist() != second.tolist()


def test_position_means_the_same_however_windows_are_taken():
    def windows() -> TrainingWindows:
        return TrainingWindows(torch.arange(250, dtype=torch.uint8), block=10, seed=3)

    whole = windows().take(0, 60)[0]
    parts = torch.cat([windows().take(first, 5)[0] for first in range(0, 60, 5)])
    assert torch.equal(whole, parts)


def test_seed_decides_the_order():
    text = torch.arange(250, dtype=torch.uint8)
    orders = {tuple(TrainingWindows(text, 10, seed).take(0, 20)[0][:, 0]) for seed in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize("count", [1, 7, 24, 1000])
def test_validation_windows_are_spread_and_do_not_overlap(count):
    tokens, targets = validation_windows(torch.arange(250, dtype=torch.uint8), 10, count)
    assert torch.equal(tokens + 1, targets)
    assert len(tokens) == min(count, 24)
    gaps = tokens[:, 0].diff()
    assert (gaps >= 10).all()
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 10

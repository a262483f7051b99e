"""Fixtures of the launcher: a text to train on, and a tokenizer for it."""

from pathlib import Path

import pytest

from tests.launch.jobs import text_file


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text"))


@pytest.fixture
def tokenizer(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer file in ``tmp_path``. The cache of its tokens is in ``tmp_path`` too."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer.train([str(text)], trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path

"""The text that runs are trained on, and a tokenizer for it."""

from pathlib import Path

import pytest

from tests.launch.jobs import text_file


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text"))


@pytest.fixture
def tokenizer(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in ``tmp_path``; its tokens are kept beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train([str(text)], tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False))
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"

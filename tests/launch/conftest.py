"""The text that runs are trained on."""

from pathlib import Path

import pytest

from tests.launch.jobs import text_file


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text"))

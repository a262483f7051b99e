"""The pages about accelerators name tests that there are."""

import re
from pathlib import Path

import pytest

from tests.simulated.test_planted_faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["nccl.md", "accelerators.md"])
def test_every_test_that_a_page_names_is_there(page):
    text = (ROOT / "docs" / page).read_text()
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named
    assert named <= there
    files = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert all((ROOT / file).exists() for file in files)


def test_every_planted_fault_that_the_page_names_is_there():
    named = re.findall(r"planted: `(\w+)`", (ROOT / "docs" / "nccl.md").read_text())
    assert len(named) == 4
    assert set(named) <= {fault.__name__ for fault in FAULTS}

"""The page about accelerators names tests that there are."""

import re
from pathlib import Path

from tests.simulated.test_planted_faults import FAULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "accelerators.md").read_text()


def test_every_test_that_the_page_names_is_there():
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named
    assert named <= there
    files = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert all((ROOT / file).exists() for file in files)


def test_every_planted_fault_that_the_page_names_is_there():
    named = re.findall(r"planted: `(\w+)`", PAGE)
    assert len(named) == 4
    assert set(named) <= {fault.__name__ for fault in FAULTS}

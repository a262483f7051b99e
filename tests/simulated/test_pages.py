"""The page about accelerators names tests, and faults planted by them, that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_and_planted_fault_that_the_page_names_is_there():
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    page = (ROOT / "docs" / "accelerators.md").read_text()
    tests = set(re.findall(r"`(test_\w+)`", page))
    planted = set(re.findall(r"planted: `(\w+)`", page))
    assert tests
    assert len(planted) == 4
    assert tests | planted <= set(re.findall(r"^def (\w+)", sources, re.MULTILINE))
    assert all((ROOT / file).exists() for file in re.findall(r"`(tests/[\w/]+\.py)`", page))

"""Words that were retired stay so: in the docs, in docstrings and in messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Everywhere: these had a meaning of this project's own.
RETIRED = ["bequeath", "heir", "heirs", "kin", "mourn", "mourned", "owed", "owes", "roomy"]
RETIRED += ["settle", "settled", "settles", "stranger", "strangers", "teller", "tellers"]
RETIRED += ["whereabouts"]
# On the pages also these, which say less than the word of the field.
RETIRED_ON_PAGES = [*RETIRED, "anew", "apart", "held", "met", "readers", "room", "said", "told"]
PLAIN_ENGLISH = re.compile(r"held[- ]out")
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(path for top in ("distamp", "launch") for path in (ROOT / top).rglob("*.py"))


def prose(page: Path) -> str:
    """A page without its code, its tables of retired words and its links' targets."""
    text = page.read_text()
    text = re.sub(
        r"```.*?```|`[^`\n]*`|^    .*$|\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE
    )
    if page.name == "CONTRIBUTING.md":
        text = re.sub(r"\| Retired \|.*?\n\n", "", text, flags=re.DOTALL)
    return PLAIN_ENGLISH.sub("", text)


def texts_of(module: Path) -> Iterator[str]:
    """Docstrings and messages of a module: its strings of more than one word."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def found(text: str, words: list[str]) -> list[str]:
    pattern = re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE)
    return [text[max(0, m.start() - 30) : m.end() + 30].replace("\n", " ") for m in
            pattern.finditer(text)]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_retired_word(page: Path) -> None:
    assert found(prose(page), RETIRED_ON_PAGES) == []


def test_docstrings_and_messages_have_none() -> None:
    wrong = {
        str(module.relative_to(ROOT)): words
        for module in MODULES
        if (words := [each for text in texts_of(module) for each in found(text, RETIRED)])
    }
    assert wrong == {}


def test_the_list_for_writers_has_every_retired_word() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| Retired | Write |")[1].split("\n\n")[0]
    missing = [word for word in RETIRED_ON_PAGES if word.rstrip("s") not in table]
    assert [w for w in missing if w not in ("mourned", "settled", "owes")] == []


def test_a_retired_word_is_found() -> None:
    assert found("The owed mean is settled.", RETIRED) != []
    assert found("withheld, toolroom, akin", RETIRED_ON_PAGES) == []

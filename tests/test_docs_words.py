"""The docs stay short, their figures are those of the results, and what they name is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs_code import ROOT
from tests.docs_words import (
    DOCS,
    LONGEST,
    MOST_LONG,
    MOST_WORDS,
    long_sentences,
    pages,
    sentences,
    words,
)

PAGES = [ROOT / "README.md", *pages()]
RESULTS = DOCS / "results"
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s#]+\.md)(?:#([^)\s]+))?\)")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
_QUARTILES = re.compile(r"\d\.\d+ \[\d")
_HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)


def test_the_docs_are_short() -> None:
    assert sum(map(words, pages())) <= MOST_WORDS, "python -m tests.docs_words shows where"


def test_sentences_are_short() -> None:
    long = [each for page in pages() for each in long_sentences(page)]
    every = sum(len(sentences(page)) for page in pages())
    assert len(long) <= MOST_LONG * every, f"over {LONGEST} words: {long}"


def test_a_sentence_is_found_where_it_ends(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n\nOne [link](x.md). Two e.g. here\nand there? `Three`: so.\n\n- Four\n- Five"
        "\n\n![an image](x.svg)\n\n| a | table |\n\n```python\nx = 1. + 2.\n```\n\n    a command\n"
    )
    found = ["One link.", "Two e.g. here and there?", "`Three`: so.", "Four", "Five"]
    assert sentences(page) == found


def numbers(text: str) -> set[str]:
    return {each.replace(",", "") for each in _NUMBER.findall(text)}


def section(page: Path, anchor: str | None) -> str:
    """Return a page's text, or that under one heading of it."""
    text = page.read_text()
    if anchor is None:
        return text
    headings = list(_HEADING.finditer(text))
    for place, heading in enumerate(headings):
        if re.sub(r"[^\w\s-]", "", heading[2].lower()).strip().replace(" ", "-") == anchor:
            below = (h.start() for h in headings[place + 1 :] if len(h[1]) <= len(heading[1]))
            return text[heading.end() : next(below, len(text))]
    raise AssertionError(f"{page.name} has no #{anchor}")


def figures(page: Path) -> Iterator[tuple[str, Path, str | None]]:
    """Yield each link of a page to a result: what it says, which page, which section."""
    for label, target, anchor in _LINK.findall(page.read_text()):
        there = (page.parent / target).resolve()
        if there.parent == RESULTS:
            yield label, there, anchor or None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_figure_is_that_of_the_result_it_links_to(page: Path) -> None:
    differ = [
        f"{label!r}: no {number} in {result.name}{'#' + anchor if anchor else ''}"
        for label, result, anchor in figures(page)
        for number in sorted(numbers(label) - numbers(section(result, anchor)))
    ]
    assert differ == []


def test_figures_are_compared() -> None:
    found = [label for page in PAGES for label, _, _ in figures(page) if numbers(label)]
    assert len(found) > 30
    assert numbers("0.68 [0.66, 0.70] of 12,864, 61002 inf, 2.31e-04, 0.47 %, fp16") == {
        "0.68", "0.66", "0.70", "12864", "61002", "2.31e-04", "0.47",
    }  # fmt: skip


def test_a_measured_ratio_links_to_its_result() -> None:
    bare = {}
    for page in PAGES:
        text = _LINK.sub("", page.read_text())
        bare[page.name] = [line for line in text.splitlines() if _QUARTILES.search(line)]
    assert {name: lines for name, lines in bare.items() if lines} == {}


def test_each_claim_of_the_evidence_has_a_command_and_its_tests_are_there() -> None:
    text = (DOCS / "evidence.md").read_text()
    rows = [r for r in text.splitlines() if r.startswith("|") and re.search(r"\| \d{4}-", r)]
    assert len(rows) > 20
    assert [
        row for row in rows if not re.search(r"`[^`]*(?:python|make|torchrun) [^`]+`", row)
    ] == []
    named = re.findall(r"\btests/[\w/]+(?:\.py)?", text)
    assert len(named) > 10
    assert [each for each in named if not (ROOT / each).exists()] == []

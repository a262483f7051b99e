"""How long the docs are: ``python -m tests.docs_words``.

Words are those of ``wc -w``, code and tables included, of every page but docs/results, which
are dated outputs. Sentences are those of running text: no code, no tables, no headings.
"""

import re
from pathlib import Path

__all__ = ["LONGEST", "MOST_LONG", "MOST_WORDS", "long_sentences", "pages", "sentences", "words"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Words of all pages outside of docs/results.
MOST_WORDS = 30_000
#: A sentence of more words is long, and what share of all may be.
LONGEST, MOST_LONG = 25, 0.05

_BLOCK = re.compile(r"<!--.*?-->|^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LINE = re.compile(r"^(?: {4}(?! *[-*] )|\||#|:::|!!!).*$", re.MULTILINE)
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)\s]*\)")
_LINK = re.compile(r"\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\([^)\s]*\)(?:\{[^}]*\})?")
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +", re.MULTILINE)
_END = re.compile(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)[*_)\"']*\s+")


def pages() -> list[Path]:
    """Return the pages that are counted."""
    return [p for p in sorted(DOCS.rglob("*.md")) if DOCS / "results" not in p.parents]


def words(page: Path) -> int:
    """Return the words of a page, as ``wc -w`` counts them."""
    return len(page.read_text().split())


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page's running text."""
    text = _LINE.sub("\n\n", _BLOCK.sub("\n\n", page.read_text()))
    text = _LINK.sub(lambda match: match[1], _IMAGE.sub("", text))
    text = _ITEM.sub("\n\n", text)
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n", text)]
    return [sentence for each in paragraphs if each for sentence in _END.split(each)]


def long_sentences(page: Path) -> list[str]:
    """Return those of more than ``LONGEST`` words."""
    return [each for each in sentences(page) if len(each.split()) > LONGEST]


if __name__ == "__main__":
    print(" words  sentences  long")
    for page in sorted(pages(), key=words):
        row = f"{words(page):6,}  {len(sentences(page)):9,}  {len(long_sentences(page)):4}"
        print(f"{row}  {page.relative_to(ROOT)}")
    print(f"{sum(map(words, pages())):6,} words of all")

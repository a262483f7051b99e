"""Measure the English of the docs: ``python -m tests.docs_words [PAGE ...]`` prints every fault.

Each rule is a pattern over running text and table cells. Headings, code, and text in quotation
marks are left out. Pages of docs/results are dated outputs and are not measured.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.house_style import RELATIVE_PHRASE

__all__ = [
    "DOCS",
    "EXCEPTIONS",
    "MAX_PHRASES",
    "MAX_PHRASES_ON_A_PAGE",
    "PAGES",
    "broken_links",
    "count_phrases",
    "count_words",
    "faults",
    "paragraphs",
    "phrase_rate",
]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def _pages() -> list[Path]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    for page in sorted(DOCS.rglob("*.md")):
        if DOCS / "results" not in page.parents:
            pages.append(page)
    return pages


PAGES = _pages()
#: Relative phrases in 1,000 words over all pages.
MAX_PHRASES = 3.0
#: Relative phrases in 1,000 words on any page above 500 words.
MAX_PHRASES_ON_A_PAGE = 6.0
#: Pages with faults that were not rewritten yet. A page without faults may not be here.
EXCEPTIONS: frozenset[str] = frozenset()
_FENCE = re.compile(r"<!--.*?-->|^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_NOT_PROSE = re.compile(r"^(?: {4}(?! *(?:[-*]|\d+\.) )|#|:::|!!!|\|[-| :]+\|$).*$", re.MULTILINE)
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)\s]*\)")
_LINK = re.compile(r"\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\(([^)\s]*)\)(?:\{[^}]*\})?")
_INLINE_CODE = re.compile(r"`[^`]+`")
_QUOTE = re.compile(r'"[^"\n]{1,200}"')
_ITEM = re.compile(r"^ *(?:> ?)?(?:[-*]|\d+\.) +", re.MULTILINE)
_CELL = re.compile(r"(?<!\\)\|")
_END = re.compile(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)[*_)]*\s+")
_HEADING = re.compile(r"^#+ (.*?)(?: \{#([\w-]+)\})?$", re.MULTILINE)

_PROGRAM = (
    r"(?:CODE|distamp|torch|PyTorch|FSDP[12]?|DDP|NCCL|gloo"
    r"|(?:the|a|an|each|every|all|one|no) (?:\w+ )?(?:guard|scaler|hook|region|report|launcher|log"
    r"|program|trainer|ranks?|hosts?|message|error|table|level|replicas?|optimizers?|kernel|device"
    r"|tests?|contract|page|library))"
)
_SPEECH = (
    r"(?:asks?|asked|says?|said|tells?|told|knows?|knew|hears?|heard|meets?|met|parts?|parted"
    r"|welcomes?|forgets?|forgot)"
)
#: Patterns over one sentence, by the sentence of the style guide that forbids them.
SENTENCE_RULES = {
    "opens with a relative or a bare pronoun": re.compile(
        r"^\W*(?:What|Where|Which|Whose|Whether|That|Of|Those)\b(?!.*\?\W*$)"
    ),
    "a pronoun without its noun": re.compile(
        r"^\W*(?:These|Those|Some|Each|Such|The same)"
        r"(?:,| (?:is|are|was|were|has|have|had|does|do|did|can|may|must|needs?|takes?|holds?|goes?"
        r"|works?|raises?|returns?|runs?|skips?|steps?)\b)"
        r"|[,;] so (?:is|are|does|do|has|have)\b"
    ),
    "a program that speaks or knows": re.compile(
        rf"\b{_PROGRAM} (?:\w+ly )?{_SPEECH}\b(?! of\b)", re.IGNORECASE
    ),
    "an idiom": re.compile(
        r"\bto the bit\b|\banew\b|\bbeside\b|\bbut for\b|\bin place of\b|\bever after\b|\bby hand\b"
        r"|\bas (?:it is|they are|it stands|they stand)\b(?! \w+ed\b)|\branks part\b"
        r"|\bstands? (?:in|on|there|here|under|beside)\b|\blays? over\b|\bhand(?:s|ed)? out\b"
        r"|\bmend(?:s|ed|ing)?\b",
        re.IGNORECASE,
    ),
}
#: A paragraph, list item or cell that begins with a pronoun, which has no noun before it.
_OPENING_PRONOUN = re.compile(r"^\W*(?:It|They|Its|Their)\b")


def paragraphs(page: Path) -> Iterator[str]:
    """Yield paragraphs, list items and table cells without headings, code, images and quotes."""
    text = _FENCE.sub("\n\n", page.read_text())
    text = _NOT_PROSE.sub("\n\n", text)
    text = _IMAGE.sub("", text)
    text = _LINK.sub(lambda match: match[1], text)
    text = _INLINE_CODE.sub("CODE", text)
    text = _QUOTE.sub("QUOTE", text)
    text = _ITEM.sub("\n\n", text)
    for block in re.split(r"\n\s*\n", text):
        if block.lstrip().startswith("|"):
            for cell in _CELL.split(block.replace("\n", " | ")):
                if cell.strip():
                    yield cell.strip()
        elif block.strip():
            yield " ".join(block.replace("\n> ", "\n").split())


def count_words(page: Path) -> int:
    """Count the words of a page's prose."""
    return sum(len(paragraph.split()) for paragraph in paragraphs(page))


def count_phrases(page: Path) -> int:
    """Count relative phrases in a page's prose."""
    return sum(len(RELATIVE_PHRASE.findall(paragraph)) for paragraph in paragraphs(page))


def phrase_rate(pages: list[Path]) -> float:
    """Return relative phrases in 1,000 words over some pages."""
    words = sum(map(count_words, pages))
    phrases = sum(map(count_phrases, pages))
    return 1000 * phrases / max(words, 1)


def faults(page: Path) -> list[str]:
    """Return the faults of a page, each with the rule that it breaks."""
    problems = []
    for paragraph in paragraphs(page):
        if _OPENING_PRONOUN.match(paragraph):
            problems.append(f"a paragraph that opens with a pronoun: {paragraph[:80]}")
        for sentence in _END.split(paragraph):
            for rule, pattern in SENTENCE_RULES.items():
                if pattern.search(sentence):
                    problems.append(f"{rule}: {sentence}")
    rate = phrase_rate([page])
    if count_words(page) > 500 and rate > MAX_PHRASES_ON_A_PAGE:
        problems.append(f"{rate:.1f} relative phrases in 1,000 words: {_phrases_of(page)}")
    return problems


def _phrases_of(page: Path) -> list[str]:
    """Return each relative phrase of a page with the words around it."""
    phrases = []
    for paragraph in paragraphs(page):
        for match in RELATIVE_PHRASE.finditer(paragraph):
            start = max(match.start() - 25, 0)
            phrases.append(paragraph[start : match.end() + 15])
    return phrases


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page whose file or heading does not exist."""
    broken = []
    text = _FENCE.sub("", page.read_text())
    for _, target in _LINK.findall(text):
        is_address = re.match(r"\w+:", target)
        if is_address or _is_generated(target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(f"no file: {target}")
        elif anchor and file.suffix == ".md" and anchor not in _anchors(file):
            broken.append(f"no heading: {target}")
    return broken


def _is_generated(target: str) -> bool:
    """Return whether the hook of the site writes the page from code (docs/site.py)."""
    return re.search(r"\b(?:launcher|command_line|ops)\.md", target) is not None


def _anchors(page: Path) -> set[str]:
    anchors = set()
    text = _FENCE.sub("", page.read_text())
    for title, name in _HEADING.findall(text):
        words = re.sub(r"[^\w\s-]", "", title.lower())
        anchors.add(re.sub(r"[-\s]+", "-", words.strip()))
        anchors.add(name)
    return anchors


def main(names: list[str]) -> None:
    """Print the faults of the pages with these names, or of all pages."""
    chosen_pages = [Path(name).resolve() for name in names] or PAGES
    for chosen_page in chosen_pages:
        for problem in [*faults(chosen_page), *broken_links(chosen_page)]:
            print(f"{chosen_page.relative_to(ROOT)}: {problem}")
    total_words = sum(map(count_words, chosen_pages))
    print(f"{phrase_rate(chosen_pages):.1f} relative phrases in {total_words:,} words")


if __name__ == "__main__":
    main(sys.argv[1:])

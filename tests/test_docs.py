"""README and docs: code runs, commands and links exist, English is plain, figures are results'."""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distamp.__main__ import parser
from launch.config import COMMAND as LAUNCHER
from tests.docs_code import (
    PAGES,
    ROOT,
    blocks_of,
    not_printed,
    output_of,
    ranks_of,
    run_page,
)
from tests.docs_words import (
    DOCS,
    EXCEPTIONS,
    MAX_PHRASES,
    broken_links,
    faults,
    phrase_rate,
)
from tests.docs_words import PAGES as PROSE
from tests.house_style import EXCEPTIONS as HOUSE_STYLE

HERE = [page for page in PAGES if any(b.is_run_here for b in blocks_of(page))]


@pytest.mark.parametrize(
    "page", [p for p in HERE if ranks_of(p) == 1], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_code_of_a_page_runs(page: Path) -> None:
    assert run_page(str(page)) == []


@pytest.mark.parametrize(
    "page", [p for p in HERE if ranks_of(p) == 2], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_code_of_a_page_for_two_ranks_runs_on_two(ranks2: Any, page: Path) -> None:
    assert ranks2.run(run_page, str(page)) == [[], []]


OUTPUTS = {
    block.how.removeprefix("output of: "): block.code
    for page in PAGES
    for block in blocks_of(page)
    if block.how.startswith("output of: ")
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_example_output_is_what_the_command_prints(command: str) -> None:
    printed = output_of(command)
    assert not_printed(OUTPUTS[command], printed) == [], printed


def test_each_output_says_what_prints_it() -> None:
    outputs = [b for page in PAGES for b in blocks_of(page) if not b.language]
    assert len(OUTPUTS) > 2
    assert all(re.match("printed$|output of: python ", b.how) for b in outputs)


def commands() -> list[str]:
    """Every command of a shell that a page shows."""
    found = []
    for page in PAGES:
        text = page.read_text()
        shells = [b.code for b in blocks_of(page) if b.language in ("console", "bash")]
        lines = "".join(shells).replace("\\\n", " ").splitlines()
        lines += re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        lines += re.findall(r"`((?:python|torchrun|make) [^`\n]+)`", text)
        found += lines
    return found


def test_commands_name_what_exists() -> None:
    faults = []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands():
        for module in re.findall(r"python\d? (?:-\w+ )*-m ([\w.]+)", line):
            if module.split(".")[0] in ("distamp", "launch", "benchmarks", "tests"):
                faults += [] if _is_module(module) else [f"no module {module}: {line}"]
        for script in re.findall(
            r"(?<!/)\b((?:launch|examples|benchmarks|docs)/[\w./]+\.(?:py|sh))", line
        ):
            faults += [] if (ROOT / script).is_file() else [f"no file {script}: {line}"]
        if line.startswith("make "):
            target = line.split()[1].strip("`")
            faults += [] if target in targets else [f"no target {target}: {line}"]
        faults += _wrong_flags(line)
    assert faults == []


def test_every_test_and_planted_fault_that_a_page_names_is_there() -> None:
    text = "".join(page.read_text() for page in PAGES)
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = {*re.findall(r"`(test_\w+)`", text), *re.findall(r"planted: `(\w+)`", text)}
    assert named - set(re.findall(r"^def (\w+)", sources, re.MULTILINE)) == set()
    files = re.findall(r"`(tests/[\w/]+\.\w+)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@functools.cache
def flags_of_the_launcher() -> str:
    """What its page of the reference says of them, which takes seconds to make."""
    return LAUNCHER.generate_docs("markdown") + "--help"


def _wrong_flags(line: str) -> list[str]:
    """Flags of our two command lines that neither has."""
    found = re.search(r"(-m distamp (\w+)|launch/train\.py)(.*)", line)
    if found is None or "--completion" in line:
        return []
    commands = parser()._subparsers._group_actions[0].choices
    if found[2] and found[2] not in commands:
        return [f"no command {found[2]}: {line}"]
    known = commands[found[2]].format_help() if found[2] else flags_of_the_launcher()
    flags = re.findall(r"(?<=\s)--[\w-]+", re.split("[#|]", found[3])[0])
    return [f"no flag {flag}: {line}" for flag in flags if flag not in known]


# -- plain English, links, and figures that are those of the results -----------------------------

RESULTS = DOCS / "results"
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s#]+\.md)(?:#([^)\s]+))?\)")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
_QUARTILES = re.compile(r"\d\.\d+ \[\d")
_HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_plain_english(page: Path) -> None:
    is_exception = page.relative_to(ROOT).as_posix() in EXCEPTIONS
    found = faults(page)
    assert bool(found) == is_exception, found or f"remove {page.name} from EXCEPTIONS"


def test_relative_phrases_are_rare_over_all_rewritten_pages() -> None:
    rewritten = [p for p in PROSE if p.relative_to(ROOT).as_posix() not in EXCEPTIONS]
    assert phrase_rate(rewritten) <= MAX_PHRASES, "python -m tests.docs_words lists them"


LINKED = [*PROSE, *sorted(RESULTS.glob("*.md"))]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Whether a step was taken is known later.",
        "These are refused.",
        "fp32 is refused; so is fp16.",
        "The scaler asks no other rank.",
        "A resumed run is equal to the bit.",
    ],
)
def test_a_sentence_against_the_rules_is_found(tmp_path: Path, sentence: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{sentence}\n")
    assert len(faults(page)) == 1


def test_headings_code_and_quotes_are_not_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('# What is it?\n\nThe log has `but for` and "anew".\n\n    python beside.py\n')
    assert faults(page) == []


def test_a_link_without_a_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n[one](#title), [two](#missing), [three](missing.md)\n")
    assert broken_links(page) == ["no heading: #missing", "no file: missing.md"]


def test_each_private_name_of_torch_is_on_the_page_of_torch_versions() -> None:
    names_by_file = json.loads(HOUSE_STYLE.read_text())["torch_private"]
    page = (DOCS / "torch_versions.md").read_text()
    names = set()
    for file, torch_names in names_by_file.items():
        if file.startswith("distamp/"):
            names.update(torch_names)
    # A package whose only use is a name inside it.
    names -= {"torch._C", "torch._compile"}
    missing = {name for name in names if f"`{name.removeprefix('torch._C.')}`" not in page}
    assert {name for name in missing if f"`{name.rpartition('.')[2]}`" not in page} == set()


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


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_figure_is_that_of_the_result_it_links_to(page: Path) -> None:
    differ = [
        f"{label!r}: no {number} in {result.name}{'#' + anchor if anchor else ''}"
        for label, result, anchor in figures(page)
        for number in sorted(numbers(label) - numbers(section(result, anchor)))
    ]
    assert differ == []


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_a_result_begins_with_its_date_commit_and_command(page: Path) -> None:
    first_paragraph = page.read_text().split("\n\n")[1]
    assert re.match(r"\d{4}-\d\d-\d\d\b", first_paragraph)
    assert re.search(r"\bat (?:[0-9a-f]{7,8}|the commits|a commit that was not)\b", first_paragraph)
    assert re.search(r"`[^`]*(?:python|make|torchrun|sudo)\b[^`]*`", first_paragraph)


def test_figures_are_compared() -> None:
    found = [label for page in PROSE for label, _, _ in figures(page) if numbers(label)]
    assert len(found) > 30


def test_a_measured_ratio_links_to_its_result() -> None:
    bare = {}
    for page in PROSE:
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


# -- the site: any warning is an error -------------------------------------------------------------


built_once = pytest.mark.xdist_group("site")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    pytest.importorskip("mkdocstrings", reason="needs the docs extra")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


ON_THE_SITE = {
    "reference/scaler.html": ['id="distamp.DistGradScaler"', "init_scale"],
    "reference/launcher.html": ["--activation-checkpointing"],
    "reference/command_line.html": ["--timeout"],
    "index.html": ['href="examples/one_overflow.html"'],
    "examples/one_overflow.html": ["one_overflow.py"],
}


@built_once
@pytest.mark.parametrize("page", ON_THE_SITE)
def test_names_flags_and_examples_of_the_code_are_on_the_site(site: Path, page: str) -> None:
    text = (site / page).read_text()
    assert [each for each in ON_THE_SITE[page] if each not in text] == []


@built_once
def test_nothing_is_fetched_from_elsewhere_when_a_page_is_read(site: Path) -> None:
    loads = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"')
    found = {
        match
        for path in site.rglob("*.html")
        for match in loads.findall(path.read_text())
        if "canonical" not in match
    }
    assert found == set()

"""README and docs: code runs, commands and links exist, English is plain, figures have results."""

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
from launch.config import Config
from tests.docs_code import (
    PAGES,
    ROOT,
    blocks_of,
    not_printed,
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
from tests.forked_commands import run_commands
from tests.house_style import EXCEPTIONS as HOUSE_STYLE

# The code of these pages takes long: it imports a trainer, compiles, or starts ranks that shard.
SLOW_PAGES = ("docs/howto/lora.md", "docs/howto/fsdp2.md", "docs/contract.md", "docs/compile.md")


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def pages_for(world_size: int) -> list[Any]:
    """Return a case for each page with code that runs here on that many ranks."""
    cases = []
    for page in PAGES:
        is_run_here = any(block.is_run_here for block in blocks_of(page))
        if is_run_here and ranks_of(page) == world_size:
            marks = [pytest.mark.slow] if name_of(page) in SLOW_PAGES else []
            cases.append(pytest.param(page, id=name_of(page), marks=marks))
    return cases


@pytest.mark.parametrize("page", pages_for(1))
def test_the_code_of_a_page_runs(page: Path) -> None:
    assert run_page(str(page)) == []


@pytest.mark.parametrize("page", pages_for(2))
def test_the_code_of_a_page_for_two_ranks_runs_on_two(ranks2: Any, page: Path) -> None:
    assert ranks2.run(run_page, str(page)) == [[], []]


def outputs_on_pages() -> dict[str, str]:
    """Return the output that a page shows for a command, by command."""
    outputs = {}
    for page in PAGES:
        for block in blocks_of(page):
            if block.how.startswith("output of: "):
                command = block.how.removeprefix("output of: ")
                outputs[command] = block.code
    return outputs


OUTPUTS = outputs_on_pages()


@pytest.fixture(scope="module")
def printed_by_command() -> dict[str, str]:
    """Run all commands on pages that have an output; return the output of each command."""
    results = run_commands(list(OUTPUTS))
    return {command: result.output for command, result in zip(OUTPUTS, results, strict=True)}


@pytest.mark.slow
@pytest.mark.xdist_group("output of commands")
@pytest.mark.parametrize("command", OUTPUTS)
def test_a_page_shows_the_output_of_a_command(
    printed_by_command: dict[str, str], command: str
) -> None:
    printed = printed_by_command[command]
    assert not_printed(OUTPUTS[command], printed) == [], printed


def test_some_pages_show_the_output_of_a_command() -> None:
    assert len(OUTPUTS) > 2


def test_each_output_on_a_page_names_the_command_that_prints_it() -> None:
    for page in PAGES:
        for block in blocks_of(page):
            if not block.language:
                assert re.match("printed$|output of: python ", block.how), (page, block.line)


def shell_commands() -> list[str]:
    """Return every shell command that a page shows."""
    commands = []
    for page in PAGES:
        text = page.read_text()
        for block in blocks_of(page):
            if block.language in ("console", "bash"):
                commands += block.code.replace("\\\n", " ").splitlines()
        commands += re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        commands += re.findall(r"`((?:python|torchrun|make) [^`\n]+)`", text)
    return commands


COMMANDS = shell_commands()
_MODULE = re.compile(r"python\d? (?:-\w+ )*-m ((?:distamp|launch|benchmarks|tests)\b[\w.]*)")
_SCRIPT = re.compile(r"(?<!/)\b((?:launch|examples|benchmarks|docs)/[\w./]+\.(?:py|sh))")
_TARGET = re.compile(r"^([\w-]+):", re.MULTILINE)


def test_each_module_of_a_command_exists() -> None:
    modules = {module for command in COMMANDS for module in _MODULE.findall(command)}
    assert len(modules) > 5
    assert [module for module in modules if not _is_module(module)] == []


def test_each_script_of_a_command_exists() -> None:
    scripts = {script for command in COMMANDS for script in _SCRIPT.findall(command)}
    assert len(scripts) > 5
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_each_make_target_of_a_command_exists() -> None:
    targets = _TARGET.findall((ROOT / "Makefile").read_text())
    commands = [command for command in COMMANDS if command.startswith("make ")]
    missing = [c for c in commands if c.split()[1].strip("`") not in targets]
    assert commands
    assert missing == []


def test_each_flag_of_a_command_exists() -> None:
    assert [fault for command in COMMANDS for fault in _wrong_flags(command)] == []


def test_each_test_and_planted_fault_that_a_page_names_exists() -> None:
    text = "".join(page.read_text() for page in PAGES)
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    names = {*re.findall(r"`(test_\w+)`", text), *re.findall(r"planted: `(\w+)`", text)}
    functions = set(re.findall(r"^def (\w+)", sources, re.MULTILINE))
    assert names - functions == set()


def test_each_file_of_the_tests_that_a_page_names_exists() -> None:
    text = "".join(page.read_text() for page in PAGES)
    files = re.findall(r"`(tests/[\w/]+\.\w+)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@functools.cache
def flags_of_the_launcher() -> str:
    """Return the flags of the launcher, with the negative flags of booleans, in a text."""
    flags = ["--help"]
    for name, field in Config.model_fields.items():
        words = name.replace("_", "-")
        flags.append(f"--{words}")
        if field.annotation is bool:
            flags.append(f"--no-{words}")
    return " ".join(flags)


def _wrong_flags(line: str) -> list[str]:
    """Return the flags of a line that our command line, or the launcher, does not have."""
    match = re.search(r"(-m distamp (\w+)|launch/train\.py)(.*)", line)
    if match is None or "--completion" in line:
        return []
    command, arguments = match[2], match[3]
    if command is None:
        help_text = flags_of_the_launcher()
    else:
        parsers = parser()._subparsers._group_actions[0].choices
        if command not in parsers:
            return [f"no command {command}: {line}"]
        help_text = parsers[command].format_help()
    # A comment or another program may follow.
    flags = re.findall(r"(?<=\s)--[\w-]+", re.split("[#|]", arguments)[0])
    return [f"no flag {flag}: {line}" for flag in flags if flag not in help_text]


# -- plain English, links, and figures that the results contain ------------------------------------

RESULTS = DOCS / "results"
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s#]+\.md)(?:#([^)\s]+))?\)")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
_QUARTILES = re.compile(r"\d\.\d+ \[\d")
_HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_a_page_is_in_plain_english(page: Path) -> None:
    faults_of_page = faults(page)
    if name_of(page) in EXCEPTIONS:
        assert faults_of_page, f"remove {page.name} from EXCEPTIONS"
    else:
        assert faults_of_page == []


def test_relative_phrases_are_rare_over_all_rewritten_pages() -> None:
    rewritten = [page for page in PROSE if name_of(page) not in EXCEPTIONS]
    assert phrase_rate(rewritten) <= MAX_PHRASES, "python -m tests.docs_words lists them"


LINKED = [*PROSE, *sorted(RESULTS.glob("*.md"))]


@pytest.mark.parametrize("page", LINKED, ids=name_of)
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
    # The code uses only names inside these two packages.
    names -= {"torch._C", "torch._compile"}
    missing = {name for name in names if f"`{name.removeprefix('torch._C.')}`" not in page}
    assert {name for name in missing if f"`{name.rpartition('.')[2]}`" not in page} == set()


def numbers(text: str) -> set[str]:
    """Return the numbers in a text, without the commas between thousands."""
    return {number.replace(",", "") for number in _NUMBER.findall(text)}


def anchor_of(title: str) -> str:
    """Return the anchor that a site makes of a heading."""
    words = re.sub(r"[^\w\s-]", "", title.lower())
    return words.strip().replace(" ", "-")


def section(page: Path, anchor: str | None) -> str:
    """Return the text of a page, or the text under one heading if an anchor is given."""
    text = page.read_text()
    if anchor is None:
        return text
    start = depth = None
    for heading in _HEADING.finditer(text):
        marks, title = heading.groups()
        if depth is None:
            if anchor_of(title) == anchor:
                start, depth = heading.end(), len(marks)
        elif len(marks) <= depth:
            return text[start : heading.start()]
    assert start is not None, f"{page.name} has no #{anchor}"
    return text[start:]


def figures(page: Path) -> Iterator[tuple[str, Path, str | None]]:
    """Yield the label, the page and the section of each link to a result."""
    for label, target, anchor in _LINK.findall(page.read_text()):
        result = (page.parent / target).resolve()
        if result.parent == RESULTS:
            yield label, result, anchor or None


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_a_figure_is_in_the_result_that_its_link_leads_to(page: Path) -> None:
    for label, result, anchor in figures(page):
        missing = numbers(label) - numbers(section(result, anchor))
        assert missing == set(), f"{label!r} in {result.name}, section {anchor}"


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_a_result_begins_with_its_date_commit_and_command(page: Path) -> None:
    first_paragraph = page.read_text().split("\n\n")[1]
    assert re.match(r"\d{4}-\d\d-\d\d\b", first_paragraph)
    assert re.search(r"\bat (?:[0-9a-f]{7,8}|the commits|a commit that was not)\b", first_paragraph)
    assert re.search(r"`[^`]*(?:python|make|torchrun|sudo)\b[^`]*`", first_paragraph)


def test_figures_are_compared() -> None:
    labels = [label for page in PROSE for label, _, _ in figures(page) if numbers(label)]
    assert len(labels) > 30


def test_a_measured_ratio_links_to_its_result() -> None:
    for page in PROSE:
        text = _LINK.sub("", page.read_text())
        lines = [line for line in text.splitlines() if _QUARTILES.search(line)]
        assert lines == [], page.name


EVIDENCE = (DOCS / "evidence.md").read_text()


def test_each_claim_of_the_evidence_has_a_command() -> None:
    dated_rows = re.findall(r"^\|.*\| \d{4}-.*$", EVIDENCE, re.MULTILINE)
    command = re.compile(r"`[^`]*(?:python|make|torchrun) [^`]+`")
    assert len(dated_rows) > 20
    assert [row for row in dated_rows if not command.search(row)] == []


def test_each_test_file_of_the_evidence_exists() -> None:
    files = re.findall(r"\btests/[\w/]+(?:\.py)?", EVIDENCE)
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []


# -- the site: any warning is an error -------------------------------------------------------------


def built_once(test: Any) -> Any:
    """Let one worker run the tests of the site. They are slow, and `make docs-check` builds it."""
    return pytest.mark.slow(pytest.mark.xdist_group("site")(test))


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
    missing = [expected for expected in ON_THE_SITE[page] if expected not in text]
    assert missing == []


@built_once
def test_nothing_is_fetched_from_elsewhere_when_a_page_is_read(site: Path) -> None:
    element = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"')
    for path in site.rglob("*.html"):
        addresses = element.findall(path.read_text())
        loaded = [address for address in addresses if "canonical" not in address]
        assert loaded == [], path.name

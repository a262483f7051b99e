"""Every block of code of README and docs runs, and every command names what exists."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from distamp.__main__ import parser
from launch.config import parser as launcher_parser
from tests.docs_code import OWN_TESTS, PAGES, ROOT, blocks_of, ranks_of, run_page

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


def test_code_that_is_run_elsewhere_has_a_test_that_is_there() -> None:
    pages = {p.name for p in PAGES if any(b.how.startswith("run:") for b in blocks_of(p))}
    assert pages == set(OWN_TESTS)
    assert all((ROOT / test).is_file() for test in OWN_TESTS.values())


def test_code_that_is_not_run_says_why() -> None:
    left_out = [b for page in PAGES for b in blocks_of(page) if b.how.startswith("not run")]
    assert all(len(block.reason) > 10 for block in left_out)
    assert len(left_out) <= 12, "run it, or leave it out of the docs"


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


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def _wrong_flags(line: str) -> list[str]:
    """Flags of our two command lines that neither has."""
    found = re.search(r"(-m distamp (\w+)|launch/train\.py)(.*)", line)
    if found is None or "--completion" in line:
        return []
    if found[2]:
        commands = parser()._subparsers._group_actions[0].choices
        if found[2] not in commands:
            return [f"no command {found[2]}: {line}"]
        known = commands[found[2]].format_help()
    else:
        known = launcher_parser().format_help()
    try:
        words = shlex.split(found[3].split("#")[0].split("|")[0], comments=True)
    except ValueError:
        words = found[3].split()
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    return [f"no flag {flag}: {line}" for flag in flags if flag not in known]

"""The site builds, and any warning is an error: a dead link, a name without a docstring's page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.xdist_group("site")  # which is built once


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


def test_every_page_of_the_docs_is_built(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert [str(p) for p in pages if not (site / p.with_suffix(".html")).is_file()] == []


def test_the_reference_has_public_names_with_what_they_take(site: Path) -> None:
    page = (site / "reference" / "scaler.html").read_text()
    assert 'id="distamp.DistGradScaler"' in page
    text = re.sub(r"<[^>]+>", "", page)
    assert "init_scale" in text
    assert "Device type of the loss scale" in text, "from the docstring"


def test_generated_pages_have_the_flags_of_the_parsers(site: Path) -> None:
    assert "--checkpoint-blocks" in (site / "reference" / "launcher.html").read_text()
    assert "--timeout" in (site / "reference" / "command_line.html").read_text()


def test_a_link_to_an_example_leads_to_a_page_of_it(site: Path) -> None:
    assert 'href="examples/one_overflow.html"' in (site / "index.html").read_text()
    assert (site / "examples" / "one_overflow.html").is_file()


def test_nothing_is_fetched_from_elsewhere_when_a_page_is_read(site: Path) -> None:
    loads = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"')
    found = {
        match
        for path in site.rglob("*.html")
        for match in loads.findall(path.read_text())
        if "canonical" not in match
    }
    assert found == set()

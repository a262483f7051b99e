"""The wheel has the package, its data and its types alone; the sdist has the sources of tests."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.plugin.interface import BuilderInterface
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import distamp

ROOT = Path(__file__).parents[1]


def build(kind: str, folder: Path) -> Path:
    """Build the distribution of a kind, ``wheel`` or ``sdist``; return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (distribution,) = folder.iterdir()
    return distribution


def files_for(builder: BuilderInterface) -> set[str]:
    """Return the files that a builder packs, without building the distribution."""
    return {file.distribution_path for file in builder.recurse_included_files()}


def files_of_the_package() -> set[str]:
    """Return the files of distamp in the tree."""
    files = set()
    for path in (ROOT / "distamp").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            files.add(path.relative_to(ROOT).as_posix())
    return files


def test_the_files_for_the_wheel_are_those_of_the_package() -> None:
    assert files_for(WheelBuilder(str(ROOT))) == files_of_the_package()


@pytest.mark.slow
def test_the_wheel_has_the_files_of_the_package_alone(tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build("wheel", tmp_path))
    packaged = set()
    for name in wheel.namelist():
        folder = name.split("/")[0]
        if not folder.endswith(".dist-info"):
            packaged.add(name)
    assert packaged == files_of_the_package()
    assert "distamp/py.typed" in packaged


#: Files that the tests and the site need.
NEEDED = {
    "CITATION.cff",
    "SECURITY.md",
    "benchmarks/common.py",
    "constraints.txt",
    "docs/index.md",
    "examples/first_run.py",
    "launch/train.py",
    "mkdocs.yml",
    "tests/ranks.py",
}


OUTPUTS = (".venv", "runs", "tests/__pycache__")


def test_the_files_for_the_sdist_are_sources_and_no_outputs() -> None:
    names = files_for(SdistBuilder(str(ROOT)))
    assert names >= NEEDED
    assert [name for name in names if name.startswith(OUTPUTS)] == []


@pytest.mark.slow
def test_the_sdist_has_the_sources_and_no_outputs(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= NEEDED
    assert [name for name in names if name.startswith(OUTPUTS)] == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        pytest.param("CITATION.cff", r"^version: (.*)$", id="citation"),
        pytest.param("CHANGELOG.md", r"^## (\S+)", id="changelog"),
    ],
)
def test_a_file_has_the_version_of_the_package(file: str, line: str) -> None:
    text = (ROOT / file).read_text()
    match = re.search(line, text, re.MULTILINE)
    assert match is not None
    assert match[1] == distamp.__version__

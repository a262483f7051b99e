"""What gets installed: the package, its data and its types, and nothing else."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import distamp

ROOT = Path(__file__).parents[1]


def built(kind: str, folder: Path) -> Path:
    """What is published, made from the tree."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.iterdir()
    return made


def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    names = zipfile.ZipFile(built("wheel", tmp_path)).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"distamp"}
    packaged = {name for name in names if name.startswith("distamp/")}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "distamp").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == wanted
    assert "distamp/py.typed" in packaged


def test_the_sdist_holds_what_its_tests_and_its_site_need(tmp_path: Path) -> None:
    with tarfile.open(built("sdist", tmp_path)) as made:
        names = {"/".join(name.split("/")[1:]) for name in made.getnames()}
    needed = [
        *("mkdocs.yml", "SECURITY.md", "CITATION.cff", "constraints.txt", "docs/index.md"),
        *("launch/train.py", "tests/ranks.py", "examples/first_run.py", "benchmarks/common.py"),
    ]
    assert [name for name in needed if name not in names] == []
    assert [name for name in names if name.startswith((".venv", "runs", "tests/__pycache__"))] == []


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    for name, line in (("CITATION.cff", r"^version: (.*)$"), ("CHANGELOG.md", r"^## (\S+)")):
        (first, *_) = re.findall(line, (ROOT / name).read_text(), re.MULTILINE)
        assert first == distamp.__version__, name

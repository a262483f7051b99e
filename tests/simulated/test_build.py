"""How the library is built: once, for one torch, and not where there is no compiler."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated import build


@pytest.fixture
def built() -> Path:
    if reason := build.why_not():
        pytest.skip(reason)
    return build.library()


def test_it_is_compiled_anew_only_where_a_source_has_changed(built, monkeypatch, tmp_path):
    for path in build.SOURCES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    made: list[object] = []
    monkeypatch.setattr(build, "_build", lambda *given: made.append(given))
    assert (build.library(), made) == (built, [])
    with (tmp_path / "sim.h").open("a") as header:
        header.write("// changed\n")
    assert build.library() != built
    assert made


def test_another_torch_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.11.0+cpu")
    assert build.why_not() == "the simulated accelerator is for torch 2.13, this is 2.11.0+cpu"


def test_no_compiler_is_refused_with_the_reason(built, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build.why_not() == "no C++ compiler (c++, g++, clang++) for the simulated accelerator"


def test_it_is_no_part_of_a_process_that_did_not_ask_for_it():
    code = "import torch, tests.simulated.pools; print(torch.accelerator.current_accelerator())"
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "None"

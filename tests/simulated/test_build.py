"""The library is for one torch and needs a compiler, and nobody gets it unasked."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated import build


def test_what_is_missing_is_said(monkeypatch):
    if reason := build.why_not():
        pytest.skip(reason)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build.why_not() == "no C++ compiler (c++, g++, clang++) for the simulated accelerator"
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.11.0+cpu")
    assert build.why_not() == "the simulated accelerator is for torch 2.13, this is 2.11.0+cpu"


def test_it_is_no_part_of_a_process_that_did_not_ask_for_it():
    code = "import torch, tests.simulated.pools; print(torch.accelerator.is_available())"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    out = subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=root)
    assert out == b"False\n"

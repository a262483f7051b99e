"""A strategy and a model that the documentation adds, each in one place, train as the others do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import launch.models
import launch.strategies
from tests.launch import jobs, pooled
from tests.launch.jobs import TIMEOUT_S
from tests.launch.pooled import Rows
from tests.launch.test_strategies import SMALL, _agree

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]

PAGE = jobs.ROOT / "docs" / "training.md"
FLAGS = (*SMALL, "--checkpoint-every", 3, "--keep-checkpoints", 9, "--model", "bigram")


def _blocks() -> list[str]:
    """The Python of the section that adds a strategy and a model."""
    section = PAGE.read_text().split("## A strategy or a model of your own")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def _add() -> None:
    """Do what the page says, as if its lines stood in the two files."""
    strategy, strategy_row, model, model_row = _blocks()
    for module, code, table, row in (
        (launch.strategies, strategy, "STRATEGIES", strategy_row),
        (launch.models, model, "MODELS", model_row),
    ):
        exec(code, vars(module))
        exec(f"{table}.update({{{row}}})", vars(module))


def _train(folder: Path, *flags: object) -> tuple[Rows, Rows, str]:
    """Train and resume with what the page adds; say what a wrong use of it is refused with."""
    _add()
    flags = (*FLAGS, *flags, "--strategy", "ddp_static")
    straight = pooled.train(folder, flags)
    middle = folder / "checkpoints" / "step-00000003"
    manifest = json.loads((middle / "manifest.json").read_text())
    assert manifest["settings"]["strategy"] == "ddp_static"
    resumed = pooled.train(folder, (*flags, "--resume", middle))
    return straight, resumed, pooled.refusal(*flags, "--comm-hook", "fp16")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_the_page_adds_trains_and_goes_on_as_everything_else_does(
    new_ranks, tmp_path, monkeypatch, precision
):
    flags = ("--data", jobs.text_file(tmp_path), "--precision", precision)
    straight, resumed, refused = new_ranks(2).run(
        _train, tmp_path / "run", *flags, timeout=TIMEOUT_S
    )[0]
    assert resumed == straight
    assert refused.startswith("--comm-hook fp16: it is for ddp")
    assert refused.endswith("and this is ddp_static")

    for module, table in ((launch.strategies, "STRATEGIES"), (launch.models, "MODELS")):
        monkeypatch.setattr(module, table, {**getattr(module, table)})
    monkeypatch.setattr(launch.models, "bigram", None, raising=False)
    monkeypatch.setattr(launch.strategies, "ddp_static", None, raising=False)
    _add()
    _agree(straight, pooled.train(tmp_path / "alone", (*FLAGS, *flags)), precision)
    shown = pooled.refusal(*FLAGS, *flags, "--strategy", "ddp_static")
    assert shown.startswith("--strategy ddp_static: it needs several ranks; torchrun")

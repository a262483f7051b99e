"""Each example runs, prints what it says it prints, and is right in what it shows."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
SCALER_EXAMPLES = [
    "accumulation",
    "gate_lr_and_ema",
    "gradient_clipping",
    "gradient_penalty",
    "lbfgs",
    "several_optimizers",
]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Load an example by name, as ``python examples/NAME.py`` would find its neighbours."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, f"example_{name}", module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", SCALER_EXAMPLES)
def test_an_example_runs_and_prints_a_loss_that_fell(example, capsys, name):
    example(name).main()
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "loss" in line and "->" in line
    ]
    assert lines
    for line in lines:
        before, after = line.split("loss ")[1].split(",")[0].split(" -> ")
        assert float(after) < float(before)


def calls_of(path: Path, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    ]


@pytest.mark.parametrize("name", SCALER_EXAMPLES)
def test_examples_name_growth_and_backoff_by_keyword(name):
    """ShardedGradScaler has the two the other way round: by position one of them would be wrong."""
    calls = calls_of(EXAMPLES / f"{name}.py", "DistGradScaler")
    assert calls
    for call in calls:
        assert len(call.args) <= 1
        assert {"growth_factor", "backoff_factor"} <= {k.arg for k in call.keywords}


@pytest.mark.parametrize("how", ["on_host", "on_device"])
def test_schedule_and_average_follow_the_steps_that_were_taken(example, how):
    module = example("gate_lr_and_ema")
    result = getattr(module, how)()
    assert result.skipped > 0, "the example must show skipped steps"
    assert result.taken + result.skipped == module.STEPS
    assert result.rate == pytest.approx(module.RATE * min(1.0, (result.taken + 1) / module.WARMUP))
    # While steps are skipped, nothing learns; afterwards everything does.
    assert result.losses[-1] < result.losses[result.skipped]


def test_gating_on_the_host_and_on_the_device_average_the_same_weights(example):
    module = example("gate_lr_and_ema")
    host, device = module.on_host(), module.on_device()
    assert host.taken == device.taken
    for ours, theirs in zip(host.average.parameters(), device.average.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_accumulating_over_microbatches_is_the_whole_batch(example):
    module = example("accumulation")
    (whole, model), (parts, other) = module.train(1), module.train(4)
    assert parts == pytest.approx(whole, rel=2e-3)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def test_both_ways_to_clip_see_the_same_norms(example):
    module = example("gradient_clipping")
    ours, theirs = module.train("scaler"), module.train("torch")
    assert max(ours[1]) > module.MAX_NORM
    assert ours[1] == pytest.approx(theirs[1], rel=2e-3)
    assert ours[0] == pytest.approx(theirs[0], rel=2e-3)


def test_one_of_two_optimizers_is_skipped_by_its_own_overflow(example):
    _, counts, scale = example("several_optimizers").train()
    assert [(c.taken, c.skipped) for c in counts] == [(30, 0), (29, 1)]
    assert scale == 2.0**13


def test_the_gradient_penalty_in_fp16_is_that_of_fp32(example):
    module = example("gradient_penalty")
    half, full = module.train(True), module.train(False)
    assert half[0] == pytest.approx(full[0], rel=1e-2)
    assert half[1] == pytest.approx(full[1], rel=2e-2)


def test_lbfgs_in_fp16_reaches_the_minimum_of_fp32_over_an_overflow(example):
    module = example("lbfgs")
    half, _, taken = module.train(True)
    full, _, _ = module.train(False)
    assert taken == [False, *([True] * (module.STEPS - 1))]
    assert half[-1] == pytest.approx(full[-1], rel=5e-3)

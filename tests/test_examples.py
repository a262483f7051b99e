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

from distamp import initialize

EXAMPLES = Path(__file__).parent.parent / "examples"
SCALER_EXAMPLES = [
    "accumulation",
    "gate_lr_and_ema",
    "gradient_clipping",
    "gradient_penalty",
    "several_optimizers",
]
HOOK_EXAMPLES = ["hook_on_a_slow_link"]
PATIENCE_S = 240.0
ONE_CALL_EXAMPLES = [
    "load_apex_checkpoint",
    "one_call_accumulation",
    "one_call_clipping",
    "one_call_functions",
    "one_call_penalty",
    "one_call_ranks",
    "one_call_training",
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


@pytest.mark.parametrize("name", SCALER_EXAMPLES + ONE_CALL_EXAMPLES + HOOK_EXAMPLES)
def test_an_example_runs_and_prints_a_loss_that_fell(example, capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
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


def test_every_level_of_the_typical_loop_learns_what_fp32_learns(example):
    module = example("one_call_training")
    full = module.train("O0")
    for level, rel in (("O1", 1e-2), ("O2", 1e-2), ("bf16", 2e-2)):
        assert module.train(level) == pytest.approx(full, rel=rel)


def test_the_one_call_clips_by_the_norm_of_fp32(example):
    module = example("one_call_clipping")
    full, half, cast = (module.train(level) for level in ("O0", "O1", "O2"))
    assert max(full[1]) > module.MAX_NORM
    assert half[1] == pytest.approx(full[1], rel=1e-2)
    assert cast[1] == pytest.approx(full[1], rel=2e-2)


def test_the_one_calls_penalty_is_that_of_fp32(example):
    module = example("one_call_penalty")
    full, half, cast = (module.train(level) for level in ("O0", "O1", "O2"))
    for losses, norms in (half, cast):
        assert losses == pytest.approx(full[0], rel=1e-2)
        assert norms == pytest.approx(full[1], rel=2e-2)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parts_of_a_batch_are_the_batch_in_the_one_call(example, level):
    module = example("one_call_accumulation")
    assert module.train(level, 4) == pytest.approx(module.train(level, 1), rel=5e-3)


def test_a_function_gets_the_dtype_it_was_written_for_in_a_region(example):
    module = example("one_call_functions")
    assert module.train("O1")[1:] == (torch.float16, torch.float32)


def test_a_run_goes_on_from_apexs_checkpoint_as_if_it_had_not_stopped(example, tmp_path):
    module = example("load_apex_checkpoint")
    path = tmp_path / "apex.pt"
    module.write_as_apex_did(path)
    torch.manual_seed(0)
    model = module.NextByte().to(module.device())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    amp = initialize(model, optimizer, "O2")
    whole = module.train(amp) and module.train(amp, skip=module.STEPS)
    resumed = module.resume(torch.load(path, weights_only=True))
    assert module.train(resumed, skip=module.STEPS) == whole


def on_this_rank(name: str, function: str, *arguments: object) -> object:
    """Call a function of an example, on a rank of the pool."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return getattr(importlib.import_module(name), function)(*arguments)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("strategy", ["DDP", "FSDP2"])
def test_the_one_call_trains_over_ranks(ranks2, strategy, level):
    for losses in ranks2.run(
        on_this_rank, "one_call_ranks", "train", strategy, level, timeout=PATIENCE_S
    ):
        assert losses[-1] < 0.8 * losses[0]


def test_the_one_call_accumulates_over_ranks(ranks2, example):
    ranks = ranks2.run(on_this_rank, "one_call_accumulation", "train", "O2", 2, timeout=PATIENCE_S)
    alone = example("one_call_accumulation").train("O2", 4)
    mean = [sum(each) / len(each) for each in zip(*ranks, strict=True)]
    assert mean == pytest.approx(alone, rel=5e-3)


def test_one_overflow_parts_torchs_ranks_and_none_of_ours(ranks2, example):
    tracks = ranks2.run(on_this_rank, "one_overflow", "train_with_each", timeout=PATIENCE_S)
    torchs = [track["torch.amp.GradScaler"] for track in tracks]
    ours = [track["distamp.DistGradScaler"] for track in tracks]
    before = example("one_overflow").OVERFLOW
    assert torchs[0].weight[:before] == torchs[1].weight[:before] == ours[0].weight[:before]
    assert torchs[0].weight[before] == torchs[0].weight[before - 1], "rank 0 skipped"
    assert torchs[1].weight[before] != torchs[1].weight[before - 1], "rank 1 stepped"
    assert torchs[0].scale[-1] != torchs[1].scale[-1]
    assert ours[0] == ours[1]
    assert ours[0].weight[before] == ours[0].weight[before - 1], "both skipped"
    assert ours[0].scale[-1] == ours[0].scale[0] / 2

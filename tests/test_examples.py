"""Each example runs, prints its result, and shows a true fact."""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import pytest
import torch

from distamp import initialize

slow = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> Any:
    """Import an example from its folder, as its neighbours do; return its module."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module(name)


def call_on_rank(name: str, function: str, *arguments: object) -> Any:
    """Call a function of an example on a rank of the pool; return its result."""
    return getattr(example(name), function)(*arguments)


@pytest.mark.parametrize(
    "name",
    ["first_run", "gate_lr_and_ema", "load_apex_checkpoint", pytest.param("one_call", marks=slow)],
)
def test_an_example_runs_and_prints_a_loss_that_fell(capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    example(name).main()
    losses = re.findall(r"loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out)
    assert losses
    for first_loss, last_loss in losses:
        assert float(last_loss) < float(first_loss)


# One worker runs all tests that share runs.
shares_gated_runs = pytest.mark.xdist_group("gated runs of the example")
shares_one_call = pytest.mark.xdist_group("one call of the example")


@pytest.fixture(scope="module")
def gated_run() -> Any:
    """Train the example with decisions on the host; return its result."""
    return example("gate_lr_and_ema").train(False)


@pytest.fixture(scope="module")
def gated_run_on_device() -> Any:
    """Train the example with decisions on the device; return its result."""
    return example("gate_lr_and_ema").train(True)


@slow
@shares_gated_runs
@pytest.mark.parametrize("run", ["gated_run", "gated_run_on_device"])
def test_the_schedule_counts_only_the_steps_that_were_taken(request, run):
    module = example("gate_lr_and_ema")
    result = request.getfixturevalue(run)
    assert result.skipped > 0, "the example must show skipped steps"
    assert result.taken + result.skipped == module.STEPS
    warmup = min(1.0, (result.taken + 1) / module.WARMUP)
    assert result.rate == pytest.approx(module.RATE * warmup)


@slow
@shares_gated_runs
@pytest.mark.parametrize("run", ["gated_run", "gated_run_on_device"])
def test_the_gated_run_learns_after_the_skipped_steps(request, run):
    result = request.getfixturevalue(run)
    assert result.losses[-1] < result.losses[result.skipped]


@slow
@shares_gated_runs
def test_the_average_is_the_same_on_the_host_and_on_the_device(gated_run, gated_run_on_device):
    assert gated_run.taken == gated_run_on_device.taken
    host_average = list(gated_run.average.parameters())
    device_average = list(gated_run_on_device.average.parameters())
    torch.testing.assert_close(host_average, device_average, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def train_once() -> Callable[..., list[float]]:
    """Return the function that trains the example ``one_call``; it runs once at each level."""
    return functools.cache(example("one_call").train)


TOLERANCES = {"fp16": 1e-2, "fp16-O2": 1e-2, "bf16": 2e-2}
QUICK_CASES = [("fp16-O2", 1)]


def cases_of_the_one_call() -> list[Any]:
    """Return each level without and with accumulated batches."""
    cases = []
    for level in TOLERANCES:
        for accumulated_batches in (1, 4):
            case = (level, accumulated_batches)
            marks = [] if case in QUICK_CASES else [slow]
            cases.append(pytest.param(*case, marks=marks))
    return cases


@shares_one_call
@pytest.mark.parametrize(("level", "accumulated_batches"), cases_of_the_one_call())
def test_a_level_of_the_one_call_learns_as_fp32_does(train_once, level, accumulated_batches):
    losses_in_fp32 = train_once("fp32", 1)
    losses = train_once(level, accumulated_batches)
    assert losses == pytest.approx(losses_in_fp32, rel=TOLERANCES[level])


@slow
def test_a_run_resumed_from_apexs_checkpoint_equals_an_uninterrupted_run(tmp_path):
    module = example("load_apex_checkpoint")
    path = tmp_path / "apex.pt"
    module.write_as_apex_did(path)
    torch.manual_seed(0)
    model = module.NextByte().to(module.device())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    amp = initialize(model, optimizer, "fp16-O2")
    assert module.train(amp)
    uninterrupted = module.train(amp, skip=module.STEPS)
    resumed = module.resume(torch.load(path, weights_only=True))
    assert module.train(resumed, skip=module.STEPS) == uninterrupted


# -- over ranks ------------------------------------------------------------------------------------


@slow
@shares_one_call
@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
def test_the_one_call_over_ranks_learns_what_one_process_does(ranks2, train_once, layout):
    losses_by_rank = ranks2.run(call_on_rank, "one_call", "train", "fp16-O2", 2, layout)
    mean_losses = [mean(losses) for losses in zip(*losses_by_rank, strict=True)]
    expected = train_once("fp16-O2", 1)
    assert mean_losses == pytest.approx(expected, rel=5e-3)


@slow
def test_gradients_sent_in_fp16_learn_as_gradients_in_fp32_do(ranks2):
    steps = 30
    hooked = ranks2.run(call_on_rank, "hook_on_a_slow_link", "train", "fp16", steps)
    plain = ranks2.run(call_on_rank, "hook_on_a_slow_link", "train", None, steps)
    first_loss, last_loss, statistics = hooked[0]
    _, expected_loss, _ = plain[0]
    assert last_loss == pytest.approx(expected_loss, rel=1e-2)
    assert last_loss < first_loss
    assert "fp16" in statistics


@slow
@pytest.mark.parametrize("kind", ["zero", "oss"])
def test_ranks_that_share_the_optimizer_skip_together_and_have_the_same_weights(ranks2, kind):
    if kind == "oss":
        pytest.importorskip("fairscale")
    first, second = ranks2.run(call_on_rank, "sharded_optimizer", "train", kind)
    for losses, skipped, _ in (first, second):
        assert skipped == 1
        assert losses[-1] < 0.8 * losses[0]
    assert first[2] == second[2]


def grpo_at_each_precision(updates: int, prompts: int) -> dict[str, Any]:
    """Train the GRPO example at each precision; return its rows, by precision."""
    module = example("grpo")
    module.PROMPTS = prompts
    start = module.pretrain(10).state_dict()
    rows = {}
    for precision in module.PRECISIONS:
        rows[precision] = module.train(precision, start, updates)
    return rows


@slow  # Each rank imports transformers, which takes most of the time.
def test_grpo_shows_the_mismatch_between_sampler_and_trainer(ranks2):
    pytest.importorskip("transformers")
    first, second = ranks2.run(grpo_at_each_precision, 1, 2, timeout=240)
    assert first == second
    mismatches = {}
    for precision, rows in first.items():
        mismatches[precision] = rows[0]["mismatch/token_abs_mean"]
    assert mismatches["fp32"] < 1e-5
    assert 1e-5 < mismatches["fp16"] < mismatches["bf16"] / 3


@slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replicas_on_two_devices_compute_in_the_callers_dtype(sim, dtype):
    train = functools.partial(sim.one, call_on_rank, "data_parallel", "train")
    losses, dtypes = train(["sim:0", "sim:1"], dtype, 10)
    losses_on_one_device, _ = train(["sim:0"], dtype, 10)
    assert dtypes == {str(dtype)}
    assert losses == pytest.approx(losses_on_one_device, rel=1e-2)


def _stepped(track: Any, step: int) -> bool:
    """Return whether a step changed the weight of a track."""
    weight_before = track.weight[step - 1]
    return bool(track.weight[step] != weight_before)


def test_one_overflow_makes_torchs_ranks_diverge_and_ours_skip_together(ranks2):
    # The import here lets this process unpickle the tracks.
    step = example("one_overflow").OVERFLOW_STEP
    first, second = ranks2.run(call_on_rank, "one_overflow", "train_with_each")
    assert not _stepped(first["torch.amp.GradScaler"], step)
    assert _stepped(second["torch.amp.GradScaler"], step)
    track = first["distamp.DistGradScaler"]
    assert track == second["distamp.DistGradScaler"]
    assert not _stepped(track, step)
    assert track.scale[-1] == track.scale[0] / 2


def test_the_origin_of_a_nan_is_named_on_both_ranks(ranks2):
    first, second = ranks2.run(call_on_rank, "nan_on_one_rank", "describe_origin")
    assert first == second
    assert first.startswith("div in 0 made NaN of finite inputs")
    assert "rank 1, forward pass" in first


@slow  # It shows a fact of torch.
def test_a_nan_on_one_rank_spoils_every_later_loss_without_a_guard(ranks2):
    nan_step = example("nan_in_bf16").NAN_STEP
    for losses in ranks2.run(call_on_rank, "nan_in_bf16", "train", False):
        losses_before_nan = torch.tensor(losses[:nan_step])
        losses_after_nan = torch.tensor(losses[nan_step:])
        assert losses_before_nan.isfinite().all()
        assert losses_after_nan.isnan().all()


@slow
def test_a_guarded_run_learns_after_a_nan_on_one_rank(ranks2):
    nan_step = example("nan_in_bf16").NAN_STEP
    for losses in ranks2.run(call_on_rank, "nan_in_bf16", "train", True):
        assert losses[-1] < losses[nan_step] < losses[0]

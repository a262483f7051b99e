"""Each example runs, prints what it says it prints, and is right in what it shows."""

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from distamp import initialize

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> Any:
    """An example, imported as its neighbours import it."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module(name)


def on_this_rank(name: str, function: str, *arguments: object) -> Any:
    """Call a function of an example, on a rank of the pool."""
    return getattr(example(name), function)(*arguments)


@pytest.mark.parametrize(
    "name",
    ["first_run", "gate_lr_and_ema", "load_apex_checkpoint", "one_call"],
)
def test_an_example_runs_and_prints_a_loss_that_fell(capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    example(name).main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "->" in line]
    assert lines
    for line in lines:
        before, after = line.split("loss ")[1].split(",")[0].split(" -> ")
        assert float(after) < float(before)


def test_schedule_and_average_follow_the_steps_that_were_taken():
    module = example("gate_lr_and_ema")
    host, device = module.train(False), module.train(True)
    for result in (host, device):
        assert result.skipped > 0, "the example must show skipped steps"
        assert result.taken + result.skipped == module.STEPS
        part = min(1.0, (result.taken + 1) / module.WARMUP)
        assert result.rate == pytest.approx(module.RATE * part)
        # While steps are skipped, nothing learns; afterwards everything does.
        assert result.losses[-1] < result.losses[result.skipped]
    assert host.taken == device.taken
    for ours, theirs in zip(host.average.parameters(), device.average.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_every_level_of_the_one_call_learns_what_fp32_learns():
    module = example("one_call")
    full = module.train("fp32")
    for level, rel in (("fp16", 1e-2), ("fp16-O2", 1e-2), ("bf16", 2e-2)):
        assert module.train(level) == pytest.approx(full, rel=rel)
        assert module.train(level, 4) == pytest.approx(full, rel=rel)


def test_a_run_goes_on_from_apexs_checkpoint_as_if_it_had_not_stopped(tmp_path):
    module = example("load_apex_checkpoint")
    path = tmp_path / "apex.pt"
    module.write_as_apex_did(path)
    torch.manual_seed(0)
    model = module.NextByte().to(module.device())
    amp = initialize(model, torch.optim.Adam(model.parameters(), lr=0.01), "fp16-O2")
    whole = module.train(amp) and module.train(amp, skip=module.STEPS)
    resumed = module.resume(torch.load(path, weights_only=True))
    assert module.train(resumed, skip=module.STEPS) == whole


# -- over ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
def test_the_one_call_over_ranks_learns_what_one_process_does(ranks2, layout):
    found = ranks2.run(on_this_rank, "one_call", "train", "fp16-O2", 2, layout)
    mean = [sum(each) / len(each) for each in zip(*found, strict=True)]
    assert mean == pytest.approx(example("one_call").train("fp16-O2"), rel=5e-3)


def test_gradients_in_half_the_bytes_learn_what_whole_ones_do(ranks2):
    (first, last, sent), *_ = ranks2.run(on_this_rank, "hook_on_a_slow_link", "train", "fp16")
    _, expected, _ = ranks2.run(on_this_rank, "hook_on_a_slow_link", "train", None)[0]
    assert last == pytest.approx(expected, rel=1e-2)
    assert last < first
    assert "fp16" in sent


@pytest.mark.parametrize("kind", ["zero", "oss"])
def test_ranks_that_share_the_optimizer_skip_together_and_have_the_same_weights(ranks2, kind):
    if kind == "oss":
        pytest.importorskip("fairscale")
    found = ranks2.run(on_this_rank, "sharded_optimizer", "train", kind)
    assert [skipped for _, skipped, _ in found] == [1, 1]
    assert all(losses[-1] < 0.8 * losses[0] for losses, _, _ in found)
    assert found[0][2] == found[1][2]


def grpo_at_each_precision(updates: int, prompts: int) -> dict[str, Any]:
    module = example("grpo")
    module.PROMPTS = prompts
    start = module.pretrain(10).state_dict()
    return {name: module.train(name, start, updates) for name in module.PRECISIONS}


def test_grpo_shows_how_far_the_sampler_is_from_the_trainer(ranks2):
    pytest.importorskip("transformers")
    one, other = ranks2.run(grpo_at_each_precision, 1, 2, timeout=240)  # to import takes long
    assert one == other
    fp32, bf16, fp16 = (rows[0]["mismatch/token_abs_mean"] for rows in one.values())
    assert fp32 < 1e-5 < fp16 < bf16 / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replicas_on_two_devices_compute_in_the_callers_dtype(sim, dtype):
    devices = ["sim:0", "sim:1"]
    losses, seen = sim.one(on_this_rank, "data_parallel", "train", devices, dtype, 10)
    alone, _ = sim.one(on_this_rank, "data_parallel", "train", devices[:1], dtype, 10)
    assert seen == {str(dtype)}
    assert losses == pytest.approx(alone, rel=1e-2)


def test_one_overflow_parts_torchs_ranks_and_none_of_ours(ranks2):
    at = example("one_overflow").OVERFLOW_STEP
    tracks = ranks2.run(on_this_rank, "one_overflow", "train_with_each")
    torchs = [track["torch.amp.GradScaler"] for track in tracks]
    ours = [track["distamp.DistGradScaler"] for track in tracks]
    stepped = [track.weight[at] != track.weight[at - 1] for track in torchs]
    assert stepped == [False, True], "rank 0 skipped, and rank 1 did not"
    assert ours[0] == ours[1]
    assert ours[0].weight[at] == ours[0].weight[at - 1], "both skipped"
    assert ours[0].scale[-1] == ours[0].scale[0] / 2


def test_the_origin_of_a_nan_is_named_on_both_ranks(ranks2):
    texts = ranks2.run(on_this_rank, "nan_on_one_rank", "describe_origin")
    assert texts[0] == texts[1]
    assert texts[0].startswith("div in 0 made NaN of finite inputs")
    assert "rank 1, forward pass" in texts[0]


def test_a_nan_on_one_rank_spoils_every_later_loss_without_a_guard_only(ranks2):
    module = example("nan_in_bf16")
    unguarded = ranks2.run(on_this_rank, "nan_in_bf16", "train", False)
    guarded = ranks2.run(on_this_rank, "nan_in_bf16", "train", True)
    for losses in unguarded:
        assert torch.tensor(losses[: module.NAN_STEP]).isfinite().all()
        assert torch.tensor(losses[module.NAN_STEP :]).isnan().all()
    for losses in guarded:
        assert losses[-1] < losses[module.NAN_STEP] < losses[0]

"""Lightning's Trainer with distamp's plugins and callbacks, beside the same run with its own."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import distamp
from distamp import DistGradScaler, StepGuard
from tests.trainers.common import in_ranks, needs, together

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("lightning")]
needs("lightning")

STEPS = 6
SCALE = 2.0**10
TAKEN = [1, 2, 2, 3, 4, 5]


def fit(**options: Any) -> Any:
    """Train in a rank, which alone imports Lightning."""
    from tests.trainers import in_lightning

    return in_lightning.fit(**options)


# -- ranks ------------------------------------------------------------------------------------


def test_all_ranks_skip_under_a_hook_too_and_rates_and_logs_know_it(ranks2):
    for run in ranks2.run(fit, wire="fp16"):
        assert "exchanges sent" in run.hook[0]
        assert run.scale == run.logged["loss_scale"] == SCALE / 2
        assert run.logged["skipped_steps"] == 1.0
        assert run.global_steps == TAKEN
        assert run.rates == pytest.approx([0.01 / (n + 1) for n in TAKEN])


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize("trainer", [{}, BY_VALUE, {"accumulate_grad_batches": 2}])
def test_without_an_overflow_the_run_is_lightnings_to_the_bit(ranks2, trainer):
    ours, theirs = (
        ranks2.run(fit, ours=each, fault=None, trainer=trainer) for each in (True, False)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.weights, mine.rates) == (other.weights, other.rates)
        assert mine.global_steps == other.global_steps


@pytest.mark.parametrize("trainer", [{}, {"accumulate_grad_batches": 2}])
@in_ranks
def test_a_batch_without_a_loss_is_left_out_as_lightning_does(trainer: dict[str, Any]):
    ours, theirs = (
        fit(ours=each, devices=1, fault=None, no_loss_at=3, trainer=trainer)
        for each in (True, False)
    )
    assert ours.weights == theirs.weights


def test_a_schedule_by_epoch_moves_where_the_last_step_was_skipped(ranks2):
    for run in ranks2.run(fit, fault=STEPS - 1, interval="epoch", trainer={"max_epochs": 2}):
        assert run.scale == SCALE / 2
        assert run.rates == pytest.approx([0.01] * 5 + [0.005] * 6 + [0.01 / 3])


def test_max_steps_are_steps_that_were_taken(ranks2):
    for run in ranks2.run(fit, trainer={"max_steps": 3}):
        assert len(run.losses) == 4


CLIP = {"gradient_clip_val": 0.1}


@pytest.mark.parametrize("options", [{"module": "Flat"}, {"settings": {"fused": True}}])
def test_shards_and_fused_optimizers_are_clipped_by_the_whole_norm(ranks2, options):
    runs, plain = ranks2.run(fit, trainer=CLIP, **options), ranks2.run(fit, trainer=CLIP)
    assert together(runs)
    assert runs[0].scale == plain[0].scale == SCALE / 2
    assert runs[0].global_steps == TAKEN
    assert runs[0].weights == pytest.approx(plain[0].weights, rel=1e-3)


@pytest.mark.parametrize("by", ["norm", "value"])
@in_ranks
def test_clipping_by_hand_clips_unscaled_gradients(by: str):
    options = {"module": "Manual", "fault": None, "devices": 1}
    scaled, unscaled = (fit(**options, clip=by, init_scale=s) for s in (SCALE, 1.0))
    assert scaled.weights == pytest.approx(unscaled.weights, rel=1e-6)
    assert scaled.weights != fit(**options).weights


# -- what is kept, and refused --------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
@in_ranks
def test_a_checkpoint_of_either_goes_on_in_the_other(tmp_path: Path, first: bool, then: bool):
    options, two = {"devices": 1, "fault": None}, {"max_epochs": 2}
    path = str(tmp_path / "last.ckpt")
    whole = fit(ours=first, **options, trainer=two)
    fit(ours=first, **options, save=path)
    assert torch.load(path, weights_only=False)["MixedPrecision"]["scale"] == SCALE
    resumed = fit(ours=then, **options, trainer=two, checkpoint=path)
    assert resumed.weights == whole.weights
    assert resumed.global_steps == whole.global_steps[STEPS:]


@in_ranks
def test_the_module_can_be_copied_while_it_trains_and_is_as_it_was_after_an_error():
    from tests.trainers.in_lightning import Watch

    watch = Watch()
    with pytest.raises(ZeroDivisionError, match="lr_scheduler_step"):
        fit(devices=1, raises_at=2, callbacks=(watch,))
    assert watch.own == [True, True]
    assert "lr_scheduler_step" not in vars(watch.module)


@pytest.mark.parametrize("package", ["lightning", "fabric"])
@in_ranks
def test_what_plugins_take_and_refuse(package: str):
    ours = importlib.import_module(f"distamp.integrations.{package}")
    scaler = DistGradScaler("cpu")
    assert ours.FSDPPrecision("16-mixed", scaler).scaler is scaler
    assert isinstance(ours.FSDPPrecision("16-mixed").scaler, DistGradScaler)
    for kind, given in (
        (ours.Precision, []),
        (ours.HalfPrecision, ["bf16-true"]),
        (ours.MixedPrecision, ["bf16-mixed", "cpu"]),
        (ours.FSDPPrecision, ["32-true"]),
    ):
        assert isinstance(kind(*given, max_consecutive_skips=3).scaler, StepGuard)
        with pytest.raises(ValueError, match="does not scale losses"):
            kind(*given, init_scale=2.0)
    with pytest.raises(TypeError, match=r"distamp\.DistGradScaler"):
        ours.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@in_ranks
def test_what_lightning_keeps_and_what_it_cannot_be():
    from distamp.integrations.lightning import MixedPrecision, SkippedSteps
    from tests.trainers.in_lightning import Theirs

    bf16 = MixedPrecision("bf16-mixed", "cpu")
    bf16.load_state_dict({})  # as Lightning's own has it
    bf16.load_state_dict(bf16.state_dict())
    with pytest.raises(ValueError, match="skipped steps"):
        fit(ours=False, devices=1, callbacks=(SkippedSteps(),))
    with pytest.raises(ValueError, match="LBFGS"):
        fit(devices=1, optimizer="LBFGS")
    with distamp.install():
        assert isinstance(Theirs("16-mixed", "cpu").scaler, DistGradScaler)

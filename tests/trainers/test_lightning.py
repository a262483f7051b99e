"""Lightning's Trainer and Fabric with distamp's plugins and callbacks: what is their own."""

import importlib
from typing import Any
from unittest import mock

import pytest
import torch

import distamp
from distamp import DistGradScaler, StepGuard
from tests.on_ranks import on_ranks
from tests.trainers.common import SCALE, STEPS, needs, quiet, train

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("lightning")]
needs("lightning")


# -- steps and norms ---------------------------------------------------------------------------


def test_a_schedule_by_epoch_moves_where_the_last_step_was_skipped(ranks2):
    options = {"fault": STEPS - 1, "interval": "epoch", "trainer": {"max_epochs": 2}}
    for run in ranks2.run(train, "lightning", **options):
        assert run.scale == SCALE / 2
        assert run.rates == pytest.approx([0.01] * 5 + [0.005] * 6 + [0.01 / 3])


def test_max_steps_are_steps_that_were_taken(ranks2):
    for run in ranks2.run(train, "lightning", trainer={"max_steps": 3}):
        assert len(run.weights) == 4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lightning", {"clip": 0.1, "module": "Flat"}),
        ("lightning", {"clip": 0.1, "settings": {"fused": True}}),
        ("fabric", {"clip": 0.1, "fused": True}),
        ("fabric", {"clip_val": 0.01, "fused": True}),
        ("fabric", {"clip": 0.1, "layout": "FSDP1"}),
        ("fabric", {"fused": True, "layout": "FSDP1"}),
    ],
)
def test_shards_and_fused_optimizers_train_as_the_whole_model(ranks2, name, options):
    plain = {key: value for key, value in options.items() if key.startswith("clip")}
    one, other = ranks2.run(train, name, **options)
    whole, _ = ranks2.run(train, name, **plain)
    assert one.weights == other.weights
    assert (one.scale, one.skipped) == (SCALE / 2, whole.skipped)
    assert vars(one).get("dtypes") == vars(whole).get("dtypes")
    # Under the Trainer and FSDP1 gradients of float16 are reduced.
    is_sharded = {"module", "layout"} & options.keys()
    assert one.weights == pytest.approx(whole.weights, rel=1e-3 if is_sharded else 1e-5)


@pytest.mark.parametrize("by", ["norm", "value"])
@on_ranks(2)
def test_clipping_by_hand_clips_unscaled_gradients(by: str):
    options = {"module": "Manual", "fault": None, "devices": 1}
    scaled, unscaled = (
        train("lightning", **options, by=by, init_scale=scale) for scale in (SCALE, 1.0)
    )
    assert scaled.weights == pytest.approx(unscaled.weights, rel=1e-6)
    assert scaled.weights != train("lightning", **options).weights


@on_ranks(2)
def test_under_fabric_a_second_clip_before_the_step_finds_them_clipped():
    once, twice = (train("fabric", devices=1, clip_val=0.01, clips=n) for n in (1, 2))
    assert once.weights == twice.weights


# -- what is kept, and refused --------------------------------------------------------------------


@on_ranks(2)
def test_the_module_can_be_copied_while_it_trains_and_is_as_it_was_after_an_error():
    from tests.trainers.in_lightning import Watch

    watch = Watch()
    with pytest.raises(ZeroDivisionError, match="lr_scheduler_step"):
        train("lightning", devices=1, raises_at=2, callbacks=(watch,))
    assert watch.own == [True, True]
    assert "lr_scheduler_step" not in vars(watch.module)


@pytest.mark.parametrize("package", ["lightning", "fabric"])
@on_ranks(2)
def test_what_plugins_take_and_refuse(package: str):
    quiet()
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


@on_ranks(2)
def test_what_lightning_keeps_and_what_it_cannot_be():
    from distamp.integrations.lightning import CommHook, MixedPrecision, SkippedSteps
    from tests.trainers.in_lightning import Theirs

    with pytest.raises(ValueError, match="'fp17'"):
        CommHook("fp17")  # also where one device has no use for it
    bf16 = MixedPrecision("bf16-mixed", "cpu")
    bf16.load_state_dict({})  # as Lightning's own has it
    bf16.load_state_dict(bf16.state_dict())
    wrong: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        ("lightning", {"ours": False, "callbacks": (SkippedSteps(),)}, ValueError, "skipped steps"),
        ("fabric", {"closure": lambda: None}, RuntimeError, "closure"),
        ("lightning", {"optimizer": "LBFGS"}, ValueError, "LBFGS"),
    ]
    for name, given, error, says in wrong:
        with pytest.raises(error, match=says):
            train(name, devices=1, **given)
    with distamp.patch_torch():
        assert isinstance(Theirs("16-mixed", "cpu").scaler, DistGradScaler)


@on_ranks(2)
def test_the_region_is_for_the_device_that_is_there_whatever_torch_was_built_for():
    from distamp.integrations.fabric import FSDPPrecision

    quiet()
    with mock.patch.object(
        *(torch.accelerator, "current_accelerator"),
        lambda check_available=False: None if check_available else torch.device("cuda"),
    ):
        assert FSDPPrecision("16-mixed").forward_context().device == "cpu"

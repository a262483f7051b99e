"""Facts of Lightning's Trainer and of Fabric that other trainers do not have."""

import importlib
from types import SimpleNamespace
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
    last_step = STEPS - 1
    two_epochs = {"max_epochs": 2}
    runs = ranks2.run(train, "lightning", fault=last_step, interval="epoch", trainer=two_epochs)
    rates_of_epoch_0 = [0.01] * (STEPS - 1)
    rates_of_epoch_1 = [0.01 / 2] * STEPS
    rate_after_epoch_1 = [0.01 / 3]
    for run in runs:
        assert run.scale == SCALE / 2
        assert run.rates == pytest.approx(rates_of_epoch_0 + rates_of_epoch_1 + rate_after_epoch_1)


@pytest.mark.slow
def test_max_steps_are_steps_that_were_taken(ranks2):
    """Three taken steps need four batches, because one of the four is skipped."""
    runs = ranks2.run(train, "lightning", trainer={"max_steps": 3})
    for run in runs:
        batches = len(run.weights)
        assert batches == 4


def assert_both_ranks_train_as_the_unsharded_model(
    runs: list[SimpleNamespace], unsharded_run: SimpleNamespace, tolerance: float
) -> None:
    """Assert that the ranks agree, and skipped and trained as a run of the model without shards."""
    run_0, run_1 = runs
    assert run_0.weights == run_1.weights
    assert run_0.scale == SCALE / 2
    assert run_0.skipped == unsharded_run.skipped
    assert run_0.weights == pytest.approx(unsharded_run.weights, rel=tolerance)


@pytest.mark.slow
def test_under_lightning_and_fsdp1_clipping_is_that_of_the_unsharded_model(ranks2):
    runs = ranks2.run(train, "lightning", clip=0.1, module="FSDP1Net")
    unsharded_run, _ = ranks2.run(train, "lightning", clip=0.1)
    # FSDP1 under the Trainer reduces gradients in float16.
    assert_both_ranks_train_as_the_unsharded_model(runs, unsharded_run, tolerance=1e-3)


@pytest.mark.slow
def test_under_lightning_a_fused_optimizer_trains_as_the_unfused_one(ranks2):
    runs = ranks2.run(train, "lightning", clip=0.1, settings={"fused": True})
    unfused_run, _ = ranks2.run(train, "lightning", clip=0.1)
    assert_both_ranks_train_as_the_unsharded_model(runs, unfused_run, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "clipping",
    [
        pytest.param({"clip": 0.1}, id="norm"),
        pytest.param({"clip_val": 0.01}, id="value"),
    ],
)
def test_under_fabric_a_fused_optimizer_trains_as_the_unfused_one(ranks2, clipping):
    runs = ranks2.run(train, "fabric", fused=True, **clipping)
    unfused_run, _ = ranks2.run(train, "fabric", **clipping)
    assert_both_ranks_train_as_the_unsharded_model(runs, unfused_run, tolerance=1e-5)
    assert runs[0].dtypes == unfused_run.dtypes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clipping", "is_fused"),
    [
        pytest.param({"clip": 0.1}, False, id="clip"),
        pytest.param({}, True, id="fused"),
    ],
)
def test_under_fabric_and_fsdp1_training_is_that_of_the_unsharded_model(ranks2, clipping, is_fused):
    runs = ranks2.run(train, "fabric", layout="FSDP1", fused=is_fused, **clipping)
    unsharded_run, _ = ranks2.run(train, "fabric", **clipping)
    # FSDP1 reduces gradients in float16.
    assert_both_ranks_train_as_the_unsharded_model(runs, unsharded_run, tolerance=1e-3)
    assert runs[0].dtypes == unsharded_run.dtypes, "the layers compute in the same dtype"


@pytest.mark.parametrize("clip_algorithm", [pytest.param("norm", marks=pytest.mark.slow), "value"])
@on_ranks(2)
def test_manual_clipping_clips_unscaled_gradients(clip_algorithm: str):
    def train_manually(**options: Any) -> list[float]:
        run = train("lightning", module="ManualNet", fault=None, devices=1, **options)
        weights: list[float] = run.weights
        return weights

    weights_at_scale = train_manually(clip_algorithm=clip_algorithm, init_scale=SCALE)
    weights_without_scale = train_manually(clip_algorithm=clip_algorithm, init_scale=1.0)
    weights_without_clipping = train_manually()
    assert weights_at_scale == pytest.approx(weights_without_scale, rel=1e-6)
    assert weights_at_scale != weights_without_clipping, "clipping has an effect"


@on_ranks(2)
def test_under_fabric_a_second_clip_before_the_step_changes_nothing():
    run_with_one_clip = train("fabric", devices=1, clip_val=0.01, clips=1)
    run_with_two_clips = train("fabric", devices=1, clip_val=0.01, clips=2)
    assert run_with_one_clip.weights == run_with_two_clips.weights


# -- the module and its copies ---------------------------------------------------------------------


@on_ranks(2)
def test_a_copy_of_the_module_owns_its_hook_and_an_error_restores_the_module():
    from tests.trainers.in_lightning import CopyModule

    callback = CopyModule()
    # The message of the error lists the attributes of the module during fit().
    with pytest.raises(ZeroDivisionError, match="lr_scheduler_step"):
        train("lightning", devices=1, raises_at=2, callbacks=(callback,))
    assert callback.hooks_are_bound_to_copy == [True, True]
    assert "lr_scheduler_step" not in vars(callback.module)


# -- arguments and refusals ------------------------------------------------------------------------


def import_integration(package: str) -> Any:
    quiet()
    return importlib.import_module(f"distamp.integrations.{package}")


@pytest.mark.parametrize("package", ["lightning", "fabric"])
@on_ranks(2)
def test_a_plugin_for_fp16_has_a_scaler_of_distamp(package: str):
    integration = import_integration(package)
    scaler = DistGradScaler("cpu")
    assert integration.FSDPPrecision("16-mixed", scaler).scaler is scaler
    assert isinstance(integration.FSDPPrecision("16-mixed").scaler, DistGradScaler)


@pytest.mark.parametrize("package", ["lightning", "fabric"])
@on_ranks(2)
def test_a_plugin_refuses_a_scaler_of_torch(package: str):
    integration = import_integration(package)
    with pytest.raises(TypeError, match=r"distamp\.DistGradScaler"):
        integration.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


PLUGINS_WITHOUT_A_LOSS_SCALE = {
    "Precision": (),
    "HalfPrecision": ("bf16-true",),
    "MixedPrecision": ("bf16-mixed", "cpu"),
    "FSDPPrecision": ("32-true",),
}


@pytest.mark.parametrize("package", ["lightning", "fabric"])
@pytest.mark.parametrize("plugin_name", PLUGINS_WITHOUT_A_LOSS_SCALE)
@on_ranks(2)
def test_a_plugin_without_a_loss_scale_has_a_guard_and_refuses_settings_of_a_scale(
    package: str, plugin_name: str
):
    plugin_class = getattr(import_integration(package), plugin_name)
    arguments = PLUGINS_WITHOUT_A_LOSS_SCALE[plugin_name]
    plugin = plugin_class(*arguments, max_consecutive_skips=3)
    assert isinstance(plugin.scaler, StepGuard)
    with pytest.raises(ValueError, match="does not scale losses"):
        plugin_class(*arguments, init_scale=2.0)


@on_ranks(2)
def test_a_hook_of_an_unknown_format_is_refused_even_if_one_device_does_not_need_a_hook():
    integration = import_integration("lightning")
    with pytest.raises(ValueError, match="'fp17'"):
        integration.CommHook("fp17")


@on_ranks(2)
def test_a_bf16_plugin_loads_its_state_and_the_empty_state_of_lightnings_plugin():
    plugin = import_integration("lightning").MixedPrecision("bf16-mixed", "cpu")
    plugin.load_state_dict({})
    plugin.load_state_dict(plugin.state_dict())


@on_ranks(2)
def test_the_callback_of_skipped_steps_is_refused_without_a_plugin_of_distamp():
    callback = import_integration("lightning").SkippedSteps()
    with pytest.raises(ValueError, match="skipped steps"):
        train("lightning", with_distamp=False, devices=1, callbacks=(callback,))


@on_ranks(2)
def test_a_step_with_a_closure_is_refused_under_fabric():
    with pytest.raises(RuntimeError, match="closure"):
        train("fabric", devices=1, closure=lambda: None)


@on_ranks(2)
def test_lbfgs_is_refused_under_lightning():
    with pytest.raises(ValueError, match="LBFGS"):
        train("lightning", devices=1, optimizer="LBFGS")


@on_ranks(2)
def test_patch_torch_gives_lightnings_plugin_a_scaler_of_distamp():
    quiet()
    from tests.trainers.in_lightning import TorchMixedPrecision

    with distamp.patch_torch():
        plugin = TorchMixedPrecision("16-mixed", "cpu")
    assert isinstance(plugin.scaler, DistGradScaler)


@on_ranks(2)
def test_autocast_is_for_the_present_device_even_if_torch_was_built_for_cuda():
    integration = import_integration("fabric")

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        """Behave as in a build for CUDA on a machine without a GPU."""
        return None if check_available else torch.device("cuda")

    with mock.patch.object(torch.accelerator, "current_accelerator", current_accelerator):
        plugin = integration.FSDPPrecision("16-mixed")
        assert plugin.forward_context().device == "cpu"

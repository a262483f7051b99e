"""Training through `initialize`, compared with the same loop in plain torch."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from distamp import OpLists, PrecisionLevel, initialize
from distamp.errors import CallOrderError, LossScaleCollapseError
from distamp.scaler import DynamicLossScale
from tests.levels.nets import SCALE, adam, backward, batches, loss_of, net, train, values
from tests.quick_cases import quick_cases

STEPS = 6
LEVELS = ("fp32", "fp16", "fp16-O2", "fp16-O3", "bf16", "bf16-O2", "bf16-O3")
BATCH = next(batches(1))


class Run(NamedTuple):
    """The losses of some steps, and the trained weights (an optimizer's masters, if it has any)."""

    losses: list[float]
    weights: list[Tensor]


def amp_at(level: Any, **settings: Any) -> Any:
    """Return an Amp; at fp16 and fp16-O2 no gradient here overflows at its loss scale."""
    model = net()
    if level in ("fp16", "fp16-O2") and "loss_scale" not in settings:
        settings = {"init_scale": SCALE} | settings
    return initialize(model, adam(model), level, **settings)


def stepped_params(amp: Any) -> list[nn.Parameter]:
    """Return the parameters of the optimizer, which are masters at some levels."""
    return [param for group in amp.optimizers[0].param_groups for param in group["params"]]


def train_at_level(level: str, max_norm: float | None = None) -> Run:
    amp = amp_at(level)
    losses = train(amp, batches(STEPS), max_norm)
    weights = [param.detach() for param in stepped_params(amp)]
    for param, weight in zip(amp.model.parameters(), weights, strict=False):
        assert torch.equal(param, weight.to(param.dtype))
    return Run(losses, weights)


def train_in_torch(dtype: torch.dtype | None, max_norm: float | None = None) -> Run:
    """Train with torch.autocast and torch.amp.GradScaler, or in float32 if ``dtype`` is None."""
    model = net()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype is torch.float16)
    losses = []
    for context, following in batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            logits = model(context)
        loss = loss_of(logits, following)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return Run(losses, values(model))


# -- levels that train as torch's own loop --------------------------------------------------------

levels_with_float32_weights = pytest.mark.parametrize(
    ("level", "dtype"),
    quick_cases(
        [("fp32", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)],
        quick=[("fp16", torch.float16), ("bf16", torch.bfloat16)],
    ),
)


@levels_with_float32_weights
def test_a_level_with_float32_weights_is_bit_identical_with_torchs_own_loop(level, dtype):
    run = train_at_level(level)
    expected = train_in_torch(dtype)
    assert run.losses == expected.losses
    assert all(map(torch.equal, run.weights, expected.weights))


@levels_with_float32_weights
def test_a_level_that_clips_trains_as_torchs_own_loop_that_clips(level, dtype):
    run = train_at_level(level, max_norm=0.1)
    expected = train_in_torch(dtype, max_norm=0.1)
    # The norm is summed up in another order.
    assert run.losses == pytest.approx(expected.losses, rel=1e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_learns_as_much_as_fp32(level):
    # fp16-O3 makes no promise: builds of torch with other kernels diverge by 3 %.
    tolerance = 5e-2 if level == "fp16-O3" else 2e-2
    expected = train_in_torch(None)
    assert train_at_level(level).losses == pytest.approx(expected.losses, rel=tolerance)


@pytest.mark.parametrize("level", ["fp32", "fp16", "fp16-O2", "bf16-O2"])
def test_apexs_lines_train_as_ours(level):
    """A step in Apex's spelling has two microbatches, and clips the master parameters."""
    amp = amp_at(level)
    (optimizer,) = amp.optimizers
    for context, following in batches(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            with amp.autocast():
                loss = loss_of(amp.model(context), following) / 2
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        assert amp.step()
    weights = [param.detach() for param in amp.master_params(optimizer)]
    expected = train_at_level(level, max_norm=0.1)
    # The norm is summed up in another order.
    torch.testing.assert_close(weights, expected.weights, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("level", ["fp16", "fp16-O2", "bf16"])
def test_losses_and_microbatches_add_up_under_one_scale(level):
    model = net(batchnorm=False)
    reference = net(batchnorm=False)
    amp = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    for weight, (context, following) in enumerate(batches(2), start=1):
        for rows, targets in zip(context.chunk(2), following.chunk(2), strict=True):
            with amp.autocast():
                logits = amp.model(rows)
            amp.backward(loss_of(logits, targets) * weight / 2)
        (loss_of(reference(context), following) * weight).backward()
    assert amp.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for param, expected in zip(values(model), values(reference), strict=True):
        torch.testing.assert_close(param.float(), expected, rtol=1e-2, atol=1e-3)


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_clip_measures_unscaled_gradients(level):
    amp = amp_at(level)
    reference = net()
    context, following = BATCH
    loss_of(reference(context), following).backward()
    exact_grads = [param.grad for param in reference.parameters()]
    expected = nn.utils.get_total_norm(exact_grads)
    backward(amp, BATCH)
    torch.testing.assert_close(amp.clip_grad_norm_(0.1), expected, rtol=2e-2, atol=0)
    clipped_grads = [param.grad.float() for param in stepped_params(amp)]
    clipped = nn.utils.get_total_norm(clipped_grads)
    torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-2, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_clears_the_gradients_of_the_model_and_of_the_masters(level):
    amp = amp_at(level)
    backward(amp, BATCH)
    amp.clip_grad_norm_(0.1)
    amp.zero_grad()
    params = [*amp.model.parameters(), *stepped_params(amp)]
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("level", ["fp16", "fp16-O2", "bf16-O2"])
def test_gradients_for_a_penalty_come_unscaled_and_in_fp32(level):
    amp = amp_at(level)
    reference = net()
    context, following = BATCH
    with amp.autocast():
        logits = amp.model(context)
    params = list(amp.model.parameters())
    grads = amp.grad(loss_of(logits, following), params, create_graph=True)
    loss = loss_of(reference(context), following)
    exact = torch.autograd.grad(loss, list(reference.parameters()))
    for grad, exact_grad in zip(grads, exact, strict=True):
        assert grad.requires_grad
        torch.testing.assert_close(grad.detach(), exact_grad, rtol=5e-2, atol=2e-3)
    assert all(param.grad is None for param in params)


def test_gradients_for_a_penalty_do_not_underflow():
    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    amp = amp_at("fp16", init_scale=2.0**16)
    penalty = half.float().sum() * 1e-8
    (grad,) = amp.grad(penalty, [half])
    assert grad.tolist() == pytest.approx([1e-8] * 2, rel=1e-2)


# -- steps that overflow --------------------------------------------------------------------------


def check_skip_and_step(amp: Any) -> None:
    """Check that a step with an infinite loss changes no weight, and that the next one does."""
    before = values(amp.model)
    backward(amp, BATCH, factor=torch.inf)
    assert not amp.step()
    assert all(map(torch.equal, before, values(amp.model)))
    amp.zero_grad()
    backward(amp, BATCH)
    assert amp.step()
    assert not all(map(torch.equal, before, values(amp.model)))


@pytest.mark.parametrize("level", ["fp16", "fp16-O2"])
def test_a_step_that_overflows_is_skipped_and_halves_the_scale(level):
    amp = amp_at(level)
    assert amp.scaler.get_scale() == SCALE
    check_skip_and_step(amp)
    assert amp.scaler.get_scale() == SCALE / 2


def test_a_dynamic_scale_begins_at_that_of_torch():
    amp = amp_at("fp16-O2", loss_scale=None)
    assert amp.scaler.get_scale() == 2.0**16
    check_skip_and_step(amp)
    assert amp.scaler.get_scale() == 2.0**15


def test_a_constant_scale_stays_through_a_skipped_step():
    amp = amp_at("fp16-O2", loss_scale=128.0)
    assert amp.scaler.get_scale() == 128.0
    check_skip_and_step(amp)
    assert amp.scaler.get_scale() == 128.0


def test_fp16_o3_skips_without_a_scale():
    amp = amp_at("fp16-O3")
    assert amp.scaler.get_scale() == 1.0
    check_skip_and_step(amp)
    assert amp.scaler.get_scale() == 1.0


@pytest.mark.parametrize("level", ["fp16", "fp16-O2", "fp16-O3"])
def test_the_result_of_a_skipped_step_has_a_boolean_tensor(level):
    amp = amp_at(level)
    backward(amp, BATCH, factor=torch.inf)
    taken = amp.step().taken
    assert not taken.item()
    assert taken.shape == ()
    assert taken.dtype is torch.bool


def backward_of_two_models(amp: Any) -> None:
    context, following = BATCH
    amp.zero_grad()
    with amp.autocast():
        logits = [model(context) for model in amp.models]
    amp.backward(loss_of(logits[0], following) + loss_of(logits[1], following))


def test_of_two_optimizers_each_is_skipped_by_its_own_overflow_and_clipped_by_one_norm():
    models = [net(seed) for seed in (0, 1)]
    amp = initialize(models, [adam(model) for model in models], "fp16", init_scale=SCALE)

    backward_of_two_models(amp)
    amp.clip_grad_norm_(0.1)
    grads = [param.grad for model in models for param in model.parameters()]
    norm = nn.utils.get_total_norm(grads)
    torch.testing.assert_close(norm, torch.tensor(0.1), rtol=1e-4, atol=0)
    result = amp.step()
    assert result
    assert all(result.optimizers)

    backward_of_two_models(amp)
    models[1].output.bias.grad[0] = torch.nan
    result = amp.step()
    first, second = result.optimizers
    assert first
    assert not second
    assert not result


def test_a_loss_scale_and_a_limit_of_skips_reach_the_scaler():
    model = net()
    loss_scale = DynamicLossScale(backoff_factor=0.25)
    settings = {"loss_scale": loss_scale, "max_consecutive_skips": 2}
    amp = initialize(model, adam(model), "fp16", **settings)
    backward(amp, BATCH, factor=torch.inf)
    assert not amp.step()
    backward(amp, BATCH, factor=torch.inf)
    with pytest.raises(LossScaleCollapseError):
        amp.step()
    assert amp.scaler.get_scale() == 2.0**14


# -- the region of autocast, and outputs ----------------------------------------------------------


@pytest.mark.parametrize("level", ["fp16-O2", "fp16-O3", "bf16-O2", "bf16-O3"])
def test_nothing_is_autocast_in_a_cast_model(level):
    amp = initialize(net(), None, level)
    with torch.autocast("cpu", torch.bfloat16), amp.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_op_lists_and_the_cache_setting_reach_the_region():
    x = torch.ones(2, 2)
    amp = amp_at("fp16", op_lists=OpLists(fp32={"mm"}), cache_enabled=False)
    with amp.autocast():
        assert torch.mm(x, x).dtype is torch.float32
        assert not torch.is_autocast_cache_enabled()


def test_a_cast_model_returns_float32():
    amp = initialize(net(), None, "fp16-O2")
    assert amp.model(BATCH[0]).dtype is torch.float32


def test_a_level_can_choose_the_dtype_of_outputs():
    level = PrecisionLevel.from_name("fp16-O2").replace(output=torch.float16)
    amp = amp_at(level)
    assert amp.model(BATCH[0]).dtype is torch.float16


# -- calls that an Amp refuses --------------------------------------------------------------------


def test_a_step_without_an_optimizer_is_refused():
    amp = initialize(net(), None, "fp16-O2")
    with pytest.raises(CallOrderError, match="no optimizer"):
        amp.step()


def test_the_model_of_several_models_is_refused():
    amp = initialize([net(), net(1)], None, "fp16")
    with pytest.raises(ValueError, match=r"amp\.models"):
        _ = amp.model


def test_a_backward_pass_between_a_clip_and_the_step_is_refused():
    amp = amp_at("fp16")
    context, following = BATCH
    loss = loss_of(amp.model(context), following)
    amp.backward(loss, retain_graph=True)
    amp.clip_grad_norm_(1.0)
    with pytest.raises(CallOrderError, match="after the last backward"):
        amp.backward(loss)

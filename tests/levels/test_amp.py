"""Training through `initialize`, beside the same loop written by hand in torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distamp
from distamp import initialize
from distamp.errors import CallOrderError, LossScaleCollapseError
from tests.levels.nets import SCALE, adam, backward, batches, loss_of, net, train, values

STEPS = 6
LEVELS = ("fp32", "fp16", "fp16-O2", "fp16-O3", "bf16", "bf16-O2", "bf16-O3")
BATCH = next(batches(1))


def made(level: str, **overrides: Any) -> Any:
    """An Amp; at fp16 and fp16-O2 with a scale that no gradient here overflows."""
    model = net()
    if level in ("fp16", "fp16-O2") and "loss_scale" not in overrides:
        overrides = {"init_scale": SCALE} | overrides
    return initialize(model, adam(model), level, **overrides)


def stepped(amp: Any) -> list[nn.Parameter]:
    return [p for group in amp.optimizers[0].param_groups for p in group["params"]]


def trained(level: str, clip: float | None = None) -> tuple[list[float], list[Tensor]]:
    """Losses, and what the optimizer steps."""
    amp = made(level)
    losses = train(amp, batches(STEPS), clip)
    for parameter, master in zip(amp.model.parameters(), stepped(amp), strict=False):
        assert torch.equal(parameter, master.to(parameter.dtype))
    return losses, [p.detach() for p in stepped(amp)]


def by_hand(dtype: torch.dtype | None, clip: float | None = None) -> tuple[list[float], Any]:
    """Train with torch.autocast and torch.amp.GradScaler; None is float32 without either."""
    model, losses = net(), []
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype is torch.float16)
    for context, following in batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            logits = model(context)
        loss = loss_of(logits, following)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, values(model)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    ("level", "dtype"), [("fp32", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_a_level_with_float32_weights_is_torchs_own_loop_to_the_bit(level, dtype, clip):
    (ours, weights), (theirs, wanted) = trained(level, clip), by_hand(dtype, clip)
    if clip is None:
        assert ours == theirs
        assert all(map(torch.equal, weights, wanted))
    else:  # the norm is summed up in another order
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_learns_what_fp32_learns(level):
    # fp16-O3 makes no promise: builds of torch whose kernels round otherwise part by 3 %.
    within = 5e-2 if level == "fp16-O3" else 2e-2
    assert trained(level)[0] == pytest.approx(by_hand(None)[0], rel=within)


@pytest.mark.parametrize("level", LEVELS)
def test_the_norm_that_is_clipped_is_that_of_unscaled_gradients_and_zero_grad_is_whole(level):
    amp, reference = made(level), net()
    loss_of(reference(BATCH[0]), BATCH[1]).backward()
    wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    backward(amp, BATCH)
    torch.testing.assert_close(amp.clip_grad_norm_(0.1), wanted, rtol=2e-2, atol=0)
    clipped = nn.utils.get_total_norm([p.grad.float() for p in stepped(amp)])
    torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-2, atol=0)
    amp.zero_grad()
    assert all(p.grad is None for p in (*amp.model.parameters(), *stepped(amp)))


@pytest.mark.parametrize("level", ["fp16-O2", "fp16-O3", "bf16-O2", "bf16-O3"])
def test_nothing_is_autocast_in_a_cast_model(level):
    with torch.autocast("cpu", torch.bfloat16), initialize(net(), None, level).autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("level", "settings", "first", "after"),
    [
        ("fp16", {"init_scale": SCALE}, SCALE, SCALE / 2),
        ("fp16-O2", {"init_scale": SCALE}, SCALE, SCALE / 2),
        ("fp16-O2", {"loss_scale": None}, 2.0**16, 2.0**15),
        ("fp16-O2", {"loss_scale": 128.0}, 128.0, 128.0),
        ("fp16-O3", {}, 1.0, 1.0),
    ],
)
def test_a_step_that_overflows_is_skipped_and_says_so(level, settings, first, after):
    amp = made(level, **settings)
    assert amp.scaler.get_scale() == first
    before = values(amp.model)
    backward(amp, BATCH, torch.inf)
    result = amp.step()
    taken = result.taken
    assert (bool(result), taken.item(), taken.shape, taken.dtype) == (False, False, (), torch.bool)
    assert all(map(torch.equal, before, values(amp.model)))
    assert amp.scaler.get_scale() == after
    amp.zero_grad()
    backward(amp, BATCH)
    assert amp.step()
    assert not all(map(torch.equal, before, values(amp.model)))


def test_of_two_optimizers_each_is_skipped_by_its_own_overflow_and_clipped_by_one_norm():
    models = [net(seed) for seed in (0, 1)]
    amp = initialize(models, [adam(model) for model in models], "fp16", init_scale=SCALE)
    for fault in (False, True):
        amp.zero_grad()
        with amp.autocast():
            logits = [model(BATCH[0]) for model in amp.models]
        amp.backward(sum(loss_of(each, BATCH[1]) for each in logits))
        if fault:
            models[1].output.bias.grad[0] = torch.nan
        else:
            amp.clip_grad_norm_(0.1)
            norm = nn.utils.get_total_norm([p.grad for m in models for p in m.parameters()])
            torch.testing.assert_close(norm, torch.tensor(0.1), rtol=1e-4, atol=0)
        result = amp.step()
        assert [*map(bool, (*result.optimizers, result))] == [True, not fault, not fault]


@pytest.mark.parametrize("level", ["fp16", "fp16-O2", "bf16"])
def test_losses_and_microbatches_add_up_under_one_scale(level):
    model, reference = net(batchnorm=False), net(batchnorm=False)
    amp = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    for number, (context, following) in enumerate(batches(2), start=1):
        for rows, wanted in zip(context.chunk(2), following.chunk(2), strict=True):
            with amp.autocast():
                logits = amp.model(rows)
            amp.backward(loss_of(logits, wanted) * number / 2)
        (loss_of(reference(context), following) * number).backward()
    assert amp.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for ours, wanted in zip(values(model), values(reference), strict=True):
        torch.testing.assert_close(ours.float(), wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("level", ["fp32", "fp16", "fp16-O2", "bf16-O2"])
def test_apexs_lines_train_as_ours(level):
    amp = made(level)
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
    found = [p.detach() for p in amp.master_params(optimizer)]
    # The norm is summed up in another order.
    torch.testing.assert_close(found, trained(level, 0.1)[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("level", ["fp16", "fp16-O2", "bf16-O2"])
def test_gradients_for_a_penalty_come_unscaled_and_in_fp32(level):
    amp, reference = made(level), net()
    with amp.autocast():
        logits = amp.model(BATCH[0])
    parameters = list(amp.model.parameters())
    ours = amp.grad(loss_of(logits, BATCH[1]), parameters, create_graph=True)
    wanted = torch.autograd.grad(
        loss_of(reference(BATCH[0]), BATCH[1]), list(reference.parameters())
    )
    for mine, other in zip(ours, wanted, strict=True):
        assert mine.requires_grad
        torch.testing.assert_close(mine.detach(), other, rtol=5e-2, atol=2e-3)
    assert all(p.grad is None for p in parameters)


def test_gradients_for_a_penalty_do_not_underflow():
    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    (gradient,) = made("fp16", init_scale=2.0**16).grad((half.float() * 1e-8).sum(), [half])
    assert gradient.tolist() == pytest.approx([1e-8] * 2, rel=1e-2)


def test_what_cannot_be_called_now_says_what_to_do():
    amp = initialize(net(), None, "fp16-O2")
    assert amp.model(BATCH[0]).dtype is torch.float32
    with pytest.raises(CallOrderError, match="no optimizer"):
        amp.step()
    with pytest.raises(ValueError, match=r"amp\.models"):
        _ = initialize([net(), net(1)], None, "fp16").model
    amp = made("fp16")
    loss = loss_of(amp.model(BATCH[0]), BATCH[1])
    amp.backward(loss, retain_graph=True)
    amp.clip_grad_norm_(1.0)
    with pytest.raises(CallOrderError, match="after the last backward"):
        amp.backward(loss)


def test_settings_of_the_region_and_the_scaler_are_handed_on():
    x = torch.ones(2, 2)
    amp = made("fp16", op_lists=distamp.OpLists(fp32={"mm"}), cache_enabled=False)
    with amp.autocast():
        assert (torch.mm(x, x).dtype, torch.is_autocast_cache_enabled()) == (torch.float32, False)
    amp = made(distamp.PrecisionLevel.from_name("fp16-O2").replace(output=torch.float16))
    assert amp.model(BATCH[0]).dtype is torch.float16
    rule = distamp.scaler.DynamicLossScale(backoff_factor=0.25)
    amp = initialize(model := net(), adam(model), "fp16", loss_scale=rule, max_consecutive_skips=2)
    backward(amp, BATCH, torch.inf)
    assert not amp.step()
    backward(amp, BATCH, torch.inf)
    with pytest.raises(LossScaleCollapseError):
        amp.step()
    assert amp.scaler.get_scale() == 2.0**14

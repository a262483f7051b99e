"""Training through `initialize`, beside the same loop written by hand in torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distamp import initialize
from distamp.errors import StageError
from distamp.scaler import DynamicSchedule, StaticSchedule
from tests.initialize.nets import batches, loss_of, net, values

STEPS = 6
LEVELS = ("O0", "O1", "O2", "O3", "bf16", "bf16-O2", "bf16-O3")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def train(level: str, clip: float | None = None, **overrides) -> tuple[list[float], nn.Module]:
    model = net()
    amp = initialize(model, adam(model), level, **overrides)
    losses = []
    for context, following in batches(STEPS):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(context)
        loss = loss_of(logits, following)
        amp.backward(loss)
        if clip is not None:
            amp.clip_grad_norm_(clip)
        assert amp.step()
        losses.append(loss.item())
    return losses, amp.model


def by_hand(dtype: torch.dtype | None, clip: float | None = None) -> tuple[list[float], nn.Module]:
    """Train with torch.autocast and torch.amp.GradScaler; None is float32 without either."""
    model = net()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype is torch.float16)
    losses = []
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
    return losses, model


def masters_by_hand(dtype: torch.dtype, scale: float) -> tuple[list[float], list[torch.Tensor]]:
    """Train a cast model whose fp32 copy is stepped, written out; batch norms stay in float32."""
    model = net()
    for name, child in model.named_children():
        if name != "norm":
            child.to(dtype)
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=0.01, eps=1e-3)
    losses = []
    for context, following in batches(STEPS):
        model.zero_grad()
        loss = loss_of(model(context), following)
        (loss * scale).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses, [master.detach() for master in masters]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    ("level", "dtype"), [("O0", None), ("O1", torch.float16), ("bf16", torch.bfloat16)]
)
def test_a_level_with_float32_weights_is_torchs_own_loop_to_the_bit(level, dtype, clip):
    overrides = {"init_scale": 2.0**10} if level == "O1" else {}
    ours, model = train(level, clip, **overrides)
    theirs, reference = by_hand(dtype, clip)
    if clip is None:
        assert ours == theirs
        for mine, other in zip(values(model), values(reference), strict=True):
            assert torch.equal(mine, other)
    else:  # the norm is summed up in another order
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(("level", "dtype"), [("O2", torch.float16), ("bf16-O2", torch.bfloat16)])
def test_o2_is_a_loop_over_fp32_masters_written_by_hand(level, dtype):
    scale = 2.0**10 if level == "O2" else 1.0
    overrides = {"init_scale": scale} if level == "O2" else {}
    ours, model = train(level, **overrides)
    theirs, masters = masters_by_hand(dtype, scale)
    assert ours == theirs
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.to(parameter.dtype))


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_learns_what_fp32_learns(level):
    ours, _ = train(level)
    reference, _ = by_hand(None)
    assert ours == pytest.approx(reference, rel=2e-2)


@pytest.mark.parametrize("level", ["O2", "O3", "bf16-O2", "bf16-O3"])
def test_nothing_is_autocast_in_a_cast_model(level):
    amp = initialize(net(), None, level)
    with torch.autocast("cpu", torch.bfloat16), amp.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_one_region_serves_as_decorator_and_when_entered_again():
    amp = initialize(net(), None, "O1")

    @amp.autocast()
    def forward(depth: int) -> torch.dtype:
        if depth:
            return forward(depth - 1)
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    assert forward(2) is torch.float16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_overflows_is_skipped_and_says_so(level):
    model = net()
    amp = initialize(model, adam(model), level, init_scale=2.0**10)
    ((context, following),) = batches(1)
    results, before = [], values(model)
    for factor in (float("inf"), 1.0):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(context)
        amp.backward(loss_of(logits, following) * factor)
        results.append(amp.step())
        if factor != 1.0:
            assert all(map(torch.equal, before, values(model)))
    assert [bool(result) for result in results] == [False, True]
    for result in results:
        assert result.taken.shape == ()
        assert result.taken.dtype is torch.bool
    assert amp.scaler.get_scale() == 2.0**9
    assert not all(map(torch.equal, before, values(model)))


def test_each_of_two_optimizers_is_skipped_by_its_own_overflow():
    models = [net(seed) for seed in (0, 1)]
    amp = initialize(models, [adam(model) for model in models], "O1", init_scale=2.0**10)
    ((context, following),) = batches(1)
    with amp.autocast():
        logits = [model(context) for model in amp.models]
    amp.backward(loss_of(logits[0], following) + loss_of(logits[1], following))
    models[1].output.bias.grad[0] = torch.nan
    result = amp.step()
    assert [bool(taken) for taken in result.optimizers] == [True, False]
    assert not result


@pytest.mark.parametrize("level", LEVELS)
def test_the_norm_that_is_clipped_is_that_of_unscaled_gradients(level):
    model = net()
    amp = initialize(model, adam(model), level)
    ((context, following),) = batches(1)
    reference = net()
    loss_of(reference(context), following).backward()
    wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    with amp.autocast():
        logits = amp.model(context)
    amp.backward(loss_of(logits, following))
    torch.testing.assert_close(amp.clip_grad_norm_(0.1), wanted, rtol=2e-2, atol=0)
    left = [p.grad for group in amp.optimizers[0].param_groups for p in group["params"]]
    clipped = nn.utils.get_total_norm([grad.float() for grad in left])
    torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-2, atol=0)


def test_several_optimizers_are_clipped_by_one_norm():
    models = [net(seed) for seed in (0, 1)]
    amp = initialize(models, [adam(model) for model in models], "O1", init_scale=2.0**10)
    for context, following in batches(2):
        amp.zero_grad()
        with amp.autocast():
            logits = [model(context) for model in amp.models]
        amp.backward(loss_of(logits[0], following) + loss_of(logits[1], following))
        amp.clip_grad_norm_(0.1)
        left = [p.grad for model in models for p in model.parameters()]
        torch.testing.assert_close(
            nn.utils.get_total_norm(left), torch.tensor(0.1), rtol=1e-4, atol=0
        )
        assert amp.step()


@pytest.mark.parametrize("level", ["O1", "O2", "bf16"])
def test_several_losses_share_one_scale_and_their_gradients_add_up(level):
    model, reference = net(batchnorm=False), net(batchnorm=False)
    amp = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, num_losses=2)
    for loss_id, (context, following) in enumerate(batches(2)):
        with amp.autocast():
            logits = amp.model(context)
        amp.backward(loss_of(logits, following) * (loss_id + 1), loss_id)
        (loss_of(reference(context), following) * (loss_id + 1)).backward()
    assert amp.step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for ours, wanted in zip(values(model), values(reference), strict=True):
        torch.testing.assert_close(ours.float(), wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "bf16-O2"])
def test_apexs_lines_train_as_ours(level):
    outcomes = []
    for apexs in (False, True):
        model = net()
        optimizer = adam(model)
        scale = {} if level in ("O0", "bf16-O2") else {"loss_scale": 2.0**10}
        amp = initialize(model, optimizer, level, num_losses=2, **scale)
        for context, following in batches(STEPS):
            optimizer.zero_grad()
            for loss_id in (0, 1):
                with amp.autocast():
                    loss = loss_of(amp.model(context), following) * (loss_id + 1)
                if apexs:
                    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                        scaled.backward()
                else:
                    amp.backward(loss)
            if apexs:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
            else:
                amp.clip_grad_norm_(0.1)
            assert amp.step()
        outcomes.append([p.detach().clone() for p in amp.master_params(optimizer)])
    for ours, theirs in zip(*outcomes, strict=True):  # the norm is summed up in another order
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("level", ["O1", "O2", "bf16-O2"])
def test_gradients_for_a_penalty_come_unscaled_and_in_fp32(level):
    model, reference = net(), net()
    amp = initialize(model, adam(model), level)
    ((context, following),) = batches(1)
    with amp.autocast():
        logits = amp.model(context)
    parameters = list(model.parameters())
    ours = amp.grad(loss_of(logits, following), parameters, create_graph=True)
    wanted = torch.autograd.grad(
        loss_of(reference(context), following), list(reference.parameters())
    )
    for mine, other in zip(ours, wanted, strict=True):
        assert mine.dtype is torch.float32
        assert mine.requires_grad
        torch.testing.assert_close(mine.detach(), other, rtol=5e-2, atol=2e-3)
    assert all(p.grad is None for p in parameters)


def test_accumulated_microbatches_are_one_batch():
    outcomes = []
    for parts in (1, 4):
        model = net(batchnorm=False)
        amp = initialize(model, adam(model), "O2", init_scale=2.0**10)
        ((context, following),) = batches(1)
        for some, after in zip(context.chunk(parts), following.chunk(parts), strict=True):
            with amp.autocast():
                logits = amp.model(some)
            amp.backward(loss_of(logits, after) / parts)
        assert amp.step()
        outcomes.append([master for _, master in amp.masters[0].pairs()])
    for whole, part in zip(*outcomes, strict=True):
        torch.testing.assert_close(part, whole, rtol=2e-2, atol=2e-3)


def test_zero_grad_leaves_nothing_behind_whatever_holds_it():
    for level in LEVELS:
        model = net()
        amp = initialize(model, adam(model), level)
        ((context, following),) = batches(1)
        with amp.autocast():
            logits = amp.model(context)
        amp.backward(loss_of(logits, following))
        amp.zero_grad()
        stepped = [p for group in amp.optimizers[0].param_groups for p in group["params"]]
        assert all(p.grad is None for p in (*model.parameters(), *stepped))


@pytest.mark.parametrize("level", LEVELS)
def test_the_optimizers_own_zero_grad_is_enough_in_a_loop(level):
    outcomes = []
    for own in (False, True):
        model = net()
        amp = initialize(model, adam(model), level)
        for context, following in batches(3):
            (amp.optimizers[0] if own else amp).zero_grad()
            with amp.autocast():
                logits = amp.model(context)
            amp.backward(loss_of(logits, following))
            amp.step()
        outcomes.append(values(model))
    assert all(map(torch.equal, *outcomes))


def test_gradients_that_were_discarded_by_the_optimizer_are_not_stepped():
    outcomes = []
    for wasted in (False, True):
        model = net()
        amp = initialize(model, adam(model), "bf16-O2")
        ((context, following),) = batches(1)
        for _ in range(1 + wasted):
            amp.optimizers[0].zero_grad()
            amp.backward(loss_of(amp.model(context), following))
        amp.step()
        outcomes.append([master for _, master in amp.masters[0].pairs()])
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize(
    ("loss_scale", "schedule", "scale"),
    [(None, DynamicSchedule, 2.0**16), (128.0, StaticSchedule, 128.0)],
)
def test_a_constant_loss_scale_stays_and_a_dynamic_one_moves(loss_scale, schedule, scale):
    model = net()
    amp = initialize(model, adam(model), "O2", loss_scale=loss_scale)
    ((context, following),) = batches(1)
    amp.backward(loss_of(amp.model(context), following) * torch.inf)
    assert amp.scaler.get_scale() == scale
    assert not amp.step()
    assert amp.scaler.get_scale() == (scale / 2 if schedule is DynamicSchedule else scale)


def test_an_optimizer_over_batch_norms_alone_has_no_masters_and_trains():
    model = net()
    norms = list(model.norm.parameters())
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    optimizers = [torch.optim.SGD(norms, lr=0.1), torch.optim.SGD(rest, lr=0.1)]
    amp = initialize(model, optimizers, "O2", init_scale=2.0**10)
    ((context, following),) = batches(1)
    before = model.norm.weight.detach().clone()
    amp.backward(loss_of(amp.model(context), following))
    assert amp.step()
    assert len(amp.masters) == 1
    assert not torch.equal(before, model.norm.weight)


def test_a_model_alone_can_be_run_but_not_stepped():
    amp = initialize(net(), None, "O2")
    ((context, _),) = batches(1)
    assert amp.model(context).dtype is torch.float32
    with pytest.raises(StageError, match="no optimizer"):
        amp.step()


def test_amp_model_of_several_says_where_they_are():
    amp = initialize([net(), net(1)], None, "O1")
    with pytest.raises(ValueError, match=r"amp\.models"):
        _ = amp.model


def test_a_backward_after_clipping_is_refused():
    model = net()
    amp = initialize(model, adam(model), "O1")
    ((context, following),) = batches(1)
    loss = loss_of(amp.model(context), following)
    amp.backward(loss, retain_graph=True)
    amp.clip_grad_norm_(1.0)
    with pytest.raises(StageError, match=r"clip after the last backward"):
        amp.backward(loss)

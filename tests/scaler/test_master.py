"""Masters on one process: the by-hand loop to the bit, whatever the optimizer and the loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp import DistGradScaler
from distamp.errors import SettingError, StageError
from distamp.scaler import MasterParameters, master_params, masters_of
from tests.scaler.masters import ByHand, half_mlp, master_scaler
from tests.scaler.steps import cpu_scaler

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}
ZERO_GRADS: dict[str, Callable[[Any, nn.Module, MasterParameters], None]] = {
    "optimizer": lambda o, m, ms: o.zero_grad(),
    "optimizer in place": lambda o, m, ms: o.zero_grad(set_to_none=False),
    "model": lambda o, m, ms: m.zero_grad(),
    "model in place": lambda o, m, ms: m.zero_grad(set_to_none=False),
    "masters": lambda o, m, ms: ms.zero_grad(),
}
adamw = OPTIMIZERS["AdamW"]


def loss_of(model: nn.Module, batch: int, factor: float = 1.0) -> Tensor:
    """The loss of one seeded batch."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(batch))
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - 1.0).square().mean() * factor


def values(tensors: Any) -> list[Tensor]:
    """Copies of tensors, to compare with later."""
    return [t.detach().clone() for t in tensors]


def equal(ours: Any, theirs: Any) -> bool:
    """Whether tensors are the same to the bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def one(value: float = 1.0, dtype: torch.dtype = F16) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def one_master(
    value: float = 1.0, lr: float = 1.0, **settings: Any
) -> tuple[nn.Parameter, torch.optim.SGD, MasterParameters]:
    """One float16 parameter whose master an SGD steps."""
    parameter = one(value)
    optimizer = torch.optim.SGD([parameter], lr=lr, **settings)
    return parameter, optimizer, MasterParameters(optimizer)


# -- as by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_the_loop_by_hand_to_the_bit(name, dtype):
    """Two microbatches a step, and an overflow in the third step."""
    make = OPTIMIZERS[name]
    model, other = half_mlp(dtype=dtype), half_mlp(dtype=dtype)
    optimizer = make(model.parameters())
    MasterParameters(optimizer)
    hand, scaler = ByHand(other.parameters(), make), master_scaler(2.0**10)
    for step in range(6):
        optimizer.zero_grad()
        hand.zero_grad()
        scale = scaler.get_scale()
        for micro in range(2):
            factor = INF if step == 2 and micro else 1.0
            scaler.scale(loss_of(model, 2 * step + micro, factor)).backward()
            (loss_of(other, 2 * step + micro, factor) * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        if hand.unscale(scale):
            hand.step()
        assert scaler.stepped(optimizer) is (step != 2)
    assert scaler.get_scale() == 2.0**9
    assert equal(master_params(optimizer), hand.copies)
    assert equal(model.parameters(), other.parameters())
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_a_scaled_fp16_gradient_of_a_thousandth_does_not_underflow():
    """In place it does: 1e-3 / 65536 is below float16's smallest, 6e-8."""
    moved = {}
    for how in ("inplace", "master"):
        parameter = one(0.0)
        optimizer = torch.optim.SGD([parameter], lr=1000.0)
        if how == "master":
            MasterParameters(optimizer)
        scaler = DistGradScaler("cpu", init_scale=65536.0, fp16_grads=how)
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([1e-3], dtype=F16)
        scaler.step(optimizer)
        moved[how] = next(master_params(optimizer)).item()
    assert moved["inplace"] == 0.0
    assert moved["master"] == -1000.0 * torch.tensor(1e-3, dtype=F16).item() / 65536.0


def test_steps_below_the_rounding_of_fp16_add_up_as_in_float64():
    parameter, optimizer, masters = one_master(1.0, lr=1e-5)
    scaler = master_scaler(128.0)
    reference = torch.ones(1, dtype=torch.float64)
    for step in range(300):
        optimizer.zero_grad()
        gradient = 1.0 + step % 4
        scaler.scale((parameter.float() * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        reference -= 1e-5 * gradient
    (_, master) = next(masters.pairs())
    torch.testing.assert_close(master.detach().double(), reference, rtol=0, atol=2e-5)
    assert parameter.item() == torch.tensor(reference.item(), dtype=F16).item() < 0.994


def test_fp32_parameters_stay_as_they_are_and_are_stepped_beside_masters():
    model = nn.Sequential(nn.Linear(8, 8).half(), nn.BatchNorm1d(8))
    norm = list(model[1].parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    masters = MasterParameters(optimizer)
    before, scaler = values(norm), master_scaler(1024.0)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    scaler.scale((model[1](model[0](x.half()).float()) * x).sum()).backward()
    expected = [v - 0.5 * p.grad / 1024.0 for v, p in zip(before, norm, strict=True)]
    scaler.step(optimizer)
    assert equal(norm, expected)
    kept = list(master_params(optimizer))
    assert kept[2] is norm[0]
    assert kept[3] is norm[1]
    assert masters.nbytes == 4 * (64 + 8)


# -- zero_grad and accumulation --------------------------------------------------------------------


@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
def test_no_gradient_counts_twice_whoever_zeroes(zero_grad):
    parameter, optimizer, masters = one_master(0.0)
    scaler, model = master_scaler(), nn.ParameterList([parameter])
    for gradient in (1.0, 2.0, 4.0):
        ZERO_GRADS[zero_grad](optimizer, model, masters)
        for _ in range(2):
            scaler.scale((parameter.float() * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == -2.0 * (1.0 + 2.0 + 4.0)


@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
def test_a_gradient_that_was_zeroed_before_a_step_is_gone(zero_grad):
    """Of the very first step, and of a later one."""
    parameter, optimizer, masters = one_master(0.0)
    scaler, model = master_scaler(), nn.ParameterList([parameter])
    for _ in range(2):
        ZERO_GRADS[zero_grad](optimizer, model, masters)
        scaler.scale(parameter.float().sum() * 100.0).backward()
        ZERO_GRADS[zero_grad](optimizer, model, masters)
        scaler.scale(parameter.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == -2.0


@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_pass_without_a_scaler_that_was_zeroed_is_gone_as_well(zero_grad, steps):
    """A pass to warm a wrapper up, before the first step or later."""
    parameter, optimizer, masters = one_master(0.0)
    scaler, model = master_scaler(), nn.ParameterList([parameter])
    for step in range(3):
        if step == steps:
            (parameter.float().sum() * 100.0).backward()
        ZERO_GRADS[zero_grad](optimizer, model, masters)
        scaler.scale(parameter.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == -3.0


@pytest.mark.parametrize("zero_grad", ["optimizer", "optimizer in place", "masters"])
def test_a_step_right_after_zero_grad_moves_nothing(zero_grad):
    parameter, optimizer, masters = one_master(1.0)
    scaler = master_scaler()
    scaler.scale(parameter.float().sum()).backward()
    ZERO_GRADS[zero_grad](optimizer, nn.ParameterList([parameter]), masters)
    scaler.step(optimizer)
    assert parameter.item() == 1.0


@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
def test_a_parameter_that_a_later_loss_leaves_out_is_not_stepped_again(zero_grad):
    """model.zero_grad() leaves the master's last gradient; the next step must not take it."""
    used, unused = one(1.0), one(1.0)
    optimizer = torch.optim.SGD([used, unused], lr=0.25)
    masters = MasterParameters(optimizer)
    scaler, model = master_scaler(), nn.ParameterList([used, unused])
    for weight in (1.0, 0.0):
        ZERO_GRADS[zero_grad](optimizer, model, masters)
        loss = used.float().sum()
        if weight:
            loss = loss + unused.float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (used.item(), unused.item()) == (0.5, 0.75)


def test_the_models_gradients_are_freed_as_they_are_taken():
    model = half_mlp()
    optimizer = adamw(model.parameters())
    masters = MasterParameters(optimizer)
    scaler = master_scaler()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    assert all(p.grad is None for p in model.parameters())
    assert all(m.grad.dtype is F32 for _, m in masters.pairs())
    assert masters.nbytes == 4 * sum(p.numel() for p in model.parameters())


def test_zero_grad_in_place_keeps_the_masters_buffers():
    model = half_mlp()
    optimizer = adamw(model.parameters())
    MasterParameters(optimizer)
    scaler, seen = master_scaler(), []
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append([m.grad.data_ptr() for m in master_params(optimizer)][1:3])
    assert seen[1] == seen[2]


def test_a_backward_pass_of_another_loss_between_unscale_and_step_keeps_the_gradients():
    """As GANs do: unscale_ one side, run the other side's backward, step the first."""
    first, optimizer, _ = one_master(0.0)
    second, other, _ = one_master(0.0)
    scaler = master_scaler()
    scaler.scale(first.float().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(second.float().sum() * 2.0).backward()
    scaler.step(optimizer)
    scaler.step(other)
    assert (first.item(), second.item()) == (-1.0, -2.0)


# -- skipped steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_a_skipped_step_changes_nothing(name):
    model = half_mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    masters, scaler = MasterParameters(optimizer), master_scaler()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    kept = values(model.parameters()), values(master_params(optimizer))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 1, INF)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.stepped(optimizer)
    assert equal(model.parameters(), kept[0])
    assert equal([m for _, m in masters.pairs()], kept[1])
    for number, kept in optimizer.state_dict()["state"].items():
        assert equal(kept.values(), state["state"][number].values())


def test_the_next_step_after_a_skipped_one_is_clean_with_model_zero_grad_alone():
    parameter, optimizer, _ = one_master(0.0)
    scaler, model = master_scaler(), nn.ParameterList([parameter])
    for factor in (INF, 1.0):
        model.zero_grad()
        scaler.scale(parameter.float().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == -1.0


def test_the_overflow_report_names_the_models_own_parameters():
    model = half_mlp()
    names = [n for n, _ in model.named_parameters()]
    for kind in ("model", "constructor", "optimizer"):
        given = model.named_parameters() if kind == "optimizer" else model.parameters()
        optimizer = torch.optim.AdamW(given)
        MasterParameters(optimizer)
        named = model.named_parameters() if kind == "constructor" else None
        scaler = master_scaler(named_parameters=named)
        scaler.scale(loss_of(model, 0)).backward()
        model[3].bias.grad[1] = INF
        scaler.step(optimizer)
        report = scaler.overflow_report(model if kind == "model" else None)
        assert [(o.name, o.infs, o.elements) for o in report.overflows] == [("3.bias", 1, 4)]
        assert report.overflows[0].name in names
        del optimizer, scaler


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["optimizer", "model.parameters()", "master_params"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_clipping_acts_on_masters_whatever_it_is_given(given, unscaled):
    model, other = half_mlp(), half_mlp()
    make = OPTIMIZERS["SGD momentum"]
    optimizer = make(model.parameters())
    MasterParameters(optimizer)
    hand, scaler = ByHand(other.parameters(), make), master_scaler()
    for step in range(2):
        optimizer.zero_grad()
        hand.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        (loss_of(other, step) * 1024.0).backward()
        hand.unscale(1024.0)
        if unscaled or step == 0:
            scaler.unscale_(optimizer)
        parameters = {
            "optimizer": optimizer,
            "model.parameters()": model.parameters(),
            "master_params": master_params(optimizer),
        }[given]
        norm = scaler.clip_grad_norm_(parameters, 0.1)
        exact = torch.stack([c.grad.double().square().sum() for c in hand.copies]).sum().sqrt()
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
        for c in hand.copies:
            c.grad.mul_(0.1 / (norm + 1e-6))
        scaler.step(optimizer)
        scaler.update()
        hand.step()
    assert equal(master_params(optimizer), hand.copies)


def test_clipping_by_hand_after_unscale_takes_master_params():
    parameter, optimizer, _ = one_master(0.0)
    scaler = master_scaler()
    scaler.scale(parameter.float().sum() * 8.0).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(list(master_params(optimizer)), 2.0)
    scaler.step(optimizer)
    assert parameter.item() == pytest.approx(-2.0, rel=1e-3)


# -- groups and parameters -------------------------------------------------------------------------


def test_groups_keep_their_own_settings_and_a_schedule_reaches_them():
    model, other = half_mlp(), half_mlp()

    def make(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        first, *rest = parameters
        groups = [{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=1e-3)

    optimizer = make(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    MasterParameters(optimizer)
    hand, scaler = ByHand(other.parameters(), make), master_scaler()
    theirs = torch.optim.lr_scheduler.ExponentialLR(hand.optimizer, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        hand.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        (loss_of(other, step) * 1024.0).backward()
        scaler.step(optimizer)
        scaler.update()
        hand.unscale(1024.0)
        hand.step()
        schedule.step()
        theirs.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.1 / 8, 1e-3 / 8]
    assert equal(master_params(optimizer), hand.copies)


def test_a_group_that_is_added_later_gets_masters():
    first, optimizer, masters = one_master(0.0)
    scaler = master_scaler()
    second = one(0.0)
    for step in range(2):
        optimizer.zero_grad()
        if step:
            optimizer.add_param_group({"params": [second], "lr": 0.5})
        scaler.scale((first.float() + second.float()).sum()).backward()
        scaler.clip_grad_norm_(optimizer, 100.0)
        scaler.step(optimizer)
        scaler.update()
    assert (first.item(), second.item()) == (-2.0, -1.0)
    assert optimizer.param_groups[1]["params"][0] is masters.master_of(second)


@pytest.mark.parametrize("clip", [False, True])
def test_a_frozen_parameter_has_no_master_until_it_is_trained(clip):
    first, second = one(0.0), one(1.0).requires_grad_(False)
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    masters, scaler = MasterParameters(optimizer), master_scaler()
    assert masters.nbytes == 4
    for step in range(2):
        optimizer.zero_grad()
        second.requires_grad_(step == 1)
        scaler.scale((first.float() + second.float()).sum()).backward()
        if clip:  # the one that has only just begun to train is clipped as well
            scaler.clip_grad_norm_(optimizer, 1e-3)
        scaler.step(optimizer)
        scaler.update()
        assert masters.nbytes == 4 * (step + 1)
    moved = 1.0 - second.item()
    assert moved == (pytest.approx(7e-4, abs=5e-4) if clip else 1.0)


def test_tied_weights_have_one_master_that_gets_both_gradients():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    torch.manual_seed(0)
    model = Tied().half()
    other = copy.deepcopy(model)
    optimizer = adamw(model.parameters())
    masters, scaler = MasterParameters(optimizer), master_scaler()
    hand = ByHand(other.parameters(), adamw)
    assert len(list(masters.pairs())) == 1
    tokens = torch.tensor([1, 2, 5])
    for _ in range(2):
        optimizer.zero_grad()
        hand.zero_grad()
        scaler.scale(model(tokens).float().square().mean()).backward()
        (other(tokens).float().square().mean() * 1024.0).backward()
        scaler.step(optimizer)
        scaler.update()
        hand.unscale(1024.0)
        hand.step()
    assert equal(model.parameters(), other.parameters())
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_a_sparse_embedding_gradient_reaches_its_master(kind):
    torch.manual_seed(0)
    model = nn.Embedding(6, 4, sparse=True).half()
    other = copy.deepcopy(model)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(list(parameters), lr=0.1)

    optimizer = make(model.parameters())
    masters, scaler = MasterParameters(optimizer), master_scaler()
    hand = ByHand(other.parameters(), make)
    for tokens in ([1, 1, 3], [0, 5, 5]):
        optimizer.zero_grad()
        hand.zero_grad()
        scaler.scale(model(torch.tensor(tokens)).float().square().sum()).backward()
        (other(torch.tensor(tokens)).float().square().sum() * 1024.0).backward()
        scaler.step(optimizer)
        scaler.update()
        hand.unscale(1024.0)
        hand.step()
    assert equal(master_params(optimizer), hand.copies)
    assert next(masters.pairs())[1].grad.is_sparse


def test_an_overflow_in_a_sparse_gradient_skips():
    model = nn.Embedding(6, 4, sparse=True).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    MasterParameters(optimizer)
    before, scaler = values(model.parameters()), master_scaler()
    scaler.scale(model(torch.tensor([1, 1])).float().sum() * INF).backward()
    scaler.step(optimizer)
    assert equal(model.parameters(), before)
    assert not scaler.stepped(optimizer)


def test_fp16_rows_that_sum_beyond_fp16_are_summed_in_fp32():
    table = nn.Parameter(torch.zeros(3, dtype=F16))
    optimizer = torch.optim.SGD([table], lr=1.0)
    MasterParameters(optimizer)
    scaler = master_scaler(1024.0)
    scaler.scale(torch.ones(()))
    rows = torch.tensor([40000.0, 40000.0], dtype=F16)
    table.grad = torch.sparse_coo_tensor([[1, 1]], rows, (3,), check_invariants=True)
    scaler.step(optimizer)
    assert table.tolist() == [0.0, -78.125, 0.0]


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 200_000])
def test_every_size_is_converted_whole(size):
    """Large gradients are taken in pieces on the host."""
    parameter = nn.Parameter(torch.zeros(size, dtype=F16))
    small = one(0.0)
    optimizer = torch.optim.SGD([parameter, small], lr=1.0)
    MasterParameters(optimizer)
    scaler = master_scaler(2.0**16)
    scaler.scale(torch.ones(()))
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(size, generator=generator).half()
    parameter.grad, small.grad = gradient.clone(), torch.ones(1, dtype=F16)
    scaler.step(optimizer)
    assert torch.equal(next(master_params(optimizer)), -(gradient.float() / 2.0**16))


@pytest.mark.parametrize("where", [0, 65535, 65536, 199_999])
def test_an_overflow_anywhere_in_a_large_gradient_skips(where):
    parameter = nn.Parameter(torch.zeros(200_000, dtype=F16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    MasterParameters(optimizer)
    scaler = master_scaler()
    scaler.scale(torch.ones(()))
    parameter.grad = torch.ones(200_000, dtype=F16)
    parameter.grad[where] = float("nan")
    scaler.step(optimizer)
    assert not parameter.any()


def test_a_transposed_gradient_keeps_its_order():
    parameter = nn.Parameter(torch.zeros(300, 400, dtype=F16).t())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    MasterParameters(optimizer)
    scaler = master_scaler(1.0)
    gradient = torch.arange(120_000.0).reshape(400, 300).remainder(97.0)
    scaler.scale((parameter.float() * gradient).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter, -gradient.half())


# -- several optimizers ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["one by one", "step_all", "unscale_ of all"])
def test_several_optimizers_are_skipped_or_stepped_each_by_its_own_flag(call):
    sets = [one_master(1.0) for _ in range(2)]
    plain = one(1.0, F32)
    optimizers = [o for _, o, _ in sets] + [torch.optim.SGD([plain], lr=1.0)]
    scaler = master_scaler()
    parameters = [p for p, _, _ in sets] + [plain]
    for parameter, factor in zip(parameters, (1.0, INF, 3.0), strict=True):
        scaler.scale(parameter.float().sum() * factor).backward()
    if call == "unscale_ of all":
        scaler.unscale_(*optimizers)
    if call == "step_all":
        scaler.step_all(optimizers)
    else:
        for optimizer in optimizers:
            scaler.step(optimizer)
    assert [p.item() for p in parameters] == [0.0, 1.0, -2.0]
    assert [scaler.stepped(o) for o in optimizers] == [True, False, True]


# -- without a scaler ------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler", [None, "disabled"])
@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
def test_bf16_masters_need_no_scaler(scaler, zero_grad):
    model, other = half_mlp(dtype=BF16), half_mlp(dtype=BF16)
    optimizer = adamw(model.parameters())
    masters = MasterParameters(optimizer)
    hand = ByHand(other.parameters(), adamw)
    disabled = DistGradScaler("cpu", enabled=False) if scaler else None
    for step in range(3):
        ZERO_GRADS[zero_grad](optimizer, model, masters)
        hand.zero_grad()
        for micro in range(2):
            loss_of(model, 2 * step + micro).backward()
            loss_of(other, 2 * step + micro).backward()
        optimizer.step() if disabled is None else disabled.step(optimizer)
        hand.unscale(1.0)
        hand.step()
    assert equal(master_params(optimizer), hand.copies)


@pytest.mark.parametrize("how", ["model", "masters", "optimizer"])
def test_without_a_scaler_a_gradient_can_be_thrown_away(how):
    parameter = one(0.0, BF16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    masters = MasterParameters(optimizer)
    for gradient in (100.0, 1.0):
        ZERO_GRADS[how](optimizer, nn.ParameterList([parameter]), masters)
        (parameter.float().sum() * gradient).backward()
    optimizer.step()
    assert parameter.item() == -1.0


def test_a_disabled_scaler_clips_masters():
    parameter, optimizer, _ = one_master(0.0)
    scaler = DistGradScaler("cpu", enabled=False)
    (parameter.float().sum() * 4.0).backward()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 4.0
    scaler.step(optimizer)
    assert parameter.item() == pytest.approx(-1.0, rel=1e-3)


def test_a_scaler_of_another_model_leaves_a_run_without_one_alone():
    """Its backward pass lies between zero_grad and step of a bfloat16 model."""
    parameter = one(0.0, BF16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    MasterParameters(optimizer)
    other, stepped, _ = one_master(0.0)
    scaler = master_scaler()
    for _ in range(2):
        optimizer.zero_grad()
        parameter.float().sum().backward()
        stepped.zero_grad()
        scaler.scale(other.float().sum()).backward()
        scaler.step(stepped)
        scaler.update()
        optimizer.step()
    assert (parameter.item(), other.item()) == (-2.0, -2.0)


# -- guards ----------------------------------------------------------------------------------------


def test_a_scaled_gradient_that_comes_after_unscale_is_refused():
    parameter, optimizer, _ = one_master(1.0)
    scaler = master_scaler()
    scaler.scale(parameter.float().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(parameter.float().sum()).backward()
    with pytest.raises(StageError, match="added gradients after unscale_"):
        scaler.step(optimizer)


def test_an_unscaled_gradient_that_comes_after_unscale_is_added():
    """As with torch: a penalty whose gradient is added by hand between unscale_ and step."""
    parameter, optimizer, _ = one_master(0.0)
    scaler = master_scaler()
    scaler.scale(parameter.float().sum()).backward()
    scaler.unscale_(optimizer)
    (parameter.float().sum() * 2.0).backward()
    scaler.step(optimizer)
    assert parameter.item() == -3.0


@pytest.mark.parametrize("setting", ["error", "inplace"])
@pytest.mark.parametrize("call", ["unscale_", "step", "clip_grad_norm_"])
def test_a_scaler_that_was_not_told_of_masters_refuses(setting, call):
    parameter, optimizer, _ = one_master(1.0)
    scaler = cpu_scaler(fp16_grads=setting)
    scaler.scale(parameter.float().sum()).backward()
    arguments = (optimizer, 1.0) if call == "clip_grad_norm_" else (optimizer,)
    with pytest.raises(SettingError, match=r"make it with fp16_grads='master'"):
        getattr(scaler, call)(*arguments)
    assert parameter.item() == 1.0


def test_a_scaler_that_waits_for_masters_refuses_to_do_without():
    parameter = one(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = master_scaler()
    scaler.scale(parameter.float().sum()).backward()
    with pytest.raises(SettingError, match=r"MasterParameters\(optimizer\) before"):
        scaler.step(optimizer)


def test_what_cannot_have_masters_is_refused_with_the_order_to_do_it_in():
    fp32 = torch.optim.SGD([one(1.0, F32)], lr=1.0)
    with pytest.raises(ValueError, match=r"order is: cast the model .*, wrap it"):
        MasterParameters(fp32)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, not list"):
        MasterParameters([fp32])
    meta = torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=F16, device="meta"))], lr=1.0)
    with pytest.raises(ValueError, match="to_empty"):
        MasterParameters(meta)
    assert masters_of(fp32) is None


def test_a_second_master_of_anything_is_refused():
    parameter, optimizer, masters = one_master(1.0)
    with pytest.raises(ValueError, match="has master parameters already"):
        MasterParameters(optimizer)
    optimizer.add_param_group({"params": [parameter]})
    with pytest.raises(ValueError, match="has a master"):
        optimizer.step()
    assert masters_of(optimizer) is masters


def test_masters_go_with_their_optimizer():
    parameter, optimizer, masters = one_master(1.0)
    del optimizer
    torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(StageError, match="is gone"):
        masters.stepped()
    assert MasterParameters(torch.optim.SGD([parameter], lr=1.0)) is not masters


def test_zero_grad_is_the_optimizers_own_in_a_copy_or_a_pickle():
    """Neither has masters, so there is no model that it could reach."""
    parameter, optimizer, _ = one_master(1.0)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert masters_of(twin) is None
        kept = twin.param_groups[0]["params"][0]
        kept.grad, parameter.grad = torch.ones(1), torch.ones(1, dtype=F16)
        twin.zero_grad()
        assert kept.grad is None
        assert parameter.grad is not None


def test_zero_grad_of_a_schedule_or_a_subclass_is_called_too():
    """A method that somebody has put on the optimizer before, or overridden."""
    calls: list[str] = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("own")
            super().zero_grad(set_to_none)

    parameter = one(1.0)
    optimizer = Own([parameter], lr=1.0)
    inner = optimizer.zero_grad
    optimizer.zero_grad = lambda *args: (calls.append("put on it"), inner(*args))  # type: ignore[assignment]
    MasterParameters(optimizer)
    parameter.grad = torch.ones(1, dtype=F16)
    optimizer.zero_grad()
    assert calls == ["put on it", "own"]
    assert parameter.grad is None


def test_a_closure_is_refused():
    parameter, optimizer, _ = one_master(1.0)
    with pytest.raises(StageError, match="closure"):
        optimizer.step(lambda: parameter.float().sum())
    assert parameter.item() == 1.0

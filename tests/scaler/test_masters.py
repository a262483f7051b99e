"""fp32 masters: the loop by hand to the bit, whatever the optimizer, the loop and the gradients."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp.errors import SettingError, StageError
from distamp.scaler import MasterParameters, master_params, masters_of
from tests.scaler.masters import ByHand, Job, adamw, half_mlp, loss_of, master_scaler
from tests.scaler.matrix.layouts import LAYOUTS, Parameters
from tests.scaler.matrix.reference import KINDS
from tests.scaler.steps import INF, cpu_scaler

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": adamw,
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
}


def equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Whether tensors are the same to the bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def half(*values: float, **settings: Any) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=F16), **settings)


def one_master(value: float = 0.0, dtype: torch.dtype = F16) -> Any:
    """One parameter of low precision whose master an SGD steps by the gradient."""
    parameter = nn.Parameter(torch.tensor([value], dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return parameter, optimizer, MasterParameters(optimizer)


def backward(scaler: Any, parameter: Tensor, gradient: float = 1.0) -> None:
    loss = parameter.float().sum() * gradient
    (loss if scaler is None else scaler.scale(loss)).backward()


# -- as by hand ------------------------------------------------------------------------------------


def _grouped(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    first, *rest = parameters
    groups = [{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.5}]
    return torch.optim.AdamW(groups, lr=1e-3)


class _Float(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def _with_a_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8).half(), _Float(), nn.BatchNorm1d(8))


def _rows(model: nn.Module, batch: int, factor: float = 1.0) -> Tensor:
    if batch % 2:  # torch adds no sparse float16
        return torch.zeros((), requires_grad=True)
    tokens = torch.tensor([[1, 1, 3], [0, 5, 5]][batch // 2 % 2])
    return model(tokens).float().square().sum() * factor


def _table() -> nn.Module:
    return nn.Embedding(6, 4, sparse=True).half()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    **{name: (half_mlp, make, loss_of) for name, make in OPTIMIZERS.items()},
    "bfloat16": (lambda: half_mlp(dtype=BF16), adamw, loss_of),
    "groups": (half_mlp, _grouped, loss_of),
    "a norm in float32": (_with_a_norm, adamw, loss_of),
    "sparse": (_table, lambda ps: torch.optim.SGD(ps, lr=0.1), _rows),
    "SparseAdam": (_table, lambda ps: torch.optim.SparseAdam(list(ps), lr=0.1), _rows),
}
CLIPPED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer": lambda model, optimizer: optimizer,
    "model.parameters()": lambda model, optimizer: model.parameters(),
    "master_params": lambda model, optimizer: master_params(optimizer),
}
CASES = [(name, how) for name in MODELS for how in ("step", "unscale_", "no scaler", "disabled")]
CASES += [(name, how) for name in ("AdamW", "SGD fused", "groups") for how in CLIPPED]


def _made(make_model: Callable[[], nn.Module], view: bool | None) -> nn.Module:
    torch.manual_seed(0)
    model = make_model()
    if view is None:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=view)


def _beside_by_hand(name: str, how: str, zero: str = "optimizer", view: Any = None) -> None:
    """Two microbatches a step, a schedule, and an overflow of rank 0 in the third step."""
    make_model, make, loss = MODELS[name]
    rank = 0 if view is None else dist.get_rank()
    plain = how in ("no scaler", "disabled")
    model, other = _made(make_model, view), _made(make_model, view)
    optimizer, hand = make(model.parameters()), ByHand(other.parameters(), make)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, hand.optimizer)
    ]
    masters, scaler = MasterParameters(optimizer), master_scaler(enabled=not plain)
    for step in range(6):
        ZERO_GRADS[zero](optimizer, model, masters)
        hand.zero_grad()
        scale = scaler.get_scale()
        for batch in (2 * step + 100 * rank, 2 * step + 1 + 100 * rank):
            factor = INF if step == 2 and not plain and rank == 0 else 1.0
            scaler.scale(loss(model, batch, factor)).backward()
            (loss(other, batch, factor) * scale).backward()
        if how == "unscale_" or (how in CLIPPED and step < 2):
            scaler.unscale_(optimizer)
            freed = [p.grad for p in model.parameters() if p.dtype is not F32]
            assert freed == [None] * len(freed), "as they are taken"
        finite = hand.unscale(scale)
        if how in CLIPPED:
            norm = scaler.clip_grad_norm_(CLIPPED[how](model, optimizer), 0.1)
            exact = torch.stack([c.grad.double().square().sum() for c in hand.copies]).sum().sqrt()
            assert not finite or norm.item() == pytest.approx(exact.item(), rel=1e-6)
            for c in hand.copies:
                c.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step() if how == "no scaler" else scaler.step(optimizer)
        scaler.update()
        if finite:
            hand.step()
        for schedule in schedules:
            schedule.step()
        assert plain or scaler.stepped(optimizer) is (step != 2)
    assert equal(master_params(optimizer), hand.copies)
    assert equal(model.parameters(), other.parameters())
    low = [p for p in model.parameters() if p.dtype is not F32]
    assert masters.nbytes == 4 * sum(p.numel() for p in low) > 0


@pytest.mark.parametrize(("name", "how"), CASES)
def test_training_is_that_of_the_loop_by_hand_to_the_bit(name, how):
    _beside_by_hand(name, how)


@pytest.mark.parametrize("view", [False, True], ids=["buckets", "bucket views"])
def test_under_ddp_it_is_too_however_gradients_are_zeroed(ranks2, view):
    for zero in ZERO_GRADS:
        ranks2.run(_beside_by_hand, "AdamW", "step", zero, view)


# -- zero_grad -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fp16", "bf16 without a scaler"])
@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
def test_gradients_that_were_zeroed_are_gone_whoever_zeroes_them(zero_grad, how):
    """Each step after a pass that was thrown away, by the loop or by a wrapper that warms up."""
    dtype, scaler = (F16, master_scaler()) if how == "fp16" else (BF16, None)
    used, optimizer, masters = one_master(0.0, dtype)
    unused = nn.Parameter(torch.ones(1).to(dtype))
    optimizer.add_param_group({"params": [unused]})

    def zero() -> None:
        ZERO_GRADS[zero_grad](optimizer, nn.ParameterList([used, unused]), masters)

    def step() -> None:
        optimizer.step() if scaler is None else scaler.step(optimizer)

    for number, thrown in enumerate((scaler, None, scaler)):
        zero()
        backward(thrown, used, 100.0)
        zero()
        for _ in range(2):
            backward(scaler, used, 2.0**number)
        if number == 0:  # a later loss leaves it out, and it is not stepped again
            backward(scaler, unused)
        step()
        if scaler is not None:
            scaler.update()
    assert (used.item(), unused.item()) == (-14.0, 0.0)
    if scaler is not None:  # nor by what a skipped step left
        zero()
        backward(scaler, unused)
        for gradient in (INF, 1.0):
            backward(scaler, used, gradient)
            step()
            scaler.update()
            zero()
        assert (used.item(), unused.item()) == (-15.0, 0.0)


def test_a_copy_of_an_optimizer_whose_masters_would_have_no_model_is_refused():
    _, optimizer, _ = one_master(1.0)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StageError, match="cannot be copied or pickled"):
            copied(optimizer)


# -- what a gradient can be ------------------------------------------------------------------------


def _stepped(parameter: nn.Parameter, gradient: Tensor, scale: float = 1024.0) -> Tensor:
    """The master after a step of SGD by this gradient of a scaled loss."""
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    MasterParameters(optimizer)
    scaler = master_scaler(scale)
    scaler.scale(torch.ones(()))
    parameter.grad = gradient
    scaler.step(optimizer)
    return next(iter(master_params(optimizer)))


@pytest.mark.parametrize("size", [0, 1, 131_072, 131_073, 300_000])
def test_every_size_is_converted_whole_and_an_overflow_anywhere_in_it_skips(size):
    """Large gradients are taken in pieces on the host."""
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0)).half()
    places = {0, min(size, 131_072) - 1, size - 1} if size else set()
    for bad in (None, *places):
        given, expected = gradient.clone(), -(gradient.float() / 2.0**16)
        if bad is not None:
            given[bad] = float("nan")
            expected = torch.zeros(size)
        found = _stepped(nn.Parameter(torch.zeros(size, dtype=F16)), given, 2.0**16)
        assert torch.equal(found, expected), bad


def test_rows_are_added_in_float32_and_a_transposed_gradient_keeps_its_order():
    for rows, expected in (([40000.0, 40000.0], -78.125), ([INF, 1.0], 0.0)):
        values = torch.tensor(rows, dtype=F16)
        gradient = torch.sparse_coo_tensor([[1, 1]], values, (3,), check_invariants=True)
        assert _stepped(half(0.0, 0.0, 0.0), gradient).tolist() == [0.0, expected, 0.0]
    gradient = torch.arange(150_000.0).reshape(300, 500).remainder(97.0).half().t()
    parameter = nn.Parameter(torch.zeros(300, 500, dtype=F16).t())
    assert torch.equal(_stepped(parameter, gradient, 1.0), -gradient.float())


def test_groups_added_later_and_parameters_that_thaw_get_masters():
    (first, optimizer, masters), second = one_master(), half(0.0)
    third, scaler = half(0.0, requires_grad=False), master_scaler()
    optimizer.add_param_group({"params": [third]})
    optimizer.step()
    assert masters.master_of(third) is None
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    third.requires_grad_(True)
    scaler.scale((first.float() + second.float() + third.float()).sum()).backward()
    scaler.step(optimizer)
    assert (first.item(), second.item(), third.item()) == (-1.0, -0.5, -1.0)
    assert masters.nbytes == 12
    assert optimizer.param_groups[2]["params"][0] is masters.master_of(second)


def test_a_gradient_added_by_hand_after_unscale_is_added_to_that_of_the_loss():
    """A penalty's, unscaled, as with torch."""
    (parameter, optimizer, _), scaler = one_master(1.0), master_scaler()
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    backward(None, parameter, 0.5)
    scaler.step(optimizer)
    assert parameter.item() == 0.25


def test_after_a_skipped_step_a_parameter_without_a_gradient_is_not_stepped():
    """Where the model's own gradients are zeroed: the masters still have those of the skip."""
    (used, optimizer, _), unused, scaler = one_master(), half(0.0), master_scaler()
    optimizer.add_param_group({"params": [unused]})
    for parameters, gradient in (((used, unused), INF), ((used,), 1.0)):
        used.grad = unused.grad = None
        for parameter in parameters:
            backward(scaler, parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
    assert (used.item(), unused.item()) == (-1.0, 0.0)


# -- what is refused -------------------------------------------------------------------------------


def test_masters_that_cannot_be_are_refused_with_what_to_do():
    parameter, optimizer, masters = one_master(1.0)
    fp32 = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    refused: dict[str, Any] = {"cast the model": fp32, "Optimizer, not list": [fp32]}
    refused |= {"has master parameters already": optimizer}
    for words, given in refused.items():
        with pytest.raises((ValueError, TypeError), match=words):
            MasterParameters(given)
    with pytest.raises(StageError, match="closure"):
        optimizer.step(lambda: parameter.float().sum())
    with pytest.raises(StageError, match="copied"):
        copy.deepcopy((optimizer, masters))
    optimizer.add_param_group({"params": [parameter]})
    with pytest.raises(ValueError, match="has a master"):
        optimizer.step()
    with pytest.raises(StageError, match="is gone"):
        one_master()[2].stepped()


@pytest.mark.parametrize("call", ["unscale_", "step", "clip_grad_norm_"])
def test_a_scaler_and_an_optimizer_must_both_know_of_masters(call):
    arguments = [1.0] if call == "clip_grad_norm_" else []
    plain, (parameter, optimizer, _) = half(1.0), one_master(1.0)
    make_it, inplace = "make it with fp16_grads='master'", cpu_scaler(fp16_grads="inplace")
    for scaler, used, holds, says in (
        (cpu_scaler(), parameter, optimizer, make_it),
        (inplace, parameter, optimizer, make_it),
        (master_scaler(), plain, torch.optim.SGD([plain]), r"MasterParameters\(optimizer\) before"),
    ):
        backward(scaler, used)
        with pytest.raises(SettingError, match=says):
            getattr(scaler, call)(holds, *arguments)
        assert used.item() == 1.0


def _refused(name: str) -> tuple[str, bool]:
    """Over a model that was cast to float16 first."""
    layout = type("Half", (Parameters, LAYOUTS[name]), {})()
    parameters = [p for part in layout.parts() for p in part]
    optimizer = layout.optimizer(KINDS["SGD for-loop"], parameters)
    with pytest.raises(ValueError) as error:
        MasterParameters(optimizer)
    return str(error.value), masters_of(optimizer) is None


@pytest.mark.parametrize("name", ["FSDP1", "FSDP1 orig params", "ZeRO", "OSS"])
def test_flat_parameters_and_shares_are_refused_with_what_to_do(ranks4, name):
    for text, untouched in ranks4.run(_refused, name):
        assert untouched
        assert "float32" in text
        assert "fully_shard" in text
        assert ("O1" in text) is (name in ("ZeRO", "OSS"))


# -- checkpoints, and weights that something else writes -------------------------------------------


@pytest.mark.parametrize("order", [*itertools.permutations(["model", "optimizer", "masters"])])
def test_a_resumed_run_goes_on_to_the_bit_in_whatever_order_it_is_loaded(order):
    whole, saved, resumed = Job().train(0, 1, 2, 3), Job().train(0, 1).saved(), Job(seed=1)
    for part in order:
        resumed.parts[part].load_state_dict(saved[part])
    assert equal(resumed.train(2, 3).values(), whole.values())


def test_a_part_of_a_checkpoint_alone_is_taken_over():
    """The model's values are float16; masters bring the model with them."""
    job = Job().train(0, 1)
    saved, model, masters = job.saved(), Job(seed=1).train(5), Job(seed=1)
    model.model.load_state_dict(saved["model"])
    kept = model.masters.state_dict()["masters"].values()
    assert equal(kept, [value.float() for value in saved["model"].values()])
    masters.masters.load_state_dict(saved["masters"])
    assert equal(masters.model.parameters(), job.model.parameters())
    assert equal(master_params(masters.optimizer), master_params(job.optimizer))


def test_a_state_has_the_optimizers_numbers_and_one_that_does_not_fit_changes_nothing():
    (_, optimizer, masters), frozen = one_master(5.0), half(1.0, requires_grad=False)
    optimizer.add_param_group({"params": [frozen, half(6.0)]})
    state = masters.state_dict()["masters"]
    assert {n: (v.item(), v.dtype) for n, v in state.items()} == {0: (5.0, F32), 2: (6.0, F32)}
    bad: dict[str, Any] = {
        "not a state of master": {},
        "1 masters and there are 2 here; parameter 2": {0: state[0]},
        r"parameter 2 is .*\(3,\), and the one here .*\(1,\)": {0: state[0], 2: torch.ones(3)},
    }
    for says, values in bad.items():
        with pytest.raises(ValueError, match=says):
            masters.load_state_dict({"version": 1, "masters": values} if values else {})
    assert [m.item() for m in list(master_params(optimizer))[::2]] == [5.0, 6.0]


def test_weights_that_are_swapped_out_and_back_keep_their_masters():
    """As for an evaluation with averaged weights."""
    swapped, straight = Job().train(0, 1, 2), Job().train(0, 1, 2)
    with torch.no_grad():
        for parameter in swapped.model.parameters():
            kept = parameter.clone()
            parameter.zero_()
            parameter.copy_(kept)
    assert equal(swapped.train(3).values(), straight.train(3).values())
    parameter, _, masters = one_master(1.0)
    parameter.data.fill_(4.0)  # leaves no trace
    masters.refresh()
    assert masters.master_of(parameter).tolist() == [4.0]

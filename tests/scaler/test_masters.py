"""fp32 masters: the loop by hand to the bit, whatever the optimizer, the loop and the gradients.

What is true of split masters alone is in `tests.masters.test_split`.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from distamp import StepGuard
from distamp.errors import CallOrderError, ConfigError
from distamp.scaler import MasterParameters, master_params, masters_of
from tests.on_ranks import on_ranks
from tests.ranks import mesh
from tests.scaler.masters import (
    ByHand,
    Job,
    adamw,
    half_mlp,
    local,
    loss_of,
    master_scaler,
    one_master,
    spread,
)
from tests.scaler.matrix.layouts import LAYOUTS, Parameters
from tests.scaler.matrix.reference import KINDS
from tests.scaler.steps import INF, backward, cpu_scaler, leaf

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}
ZERO_GRADS: dict[str, Callable[[Any, nn.Module], None]] = {
    "optimizer": lambda o, m: o.zero_grad(),
    "optimizer in place": lambda o, m: o.zero_grad(set_to_none=False),
    "model": lambda o, m: m.zero_grad(),
    "model in place": lambda o, m: m.zero_grad(set_to_none=False),
}


def equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Whether what this rank holds of tensors is the same to the bit."""
    return all(torch.equal(local(a), local(b)) for a, b in zip(ours, theirs, strict=True))


# -- as by hand ------------------------------------------------------------------------------------


def _grouped(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    first, *rest = parameters
    groups = [{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.5}]
    return torch.optim.AdamW(groups, lr=1e-3)


def _rows(model: nn.Module, batch: int, factor: float = 1.0) -> Tensor:
    if batch % 2:  # torch adds no sparse float16
        return torch.zeros((), requires_grad=True)
    tokens = torch.tensor([[1, 1, 3], [0, 5, 5]][batch // 2 % 2])
    return model(tokens).float().square().sum() * factor


TABLE = partial(nn.Embedding, 6, 4, sparse=True, dtype=F16)
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    **{name: (half_mlp, make, loss_of) for name, make in OPTIMIZERS.items()},
    "bfloat16": (lambda: half_mlp(dtype=BF16), adamw, loss_of),
    "groups": (half_mlp, _grouped, loss_of),
    "a norm in float32": (
        lambda: nn.Sequential(nn.Linear(8, 8).half(), nn.BatchNorm1d(8)),
        adamw,
        loss_of,
    ),
    "sparse": (TABLE, lambda ps: torch.optim.SGD(ps, lr=0.1), _rows),
    "SparseAdam": (TABLE, lambda ps: torch.optim.SparseAdam(list(ps), lr=0.1), _rows),
}
CLIPPED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "optimizer": lambda model, optimizer: optimizer,
    "model.parameters()": lambda model, optimizer: model.parameters(),
    "master_params": lambda model, optimizer: master_params(optimizer),
}
CALLS = ("step", "unscale_", "no scaler")
CASES = [
    *((name, how, False) for name in MODELS for how in (*CALLS, "disabled")),
    *((name, how, False) for name in ("AdamW", "SGD fused", "groups") for how in CLIPPED),
    *((name, how, True) for name in OPTIMIZERS for how in (*CALLS, *CLIPPED)),
]


def _made(make_model: Callable[[], nn.Module], split: bool, layout: str) -> Any:
    torch.manual_seed(0)
    model = make_model()
    return spread(model.to(BF16) if split else model, layout)


def _norm(hand: ByHand) -> Tensor:
    """Of what all ranks hold, each a shard."""
    squares = torch.stack([c.grad.double().square().sum() for c in hand.copies]).sum()
    if dist.is_initialized():
        dist.all_reduce(squares)
    return squares.sqrt()


def _beside_by_hand(
    name: str, how: str, split: bool, zero: str = "optimizer", layout: str = ""
) -> None:
    """Two microbatches a step, a schedule, and an overflow of rank 0 in the third step."""
    make_model, make, loss = MODELS[name]
    rank = dist.get_rank() if layout else 0
    data = {"TP": 0, "FSDP2 x TP": rank // 2}.get(layout, rank)
    plain = how in ("no scaler", "disabled")
    model, other = (_made(make_model, split, layout) for _ in range(2))
    optimizer, hand = make(model.parameters()), ByHand(other.parameters(), make, split)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, hand.optimizer)
    ]
    masters, scaler = MasterParameters(optimizer, split=split), master_scaler(enabled=not plain)
    for step in range(6):
        ZERO_GRADS[zero](optimizer, model)
        hand.zero_grad()
        scale = scaler.get_scale()
        for batch in (2 * step + 100 * data, 2 * step + 1 + 100 * data):
            factor = INF if step == 2 and not plain and data == 0 else 1.0
            scaler.scale(loss(model, batch, factor)).backward()
            (loss(other, batch, factor) * scale).backward()
        if how == "unscale_" or (how in CLIPPED and step < 2):
            scaler.unscale_(optimizer)
            freed = [p.grad for p in model.parameters() if p.dtype is not F32]
            assert freed == [None] * len(freed), "as they are taken"
        finite = hand.unscale(scale)
        if how in CLIPPED:
            norm = scaler.clip_grad_norm_(CLIPPED[how](model, optimizer), 0.1)
            assert not finite or norm.item() == pytest.approx(_norm(hand).item(), rel=1e-6)
            for c in hand.copies:
                c.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step() if how == "no scaler" else scaler.step(optimizer)
        scaler.update()
        if finite:
            hand.step()
        for schedule in schedules:
            schedule.step()
        assert plain or scaler.step_was_taken(optimizer) is (step != 2)
    assert not split or all(local(m).isnan().all() for m in master_params(optimizer)), "freed"
    with masters.materialized():
        assert equal(master_params(optimizer), hand.copies)
    assert equal(model.parameters(), other.parameters())
    low = [local(p) for p in model.parameters() if p.dtype is not F32]
    assert masters.nbytes == (2 if split else 4) * sum(p.numel() for p in low) > 0


@pytest.mark.parametrize(("name", "how", "split"), CASES)
def test_training_is_that_of_the_loop_by_hand_to_the_bit(name, how, split):
    _beside_by_hand(name, how, split)


@pytest.mark.parametrize("layout", ["buckets", "bucket views"])
def test_under_ddp_it_is_too_however_gradients_are_zeroed(ranks2, layout):
    for zero in ZERO_GRADS:
        ranks2.run(_beside_by_hand, "AdamW", "step", False, zero, layout)


@SPLIT
@pytest.mark.parametrize(
    ("layout", "name", "how"),
    [
        ("FSDP2", "AdamW fused", "step"),
        ("FSDP2", "AdamW fused", "optimizer"),
        ("HSDP", "AdamW", "no scaler"),
        ("TP", "AdamW", "step"),
        ("FSDP2 x TP", "AdamW", "no scaler"),
    ],
)
def test_of_dtensors_it_is_too_on_what_each_rank_holds(ranks, layout, name, how, split):
    ranks(2 if layout == "FSDP2" else 4).run(_beside_by_hand, name, how, split, layout=layout)


@on_ranks(2)
@SPLIT
def test_a_gradient_of_which_each_rank_has_a_summand_is_stepped_by_the_sum(split):
    """The gradient of a replicated parameter, as the norms of sequence parallel have it."""
    weight = nn.Parameter(distribute_tensor(torch.zeros(3, dtype=BF16), mesh((2,), ("tensor",))))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), master_scaler(2.0)
    MasterParameters(optimizer, split=split)
    scaler.scale(torch.ones(()))
    summand = torch.full((3,), 2.0 * (dist.get_rank() + 1), dtype=BF16)
    weight.grad = DTensor.from_local(summand, weight.device_mesh, [Partial()])
    scaler.step(optimizer)
    assert weight.to_local().tolist() == [-3.0] * 3


# -- zero_grad -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16 without a scaler"])
@pytest.mark.parametrize("zero_grad", ZERO_GRADS)
def test_gradients_that_were_zeroed_are_gone_whoever_zeroes_them(zero_grad, dtype):
    """Each step after a pass that was thrown away, by the loop or by a wrapper that warms up."""
    none, scaler = master_scaler(enabled=False), master_scaler(enabled=dtype is F16)
    used, optimizer, _masters = one_master(dtype=dtype)
    unused = leaf(1.0, dtype=dtype)
    optimizer.add_param_group({"params": [unused]})

    def zero() -> None:
        ZERO_GRADS[zero_grad](optimizer, nn.ParameterList([used, unused]))

    def step(*gradients: float) -> None:
        for gradient in gradients:
            backward(scaler, used, gradient)
        scaler.step(optimizer)
        scaler.update()
        zero()

    for number, thrown in enumerate((scaler, none, scaler)):
        backward(thrown, used, 100.0)
        zero()
        if number == 0:  # a later loss leaves it out, and it is not stepped again
            backward(scaler, unused, 1.0)
        step(2.0**number, 2.0**number)
    assert (used.item(), unused.item()) == (-14.0, 0.0)
    if scaler.is_enabled():  # nor by what a skipped step left
        backward(scaler, unused, 1.0)
        step(INF)
        step(1.0)
        assert (used.item(), unused.item()) == (-15.0, 0.0)


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
        assert _stepped(leaf(0.0, 0.0, 0.0, dtype=F16), gradient).tolist() == [0.0, expected, 0.0]
    gradient = torch.arange(150_000.0).reshape(300, 500).remainder(97.0).half().t()
    parameter = nn.Parameter(torch.zeros(300, 500, dtype=F16).t())
    assert torch.equal(_stepped(parameter, gradient, 1.0), -gradient.float())


def test_groups_added_later_and_parameters_that_thaw_get_masters():
    first, optimizer, masters = one_master()
    second, third = leaf(0.0, dtype=F16), leaf(0.0, dtype=F16).requires_grad_(False)
    optimizer.add_param_group({"params": [third]})
    optimizer.step()
    assert masters.master_of(third) is None
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    third.requires_grad_(True)
    scaler = master_scaler()
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
    backward(master_scaler(enabled=False), parameter, 0.5)
    scaler.step(optimizer)
    assert parameter.item() == 0.25


class AroundItsParents(torch.optim.SGD):
    """Writes weights before and after its parent's step, for which torch calls hooks again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (parameter,) = self.param_groups[0]["params"]
        parameter.mul_(0.5)
        super().step()
        parameter.lerp_(parameter.grad, 0.5)


@SPLIT
def test_an_optimizer_may_write_around_the_step_of_its_parent_class(split):
    torch.optim.SGD([leaf(1.0)])  # so that torch knows the parent by itself
    parameter = leaf(8.0, dtype=BF16)
    optimizer = AroundItsParents([parameter], lr=1.0)
    MasterParameters(optimizer, split=split)
    for value in (2.0, 0.5):  # (8 / 2 - 1 + 1) / 2, (2 / 2 - 1 + 1) / 2
        backward(StepGuard(), parameter, 1.0)
        optimizer.step()
        assert parameter.item() == value


# -- what is refused -------------------------------------------------------------------------------


def test_masters_that_cannot_be_are_refused_with_what_to_do():
    parameter, optimizer, masters = one_master(1.0)
    fp32 = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    refused: dict[str, Any] = {
        "cast the model": fp32,
        "Optimizer, not list": [fp32],
        "has master parameters already": optimizer,
        "LBFGS holds its parameters in '_params'": torch.optim.LBFGS([parameter]),
    }
    for words, given in refused.items():
        with pytest.raises((ValueError, TypeError), match=words):
            MasterParameters(given)
    with pytest.raises(CallOrderError, match="closure"):
        optimizer.step(lambda: parameter.float().sum())
    for copied, given in itertools.product((copy.deepcopy, pickle.dumps), (optimizer, masters)):
        with pytest.raises(CallOrderError, match="cannot be copied or pickled"):
            copied(given)
    optimizer.add_param_group({"params": [parameter]})
    with pytest.raises(ValueError, match="has a master of it already"):
        optimizer.step()
    with pytest.raises(CallOrderError, match="is gone"):
        one_master()[2].param_pairs()


@pytest.mark.parametrize("call", ["unscale_", "step", "clip_grad_norm_"])
def test_a_scaler_and_an_optimizer_must_both_know_of_masters(call):
    arguments = [1.0] if call == "clip_grad_norm_" else []
    plain, (parameter, optimizer, _) = leaf(1.0, dtype=F16), one_master(1.0)
    make_it, inplace = "Make the scaler with fp16_grads='master'", cpu_scaler(fp16_grads="inplace")
    for scaler, used, holds, says in (
        (cpu_scaler(), parameter, optimizer, make_it),
        (inplace, parameter, optimizer, make_it),
        (master_scaler(), plain, torch.optim.SGD([plain]), r"MasterParameters\(optimizer\) before"),
    ):
        backward(scaler, used, 1.0)
        with pytest.raises(ConfigError, match=says):
            getattr(scaler, call)(holds, *arguments)
        assert used.item() == 1.0


@on_ranks(4)
@pytest.mark.parametrize("name", ["FSDP1", "FSDP1 orig params", "ZeRO", "OSS"])
def test_flat_parameters_and_shares_are_refused_with_what_to_do(name):
    """Over a model that was cast to float16 first."""
    layout = type("Half", (Parameters, LAYOUTS[name]), {})()
    parameters = [p for part in layout.parts() for p in part]
    optimizer = layout.optimizer(KINDS["SGD for-loop"], parameters)
    with pytest.raises(ValueError, match=r"float32.*fully_shard|fully_shard.*float32") as error:
        MasterParameters(optimizer)
    assert ("fp16" in str(error.value)) is (name in ("ZeRO", "OSS"))
    assert masters_of(optimizer) is None


# -- checkpoints, and weights that something else writes -------------------------------------------


@SPLIT
@pytest.mark.parametrize("order", [*itertools.permutations(["model", "optimizer", "masters"])])
def test_a_resumed_run_goes_on_to_the_bit_in_whatever_order_it_is_loaded(order, split):
    whole, saved = Job(split=split).train(0, 1, 2, 3), Job(split=split).train(0, 1).saved()
    resumed = Job(seed=1, split=split).load(saved, order).train(2, 3)
    assert equal(resumed.values(), whole.values())


@on_ranks(2)
@SPLIT
def test_a_sharded_run_goes_on_to_the_bit_by_torchs_distributed_checkpoint(tmp_path, split):
    whole, first, resumed = (Job(seed, split=split, layout="FSDP2") for seed in (0, 0, 1))
    dcp.save(first.train(0, 1).state(), checkpoint_id=tmp_path)
    state = resumed.train(7).state()  # the optimizer's must be there to be loaded into
    dcp.load(state, checkpoint_id=tmp_path)
    resumed.load(state, ("optimizer", "masters", "model")).train(2, 3)
    assert equal(resumed.values(), whole.train(0, 1, 2, 3).values())


@pytest.mark.parametrize("thawed_first", [True, False])
def test_the_state_of_a_parameter_that_thawed_is_loaded_in_float32_or_refused(thawed_first):
    """Its optimizer's load_state_dict rounds it, as long as there is no master."""
    (_, saved, _), (_, resumed, _) = one_master(), one_master()
    thawed, other = (leaf(0.0, 0.0, dtype=F16).requires_grad_(on) for on in (True, False))
    for optimizer, parameter in ((saved, thawed), (resumed, other)):
        optimizer.add_param_group({"params": [parameter], "momentum": 0.999})
    for _ in range(2):
        (thawed.float() * torch.tensor([1.0, 3.0])).sum().backward()
        saved.step()
    other.requires_grad_(thawed_first)
    resumed.load_state_dict(saved.state_dict())
    other.requires_grad_(True)
    if thawed_first:
        buffers = [optimizer.state_dict()["state"][1] for optimizer in (saved, resumed)]
        assert torch.equal(*[each["momentum_buffer"] for each in buffers])
    with (
        pytest.warns(UserWarning, match="masters of 1 parameter were rebuilt")
        if thawed_first
        else pytest.raises(ConfigError, match="to be trained")
    ):
        resumed.step()


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
    (_, optimizer, masters), other = one_master(5.0), leaf(6.0, dtype=F16)
    frozen = leaf(1.0, dtype=F16).requires_grad_(False)
    optimizer.add_param_group({"params": [frozen, other]})
    state = masters.state_dict()["masters"]
    assert {n: (v.item(), v.dtype) for n, v in state.items()} == {0: (5.0, F32), 2: (6.0, F32)}
    bad: dict[str, Any] = {
        "not a state of master": {},
        "1 master and this optimizer has 2. Parameter 2 .* only in the optimizer": {0: state[0]},
        r"parameter 2 is .*\(3,\), but .* is .*\(1,\)": {0: state[0], 2: torch.ones(3)},
    }
    for says, values in bad.items():
        with pytest.raises(ValueError, match=says):
            masters.load_state_dict({"version": 1, "masters": values} if values else {})
    assert [m.item() for m in list(master_params(optimizer))[::2]] == [5.0, 6.0]


@SPLIT
def test_weights_that_are_swapped_out_and_back_keep_their_masters(split):
    """As for an evaluation with averaged weights."""
    swapped, straight = Job(split=split).train(0, 1, 2), Job(split=split).train(0, 1, 2)
    with torch.no_grad():
        for parameter in swapped.model.parameters():
            kept = parameter.clone()
            parameter.fill_(2.0)
            parameter.copy_(kept)
    assert equal(swapped.train(3).values(), straight.train(3).values())
    parameter, _, masters = one_master(1.0, split=split)
    parameter.data.fill_(4.0)  # leaves no trace
    masters.refresh()
    assert masters.state_dict()["masters"][0].tolist() == [4.0]


@on_ranks(2)
@SPLIT
@pytest.mark.parametrize("write", ["load_state_dict", "in place", "foreach"])
@torch.no_grad()
def test_what_was_written_to_sharded_weights_before_a_step_stays(write, split):
    job = Job(split=split, layout="FSDP2")
    weights = {name: torch.full_like(p, 0.25) for name, p in job.model.state_dict().items()}
    if write == "load_state_dict":
        job.model.load_state_dict(weights)
    elif write == "in place":  # as dcp.load(model.state_dict()) does
        for name, tensor in job.model.state_dict().items():
            tensor.to_local().copy_(weights[name].to_local())
    else:
        torch._foreach_lerp_(list(job.model.parameters()), list(weights.values()), 1.0)
    for parameter in job.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    job.optimizer.param_groups[0]["weight_decay"] = 0.0
    job.optimizer.step()
    assert all((local(p) == 0.25).all() for p in job.model.parameters())


@on_ranks(2)
@torch.no_grad()
def test_what_a_rank_broadcasts_before_the_first_step_stays():
    weight, optimizer, _masters = one_master(float(dist.get_rank()))
    dist.broadcast(weight, 1)
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    assert weight.item() == 0.5

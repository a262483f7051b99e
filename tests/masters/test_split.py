"""Split masters: a bfloat16 weight and 16 bits are an exact float32 master, in half the memory."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from distamp import DistGradScaler, clip_grad_norm_
from distamp.masters.split import join, split
from distamp.scaler import MasterParameters, master_params
from tests.comm_hooks.training import agreed
from tests.on_ranks import on_ranks
from tests.ranks import mesh
from tests.scaler.masters import half_mlp, loss_of, master_scaler

BF16, F32 = torch.bfloat16, torch.float32
# Finite values of float32 in all, and those halfway between two bfloat16 values of which the lower
# is even: what rounding to nearest even has no 16-bit remainder for.
FINITE, TIES_TO_EVEN = 4_278_190_080, 32_640

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


def half_away(value: Tensor) -> Tensor:
    """The bfloat16 nearest to each value, of two as near the larger in magnitude: in float64."""
    exact = value.double().abs()
    _, exponent = torch.frexp(exact)  # bfloat16 has 8 bits, or a multiple of 2^-133
    unit = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=-125) - 8)
    rounded = torch.floor(exact / unit + 0.5) * unit
    return torch.copysign(rounded, value.double()).to(BF16)


class ByHand:
    """The reference: whole float32 copies, and a write-back that rounds half away from zero."""

    def __init__(self, parameters: Iterable[Tensor], make: Callable[..., Any]) -> None:
        self.parameters = list(parameters)
        self.copies = [p.detach().float() for p in self.parameters]
        self.optimizer = make(self.copies)

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> None:
        for parameter, master in zip(self.parameters, self.copies, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if max_norm is not None:
            clip_grad_norm_(self.copies, max_norm)
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.copies, strict=True):
            parameter.copy_(half_away(master))


def of_bits(first: int, last: int) -> Tensor:
    return torch.arange(first, last, dtype=torch.int64).to(torch.int32).view(F32)


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    weights, remainders = values.to(BF16), torch.empty_like(values, dtype=torch.int16)
    split([(values.clone(), weights, remainders)])
    return weights, remainders


def joined(weights: Tensor, remainders: Tensor) -> Tensor:
    values = torch.empty_like(weights, dtype=F32)
    join([(values, weights, remainders)])
    return values


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    kind = torch.int16 if ours.dtype is BF16 else torch.int32
    return torch.equal(ours.view(kind), theirs.view(kind))


def pair_of(value: float = 1.0) -> tuple[nn.Parameter, Any, MasterParameters]:
    parameter = nn.Parameter(torch.tensor([value, value], dtype=BF16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return parameter, optimizer, MasterParameters(optimizer, split=True)


# -- the format ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0x0000, 0x0001, 0x3F80, 0x7F7F, 0x8000, 0xBF80, 0xFF7F])
def test_a_value_comes_back_to_the_bit_and_its_weight_is_rounded_half_away(start):
    """All values of two bfloat16 steps: around zero, among subnormal numbers, at the largest."""
    values = of_bits(start << 16, min((start + 2) << 16, 0xFF800000))
    values = values[values.isfinite()]
    weights, remainders = halves(values)
    assert same_bits(joined(weights, remainders), values)
    assert same_bits(weights, half_away(values))


@pytest.mark.slow
def test_no_finite_value_is_lost_and_to_nearest_even_would_lose_some():
    count = ties = 0
    for start in range(0, 2**32, 2**20):
        values = of_bits(start, start + 2**20)
        finite, bits = values.isfinite(), values.view(torch.int32)
        count += int(((joined(*halves(values)).view(torch.int32) == bits) & finite).sum())
        ties += int(((bits - values.to(BF16).float().view(torch.int32) == 2**15) & finite).sum())
    assert (count, ties) == (FINITE, TIES_TO_EVEN)


def test_what_is_not_finite_is_nan():
    """Also the NaN of an accelerator, all of whose lower bits are set."""
    bits = torch.tensor([0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00001, 0x7F800001])
    values = bits.to(torch.int32).view(F32)
    weights, remainders = halves(values)
    for found in (weights.float(), joined(weights, remainders)):
        assert found.isnan().all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (131_072,), (300, 500)])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_size_and_layout_is_split_whole(shape, transposed):
    """Large ones in pieces."""
    values = torch.randn(shape)
    values = values.t() if transposed and values.dim() == 2 else values
    weights, remainders = halves(values)
    assert torch.equal(joined(weights, remainders), values)
    assert torch.equal(weights, half_away(values))


# -- training --------------------------------------------------------------------------------------


def _train(name: str, steps: int, resume_at: int | None = None) -> None:
    """Beside whole masters by hand; the scaler where the optimizer takes its flags itself."""
    make = OPTIMIZERS[name]
    model, other = half_mlp(dtype=BF16), half_mlp(dtype=BF16)
    optimizer, hand = make(model.parameters()), ByHand(other.parameters(), make)
    masters = MasterParameters(optimizer, split=True)
    scaler = DistGradScaler("cpu", init_scale=1.0, fp16_grads="master", enabled="fused" in name)
    for step in range(steps):
        if step == resume_at:
            saved = [copy.deepcopy(x.state_dict()) for x in (model, optimizer, masters)]
            model = half_mlp(seed=1, dtype=BF16)
            optimizer = make(model.parameters())
            masters = MasterParameters(optimizer, split=True)
            for part, state in zip((model, optimizer, masters), saved, strict=True):
                part.load_state_dict(state)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        loss_of(other, step).backward()
        clips = step % 3 == 0
        if clips and scaler.is_enabled():
            scaler.unscale_(optimizer)
            clip_grad_norm_(master_params(optimizer), 0.1)
        elif clips:
            scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
        hand.step(0.1 if clips else None)
    with masters.materialized():
        for ours, theirs in zip(master_params(optimizer), hand.copies, strict=True):
            assert same_bits(ours.detach(), theirs)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(ours.detach(), theirs.detach())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_200_steps_are_those_of_whole_masters_to_the_bit(name):
    _train(name, 200)


@pytest.mark.parametrize("name", ["AdamW fused", "Adagrad"])
def test_a_resumed_run_goes_on_to_the_bit(name):
    _train(name, 20, resume_at=10)


def test_schedulefree_trains_by_split_masters_and_switches_in_materialized():
    schedulefree = pytest.importorskip("schedulefree")

    def run(whole: bool) -> list[Tensor]:
        model = half_mlp(dtype=BF16)
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, foreach=False)
        masters = MasterParameters(optimizer, split=not whole)
        for step in range(6):
            with masters.materialized():
                optimizer.train()
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            with masters.materialized():
                optimizer.eval()
        return [*masters.state_dict()["masters"].values()]

    for ours, theirs in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_leaves_weights_and_remainders(fused):
    model = half_mlp(dtype=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    masters = MasterParameters(optimizer, split=True)
    scaler = DistGradScaler("cpu", init_scale=1.0, fp16_grads="master")
    found = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, math.inf if step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(
            copy.deepcopy([*model.parameters(), *masters.state_dict()["masters"].values()])
        )
    assert all(map(torch.equal, found[1], found[2]))


# -- states, and weights that something else writes ------------------------------------------------


def test_a_state_of_whole_masters_is_one_of_split_masters_and_the_other_way_round():
    value = torch.tensor([1.0 + 2.0**-20, -3.0 - 2.0**-19])
    for here, there in itertools.permutations([False, True]):
        optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(2).to(BF16))]) for _ in "ab"]
        first = MasterParameters(optimizers[0], split=here)
        second = MasterParameters(optimizers[1], split=there)
        first.load_state_dict({"version": 1, "masters": {0: value}})
        second.load_state_dict(first.state_dict())
        assert torch.equal(second.state_dict()["masters"][0], value)
        assert second.parameters()[0].tolist() == [1.0, -3.0]


def test_weights_that_are_swapped_out_and_back_keep_their_remainders():
    parameter, _, masters = pair_of()
    value = torch.tensor([1.0 - 2.0**-20, 1e-3])
    masters.load_state_dict({"version": 1, "masters": {0: value}})
    with torch.no_grad():
        kept = parameter.clone()
        parameter.fill_(2.0)
        parameter.copy_(kept)
    assert torch.equal(masters.state_dict()["masters"][0], value)
    masters.refresh()
    assert torch.equal(masters.state_dict()["masters"][0], parameter.detach().float())


def test_the_master_of_a_written_weight_rounds_to_it_also_where_that_is_zero():
    """A remainder below zero has nothing to be taken from."""
    for value in (1.0 - 2.0**-20, 1.0 + 2.0**-20):
        for written in (0.0, -0.0, 3.0, -7.0):
            parameter, optimizer, masters = pair_of()
            masters.load_state_dict({"version": 1, "masters": {0: torch.full((2,), value)}})
            with torch.no_grad():
                parameter.fill_(written)
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            assert parameter.tolist() == [written, written]
            assert half_away(masters.state_dict()["masters"][0]).tolist() == [written, written]


def test_between_steps_a_master_reads_as_nan_and_is_not_written():
    parameter, _, masters = pair_of()
    master = masters.master_of(parameter)
    assert (master.shape, master.dtype) == (parameter.shape, F32)
    assert master.isnan().all()
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        master.add_(1.0)
    with torch.no_grad(), masters.materialized():
        assert master.tolist() == [1.0, 1.0]
        master.add_(1.0)
    assert parameter.tolist() == [2.0, 2.0]


# -- memory ----------------------------------------------------------------------------------------


def _alive(elements: int) -> int:
    """Bytes of all tensors that are alive and not small, each storage once, for each element."""
    found = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter):  # fake ones of other tests have no memory
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in found.values() if size > 1000) // elements


def test_between_steps_a_master_takes_two_bytes_and_its_gradient_none():
    elements, other = 100_000, _alive(100_000)
    model = nn.Linear(elements, 1, bias=False).to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    masters = MasterParameters(optimizer, split=True)
    within = []
    optimizer.register_step_pre_hook(lambda *_: within.append(_alive(elements) - other))
    for _ in range(2):
        optimizer.zero_grad()
        model.weight.grad = torch.ones_like(model.weight)
        assert _alive(elements) - other == 2 + 2 + 2  # the weight, its remainder, its gradient
        optimizer.step()
        assert _alive(elements) - other == 2 + 2
    assert within == [2 + 2 + 4 + 4] * 2  # and in float32 the value and its gradient
    assert masters.nbytes == 2 * elements


# -- of DTensors: FSDP2, HSDP and tensor parallel, beside the loop by hand on each rank ------------


def _model(layout: str, seed: int = 0) -> nn.Module:
    model = half_mlp(seed, BF16)  # of 4 outputs and biases of 16, so every shard differs in size
    if "TP" in layout:
        over = mesh((2, 2), ("shard", "tensor"))
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, over["tensor"], plan)
        if layout == "TP":
            return model
        return fully_shard(model, mesh=over["shard"])
    if layout == "HSDP":
        return fully_shard(model, mesh=mesh((2, 2), ("copies", "shard")))
    return fully_shard(model)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _OnRank(ByHand):
    """By hand on what this rank holds, written in place: the model's own gradients are read."""

    def __init__(self, model: nn.Module, make: Any) -> None:
        self.model = list(model.parameters())
        with torch.no_grad():
            super().__init__(map(_local, self.model), make)

    def step(self, max_norm: float | None = None) -> None:
        for parameter, part in zip(self.model, self.parameters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            part.grad = None if gradient is None else _local(gradient)
        super().step(max_norm)


@torch.no_grad()
def _compare(model: nn.Module, optimizer: Any, masters: Any, hand: Any) -> None:
    if masters.split:
        assert all(_local(each).isnan().all() for each in master_params(optimizer))
    with masters.materialized():
        for ours, theirs in zip(master_params(optimizer), hand.copies, strict=True):
            assert same_bits(_local(ours), theirs)
    for ours, theirs in zip(model.parameters(), hand.parameters, strict=True):
        assert same_bits(_local(ours), theirs)


def _train_shards(layout: str, name: str, steps: int) -> list[float]:
    """Split masters; the rank's own data where parameters are sharded over it."""
    make = OPTIMIZERS[name]
    model, other = _model(layout), _model(layout)
    optimizer, hand = make(model.parameters()), _OnRank(other, make)
    masters = MasterParameters(optimizer, split=True)
    batch = {"TP": 0, "FSDP2 x TP": dist.get_rank() // 2}.get(layout, dist.get_rank())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, 10 * step + batch).backward()
        loss_of(other, 10 * step + batch).backward()
        optimizer.step()
        hand.step()
    _compare(model, optimizer, masters, hand)
    return [_local(p).detach().double().sum().item() for p in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    [
        "AdamW fused",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("AdamW", "SGD", "Adagrad")),
    ],
)
def test_200_steps_under_fsdp2_are_those_by_hand_on_each_shard_to_the_bit(name):
    _train_shards("FSDP2", name, 200)


@pytest.mark.parametrize("layout", ["HSDP", "TP", "FSDP2 x TP"])
def test_in_every_layout_of_dtensors_they_are_those_by_hand_to_the_bit(ranks4, layout):
    found = ranks4.run(_train_shards, layout, "AdamW", 10)
    if layout == "HSDP":
        assert found[:2] == found[2:]


@on_ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_scaler_skips_on_all_ranks_and_clips_by_the_norm_of_the_whole(split):
    """An overflow of one rank in the second step."""
    model, whole = _model("FSDP2"), half_mlp(0, BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    MasterParameters(optimizer, split=split)
    scaler = master_scaler()
    loss_of(whole, 0).backward()
    expected = nn.utils.get_total_norm([p.grad.double() for p in whole.parameters()])
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        scaler.scale(loss_of(model, step, factor)).backward()
        if step == 0:
            norm = scaler.clip_grad_norm_(optimizer, 0.01)
            assert norm.item() == pytest.approx(expected.item(), rel=2e-2)
            assert agreed(norm)
        scaler.step(optimizer)
        assert scaler.stepped(optimizer) is (step != 1)
        scaler.update()


@on_ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_gradient_of_which_each_rank_has_a_summand_is_stepped_by_the_sum(split):
    """The gradient of a replicated parameter, as the norms of sequence parallel have it."""
    weight = nn.Parameter(distribute_tensor(torch.zeros(3, dtype=BF16), mesh((2,), ("tensor",))))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    MasterParameters(optimizer, split=split)
    scaler = master_scaler(2.0)
    scaler.scale(torch.ones(()))
    summand = torch.full((3,), 2.0 * (dist.get_rank() + 1), dtype=BF16)
    weight.grad = DTensor.from_local(summand, weight.device_mesh, [Partial()])
    scaler.step(optimizer)
    assert weight.to_local().tolist() == [-3.0] * 3


# -- checkpoints -----------------------------------------------------------------------------------


class _Job:
    def __init__(self, split: bool, seed: int = 0) -> None:
        self.model = _model("FSDP2", seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.masters = MasterParameters(self.optimizer, split=split)

    def train(self, *steps: int) -> _Job:
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, 10 * step + dist.get_rank()).backward()
            self.optimizer.step()
        return self

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "masters": self.masters}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, folder: Path) -> _Job:
        """The optimizer's state must be there to be loaded into, as dcp wants it."""
        state = self.train(7).state()
        dcp.load(state, checkpoint_id=folder)
        self.optimizer.load_state_dict(state["optimizer"])
        self.masters.load_state_dict(state["masters"])
        self.model.load_state_dict(state["model"])
        return self


@on_ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_sharded_run_goes_on_to_the_bit_by_torchs_distributed_checkpoint(tmp_path, split):
    whole = _Job(split).train(0, 1, 2, 3)
    dcp.save(_Job(split).train(0, 1).state(), checkpoint_id=tmp_path)
    resumed = _Job(split, seed=1).load(tmp_path).train(2, 3)
    ours, theirs = (job.masters.state_dict()["masters"] for job in (resumed, whole))
    assert all(same_bits(_local(mine), _local(theirs[number])) for number, mine in ours.items())


@on_ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("write", ["load_state_dict", "in place", "foreach"])
@torch.no_grad()
def test_what_was_written_to_sharded_weights_stays(write, split):
    """Before a step, which keeps it."""
    model = _model("FSDP2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    MasterParameters(optimizer, split=split)
    weights = {name: torch.full_like(p, 0.25) for name, p in model.state_dict().items()}
    if write == "load_state_dict":
        model.load_state_dict(weights)
    elif write == "in place":  # as dcp.load(model.state_dict()) does
        for name, tensor in model.state_dict().items():
            tensor.to_local().copy_(weights[name].to_local())
    else:
        torch._foreach_lerp_(list(model.parameters()), list(weights.values()), 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all((p.full_tensor() == 0.25).all() for p in model.parameters())


@on_ranks(2)
@torch.no_grad()
def test_what_a_rank_broadcasts_before_the_first_step_stays():
    weight = nn.Parameter(torch.full((2,), float(dist.get_rank()), dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    MasterParameters(optimizer)
    dist.broadcast(weight, 1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]

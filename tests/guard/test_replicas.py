"""Replicas that should be equal: compared bit by bit in a message that is sent anyway."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import distamp
from distamp import DistGradScaler, StepGuard
from distamp.errors import ConfigError, RankMismatchError, ReplicaMismatchError
from distamp.grads import to_local
from tests.guard.test_nonfinite_weights import _NetOfCells as Net
from tests.guard.test_nonfinite_weights import backward, calls_of_a_step, in_layout, iteration
from tests.guard.test_update_check import BadSGD
from tests.levels.cells import wrapped
from tests.on_ranks import on_devices, on_ranks
from tests.place import device_type
from tests.ranks import logged


def guard_of(model: nn.Module, interval: int = 1, **settings: Any) -> StepGuard:
    names = model.named_parameters()
    return StepGuard(named_parameters=names, check_replicas_every=interval, **settings)


@torch.no_grad()
def flip(tensor: Tensor, element: int = 0, bit: int = 3) -> None:
    """Flip one bit of this rank's part of a tensor."""
    local = to_local(tensor)
    words = local.view(-1).view(torch.uint8)
    words[element * local.itemsize + bit // 8] ^= 1 << bit % 8


def train(guard: Any, model: nn.Module, optimizer: Any, steps: int, **step: Any) -> None:
    for _ in range(steps):
        iteration(guard, model, optimizer, **step)


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **settings)


# -- which tensor, and which rank ------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("step", [{}, {"max_norm": 1.0}], ids=["flags", "norm"])
def test_one_flipped_bit_of_one_rank_is_named_on_every_rank(step):
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), guard_of(model)
    for _ in range(3):
        iteration(guard, model, optimizer, **step)
    if dist.get_rank() == 2:
        flip(model.module.hidden.weight, element=5)
    backward(guard, model, optimizer)
    with pytest.raises(ReplicaMismatchError) as raised:
        guard.step(optimizer, **step)
    text = str(raised.value)
    assert "module.hidden.weight: rank 2 differs from the other ranks in 1 of 64 elements" in text
    assert "by up to 8 units in the last place" in text
    assert guard.step_counts(optimizer).taken == 3


@on_ranks(2)
def test_of_two_ranks_neither_is_called_wrong():
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), guard_of(model)
    iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        flip(model.module.middle.bias)
    with pytest.raises(ReplicaMismatchError, match=r"middle\.bias: ranks 0, 1 differ in 1 of 8"):
        iteration(guard, model, optimizer)


@on_ranks(2)
def test_optimizer_state_is_compared():
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), guard_of(model)
    iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        flip(optimizer.state[model.module.hidden.bias]["momentum_buffer"])
    with pytest.raises(ReplicaMismatchError, match=r"momentum_buffer of module\.hidden\.bias"):
        iteration(guard, model, optimizer)


@on_ranks(2)
def test_numbers_in_the_state_are_compared():
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), guard_of(model)
    iteration(guard, model, optimizer)
    for param in model.parameters():
        optimizer.state[param]["count"] = 1
    iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        optimizer.state[model.module.hidden.bias]["count"] = 2
    with pytest.raises(ReplicaMismatchError, match=r"count of module\.hidden\.bias: ranks 0, 1"):
        iteration(guard, model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("split", [True, "split"], ids=["whole", "split"])
def test_masters_are_compared(split):
    model = distamp.cast_model(Net(), "bf16-O2", master_weights=split)
    optimizer = sgd(model)
    amp = distamp.initialize(
        model, optimizer, "bf16-O2", master_weights=split, check_replicas_every=1
    )

    def step() -> None:
        amp.zero_grad()
        amp.backward(amp.model(torch.ones(4, 8)).float().square().mean())
        amp.step()

    step()
    if dist.get_rank() == 1:
        pair = next(iter(distamp.masters.masters_of(optimizer)._pairs.values()))
        flip(pair.master if split is True else pair.remainder)
    kind = "master" if split is True else "remainder"
    with pytest.raises(ReplicaMismatchError, match=rf"  {kind} of \w+\.weight: ranks 0, 1 differ"):
        step()


@on_ranks(2)
def test_a_frozen_parameter_that_named_parameters_names_is_compared():
    model = Net()
    model.hidden.weight.requires_grad_(False)
    model = wrapped(model, "DDP", None, "")
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, guard = torch.optim.SGD(trained, lr=0.1), guard_of(model)
    iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        flip(model.module.hidden.weight)
    with pytest.raises(ReplicaMismatchError, match=r"module\.hidden\.weight: ranks 0, 1"):
        iteration(guard, model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("pair", [(0.0, -0.0), (float("nan"), -float("nan"))], ids=["0", "nan"])
def test_bits_are_compared_and_not_values(pair):
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), guard_of(model)
    iteration(guard, model, optimizer)
    frozen = nn.Parameter(torch.tensor([pair[dist.get_rank()]]), requires_grad=False)
    guard._tensor_names[frozen] = "constant"
    with pytest.raises(ReplicaMismatchError, match="constant: ranks 0, 1 differ in 1 of 1 element"):
        iteration(guard, model, optimizer)


@on_ranks(2)
def test_state_that_one_rank_lacks_is_named():
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), guard_of(model)
    iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        optimizer.state[model.module.hidden.weight].clear()
    with pytest.raises(ReplicaMismatchError, match=r"momentum_buffer of module\.hidden\.weight"):
        iteration(guard, model, optimizer)


# -- layouts ---------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("layout", ["FSDP1", "FSDP2"])
def test_shards_are_not_compared(layout):
    model, optimizer = in_layout(layout)
    guard = guard_of(model)
    for _ in range(2):
        iteration(guard, model, optimizer)
        flip(next(param for param in model.parameters() if to_local(param).numel()))
    result = guard.check_replicas()
    assert result.compared == ()
    assert len(result.not_compared) == len(list(model.parameters()))


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("rank", range(4))
def test_under_hsdp_the_replicas_of_a_shard_are_compared(rank):
    model = wrapped(Net(), "HSDP", None, "")
    optimizer, guard = sgd(model), guard_of(model)
    for _ in range(2):
        iteration(guard, model, optimizer)
    if dist.get_rank() == rank:
        flip(model.hidden.weight)
    pair = sorted((rank, (rank + 2) % 4))
    with pytest.raises(ReplicaMismatchError, match=f"weight: ranks {pair[0]}, {pair[1]} differ"):
        iteration(guard, model, optimizer)


@on_ranks(2)
def test_under_tensor_parallel_only_replicated_parameters_are_compared():
    model, optimizer = in_layout("TP")
    guard = guard_of(model)
    iteration(guard, model, optimizer)
    flip(model.hidden.weight, element=dist.get_rank())
    iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        flip(model.middle.bias)
    with pytest.raises(ReplicaMismatchError, match=r"middle\.bias: ranks 0, 1 differ"):
        iteration(guard, model, optimizer)


@on_ranks(2)
def test_under_zero_parameters_are_compared_and_no_state():
    model, _ = in_layout("DDP")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    guard = guard_of(model)
    for _ in range(2):
        iteration(guard, model, optimizer)
    assert not any(" of " in name for name in guard.check_replicas().compared)
    if dist.get_rank() == 1:
        flip(model.module.hidden.weight)
    with pytest.raises(ReplicaMismatchError, match=r"hidden\.weight"):
        iteration(guard, model, optimizer)


class Expert(nn.Module):
    """A layer that all ranks share, and an expert of each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8)
        torch.manual_seed(dist.get_rank() % 2)
        self.expert = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.expert(self.shared(inputs).tanh())


def train_experts(guard: StepGuard, model: Expert, optimizer: Any, **step: Any) -> None:
    backward(guard, model, optimizer)
    for param in model.shared.parameters():
        dist.all_reduce(param.grad)
    guard.step(optimizer, **step)
    guard.update()


@on_ranks(2)
def test_experts_are_not_compared_once_they_are_declared():
    model = Expert()
    optimizer, guard = sgd(model), guard_of(model)
    experts = set(model.expert.parameters())
    for _ in range(3):
        train_experts(guard, model, optimizer, shard_group_fn=lambda param: param in experts)
    assert "expert.weight" in guard.check_replicas().not_compared


@on_ranks(2)
def test_experts_without_a_declaration_are_reported():
    model = Expert()
    optimizer, guard = sgd(model), guard_of(model)
    train_experts(guard, model, optimizer)
    with pytest.raises(ReplicaMismatchError, match=r"expert\.weight[\s\S]*shard_group_fn= of step"):
        train_experts(guard, model, optimizer)


@on_ranks(4)
def test_ranks_at_the_same_place_of_declared_groups_are_compared():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = Expert()
    optimizer, guard = sgd(model), guard_of(model)
    experts, group = set(model.expert.parameters()), mesh["expert"].get_group()

    def train() -> None:
        backward(guard, model, optimizer)
        for param in model.parameters():
            over = mesh["data"].get_group() if param in experts else None
            dist.all_reduce(param.grad, group=over)
        guard.step(optimizer, shard_group_fn=lambda param: group if param in experts else None)
        guard.update()

    for _ in range(3):
        train()
    if dist.get_rank() == 3:
        flip(model.expert.bias)
    with pytest.raises(ReplicaMismatchError, match=r"expert\.bias: ranks 1, 3 differ"):
        train()


@on_ranks(2)
def test_parameters_with_other_shapes_are_refused_with_the_declaration_to_add():
    torch.manual_seed(0)
    width = 8 + dist.get_rank()
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
    optimizer, guard = sgd(model), guard_of(model)
    iteration(guard, model, optimizer)
    with pytest.raises(ReplicaMismatchError, match=r"0\.weight \(9, 8\)[\s\S]*shard_group_fn"):
        iteration(guard, model, optimizer)


# -- the time of a check, and its consequence ------------------------------------------------------


@on_ranks(2)
def test_the_check_follows_the_first_update_and_every_nth():
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), guard_of(model, interval=3)
    for _ in range(2):  # The second step carries the check after the first update.
        iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        flip(model.module.hidden.weight)
    for _ in range(2):
        iteration(guard, model, optimizer)
    backward(guard, model, optimizer)
    with pytest.raises(ReplicaMismatchError):
        guard.step(optimizer)
    assert guard.step_counts(optimizer).taken == 4


@on_ranks(2)
def test_warn_logs_and_goes_on():
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), guard_of(model, on_mismatch="warn")
    iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        flip(model.module.hidden.weight)
    with logged("distamp.guard") as lines:
        iteration(guard, model, optimizer)
    assert guard.step_counts(optimizer).taken == 2
    is_first = dist.get_rank() == 0
    assert len(lines) == is_first
    if is_first:
        assert "hidden.weight: ranks 0, 1 differ" in lines[0]


@on_ranks(2)
def test_a_check_adds_no_message_and_no_byte():
    calls = calls_of_a_step(StepGuard())
    assert calls_of_a_step(StepGuard(check_replicas_every=1)) == calls


@on_ranks(2)
def test_clean_runs_are_not_accused():
    for layout in ("DDP", "FSDP2", "ZeRO"):
        model, optimizer = in_layout(layout)
        guard = guard_of(model)
        for step in range(6):
            backward(guard, model, optimizer)
            if step == 3 and dist.get_rank() == 1:
                next(iter(model.parameters())).grad.mul_(float("nan"))
            guard.step(optimizer)
            guard.update()
        assert guard.step_counts(optimizer).skipped == 1


@on_ranks(2)
def test_a_scaler_compares_too():
    model = wrapped(Net(), "DDP", None, "")
    optimizer = sgd(model)
    scaler = DistGradScaler("cpu", 8.0, check_replicas_every=1)
    for _ in range(3):
        iteration(scaler, model, optimizer)
    if dist.get_rank() == 1:
        flip(model.module.hidden.weight)
    with pytest.raises(ReplicaMismatchError):
        iteration(scaler, model, optimizer)


@pytest.mark.parametrize("every", [0, -1, 1.0, True])
def test_every_must_be_a_number_of_updates(every):
    with pytest.raises(ConfigError, match="check_replicas_every must be a number of updates"):
        StepGuard(check_replicas_every=every)


def test_on_mismatch_has_two_values():
    with pytest.raises(ConfigError, match=r"on_mismatch must be one of .* not 'log'"):
        StepGuard(on_mismatch="log")


@on_ranks(2)
def test_ranks_with_other_settings_are_refused():
    model = wrapped(Net(), "DDP", None, "")
    guard = StepGuard(check_replicas_every=1 + dist.get_rank())
    with pytest.raises(RankMismatchError, match="check_replicas_every="):
        iteration(guard, model, sgd(model))


# -- now, and repair -------------------------------------------------------------------------------


@on_ranks(2)
def test_check_replicas_says_what_it_compared():
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), StepGuard(named_parameters=model.named_parameters())
    iteration(guard, model, optimizer)
    result = guard.check_replicas()
    assert len(result.compared) == 8
    assert str(result) == (
        "8 tensors equal on all ranks that hold them, 0 parameters without a known replica"
    )
    if dist.get_rank() == 1:
        flip(model.module.hidden.weight)
    with pytest.raises(ReplicaMismatchError, match=r"hidden\.weight"):
        guard.check_replicas()


def test_one_process_has_no_replicas():
    model = Net()
    optimizer, guard = sgd(model), StepGuard(named_parameters=model.named_parameters())
    iteration(guard, model, optimizer)
    result = guard.check_replicas()
    assert result.compared == ()
    assert result.not_compared == tuple(name for name, _ in model.named_parameters())
    assert guard.repair_replicas() == []


@on_ranks(4)
@pytest.mark.parametrize("from_rank", [None, 3])
def test_repair_copies_the_values_of_the_majority_or_of_a_rank(from_rank):
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), guard_of(model)
    for _ in range(2):
        iteration(guard, model, optimizer)
    good = model.module.hidden.weight.detach().clone()
    if dist.get_rank() == 3:
        flip(model.module.hidden.weight)
        flip(optimizer.state[model.module.middle.bias]["momentum_buffer"])
    flipped = [None] * 4
    dist.all_gather_object(flipped, model.module.hidden.weight.detach().clone())
    names = guard.repair_replicas(from_rank)
    assert set(names) == {"module.hidden.weight", "momentum_buffer of module.middle.bias"}
    expected = good if from_rank is None else flipped[3]
    assert torch.equal(model.module.hidden.weight, expected)
    iteration(guard, model, optimizer)
    assert guard.step_counts(optimizer).taken == 3


@on_ranks(2)
@pytest.mark.parametrize("call", ["check_replicas", "repair_replicas"])
def test_a_declaration_that_fails_on_one_rank_raises_on_every_rank(call):
    def declared(param: Tensor) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no layout")

    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), StepGuard()
    backward(guard, model, optimizer)
    guard.step(optimizer, shard_group_fn=declared)
    guard.update()
    text = "Rank 1 could not compare its replicas: ValueError: no layout"
    with pytest.raises(ReplicaMismatchError, match=text):
        getattr(guard, call)()


@on_ranks(2)
def test_repair_takes_a_rank_of_the_group():
    guard = StepGuard()
    with pytest.raises(ConfigError, match="from_rank must be one of ranks 0, 1, not 2"):
        guard.repair_replicas(from_rank=2)


@on_ranks(2)
def test_repair_of_a_weight_keeps_its_master():
    model = distamp.cast_model(Net(), "bf16-O2")
    optimizer = sgd(model)
    amp = distamp.initialize(model, optimizer, "bf16-O2", check_replicas_every=1)

    def step() -> None:
        amp.zero_grad()
        amp.backward(amp.model(torch.ones(4, 8)).float().square().mean())
        amp.step()

    step()
    if dist.get_rank() == 1:
        flip(model.hidden.weight)
        flip(next(iter(distamp.masters.masters_of(optimizer)._pairs.values())).master)
    amp.scaler.repair_replicas(from_rank=0)
    for _ in range(3):
        step()


# -- devices ---------------------------------------------------------------------------------------


@on_devices(2)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_on_devices_the_next_step_is_not_taken_and_every_rank_raises(fused):
    torch.manual_seed(0)
    model = Net().to(device_type())
    optimizer, guard = sgd(model, fused=fused), guard_of(model)
    for _ in range(4):
        iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.hidden.weight[0, 0] += 0.5
    weight_then = model.hidden.weight.detach().clone()
    with pytest.raises(ReplicaMismatchError, match=r"hidden\.weight: ranks 0, 1 differ in 1 of 64"):
        train(guard, model, optimizer, 2)
    assert torch.equal(model.hidden.weight, weight_then)


@pytest.mark.slow
@on_devices(2)
def test_on_devices_warn_does_not_skip_a_step():
    torch.manual_seed(0)
    model = Net().to(device_type())
    optimizer, guard = sgd(model, fused=True), guard_of(model, interval=2, on_mismatch="warn")
    for _ in range(3):
        iteration(guard, model, optimizer)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.hidden.weight[0, 0] += 0.5
    with logged("distamp.guard") as lines:
        for _ in range(4):
            iteration(guard, model, optimizer)
    assert guard.step_counts(optimizer).taken == 7
    if dist.get_rank() == 0:
        assert len(lines) == 2


# -- snapshots -------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_snapshot_of_replicas_that_differ_is_refused_and_a_rewind_makes_them_equal():
    model = wrapped(Net(), "DDP", None, "")
    optimizer, guard = sgd(model), StepGuard(named_parameters=model.named_parameters())
    snapshots = distamp.guard.Snapshots(model, optimizer, guard, every=1)
    for _ in range(2):
        iteration(guard, model, optimizer)
        snapshots.record()
    if dist.get_rank() == 1:
        flip(model.module.hidden.weight)
    iteration(guard, model, optimizer)
    with pytest.raises(ReplicaMismatchError, match=r"hidden\.weight: ranks 0, 1 differ"):
        snapshots.record()
    assert snapshots.rewind() == 1
    iteration(guard, model, optimizer)
    snapshots.record()
    assert guard.check_replicas().not_compared == ()


@on_ranks(2)
def test_a_rewind_inside_an_except_forgets_a_bad_update():
    model = wrapped(Net(), "DDP", None, "")
    name, bad = next(iter(model.named_parameters()))
    optimizer = BadSGD(model.parameters(), bad, rank=1, bad_step=2)
    guard = StepGuard(named_parameters=model.named_parameters(), check_update=True)
    snapshots = distamp.guard.Snapshots(model, optimizer, guard, every=10)
    iteration(guard, model, optimizer)
    snapshots.record()
    iteration(guard, model, optimizer)
    snapshots.rewind()
    iteration(guard, model, optimizer)
    assert guard.step_counts(optimizer).taken == 2
    assert dict(model.named_parameters())[name].isfinite().all()

"""Checks of updates and replicas where ordinary things cross: LoRA, hooks, compile, offload, ..."""

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import StepGuard
from distamp.comm_hooks import register_comm_hook
from distamp.errors import NonFiniteWeightsError, ReplicaMismatchError
from tests.guard.test_nonfinite_weights import _NetOfCells as Net
from tests.guard.test_replicas import flip
from tests.guard.test_update_check import BadSGD
from tests.levels.cells import wrapped
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import subgroup

UNCOMPILED_SETUPS = ("LoRA", "half base", "hook", "accumulation", "unused weights", "several")
SETUPS = (*UNCOMPILED_SETUPS, "compiled")


class LoRA(nn.Module):
    """A frozen layer with a trained low-rank part."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.hidden = nn.Linear(8, 2)
        self.middle = nn.Linear(2, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        base = self.base(inputs.to(self.base.weight.dtype)).to(inputs.dtype)
        return base + self.middle(self.hidden(inputs))


def make_model(setup: str) -> Any:
    """Return a model in DDP with an ordinary thing."""
    torch.manual_seed(0)
    model: nn.Module = Net()
    if setup == "LoRA":
        model = LoRA(torch.float32)
    elif setup == "half base":
        model = LoRA(torch.bfloat16)
    elif setup == "unused weights":
        model.unused = nn.Linear(8, 8)  # type: ignore[assignment]
    ddp = DistributedDataParallel(model, find_unused_parameters=setup == "unused weights")
    if setup == "hook":
        register_comm_hook(ddp, "int8")
    return torch.compile(ddp, backend="aot_eager") if setup == "compiled" else ddp


class Run:
    """A training run with both checks.

    Args:
        setup: An entry of `SETUPS`.
    """

    def __init__(self, setup: str) -> None:
        self.setup = setup
        self.model = make_model(setup)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        param_lists = [trained]
        if setup == "several":
            param_lists = [trained[:2], trained[2:]]
        self.weight = trained[0]
        names = {id(param): name for name, param in self.model.named_parameters()}
        self.weight_name = re.escape(names[id(self.weight)])
        self.optimizers = []
        for params in param_lists:
            self.optimizers.append(BadSGD(params, self.weight, rank=1, bad_step=99))
        names = self.model.named_parameters()
        self.guard = StepGuard(named_parameters=names, check_update=True, check_replicas_every=1)

    def iteration(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        passes = 2 if self.setup == "accumulation" else 1
        for number in range(passes):
            is_last = number == passes - 1
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                self.model(torch.randn(4, 8)).square().mean().backward()
        self.guard.step_all(self.optimizers)
        self.guard.update()


@on_ranks(2)
@pytest.mark.parametrize("setup", quick_cases(SETUPS, UNCOMPILED_SETUPS))
def test_a_bad_update_is_named(setup):
    run = Run(setup)
    run.iteration()
    run.optimizers[0].bad_step = 2
    run.iteration()
    text = rf"^After step 2 .*{run.weight_name} \(rank 1\)"
    with pytest.raises(NonFiniteWeightsError, match=text):
        run.iteration()


@on_ranks(2)
@pytest.mark.parametrize("setup", UNCOMPILED_SETUPS)
def test_a_flipped_bit_is_named(setup):
    assert_a_flipped_bit_is_named(setup)


@on_ranks(2)
@pytest.mark.slow
def test_a_flipped_bit_of_a_compiled_model_is_named():
    assert_a_flipped_bit_is_named("compiled")


def assert_a_flipped_bit_is_named(setup: str) -> None:
    """Flip a bit of a frozen weight if there is one, or else of a trained weight."""
    run = Run(setup)
    for _ in range(3):
        run.iteration()
    frozen = [param for param in run.model.parameters() if not param.requires_grad]
    target = frozen[0] if frozen else run.weight
    name = r"module\.base\.weight" if frozen else run.weight_name
    if dist.get_rank() == 1:
        flip(target)
    with pytest.raises(ReplicaMismatchError, match=rf"{name}: ranks 0, 1 differ in 1 of"):
        run.iteration()


@on_ranks(4)
def test_a_guard_of_a_part_of_the_ranks_compares_these_alone():
    ranks = (0, 2) if dist.get_rank() % 2 == 0 else (1, 3)
    groups = {(0, 2): subgroup((0, 2)), (1, 3): subgroup((1, 3))}
    torch.manual_seed(dist.get_rank() % 2)
    model = DistributedDataParallel(Net(), process_group=groups[ranks])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = model.named_parameters()
    guard = StepGuard(groups[ranks], named_parameters=names, check_replicas_every=1)

    def iteration() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        guard.step(optimizer)
        guard.update()

    for _ in range(3):
        iteration()
    if dist.get_rank() == 3:
        flip(model.module.hidden.weight)
    if dist.get_rank() % 2 == 0:
        iteration()
    else:
        with pytest.raises(ReplicaMismatchError, match=r"hidden\.weight: ranks 1, 3 differ"):
            iteration()


@on_ranks(2)
def test_weights_that_fsdp_keeps_on_the_host_are_checked():
    torch.manual_seed(0)
    model = wrapped(Net(), "FSDP2 offload", None, "")
    name, bad = next(iter(model.named_parameters()))
    optimizer = BadSGD(model.parameters(), bad, rank=1, bad_step=2)
    amp = distamp.initialize(model, optimizer, "fp32", check_update=True, check_replicas_every=1)

    def iteration() -> None:
        amp.zero_grad()
        amp.backward(amp.model(torch.randn(4, 8)).square().mean())
        amp.step()

    iteration()
    iteration()
    with pytest.raises(NonFiniteWeightsError, match=rf"{name} \(rank 1\)"):
        iteration()

"""Flipped bits and bad updates, drawn at random in every run, over layouts, optimizers and levels.

The fast part draws a few of each. docs/results/beyond.md has the counts of the slow part:

    pytest -m slow tests/guard/test_state_cells.py
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import distamp
from distamp import DistGradScaler, StepGuard
from distamp.errors import NonFiniteWeightsError, ReplicaMismatchError
from distamp.grads import to_local
from distamp.optim_utils import view_of
from tests.guard.test_nonfinite_weights import _NetOfCells as Net
from tests.guard.test_replicas import flip
from tests.levels.cells import wrapped
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases

Settings = dict[str, Any]

#: Each optimizer with its settings; all but "SGD" are AdamW.
OPTIMIZERS: dict[str, Settings] = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"foreach": False},
    "AdamW foreach": {"foreach": True},
    "AdamW fused": {"fused": True},
}
NORMS: list[Settings] = [{}, {"max_norm": 0.1}]
#: Each layout with its number of ranks.
REPLICATED = {"DDP": 4, "DDP of two": 2, "HSDP": 4, "TP": 2, "ZeRO": 3}
SHARDED = {"FSDP1": 2, "FSDP2": 2, "FSDP2 x TP": 4}
FLOAT32_LEVELS = ("guard", "scaler")
LEVELS = (*FLOAT32_LEVELS, "bf16-O2", "bf16-O2 split")
FLIPS, UPDATES = 50, 10


@dataclass
class Session:
    """A model in training, with its guard.

    Attributes:
        model: The model, wrapped.
        optimizer: Its optimizer.
        guard: The guard or scaler.
        forward: The model as it is called.
        spoil: Called after each step of the optimizer, before masters are rounded.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    guard: Any
    forward: Any
    spoil: Callable[[torch.optim.Optimizer], None] | None = None

    def iteration(self, **step: Any) -> None:
        self.optimizer.zero_grad()
        output = self.forward(torch.randn(4, 8))
        loss = output.float().square().mean()
        self.guard.scale(loss).backward()
        self.guard.step(self.optimizer, **step)
        self.guard.update()

    def local_weights(self) -> list[Tensor]:
        """Return copies of this rank's parts of the weights."""
        return [to_local(param.detach()).clone() for param in self.model.parameters()]

    def call_spoil(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.spoil is not None:
            self.spoil(optimizer)


def session(layout: str, optimizer_name: str, level: str, **settings: Any) -> Session:
    """Return a new model in a layout, an optimizer and a guard."""
    torch.manual_seed(0)
    sessions: dict[str, Session] = {}

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        sessions["session"].call_spoil(optimizer)

    model: nn.Module = Net()
    split = "split" if "split" in level else None
    is_level = level.startswith("bf16-O2")
    if is_level:
        model = distamp.cast_model(model, "bf16-O2", master_weights=split)
    wrapper = {"DDP of two": "DDP", "ZeRO": "DDP"}.get(layout, layout)
    model = wrapped(model, wrapper, None, "")
    optimizer_type = torch.optim.SGD if optimizer_name == "SGD" else torch.optim.AdamW
    options = {"lr": 0.01, **OPTIMIZERS[optimizer_name]}
    if layout == "ZeRO":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_type, **options)
        optimizer.optim.register_step_post_hook(after_step)
    else:
        optimizer = optimizer_type(model.parameters(), **options)
        optimizer.register_step_post_hook(after_step)
    forward: Any = model
    if is_level:
        amp = distamp.initialize(model, optimizer, "bf16-O2", master_weights=split, **settings)
        guard, forward = amp.scaler, amp.model
    else:
        names = model.named_parameters()
        guard_type: Any = StepGuard if level == "guard" else DistGradScaler
        arguments = ("cpu", 8.0) if level == "scaler" else ()
        guard = guard_type(*arguments, named_parameters=names, **settings)
    sessions["session"] = Session(model, optimizer, guard, forward)
    return sessions["session"]


@dataclass
class Cell:
    """A combination that is drawn at random, equal on all ranks.

    Attributes:
        generator: A generator for more draws, equal on all ranks.
        layout: A key of `REPLICATED` or `SHARDED`.
        optimizer: A key of `OPTIMIZERS`.
        level: One of `LEVELS`.
        title: The text of the combination for messages of assertions.
    """

    generator: random.Random
    layout: str
    optimizer: str
    level: str
    title: str

    def start(self, **settings: Any) -> Session:
        """Return a new model, an optimizer and a guard with these settings."""
        return session(self.layout, self.optimizer, self.level, **settings)


def draw(layouts: dict[str, int], size: int, seed: int) -> Cell:
    """Draw a combination for a number of ranks."""
    generator = random.Random(seed)
    candidates = [name for name, ranks in layouts.items() if ranks == size]
    layout = generator.choice(candidates)
    optimizer = generator.choice(list(OPTIMIZERS))
    is_float32 = layout in ("ZeRO", "FSDP1", "FSDP2 x TP", "TP")
    level = generator.choice(FLOAT32_LEVELS if is_float32 else LEVELS)
    title = f"seed {seed}: {layout}, {optimizer}, {level}"
    return Cell(generator, layout, optimizer, level, title)


# -- flipped bits ----------------------------------------------------------------------------------


def compared_tensors(guard: Any) -> dict[str, Tensor]:
    """Return the tensors that a guard compares between replicas, by name."""
    tensors: dict[str, Tensor] = {}
    for replica_set in guard._replica_check._sets.values():
        for entry in replica_set.tensors:
            if isinstance(entry.value, Tensor) and entry.value.numel():
                tensors[entry.name] = entry.value
    return tensors


def flips(size: int, seed: int, count: int) -> None:
    """Flip single bits of replicated tensors, each in one rank; every one must be noticed."""
    cell = draw(REPLICATED, size, seed)
    generator = cell.generator
    training = cell.start(check_replicas_every=1)
    for _ in range(3):
        training.iteration(**generator.choice(NORMS))
    # A rank can only be named if the other ranks are the majority.
    names_the_rank = size >= 3 and cell.layout != "HSDP"
    for _ in range(count):
        tensors = compared_tensors(training.guard)
        name = generator.choice(sorted(tensors))
        rank = generator.randrange(size)
        element, bit = generator.random(), generator.random()
        tensor = tensors[name]
        place = int(element * tensor.numel()), int(bit * 8 * tensor.itemsize)
        if dist.get_rank() == rank:
            flip(tensor, *place)
        with pytest.raises(ReplicaMismatchError) as raised:
            training.iteration(**generator.choice(NORMS))
        if dist.get_rank() == rank:
            flip(tensor, *place)
        text = str(raised.value)
        message = f"{cell.title}: {name} on rank {rank}, and the error is {text}"
        assert f"  {name}: " in text, message
        is_counted = f"differ in 1 of {tensor.numel()} element" in text
        assert is_counted or f"rank {rank} differs" in text, message
        if names_the_rank:
            assert f"{name}: rank {rank} differs from the other ranks" in text, message
        training.guard.update()
        training.iteration()


@on_ranks("size")
@pytest.mark.parametrize("size", quick_cases([2, 3, 4], quick=[3]))
def test_flipped_bits_are_noticed(size):
    flips(size, _seed_of_all_ranks(), 5)


@pytest.mark.slow
@on_ranks("size")
@pytest.mark.parametrize("part", range(14))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_flipped_bit_is_noticed(size, part):
    flips(size, 1000 * size + part, FLIPS)


# -- clean runs ------------------------------------------------------------------------------------


def clean_run(size: int, seed: int, steps: int) -> None:
    """Train with both checks, accumulation and skips; nothing may be accused."""
    cell = draw({**REPLICATED, **SHARDED}, size, seed)
    generator = cell.generator
    training = cell.start(check_replicas_every=1, check_update=True)
    is_second_rank = dist.get_rank() == 1
    arguments: list[Settings] = [{}, {"skip_if": is_second_rank}, {"max_norm": 0.1}]
    for _ in range(steps):
        if generator.random() < 0.2:
            with torch.no_grad():
                training.forward(torch.randn(4, 8))
        step_arguments = generator.choice(arguments)
        if generator.random() < 0.2:
            output = training.forward(torch.randn(4, 8))
            output.float().square().mean().backward()
        training.iteration(**step_arguments)
    training.guard.check_weights()
    training.guard.check_replicas()


@on_ranks("size")
@pytest.mark.parametrize("size", quick_cases([2, 3, 4], quick=[2]))
def test_clean_runs_are_not_accused(size):
    clean_run(size, _seed_of_all_ranks(), 6)


@pytest.mark.slow
@on_ranks("size")
@pytest.mark.parametrize("part", range(14))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_clean_run_is_accused(size, part):
    clean_run(size, 2000 * size + part, 50)


# -- updates that are not finite -------------------------------------------------------------------


class BadUpdate:
    """A value that one rank writes into one of its weights after a step.

    Args:
        training: The training.
        rank: The rank.
        value: The value.
        generator: Draws the weight and its element.
    """

    def __init__(
        self, training: Session, rank: int, value: float, generator: random.Random
    ) -> None:
        self.training = training
        self.rank = rank
        self.value = value
        self.weight_choice = generator.random()
        self.element_choice = generator.random()
        #: The name of the weight, on the rank that has written it.
        self.name: str | None = None

    @torch.no_grad()
    def write(self, optimizer: torch.optim.Optimizer) -> None:
        if dist.get_rank() != self.rank:
            return
        pairs = view_of(self.training.optimizer).param_pairs()
        pairs = [pair for pair in pairs if to_local(pair[1]).numel()]
        param, stepped_param = pairs[int(self.weight_choice * len(pairs))]
        local = to_local(stepped_param).view(-1)
        local[int(self.element_choice * local.numel())] = self.value
        for name, model_param in self.training.model.named_parameters():
            if model_param is param:
                self.name = name

    def gather_name(self) -> str:
        """Return the name of the weight on all ranks. Every rank must call this."""
        names: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(names, self.name)
        name = names[self.rank]
        assert name is not None
        return name


def bad_updates(size: int, seed: int, count: int) -> None:
    """Let single steps write inf or NaN on one rank; each must be named before the next step."""
    cell = draw({**REPLICATED, **SHARDED}, size, seed)
    generator = cell.generator
    for _ in range(count):
        training = cell.start(check_update=True)
        rank = generator.randrange(size)
        value = generator.choice([float("inf"), float("nan")])
        for _ in range(generator.randrange(1, 4)):
            training.iteration()
        update = BadUpdate(training, rank, value, generator)
        training.spoil = update.write
        training.iteration()
        training.spoil = None
        name = update.gather_name()
        weights_before = training.local_weights()
        with pytest.raises(NonFiniteWeightsError) as raised:
            training.iteration()
        text = str(raised.value)
        assert name in text, f"{cell.title}: {name} on rank {rank}, and the error is {text}"
        if cell.layout != "ZeRO":  # ZeRO has sent the weight to all ranks.
            assert f"{name} (rank {rank})" in text, f"{cell.title}: {text}"
        for weight, weight_before in zip(training.local_weights(), weights_before, strict=True):
            assert torch.equal(weight.nan_to_num(7.0), weight_before.nan_to_num(7.0))


@on_ranks("size")
@pytest.mark.parametrize("size", quick_cases([2, 3, 4], quick=[2]))
def test_bad_updates_are_named(size):
    bad_updates(size, _seed_of_all_ranks(), 2)


@pytest.mark.slow
@on_ranks("size")
@pytest.mark.parametrize("part", range(7))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_bad_update_is_named(size, part):
    bad_updates(size, 3000 * size + part, UPDATES)


def _seed_of_all_ranks() -> int:
    seeds = [random.SystemRandom().randrange(2**31)]
    dist.broadcast_object_list(seeds)
    print("seed", seeds[0])
    return seeds[0]

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

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "foreach": False},
    "AdamW foreach": {"lr": 0.01, "foreach": True},
    "AdamW fused": {"lr": 0.01, "fused": True},
}
#: Each layout with its number of ranks.
REPLICATED = {"DDP": 4, "DDP of two": 2, "HSDP": 4, "TP": 2, "ZeRO": 3}
SHARDED = {"FSDP1": 2, "FSDP2": 2, "FSDP2 x TP": 4}
LEVELS = ("guard", "scaler", "bf16-O2", "bf16-O2 split")
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
        loss = self.forward(torch.randn(4, 8)).float().square().mean()
        self.guard.scale(loss).backward()
        self.guard.step(self.optimizer, **step)
        self.guard.update()

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
    options = OPTIMIZERS[optimizer_name]
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


def draw(layouts: dict[str, int], size: int, seed: int) -> tuple[random.Random, str, str, str]:
    """Return a generator that is equal on all ranks, and a layout, optimizer and level."""
    generator = random.Random(seed)
    layout = generator.choice([name for name, ranks in layouts.items() if ranks == size])
    optimizer_name = generator.choice(list(OPTIMIZERS))
    plain_only = layout in ("ZeRO", "FSDP1", "FSDP2 x TP", "TP")
    level = generator.choice(LEVELS[:2] if plain_only else LEVELS)
    return generator, layout, optimizer_name, level


# -- flipped bits ----------------------------------------------------------------------------------


def flips(size: int, seed: int, count: int) -> None:
    """Flip single bits of replicated tensors, each in one rank; every one must be noticed."""
    generator, layout, optimizer_name, level = draw(REPLICATED, size, seed)
    cell = f"seed {seed}: {layout}, {optimizer_name}, {level}"
    training = session(layout, optimizer_name, level, check_replicas_every=1)
    norms: list[dict[str, Any]] = [{}, {"max_norm": 0.1}]
    for _ in range(3):
        training.iteration(**generator.choice(norms))
    for _ in range(count):
        tensors = {}
        for replica_set in training.guard._replica_check._sets.values():
            for tensor in replica_set.tensors:
                if isinstance(tensor.value, Tensor) and tensor.value.numel():
                    tensors[tensor.name] = tensor.value
        name = generator.choice(sorted(tensors))
        rank = generator.randrange(size)
        element, bit = generator.random(), generator.random()
        value = tensors[name]
        place = int(element * value.numel()), int(bit * 8 * value.itemsize)
        if dist.get_rank() == rank:
            flip(value, *place)
        with pytest.raises(ReplicaMismatchError) as raised:
            training.iteration(**generator.choice(norms))
        if dist.get_rank() == rank:
            flip(value, *place)
        text = str(raised.value)
        assert f"  {name}: " in text, f"{cell}: {name} on rank {rank}, and the error is {text}"
        assert f"differ in 1 of {value.numel()} element" in text or f"rank {rank} differs" in text
        if size >= 3 and layout != "HSDP":
            assert f"{name}: rank {rank} differs from the other ranks" in text, f"{cell}: {text}"
        training.guard.update()
        training.iteration()


@on_ranks("size")
@pytest.mark.parametrize("size", [2, 3, 4])
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
    generator, layout, optimizer_name, level = draw({**REPLICATED, **SHARDED}, size, seed)
    training = session(layout, optimizer_name, level, check_replicas_every=1, check_update=True)
    for _ in range(steps):
        if generator.random() < 0.2:
            with torch.no_grad():
                training.forward(torch.randn(4, 8))
        requests = generator.choice([{}, {"skip_if": dist.get_rank() == 1}, {"max_norm": 0.1}])
        if generator.random() < 0.2:
            training.forward(torch.randn(4, 8)).float().square().mean().backward()
        training.iteration(**requests)
    training.guard.check_weights()
    training.guard.check_replicas()


@on_ranks("size")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_clean_runs_are_not_accused(size):
    clean_run(size, _seed_of_all_ranks(), 6)


@pytest.mark.slow
@on_ranks("size")
@pytest.mark.parametrize("part", range(14))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_clean_run_is_accused(size, part):
    clean_run(size, 2000 * size + part, 50)


# -- updates that are not finite -------------------------------------------------------------------


def bad_updates(size: int, seed: int, count: int) -> None:
    """Let single steps write inf or NaN on one rank; each must be named before the next step."""
    generator, layout, optimizer_name, level = draw({**REPLICATED, **SHARDED}, size, seed)
    cell = f"seed {seed}: {layout}, {optimizer_name}, {level}"
    for _ in range(count):
        training = session(layout, optimizer_name, level, check_update=True)
        rank, value = generator.randrange(size), generator.choice([float("inf"), float("nan")])
        for _ in range(generator.randrange(1, 4)):
            training.iteration()
        names = {id(param): name for name, param in training.model.named_parameters()}
        choice, place = generator.random(), generator.random()
        bad_names: list[str] = []

        def spoil(
            optimizer: Any,
            rank: int = rank,
            choice: float = choice,
            place: float = place,
            value: float = value,
            training: Session = training,
            names: dict[int, str] = names,
            bad_names: list[str] = bad_names,
        ) -> None:
            if dist.get_rank() != rank:
                return
            pairs = view_of(training.optimizer).param_pairs()
            pairs = [pair for pair in pairs if to_local(pair[1]).numel()]
            param, stepped = pairs[int(choice * len(pairs))]
            with torch.no_grad():
                local = to_local(stepped).view(-1)
                local[int(place * local.numel())] = value
            bad_names.append(names[id(param)])

        training.spoil = spoil
        training.iteration()
        training.spoil = None
        expected = [None] * size
        dist.all_gather_object(expected, bad_names)
        name = expected[rank][0]
        weights = [to_local(p.detach()).clone() for p in training.model.parameters()]
        with pytest.raises(NonFiniteWeightsError) as raised:
            training.iteration()
        text = str(raised.value)
        assert name in text, f"{cell}: {name} on rank {rank}, and the error is {text}"
        if layout != "ZeRO":  # ZeRO has sent the weight to all ranks.
            assert f"{name} (rank {rank})" in text, f"{cell}: {text}"
        for now, earlier in zip(training.model.parameters(), weights, strict=True):
            assert torch.equal(to_local(now.detach()).nan_to_num(7.0), earlier.nan_to_num(7.0))


@on_ranks("size")
@pytest.mark.parametrize("size", [2, 3, 4])
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

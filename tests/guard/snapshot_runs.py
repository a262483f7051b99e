"""Runs that go back to a snapshot, and a run from the same start that never left its way.

A run has a history: the iterations that led to its state. `rewind` returns how many of them are
taken back. A second run, without snapshots, makes exactly the iterations of the history, and must
end in the same bits: weights, buffers, optimizer state, masters, scale, counts and generators.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import distamp
from distamp.comm_hooks import CommHook
from distamp.errors import DistampError, NonFiniteError
from distamp.grads import to_local
from distamp.masters import masters_of
from distamp.scaler import DynamicLossScale
from tests.levels.cells import SHARDED, level_of, wrapped

__all__ = ["OPTIMIZERS", "Iteration", "Net", "Program", "Run", "differences", "drawn"]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
}
#: The ways in which a run leaves its way before it goes back.
DETOURS = (
    *("batches", "skip", "bad weight", "bad state", "evaluation", "open backward", "clip"),
    *("failed step", "other rate", "new buffer values"),
)


class Net(nn.Module):
    """A perceptron with dropout, a norm and a buffer that every forward pass changes."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.hidden, self.middle = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.output = nn.LayerNorm(16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(1))
        self.calls: Tensor
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls.add_(1.0)
        inputs = nn.functional.dropout(self.first(inputs), 0.2, self.training)
        result: Tensor = self.output(self.norm(self.middle(torch.tanh(self.hidden(inputs)))))
        return result


@dataclass(frozen=True)
class Iteration:
    """One iteration of a run.

    Args:
        batch: The number of its batch.
        bad_rank: The rank with inf in its inputs, or None.
        microbatches: How many backward passes it has.
    """

    batch: int
    bad_rank: int | None = None
    microbatches: int = 1


@dataclass(frozen=True)
class Program:
    """A run with detours.

    Args:
        layout: As in `tests.levels.cells`, or "ZeRO".
        optimizer: A key of `OPTIMIZERS`.
        level: As in `tests.levels.cells`.
        hook: The format of a communication hook, or "".
        every: As of `Snapshots`.
        records_start: Whether `record` is called before the first iteration.
        parts: For each rewind the iterations before it, and the detour.
        tail: The iterations after the last rewind.
        two: Whether there are two optimizers.
        frozen: Whether a layer is frozen.
        max_norm: As of `step`.
    """

    layout: str = "plain"
    optimizer: str = "AdamW foreach"
    level: str = "fp32"
    hook: str = ""
    every: int = 3
    records_start: bool = False
    parts: tuple[tuple[tuple[Iteration, ...], str], ...] = ()
    tail: tuple[Iteration, ...] = (Iteration(100), Iteration(101))
    two: bool = False
    frozen: bool = False
    max_norm: float | None = None

    @property
    def world(self) -> int:
        if self.layout in ("HSDP", "FSDP2 x TP"):
            return 4
        return 1 if self.layout == "plain" else 2


@dataclass
class Run:
    """A run on this rank.

    Attributes:
        program: The program.
        amp: Its model, optimizers and scaler.
        schedules: A schedule of each optimizer.
        history: The iterations that led to its state.
    """

    program: Program
    amp: Any = None
    schedules: list[Any] = field(default_factory=list)
    history: list[Iteration] = field(default_factory=list)

    def build(self) -> Run:
        program = self.program
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        level = level_of(program.level)
        model: Any = Net(program.frozen)
        layout = "DDP" if program.layout == "ZeRO" else program.layout
        has_policy = layout in SHARDED and level.casts_model and level.master_weights is True
        if not has_policy:
            distamp.cast_model(model, level)
        model = wrapped(model, layout, level.param if has_policy else None, "nothing")
        trained = [param for param in model.parameters() if param.requires_grad]
        shares = [trained[::2], trained[1::2]] if program.two else [trained]
        kind, settings = OPTIMIZERS[program.optimizer]
        optimizers: list[Any] = []
        for params in shares:
            if program.layout == "ZeRO":
                made: Any = ZeroRedundancyOptimizer(params, kind, lr=0.05, **settings)
            else:
                made = kind(params, lr=0.05, **settings)
            optimizers.append(made)
        options: dict[str, Any] = {}
        if level.loss_scale == "dynamic":
            options = {"loss_scale": DynamicLossScale(growth_interval=3), "init_scale": 64.0}
        if program.hook:
            options["comm_hook"] = program.hook
        self.amp = distamp.initialize(model, optimizers, level, **options)
        for optimizer in optimizers:
            self.schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
        return self

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this rank; ranks with parts of one matrix see the same."""
        rank = dist.get_rank() if self.program.world > 1 else 0
        shard = {"TP": 0, "FSDP2 x TP": rank // 2}.get(self.program.layout, rank)
        generator = torch.Generator().manual_seed(1000 * number + shard)
        inputs = torch.randn(4, 16, generator=generator)
        return inputs, torch.randn(4, 8, generator=generator)

    def backward(self, iteration: Iteration) -> None:
        rank = dist.get_rank() if self.program.world > 1 else 0
        for micro in range(iteration.microbatches):
            inputs, targets = self.batch(iteration.batch + 500 * micro)
            is_tp = "TP" in self.program.layout
            if iteration.bad_rank is not None and (is_tp or iteration.bad_rank == rank):
                inputs = inputs * float("inf")
            is_last = micro == iteration.microbatches - 1
            with contextlib.nullcontext() if is_last else self.amp.no_sync():
                with self.amp.autocast():
                    output = self.amp.model(inputs)
                self.amp.backward((output.float() - targets).square().mean())

    def step(self, iteration: Iteration) -> None:
        """Make an iteration, without a call of `record`."""
        random.random()
        numpy.random.rand()
        self.amp.zero_grad()
        self.backward(iteration)
        if self.amp.step(max_norm=self.program.max_norm):
            for schedule in self.schedules:
                schedule.step()

    def state(self) -> dict[str, Any]:
        """Return all bits of the run on this rank."""
        bits: dict[str, Any] = {}
        model = self.amp.models[0]
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                bits[name] = to_local(tensor)
            for index, optimizer in enumerate(self.amp.optimizers):
                base = getattr(optimizer, "optim", optimizer)
                params = [param for group in base.param_groups for param in group["params"]]
                for number, param in enumerate(params):
                    for key, value in base.state.get(param, {}).items():
                        is_tensor = isinstance(value, Tensor)
                        bits[f"{index}.{number}.{key}"] = to_local(value) if is_tensor else value
                bits[f"{index}.lr"] = [group["lr"] for group in optimizer.param_groups]
                bits[f"{index}.counts"] = self.amp.scaler.step_counts(optimizer)
                masters = masters_of(optimizer)
                values = {} if masters is None else masters.state_dict()["masters"]
                for number, value in values.items():
                    bits[f"{index}.{number}.master"] = to_local(value)
            for number, schedule in enumerate(self.schedules):
                bits[f"schedule {number}"] = schedule.last_epoch
            for number, hook in enumerate(self.amp.comm_hooks):
                for name, tensors in hook.state_dict()["residuals"].items():
                    for index, tensor in enumerate(tensors):
                        bits[f"residual {number} {name} {index}"] = tensor
        bits["scaler"] = self.amp.scaler.state_dict()
        bits["random"] = random.random(), float(numpy.random.rand()), torch.rand(1).item()
        copies = {}
        for name, value in bits.items():
            copies[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
        return copies


class _Failure(RuntimeError):
    """An error inside of an optimizer's step."""


def _fail(*_: Any, **__: Any) -> None:
    raise _Failure("the step failed")


class Traveller(Run):
    """A run with snapshots, which leaves its way and goes back."""

    def travel(self) -> None:
        """Make the whole program."""
        program = self.program
        snapshots = self.amp.snapshots(every=program.every, extra=self.schedules)
        if program.records_start:
            snapshots.record()
        number = 200
        for iterations, detour in program.parts:
            for iteration in iterations:
                self.step(iteration)
                snapshots.record()
                self.history.append(iteration)
            # Iterations of the detour that end are taken back, too.
            with contextlib.suppress(NonFiniteError):
                for iteration in self._leave(detour, number):
                    self.history.append(iteration)
                    snapshots.record()
            number += 10
            steps = snapshots.rewind()
            del self.history[len(self.history) - steps :]
        for iteration in program.tail:
            self.step(iteration)
            snapshots.record()
            self.history.append(iteration)

    def _leave(self, detour: str, number: int) -> Iterator[Iteration]:
        amp, rank = self.amp, dist.get_rank() if self.program.world > 1 else 0
        optimizer = amp.optimizers[0]
        if detour == "batches":
            for batch in range(number, number + 2):
                self.step(Iteration(batch))
                yield Iteration(batch)
        elif detour == "skip":
            bad = Iteration(number, bad_rank=0)
            self.step(bad)
            yield bad
        elif detour in ("bad weight", "bad state"):
            self.step(Iteration(number))
            yield Iteration(number)
            self._spoil(detour, rank)
            # A step or the next snapshot finds it, and every rank raises.
            for batch in range(number + 1, number + 4):
                self.step(Iteration(batch))
                yield Iteration(batch)
        elif detour == "evaluation":
            self.step(Iteration(number))
            yield Iteration(number)
            with torch.no_grad(), amp.autocast():
                amp.model(self.batch(number + 1)[0])
        elif detour == "open backward":
            amp.zero_grad()
            self.backward(Iteration(number, microbatches=2))
        elif detour == "clip":
            amp.zero_grad()
            self.backward(Iteration(number))
            amp.clip_grad_norm_(0.1)
        elif detour == "failed step":
            handle = optimizer.register_step_pre_hook(_fail)
            with contextlib.suppress(_Failure):
                self.step(Iteration(number))
            handle.remove()
        elif detour == "other rate":
            for group in optimizer.param_groups:
                group["lr"] = 3.0
                group["new"] = torch.ones(1)
            # Without `record`, because the second run does not know this rate.
            self.step(Iteration(number))
        else:
            amp.models[0].get_buffer(self._buffer_name()).fill_(77.0)

    def _buffer_name(self) -> str:
        return next(name for name, _ in self.amp.models[0].named_buffers())

    @torch.no_grad()
    def _spoil(self, detour: str, rank: int) -> None:
        """Write NaN into a weight of rank 0, or into a state of the optimizer."""
        optimizer = self.amp.optimizers[0]
        base = getattr(optimizer, "optim", optimizer)
        if detour == "bad weight":
            params = [param for param in self.amp.models[0].parameters() if param.requires_grad]
            local = to_local(params[0])
            if local.numel():
                local.view(-1)[0] = float("nan")
            return
        for state in base.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim() and to_local(value).numel():
                    to_local(value).view(-1)[0] = float("nan")
                    return


def differences(program: Program) -> list[str]:
    """Make a program on this rank; return the names of the values that differ from the reference.

    Returns:
        Names; or "refused: ..." if `distamp.initialize` refuses the combination.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traveller = Traveller(program)
        try:
            traveller.build()
        except (ValueError, TypeError, DistampError) as refusal:
            return [f"refused: {refusal}"]
        traveller.travel()
        found = traveller.state()
        reference = Run(program).build()
        for iteration in traveller.history:
            reference.step(iteration)
        expected = reference.state()
    _close(traveller.amp.comm_hooks)
    _close(reference.amp.comm_hooks)
    wrong = sorted(found.keys() ^ expected.keys())
    for name in sorted(found.keys() & expected.keys()):
        value, wanted = found[name], expected[name]
        is_same = torch.equal(value, wanted) if isinstance(value, Tensor) else value == wanted
        if not is_same:
            wrong.append(name)
    return wrong


def _close(hooks: tuple[CommHook, ...]) -> None:
    for hook in hooks:
        hook.close()


def drawn(chance: random.Random) -> Program:
    """Return a program that is drawn at random."""
    layout = chance.choice(
        [
            "plain",
            "DDP",
            "DDP",
            "FSDP1",
            "FSDP2",
            "FSDP2 offload",
            "HSDP",
            "TP",
            "FSDP2 x TP",
            "ZeRO",
        ]
    )
    level = chance.choice(["fp32", "fp16", "bf16", "fp16-O2", "bf16-O2", "bf16-O2 split"])
    optimizer = chance.choice(list(OPTIMIZERS))
    # torch's foreach and fused kernels take no plain tensors with DTensors, and its fused SGD
    # takes no DTensors.
    if "TP" in layout and optimizer.startswith(("AdamW", "SGD")):
        optimizer = "AdamW amsgrad"
    if optimizer == "SGD fused" and layout not in ("plain", "DDP", "ZeRO"):
        optimizer = "SGD momentum"
    hook = ""
    if layout in ("DDP", "FSDP2", "HSDP"):
        hook = chance.choice(["", "", "fp16", "int8", "int8"])
    # The norm of these needs declarations.
    has_norm = layout not in ("TP", "FSDP2 x TP")
    detours = [detour for detour in DETOURS if has_norm or detour != "clip"]
    parts: list[tuple[tuple[Iteration, ...], str]] = []
    batch = 0
    for _ in range(chance.randint(1, 2)):
        iterations: list[Iteration] = []
        for _ in range(chance.randint(1, 4)):
            bad_rank = 0 if chance.random() < 0.2 and batch else None
            iterations.append(Iteration(batch, bad_rank, chance.choice([1, 1, 2])))
            batch += 1
        parts.append((tuple(iterations), chance.choice(detours)))
    return Program(
        layout,
        optimizer,
        level,
        hook,
        every=chance.randint(1, 4),
        # DDP makes its buckets in the first pass.
        records_start=chance.random() < 0.3 and not hook,
        parts=tuple(parts),
        two=chance.random() < 0.25,
        frozen=chance.random() < 0.2,
        max_norm=chance.choice([None, None, 1.0]) if has_norm else None,
    )

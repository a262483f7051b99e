"""Run programs on this rank, beside the float64 reference, and note what happened."""

import contextlib
import pickle
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from distamp import DistGradScaler, StepGuard
from tests.place import device_type
from tests.scaler.matrix.layout import local_values
from tests.scaler.matrix.layouts import ALL_LAYOUTS, WORLD, Layout
from tests.scaler.matrix.programs import Iteration, Outcome, Program
from tests.scaler.matrix.reference import KINDS, Reference, ScaleRule

MAX_NORM = 0.05


def _group(layout: Layout) -> dist.ProcessGroup | None:
    given = layout.process_group()
    return given if isinstance(given, dist.ProcessGroup) else None


def _made(cls: Any, program: Program, **more: Any) -> Any:
    scale = {"init_scale": program.init_scale, "growth_interval": program.growth_interval}
    return cls(device_type(), **scale, **more)


SCALERS: dict[str, Callable[[Program, Layout], Any]] = {
    "distamp": lambda program, layout: _made(
        DistGradScaler,
        program,
        process_group=layout.process_group(),
        fp16_grads=layout.fp16_grads,
    ),
    "guard": lambda program, layout: StepGuard(layout.process_group()),
    "torch": lambda program, layout: _made(torch.amp.GradScaler, program),
    "sharded": lambda program, layout: _made(
        ShardedGradScaler, program, process_group=_group(layout) or dist.group.WORLD
    ),
    "none": lambda program, layout: torch.amp.GradScaler(device_type(), enabled=False),
}


def run_on_rank(program: Program, scaler: str) -> list[Outcome]:
    """Run a program here; every rank of the pool does the same."""
    if scaler not in ("distamp", "guard"):
        # Warnings are errors in ranks; for a peer a warning is no fault.
        warnings.simplefilter("ignore")
    return Runner(program, scaler).run()


class Runner:
    def __init__(self, program: Program, scaler: str) -> None:
        self.program = program
        self.layout = ALL_LAYOUTS[program.layout]()
        self.scaler = SCALERS[scaler](program, self.layout)
        self.real = scaler not in ("none", "guard")
        kind = KINDS[program.kind]
        parts = self.layout.parts()
        if program.optimizers == 1:
            parts = [[p for part in parts for p in part]]
        self.optimizers = [self.layout.optimizer(kind, part) for part in parts]
        self.layout.attach(self.optimizers)
        # Where a second optimizer raises an error of its own, the first has stepped.
        self.stepped: set[int] = set()
        for i, optimizer in enumerate(self.optimizers):
            optimizer.register_step_post_hook(lambda *_, i=i: self.stepped.add(i))
        self.reference: Reference = self.layout.reference(kind, program.optimizers)
        self.rule = ScaleRule(program.init_scale, program.growth_interval)
        if not self.real:
            self.rule.scale = 1.0

    def run(self) -> list[Outcome]:
        outcomes = []
        for number, iteration in enumerate(self.program.iterations):
            outcomes.append(self.iterate(number, iteration))
            if outcomes[-1].error is not None:
                break
        astray = self.program.astray
        if astray is not None and astray[0] != "call" and outcomes[-1].error is None:
            self._note_later_error(outcomes[-1])
        return outcomes

    def _note_later_error(self, outcome: Outcome) -> None:
        """Note what the next message raises: a device may have left it until then."""
        self.layout.zero_grad(self.optimizers)
        try:
            self._backward(len(self.program.iterations) - 1, Iteration())
            self.scaler.unscale_(*self.optimizers)
        except Exception as error:
            outcome.error = (type(error).__name__, str(error))
            outcome.unchanged_by_error = not any(outcome.moved)

    def iterate(self, number: int, iteration: Iteration) -> Outcome:
        outcome = Outcome(self.layout.domain_of(self.layout.rank))
        self.layout.zero_grad(self.optimizers)
        astray = self._astray(number)
        if astray == "swap":
            iteration = replace(iteration, reverse=not iteration.reverse)
        elif astray == "call":
            iteration = replace(iteration, order="unscale")
        elif astray == "scale":
            self.rule.scale = self.rule.by_hand()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": self.rule.scale})
        self._factors = self._factors_of_faults(number, iteration)
        self._backward(number, iteration)
        outcome.expected_skips = self._overflows()
        # Where two optimizers share a model, the sums of one may overflow and the other steps.
        enlarged = any(fault.value == "sum" for fault in iteration.faults)
        last = self._factors[-1] if enlarged else 1.0
        self.reference.backward(number, iteration.micro, last)
        before = [self._local_parameters(o) for o in self.optimizers]
        self.stepped.clear()
        try:
            self._call_scaler(iteration, outcome)
        except Exception as error:
            outcome.error = (type(error).__name__, str(error))
            outcome.unchanged_by_error = all(
                _same(before[i], self._local_parameters(optimizer))
                for i, optimizer in enumerate(self.optimizers)
                if i not in self.stepped
            )
            return outcome
        outcome.moved = [
            None if not self._has_gradients(o) else not _same(old, self._local_parameters(o))
            for old, o in zip(before, self.optimizers, strict=True)
        ]
        if hasattr(self.scaler, "step_was_taken"):
            outcome.said_stepped = [self.scaler.step_was_taken(o) for o in self.optimizers]
        for part, skipped in enumerate(outcome.expected_skips):
            if not skipped:
                self.reference.step(part)
        self._after(iteration, outcome)
        return outcome

    def _astray(self, number: int) -> str | None:
        astray, last = self.program.astray, len(self.program.iterations) - 1
        goes = astray is not None and number == last and astray[1] == self.layout.rank
        return astray[0] if goes and (self.real or isinstance(self.scaler, StepGuard)) else None

    def _factors_of_faults(self, number: int, iteration: Iteration) -> list[float]:
        layout = self.layout
        factors = [1.0] * iteration.micro
        for fault in iteration.faults:
            same_shard = layout.shard_of(fault.rank) == layout.shard_of(layout.rank)
            same_domain = layout.domain_of(fault.rank) == layout.domain_of(layout.rank)
            if fault.value == "loss" and same_shard and same_domain:
                factors[fault.where % iteration.micro] = float("inf")
            if fault.value == "sum":
                # float16 holds 65504: each rank's largest gradient fits, four like it do not.
                largest = max(self.reference.largest(s, number) for s in range(layout.shards))
                factors[-1] = 50_000 / (largest * self.rule.scale)
        return factors

    def _backward(self, number: int, iteration: Iteration) -> None:
        layout = self.layout
        layout.backward(self.scaler, number, iteration.micro, self._factors)
        for fault in iteration.faults:
            if fault.rank == layout.rank and fault.value not in ("loss", "sum"):
                optimizer = self.optimizers[fault.optimizer % len(self.optimizers)]
                layout.plant(optimizer, float(fault.value), fault.where)

    def _overflows(self) -> list[bool]:
        """For each optimizer, whether any rank of this domain holds inf or NaN; counted here."""
        mine = torch.zeros(WORLD, len(self.optimizers))
        for index, optimizer in enumerate(self.optimizers):
            gradients = self._local_gradients(optimizer)
            mine[self.layout.rank, index] = any(not g.isfinite().all() for g in gradients)
        if dist.is_initialized():
            # Of two groups one may have ended with the optimizer's own error.
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=_group(self.layout))
        domain = self.layout.domain_of(self.layout.rank)
        members = [r for r in range(WORLD) if self.layout.domain_of(r) == domain]
        return mine[members].amax(0).bool().tolist()

    def _call_scaler(self, iteration: Iteration, outcome: Outcome) -> None:
        scaler = self.scaler
        order = list(range(len(self.optimizers)))
        if iteration.reverse:
            order.reverse()
        if iteration.order == "grouped" and hasattr(scaler, "step_all"):
            optimizers = [self.optimizers[i] for i in order]
            if iteration.micro % 2 == 0:
                scaler.unscale_(*optimizers)
            scaler.step_all(optimizers)
        else:
            for i in order:
                self._step_one(i, iteration, outcome)
        if iteration.then == "new scale" and self.real:
            scaler.update(self.rule.by_hand())
        else:
            scaler.update()

    def _step_one(self, index: int, iteration: Iteration, outcome: Outcome) -> None:
        optimizer, scaler = self.optimizers[index], self.scaler
        if iteration.order == "unscale":
            scaler.unscale_(optimizer)
        if iteration.order != "clip":
            scaler.step(optimizer)
            return
        clip: dict[str, Any] = {"max_norm": MAX_NORM, "shard_group_fn": self.layout.sharded}
        # In the step itself, but where a norm of what is still scaled overflows.
        if iteration.micro == 2 and hasattr(scaler, "grad_norm") and scaler.get_scale() < 2.0**48:
            scaler.step_all([optimizer], **clip)
            norm = scaler.grad_norm(optimizer)
        else:
            norm = scaler.clip_grad_norm_(optimizer, **clip)
            scaler.step(optimizer)
        outcome.norms.append((float(norm), self.reference.norm(index)))
        self.reference.clip(index, MAX_NORM)

    def _after(self, iteration: Iteration, outcome: Outcome) -> None:
        """Move the reference's scale, compare everything, and do what the program says then."""
        if self.real:
            if iteration.then == "new scale":
                self.rule.scale = self.rule.by_hand()
            else:
                self.rule.update(any(outcome.expected_skips))
        outcome.scale, outcome.expected_scale = self.scaler.get_scale(), self.rule.scale
        differences = []
        for name, value in self.layout.full_parameters().items():
            flat = value.contiguous().view(-1)
            outcome.digests[name] = zlib.crc32(flat.view(torch.uint8).numpy())
            differences.append(flat.double() - self.reference.parameters[name].detach().view(-1))
        # A NaN must count as far off, and max() would lose it.
        off = torch.cat(differences).abs().nan_to_num(nan=float("inf"))
        outcome.deviation = (off.mean() if self.layout.on_average else off.max()).item()
        if iteration.then == "reload":
            self.scaler.load_state_dict(self.scaler.state_dict())
        elif iteration.then == "repickle":
            self.scaler = pickle.loads(pickle.dumps(self.scaler))
            with contextlib.suppress(AttributeError):
                self.scaler.process_group = self.layout.process_group()
        elif iteration.then == "interval":
            self.scaler.set_growth_interval(3)
            self.rule.growth_interval = 3

    def _local_parameters(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [
            local_values(p.detach()).clone()
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def _local_gradients(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [
            local_values(g)
            for group in optimizer.param_groups
            for p in group["params"]
            if (g := p.grad) is not None
        ]

    def _has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(g.numel() for g in self._local_gradients(optimizer))


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

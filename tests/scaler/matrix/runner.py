"""Run programs on this rank and in the float64 reference, and note the outcomes."""

import contextlib
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
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
# A sum of four gradients of this size overflows in float16, which holds 65504.
LARGE_GRADIENT = 50_000


# -- the scalers -----------------------------------------------------------------------------------


def _make_scaler(cls: Any, program: Program, **settings: Any) -> Any:
    return cls(
        device_type(),
        init_scale=program.init_scale,
        growth_interval=program.growth_interval,
        **settings,
    )


def _distamp_scaler(program: Program, layout: Layout) -> Any:
    settings = {"process_group": layout.process_group(), "fp16_grads": layout.fp16_grads}
    return _make_scaler(DistGradScaler, program, **settings)


def _guard(program: Program, layout: Layout) -> Any:
    return StepGuard(layout.process_group())


def _torch_scaler(program: Program, layout: Layout) -> Any:
    return _make_scaler(torch.amp.GradScaler, program)


def _sharded_scaler(program: Program, layout: Layout) -> Any:
    group = _process_group(layout) or dist.group.WORLD
    return _make_scaler(ShardedGradScaler, program, process_group=group)


def _disabled_scaler(program: Program, layout: Layout) -> Any:
    return torch.amp.GradScaler(device_type(), enabled=False)


SCALERS: dict[str, Callable[[Program, Layout], Any]] = {
    "distamp": _distamp_scaler,
    "guard": _guard,
    "torch": _torch_scaler,
    "sharded": _sharded_scaler,
    "none": _disabled_scaler,
}


def _process_group(layout: Layout) -> dist.ProcessGroup | None:
    """Return the layout's process group; None if it has no group, or a mesh."""
    group = layout.process_group()
    return group if isinstance(group, dist.ProcessGroup) else None


# -- the run ---------------------------------------------------------------------------------------


def run_on_rank(program: Program, scaler: str) -> list[Outcome]:
    """Run a program here; every rank of the pool does the same."""
    if scaler not in ("distamp", "guard"):
        # Warnings are errors in ranks; a scaler of torch may warn.
        warnings.simplefilter("ignore")
    return Runner(program, scaler).run()


class Runner:
    """A program on this rank.

    Args:
        program: The program.
        scaler: A key of `SCALERS`.
    """

    def __init__(self, program: Program, scaler: str) -> None:
        self.program = program
        self.layout = ALL_LAYOUTS[program.layout]()
        self.scaler = SCALERS[scaler](program, self.layout)
        self.real = scaler not in ("none", "guard")
        kind = KINDS[program.kind]
        parts = self.layout.parts()
        if program.optimizers == 1:
            parts = [[param for part in parts for param in part]]
        self.optimizers = [self.layout.optimizer(kind, part) for part in parts]
        self.layout.attach(self.optimizers)
        # If the second optimizer itself raises an error, the first has stepped.
        self.stepped: set[int] = set()
        for index, optimizer in enumerate(self.optimizers):
            self._note_steps_of(index, optimizer)
        self.reference: Reference = self.layout.reference(kind, program.optimizers)
        self.rule = ScaleRule(program.init_scale, program.growth_interval)
        if not self.real:
            self.rule.scale = 1.0

    def _note_steps_of(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        def note_step(*_: Any) -> None:
            self.stepped.add(index)

        optimizer.register_step_post_hook(note_step)

    def run(self) -> list[Outcome]:
        """Make the iterations until one raises; return the outcome of each."""
        outcomes: list[Outcome] = []
        for number, iteration in enumerate(self.program.iterations):
            outcome = self.iterate(number, iteration)
            outcomes.append(outcome)
            if outcome.error is not None:
                return outcomes
        if self.program.deviation_must_raise:
            self._note_later_error(outcomes[-1])
        return outcomes

    def _note_later_error(self, outcome: Outcome) -> None:
        """Note the error of the next message, because a device may raise only then."""
        self.layout.zero_grad(self.optimizers)
        try:
            self._backward(len(self.program.iterations) - 1, Iteration())
            self.scaler.unscale_(*self.optimizers)
        except Exception as error:
            outcome.error = (type(error).__name__, str(error))
            outcome.unchanged_by_error = not any(outcome.moved)

    def iterate(self, number: int, iteration: Iteration) -> Outcome:
        """Make one iteration here and in the reference; return its outcome."""
        outcome = Outcome(self.layout.domain_of(self.layout.rank))
        self.layout.zero_grad(self.optimizers)
        if self._deviates_in(number):
            iteration = self._deviate(iteration)
        self._factors = self._loss_factors(number, iteration)
        self._backward(number, iteration)
        outcome.expected_skips = self._overflows()
        # If two optimizers share a model, one may step although the other overflows.
        is_enlarged = any(fault.value == "sum" for fault in iteration.faults)
        last_factor = self._factors[-1] if is_enlarged else 1.0
        self.reference.backward(number, iteration.micro, last_factor)
        params_before = [self._local_parameters(optimizer) for optimizer in self.optimizers]
        self.stepped.clear()
        try:
            self._call_scaler(iteration, outcome)
        except Exception as error:
            outcome.error = (type(error).__name__, str(error))
            outcome.unchanged_by_error = self._is_unchanged_without_step(params_before)
            return outcome
        self._note_step(outcome, params_before)
        for part, is_skipped in enumerate(outcome.expected_skips):
            if not is_skipped:
                self.reference.step(part)
        self._update_rule(iteration, outcome)
        outcome.scale = self.scaler.get_scale()
        outcome.expected_scale = self.rule.scale
        self._compare_parameters(outcome)
        self._change_state(iteration)
        return outcome

    # -- deviations and faults ---------------------------------------------------------------------

    def _deviates_in(self, number: int) -> bool:
        """Whether this rank deviates from the others in an iteration."""
        is_last = number == len(self.program.iterations) - 1
        is_here = self.program.deviating_rank == self.layout.rank
        can_deviate = self.real or isinstance(self.scaler, StepGuard)
        return is_last and is_here and can_deviate

    def _deviate(self, iteration: Iteration) -> Iteration:
        """Return this rank's iteration, or load another scale."""
        if self.program.deviation == "swap":
            return replace(iteration, reverse=not iteration.reverse)
        if self.program.deviation == "call":
            return replace(iteration, order="unscale")
        self.rule.scale = self.rule.by_hand()
        state = self.scaler.state_dict()
        self.scaler.load_state_dict({**state, "scale": self.rule.scale})
        return iteration

    def _loss_factors(self, number: int, iteration: Iteration) -> list[float]:
        """Return the factor of each microbatch's loss on this rank."""
        layout = self.layout
        factors = [1.0] * iteration.micro
        for fault in iteration.faults:
            if fault.value == "loss" and self._shares_batch_with(fault.rank):
                factors[fault.position % iteration.micro] = float("inf")
            if fault.value == "sum":
                gradients = [self.reference.largest(s, number) for s in range(layout.shards)]
                largest = max(gradients)
                factors[-1] = LARGE_GRADIENT / (largest * self.rule.scale)
        return factors

    def _shares_batch_with(self, rank: int) -> bool:
        """Whether this rank computes the same loss as another rank."""
        layout = self.layout
        is_same_shard = layout.shard_of(rank) == layout.shard_of(layout.rank)
        is_same_domain = layout.domain_of(rank) == layout.domain_of(layout.rank)
        return is_same_shard and is_same_domain

    def _backward(self, number: int, iteration: Iteration) -> None:
        layout = self.layout
        layout.backward(self.scaler, number, iteration.micro, self._factors)
        for fault in iteration.faults:
            if fault.rank == layout.rank and fault.is_written_into_gradients:
                optimizer = self.optimizers[fault.optimizer % len(self.optimizers)]
                layout.plant(optimizer, float(fault.value), fault.position)

    def _overflows(self) -> list[bool]:
        """For each optimizer, return whether any rank of this domain holds inf or NaN.

        Every rank of the layout's group must call this. It does not use the scaler.
        """
        flags = torch.zeros(WORLD, len(self.optimizers))
        for index, optimizer in enumerate(self.optimizers):
            gradients = self._local_gradients(optimizer)
            flags[self.layout.rank, index] = not _all_finite(gradients)
        if dist.is_initialized():
            # Another group may have ended with the optimizer's own error.
            group = _process_group(self.layout)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        domain = self.layout.domain_of(self.layout.rank)
        members = [rank for rank in range(WORLD) if self.layout.domain_of(rank) == domain]
        return flags[members].amax(0).bool().tolist()

    # -- the scaler's calls ------------------------------------------------------------------------

    def _call_scaler(self, iteration: Iteration, outcome: Outcome) -> None:
        """Step all optimizers and update."""
        indices = list(range(len(self.optimizers)))
        if iteration.reverse:
            indices.reverse()
        if iteration.order == "grouped" and hasattr(self.scaler, "step_all"):
            optimizers = [self.optimizers[index] for index in indices]
            if iteration.micro % 2 == 0:
                self.scaler.unscale_(*optimizers)
            self.scaler.step_all(optimizers)
        else:
            for index in indices:
                self._step_one(index, iteration, outcome)
        if iteration.change == "new scale" and self.real:
            self.scaler.update(self.rule.by_hand())
        else:
            self.scaler.update()

    def _step_one(self, index: int, iteration: Iteration, outcome: Outcome) -> None:
        optimizer = self.optimizers[index]
        if iteration.order == "clip":
            norm = self._clip_and_step(optimizer, iteration)
            outcome.norms.append((norm, self.reference.norm(index)))
            self.reference.clip(index, MAX_NORM)
        else:
            if iteration.order == "unscale":
                self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)

    def _clip_and_step(self, optimizer: torch.optim.Optimizer, iteration: Iteration) -> float:
        """Clip in the step or before it; return the norm."""
        scaler = self.scaler
        limits: dict[str, Any] = {"max_norm": MAX_NORM, "shard_group_fn": self.layout.sharded}
        # A step that clips measures scaled gradients. Under a large scale their norm overflows.
        can_clip_in_step = hasattr(scaler, "grad_norm") and scaler.get_scale() < 2.0**48
        if iteration.micro == 2 and can_clip_in_step:
            scaler.step_all([optimizer], **limits)
            return float(scaler.grad_norm(optimizer))
        norm = scaler.clip_grad_norm_(optimizer, **limits)
        scaler.step(optimizer)
        return float(norm)

    # -- the outcome -------------------------------------------------------------------------------

    def _is_unchanged_without_step(self, params_before: list[list[Tensor]]) -> bool:
        """Whether the parameters of all optimizers that did not step are unchanged."""
        for index, optimizer in enumerate(self.optimizers):
            has_stepped = index in self.stepped
            if not has_stepped and not self._is_unchanged(params_before[index], optimizer):
                return False
        return True

    def _note_step(self, outcome: Outcome, params_before: list[list[Tensor]]) -> None:
        """Note which optimizers moved their parameters, and which the scaler reports as stepped."""
        for index, optimizer in enumerate(self.optimizers):
            has_moved = None
            if self._has_gradients(optimizer):
                has_moved = not self._is_unchanged(params_before[index], optimizer)
            outcome.moved.append(has_moved)
            if hasattr(self.scaler, "step_was_taken"):
                outcome.said_stepped.append(self.scaler.step_was_taken(optimizer))

    def _update_rule(self, iteration: Iteration, outcome: Outcome) -> None:
        """Move the reference's scale as the update of a real scaler does."""
        if not self.real:
            return
        if iteration.change == "new scale":
            self.rule.scale = self.rule.by_hand()
        else:
            self.rule.update(any(outcome.expected_skips))

    def _compare_parameters(self, outcome: Outcome) -> None:
        """Note checksums of the full parameters, and their distance from the reference."""
        differences: list[Tensor] = []
        for name, value in self.layout.full_parameters().items():
            flat = value.contiguous().view(-1)
            outcome.digests[name] = zlib.crc32(flat.view(torch.uint8).numpy())
            expected = self.reference.parameters[name].detach().view(-1)
            differences.append(flat.double() - expected)
        # A NaN must count as far away, and max() would lose it.
        distances = torch.cat(differences).abs().nan_to_num(nan=float("inf"))
        distance = distances.mean() if self.layout.on_average else distances.max()
        outcome.deviation = distance.item()

    def _change_state(self, iteration: Iteration) -> None:
        """Reload or pickle the scaler, or set its interval, after the iteration."""
        if iteration.change == "reload":
            state = self.scaler.state_dict()
            self.scaler.load_state_dict(state)
        elif iteration.change == "repickle":
            pickled = pickle.dumps(self.scaler)
            self.scaler = pickle.loads(pickled)
            with contextlib.suppress(AttributeError):
                self.scaler.process_group = self.layout.process_group()
        elif iteration.change == "interval":
            self.scaler.set_growth_interval(3)
            self.rule.growth_interval = 3

    # -- an optimizer's tensors on this rank -------------------------------------------------------

    def _is_unchanged(self, params_before: list[Tensor], optimizer: torch.optim.Optimizer) -> bool:
        now = self._local_parameters(optimizer)
        return all(map(torch.equal, params_before, now))

    def _local_parameters(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [local_values(param.detach()).clone() for param in _params(optimizer)]

    def _local_gradients(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        gradients: list[Tensor] = []
        for param in _params(optimizer):
            if param.grad is not None:
                gradients.append(local_values(param.grad))
        return gradients

    def _has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(gradient.numel() for gradient in self._local_gradients(optimizer))


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _all_finite(tensors: list[Tensor]) -> bool:
    return all(tensor.isfinite().all() for tensor in tensors)

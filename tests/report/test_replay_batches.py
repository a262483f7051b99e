"""A StepReplay replays a skipped step with the batches that were recorded."""

import functools

import pytest
import torch
from torch import Tensor, nn

from distamp import StepGuard
from distamp.report import StepReplay


class Loop:
    """A training loop of the docs, in which the second batch contains a NaN."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guard = StepGuard()
        self.replay = StepReplay(self.model).attach(self.guard)
        self.batches = [torch.ones(2, 4), torch.full((2, 4), torch.nan)]

    def run_step(self, inputs: Tensor, scale: float = 1.0) -> None:
        (self.model(inputs).square().mean() * scale).backward()

    def finish_step(self) -> None:
        self.guard.step(self.optimizer)
        self.guard.update()
        self.optimizer.zero_grad()


def test_a_step_that_takes_its_batches_is_replayed_with_them():
    loop = Loop()
    for inputs in loop.batches:
        loop.replay.record(loop.run_step, inputs)
        loop.run_step(inputs)
        loop.finish_step()

    assert loop.replay.found is not None
    assert "nan" in str(loop.replay.found).lower()


def test_a_step_that_needs_no_arguments_is_replayed_without_its_batches():
    """The second argument of the step has a default, so the batches are none of its arguments."""
    loop = Loop()
    for inputs in loop.batches:
        step = functools.partial(loop.run_step, inputs)
        loop.replay.record(step, inputs)
        step()
        loop.finish_step()

    assert loop.replay.found is not None
    assert "nan" in str(loop.replay.found).lower()


def test_a_step_that_takes_any_number_of_batches_is_replayed_with_them():
    loop = Loop()

    def step(*micro_batches: Tensor) -> None:
        for inputs in micro_batches:
            loop.run_step(inputs)

    loop.replay.record(step, *loop.batches)
    step(*loop.batches)
    loop.finish_step()

    assert loop.replay.found is not None
    assert "micro-batch 1" in str(loop.replay.found)


def test_a_step_that_takes_other_arguments_is_refused_before_it_runs():
    """Otherwise the first skipped step would end the run."""
    loop = Loop()

    def step(inputs: Tensor, targets: Tensor) -> None:
        raise AssertionError("the step must not run")

    with pytest.raises(TypeError, match=r"step\(\*batches\).*1 positional argument"):
        loop.replay.record(step, loop.batches[0])

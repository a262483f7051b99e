"""Trainers of one process do not reach into each other; a parameter is itself, not its ``id``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distamp.scaler import DistGradScaler, MasterParameters
from tests.scaler.steps import backward, cpu_scaler, leaf, torch_scaler


class Trainer:
    """A float16 model with fp32 masters and a scaler of its own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).half()
        self.inputs = torch.randn(16, 4, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.masters = MasterParameters(self.optimizer)
        self.scaler = DistGradScaler("cpu", init_scale=256.0, fp16_grads="master")

    def iterate(self, number: int) -> None:
        self.optimizer.zero_grad()
        for micro in (0, 1):
            output = self.model(self.inputs[(number + micro) % 16].half()).float()
            self.scaler.scale(output.square().mean()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, iterations: int) -> list[Tensor]:
        for number in range(iterations):
            self.iterate(number)
        return [p.detach().clone() for p in self.model.parameters()]


class _InTheMiddle(TorchDispatchMode):
    """Runs ``what`` to its end in another thread just before the ``number``-th op of this one."""

    def __init__(self, number: int, what: Callable[[], Any]) -> None:
        super().__init__()
        self.number, self.what = number, what
        self.ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.ops == self.number:
            thread = threading.Thread(target=self.what)
            thread.start()
            thread.join()
        self.ops += 1
        return func(*args, **(kwargs or {}))


def _interrupted(number: int) -> tuple[list[Tensor], int]:
    """What one trainer learns if another has a whole iteration before its ``number``-th op."""
    trainer, other = Trainer(0), Trainer(1)
    for each in (trainer, other):
        each.run(1)
    with _InTheMiddle(number, lambda: other.iterate(1)) as middle:
        trainer.iterate(1)
    trainer.iterate(2)
    return [p.detach().clone() for p in trainer.model.parameters()], middle.ops


def test_an_iteration_of_another_trainer_in_another_thread_changes_nothing_here() -> None:
    alone, ops = _interrupted(-1)
    assert ops > 20
    differing = [
        number for number in range(ops) if not all(map(torch.equal, _interrupted(number)[0], alone))
    ]
    assert differing == []


def test_trainers_in_threads_learn_what_each_learns_alone() -> None:
    trainers, iterations = 3, 24
    alone = [Trainer(seed).run(iterations) for seed in range(trainers)]
    results: dict[int, list[Tensor]] = {}
    errors: list[BaseException] = []
    begin = threading.Barrier(trainers)

    def train(seed: int) -> None:
        try:
            trainer = Trainer(seed)
            begin.wait()
            results[seed] = trainer.run(iterations)
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    # Making a model sets the seed of the process, so they are made one after the other.
    lock = threading.Lock()
    make = Trainer.__init__

    def one_at_a_time(self: Trainer, seed: int) -> None:
        with lock:
            make(self, seed)

    Trainer.__init__ = one_at_a_time  # type: ignore[method-assign]
    try:
        for _ in range(4):
            threads = [threading.Thread(target=train, args=(s,)) for s in range(trainers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            same = [all(map(torch.equal, results[s], alone[s])) for s in range(trainers)]
            assert same == [True] * trainers
    finally:
        Trainer.__init__ = make  # type: ignore[method-assign]
        sys.setswitchinterval(before)


# -- parameters that are replaced, as by densifying, pruning and merging ---------------------------


def _named_anew(scaler: Any) -> float:
    """The parameters of one optimizer are replaced in the middle of training."""
    parameter = leaf(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for gradient in (0.25, 0.5):
        backward(scaler, parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
        parameter = leaf(1.0)
        optimizer.param_groups[0]["params"][0] = parameter
    return sum(p.item() for p in optimizer.param_groups[0]["params"])


def test_an_optimizer_whose_parameters_were_replaced_goes_on() -> None:
    assert _named_anew(cpu_scaler()) == _named_anew(torch_scaler()) == 1.0


# -- two optimizers over some of the same parameters -----------------------------------------------


def _all_then_some(scaler: Any) -> list[float]:
    """One optimizer over both parameters steps; then, on fresh gradients, one over the second."""
    first, second = leaf(1.0), leaf(1.0)
    every = torch.optim.SGD([first, second], lr=1.0)
    some = torch.optim.SGD([second], lr=1.0)
    for optimizer in (every, some):
        every.zero_grad()
        backward(scaler, first, 0.25)
        backward(scaler, second, 0.25)
        scaler.step(optimizer)
    scaler.update()
    return [first.item(), second.item()]


def test_an_optimizer_over_some_parameters_steps_after_one_over_all_on_fresh_gradients() -> None:
    assert _all_then_some(torch_scaler()) == [0.75, 0.5]
    assert _all_then_some(cpu_scaler()) == [0.75, 0.5]

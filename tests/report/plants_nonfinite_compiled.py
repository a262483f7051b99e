"""Ten faults that make inf or NaN in compiled models, and the right answer for each.

A fault of the model is in its eager run too, so the answer names the operation, its module and its
direction. A fault of the compiler is only in the compiled run, so the answer is that compiled code
is the suspect. The backend of most models runs the graph as it was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FAULTS", "CompiledFault"]

INF, NAN = float("inf"), float("nan")
ROWS = torch.linspace(-1.0, 1.0, 4 * 8).view(4, 8)
Step = Callable[[], Any]


@dataclass(frozen=True)
class CompiledFault:
    """One planted fault.

    Args:
        build: Makes the step and the model.
        kind: The kind of the right answer; ``"unseen"`` for a fault of the compiler.
        op: Its function; ``""`` if any is right.
        module: Its module.
        direction: Its direction.
        ranks: Its ranks.
    """

    name: str
    build: Callable[[], tuple[Step, nn.Module]]
    kind: str = "op"
    op: str = ""
    module: str = "1"
    direction: str = "forward"
    ranks: tuple[int, ...] = (0,)


FAULTS: list[CompiledFault] = []


def fault(name: str, **answer: Any) -> Callable[[Any], Any]:
    """Add a function to the faults."""

    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        FAULTS.append(CompiledFault(name, build, **answer))
        return build

    return add


class Function(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def step_of(model: nn.Module, call: Callable[[Tensor], Tensor], inputs: Tensor = ROWS) -> Step:
    return lambda: call(inputs).float().square().mean().backward()


def compiled(function: Callable[[Tensor], Tensor], dtype: Any = torch.float32) -> Any:
    """Compile a model with a function between two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Function(function), nn.Linear(8, 8)).to(dtype)
    call = torch.compile(model, backend="aot_eager")
    return step_of(model, call, ROWS.to(dtype)), model


@fault("log of a negative number", op="log")
def log_of_a_negative_number() -> Any:
    return compiled(lambda x: torch.log(x - 9))


@fault("the root of zero in backward", op="sqrt", direction="backward")
def root_of_zero() -> Any:
    return compiled(lambda x: (x * 0).sqrt())


@fault("fp16 that overflows", op="exp")
def exponential_in_fp16() -> Any:
    return compiled(lambda x: torch.exp(x * 60 + 60), torch.float16)


def attention_without_keys(x: Tensor) -> Tensor:
    scores = x @ x.mT
    masked = torch.ones_like(scores, dtype=torch.bool)
    return torch.softmax(scores.masked_fill(masked, -INF), -1) @ x


@fault("a softmax of a row that is masked", op="softmax")
def softmax_of_a_masked_row() -> Any:
    return compiled(attention_without_keys)


@fault("a compiled loss of nothing", op="div", module="(outside)")
def loss_function_that_divides_zero_by_zero() -> Any:
    """Only the loss is compiled, and no element of its batch counts."""
    model = nn.Linear(8, 8)

    @torch.compile(backend="aot_eager")
    def masked_mean(output: Tensor) -> Tensor:
        weights = torch.zeros_like(output)
        return (output * weights).sum() / weights.sum()

    return lambda: masked_mean(model(ROWS)).backward(), model


@fault("a parameter that is NaN", kind="parameter", module="2")
def parameter_that_is_nan() -> Any:
    step, model = compiled(torch.relu)
    with torch.no_grad():
        model[2].weight[0, 0] = NAN
    return step, model


@fault("a batch that is infinite", kind="input", module="0")
def batch_that_is_infinite() -> Any:
    _, model = compiled(torch.relu)
    inputs = ROWS.clone()
    inputs[1, 1] = INF
    call = torch.compile(model, backend="aot_eager")
    return step_of(model, call, inputs), model


@fault("a compiler that divides by zero", kind="unseen")
def compiler_that_divides_by_zero() -> Any:
    def miscompile(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> list[Tensor]:
            return [output / 0 for output in graph.forward(*args)]

        return run

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    call = torch.compile(model, backend=miscompile)
    return step_of(model, call), model


@fault("a compiler that spoils one block", kind="unseen")
def compiler_that_spoils_one_block() -> Any:
    def miscompile(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> list[Tensor]:
            return [output.masked_fill(output > 0, NAN) for output in graph(*args)]

        return run

    # torch.compile leaves a single module of torch.nn uncompiled.
    model = nn.Sequential(nn.Linear(8, 8), Function(torch.sigmoid), nn.Linear(8, 8))
    model[1].compile(backend=miscompile)
    return step_of(model, model), model


@fault("a batch of one rank", op="log", ranks=(1,))
def rank_with_a_negative_batch() -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), Function(lambda x: torch.log(x.abs() - 1.5)))
    with torch.no_grad():
        inner[0].weight.copy_(torch.eye(8))
        inner[0].bias.zero_()
    inner.compile(backend="aot_eager")
    model = DistributedDataParallel(inner)
    inputs = ROWS.abs()
    if dist.get_rank() == 0:
        inputs = inputs + 2.0
    step = step_of(model, model, inputs)
    return step, model

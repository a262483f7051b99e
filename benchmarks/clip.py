"""A step with a limit of the norm, compared with torch's clip_grad_norm_ and step in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.clip [--rounds 45] [--ops]

Each row is one way to train: a wrapper of the model, an optimizer, a number of parameters and a
number of elements. The gradients are restored before each turn, and restoring them is not timed.
Their norm is twice the limit. On several ranks a turn takes as long as its slowest rank.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import (
    Timings,
    format_ratio,
    interleave,
    print_table,
    run_command,
    slowest_times,
)
from distamp import DistGradScaler, StepGuard
from tests.ranks import RankPool, mesh

SCALE = 1024.0
DISTAMP, TORCH = "distamp", "torch"


class Case(NamedTuple):
    """A row of the table. A case with a wrapper runs on two ranks."""

    step: str
    optimizer: str
    parameters: int
    elements: int
    wrapper: str = ""
    dtype: torch.dtype = torch.float32


def list_cases() -> list[Case]:
    """Return the rows of the table."""
    cases = []
    for step, optimizer in (("clip", "fused"), ("clip", "foreach"), ("scale, clip", "fused")):
        for elements in (16, 2500):
            for parameters in (20, 300, 1000):
                cases.append(Case(step, optimizer, parameters, elements))
    for optimizer in ("fused", "foreach"):
        cases.append(Case("guard alone", optimizer, 300, 2500))
    cases.append(Case("clip", "fused", 300, 2500, dtype=torch.bfloat16))
    for optimizer in ("fused", "foreach"):
        cases.append(Case("clip", optimizer, 300, 2500, "FSDP2"))
    for parameters in (300, 1000):
        cases.append(Case("clip", "fused", parameters, 2500, "DDP"))
    return cases


def make_contender(case: Case, library: str) -> tuple[list[Tensor], Callable[[], None]]:
    """Return the gradients of a model, and a function that takes one step."""
    values = torch.ones(case.elements, dtype=case.dtype)
    model: Any = nn.ParameterList(values.clone() for _ in range(case.parameters))
    if case.wrapper == "FSDP2":
        fully_shard(model, mesh=mesh((2,), ("dp",)))
    elif case.wrapper == "DDP":
        model = DistributedDataParallel(model)
    params = list(model.parameters())
    for param in params:
        param.grad = torch.full_like(param, 0.01)
    grads = [getattr(p.grad, "_local_tensor", p.grad) for p in params]
    limit = float(nn.utils.get_total_norm(grads)) / 2
    optimizer = torch.optim.AdamW(params, lr=1e-3, **{case.optimizer: True})
    has_scaler = case.step == "scale, clip"
    clips = case.step != "guard alone"
    if has_scaler:
        limit /= SCALE
    if library == DISTAMP:
        scaler: Any = StepGuard()
        if has_scaler:
            scaler = DistGradScaler("cpu", init_scale=SCALE)
            scaler.scale(torch.ones(()))
        return grads, make_distamp_step(scaler, optimizer, limit if clips else None)
    torch_scaler = None
    if has_scaler:
        torch_scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        torch_scaler.scale(torch.ones(()))
    return grads, make_torch_step(torch_scaler, optimizer, params, limit if clips else None)


def make_distamp_step(
    scaler: Any, optimizer: torch.optim.Optimizer, limit: float | None
) -> Callable[[], None]:
    """Return a step by a guard or a scaler of distamp."""

    def step() -> None:
        scaler.step(optimizer, max_norm=limit)
        scaler.update()

    return step


def make_torch_step(
    scaler: torch.amp.GradScaler | None,
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    limit: float | None,
) -> Callable[[], None]:
    """Return a step by torch, with or without a scaler and with or without clipping."""

    def step() -> None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        if limit is not None:
            nn.utils.clip_grad_norm_(params, limit, foreach=True)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return step


def measure(case: Case, rounds: int) -> Timings:
    """Return the times of both libraries on this rank."""
    steps: dict[str, Callable[[], None]] = {}
    grads: list[Tensor] = []
    for library in (DISTAMP, TORCH):
        library_grads, steps[library] = make_contender(case, library)
        grads += library_grads
    initial_grads = [grad.clone() for grad in grads]

    def restore_gradients() -> None:
        torch._foreach_copy_(grads, initial_grads)
        dist.barrier()

    return interleave(steps, rounds, setup=restore_gradients)


class OpCounter(TorchDispatchMode):
    """Counts operations, without the reading of a number that is on the host.

    Attributes:
        count: The number of operations.
    """

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def count_ops(case: Case) -> list[int]:
    """Return the numbers of operations that a third step dispatches, of distamp and of torch."""
    counts = []
    for library in (DISTAMP, TORCH):
        _, step = make_contender(case, library)
        step()
        step()
        with OpCounter() as counter:
            step()
        counts.append(counter.count)
    return counts


def main(*, rounds: int = 45, ops: bool = False) -> None:
    """Compare a step with a limit of the norm with torch's.

    Args:
        rounds: Number of rounds of each row; four times as many below 100,000 elements.
        ops: Count the operations that one step dispatches (on a device, its launches) instead.
    """

    def measure_cases() -> Iterator[list[object]]:
        with RankPool(1, timeout=600) as one_rank, RankPool(2, timeout=600) as two_ranks:
            for case in list_cases():
                pool = two_ranks if case.wrapper else one_rank
                yield [*describe_case(case), *measure_cells(case, pool)]

    def measure_cells(case: Case, pool: RankPool) -> list[object]:
        if ops:
            return list(pool.run(count_ops, case)[0])
        is_small = case.parameters * case.elements < 10**5
        case_rounds = 4 * rounds if is_small else rounds
        times = slowest_times(pool.run(measure, case, case_rounds))
        return [format_ratio(times[DISTAMP], times[TORCH])]

    columns = ["step", "optimizer", "parameters", "elements", "ranks"]
    columns += [DISTAMP, TORCH] if ops else ["ratio to torch"]
    print_table(columns, measure_cases())


def describe_case(case: Case) -> list[object]:
    """Return the first cells of a row."""
    step = f"{case.step} under {case.wrapper}" if case.wrapper else case.step
    optimizer = f"{case.optimizer} AdamW"
    if case.dtype is torch.bfloat16:
        optimizer += " bf16"
    ranks = 2 if case.wrapper else 1
    return [step, optimizer, f"{case.parameters:,}", f"{case.elements:,}", ranks]


if __name__ == "__main__":
    run_command(main)

"""A step under a limit of the norm, beside torch's clip_grad_norm_ and step in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.clip [--rounds 45] [--ops]

Each row is one way to train: how the model is wrapped, which optimizer, how many parameters of how
many elements. Gradients are put back before each turn, untimed, and their norm is twice the limit.
On several ranks a turn takes as long as its slowest rank.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import Timings, command, interleave, ratio, slowest, table
from distamp import DistGradScaler, StepGuard
from tests.ranks import RankPool, mesh

SCALE = 1024.0
OURS, TORCHS = "ours", "torch's"


class Case(NamedTuple):
    """One row: what is stepped how; with a wrapper, on two ranks."""

    step: str
    optimizer: str
    parameters: int
    elements: int
    wrapper: str = ""
    dtype: torch.dtype = torch.float32


SIZES = [(count, elements) for elements in (16, 2500) for count in (20, 300, 1000)]
ALONE = (("clip", "fused"), ("clip", "foreach"), ("scale, clip", "fused"))
CASES = [Case(*how, *size) for how in ALONE for size in SIZES]
CASES += [Case("guard alone", optimizer, 300, 2500) for optimizer in ("fused", "foreach")]
CASES += [Case("clip", "fused", 300, 2500, dtype=torch.bfloat16)]
CASES += [Case("clip", optimizer, 300, 2500, "FSDP2") for optimizer in ("fused", "foreach")]
CASES += [Case("clip", "fused", count, 2500, "DDP") for count in (300, 1000)]


def contender(case: Case, who: str) -> tuple[list[Tensor], Callable[[], None]]:
    """Return the gradients of a model, and one step of it."""
    ones = torch.ones(case.elements, dtype=case.dtype)
    model: Any = nn.ParameterList(ones.clone() for _ in range(case.parameters))
    if case.wrapper == "FSDP2":
        fully_shard(model, mesh=mesh((2,), ("dp",)))
    elif case.wrapper == "DDP":
        model = DistributedDataParallel(model)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
    limit = float(nn.utils.get_total_norm(gradients)) / 2
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, **{case.optimizer: True})
    scaler: Any = None
    if case.step == "scale, clip":
        limit /= SCALE
        scaler = (DistGradScaler if who == OURS else torch.amp.GradScaler)("cpu", init_scale=SCALE)
        scaler.scale(torch.ones(()))
    ours = scaler or StepGuard()
    clips = case.step != "guard alone"

    def by_ours() -> None:
        ours.step(optimizer, max_norm=limit if clips else None)
        ours.update()

    def by_torch() -> None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return gradients, by_ours if who == OURS else by_torch


def measure(case: Case, rounds: int) -> Timings:
    """Return the times of both on this rank."""
    both = {who: contender(case, who) for who in (OURS, TORCHS)}
    saved = {who: [each.clone() for each in gradients] for who, (gradients, _) in both.items()}

    def before() -> None:
        for who, (gradients, _) in both.items():
            torch._foreach_copy_(gradients, saved[who])
        dist.barrier()

    return interleave({who: step for who, (_, step) in both.items()}, rounds, before=before)


class Counting(TorchDispatchMode):
    """Counts operations; reading a number that is on the host is none."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def count(case: Case) -> list[int]:
    """Return how many operations a third step dispatches, of both."""
    found = []
    for who in (OURS, TORCHS):
        _, step = contender(case, who)
        step()
        step()
        with Counting() as counting:
            step()
        found.append(counting.seen)
    return found


def main(*, rounds: int = 45, ops: bool = False) -> None:
    """Compare a step under a limit of the norm with torch's.

    Args:
        rounds: Of each row; four times as many below 100,000 elements.
        ops: Count the operations that one step dispatches (on a device, its launches) instead.
    """

    def rows() -> Iterator[list[object]]:
        with RankPool(1, timeout=600) as alone, RankPool(2, timeout=600) as pair:
            for case in CASES:
                pool = pair if case.wrapper else alone
                if ops:
                    cells = pool.run(count, case)[0]
                else:
                    small = case.parameters * case.elements < 10**5
                    found = slowest(pool.run(measure, case, rounds * (4 if small else 1)))
                    cells = [ratio(found[OURS], found[TORCHS])]
                under = f" under {case.wrapper}" if case.wrapper else ""
                kind = f"{case.optimizer} AdamW{' bf16' if case.dtype.itemsize < 4 else ''}"
                sizes = f"{case.parameters:,}", f"{case.elements:,}", 2 if case.wrapper else 1
                yield [f"{case.step}{under}", kind, *sizes, *cells]

    header = ["step", "optimizer", "parameters", "elements", "ranks"]
    table([*header, *([OURS, TORCHS] if ops else ["of torch's"])], rows())


if __name__ == "__main__":
    command(main)

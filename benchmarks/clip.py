"""A step under a limit of the norm, beside torch's clip_grad_norm_ and step in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.clip [--rounds 45] [--only TEXT] [--ops]

Each row is one way to train: how the model is wrapped, which optimizer, how many parameters of how
many elements. Gradients are put back before each turn, untimed, and their norm is twice the limit.
On several ranks a turn takes as long as its slowest rank. ``--ops`` counts the operations that one
step dispatches instead (on a device, its launches).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import Timings, environment, interleave, markdown, ratio, slowest
from distamp import DistGradScaler, StepGuard
from tests.ranks import RankPool, mesh

SCALE = 1024.0
HEADER = ["step", "optimizer", "parameters", "elements", "ranks", "of torch's", "goal"]


@dataclass(frozen=True)
class Case:
    """One row: what is stepped how, and the ratio that it may have."""

    step: str
    optimizer: str
    parameters: int
    elements: int
    goal: float
    ranks: int = 1
    wrapper: str = ""
    dtype: torch.dtype = torch.float32

    def row(self) -> list[str]:
        """Return the cells before the ratio."""
        bf16 = " bf16" if self.dtype is torch.bfloat16 else ""
        return [
            f"{self.step}{' under ' if self.wrapper else ''}{self.wrapper}",
            f"{self.optimizer} AdamW{bf16}",
            f"{self.parameters:,}",
            f"{self.elements:,}",
            f"{self.ranks}",
        ]


def _cases() -> list[Case]:
    sizes = [(count, size) for size in (16, 2500) for count in (20, 300, 1000)]
    scaled = {size: 0.60 if size[0] * size[1] <= 300 * 16 else 0.90 for size in sizes}
    return [
        *(Case("clip", "fused", *size, goal=0.92) for size in sizes),
        *(Case("clip", "foreach", *size, goal=0.98) for size in sizes),
        Case("clip", "fused", 300, 2500, 1.00, dtype=torch.bfloat16),
        *(Case("scale, clip", "fused", *size, goal=goal) for size, goal in scaled.items()),
        Case("guard alone", "fused", 300, 2500, 1.35),
        Case("guard alone", "foreach", 300, 2500, 1.15),
        Case("clip", "fused", 300, 2500, 0.90, 2, "FSDP2"),
        Case("clip", "foreach", 300, 2500, 1.00, 2, "FSDP2"),
        Case("clip", "fused", 300, 2500, 1.20, 2, "DDP"),
        Case("clip", "fused", 1000, 2500, 1.20, 2, "DDP"),
    ]


class Parameters(nn.Module):
    """So many parameters of so many elements; nothing computes with them."""

    def __init__(self, count: int, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        made = (nn.Parameter(torch.ones(elements, dtype=dtype)) for _ in range(count))
        self.held = nn.ParameterList(made)


def _wrapped(case: Case) -> nn.Module:
    model = Parameters(case.parameters, case.elements, case.dtype)
    if case.wrapper == "FSDP2":
        return fully_shard(model, mesh=mesh((dist.get_world_size(),), ("dp",)))
    return DistributedDataParallel(model) if case.wrapper == "DDP" else model


def _contender(case: Case, ours: bool) -> tuple[list[Tensor], Callable[[], None]]:
    """Return the gradients of a model, and one step of it."""
    torch.manual_seed(0)
    model = _wrapped(case)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    gradients = [getattr(g, "_local_tensor", g) for p in parameters if (g := p.grad) is not None]
    square = sum(g.float().square().sum() for g in gradients)
    limit = float(square) ** 0.5 / 2
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, **{case.optimizer: True})
    loss = torch.ones((), requires_grad=True) * 1.0
    step = _step_of(case.step, ours, optimizer, parameters, limit, loss)
    return gradients, step


def _step_of(
    kind: str,
    ours: bool,
    optimizer: Any,
    parameters: list[nn.Parameter],
    limit: float,
    loss: Tensor,
) -> Callable[[], None]:
    scaler: Any
    if kind == "scale, clip":
        scaler = (DistGradScaler if ours else torch.amp.GradScaler)("cpu", init_scale=SCALE)
        scaler.scale(loss)

        def scaled() -> None:
            if ours:
                scaler.step(optimizer, max_norm=limit / SCALE)
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, limit / SCALE, foreach=True)
                scaler.step(optimizer)
            scaler.update()

        return scaled
    guard = StepGuard()

    def clipped() -> None:
        if ours:
            guard.step(optimizer, max_norm=limit)
            guard.update()
        else:
            nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
            optimizer.step()

    def alone() -> None:
        if ours:
            guard.step(optimizer)
            guard.update()
        else:
            optimizer.step()

    return clipped if kind == "clip" else alone


def _measure(case: Case, rounds: int) -> Timings:
    """Return the times of both on this rank."""
    both = {name: _contender(case, name == "ours") for name in ("ours", "torch")}
    saved = {name: [g.clone() for g in gradients] for name, (gradients, _) in both.items()}

    def before() -> None:
        for name, (gradients, _) in both.items():
            torch._foreach_copy_(gradients, saved[name])
        if case.ranks > 1:
            dist.barrier()

    steps = {name: step for name, (_, step) in both.items()}
    return interleave(steps, rounds, before=before)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _ops(case: Case) -> dict[str, list[str]]:
    """Return the operations that a third step dispatches, of both."""
    seen = {}
    for name in ("ours", "torch"):
        _, step = _contender(case, name == "ours")
        step()
        step()
        with _Counting() as counting:
            step()
        seen[name] = counting.seen
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=45, help="four times as many below 100,000")
    parser.add_argument("--only", default="", help="rows with this text")
    parser.add_argument("--ops", action="store_true", help="count operations, time nothing")
    given = parser.parse_args()
    cases = [case for case in _cases() if given.only in " ".join(case.row())]
    header = [*HEADER[:5], "ours", "torch's"] if given.ops else HEADER
    print(f"{environment()}\n\n{markdown(header, [])}", flush=True)
    for ranks in sorted({case.ranks for case in cases}):
        with RankPool(ranks, timeout=600) as pool:
            for case in (each for each in cases if each.ranks == ranks):
                if given.ops:
                    seen = pool.run(_ops, case)[0]
                    cells = [f"{len(seen[name])}" for name in ("ours", "torch")]
                else:
                    small = case.parameters * case.elements < 10**5
                    found = slowest(pool.run(_measure, case, given.rounds * (4 if small else 1)))
                    cells = [ratio(found["ours"], found["torch"]), f"{case.goal:.2f}"]
                print("| " + " | ".join([*case.row(), *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()

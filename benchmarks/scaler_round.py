"""A round of scale, unscale, step and update of DistGradScaler beside torch's and fairscale's.

    OMP_NUM_THREADS=1 python -m benchmarks.scaler_round [--ranks 1 2 4] [--rounds 40] [--fused]
        [--parameters 10 100 1000 10000] [--elements 25000] [--device cuda]
    OMP_NUM_THREADS=1 python -m benchmarks.scaler_round --parts [--ranks 1 2] [--parameters 20]
        [--elements 16]

The optimizers' step does nothing, so that only the scaler is timed. All scalers see the same
gradients in turn; between two turns the gradients are multiplied by the loss scale again and the
ranks wait for each other, both untimed. A round takes as long as its slowest rank.

fairscale's scaler is made for CUDA and disables itself without it. Here it is enabled by hand, and
its copy of the flag to the GPU is left out, in its favour.

``--parts`` takes a round of one optimizer to pieces instead: the time of each call, and how many
functions of Python and of C it calls.
"""

import argparse
import cProfile
import pstats
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from benchmarks.common import Timings, environment, interleave, markdown, ratio, slowest
from distamp import DistGradScaler
from tests.ranks import RankPool

OURS, TORCH, SHARDED, FAIRSCALE = "distamp", "GradScaler", "ShardedGradScaler", "fairscale"
BESIDE_FAIRSCALE = "distamp beside fairscale"
PEERS = (SHARDED, TORCH, FAIRSCALE)
SIZE = 25_000
SCALE = 65536.0
# Parameters, optimizers.
CASES = ((1000, 1), (1000, 4), (20, 1), (20, 4))


class NoStep(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class NoFusedStep(NoStep):
    """As `NoStep`; says, as torch's fused optimizers do, that it divides and skips by itself."""

    _step_supports_amp_scaling = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=40, help="ten times as many below 1 M")
    parser.add_argument("--fused", action="store_true", help="time fused optimizers' check alone")
    parser.add_argument("--parameters", type=int, nargs="+", help="other numbers of parameters")
    parser.add_argument("--elements", type=int, default=SIZE, help="of each parameter")
    parser.add_argument("--device", default="cpu", help="of parameters, gradients and scale")
    parser.add_argument("--parts", action="store_true", help="scale, step and update by themselves")
    arguments = parser.parse_args()
    if arguments.parts:
        print_parts(arguments)
        return
    cases = [(n, 1) for n in arguments.parameters] if arguments.parameters else CASES
    print(environment(), flush=True)
    print("distamp's time, and its ratio to each peer's: median [quartiles]\n")
    header = ["ranks", "parameters", "elements", "optimizers", "ms", *PEERS]
    print("\n".join(markdown(header, []).splitlines()))
    for size in arguments.ranks:
        with RankPool(size, timeout=600) as pool:
            for parameters, optimizers in cases:
                times = compared(
                    pool,
                    parameters,
                    arguments.elements,
                    optimizers,
                    arguments.rounds * (10 if parameters * arguments.elements < 10**6 else 1),
                    fused=arguments.fused,
                    device=arguments.device,
                )
                elements = f"{parameters * arguments.elements:,}"
                row = [size, f"{parameters:,}", elements, optimizers, *times]
                print("| " + " | ".join(map(str, row)) + " |", flush=True)


def compared(pool: RankPool, *sizes: int, fused: bool = False, device: str = "cpu") -> list[str]:
    """Return distamp's milliseconds and its ratio to each of `PEERS`, for sizes as of `measure`."""
    times = slowest(pool.run(measure, *sizes, fused=fused, device=device))
    ours = times[OURS]
    beside = {FAIRSCALE: times.get(BESIDE_FAIRSCALE, [])}
    cells = [str(ratio(beside.get(p, ours), times[p])) if p in times else "-" for p in PEERS]
    return [f"{1000 * statistics.median(ours):.3g}", *cells]


def measure(
    parameters: int, elements: int, optimizers: int, rounds: int, *, fused: bool, device: str
) -> Timings:
    """Return the times of all scalers on this rank."""
    ps, grads = _parameters(parameters, elements, device)
    kind = NoFusedStep if fused else NoStep
    opts = [kind(ps[i::optimizers]) for i in range(optimizers)]

    def before() -> None:
        _scale_again(grads)

    rivals = contenders(opts, fused=fused, device=device)
    slow = rivals.pop(FAIRSCALE, None)
    times = interleave(rivals, rounds, before=before)
    if slow is not None:
        # Apart, in fewer rounds: what follows so long a run finds the machine in another state.
        pair = {OURS: rivals[OURS], FAIRSCALE: slow}
        paired = interleave(pair, max(rounds // 5, 5), before=before, warmup=1)
        times |= {FAIRSCALE: paired[FAIRSCALE], BESIDE_FAIRSCALE: paired[OURS]}
    return times


def print_parts(arguments: argparse.Namespace) -> None:
    """Print what each call of a round takes, in a table."""
    print(environment(), flush=True)
    print("microseconds: median [quartiles] of the slowest rank; calls: of rank 0\n")
    parts = ["scale", "step", "update"]
    header = ["ranks", "parameters", "scaler", *parts, "round", *(f"calls: {p}" for p in parts)]
    print("\n".join(markdown(header, []).splitlines()))
    for size in arguments.ranks:
        with RankPool(size, timeout=600) as pool:
            for parameters in arguments.parameters or [20]:
                ranks = pool.run(
                    measure_parts,
                    parameters,
                    arguments.elements,
                    10 * arguments.rounds,
                    device=arguments.device,
                )
                for name, (_, calls) in ranks[0].items():
                    times = slowest([rank[name][0] for rank in ranks])
                    whole = [sum(each) for each in zip(*(times[p] for p in parts), strict=True)]
                    cells = [_microseconds(times[part]) for part in parts]
                    counts = [calls[part] for part in parts]
                    row = [size, parameters, name, *cells, _microseconds(whole), *counts]
                    print("| " + " | ".join(map(str, row)) + " |", flush=True)


def measure_parts(
    parameters: int, elements: int, rounds: int, *, device: str
) -> dict[str, tuple[Timings, dict[str, int]]]:
    """Return for each scaler the seconds of each call, round by round, and the calls it makes."""
    ps, grads = _parameters(parameters, elements, device)
    optimizer = NoStep(ps)
    loss = _loss(device)
    scalers = _scalers(device)
    found: dict[str, tuple[Timings, dict[str, int]]] = {
        name: ({"scale": [], "step": [], "update": []}, {}) for name in scalers
    }
    order = random.Random(0)
    for number in range(-10, rounds + 1):
        for name in order.sample(list(scalers), len(scalers)):
            _scale_again(grads)
            scaler, (times, calls) = scalers[name], found[name]
            for part, call, given in (
                ("scale", scaler.scale, (loss,)),
                ("step", scaler.step, (optimizer,)),
                ("update", scaler.update, ()),
            ):
                if number == rounds:
                    calls[part] = _calls(call, given)
                    continue
                start = time.perf_counter()
                call(*given)
                if number >= 0:
                    times[part].append(time.perf_counter() - start)
    return found


def _calls(call: Callable[..., Any], given: tuple[Any, ...]) -> int:
    """Return how many functions of Python and of C a call calls, itself among them."""
    profile = cProfile.Profile()
    profile.runcall(call, *given)
    total: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return total - 1  # and not the profile's own


def _microseconds(seconds: list[float]) -> str:
    low, median, high = (1e6 * x for x in statistics.quantiles(seconds, n=4, method="inclusive"))
    return f"{median:.1f} [{low:.1f}, {high:.1f}]"


def _parameters(count: int, elements: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters, and their gradients, which are scaled."""
    ps = [torch.zeros(elements, device=device, requires_grad=True) for _ in range(count)]
    grads = [torch.full((elements,), SCALE, device=device) for _ in ps]
    for p, grad in zip(ps, grads, strict=True):
        p.grad = grad
    return ps, grads


def _scale_again(grads: list[Tensor]) -> None:
    """Scale the gradients, unless a fused optimizer left them so, and wait for all ranks."""
    torch._foreach_mul_(grads, SCALE if grads[0][0] < SCALE else 1.0)
    dist.barrier()


def _loss(device: str) -> Tensor:
    return torch.ones((), device=device, requires_grad=True) * 1.0


def _scalers(device: str) -> dict[str, Any]:
    return {
        OURS: DistGradScaler(device, init_scale=SCALE),
        TORCH: torch.amp.GradScaler(device, init_scale=SCALE),
        SHARDED: ShardedGradScaler(device, init_scale=SCALE),
    }


def contenders(
    opts: list[torch.optim.Optimizer], *, fused: bool = False, device: str = "cpu"
) -> dict[str, Callable[[], None]]:
    """Return one round of each scaler over the same optimizers."""
    scalers = _scalers(device)
    if not fused:  # fairscale hands a fused optimizer another argument and checks nothing
        scalers[FAIRSCALE] = _fairscale(device)
    return {name: _round(scaler, opts, device) for name, scaler in scalers.items()}


def _round(scaler: Any, opts: list[torch.optim.Optimizer], device: str) -> Callable[[], None]:
    loss = _loss(device)
    grouped = isinstance(scaler, DistGradScaler) and len(opts) > 1

    def run() -> None:
        scaler.scale(loss)
        if grouped:
            scaler.step_all(opts)
        else:
            for optimizer in opts:
                scaler.step(optimizer)
        scaler.update()

    return run


def _fairscale(device: str) -> Any:
    from fairscale.optim import grad_scaler

    if device != "cpu":
        return grad_scaler.ShardedGradScaler(init_scale=SCALE)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    with (
        warnings.catch_warnings(),
        mock.patch.object(grad_scaler, "amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
    ):
        warnings.simplefilter("ignore")
        return grad_scaler.ShardedGradScaler(init_scale=SCALE)


if __name__ == "__main__":
    main()

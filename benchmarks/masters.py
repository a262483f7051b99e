"""A step on fp32 masters beside the loop that one writes by hand: memory counted, time as a ratio.

    OMP_NUM_THREADS=1 python -m benchmarks.masters [--rounds 60] [--parameters 10 100 1000]
        [--device cuda]

Both hold a float16 model, step AdamW on float32 copies with the same gradients, check for inf and
NaN, clip nothing and write the values back. The loop by hand is what the usual tutorials show:
``copy.grad = p.grad.float() / scale``, a check of every gradient, ``optimizer.step()``,
``p.copy_(copy)``. ``foreach`` is the same loop with torch's multi-tensor functions, as a careful
writer would have it. Forward and backward are left out: gradients are set anew, untimed.

Bytes are counted from the tensors that are alive and from the allocations of one step as
torch.profiler records them, so they are exact and the same on every machine.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Timings, environment, interleave, markdown, ratio
from distamp import DistGradScaler
from distamp.scaler import MasterParameters

OURS, PLAIN, FOREACH = "distamp", "by hand", "by hand, foreach"
SCALE = 1024.0
MIB = 2**20
# Parameters, elements of each.
CASES = ((10, 1_000_000), (100, 100_000), (1000, 10_000), (1000, 100))


class ByHand:
    """The usual loop, for float16 parameters with scaled gradients."""

    def __init__(self, parameters: Sequence[Tensor], *, foreach: bool) -> None:
        self.parameters = parameters
        self.copies = [p.detach().float() for p in parameters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-3, fused=True)
        self.foreach = foreach

    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, check them, step the copies and write them back."""
        if self.foreach:
            self._foreach_step()
            return
        finite = True
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float() / SCALE
            finite = finite and bool(copy.grad.isfinite().all())
        if finite:
            self.optimizer.step()
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                parameter.copy_(copy)

    def _foreach_step(self) -> None:
        gradients = [torch.empty_like(copy) for copy in self.copies]
        torch._foreach_copy_(gradients, [p.grad for p in self.parameters])
        torch._foreach_mul_(gradients, 1.0 / SCALE)
        finite = torch.stack(torch._foreach_norm(gradients, 2.0)).isfinite().all()
        if finite:
            for copy, gradient in zip(self.copies, gradients, strict=True):
                copy.grad = gradient
            self.optimizer.step()
            torch._foreach_copy_(list(self.parameters), self.copies)

    def zero_grad(self) -> None:
        """Free every gradient."""
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.zero_grad()

    @property
    def held(self) -> int:
        """Bytes of the float32 copies."""
        return sum(copy.nbytes for copy in self.copies)


class Masters:
    """The same with `MasterParameters` and the scaler."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.optimizer = torch.optim.AdamW(list(parameters), lr=1e-3, fused=True)
        self.masters = MasterParameters(self.optimizer)
        device = parameters[0].device.type
        self.scaler = DistGradScaler(device, init_scale=SCALE, fp16_grads="master")
        self.scaler.scale(torch.ones((), device=parameters[0].device))

    def step(self) -> None:
        """Let the scaler and the masters do so."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        """Free every gradient."""
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.zero_grad()

    @property
    def held(self) -> int:
        """Bytes of the float32 copies."""
        return self.masters.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--parameters", type=int, nargs="+", help="of the cases, those with so many"
    )
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(environment(), flush=True)
    print("\nTime of a whole step (gradients to masters, AdamW, write-back), and its ratio:\n")
    print(markdown(["parameters", "elements", "ms", PLAIN, FOREACH], []).rstrip())
    for parameters, elements in CASES:
        if arguments.parameters and parameters not in arguments.parameters:
            continue
        times = timed(parameters, elements, arguments.rounds, arguments.device)
        beside = [str(ratio(times[OURS], times[peer])) for peer in (PLAIN, FOREACH)]
        milliseconds = f"{1000 * statistics.median(times[OURS]):.3g}"
        row = [f"{parameters:,}", f"{parameters * elements:,}", milliseconds, *beside]
        print("| " + " | ".join(row) + " |", flush=True)
    print("\nBytes for each element of the model, beside its own 2 and AdamW's 8:\n")
    header = ["", "held between steps", "gradients after backward", "most in a step"]
    rows = [[name, *map(_per_element, counted(name, arguments.device))] for name in CONTENDERS]
    print(markdown(header, rows))


def _contender(name: str, device: str, count: int, elements: int) -> Masters | ByHand:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(elements, generator=generator) * 0.02 for _ in range(count)]
    parameters = [torch.nn.Parameter(v.to(device, torch.float16)) for v in values]
    if name == OURS:
        return Masters(parameters)
    return ByHand(parameters, foreach=name == FOREACH)


CONTENDERS = (OURS, PLAIN, FOREACH)


def timed(count: int, elements: int, rounds: int, device: str) -> Timings:
    """Return the times of one step of each contender, in turn."""
    rivals = {name: _contender(name, device, count, elements) for name in CONTENDERS}
    gradients = [torch.full((elements,), 0.5, dtype=torch.float16, device=device)] * count

    def before() -> None:
        for rival in rivals.values():
            rival.zero_grad()
            for parameter, gradient in zip(rival.parameters, gradients, strict=True):
                parameter.grad = gradient

    steps: dict[str, Callable[[], object]] = {name: rival.step for name, rival in rivals.items()}
    return interleave(steps, rounds, before=before)


def counted(name: str, device: str) -> tuple[float, float, float]:
    """Return bytes for each element: held by copies, by gradients before, and most in a step."""
    count, elements = 64, 250_000
    held = 0

    def two_iterations() -> None:
        nonlocal held
        rival = _contender(name, device, count, elements)
        held = rival.held
        for _ in range(2):  # AdamW makes its state in the first
            rival.zero_grad()
            _set_gradients(rival)
            rival.step()

    most = _most_allocated(two_iterations)
    whole = count * elements
    resident = whole * (2 + 8) + held
    return held / whole, 2.0, (most - resident) / whole


def _set_gradients(rival: Masters | ByHand) -> None:
    for parameter in rival.parameters:
        parameter.grad = torch.full_like(parameter, 0.5)


def _most_allocated(function: Callable[[], object]) -> int:
    """Return the largest sum of allocations less frees while ``function`` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    assert profiler.profiler is not None
    total = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def _per_element(value: float) -> str:
    return f"{value:.2f}"


if __name__ == "__main__":
    main()

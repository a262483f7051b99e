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

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import command, interleave, median, ratio, table
from distamp import DistGradScaler, initialize
from distamp.levels import Amp
from distamp.scaler import MasterParameters
from launch.config import Config
from launch.model import GPT

SCALE = 1024.0
# Parameters, elements of each.
CASES = ((10, 1_000_000), (100, 100_000), (1000, 10_000), (1000, 100))
COUNTED = (64, 250_000)
OURS, BY_HAND, FOREACH = "distamp", "by hand", "by hand, foreach"
SPLIT, WHOLE = "split, bf16", "whole, bf16"


@dataclass(frozen=True)
class Contender:
    """Parameters in 16 bits, the step on their float32 copies, and the bytes of those."""

    parameters: list[Tensor]
    step: Callable[[], object]
    optimizer: torch.optim.Optimizer
    held: int

    def set_gradients(self) -> None:
        """Free all gradients, and set new ones as a backward pass would."""
        self.optimizer.zero_grad()
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 0.5)


def made(name: str, device: str, count: int, elements: int) -> Contender:
    """Return a contender with so many parameters of so many elements."""
    dtype = torch.bfloat16 if name in (SPLIT, WHOLE) else torch.float16
    values = (torch.full((elements,), 0.02, device=device, dtype=dtype) for _ in range(count))
    parameters: list[Tensor] = [torch.nn.Parameter(each) for each in values]
    if name in (BY_HAND, FOREACH):
        return _by_hand(parameters, name == FOREACH)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    masters = MasterParameters(optimizer, split=name == SPLIT)
    if name != OURS:  # without a scaler
        return Contender(parameters, optimizer.step, optimizer, masters.nbytes)
    scaler = DistGradScaler(device, init_scale=SCALE, fp16_grads="master")
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Contender(parameters, step, optimizer, masters.nbytes)


def _by_hand(parameters: list[Tensor], foreach: bool) -> Contender:
    copies = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(copies, lr=1e-3, fused=True)

    @torch.no_grad()
    def step() -> None:
        finite = True
        for parameter, copy in zip(parameters, copies, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float() / SCALE
            finite = finite and bool(copy.grad.isfinite().all())
        if finite:
            optimizer.step()
            for parameter, copy in zip(parameters, copies, strict=True):
                parameter.copy_(copy)

    @torch.no_grad()
    def foreach_step() -> None:
        gradients = [torch.empty_like(copy) for copy in copies]
        torch._foreach_copy_(gradients, [p.grad for p in parameters])
        torch._foreach_mul_(gradients, 1.0 / SCALE)
        if torch.stack(torch._foreach_norm(gradients, 2.0)).isfinite().all():
            for copy, gradient in zip(copies, gradients, strict=True):
                copy.grad = gradient
            optimizer.step()
            torch._foreach_copy_(parameters, copies)

    held = sum(copy.nbytes for copy in copies)
    return Contender(parameters, foreach_step if foreach else step, optimizer, held)


def timed(names: Iterable[str], count: int, elements: int, rounds: int, device: str) -> list[str]:
    """Return a row: the time of a step of the first, and its ratio to each other's."""
    rivals = {name: made(name, device, count, elements) for name in names}

    def before() -> None:
        for rival in rivals.values():
            rival.set_gradients()

    steps = {name: rival.step for name, rival in rivals.items()}
    mine, *peers = interleave(steps, rounds, before=before).values()
    beside = (ratio(mine, peer) for peer in peers)
    return [f"{count:,}", f"{count * elements:,}", median(mine), *beside]


def trained(rounds: int, device: str) -> list[str]:
    """Return a row: the time of a training step of the launcher's GPT by split masters."""
    config = Config(layers=4, heads=4, d_model=256, seq_len=64, global_batch_size=8)
    tokens = torch.randint(256, (2, config.global_batch_size, config.seq_len), device=device)
    steps: dict[str, Callable[[], object]] = {}
    for name, how in (("split", "split"), ("whole", True)):
        torch.manual_seed(0)
        model = GPT(config, 256).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        amp = initialize(model, optimizer, "bf16-O2", master_weights=how)

        def step(amp: Amp = amp) -> None:
            amp.zero_grad()
            amp.backward(F.cross_entropy(amp.model(tokens[0]).flatten(0, 1), tokens[1].flatten()))
            amp.step()

        steps[name] = step
    mine, peer = interleave(steps, rounds).values()
    elements = sum(p.numel() for p in model.parameters())
    return [f"{elements:,}", f"{tokens[0].numel():,}", median(mine), ratio(mine, peer)]


def counted(name: str, device: str) -> list[str]:
    """Return a row: bytes for each element, held by copies and, besides, the most in a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        rival = made(name, device, *COUNTED)
        for _ in range(2):  # AdamW makes its state in the first
            rival.set_gradients()
            rival.step()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()))
    most = max(itertools.accumulate(changes))
    elements = COUNTED[0] * COUNTED[1]
    held = rival.held / elements
    return [name, f"{held:.2f}", f"{most / elements - 2 - 8 - held:.2f}"]


def main(
    *, rounds: int = 60, parameters: Sequence[int] = (10, 100, 1000), device: str = "cpu"
) -> None:
    """Compare a step on fp32 masters with a loop by hand.

    Args:
        rounds: Of each row.
        parameters: Of the cases, those of so many.
        device: Where they lie.
    """

    def rows(*names: str) -> Iterable[list[str]]:
        return (timed(names, *case, rounds, device) for case in CASES if case[0] in parameters)

    known = ["parameters", "elements", "ms"]
    title = "Time of a whole step (gradients to masters, AdamW, write-back):"
    table([*known, f"of {BY_HAND}", f"of {FOREACH}"], rows(OURS, BY_HAND, FOREACH), title)
    title = "The same by split masters, of bfloat16 parameters and without a scaler:"
    table([*known, "of whole masters"], rows(SPLIT, WHOLE), title)
    title = "A training step of the launcher's GPT at bf16-O2:"
    table(["elements", "tokens", "ms", "of whole masters"], [trained(rounds, device)], title)
    title = "Bytes for each element of the model, beside its own 2 and AdamW's 8; gradients are 2:"
    counts = (counted(name, device) for name in (OURS, BY_HAND, FOREACH, SPLIT, WHOLE))
    table(["", "held between steps", "most in a step"], counts, title)


if __name__ == "__main__":
    command(main)

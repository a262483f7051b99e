"""A step on fp32 masters, compared with a loop written by hand: memory as bytes, time as a ratio.

    OMP_NUM_THREADS=1 python -m benchmarks.masters [--rounds 60] [--parameters 10 100 1000]
        [--device cuda]

Both sides hold a float16 model, step AdamW on float32 copies with the same gradients, check for inf
and NaN, clip nothing and write the values back. The loop by hand is that of the usual tutorials:
``copy.grad = p.grad.float() / scale``, a check of every gradient, ``optimizer.step()``,
``p.copy_(copy)``. ``foreach`` is the same loop with torch's multi-tensor functions. Forward and
backward passes are left out: the gradients are set before each step, and setting them is not timed.

Bytes are counted from the tensors that are alive and from the allocations of one step in
torch.profiler, so they are exact and the same on every machine.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import format_median, format_ratio, interleave, print_table, run_command
from benchmarks.gpu import simulated
from distamp import DistGradScaler, initialize
from distamp.levels import Amp
from distamp.scaler import MasterParameters
from launch.config import Config
from launch.model import GPT

SCALE = 1024.0
# Numbers of parameters, and of elements in each.
SIZES = ((10, 1_000_000), (100, 100_000), (1000, 10_000), (1000, 100))
SIZE_FOR_MEMORY = (64, 250_000)
DISTAMP, BY_HAND, FOREACH = "distamp", "by hand", "by hand, foreach"
SPLIT, UNSPLIT = "split, bf16", "whole, bf16"
# Bytes of an element of the 16-bit model, and of AdamW's two moments.
MODEL_BYTES, ADAMW_BYTES = 2, 8


@dataclass(frozen=True)
class Contender:
    """A 16-bit model and a way to step its float32 copies.

    Attributes:
        params: The 16-bit parameters.
        step: Takes a step.
        optimizer: The optimizer of the copies.
        master_bytes: Bytes of the copies.
    """

    params: list[Tensor]
    step: Callable[[], object]
    optimizer: torch.optim.Optimizer
    master_bytes: int

    def set_gradients(self) -> None:
        """Free all gradients, and allocate new ones as a backward pass would."""
        self.optimizer.zero_grad()
        for param in self.params:
            param.grad = torch.full_like(param, 0.5)


def make_contender(name: str, device: str, count: int, elements: int) -> Contender:
    """Return a contender with ``count`` parameters of ``elements`` elements."""
    dtype = torch.bfloat16 if name in (SPLIT, UNSPLIT) else torch.float16
    params: list[Tensor] = []
    for _ in range(count):
        params.append(nn.Parameter(torch.full((elements,), 0.02, device=device, dtype=dtype)))
    if name == BY_HAND:
        return make_tutorial_loop(params)
    if name == FOREACH:
        return make_foreach_loop(params)
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    masters = MasterParameters(optimizer, split=name == SPLIT)
    if name != DISTAMP:
        # bf16 needs no scaler.
        return Contender(params, optimizer.step, optimizer, masters.nbytes)
    scaler = DistGradScaler(device, init_scale=SCALE, fp16_grads="master")
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Contender(params, step, optimizer, masters.nbytes)


def make_tutorial_loop(params: list[Tensor]) -> Contender:
    """Return the loop of the usual tutorials."""
    copies = [p.detach().float() for p in params]
    optimizer = torch.optim.AdamW(copies, lr=1e-3, fused=True)

    @torch.no_grad()
    def step() -> None:
        is_finite = True
        for param, copy in zip(params, copies, strict=True):
            assert param.grad is not None
            copy.grad = param.grad.float() / SCALE
            is_finite = is_finite and bool(copy.grad.isfinite().all())
        if not is_finite:
            return
        optimizer.step()
        for param, copy in zip(params, copies, strict=True):
            param.copy_(copy)

    return Contender(params, step, optimizer, sum(copy.nbytes for copy in copies))


def make_foreach_loop(params: list[Tensor]) -> Contender:
    """Return the loop of the tutorials with multi-tensor functions."""
    copies = [p.detach().float() for p in params]
    optimizer = torch.optim.AdamW(copies, lr=1e-3, fused=True)

    @torch.no_grad()
    def step() -> None:
        grads = [torch.empty_like(copy) for copy in copies]
        torch._foreach_copy_(grads, [p.grad for p in params])
        torch._foreach_mul_(grads, 1.0 / SCALE)
        norms = torch.stack(torch._foreach_norm(grads, 2.0))
        if not norms.isfinite().all():
            return
        for copy, grad in zip(copies, grads, strict=True):
            copy.grad = grad
        optimizer.step()
        torch._foreach_copy_(params, copies)

    return Contender(params, step, optimizer, sum(copy.nbytes for copy in copies))


def time_steps(
    names: Sequence[str], count: int, elements: int, rounds: int, device: str
) -> list[str]:
    """Return a row: the time of a step of the first contender, and its ratio to all others."""
    contenders = {name: make_contender(name, device, count, elements) for name in names}

    def set_gradients() -> None:
        for contender in contenders.values():
            contender.set_gradients()

    steps = {name: contender.step for name, contender in contenders.items()}
    times = interleave(steps, rounds, setup=set_gradients)
    first, *peers = names
    row = [f"{count:,}", f"{count * elements:,}", format_median(times[first])]
    row += [format_ratio(times[first], times[peer]) for peer in peers]
    return row


def time_training(rounds: int, device: str) -> list[str]:
    """Return a row: the time of a training step of the launcher's GPT with split masters."""
    config = Config(layers=4, heads=4, d_model=256, seq_len=64, global_batch_size=8)
    shape = (2, config.global_batch_size, config.seq_len)
    inputs, targets = torch.randint(256, shape, device=device)
    steps: dict[str, Callable[[], object]] = {}
    for name, master_weights in (("split", "split"), ("whole", True)):
        torch.manual_seed(0)
        model = GPT(config, 256).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        amp = initialize(model, optimizer, "bf16-O2", master_weights=master_weights)

        def step(amp: Amp = amp) -> None:
            amp.zero_grad()
            logits = amp.model(inputs)
            amp.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
            amp.step()

        steps[name] = step
    times = interleave(steps, rounds)
    elements = sum(p.numel() for p in model.parameters())
    ratio = format_ratio(times["split"], times["whole"])
    return [f"{elements:,}", f"{inputs.numel():,}", format_median(times["split"]), ratio]


def count_bytes(name: str, device: str) -> list[str]:
    """Return a row: bytes an element of the copies, and the largest extra number in a step."""
    count, elements = SIZE_FOR_MEMORY
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contender = make_contender(name, device, count, elements)
        # AdamW allocates its state in the first step.
        for _ in range(2):
            contender.set_gradients()
            contender.step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    allocations.sort(key=lambda event: event.start_ns())
    master_bytes = contender.master_bytes / (count * elements)
    if device != "cpu" and simulated():
        # The profiler does not see the memory of this device.
        return [name, f"{master_bytes:.2f}", "not measured"]
    peak = max(itertools.accumulate(event.nbytes() for event in allocations))
    extra = peak / (count * elements) - MODEL_BYTES - ADAMW_BYTES - master_bytes
    return [name, f"{master_bytes:.2f}", f"{extra:.2f}"]


def main(
    *, rounds: int = 60, parameters: Sequence[int] = (10, 100, 1000), device: str = "cpu"
) -> None:
    """Compare a step on fp32 masters with a loop by hand.

    Args:
        rounds: Number of rounds of each row.
        parameters: Numbers of parameters to measure.
        device: Device of the parameters.
    """

    def time_sizes(*names: str) -> Iterator[list[str]]:
        for count, elements in SIZES:
            if count in parameters:
                yield time_steps(names, count, elements, rounds, device)

    size_columns = ["parameters", "elements", "ms"]
    title = "Time of a whole step (gradients to masters, AdamW, write-back):"
    columns = [*size_columns, f"ratio to {BY_HAND}", f"ratio to {FOREACH}"]
    print_table(columns, time_sizes(DISTAMP, BY_HAND, FOREACH), title)
    title = "The same with split masters of bfloat16 parameters, without a scaler:"
    print_table([*size_columns, "ratio to whole masters"], time_sizes(SPLIT, UNSPLIT), title)
    title = "A training step of the launcher's GPT at bf16-O2:"
    columns = ["elements", "tokens", "ms", "ratio to whole masters"]
    print_table(columns, [time_training(rounds, device)], title)
    title = (
        "Bytes for each element of the model, without the model's 2 and AdamW's 8; gradients are 2:"
    )
    names: Iterable[str] = (DISTAMP, BY_HAND, FOREACH, SPLIT, UNSPLIT)
    rows = (count_bytes(name, device) for name in names)
    print_table(["", "held between steps", "most in a step"], rows, title)


if __name__ == "__main__":
    run_command(main)

"""The error of the mean gradient through each wire format beside torch's fp16 hook, in float64.

    OMP_NUM_THREADS=1 python -m benchmarks.wire_error [--elements 16384] [--steps 32]

Heavy-tailed gradients (Student's t with 5 degrees of freedom) of 24 layers, whose sizes fall from
1e-2 to 1e-8 as they do towards the input of a deep net; half of each rank's gradient is common to
all ranks. Numbers of ranks are compared at a loss scale of 2^10, where torch's hook overflows
nowhere. One process goes through what the ranks would do: for ours, each rank's wire, the fp32
sum, and the wire of the mean; for torch's hook, the cast, the division in fp16 and fp16 additions
in the order of gloo's ring.

The last table gives one-byte formats what they need: error feedback, in which each exchange gets
back what rounding took from the last. Its error is that of the sum of all gradients so far, of all
elements and of small tensors (64 elements, a hundredth of the size) that lie between large ones
and share their blocks, as biases do.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import command, table
from distamp.comm_hooks import WIRE_FORMATS, WireFormat, formats
from distamp.comm_hooks.formats import BLOCK, Feedback, Places, Source

LAYERS, SMALL = 24, 64


def through(
    wire: WireFormat,
    given: list[Tensor],
    places: Places | None = None,
    feedback: list[Feedback] | None = None,
) -> Tensor:
    """Average fp32 contributions as ``distamp.comm_hooks`` does, in one process.

    ``feedback`` has one for each contribution, and one for the mean.
    """
    numel = given[0].numel()
    places = places or Places(-(-numel // BLOCK) * BLOCK, [(0, 0, numel)])
    fed: list[Feedback | None] = [*(feedback or [None] * (len(given) + 1))]
    rows = torch.empty(len(given), wire.row_bytes(places.numel), dtype=torch.uint8)
    everyone = Places(places.numel, places.runs, [0] * len(given))
    # The first is that of the rank which adds up.
    own, *others = (Source(each, each.view(1, -1)[:0], places, 1, 1 / len(given)) for each in given)
    for index, source in enumerate(others, 1):
        formats.encode(wire, source, rows[index : index + 1], fed[index])
    mean, found = torch.empty_like(rows[:1]), torch.empty(numel)
    formats.sum_encode(wire, own._replace(places=everyone, own=0), rows, mean[0], fed[-1])
    formats.decode(wire, mean, places, found)
    return found


def torchs_hook(given: list[Tensor]) -> Tensor:
    """Average fp32 contributions as torch's ``fp16_compress_hook`` does over gloo's ring."""
    world = len(given)
    parts = [each.to(torch.float16).div_(world).tensor_split(world) for each in given]
    done = []
    for index in range(world):
        total = parts[index][index]
        for step in range(1, world):
            total = total + parts[(index + step) % world][index]
        done.append(total)
    return torch.cat(done).float()


Average = Callable[[list[Tensor]], Tensor]
CONTENDERS: dict[str, Average] = {"torch fp16 hook": torchs_hook}
for _wire in WIRE_FORMATS.values():
    CONTENDERS[_wire.name] = lambda given, wire=_wire: through(wire, given)  # type: ignore[misc]


def drawn(count: int, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """Return so many ranks' gradients, half of each common to all, of Student's t."""
    generator = torch.Generator().manual_seed(seed)

    def student() -> Tensor:
        freedom = torch.randn(5, *shape, generator=generator)
        return torch.randn(shape, generator=generator) / freedom.square().mean(0).sqrt()

    common = student()
    return [common + student() for _ in range(count)]


def problem(world: int, elements: int, scale: float) -> tuple[Tensor, list[Tensor]]:
    """The float64 mean (layers, elements), and the flat fp32 contributions whose mean it is."""
    sizes = scale * torch.logspace(-2, -8, LAYERS, dtype=torch.float64).unsqueeze(1)
    each = [gradient.double() * sizes for gradient in drawn(world, (LAYERS, elements), 0)]
    return torch.stack(each).mean(0), [gradient.float().flatten() for gradient in each]


def error(mine: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error."""
    return float((mine.double() - exact).norm() / exact.norm())


def by_world(average: Average, world: int, elements: int) -> str:
    """Return the error of the mean of so many ranks."""
    exact, given = problem(world, elements, 2.0**10)
    return f"{error(average(given), exact.flatten()):.2e}"


def by_scale(average: Average, scale: float, elements: int) -> str:
    """Return the error of eight ranks' worst layer, and how many elements became inf."""
    exact, given = problem(8, elements, scale)
    mean = average(given).view_as(exact)
    made = int((~mean.isfinite()).sum())
    worst = max(map(error, mean.nan_to_num(0, 0, 0), exact))
    return f"{worst:.2e}, {made} inf" if made else f"{worst:.2e}"


def summed(wire: WireFormat, elements: int, steps: int, feedback: bool) -> tuple[str, str]:
    """Return the error of the sum of the means of four ranks' steps: of everything, of biases."""
    world, scale = 4, 2.0**10
    sizes = torch.cat([torch.ones(elements), torch.full((SMALL,), 0.01)]).repeat(LAYERS // 2)
    # Where tensors begin and end, as an exchange of int8 knows it: each in blocks of its own.
    runs, begin, first = [], 0, 0
    for numel in (elements, SMALL) * (LAYERS // 2):
        runs.append((begin, first, numel))
        begin, first = begin + -(-numel // BLOCK) * BLOCK, first + numel
    places = Places(begin, runs)
    pair = torch.tensor([scale, 1 / scale, 1.0])
    mine, exact = torch.zeros(2, sizes.numel(), dtype=torch.float64)
    kept: list[Feedback] = []
    for step in range(steps):
        given = [each * sizes * 1e-2 * scale for each in drawn(world, (sizes.numel(),), step)]
        exact += torch.stack(given).double().mean(0)
        if not (kept and feedback):
            kept = [Feedback(torch.zeros(begin), pair) for _ in range(world + 1)]
        mine += through(wire, given, places, kept if wire.needs_error_feedback else None)
    small = sizes < 1
    return f"{error(mine, exact):.1e}", f"{error(mine[small], exact[small]):.1e}"


def main(*, elements: int = 1 << 14, steps: int = 32) -> None:
    """Print the error of each format beside torch's hook.

    Args:
        elements: Of each layer.
        steps: Of the run with error feedback.
    """
    worlds = (
        [name, *(by_world(average, world, elements) for world in (2, 4, 8))]
        for name, average in CONTENDERS.items()
    )
    title = "Relative L2 error of the mean, loss scale 2^10:"
    table(["format", "2 ranks", "4 ranks", "8 ranks"], worlds, title)
    scales = (
        [name, *(by_scale(average, scale, elements) for scale in (1.0, 2.0**16, 2.0**24))]
        for name, average in CONTENDERS.items()
    )
    title = "Eight ranks: error of the worst layer, and elements made inf, by loss scale:"
    table(["format", "scale 1", "2^16", "2^24"], scales, title)
    sums = []
    for wire in WIRE_FORMATS.values():
        (every, small), (fed, small_fed) = (
            summed(wire, elements // 4, steps, feedback) for feedback in (False, True)
        )
        share = f"{wire.row_bytes(1 << 20) / (4 << 20):.3f}"
        sums.append([wire.name, share, every, fed, small, small_fed])
    header = ["format", "bytes of fp32", "all", "all, fed back", "small", "small, fed back"]
    title = f"Four ranks, error of the sum of {steps} steps, with feedback and without:"
    table(header, sums, title)


if __name__ == "__main__":
    command(main)

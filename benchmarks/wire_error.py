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

import argparse
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.common import environment, markdown
from distamp.comm_hooks import WIRE_FORMATS, WireFormat, formats
from distamp.comm_hooks.formats import BLOCK, Feedback, Places, Source

LAYERS = 24
SCALES = (1.0, 2.0**16, 2.0**24)
WORLDS = (2, 4, 8)
TORCH = "torch fp16 hook"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 14, help="of each layer")
    parser.add_argument("--steps", type=int, default=32, help="of the run with error feedback")
    arguments = parser.parse_args()
    print(environment())
    print("\nRelative L2 error of the mean, loss scale 2^10:\n")
    print(_by_world(arguments.elements))
    print("\nEight ranks: error of the worst layer, and elements made inf, by loss scale:\n")
    print(_by_scale(arguments.elements))
    print(
        f"\nFour ranks, error of the sum of {arguments.steps} steps, with feedback and without:\n"
    )
    print(_with_feedback(max(arguments.elements // 4, 1), arguments.steps))


def gradients(world: int, elements: int) -> list[Tensor]:
    """A gradient of each rank, float64, ``LAYERS`` rows that differ in size by six decades."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-2, -8, LAYERS, dtype=torch.float64).unsqueeze(1).float()

    shape = (LAYERS, elements)
    common = _heavy_tailed(shape, generator)
    own = [_heavy_tailed(shape, generator) for _ in range(world)]
    return [((common + each) * sizes).double() for each in own]


def through(
    wire: WireFormat,
    contributions: list[Tensor],
    places: Places | None = None,
    feedback: list[Feedback] | None = None,
) -> Tensor:
    """Average fp32 contributions as ``distamp.comm_hooks`` does, in one process.

    ``feedback`` has one for each contribution, and one for the mean.
    """
    numel = contributions[0].numel()
    places = places or Places(1, -(-numel // BLOCK) * BLOCK, [(0, 0, numel)])
    fed: list[Feedback | None] = [*(feedback or [None] * (len(contributions) + 1))]
    rows = torch.empty(len(contributions), wire.row_bytes(places.numel), dtype=torch.uint8)
    # The first is that of the rank which adds up.
    own, inverse = contributions[0], 1 / len(contributions)
    for index, each in enumerate(contributions[1:], 1):
        source = Source(each, each.view(1, -1)[:0], places, places.rows, inverse)
        formats.encode(wire, source, rows[index : index + 1], fed[index])
    mean, found = torch.empty_like(rows[:1]), torch.empty(numel)
    everyone = Places(len(contributions), places.numel, places.runs)
    adding = Source(own, own.view(1, -1)[:0], everyone, 0, inverse)
    formats.sum_encode(wire, adding, rows, mean[0], fed[-1])
    formats.decode(wire, mean, places, found)
    return found


def torchs_hook(contributions: list[Tensor]) -> Tensor:
    """Average fp32 contributions as torch's ``fp16_compress_hook`` does over gloo's ring."""
    world = len(contributions)
    sent = [each.to(torch.float16).div_(world) for each in contributions]
    parts = [each.tensor_split(world) for each in sent]
    done = []
    for index in range(world):
        total = parts[index][index]
        for step in range(1, world):
            total = total + parts[(index + step) % world][index]
        done.append(total)
    return torch.cat(done).float()


CONTENDERS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    TORCH: torchs_hook,
    **{
        name: (lambda given, wire=wire: through(wire, given))  # type: ignore[misc]
        for name, wire in WIRE_FORMATS.items()
    },
}


def _by_world(elements: int) -> str:
    rows = {name: [name] for name in CONTENDERS}
    for world in WORLDS:
        exact, contributions = _problem(world, elements, 2.0**10)
        for name, average in CONTENDERS.items():
            rows[name].append(f"{_error(average(contributions), exact):.2e}")
    return markdown(["format", *(f"{world} ranks" for world in WORLDS)], list(rows.values()))


def _by_scale(elements: int) -> str:
    rows = {name: [name] for name in CONTENDERS}
    for scale in SCALES:
        exact, contributions = _problem(8, elements, scale)
        for name, average in CONTENDERS.items():
            mean = average(contributions)
            made = int((~mean.isfinite()).sum())
            layers = zip(
                mean.view(LAYERS, -1).nan_to_num(0, 0, 0), exact.view(LAYERS, -1), strict=True
            )
            worst = max(_error(mine, reference) for mine, reference in layers)
            rows[name].append(f"{worst:.2e}, {made} inf" if made else f"{worst:.2e}")
    return markdown(["format", "scale 1", "2^16", "2^24"], list(rows.values()))


def _with_feedback(elements: int, steps: int) -> str:
    rows = []
    for wire in WIRE_FORMATS.values():
        share = wire.row_bytes(1 << 20) / (4 << 20)
        without, fed_back = (_summed(wire, elements, steps, given) for given in (False, True))
        both = (f"{error:.1e}" for pair in zip(without, fed_back, strict=True) for error in pair)
        rows.append([wire.name, f"{share:.3f}", *both])
    header = ["format", "bytes of fp32", "all", "all, fed back", "small", "small, fed back"]
    return markdown(header, rows)


def _summed(wire: WireFormat, elements: int, steps: int, feedback: bool) -> tuple[float, float]:
    """The relative error of the sum of the means of all steps: of everything, and of biases."""
    world, scale = 4, 2.0**10
    sizes = torch.cat([torch.ones(elements), torch.full((64,), 0.01)]).repeat(LAYERS // 2)
    numel = sizes.numel()
    # Where the small ones begin and end, as an exchange of int8 knows it.
    edges = [0, *(sizes.diff().nonzero().flatten() + 1).tolist(), numel]
    runs, begin = [], 0
    for first, stop in pairwise(edges):
        runs.append((begin, first, stop - first))
        begin += -(-(stop - first) // BLOCK) * BLOCK
    places = Places(1, begin, runs)
    pair = torch.tensor([scale, 1 / scale])
    kept = [Feedback(torch.zeros(begin), pair) for _ in range(world + 1)]
    mine, exact = torch.zeros(2, numel, dtype=torch.float64)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        common = _heavy_tailed((numel,), generator)
        contributions = [
            (common + _heavy_tailed((numel,), generator)) * sizes * 1e-2 * scale
            for _ in range(world)
        ]
        exact += torch.stack(contributions).double().mean(0)
        if not feedback:
            kept = [Feedback(torch.zeros(begin), pair) for _ in range(world + 1)]
        mine += through(wire, contributions, places, kept if wire.needs_error_feedback else None)
    small = sizes < 1
    return _error(mine, exact), _error(mine[small], exact[small])


def _heavy_tailed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Student's t with 5 degrees of freedom."""
    normal = torch.randn(shape, generator=generator)
    freedom = torch.randn(5, *shape, generator=generator)
    return normal / freedom.square().mean(0).sqrt()


def _problem(world: int, elements: int, scale: float, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """The float64 mean, flat, and the fp32 contributions whose mean it is."""
    each = [g.flatten() * scale for g in gradients(world, elements)]
    mean = torch.stack(each).mean(0)
    return mean, [g.float() for g in each]


def _error(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()

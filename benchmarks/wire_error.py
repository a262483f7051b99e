"""The error of the mean gradient through each wire format beside torch's fp16 hook, in float64.

    OMP_NUM_THREADS=1 python -m benchmarks.wire_error [--elements 16384] [--steps 32]

Hooks of DDP on ranks of this machine. Heavy-tailed gradients (Student's t with 5 degrees of
freedom) of 24 layers, whose sizes fall from 1e-2 to 1e-8 as they do towards the input of a deep
net; half of each rank's gradient is common to all ranks. Numbers of ranks are compared at a loss
scale of 2^10, where torch's hook overflows nowhere.

The last table gives one-byte formats what they need: error feedback, in which each exchange gets
back what rounding took from the last. Its error is that of the sum of all gradients so far, of all
elements and of small tensors (96 elements, a hundredth of the size) that lie between large ones, as
biases do.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm_hooks_step import TORCH, register
from benchmarks.common import command, table
from distamp.comm_hooks import COMM_FORMATS
from tests.ranks import RankPool

LAYERS, SMALL = 24, 96
NAMES = (TORCH, *COMM_FORMATS)


class Given(nn.Module):
    """Parameters whose gradients it is called with."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.held = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, gradients: Tensor) -> Tensor:
        """Return a loss that has these gradients, flat."""
        pairs = zip(self.held, gradients.split(self.sizes), strict=True)
        return torch.stack([(parameter * each).sum() for parameter, each in pairs]).sum()


class Averaging:
    """Averages flat fp32 gradients of so many elements over the ranks, as DDP does with a hook."""

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        self.model = DistributedDataParallel(Given(sizes))
        register(self.model, name)

    def __call__(self, gradients: Tensor) -> Tensor:
        """Return the mean in float64."""
        self.model.zero_grad()
        self.model(gradients).backward()
        return torch.cat([p.grad for p in self.model.parameters()]).double()


def drawn(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """Return each rank's gradients, half of each common to all, of Student's t."""
    generator = torch.Generator().manual_seed(seed)

    def student() -> Tensor:
        freedom = torch.randn(5, *shape, generator=generator)
        return torch.randn(shape, generator=generator) / freedom.square().mean(0).sqrt()

    common = student()
    return [common + student() for _ in range(dist.get_world_size())]


def error(mine: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error."""
    return float((mine - exact).norm() / exact.norm())


def means(scale: float, elements: int) -> list[tuple[str, str]]:
    """Return, of each name, the error of the mean, and of its worst layer with what became inf."""
    sizes = scale * torch.logspace(-2, -8, LAYERS, dtype=torch.float64).unsqueeze(1)
    each = [gradient.double() * sizes for gradient in drawn((LAYERS, elements), 0)]
    exact = torch.stack(each).mean(0)
    found = []
    for name in NAMES:
        average = Averaging(name, [elements] * LAYERS)
        mean = average(each[dist.get_rank()].float().flatten()).view_as(exact)
        made = int((~mean.isfinite()).sum())
        worst = max(map(error, mean.nan_to_num(0, 0, 0), exact))
        says = f"{worst:.2e}, {made} inf" if made else f"{worst:.2e}"
        found.append((f"{error(mean, exact):.2e}", says))
    return found


def sums(wire: str, elements: int, steps: int, feedback: bool) -> tuple[str, str]:
    """Return the error of the sum of the means of many steps: of everything, and of biases."""
    numels = [elements, SMALL] * (LAYERS // 2)
    sizes = torch.cat([torch.ones(elements), torch.full((SMALL,), 0.01)]).repeat(LAYERS // 2)
    mine, exact = torch.zeros(2, sizes.numel(), dtype=torch.float64)
    average = Averaging(wire, numels)
    average(torch.zeros_like(sizes))  # after the first pass DDP makes other buckets
    for step in range(steps):
        given = [each * sizes * 1e-2 * 2.0**10 for each in drawn((sizes.numel(),), step)]
        exact += torch.stack(given).double().mean(0)
        # A new hook knows of no rounding.
        now = average if feedback else Averaging(wire, numels)
        mine += now(given[dist.get_rank()])
    small = sizes < 1
    return f"{error(mine, exact):.1e}", f"{error(mine[small], exact[small]):.1e}"


def main(*, elements: int = 1 << 14, steps: int = 32) -> None:
    """Print the error of each format beside torch's hook.

    Args:
        elements: Of each layer.
        steps: Of the run with error feedback.
    """
    with RankPool(2) as two, RankPool(4, timeout=900) as four, RankPool(8, timeout=600) as eight:
        worlds = [pool.run(means, 2.0**10, elements)[0] for pool in (two, four, eight)]
        rows = [[name, *(mean for mean, _ in of)] for name, *of in zip(NAMES, *worlds, strict=True)]
        title = "Relative L2 error of the mean, loss scale 2^10:"
        table(["format", "2 ranks", "4 ranks", "8 ranks"], rows, title)
        scales = [eight.run(means, scale, elements)[0] for scale in (1.0, 2.0**16, 2.0**24)]
        rows = [[name, *(last for _, last in of)] for name, *of in zip(NAMES, *scales, strict=True)]
        title = "Eight ranks: error of the worst layer, and elements made inf, by loss scale:"
        table(["format", "scale 1", "2^16", "2^24"], rows, title)
        rows = []
        for name, wire in COMM_FORMATS.items():
            given = name, elements // 4, steps
            (every, small), (fed, small_fed) = (
                four.run(sums, *given, feedback)[0] for feedback in (False, True)
            )
            share = f"{wire.row_bytes(1 << 20) / (4 << 20):.3f}"
            rows.append([name, share, every, fed, small, small_fed])
        title = f"Four ranks, error of the sum of {steps} steps, with feedback and without:"
        header = ["format", "bytes of fp32", "all", "all, fed back", "small", "small, fed back"]
        table(header, rows, title)


if __name__ == "__main__":
    command(main)

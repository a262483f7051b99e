"""The error of the mean gradient in each format, compared with torch's fp16 hook, in float64.

    OMP_NUM_THREADS=1 python -m benchmarks.wire_error [--elements 16384] [--steps 32]

DDP hooks run on ranks of this machine. The gradients are heavy-tailed (Student's t with 5 degrees
of freedom) and belong to 24 layers. Their sizes fall from 1e-2 to 1e-8, as they do towards the
input of a deep net. Half of each rank's gradient is common to all ranks. The table by number of
ranks has a loss scale of 2^10, at which torch's hook overflows nowhere.

The last table adds error feedback, which one-byte formats need: each exchange adds the rounding
error of the exchange before it. The error is that of the sum of all gradients so far: for all
elements, and for small tensors (96 elements, a hundredth of the size) between large ones, such as
biases.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm_hooks_step import TORCH, register
from benchmarks.common import print_table, run_command
from distamp.comm_hooks import COMM_FORMATS
from tests.ranks import RankPool

LAYERS = 24
SMALL = 96
NAMES = (TORCH, *COMM_FORMATS)


class FixedGradients(nn.Module):
    """A module that gets the gradients of its parameters as the input."""

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        self.numels = numels
        self.weights = nn.ParameterList(torch.zeros(numel) for numel in numels)

    def forward(self, gradients: Tensor) -> Tensor:
        """Return a loss with these gradients, which are flat."""
        terms = []
        for weight, gradient in zip(self.weights, gradients.split(self.numels), strict=True):
            terms.append((weight * gradient).sum())
        return torch.stack(terms).sum()


class Averager:
    """Averages flat fp32 gradients over the ranks, as DDP does with a hook."""

    def __init__(self, name: str, numels: Sequence[int]) -> None:
        self.model = DistributedDataParallel(FixedGradients(numels))
        register(self.model, name)

    def __call__(self, gradients: Tensor) -> Tensor:
        """Return the mean in float64."""
        self.model.zero_grad()
        loss = self.model(gradients)
        loss.backward()
        grads = [param.grad for param in self.model.parameters()]
        return torch.cat(grads).double()


def draw_gradients(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """Return the gradients of all ranks, with a half that is common to all."""
    generator = torch.Generator().manual_seed(seed)

    def draw_student_t() -> Tensor:
        freedom = torch.randn(5, *shape, generator=generator)
        spread = freedom.square().mean(0).sqrt()
        return torch.randn(shape, generator=generator) / spread

    common = draw_student_t()
    return [common + draw_student_t() for _ in range(dist.get_world_size())]


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error."""
    return float((approximate - exact).norm() / exact.norm())


def measure_means(scale: float, elements: int) -> list[tuple[str, str]]:
    """Return for each name the error of the mean, and of its worst layer with the count of inf."""
    sizes = scale * torch.logspace(-2, -8, LAYERS, dtype=torch.float64).unsqueeze(1)
    gradients = []
    for gradient in draw_gradients((LAYERS, elements), 0):
        gradients.append(gradient.double() * sizes)
    exact = torch.stack(gradients).mean(0)
    cells = []
    for name in NAMES:
        averager = Averager(name, [elements] * LAYERS)
        rank_gradient = gradients[dist.get_rank()].float().flatten()
        mean = averager(rank_gradient).view_as(exact)
        num_overflows = int((~mean.isfinite()).sum())
        finite_mean = mean.nan_to_num(0, 0, 0)
        layers = zip(finite_mean, exact, strict=True)
        errors = [relative_error(layer, exact_layer) for layer, exact_layer in layers]
        worst_cell = f"{max(errors):.2e}"
        if num_overflows:
            worst_cell += f", {num_overflows} inf"
        error = relative_error(mean, exact)
        cells.append((f"{error:.2e}", worst_cell))
    return cells


def measure_sums(comm_format: str, elements: int, steps: int, feedback: bool) -> tuple[str, str]:
    """Return the error of the sum of the means of many steps: of all elements, and of biases."""
    numels = [elements, SMALL] * (LAYERS // 2)
    large_sizes = torch.ones(elements)
    small_sizes = torch.full((SMALL,), 0.01)
    sizes = torch.cat([large_sizes, small_sizes]).repeat(LAYERS // 2)
    total, exact = torch.zeros(2, sizes.numel(), dtype=torch.float64)
    averager = Averager(comm_format, numels)
    # DDP rebuilds its buckets after the first pass.
    averager(torch.zeros_like(sizes))
    for step in range(steps):
        gradients = []
        for gradient in draw_gradients((sizes.numel(),), step):
            gradients.append(gradient * sizes * 1e-2 * 2.0**10)
        exact_mean = torch.stack(gradients).double().mean(0)
        exact += exact_mean
        # A new hook has no rounding errors to add.
        step_averager = averager if feedback else Averager(comm_format, numels)
        total += step_averager(gradients[dist.get_rank()])
    error = relative_error(total, exact)
    is_small = sizes < 1
    small_error = relative_error(total[is_small], exact[is_small])
    return f"{error:.1e}", f"{small_error:.1e}"


def main(*, elements: int = 1 << 14, steps: int = 32) -> None:
    """Print the error of each format and of torch's hook.

    Args:
        elements: Number of elements in each layer.
        steps: Number of steps of the run with error feedback.
    """
    with RankPool(2) as two, RankPool(4, timeout=900) as four, RankPool(8, timeout=600) as eight:
        by_ranks = []
        for pool in (two, four, eight):
            results = pool.run(measure_means, 2.0**10, elements)
            by_ranks.append(results[0])
        rows = []
        for index, name in enumerate(NAMES):
            errors = [cells[index][0] for cells in by_ranks]
            rows.append([name, *errors])
        title = "Relative L2 error of the mean, loss scale 2^10:"
        print_table(["format", "2 ranks", "4 ranks", "8 ranks"], rows, title)

        by_scale = []
        for scale in (1.0, 2.0**16, 2.0**24):
            results = eight.run(measure_means, scale, elements)
            by_scale.append(results[0])
        rows = []
        for index, name in enumerate(NAMES):
            errors = [cells[index][1] for cells in by_scale]
            rows.append([name, *errors])
        title = "Eight ranks: error of the worst layer, and number of inf, by loss scale:"
        print_table(["format", "scale 1", "2^16", "2^24"], rows, title)

        rows = []
        for name, comm_format in COMM_FORMATS.items():
            plain_results = four.run(measure_sums, name, elements // 4, steps, False)
            fed_results = four.run(measure_sums, name, elements // 4, steps, True)
            plain, plain_small = plain_results[0]
            fed, fed_small = fed_results[0]
            share = comm_format.row_bytes(1 << 20) / (4 << 20)
            rows.append([name, f"{share:.3f}", plain, fed, plain_small, fed_small])
        title = f"Four ranks, error of the sum of {steps} steps, with feedback and without:"
        header = ["format", "bytes of fp32", "all", "all, fed back", "small", "small, fed back"]
        print_table(header, rows, title)


if __name__ == "__main__":
    run_command(main)

"""Parts of a weight on each rank in four layouts, and the ranks that see a NaN in one part.

    OMP_NUM_THREADS=1 python -m benchmarks.layout_parts

Four ranks hold a linear layer with four outputs. The loss of rank 0 is NaN in the first output, so
after the backward pass the gradient of the first row of the weight is NaN. The benchmark prints the
rows that each rank holds, and the ranks with a NaN in their part of the gradient. The figure
docs/images/concept_layouts.svg shows the same numbers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import print_table, run_command
from distamp.grads import to_local
from tests.ranks import RankPool

RANKS = 4
LAYOUTS = ("DDP", "FSDP2", "HSDP, 2 x 2", "tensor parallel")


def wrap(layer: nn.Module, layout: str) -> Any:
    """Return the layer in a layout of four ranks."""
    if layout == "DDP":
        return DistributedDataParallel(layer)
    if layout == "FSDP2":
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    elif layout == "HSDP, 2 x 2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(layer, mesh=mesh)
    else:
        parallelize_module(layer, init_device_mesh("cpu", (RANKS,)), ColwiseParallel())
    return layer


def measure_rank(layout: str) -> tuple[list[int], bool]:
    """Return the rows that this rank holds, and whether it sees a NaN in their gradients."""
    layer = nn.Linear(1, RANKS, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(RANKS).unsqueeze(1))
    model = wrap(layer, layout)
    weight: Tensor = next(model.parameters())
    local_weight = to_local(weight.detach())
    rows = local_weight.flatten().int().tolist()
    outputs = model(torch.ones(1, 1))
    losses = outputs.flatten()
    loss = losses.sum()
    if dist.get_rank() == 0:
        loss = loss + losses[0] * torch.nan
    loss.backward()
    local_grad = to_local(weight.grad)
    return rows, bool(local_grad.isnan().any())


def measure() -> dict[str, list[tuple[list[int], bool]]]:
    """Return the rows of each rank, and whether it sees the NaN, by layout."""
    results: dict[str, list[tuple[list[int], bool]]] = {}
    with RankPool(RANKS) as pool:
        for layout in LAYOUTS:
            results[layout] = pool.run(measure_rank, layout)
    return results


def main() -> None:
    """Print the parts of each rank."""
    rows: list[list[object]] = []
    for layout, ranks in measure().items():
        for rank, (parts, sees_nan) in enumerate(ranks):
            answer = "yes" if sees_nan else "no"
            rows.append([layout, rank, ", ".join(map(str, parts)), answer])
    print_table(["layout", "rank", "rows of the weight", "sees the NaN"], rows)


if __name__ == "__main__":
    run_command(main)

"""A NaN on one of two ranks, and the operation that made it.

    python examples/nan_on_one_rank.py

Two ranks train under DistributedDataParallel in bfloat16. A batch of rank 1 contains a row of
zeros, and a layer divides each row by its norm without an epsilon, so 0 / 0 is NaN. After the
reduction the gradients of both ranks are NaN. `find_first_nonfinite` runs the step again on both
ranks and names the operation, its module, the line and the rank.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import distamp


class UnitNorm(nn.Module):
    """Divide each row by its norm. A row of zeros becomes NaN, because there is no epsilon."""

    def forward(self, features: Tensor) -> Tensor:
        """Return rows of norm 1."""
        norm = features.norm(dim=-1, keepdim=True)
        return features / norm


def describe_origin() -> str:
    """Describe the origin of the NaN in a step with a row of zeros in the batch of rank 1."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(UnitNorm(), nn.Linear(8, 4)))
    inputs, targets = torch.randn(16, 8), torch.randint(4, (16,))
    if dist.get_rank() == 1:
        inputs[3] = 0.0

    def step() -> None:
        with distamp.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs)
        nn.functional.cross_entropy(logits.float(), targets).backward()

    return str(distamp.find_first_nonfinite(step, model))


def main_of_rank(rank: int, store: str) -> None:
    """Join the group, search, and print the answer on rank 0."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    origin = describe_origin()
    if rank == 0:
        print(origin)
    dist.destroy_process_group()


def main() -> None:
    """Start two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main_of_rank, args=(f"{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()

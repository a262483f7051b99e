"""A gradient that the training loop forgets to reduce, found by a comparison with one process.

    python examples/compare_gradients.py

Two ranks split the positions of each sequence, and sum their gradients. The first loop leaves out
the gate of the last layer, and the second one is right.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F  # noqa: N812

from distamp.report import compare_gradients

VOCABULARY, WIDTH, RANKS = 64, 32, 2


class Layer(nn.Module):
    """A feed-forward layer behind a norm, with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the gated output."""
        y = self.norm(x)
        return x + torch.sigmoid(self.gate(y)) * torch.tanh(self.up(y))


class Model(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each position."""
        return self.head(self.layers(self.tok(tokens)))


def compare(forgotten: str) -> None:
    """Compare a training loop that leaves some parameters out of its all-reduce."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model, reference_model = Model(), Model()
    tokens = torch.randint(VOCABULARY, (4, 16))
    targets = torch.randint(VOCABULARY, (4, 16))
    local_tokens = tokens.chunk(RANKS, dim=1)[dist.get_rank()]
    local_targets = targets.chunk(RANKS, dim=1)[dist.get_rank()]

    def step() -> None:
        logits = model(local_tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, local_targets.flatten(), reduction="sum")
        (loss / targets.numel()).backward()
        for name, param in model.named_parameters():
            if not forgotten or forgotten not in name:
                dist.all_reduce(param.grad, group=mesh.get_group())

    def reference_step() -> None:
        logits = reference_model(tokens).flatten(0, 1)
        F.cross_entropy(logits, targets.flatten()).backward()

    comparison = compare_gradients(step, model, reference_step, reference_model, mesh=mesh)
    if dist.get_rank() == 0:
        print(f"{comparison}\n")


def run_rank(rank: int, store: str) -> None:
    """Run both comparisons on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    compare(forgotten="3.gate")
    compare(forgotten="")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(os.path.join(folder, "store"),), nprocs=RANKS)


if __name__ == "__main__":
    main()

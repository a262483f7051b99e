"""Train a small byte model with gradients in each wire format, beside fp32's, over several seeds.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.comm_hooks_training
        [--formats fp32 fp16 int8] [--seeds 1 2 3 4] [--steps 300] [--ranks-per-host 2]

Every format of a seed starts from the same weights and sees the same text, Python's own source, in
the same order. The model is computed in fp32, so there is no loss scale.
"""

import argparse
import ast
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import markdown
from distamp import comm_hooks

FP32 = "fp32"
WIDTH, CONTEXT, BATCH = 96, 48, 8


class Bytes(nn.Module):
    """A byte-level transformer of 0.25 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(
                WIDTH, 4, 3 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        ]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 bytes (batch, time) to logits (batch, time, 256)."""
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.bytes(tokens) + self.place.weight
        for layer in self.layers:
            x = layer(x, src_mask=causal, is_causal=True)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=[FP32, "fp16", "int8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks-per-host", type=int)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    losses = {
        name: [trained(name, seed, given.steps, given.ranks_per_host) for seed in given.seeds]
        for name in given.formats
    }
    if dist.get_rank() == 0:
        rows = []
        for name, found in losses.items():
            beside = [mine / fp32 - 1 for mine, fp32 in zip(found, losses[FP32], strict=True)]
            spread = f"{mean(beside):+.2%} [{min(beside):+.2%}, {max(beside):+.2%}]"
            rows.append([name, *(f"{each:.4f}" for each in found), spread])
        seeds = [f"seed {seed}" for seed in given.seeds]
        print(markdown(["gradients in", *seeds, "beside fp32: mean [least, most]"], rows))
    dist.destroy_process_group()


def trained(name: str, seed: int, steps: int, ranks_per_host: int | None) -> float:
    """Train with gradients in one format; return the loss on text that was held out."""
    text = b"".join(each.read_bytes() for each in sorted(Path(ast.__file__).parent.glob("a*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    held_out = data[-(1 << 15) :]
    torch.manual_seed(seed)
    model = DistributedDataParallel(Bytes(), bucket_cap_mb=0.25)
    if name != FP32:
        comm_hooks.register(model, name, ranks_per_host=ranks_per_host)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for _ in range(steps):
        adam.zero_grad()
        _loss(
            model, data[: -(1 << 15)], torch.randint(1 << 16, (BATCH,), generator=draw)
        ).backward()
        adam.step()
    with torch.no_grad():
        return float(_loss(model.module, held_out, torch.arange(0, 1 << 14, CONTEXT)))


def _loss(model: nn.Module, data: Tensor, begins: Tensor) -> Tensor:
    rows = data[begins.unsqueeze(1) + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


if __name__ == "__main__":
    main()

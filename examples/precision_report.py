"""Reports of what a GPT and a conv net run in which dtype: tables, JSON and pictures.

    python examples/precision_report.py --model gpt --device cpu --dtype bfloat16 --out runs/report

One training step each (two microbatches, so that autocast's weight cache shows), with torch alone
for the tables and matplotlib for the pictures.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distamp import PrecisionReport, autocast, precision_report


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(c, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln2, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """A byte-level GPT with tied embedding."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, block: int = 128) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, width), nn.Embedding(block, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


class ConvNet(nn.Module):
    """Three stages of convolution, BatchNorm and ReLU, and a classifier."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        widths = [3, 16, 32, 64]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
                )
                for a, b in itertools.pairwise(widths)
            )
        )
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.stages(x).mean((2, 3)))


def gpt() -> tuple[nn.Module, torch.Tensor]:
    """For ``python -m distamp preflight examples.precision_report:gpt``."""
    return GPT(), torch.zeros(4, 128, dtype=torch.int64)


class Mistaken(nn.Module):
    """A conv net with three mistakes that only half precision punishes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ConvNet(classes=10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.net(x)
        scores = scores / (scores.abs().mean(-1, keepdim=True) + 1e-8)
        return scores.masked_fill(scores == 0, -1e9)


def mistaken() -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """For ``python -m distamp preflight examples.precision_report:mistaken``."""

    def loss_fn(scores: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(scores.sigmoid(), torch.zeros_like(scores))

    return Mistaken(), torch.zeros(8, 3, 32, 32), loss_fn


def report_of(name: str, device: str, dtype: torch.dtype) -> PrecisionReport:
    """One step of two microbatches of the model, recorded."""
    torch.manual_seed(0)
    model = (GPT() if name == "gpt" else ConvNet()).to(device)
    if name == "gpt":
        inputs = torch.randint(256, (4, 128), device=device)
        targets = torch.randint(256, (4 * 128,), device=device)
    else:
        inputs = torch.randn(8, 3, 32, 32, device=device)
        targets = torch.randint(10, (8,), device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    with precision_report(model) as report:
        with autocast(device, dtype=dtype):
            losses = [
                F.cross_entropy(model(inputs).flatten(0, -2), targets, reduction="mean")
                for _ in range(2)
            ]
        torch.stack(losses).sum().backward()
    optimizer.step()
    report.device = f"{device}, {dtype}".replace("torch.", "")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt", "conv"), default="gpt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--out", type=Path, default=Path("runs/report"))
    arguments = parser.parse_args()
    report = report_of(arguments.model, arguments.device, getattr(torch, arguments.dtype))
    print(report)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"precision_{arguments.model}"
    report.to_json(stem.with_suffix(".json"))
    print(f"\nThe report as JSON: {stem}.json")


if __name__ == "__main__":
    main()

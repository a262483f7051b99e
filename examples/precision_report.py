"""What a GPT runs in which dtype, as a table and as JSON.

    python examples/precision_report.py [--device cpu] [--dtype bfloat16] [--json report.json]
    python -m distamp preflight examples.precision_report:gpt
    python -m distamp preflight examples.precision_report:mistaken
    python -m distamp check examples.precision_report:loaded_in_bf16

The report is of one training step of two microbatches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distamp import PrecisionReport, autocast, precision_report


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(x).split(c, -1)
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln2, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
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

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


def gpt() -> tuple[nn.Module, Tensor]:
    """Return what preflight takes: a model and its input."""
    return GPT(), torch.zeros(4, 128, dtype=torch.int64)


def mistaken() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """Return a model, its input, and a loss that fp16 cannot compute."""

    def loss_fn(scores: Tensor) -> Tensor:
        return F.binary_cross_entropy(scores.sigmoid(), torch.zeros_like(scores))

    return nn.Linear(32, 10), torch.zeros(8, 32), loss_fn


def loaded_in_bf16() -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """Return what check takes: a step, of a model that was loaded in half precision by mistake."""
    model, inputs = GPT().bfloat16(), torch.zeros(4, 128, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with autocast("cpu", torch.bfloat16):
            loss = model(inputs).float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()

    return step, model, optimizer


def report_of(device: str, dtype: torch.dtype) -> PrecisionReport:
    """Record one step of two microbatches."""
    torch.manual_seed(0)
    model = GPT().to(device)
    inputs, targets = torch.randint(256, (2, 4, 128), device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    with precision_report(model) as report:
        with autocast(device, dtype=dtype):
            losses = [
                F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()) for _ in range(2)
            ]
        torch.stack(losses).sum().backward()
    optimizer.step()
    report.device = f"{device}, {dtype}".replace("torch.", "")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = report_of(options.device, getattr(torch, options.dtype))
    print(report)
    if options.json is not None:
        report.to_json(options.json)


if __name__ == "__main__":
    main()

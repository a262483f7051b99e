"""What a GPT runs in which dtype, as a table.

    python examples/precision_report.py
    python -m distamp preflight examples.precision_report:mistaken
    python -m distamp check examples.precision_report:loaded_in_bf16

The report is of one training step of two microbatches.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distamp import autocast, precision_report

WIDTH, LAYERS, HEADS, BLOCK = 128, 4, 4, 128


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln2, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """A byte-level GPT with tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.ln(self.h(x)))


def mistaken() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """Return what preflight takes: a model, its input, and a loss, which fp16 cannot compute."""

    def loss_fn(scores: Tensor) -> Tensor:
        return F.binary_cross_entropy(scores.sigmoid(), torch.zeros_like(scores))

    return nn.Linear(32, 10), torch.zeros(8, 32), loss_fn


def loaded_in_bf16() -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """Return what check takes: a step, of a model that was loaded in half precision by mistake."""
    model, inputs = GPT().bfloat16(), torch.zeros(4, BLOCK, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with autocast("cpu", torch.bfloat16):
            loss = model(inputs).float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()

    return step, model, optimizer


def main() -> None:
    torch.manual_seed(0)
    model = GPT()
    inputs, targets = torch.randint(256, (2, 4, BLOCK))
    optimizer = torch.optim.AdamW(model.parameters())
    with precision_report(model) as report:
        with autocast("cpu", dtype=torch.bfloat16):
            losses = [
                F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()) for _ in range(2)
            ]
        torch.stack(losses).sum().backward()
    optimizer.step()
    report.device = "cpu, bfloat16"
    print(report)


if __name__ == "__main__":
    main()

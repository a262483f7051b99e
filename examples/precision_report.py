"""A table of the dtypes in which the modules of a GPT run.

    python examples/precision_report.py
    python -m distamp preflight examples.precision_report:mistaken
    python -m distamp check examples.precision_report:loaded_in_bf16

The report covers one training step of two microbatches.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distamp import autocast, precision_report

WIDTH = 128
LAYERS = 4
HEADS = 4
BLOCK = 128


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.ln1(x)).chunk(3, -1)
        query = query.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key = key.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        value = value.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged_heads = attended.transpose(1, 2).flatten(2)
        x = x + self.proj(merged_heads)
        hidden = F.gelu(self.up(self.ln2(x)))
        return x + self.down(hidden)


class GPT(nn.Module):
    """A byte-level GPT. Its embedding is also the weight of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(256, WIDTH)
        self.pos = nn.Embedding(BLOCK, WIDTH)
        self.h = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = x + self.pos(positions)
        return self.head(self.ln(self.h(x)))


def mistaken() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """Return the arguments of preflight: a model, its input, and a loss that fails in fp16."""

    def loss_fn(scores: Tensor) -> Tensor:
        probabilities = scores.sigmoid()
        targets = torch.zeros_like(scores)
        return F.binary_cross_entropy(probabilities, targets)

    model = nn.Linear(32, 10)
    inputs = torch.zeros(8, 32)
    return model, inputs, loss_fn


def loaded_in_bf16() -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """Return the arguments of check for a model that was loaded in half precision by mistake."""
    model = GPT().bfloat16()
    inputs = torch.zeros(4, BLOCK, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with autocast("cpu", torch.bfloat16):
            logits = model(inputs)
            loss = logits.float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()

    return step, model, optimizer


def main() -> None:
    torch.manual_seed(0)
    model = GPT()
    inputs, targets = torch.randint(256, (2, 4, BLOCK))
    optimizer = torch.optim.AdamW(model.parameters())
    with precision_report(model) as report:
        losses = []
        with autocast("cpu", dtype=torch.bfloat16):
            for _ in range(2):
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
                losses.append(loss)
        torch.stack(losses).sum().backward()
    optimizer.step()
    report.device = "cpu, bfloat16"
    print(report)


if __name__ == "__main__":
    main()

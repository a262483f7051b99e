"""Custom autograd functions with `initialize`.

    python examples/one_call_functions.py

``custom_fwd`` and ``custom_bwd`` make backward compute as forward did. With ``cast_inputs`` the
function gets the dtype it was written for, here fp32, inside the region of O1; at O2 there is no
region and it gets what the model computes in, so a function that needs fp32 casts by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from next_byte import CONTEXT, batches, device
from torch import Tensor, nn

from distamp import custom_bwd, custom_fwd, initialize

STEPS = 30


class MatMul(torch.autograd.Function):
    """A matrix product that autocast sees inside, in forward and in backward."""

    @staticmethod
    @custom_fwd(device_type=device())
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight)

    @staticmethod
    @custom_bwd(device_type=device())
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.mm(weight.t()), x.t().mm(gradient)


class SumOfExp(torch.autograd.Function):
    """Adds up exponentials, which fp16 cannot hold beyond exp(11): written for fp32."""

    seen: torch.dtype | None = None

    @staticmethod
    @custom_fwd(device_type=device(), cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        SumOfExp.seen = x.dtype
        exponentials = x.exp()
        ctx.save_for_backward(exponentials)
        return exponentials.sum(1)

    @staticmethod
    @custom_bwd(device_type=device())
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (exponentials,) = ctx.saved_tensors
        return gradient[:, None] * exponentials


class Model(nn.Module):
    """Logits over the next byte, by a product that is a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.weight = nn.Parameter(torch.randn(CONTEXT * 16, 256) * 0.05)

    def forward(self, context: Tensor) -> Tensor:
        return MatMul.apply(self.embedding(context).flatten(1), self.weight)


def train(opt_level: str) -> tuple[list[float], torch.dtype, torch.dtype | None]:
    """Train; return the losses, the logits' dtype, and the dtype that `SumOfExp` was given."""
    torch.manual_seed(0)
    model = Model().to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-4)
    amp = initialize(model, optimizer, opt_level)
    losses = []
    for context, following in batches(STEPS):
        amp.zero_grad()
        with amp.autocast():
            logits = amp.model(context.to(device()))
            normaliser = SumOfExp.apply(logits).float().log()
        answer = following.to(device())
        loss = (normaliser - logits.float().gather(1, answer[:, None])[:, 0]).mean()
        amp.backward(loss)
        amp.step()
        losses.append(loss.item())
    return losses, logits.dtype, SumOfExp.seen


def main() -> None:
    for level in ("O0", "O1", "O2"):
        losses, product, summed = train(level)
        print(
            f"{level}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, model returned {product}, "
            f"exponentials summed in {summed}"
        )


if __name__ == "__main__":
    main()

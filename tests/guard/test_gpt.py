"""A GPT in bf16 under FSDP2 x tensor parallel on four ranks, with a NaN on one rank in one step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from distamp import StepGuard
from tests.ranks import mesh
from tests.scaler.steps import NAN

WIDTH, TOKENS, BAD = 8, 11, 1


class GPT(nn.Module):
    """An embedding, attention of two heads, an MLP and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.embed(tokens)
        y = self.norm(x)
        heads = [
            project(y).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))


def _sharded() -> Any:
    torch.manual_seed(0)
    model, both = GPT(), mesh((2, 2), ("data", "tensor"))
    plan = {
        **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()),
        **dict.fromkeys(("out", "down"), RowwiseParallel()),
    }
    parallelize_module(model, both["tensor"], plan)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=both["data"], mp_policy=policy)


def _train(how: str, fused: bool, **calls: Any) -> list[Tensor]:
    """Four steps; in one of them a shard of one gradient is NaN on rank 3, or it is left out."""
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    guard = StepGuard()
    data = dist.get_rank() // 2
    for number in range(4):
        draw = torch.Generator().manual_seed(10 * number + data)
        tokens = torch.randint(TOKENS, (2, 7), generator=draw)
        if how == "left out" and number == BAD:
            continue
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if how != "left out" and number == BAD and dist.get_rank() == 3:
            model.up.weight.grad.to_local().view(-1)[0] = NAN
        if how == "torch":  # whose clip raises for tensors of two meshes
            optimizer.step()
            continue
        guard.step_all([optimizer], **calls)
        assert guard.stepped(optimizer) is not (how == "guard" and number == BAD)
        guard.update()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def _compared(fused: bool, calls: dict[str, Any]) -> tuple[bool, bool]:
    ours, without, torchs = (_train(how, fused, **calls) for how in ("guard", "left out", "torch"))
    same = all(torch.equal(a, b) for a, b in zip(ours, without, strict=True))
    return same, all(bool(p.isnan().any()) for p in torchs)


def _mesh_of(parameter: Tensor) -> Any:
    return getattr(parameter, "device_mesh", None)


# The plan leaves out norms and head, which both ranks of a tensor group have.
BY_NORM = {"max_norm": 1.0, "sharded": _mesh_of}


@pytest.mark.parametrize(("fused", "calls"), [(False, {}), (True, BY_NORM)])
def test_a_gpt_goes_on_as_if_the_bad_step_had_been_left_out(ranks4, fused, calls):
    assert ranks4.run(_compared, fused, calls, timeout=120) == [(True, True)] * 4

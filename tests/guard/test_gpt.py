"""A GPT in bf16 under FSDP2 x tensor parallel on four ranks, with a NaN on one rank in one step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distamp import StepGuard
from tests.on_ranks import on_ranks
from tests.ranks import mesh
from tests.report.setups import Net, parallel, sharded
from tests.scaler.steps import NAN

BAD = 1


def _train(how: str, fused: bool, **calls: Any) -> list[Tensor]:
    """Four steps; in one of them a shard of one gradient is NaN on rank 3, or it is left out."""
    both = mesh((2, 2), ("data", "tensor"))
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model: Any = sharded(parallel(Net(), both["tensor"]), both["data"], **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    guard = StepGuard()
    for number in range(4):
        draw = torch.Generator().manual_seed(10 * number + dist.get_rank() // 2)
        tokens = torch.randint(32, (2, 7), generator=draw)
        if how == "left out" and number == BAD:
            continue
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if how != "left out" and number == BAD and dist.get_rank() == 3:
            model.blocks[0].up.weight.grad.to_local().view(-1)[0] = NAN
        if how == "torch":  # whose clip raises for tensors of two meshes
            optimizer.step()
            continue
        guard.step_all([optimizer], **calls)
        assert guard.step_was_taken(optimizer) is not (how == "guard" and number == BAD)
        guard.update()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@on_ranks(4)
@pytest.mark.parametrize("by_norm", [False, True])
def test_a_gpt_goes_on_as_if_the_bad_step_had_been_left_out(by_norm):
    # The plan leaves out attention and norms, which both ranks of a tensor group have.
    calls = (
        {"max_norm": 1.0, "shard_group_fn": lambda p: getattr(p, "device_mesh", None)}
        if by_norm
        else {}
    )
    ours, without, torchs = (
        _train(how, by_norm, **calls) for how in ("guard", "left out", "torch")
    )
    assert all(map(torch.equal, ours, without))
    assert any(bool(p.isnan().any()) for p in torchs)

"""FSDP2 after an exchange that failed: torch would train on without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from distamp import comm_hooks
from distamp.comm_hooks import formats
from tests.comm_hooks.training import inputs, mlp

WIDTHS = (32, 32, 32, 32)


def _fails(wire: str) -> tuple[list[str], bool]:
    """What four passes say, of which the first fails, and whether an optimizer has gradients."""
    model: Any = mlp(*WIDTHS)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    comm_hooks.register(model, wire)
    parameters = list(model.parameters())
    encode = formats.encode

    def broken(*args: Any, **kwargs: Any) -> Any:
        formats.encode = encode
        raise RuntimeError("out of memory")

    model(inputs(9, WIDTHS[0])).square().mean().backward()
    model.zero_grad()
    if dist.get_rank() == 1:
        formats.encode = broken
    said = []
    for step in range(4):
        with pytest.raises(RuntimeError) as raised:
            model(inputs(step, WIDTHS[0])).square().mean().backward()
        said.append(str(raised.value))
    return said, any(parameter.grad is not None for parameter in parameters)


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_every_later_pass_raises_too(new_ranks, wire):
    for said, reduced in new_ranks(2, group_timeout=60).run(_fails, wire):
        assert not reduced
        assert len(set(said)) == 1, "the first failure, again"

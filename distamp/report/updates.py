"""Which updates a step makes that half precision weights would lose: why masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distamp.module_names import module_names
from distamp.report.following import local_of

__all__ = ["lost_updates"]


@torch.no_grad()
def lost_updates(
    step: Callable[[], Any], model: nn.Module, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Run one step; return by module the share of its weights whose update ``dtype`` would lose.

    An update below half an ulp of its weight leaves a weight of that dtype as it is. It is measured
    on float32 weights, so before a model is cast; where they are sharded, on this rank's part. An
    update of exactly 0 does not count. It takes the memory of a copy of the model.

    Args:
        step: Takes nothing; runs forward, backward and optimizer, as the loop does.
        model: That it trains.
        dtype: ``torch.bfloat16`` or ``torch.float16``: in which the weights would be.

    Returns:
        A share from 0 to 1 for each module with parameters that moved.
    """
    names = module_names(model)
    before = {id(p): local_of(p).clone() for p in model.parameters()}
    with torch.enable_grad():
        step()
    shares: dict[str, float] = {}
    for module, name in names.items():
        lost = moved = 0
        for parameter in module.parameters(recurse=False):
            old, new = before[id(parameter)].float(), local_of(parameter).float()
            # frexp's mantissas are from 1/2 to 1.
            ulp = torch.finfo(dtype).eps * torch.exp2(torch.frexp(old).exponent.float() - 1)
            update = (new - old).abs()
            moved += int((update > 0).sum())
            lost += int(((update > 0) & (update < ulp / 2)).sum())
        if moved:
            shares[name] = lost / moved
    return shares

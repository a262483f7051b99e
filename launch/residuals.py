"""What rounding took from gradients on their way, in checkpoints that any number of ranks reads.

Each rank has residuals of its own, and goes on with them. Where there are more or fewer ranks than
before, each takes over from one or several, or from none, weighed so that they come to the same in
the mean. Checkpoints of before residuals had this name are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distamp.comm_hooks import CommHookState
from distamp.initialize import Amp
from launch.ranks import Ranks

__all__ = ["give_back", "places", "residuals"]

_NAME, _FORMER_NAME = "residuals", "owed"

# By parameter: the tensors of a checkpoint in which one rank's share of it lies.
Places = dict[str, dict[str, Tensor]]


def residuals(amp: Amp, ranks: Ranks) -> dict[str, Tensor]:
    """Return what rounding took from this rank's gradients, by the names a checkpoint has for it.

    As `CommHookState.state_dict` has it: fp32 of shape (2, numel).

    Nothing where gradients are sent without error feedback, or as they are.
    """
    found: dict[str, Tensor] = {}
    for hook in _with_feedback(amp):
        kept = hook.state_dict()["residuals"]
        found |= {_place(ranks.rank, name): tensor for name, tensor in kept.items()}
    return found


def places(amp: Amp, model: nn.Module, manifest: Mapping[str, Any], ranks: Ranks) -> Places:
    """Return tensors to read into, by parameter and name: what this rank takes over.

    Args:
        amp: What was made for ``model``.
        model: As ``residuals`` had it, not wrapped.
        manifest: ``"residuals"`` names the parameters that have any, and ``"settings"`` how many
            ranks there were.
        ranks: Those that go on.
    """
    if not any(_with_feedback(amp)):
        return {}
    kind = _NAME if _NAME in manifest else _FORMER_NAME
    named = dict(model.named_parameters())
    before = range(ranks.rank, manifest["settings"]["ranks"], ranks.world_size)
    return {
        name: {_place(rank, name, kind): torch.zeros(2, named[name].numel()) for rank in before}
        for name in manifest.get(kind, [])
    }


def give_back(amp: Amp, read: Places, manifest: Mapping[str, Any], ranks: Ranks) -> None:
    """Let the hook go on with what was read into the tensors that ``places`` returned."""
    before = manifest["settings"]["ranks"]
    for hook in _with_feedback(amp) if read else ():
        if before == ranks.world_size:
            found = {name: tensor for name, (tensor,) in _values(read)}
        else:
            found = {name: _merged(tensors, before, ranks) for name, tensors in _values(read)}
        hook.load_state_dict({**hook.state_dict(), "residuals": found})


def _values(read: Places) -> list[tuple[str, list[Tensor]]]:
    return [(name, [*tensors.values()]) for name, tensors in read.items() if tensors]


def _merged(tensors: list[Tensor], before: int, ranks: Ranks) -> Tensor:
    """Return the sum of several ranks' shares, as one rank's own gradient has it."""
    mine, owned = torch.stack(tensors).sum(0)
    # The owner of a part of the mean has it alone; a rank's own gradient is one of so many.
    mine = (mine + before * owned) * (ranks.world_size / before)
    return torch.stack([mine, torch.zeros_like(mine)])


def _with_feedback(amp: Amp) -> list[CommHookState]:
    return [hook for hook in amp.comm_hooks if hook.wire.needs_error_feedback]


def _place(rank: int, name: str, kind: str = _NAME) -> str:
    return f"{kind}.{rank}.{name}"

"""Masters through torch's checkpoint functions, which know an optimizer by the model's names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from distamp.errors import StageError
from distamp.scaler import MasterParameters
from tests.ranks import RankPool, mesh

FULL = StateDictOptions(full_state_dict=True)


def trained(kind: str, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """An fp16 model and masters that have moved away from its rounding."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).half()
    if kind == "fsdp1":
        over = mesh((dist.get_world_size(),), ("shard",))
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=cpu, device_mesh=over
        )
    elif kind == "fsdp2":
        fully_shard(model, mesh=mesh((dist.get_world_size(),), ("shard",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    masters = MasterParameters(optimizer)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 6).half()).float().square().mean().backward()
        optimizer.step()
    return model, optimizer, masters


def saved(model: nn.Module, masters: MasterParameters) -> dict[str, Any]:
    # Copies: two optimizers that load the same tensors would share them.
    return copy.deepcopy(get_optimizer_state_dict(model, masters.for_checkpoint(), options=FULL))


def _there_and_back(kind: str) -> tuple[bool, bool, bool]:
    """Whether masters are saved by name, and come back in another model that steps alike."""
    model, optimizer, masters = trained(kind, seed=0, steps=3)
    state = saved(model, masters)
    names = all(
        torch.equal(state["state"][n]["master"].half(), _whole(p.detach()))
        for n, p in _named(model)
    )
    fp32 = any(
        (kept["master"] != kept["master"].half().float()).any() for kept in state["state"].values()
    )
    other, its_optimizer, its_masters = trained(kind, seed=1, steps=0)
    set_optimizer_state_dict(other, its_masters.for_checkpoint(), state, options=FULL)
    for each, stepped in ((model, optimizer), (other, its_optimizer)):
        torch.manual_seed(9)
        each(torch.randn(4, 6).half()).float().square().mean().backward()
        stepped.step()
    ours, theirs = saved(model, masters)["state"], saved(other, its_masters)["state"]
    alike = all(torch.equal(ours[n][key], theirs[n][key]) for n in ours for key in ours[n])
    return names, bool(fp32), alike


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    if not isinstance(model, FullyShardedDataParallel):
        return list(model.named_parameters())
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return [
            (n.replace("_fsdp_wrapped_module.", ""), p.detach().clone())
            for n, p in model.named_parameters()
        ]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("kind", ["plain", "fsdp1", "fsdp2"])
def test_masters_and_state_come_back_by_name(ranks2: RankPool, kind: str):
    assert ranks2.run(_there_and_back, kind) == [(True, True, True)] * 2


def test_state_that_no_step_has_made_yet_is_made_to_load_into():
    model, _, masters = trained("plain", seed=0, steps=0)
    weights = [p.clone() for p in model.parameters()]
    state = saved(model, masters)["state"]
    assert all(
        kept.keys() == {"step", "exp_avg", "exp_avg_sq", "master"} for kept in state.values()
    )
    assert all(kept["step"] == 0 for kept in state.values())
    assert all(map(torch.equal, model.parameters(), weights))


def test_settings_of_groups_come_back_and_masters_stay_where_they_were():
    _, optimizer, masters = trained("plain", seed=0, steps=1)
    view = masters.for_checkpoint()
    state = view.state_dict()
    state["param_groups"][0]["lr"] = 0.125
    kept = list(optimizer.param_groups[0]["params"])
    view.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], kept, strict=True))


def test_it_does_not_train():
    _, _, masters = trained("plain", seed=0, steps=1)
    with pytest.raises(StageError, match="step the optimizer itself"):
        masters.for_checkpoint().step()


def test_a_state_of_other_parameters_is_refused():
    _, _, masters = trained("plain", seed=0, steps=1)
    state = masters.for_checkpoint().state_dict()
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="the state is of 3 parameters and the optimizer holds 4"):
        masters.for_checkpoint().load_state_dict(state)


def _refused() -> str:
    model = nn.Linear(4, 4).half()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    try:
        MasterParameters(optimizer).for_checkpoint()
    except ValueError as error:
        return str(error)
    return "was not refused"


def test_a_wrapper_that_divides_its_state_is_refused(ranks2: RankPool):
    texts = ranks2.run(_refused)
    assert all(text.startswith("ZeroRedundancyOptimizer divides its state") for text in texts)

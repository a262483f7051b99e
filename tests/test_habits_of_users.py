"""Mistakes in the arguments of one rank, which a job script makes easily.

A script that reads a configuration file, the time or the host name may pass other arguments on one
rank. Every rank has to raise, because a rank that goes on alone leaves the others in a collective.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import DistGradScaler, RankMismatchError, StepGuard
from distamp.errors import ConfigError
from tests.on_ranks import on_ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_ddp() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(make_model())
    return model, torch.optim.AdamW(model.parameters())


@on_ranks(2)
def test_a_level_that_differs_between_ranks_raises_on_every_rank():
    """fp32 and bf16 both have a guard, so no later message would show the difference."""
    model, optimizer = make_ddp()
    level = "bf16" if dist.get_rank() == 1 else "fp32"

    with pytest.raises(RankMismatchError, match=r"level=.*\n  rank 0: level='fp32'"):
        distamp.initialize(model, optimizer, level)


@on_ranks(2)
@pytest.mark.parametrize(
    ("arguments", "error_class", "text"),
    [
        pytest.param({"level": "bf17"}, ConfigError, "bf17", id="a level that does not exist"),
        pytest.param({"levels": "bf16"}, TypeError, "levels", id="an argument that does not exist"),
        pytest.param({"optimizers": "AdamW"}, TypeError, "optimizers must be", id="a wrong type"),
        pytest.param(
            {"level": "bf16", "master_weights": "half"}, ConfigError, "half", id="a wrong override"
        ),
    ],
)
def test_arguments_that_one_rank_refuses_raise_on_every_rank(arguments, error_class, text):
    model, optimizer = make_ddp()
    call: dict[str, Any] = {"optimizers": optimizer, "level": "bf16"}
    if dist.get_rank() == 1:
        call |= arguments
    with pytest.raises(error_class, match=text) as raised:
        distamp.initialize(model, **call)
    is_of_another_rank = "(raised on rank 1; every rank stops here)" in str(raised.value)
    assert is_of_another_rank is (dist.get_rank() == 0)


@on_ranks(2)
def test_a_hook_on_one_rank_raises_on_every_rank():
    """The rank with a hook would wait in its registration."""
    model, optimizer = make_ddp()
    comm_hook = "fp16" if dist.get_rank() == 1 else None

    with pytest.raises(RankMismatchError, match=r"comm_hook=.*\n  rank 0: comm_hook=None"):
        distamp.initialize(model, optimizer, "bf16", comm_hook=comm_hook)


@on_ranks(2)
def test_a_rank_that_trains_nothing_may_have_no_hook():
    frozen = make_model().requires_grad_(False)
    trained = nn.Linear(4, 2)
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    if dist.get_rank() == 0:
        amp = distamp.initialize(frozen, [], "bf16")
    else:
        model = DistributedDataParallel(trained, process_group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        amp = distamp.initialize(model, optimizer, "bf16", comm_hook="fp16")
        amp.backward(amp.model(torch.ones(2, 4)).sum())

    assert amp.step()


@on_ranks(2)
def test_a_path_for_each_rank_is_refused_before_anything_is_written(tmp_path):
    model = make_model()
    fully_shard(model)
    amp = distamp.initialize(model, torch.optim.AdamW(model.parameters()), "fp32")
    path = tmp_path / f"checkpoint-{dist.get_rank()}"

    with pytest.raises(ConfigError, match=r"different paths(.|\n)*rank 0: path=.*checkpoint-0"):
        amp.save(path)
    assert not path.exists()


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, {"max_norm": 1.0}, {"skip_if": True}])
@pytest.mark.parametrize("guard_class", [StepGuard, DistGradScaler])
def test_step_all_without_an_optimizer_raises_on_every_rank(guard_class, settings):
    """A rank without an optimizer would send no message, and the others would wait for it."""
    model, optimizer = make_ddp()
    guard = StepGuard() if guard_class is StepGuard else DistGradScaler("cpu")
    guard.scale(model(torch.ones(2, 4)).sum()).backward()
    optimizers: list[Any] = [] if dist.get_rank() == 1 else [optimizer]

    with pytest.raises(TypeError, match="at least one optimizer"):
        guard.step_all(optimizers, **settings)

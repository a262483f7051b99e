"""Mistakes in the arguments of one rank, which a job script makes easily.

A script that reads a configuration file, the time or the host name may pass different arguments on
one rank. Every rank has to raise, because a rank that waits alone in a collective hangs.
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


def check_that_every_rank_refuses(error_class: type[Exception], text: str, **mistake: Any) -> None:
    """Check that all ranks raise if rank 1 calls initialize with other arguments."""
    model, optimizer = make_ddp()
    arguments: dict[str, Any] = {"optimizers": optimizer, "level": "bf16"}
    rank = dist.get_rank()
    if rank == 1:
        arguments.update(mistake)
    with pytest.raises(error_class, match=text) as raised:
        distamp.initialize(model, **arguments)
    message = str(raised.value)
    if rank == 0:
        assert "(raised on rank 1; every rank stops here)" in message
    else:
        assert "raised on rank" not in message


@on_ranks(2)
def test_a_level_that_does_not_exist_raises_on_every_rank():
    check_that_every_rank_refuses(ConfigError, "bf17", level="bf17")


@on_ranks(2)
def test_an_argument_that_does_not_exist_raises_on_every_rank():
    check_that_every_rank_refuses(TypeError, "levels", levels="bf16")


@on_ranks(2)
def test_an_argument_of_another_type_raises_on_every_rank():
    check_that_every_rank_refuses(TypeError, "optimizers must be", optimizers="AdamW")


@on_ranks(2)
def test_an_override_that_does_not_exist_raises_on_every_rank():
    check_that_every_rank_refuses(ConfigError, "half", master_weights="half")


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

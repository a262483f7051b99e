"""What a month-long run would find: failures that say what failed, copies, hooks that come late."""

import copy
import io
import os
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from distamp import comm_hooks
from distamp.comm_hooks import formats
from tests.comm_hooks.training import gradients, inputs, mlp, wrapped

WIDTHS = (31, 97, 64, 5)


def _fails(how: str, buckets: int) -> str:
    """What the backward pass says where rank 1 fails, or is gone, in its third step."""
    model = DistributedDataParallel(mlp(*WIDTHS), bucket_cap_mb=0.002 if buckets > 1 else 25)
    comm_hooks.register(model, "fp16")
    message = ""

    def broken(*args: Any, **kwargs: Any) -> Any:
        if how == "dies":
            os._exit(3)
        raise RuntimeError("out of memory")

    for step in range(5):
        if step == 2 and dist.get_rank() == 1:
            formats.encode = broken
        if step == 2 and dist.get_rank() == 2 and how == "one hears late":
            time.sleep(1)
        try:
            model(inputs(step, WIDTHS[0])).square().mean().backward()
        except RuntimeError as error:
            message = f"in pass {step}: {error}"
            break
    with pytest.raises(RuntimeError):
        model(inputs(0, WIDTHS[0])).square().mean().backward()
    return message


@pytest.mark.parametrize("buckets", [1, 6])
@pytest.mark.parametrize("how", ["raises", "one hears late"])
def test_an_exchange_that_fails_on_one_rank_is_raised_on_every_rank(new_ranks, how, buckets):
    found = new_ranks(3, group_timeout=120).run(_fails, how, buckets)
    assert all(message.startswith("in pass 2: ") for message in found)
    assert "out of memory" in found[1]


def test_where_a_rank_is_gone_the_others_raise(new_ranks):
    found = new_ranks(4, group_timeout=60).run(_fails, "dies", 6, may_die=[1])
    assert all(found[rank].startswith("in pass 2: ") for rank in (0, 2, 3))


def _copied(how: str) -> tuple[list[str], float, int]:
    """What was warned of, and whether a copy sends what it says once it is registered."""
    model, _ = wrapped(mlp(*WIDTHS), "int8")
    model(inputs(0, WIDTHS[0])).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "AveragedModel":
            twin = AveragedModel(model).module
        elif how == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
    warned = [str(each.message) for each in caught if each.category is UserWarning]
    again = comm_hooks.register(twin, "int8")
    for each in (model, twin):
        each.zero_grad()
        each(inputs(1, WIDTHS[0])).square().mean().backward()
    error = (gradients(model) - gradients(twin)).norm() / gradients(model).norm()
    return warned, error.item(), again.stats().exchanges


@pytest.mark.parametrize("how", ["deepcopy", "AveragedModel", "save"])
def test_a_model_with_a_hook_can_be_copied(ranks2, how):
    for warned, error, exchanges in ranks2.run(_copied, how):
        (message,) = set(warned)
        assert "uncompressed" in message
        assert 'distamp.comm_hooks.register(model, "int8")' in message
        assert error < 2e-2
        assert exchanges > 0


def _late() -> tuple[float, float]:
    """A hook that is registered, and then one that is loaded, after backward passes."""
    model, _ = wrapped(mlp(*WIDTHS), None)
    model(inputs(0, WIDTHS[0])).square().mean().backward()
    state = comm_hooks.register(model, "int8")
    for step in range(3):
        model(inputs(step, WIDTHS[0])).square().mean().backward()
    saved, ends = state.state_dict(), []
    for _ in range(2):
        model.zero_grad()
        model(inputs(7, WIDTHS[0])).square().mean().backward()
        ends.append(gradients(model))
        state.load_state_dict(saved)
    return (ends[0] - ends[1]).norm().item(), ends[0].norm().item()


def test_a_hook_is_registered_and_loaded_between_any_two_backward_passes(ranks2):
    for difference, whole in ranks2.run(_late):
        assert difference == 0.0
        assert whole > 0

"""Refusals of `Amp.step` on every rank, although one rank alone may have caused them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize
from distamp.errors import CallOrderError, ConfigError
from distamp.levels import Amp
from tests.levels.cells import wrapped
from tests.on_ranks import on_ranks
from tests.ranks import mesh, subgroup

# -- a last backward pass under no_sync() ----------------------------------------------------------


def amp_in(layout: str, level: str = "bf16") -> Amp:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    if layout == "groups of DDP":
        groups = [subgroup((0, 1)), subgroup((2, 3))]
        model = DistributedDataParallel(model, process_group=groups[dist.get_rank() // 2])
    else:
        model = wrapped(model, layout, None, "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"init_scale": 64.0} if level == "fp16" else {}
    return initialize(model, optimizer, level, **settings)


def backward(amp: Amp) -> None:
    with amp.autocast():
        loss = amp.model(torch.ones(4, 6)).float().square().mean()
    amp.backward(loss)


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "level", "max_norm"),
    [
        ("DDP", "fp16", 1.0),
        ("FSDP2", "bf16", 1.0),
        pytest.param("DDP", "bf16", None, marks=pytest.mark.slow),
        pytest.param("FSDP1", "bf16", 1.0, marks=pytest.mark.slow),
        pytest.param("FSDP2", "fp16", None, marks=pytest.mark.slow),
        pytest.param("HSDP", "bf16", None, marks=pytest.mark.slow),
    ],
)
def test_a_step_after_a_pass_under_no_sync_raises_and_the_next_window_is_right(
    layout, level, max_norm
):
    amp = amp_in(layout, level)
    backward(amp)
    with amp.no_sync():
        backward(amp)
    with pytest.raises(CallOrderError, match=r"after a backward pass under amp\.no_sync\(\)"):
        amp.step(max_norm=max_norm)
    amp.zero_grad()
    with amp.no_sync():
        backward(amp)
    backward(amp)
    assert amp.step(max_norm=max_norm)


@on_ranks(4)
def test_a_step_raises_also_on_ranks_that_have_reduced_their_gradients():
    """Two groups of replicas, as two pipeline stages have them; the second group is wrong."""
    amp = amp_in("groups of DDP")
    wrong = dist.get_rank() >= 2
    with amp.no_sync() if wrong else nullcontext():
        backward(amp)
    with pytest.raises(CallOrderError, match=r"under amp\.no_sync\(\)"):
        amp.step()


@on_ranks(2)
def test_the_forward_pass_decides_whether_ddp_reduces():
    amp = amp_in("DDP")
    inputs = torch.ones(4, 6)
    with amp.no_sync():
        loss = amp.model(inputs).square().mean()
    amp.backward(loss)
    with pytest.raises(CallOrderError, match=r"under amp\.no_sync\(\)"):
        amp.step()
    amp.zero_grad()
    loss = amp.model(inputs).square().mean()
    with amp.no_sync():
        amp.backward(loss)  # DDP reduces it
    assert amp.step()


def test_without_a_wrapper_nothing_is_left_unreduced():
    model = nn.Linear(6, 4)
    amp = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with amp.no_sync():
        backward(amp)
    assert amp.step()


# -- a parameter that trains since initialize ------------------------------------------------------


def half_base(level: str, dtype: torch.dtype, wrap: Callable[[Any], Any]) -> Amp:
    """Return an Amp over a model with its first layer frozen in half precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].to(dtype).requires_grad_(False)
    model = wrap(cast_model(model, level))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"init_scale": 64.0} if level == "fp16" else {}
    return initialize(model, optimizer, level, **settings)


def train(amp: Amp) -> bool:
    amp.zero_grad()
    with amp.autocast():
        loss = amp.model(torch.ones(4, 16)).float().square().mean()
    amp.backward(loss)
    return bool(amp.step())


def first_layer(amp: Amp) -> nn.Module:
    return next(module for module in amp.model.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("bf16", torch.float16),
        ("fp16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8", torch.bfloat16),
    ],
)
def test_a_base_that_thaws_in_half_precision_is_refused_as_initialize_refuses_it(level, dtype):
    if level == "fp8":
        pytest.importorskip("torchao")
    amp = half_base(level, dtype, lambda model: model)
    assert train(amp)
    first_layer(amp).requires_grad_(True)
    with pytest.raises(ConfigError, match=rf"{level} trains float32.*{dtype}, first 0"):
        train(amp)


def test_at_bf16_o2_a_base_that_thaws_gets_masters():
    amp = half_base("bf16-O2", torch.bfloat16, lambda model: model)
    assert train(amp)
    weight = first_layer(amp).requires_grad_(True).weight
    before = weight.detach().clone()
    assert train(amp)
    assert not torch.equal(before, weight)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["plain", "DDP"])
def test_a_layer_that_thaws_on_one_rank_is_refused_on_both(layout):
    """One pipeline stage may thaw alone. DDP reduces parameters that were trained at its start."""
    amp = half_base("bf16", torch.bfloat16, lambda model: wrapped(model, layout, None, ""))
    assert train(amp)
    if dist.get_rank() == 0:
        first_layer(amp).requires_grad_(True)
    with pytest.raises(ConfigError, match=r"float32 parameters.*first (module\.)?0"):
        train(amp)


@on_ranks(2)
def test_shards_that_thaw_are_refused():
    """Each layer is a unit, because one is in half precision."""

    def shard(model: Any) -> Any:
        over = mesh((2,), ("shard",))
        fully_shard(model[0], mesh=over)
        return fully_shard(model, mesh=over)

    amp = half_base("bf16", torch.bfloat16, shard)
    assert train(amp)
    first_layer(amp).requires_grad_(True)
    with pytest.raises(ConfigError, match=r"float32 parameters.*first 0"):
        train(amp)

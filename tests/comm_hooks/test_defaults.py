"""torch's default device and dtype are the user's: hooks take neither for their own tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from tests.comm_hooks.training import inputs, mlp

# Widths of which blocks have to be split where a parameter begins.
WIDTHS = (31, 97, 64, 5)


@contextlib.contextmanager
def _default(what: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_device("meta" if what == "device" else None)
    torch.set_default_dtype(torch.float64 if what == "dtype" else before)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def _wrapped(wrapper: str, net: nn.Module) -> nn.Module:
    if wrapper == "DDP":
        return DistributedDataParallel(net, bucket_cap_mb=0.02)
    if wrapper == "FSDP1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    return fully_shard(net)


def _trained(wrapper: str, wire: str, what: str) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    """Parameters, residuals and counts after five steps, one of which overflows on every rank."""
    model = _wrapped(wrapper, mlp(*WIDTHS))
    xs = [inputs(step, WIDTHS[0]) for step in range(5)]
    scaler = DistGradScaler("cpu", init_scale=4.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    with _default(what):
        state = comm_hooks.register(model, wire)
        scaler.attach(state)
        for step, x in enumerate(xs):
            sgd.zero_grad()
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(model(x).square().mean() * factor).backward()
            scaler.step(sgd)
            scaler.update()
            if step == 2:
                state.load_state_dict(state.state_dict())
        stats, residuals = state.stats(), state.state_dict()["residuals"]
    local = [getattr(each, "to_local", each.detach)().detach() for each in model.parameters()]
    return local, residuals, (stats.exchanges, dict(stats.bytes_sent))


@pytest.mark.parametrize("what", ["device", "dtype"])
@pytest.mark.parametrize(
    ("wrapper", "wire"),
    [*(("DDP", wire) for wire in comm_hooks.WIRE_FORMATS), ("FSDP1", "fp16"), ("FSDP2", "fp16")],
)
def test_other_defaults_change_no_bit(ranks, wrapper, wire, what):
    # Of four ranks, each owns a part; two send everything to each other.
    for size in (2, 4):
        expected = ranks(size).run(_trained, wrapper, wire, "none")
        found = ranks(size).run(_trained, wrapper, wire, what)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

"""Odd parameters: none, complex, small among large; torch's defaults."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from tests.comm_hooks.training import (
    BOUNDS,
    agreed,
    full_gradients,
    gradients,
    inputs,
    mlp,
    wrapped,
)


class _Odd(nn.Module):
    """A complex parameter, a real one, and one without elements in a bucket of its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(40, 9, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(9))
        self.nothing = nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias + self.nothing.sum()


def _odd(wire: str) -> tuple[float, bool]:
    found = []
    for each in (None, wire):
        model, _ = wrapped(_Odd(), each)
        for step in range(3):
            model(inputs(step, 40)).sum().backward()
        weight = torch.view_as_real(model.module.weight.grad)
        found.append(torch.cat([weight.flatten(), model.module.bias.grad]))
    true, mine = found
    return ((mine - true).norm() / true.norm()).item(), agreed(mine)


@pytest.mark.parametrize("wire", list(comm_hooks.WIRE_FORMATS))
def test_complex_gradients_and_buckets_without_elements_are_exchanged(ranks4, wire):
    for error, same in ranks4.run(_odd, wire):
        assert error <= BOUNDS[wire]
        assert same


class _Uneven(nn.Module):
    """Weights, and biases between them whose gradients are so much smaller; each is given."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        shapes = [(72, 67), (64,)] * 6
        self.both = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.factors = [1.0, ratio] * 6

    def given(self, rank: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(100 + rank)
        pairs = zip(self.both, self.factors, strict=True)
        return [torch.randn(p.shape, generator=draw) * factor for p, factor in pairs]

    def forward(self, given: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.both, given, strict=True)]).sum()


def _worst(wrapper: str, wire: str, ranks_per_host: int) -> float:
    """The largest relative error of a parameter at any ratio."""
    rank, size, worst = dist.get_rank(), dist.get_world_size(), 0.0
    for power in range(1, 8):
        net = _Uneven(10.0**-power)
        everyone = [net.given(each) for each in range(size)]
        sizes = [each.numel() for each in everyone[0]]
        model: Any = DistributedDataParallel(net) if wrapper == "DDP" else fully_shard(net)
        comm_hooks.register(model, wire, ranks_per_host=ranks_per_host)
        model(everyone[rank]).backward()
        flat = torch.stack([torch.cat([g.flatten() for g in each]) for each in everyone])
        exact, mine = flat.double().mean(0), full_gradients(model).double()
        for ours, true in zip(mine.split(sizes), exact.split(sizes), strict=True):
            worst = max(worst, ((ours - true).norm() / true.norm()).item())
    return worst


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize(
    ("wrapper", "wire", "bound"),
    [
        ("DDP", "fp16", 4e-4),
        ("DDP", "int8", 2e-2),
        ("FSDP2", "fp16", 4e-4),
        ("FSDP2", "int8", 2e-2),
    ],
)
def test_a_small_parameter_among_large_ones_arrives_as_well(
    ranks4, wrapper, wire, bound, ranks_per_host
):
    assert max(ranks4.run(_worst, wrapper, wire, ranks_per_host)) <= bound


def _by_default(device: str | None, dtype: torch.dtype, wire: str) -> Tensor:
    model = DistributedDataParallel(mlp(31, 97, 64, 5), bucket_cap_mb=0.02)
    given = [inputs(step, 31) for step in range(3)]
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        state = comm_hooks.register(model, wire)
        for x in given:
            model(x).square().mean().backward()
            state.load_state_dict(state.state_dict())
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return gradients(model)


@pytest.mark.parametrize("wire", list(comm_hooks.WIRE_FORMATS))
def test_torchs_defaults_of_device_and_dtype_change_no_bit(ranks4, wire):
    plain = ranks4.run(_by_default, None, torch.float32, wire)
    for device, dtype in (("meta", torch.float32), (None, torch.float64)):
        found = ranks4.run(_by_default, device, dtype, wire)
        assert all(map(torch.equal, found, plain))

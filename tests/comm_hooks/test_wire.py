"""The formats against float64: how exactly gradients arrive, and what is never lost."""

import math

import pytest
import torch
from torch import Tensor

from distamp.comm_hooks import COMM_FORMATS, CommFormat, formats
from distamp.comm_hooks.formats import Places, Source
from tests.comm_hooks.training import heavy_tailed

FORMATS = list(COMM_FORMATS.values())
FP32_MAX = torch.finfo(torch.float32).max
LEAST_UNIT = 2.0**-126
# Half a unit in the last place, of an element or (int8) of the largest of its block.
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.505 * (1 + 2.0**-7) / 127}

by_name = pytest.mark.parametrize("wire", FORMATS, ids=lambda each: each.name)


def places(numel: int) -> Places:
    """One row of one parameter."""
    return Places(-(-numel // 256) * 256, [(0, 0, numel)])


def written(wire: CommFormat, values: Tensor, where: Places, divisor: float = 1.0) -> Tensor:
    out = torch.zeros(1, wire.row_bytes(where.numel), dtype=torch.uint8)
    formats.encode(wire, Source(values, values.view(1, -1)[:0], where, 1, 1 / divisor), out)
    return out


def read(wire: CommFormat, values: Tensor, divisor: float = 1.0) -> Tensor:
    where = places(values.numel())
    found = torch.empty(values.numel())
    formats.decode(wire, written(wire, values, where, divisor), where, found)
    return found


def allowed(wire: CommFormat, exact: Tensor) -> Tensor:
    """How far from float64 values each element may read back."""
    rows = torch.nn.functional.pad(exact.abs(), (0, -exact.numel() % 256)).view(-1, 256)
    amax = rows.amax(1, keepdim=True)
    error = rows * ROUNDING[wire.name] * 1.0001
    if wire.name == "fp16":
        # Below 2^-28 of the block's largest its payloads are subnormal.
        error = error.maximum((amax * 2.0**-28).clamp(min=LEAST_UNIT * 2.0**-14) * 2.0**-11)
        error = error + (rows - wire.limit).clamp(min=0)
    if wire.name == "int8":
        error = (amax.clamp(min=127 * LEAST_UNIT) * ROUNDING["int8"]).expand_as(rows)
        error = error + (rows - wire.limit).clamp(min=0)
    return error.reshape(-1)[: exact.numel()]


# -- what is written reads back ---------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 4000, 600_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 2.0**24, 1e30])
@by_name
def test_every_element_is_rounded_once(wire, scale, numel):
    values = heavy_tailed(numel, scale=scale)
    exact = values.double() / 3
    error = (read(wire, values, 3.0).double() - exact).abs()
    assert (error <= allowed(wire, exact) * (1 + 1e-6)).all()


@by_name
def test_nothing_finite_over_or_underflows(wire):
    ends = torch.tensor([FP32_MAX, -FP32_MAX, FP32_MAX * (1 - 2.0**-11), 3e38])
    if wire.name != "bf16":  # torch's own cast of the last 0.2 % is inf
        assert read(wire, ends).isfinite().all()
        torch.testing.assert_close(read(wire, ends), ends, rtol=1e-2, atol=0)
    tiny = torch.full((256,), 2.0**-126)
    assert torch.equal(read(wire, tiny), tiny)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@by_name
def test_other_dtypes_pass_through_fp32(wire, dtype):
    values = heavy_tailed(1000).to(dtype)
    where = places(1000)
    assert torch.equal(written(wire, values, where), written(wire, values.float(), where))


# -- inf and NaN ------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 100, 255, 256, 700, 769])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@by_name
def test_inf_and_nan_arrive(wire, value, position):
    values = heavy_tailed(770, scale=1e-6)
    without = values.clone()
    values[position], without[position] = value, 0.0
    back, expected = read(wire, values, 2.0), read(wire, without, 2.0)
    assert not back[position].isfinite()
    block = slice(position // 256 * 256, position // 256 * 256 + 256)
    if wire.name == "int8":
        assert back[block].isnan().all()
        back[block] = expected[block] = 0.0
    else:
        assert back[position] == value or math.isnan(value)
        back[position] = expected[position] = 0.0
    assert torch.equal(back, expected), "the others are as if it were not there"

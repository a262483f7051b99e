"""The formats against float64: how exactly gradients arrive, and what is never lost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distamp.comm_hooks import WIRE_FORMATS, WireFormat, formats, wire_format
from distamp.comm_hooks.formats import Feedback, Places, Source

FORMATS = list(WIRE_FORMATS.values())
FP32_MAX = torch.finfo(torch.float32).max
LEAST_UNIT = 2.0**-126
# Half a unit in the last place, of an element or (int8) of the largest of its block.
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.505 * (1 + 2.0**-7) / 127}

by_name = pytest.mark.parametrize("wire", FORMATS, ids=lambda each: each.name)


def gradients(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Heavy-tailed values over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    return values * torch.randn(numel, generator=generator).mul_(2).exp_() * scale


def places(numel: int, *starts: int) -> Places:
    """One row, in which a parameter begins at each of ``starts``."""
    edges, runs, begin = [0, *starts, numel], [], 0
    for index, first in enumerate(edges[:-1]):
        length = edges[index + 1] - first
        runs.append((begin, first, length))
        begin += -(-length // 256) * 256
    return Places(1, begin, runs)


def written(wire: WireFormat, values: Tensor, where: Places, divisor: float = 1.0) -> Tensor:
    out = torch.zeros(where.rows, wire.row_bytes(where.numel), dtype=torch.uint8)
    formats.encode(wire, source(values, where, 1 / divisor), out)
    return out


def source(values: Tensor, where: Places, inverse: float = 1.0, *others: Tensor) -> Source:
    """Values of which all rows are written."""
    beside = torch.stack(others) if others else values.view(1, -1)[:0]
    return Source(values, beside, where, where.rows, inverse)


def read(wire: WireFormat, values: Tensor, divisor: float = 1.0, *starts: int) -> Tensor:
    where = places(values.numel(), *starts)
    found = torch.empty(values.numel())
    formats.decode(wire, written(wire, values, where, divisor), where, found)
    return found


def allowed(wire: WireFormat, exact: Tensor) -> Tensor:
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


# -- names and sizes --------------------------------------------------------------------------


def test_an_unknown_format_names_the_choices():
    with pytest.raises(ValueError, match=r"'fp12'.*fp16, bf16, int8"):
        wire_format("fp12")


@pytest.mark.parametrize(("name", "share"), [("fp16", 0.504), ("bf16", 0.5), ("int8", 0.254)])
def test_a_row_takes_so_much_of_fp32(name, share):
    assert wire_format(name).row_bytes(1 << 20) / (4 << 20) <= share


# -- what is written reads back ---------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 4000, 600_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 2.0**24, 1e30])
@by_name
def test_every_element_is_rounded_once(wire, scale, numel):
    values = gradients(numel, scale=scale)
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


@pytest.mark.parametrize("ratio", [10.0**-power for power in range(1, 8)])
@pytest.mark.parametrize(("name", "bound"), [("fp16", 2.2e-4), ("int8", 1.4e-2)])
def test_a_small_parameter_among_large_ones_is_as_exact(name, bound, ratio):
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    values[1000:1016] *= ratio
    starts = (1000, 1016) if name == "int8" else ()
    small = read(wire_format(name), values, 1.0, *starts)[1000:1016]
    assert (small - values[1000:1016]).norm() <= bound * values[1000:1016].norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@by_name
def test_other_dtypes_pass_through_fp32(wire, dtype):
    values = gradients(1000).to(dtype)
    where = places(1000)
    assert torch.equal(written(wire, values, where), written(wire, values.float(), where))


@by_name
def test_ranks_of_a_host_are_added_up_before_anything_is_rounded(wire):
    parts = torch.stack([gradients(5000, seed) for seed in range(4)])
    where = places(5000)
    out, found = written(wire, parts[0], where), torch.empty(5000)
    formats.encode(wire, source(parts[0], where, 1 / 4, *parts[1:]), out)
    formats.decode(wire, out, where, found)
    exact = parts.double().mean(0)
    assert ((found.double() - exact).abs() <= allowed(wire, exact) * 1.001 + 1e-6).all()


@by_name
def test_a_rank_adds_its_own_row_as_it_is_to_what_it_was_sent(wire):
    parts = [gradients(5000, seed) for seed in range(3)]
    given = torch.cat([written(wire, each, places(5000)) for each in parts])
    exact = parts[1].double()
    for row in (0, 2):
        one = torch.empty(5000)
        formats.decode(wire, given[row : row + 1], places(5000), one)
        exact += one
    # Its rows lie in values of which the second is its own.
    where = Places(3, 5120, [(row * 5120, row * 5000, 5000) for row in range(3)])
    own = Source(torch.cat(parts), torch.empty(0, 15000), where, 1, 1.0)
    total = torch.empty(5000)
    formats.sum_rows(wire, own, given, total)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)


# -- inf and NaN ------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 100, 255, 256, 700, 769])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@by_name
def test_inf_and_nan_arrive(wire, value, position):
    values = gradients(770, scale=1e-6)
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


@by_name
def test_inf_survives_the_sum_and_the_second_rounding(wire):
    values, where = gradients(600), places(600)
    bad = values.clone()
    bad[300] = math.inf
    given = torch.cat([written(wire, values, where), written(wire, bad, where)])
    out, found = given[:1].clone(), torch.empty(600)
    both = Places(2, where.numel, [(0, 0, 600), (where.numel, 600, 600)])
    own = Source(torch.cat([values, values]), torch.empty(0, 1200), both, 0, 1.0)
    formats.sum_encode(wire, own, given, out[0])
    formats.decode(wire, out, where, found)
    assert not found[300].isfinite()
    assert found[:256].isfinite().all()


# -- what rounding takes ----------------------------------------------------------------------


def test_what_rounding_takes_comes_back():
    wire, where = wire_format("int8"), places(1000)
    values, total = gradients(1000), torch.zeros(1000)
    feedback = Feedback(torch.zeros(where.numel), torch.tensor([8.0, 0.125]))
    out = written(wire, values, where)
    for _ in range(50):
        formats.encode(wire, source(values, where), out, feedback)
        found = torch.empty(1000)
        formats.decode(wire, out, where, found)
        total += found
    assert (total / 50 - values).norm() < 0.05 * (read(wire, values) - values).norm()
    # In unscaled units.
    left = feedback.residual[:1000] * 8.0
    torch.testing.assert_close(50 * values - total, left, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_block_that_is_not_finite_leaves_nothing(bad):
    wire, where = wire_format("int8"), places(600)
    values = gradients(600)
    values[300] = bad
    feedback = Feedback(torch.ones(where.numel), torch.ones(2))
    out = written(wire, values, where)
    formats.encode(wire, source(values, where), out, feedback)
    assert not feedback.residual[256:512].any()
    assert feedback.residual[:256].any()
    assert feedback.residual.isfinite().all()

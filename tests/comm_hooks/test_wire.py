"""The formats against float64: the error of a rounding, and inf and NaN."""

import math
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from distamp.comm_hooks import COMM_FORMATS, CommFormat, formats, register_comm_hook
from distamp.comm_hooks.collectives import BlockLayout, Segment, count_blocks
from tests.comm_hooks.training import (
    WIDTHS,
    full_gradients,
    gradients,
    heavy_tailed,
    inputs,
    mlp,
    relative,
    wrapped,
)
from tests.on_ranks import on_ranks

FP32_MAX = torch.finfo(torch.float32).max
MIN_SCALE = 2.0**-126


class Fp8Blocks(CommFormat):
    """fp8 e4m3 with a power of two for each block: the class that a new format takes."""

    name = "fp8"
    payload = torch.float8_e4m3fn
    has_scales = True
    needs_error_feedback = True
    clip_max = FP32_MAX * (1 - 2.0**-4)

    def encode(self, blocks: Tensor, out: Tensor) -> None:
        scales, payload = self.split(out, len(blocks))
        finite, amax, nonfinite = formats.clip_to_finite(blocks, self.clip_max)
        # The power of two by which amax becomes a number in [2^7, 2^8), which e4m3 can hold.
        exponent = (amax.view(torch.int32) & formats.EXPONENT_MASK) - (7 << 23)
        scale = exponent.clamp(min=formats.MIN_SCALE_BITS).view(torch.float32)
        payload.copy_(finite * scale.reciprocal().unsqueeze(1))
        if nonfinite is not None:
            scale = torch.where(nonfinite.any(1), math.nan, scale)
        scales.copy_(scale)

    def decode(self, data: Tensor, out: Tensor, accumulate: bool = False) -> None:
        scales, payload = self.split(data, len(out))
        elements = payload.float().mul_(scales.float().unsqueeze(1))
        if accumulate:
            out.add_(elements)
        else:
            out.copy_(elements)


# A format's row: its relative rounding error, and its largest finite magnitude. The error of int8
# is relative to the largest element of the block.
ROWS = [
    (COMM_FORMATS["fp16"], 2.0**-11, FP32_MAX * (1 - 2.0**-11)),
    (COMM_FORMATS["bf16"], 2.0**-8, FP32_MAX),
    (COMM_FORMATS["int8"], 0.505 * (1 + 2.0**-7) / 127, FP32_MAX * (1 - 1 / 127)),
    (Fp8Blocks(), 2.0**-4, FP32_MAX * (1 - 2.0**-4)),
]
# The numbers of bits below the block's largest element at which an element becomes subnormal.
SUBNORMAL_BITS = {"fp16": 28, "fp8": 13}
SPOILS_BLOCK = {"int8", "fp8"}

by_format = pytest.mark.parametrize(
    ("format", "rounding", "clip_max"), ROWS, ids=[row[0].name for row in ROWS]
)
by_name = pytest.mark.parametrize("format", [row[0] for row in ROWS], ids=lambda row: row.name)


def read(format: CommFormat, values: Tensor) -> Tensor:
    """The elements that another rank decodes."""
    numel = values.numel()
    layout = BlockLayout([Segment(0, numel, 0)], count_blocks(numel))
    blocks = torch.empty(layout.num_blocks, 256)
    layout.copy_in(values, blocks)
    data = torch.zeros(format.row_bytes(blocks.numel()), dtype=torch.uint8)
    before = blocks.clone()
    format.encode(blocks, data)
    assert torch.equal(blocks.nan_to_num(), before.nan_to_num()), "encode changes no block"
    format.decode(data, blocks)
    decoded = torch.empty(numel)
    layout.copy_out(blocks, decoded)
    return decoded


def allowed(format: CommFormat, rounding: float, clip_max: float, exact: Tensor) -> Tensor:
    """The largest error of each element, for float64 values."""
    rows = nn.functional.pad(exact.abs(), (0, -exact.numel() % 256)).view(-1, 256)
    amax = rows.amax(1, keepdim=True)
    error = rows * rounding * 1.0001
    if format.name in SUBNORMAL_BITS:
        bits = SUBNORMAL_BITS[format.name]
        smallest = (amax * 2.0**-bits).clamp(min=MIN_SCALE * 2.0 ** (14 - bits))
        error = error.maximum(smallest * rounding)
    if format.name == "int8":
        error = (amax.clamp(min=127 * MIN_SCALE) * rounding).expand_as(rows)
    error = error + (rows - clip_max).clamp(min=0)
    return error.reshape(-1)[: exact.numel()]


# -- encoded elements decode to themselves ------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 4000, 600_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 2.0**24, 1e30])
@by_format
def test_every_element_is_rounded_once(format, rounding, clip_max, scale, numel):
    values = heavy_tailed(numel, scale=scale)
    exact = values.double()
    error = (read(format, values).double() - exact).abs()
    assert (error <= allowed(format, rounding, clip_max, exact) * (1 + 1e-6)).all()


@by_name
def test_decoded_blocks_are_added_or_replace_the_output(format):
    blocks = heavy_tailed(1024).view(-1, 256)
    data = torch.zeros(format.row_bytes(1024), dtype=torch.uint8)
    format.encode(blocks, data)
    decoded = torch.full_like(blocks, math.nan)
    format.decode(data, decoded)
    added = torch.ones_like(blocks)
    format.decode(data, added, accumulate=True)
    assert torch.equal(added, decoded + 1)


@by_name
def test_a_row_has_the_same_bytes_in_one_chunk_as_in_several(format):
    assert format.row_bytes(256 * 5000) == 2 * format.row_bytes(256 * 2048) + format.row_bytes(
        256 * 904
    )


@by_name
def test_nothing_finite_over_or_underflows(format):
    ends = torch.tensor([FP32_MAX, -FP32_MAX, FP32_MAX * (1 - 2.0**-11), 3e38])
    if format.name != "bf16":  # torch's own cast of the last 0.2 % is inf
        assert read(format, ends).isfinite().all()
        torch.testing.assert_close(read(format, ends), ends, rtol=7e-2, atol=0)
    tiny = torch.full((256,), 2.0**-126)
    assert torch.equal(read(format, tiny), tiny)


# -- inf and NaN ------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 100, 255, 256, 700, 769])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@by_name
def test_inf_and_nan_arrive(format, value, position):
    values = heavy_tailed(770, scale=1e-6)
    without = values.clone()
    values[position] = value
    without[position] = 0.0
    decoded = read(format, values)
    expected = read(format, without)
    assert not decoded[position].isfinite()
    block = slice(position // 256 * 256, position // 256 * 256 + 256)
    if format.name in SPOILS_BLOCK:
        assert decoded[block].isnan().all()
        decoded[block] = expected[block] = 0.0
    else:
        assert decoded[position] == value or math.isnan(value)
        decoded[position] = expected[position] = 0.0
    assert torch.equal(decoded, expected), "the other elements are not changed"


# -- a new format, in training ------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_a_class_and_an_entry_in_the_table_are_all_that_a_format_needs(ranks_per_host):
    plain, _ = wrapped(mlp(*WIDTHS), None)
    with mock.patch.dict(formats._FORMATS, {"fp8": Fp8Blocks()}):
        model, hook = wrapped(mlp(*WIDTHS), "fp8", ranks_per_host=ranks_per_host)
        sharded = fully_shard(mlp(*WIDTHS))
        sharded_hook = register_comm_hook(
            sharded, "fp8", ranks_per_host=ranks_per_host, param_format="fp8"
        )
        for each in (plain, model, sharded):
            each(inputs(0, WIDTHS[0])).square().sum().backward()
    assert relative(gradients(model), gradients(plain)) < 5e-2
    # Gathered weights are rounded, too, and change the gradients.
    assert relative(full_gradients(sharded), gradients(plain)) < 3e-1
    assert list(hook.stats().bytes_sent) == ["fp8"]
    assert set(sharded_hook.stats().bytes_sent) == {"fp8", "fp8 weights"}
    assert hook.state_dict()["residuals"], "error feedback follows from the class"

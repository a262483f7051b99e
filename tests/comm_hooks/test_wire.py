"""The wire, with no process: bytes against float64."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distamp.comm_hooks.wire import WIRE_FORMATS, WireFormat, wire_format

FORMATS = list(WIRE_FORMATS.values())
BLOCKS = [each for each in FORMATS if each.block > 1]
PLAIN = [each for each in FORMATS if each.block == 1]
FP32_MAX = torch.finfo(torch.float32).max
LEAST_UNIT = 2.0**-126

by_name = pytest.mark.parametrize("wire", FORMATS, ids=lambda each: each.name)
with_blocks = pytest.mark.parametrize("wire", BLOCKS, ids=lambda each: each.name)


def gradients(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Heavy-tailed values over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    return values * torch.randn(numel, generator=generator).mul_(2).exp_() * scale


def read(wire: WireFormat, values: Tensor, divisor: float = 1.0) -> Tensor:
    return wire.decode(wire.encode(values, divisor=divisor), values.numel())


def allowed(wire: WireFormat, exact: Tensor) -> Tensor:
    """How far from float64 values each element may read back, from its block's largest."""
    rows = torch.nn.functional.pad(exact, (0, -exact.numel() % wire.block)).view(-1, wire.block)
    amax = rows.abs().amax(1, keepdim=True)
    if wire.payload.is_floating_point:
        info = torch.finfo(wire.payload)
        spare = 2.0**28 if wire.payload == torch.float16 else 2.0**13
        lowest = torch.maximum(amax / spare, torch.tensor(LEAST_UNIT * info.smallest_normal))
        # Half a unit in the last place, and values past the last finite payload of the range.
        error = rows.abs().maximum(lowest.expand_as(rows)) * info.eps * 0.5000001
        top = FP32_MAX * (1 - info.eps / 2)
        error = error + (rows.abs() - top).clamp(min=0)
    else:
        top = torch.iinfo(wire.payload).max
        unit = (amax / top * (1 + 2.0**-7)).clamp(min=LEAST_UNIT)
        error = (unit * 0.505 + (rows.abs() - FP32_MAX * (1 - 1 / top)).clamp(min=0)).expand_as(
            rows
        )
    return error.reshape(-1)[: exact.numel()]


# -- names and sizes --------------------------------------------------------------------------


def test_formats_are_found_by_name():
    assert [wire_format(name).name for name in WIRE_FORMATS] == list(WIRE_FORMATS)
    assert set(WIRE_FORMATS) == {"bf16", "fp16", "int8"}


def test_an_unknown_format_names_the_choices():
    with pytest.raises(ValueError, match=r"'fp12'.*bf16, fp16, int8"):
        wire_format("fp12")


@pytest.mark.parametrize(
    ("gone", "instead"), [("int16", "fp16"), ("fp8_e4m3", "int8"), ("fp16_plain", "fp16")]
)
def test_a_format_that_is_gone_names_the_one_to_use(gone, instead):
    with pytest.raises(ValueError, match=f"'{gone}'.*'{instead}'"):
        wire_format(gone)


@pytest.mark.parametrize(
    ("name", "numel", "nbytes"),
    [
        ("bf16", 1000, 2000),
        ("fp16", 1024, 16 + 2048),
        ("fp16", 1025, 16 + 2050),
        ("fp16", 3000, 32 + 6000),
        ("int8", 1024, 16 + 1024),
        ("int8", 0, 0),
    ],
)
def test_a_wire_is_its_headers_and_its_elements(name, numel, nbytes):
    wire = wire_format(name)
    assert wire.nbytes(numel) == nbytes
    assert wire.encode(torch.ones(numel)).shape == (nbytes,)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
@by_name
def test_parts_are_whole_blocks_and_hold_everything(wire, numel, parts):
    part = wire.part_numel(numel, parts)
    assert part % wire.block == 0
    assert part * parts >= numel
    assert (part - wire.block) * parts < numel, "not a block more than needed"


def test_the_error_feedback_formats_are_those_of_one_byte():
    assert [each.name for each in FORMATS if each.needs_error_feedback] == ["int8"]


# -- what is written reads back ---------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 4000, 140_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 2.0**24, 1e30])
@with_blocks
def test_block_formats_round_as_float64_would(wire, scale, numel):
    values = gradients(numel, scale=scale)
    error = (read(wire, values).double() - values.double()).abs()
    assert (error <= allowed(wire, values.double())).all()


@pytest.mark.parametrize("divisor", [2.0, 3.0, 8.0, 1000.0, 0.25])
@with_blocks
def test_the_division_is_made_before_the_rounding(wire, divisor):
    values = gradients(3000)
    exact = values.double() / divisor
    error = (read(wire, values, divisor).double() - exact).abs()
    assert (error <= allowed(wire, exact) + exact.abs() * 2.0**-22).all()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=300),
    name=st.sampled_from([each.name for each in BLOCKS]),
)
def test_any_finite_values_read_back_near_and_finite(values, name):
    wire = wire_format(name)
    given_values = torch.tensor(values, dtype=torch.float32)
    back = read(wire, given_values)
    assert back.isfinite().all()
    error = (back.double() - given_values.double()).abs()
    assert (error <= allowed(wire, given_values.double())).all()
    assert not wire.has_nonfinite(wire.encode(given_values), len(values))


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1e-38, 3e38, FP32_MAX, -FP32_MAX]
)
@with_blocks
def test_the_ends_of_the_range(wire, value):
    values = torch.tensor([value, 0.0])
    back = read(wire, values).double()
    assert back.isfinite().all()
    assert ((back - values.double()).abs() <= allowed(wire, values.double())).all()
    assert back[1] == 0


def test_fp16_keeps_subnormals():
    values = torch.tensor([1e-45, -3e-42, 1e-40])
    assert torch.equal(read(wire_format("fp16"), values)[0], values[0])
    assert torch.allclose(read(wire_format("fp16"), values), values, rtol=1e-3, atol=2e-45)


@pytest.mark.parametrize("exponent", [-20, 16, 24, 60])
@with_blocks
def test_a_loss_scale_changes_nothing(wire, exponent):
    values = gradients(5000, scale=2.0**-10)
    scale = 2.0**exponent
    assert torch.equal(read(wire, values * scale) / scale, read(wire, values))


@by_name
def test_zeros_are_zeros(wire):
    assert torch.equal(read(wire, torch.zeros(300)), torch.zeros(300))
    nothing = torch.zeros(wire.nbytes(300), dtype=torch.uint8)
    assert torch.equal(wire.decode(nothing, 300), torch.zeros(300))
    assert not wire.has_nonfinite(nothing, 300)


def test_bf16_is_the_cast_of_the_quotient():
    values = gradients(1000)
    sent = wire_format("bf16").encode(values, divisor=3).view(torch.bfloat16)
    assert torch.equal(sent, (values * (1 / 3)).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@by_name
def test_other_dtypes_pass_through_fp32(wire, dtype):
    values = gradients(1000).to(dtype)
    assert torch.equal(wire.encode(values), wire.encode(values.float()))
    wire_bytes = wire.encode(values)
    out = torch.empty(1000, dtype=dtype)
    assert wire.decode(wire_bytes, 1000, out) is out
    assert torch.equal(out, wire.decode(wire_bytes, 1000).to(dtype))


# -- inf and NaN ------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 100, 255, 256, 700, 769])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@by_name
def test_inf_and_nan_stay_in_their_place(wire, value, position):
    values = gradients(770, scale=1e-6)
    without = values.clone()
    values[position], without[position] = value, 0.0
    sent = wire.encode(values, divisor=2.0)
    back = wire.decode(sent, 770)
    assert wire.has_nonfinite(sent, 770)
    assert not back[position].isfinite()
    expected = read(wire, without, 2.0)
    back[position] = expected[position] = 0.0
    assert torch.equal(back, expected), "the others are written as if it were not there"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_two_byte_floats_keep_which_it_was(name, value):
    back = read(wire_format(name), torch.tensor([1.0, value]))
    assert torch.equal(back, torch.tensor([1.0, value])) or back[1].isnan() == math.isnan(value)
    assert back[1] == value or math.isnan(value)


@by_name
def test_a_block_of_nothing_but_nan(wire):
    assert read(wire, torch.full((256,), math.nan)).isnan().all()


@by_name
def test_inf_survives_the_sum_and_the_second_rounding(wire):
    values = gradients(600)
    bad = values.clone()
    bad[300] = math.inf
    wires = torch.stack([wire.encode(values), wire.encode(bad)])
    sent = wire.encode(wire.sum_decoded(wires, 600))
    assert wire.has_nonfinite(sent, 600)
    assert not wire.decode(sent, 600)[300].isfinite()


# -- parts, sums, memory ----------------------------------------------------------------------


def boundaries_of(numel: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return sorted(draw.choices(range(numel + 1), k=draw.choice([1, 3, 40])))


@pytest.mark.parametrize("numel", [1, 300, 5000, 300_000])
@with_blocks
def test_no_block_crosses_a_boundary(wire, numel):
    for seed in range(4):
        edges = [0, *boundaries_of(numel, seed), numel]
        generator = torch.Generator().manual_seed(seed)
        sizes = 10.0 ** torch.randint(-9, 5, (len(edges),), generator=generator)
        values = gradients(numel, seed)
        for first, last, size in zip(edges, edges[1:], sizes.tolist(), strict=False):
            values[first:last] *= size
        sent = wire.encode(values, divisor=3.0, boundaries=edges[1:-1])
        back = wire.decode(sent, numel, boundaries=edges[1:-1])
        for first, last in itertools.pairwise(edges):
            exact = values[first:last].double() / 3
            # The blocks of a parameter begin where 256 elements of the whole do.
            lead = -first % 256
            for part in (slice(0, lead), slice(lead, None)):
                error = (back[first:last].double() - exact).abs()[part]
                assert (error <= allowed(wire, exact[part]) + exact[part].abs() * 2.0**-22).all()


@with_blocks
def test_boundaries_cost_two_bytes_each_at_most(wire):
    plain = wire.encode(torch.ones(100_000)).numel()
    edges = list(range(500, 100_000, 1000))
    assert wire.encode(torch.ones(100_000), boundaries=edges).numel() <= plain + 2 * len(edges) + 16
    aligned = list(range(0, 100_000, 512))
    assert wire.encode(torch.ones(100_000), boundaries=aligned).numel() == plain


@with_blocks
def test_an_inf_of_one_parameter_leaves_its_neighbours_alone(wire):
    values = gradients(700, scale=1e-6)
    values[310] = math.inf
    back = wire.decode(wire.encode(values, boundaries=[300, 320]), 700, boundaries=[300, 320])
    assert not back[310].isfinite()
    values[310] = 0.0
    expected = wire.decode(wire.encode(values, boundaries=[300, 320]), 700, boundaries=[300, 320])
    back[310] = expected[310] = 0.0
    assert torch.equal(back, expected)


@pytest.mark.parametrize("edges", [[], [70, 80, 2000]])
@pytest.mark.parametrize("numel", [100, 256, 3000])
@by_name
def test_a_sum_of_wires_is_the_fp32_sum_of_what_they_say(wire, numel, edges):
    edges = [each for each in edges if each < numel]
    wires = torch.stack(
        [wire.encode(gradients(numel, seed), divisor=3, boundaries=edges) for seed in range(3)]
    )
    total = torch.zeros(numel)
    for each in wires:
        total += wire.decode(each, numel, boundaries=edges)
    assert torch.equal(wire.sum_decoded(wires, numel, boundaries=edges), total)


def test_long_tensors_are_worked_on_in_pieces_with_the_same_result(monkeypatch):
    values = gradients(20_000)
    values[12_345] = math.nan
    whole = {each.name: each.encode(values, divisor=7) for each in FORMATS}
    sums = {
        each.name: each.sum_decoded(torch.stack([whole[each.name]] * 3), 20_000) for each in FORMATS
    }
    monkeypatch.setattr("distamp.comm_hooks.reference.PIECE", 1024)
    for each in FORMATS:
        assert torch.equal(each.encode(values, divisor=7), whole[each.name])
        back = each.decode(whole[each.name], 20_000)
        assert back.isnan().nonzero().tolist() == [[12_345]]
        summed = each.sum_decoded(torch.stack([whole[each.name]] * 3), 20_000)
        assert torch.equal(summed.nan_to_num(7.0), sums[each.name].nan_to_num(7.0))


@pytest.mark.parametrize("bad", [False, True])
@by_name
def test_a_device_that_is_not_waited_for_writes_the_same_bytes(wire, bad, monkeypatch):
    values = gradients(1000)
    if bad:
        values[[3, 700]] = torch.tensor([math.inf, math.nan])
    edges = [300, 310, 777]
    sent = wire.encode(values, divisor=3.0, boundaries=edges)
    back = wire.decode(sent, 1000, boundaries=edges)
    for module in ("reference", "blocks"):
        monkeypatch.setattr(f"distamp.comm_hooks.{module}.on_host", lambda _: False)
    assert torch.equal(wire.encode(values, divisor=3.0, boundaries=edges), sent)
    again = wire.decode(sent, 1000, boundaries=edges)
    assert torch.equal(again.nan_to_num(7.0), back.nan_to_num(7.0))
    total = wire.sum_decoded(sent.expand(2, -1), 1000, boundaries=edges)
    assert torch.equal(total.nan_to_num(7.0), (back + back).nan_to_num(7.0))


@by_name
def test_the_largest_exponent(wire):
    values = torch.tensor([0.3, -5.0, 2.0])
    exponent = int(wire.largest_exponent(wire.encode(values), 3))
    assert exponent in ((2,) if wire.payload.is_floating_point else (2, 3))
    if wire.block > 1:
        values[0] = math.inf
        assert int(wire.largest_exponent(wire.encode(values), 3)) == exponent
    assert int(wire.largest_exponent(wire.encode(torch.zeros(3)), 3)) <= -110


@by_name
def test_memory_of_the_callers_own_is_written_to(wire):
    values = gradients(500)
    sent = torch.zeros(wire.nbytes(500), dtype=torch.uint8)
    assert wire.encode(values, sent) is sent
    out = torch.zeros(500)
    assert wire.decode(sent, 500, out) is out
    assert out.any()


@by_name
def test_nothing_is_written_to_the_values(wire):
    values = gradients(1000)
    values[5] = math.nan
    before = values.clone()
    wire.encode(values, divisor=5)
    assert torch.equal(values.nan_to_num(), before.nan_to_num())


# -- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda w: w.encode(torch.ones(2, 2)), "contiguous 1-D floating"),
        (lambda w: w.encode(torch.ones(4, dtype=torch.int32)), "contiguous 1-D floating"),
        (lambda w: w.encode(torch.ones(8)[::2]), "contiguous 1-D floating"),
        (lambda w: w.encode(torch.ones(4), divisor=0.0), "divisor is 0.0"),
        (lambda w: w.encode(torch.ones(4), divisor=math.nan), "divisor is nan"),
        (lambda w: w.encode(torch.ones(4), torch.empty(3, dtype=torch.uint8)), "of 4 elements"),
        (lambda w: w.decode(torch.empty(3, dtype=torch.uint8), 4), "of 4 elements"),
        (lambda w: w.decode(w.encode(torch.ones(4)), 4, torch.empty(5)), "out holds 5"),
        (lambda w: w.sum_decoded(torch.empty(2, 3, dtype=torch.uint8), 4), r"\(ranks, "),
    ],
)
@by_name
def test_what_is_wrong_is_said(wire, call, match):
    with pytest.raises(ValueError, match=match):
        call(wire)


# -- on a device ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@by_name
def test_a_gpu_writes_the_same_bytes(wire, compiled):
    values = gradients(256 * 40 + 3)
    values[77] = math.inf

    def through(given: Tensor) -> tuple[Tensor, Tensor]:
        sent = wire.encode(given, divisor=8.0)
        return sent, wire.decode(sent, given.numel())

    run = torch.compile(through, fullgraph=True) if compiled else through
    sent, back = run(values.cuda())
    assert torch.equal(sent.cpu(), wire.encode(values, divisor=8.0))
    expected = wire.decode(sent.cpu(), values.numel())
    assert torch.equal(back.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))

"""Triton's kernels against the reference, to the bit, by Triton's interpreter on the CPU."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from distamp.comm_hooks import WIRE_FORMATS, reference
from distamp.comm_hooks.error_feedback import Feedback
from distamp.comm_hooks.rows import Rows
from distamp.comm_hooks.wire import WireFormat

triton = pytest.importorskip("triton", reason="needs the package triton, of the test extra")

from distamp.comm_hooks import kernel_code, kernels  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        type(kernels.decode_kernel).__name__ != "InterpretedFunction",
        reason="Triton was imported before TRITON_INTERPRET=1 was set",
    ),
    # Of numpy, of which the interpreter is made: that inf and NaN come of what they should.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
by_name = pytest.mark.parametrize("wire", list(WIRE_FORMATS.values()), ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    # The interpreter takes its time for each.
    monkeypatch.setattr(kernels, "BLOCKS", 64)


def values_of(numel: int, seed: int, kind: str = "plain") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values *= torch.randn(numel, generator=generator).mul_(3).exp_()
    if kind == "nonfinite" and numel:
        for at, bad in zip(
            (0, numel // 2, numel - 1), (math.inf, math.nan, -math.inf), strict=True
        ):
            values[at] = bad
    if kind == "ends":
        some = torch.tensor([3.4028235e38, -3.4028235e38, 1e-45, -1e-40, 0.0, -0.0, 65519.0, 3e38])
        values[: len(some)] = some[:numel]
    if kind == "tiny":
        values *= 1e-42
    return values


def geometry(numel: int, seed: int, wire: WireFormat) -> Rows:
    """Rows of shards, of a bucket whose last rows are short, or one row; with boundaries."""
    draw = random.Random(seed)
    edges = sorted(draw.choices(range(numel + 1), k=draw.choice([0, 2, 30])))
    count = draw.choice([1, 2, 3, 7])
    if seed % 3 == 0:
        part = -(-numel // count // 256) * 256
        rows = Rows(0, part, part, count, numel)
    elif seed % 3 == 1:
        part = numel // count
        rows = Rows(part // 4, part, part - part // 4, count, (part - part // 4) * count)
    else:
        rows = Rows(0, numel, numel, 1, numel)
    return rows.split_at(edges if wire.block > 1 else [], CPU)


def empty(wire: WireFormat, rows: Rows, count: int | None = None) -> Tensor:
    """Zeroed rows with gaps between them, as those of an exchange have."""
    nbytes = wire.nbytes(rows.length, rows.extra)
    nbytes += -nbytes % 16
    return torch.zeros(count or rows.count, 48 + nbytes, dtype=torch.uint8)[:, 48:]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether the bits are the same, but for those of NaN."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan() & b.isnan()
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.view(as_int) == b.view(as_int)) | nan).all())


def parts(wire: WireFormat, out: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Headers that stand for something, and payload in fp32, of written rows."""
    read = torch.zeros(rows.start + rows.count * max(rows.stride, rows.length))
    reference.decode_rows(wire, out, read, rows)
    if wire.block == 1:
        return torch.zeros(0), read
    headers = reference._headers(wire, out, rows)
    used = [headers[r, : -(-rows.in_row(r) // 256)] for r in range(rows.count)]
    if rows.splits is not None:
        used.append(headers[rows.splits.header_row, rows.splits.header])
    return torch.cat(used).view(torch.int16), read


KINDS = ["plain", "nonfinite", "ends", "tiny"]


@pytest.mark.parametrize("kind", KINDS)
@by_name
def test_encode_and_decode(wire, kind):
    for seed, numel in enumerate((1, 257, 4096, 9001)):
        rows = geometry(numel, seed, wire)
        given = values_of(numel, seed, kind)
        divisor = (1.0, 3.0, 4.0, 0.25)[seed]
        out, head = [], []
        for how in (reference, kernels):
            out.append(empty(wire, rows))
            head.append(torch.tensor([0, -127]))
            left = how.encode_rows(wire, given, out[-1], rows, divisor=divisor, head=head[-1])
            assert left is None
        mine, theirs = parts(wire, out[1], rows), parts(wire, out[0], rows)
        assert same(mine[0], theirs[0])
        assert same(mine[1], theirs[1])
        assert head[0].tolist() == head[1].tolist()
        for dtype in (torch.float32, torch.float16):
            read = [torch.full((numel,), 7.0, dtype=dtype) for _ in range(2)]
            reference.decode_rows(wire, out[0], read[0], rows)
            kernels.decode_rows(wire, out[0], read[1], rows)
            assert same(*read)


@by_name
def test_several_programs_say_together_what_one_would(wire, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCKS", 16)
    rows = Rows(0, 9001, 9001, 1, 9001).split_at([5000] if wire.block > 1 else [], CPU)
    given = values_of(9001, 3)
    # The largest finite magnitude lies in another program than the one that is not finite.
    given[100], given[8000] = math.inf, 2.0**14
    heads = []
    for how in (reference, kernels):
        heads.append(torch.tensor([0, -127]))
        how.encode_rows(wire, given, empty(wire, rows), rows, head=heads[-1])
    assert heads[0].tolist() == heads[1].tolist()
    assert heads[0][0] == 1
    assert heads[0][1] in (14, 15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@by_name
def test_other_dtypes_are_encoded(wire, dtype):
    rows = geometry(5000, 4, wire)
    given = values_of(5000, 1).to(dtype)
    out = [empty(wire, rows), empty(wire, rows)]
    reference.encode_rows(wire, given, out[0], rows, divisor=4.0)
    kernels.encode_rows(wire, given, out[1], rows, divisor=4.0)
    assert same(parts(wire, out[1], rows)[1], parts(wire, out[0], rows)[1])


def wires_of(wire: WireFormat, rows: Rows, count: int, kind: str) -> Tensor:
    wires = empty(wire, rows, count)
    for each in range(count):
        given = values_of(rows.total, 50 + each, kind if each == 1 else "plain")
        reference.encode_rows(wire, given, wires[each : each + 1], rows, divisor=float(count))
    return wires


def one_row(numel: int, seed: int, wire: WireFormat) -> Rows:
    draw = random.Random(seed)
    edges = sorted(draw.choices(range(numel + 1), k=20)) if wire.block > 1 else []
    # As a last row that is shorter than the others, and has fewer headers.
    return Rows(0, numel + 300, numel + 300, 1, numel).split_at(edges, CPU, 25 if edges else None)


@pytest.mark.parametrize("kind", KINDS)
@by_name
def test_sums(wire, kind):
    for seed, (numel, count) in enumerate(((300, 2), (5001, 4))):
        rows = one_row(numel, seed, wire)
        wires = wires_of(wire, rows, count, kind)
        for dtype in (torch.float32, torch.float64):
            totals = [torch.zeros(numel, dtype=dtype) for _ in range(2)]
            reference.sum_rows(wire, wires, totals[0], rows)
            kernels.sum_rows(wire, wires, totals[1], rows)
            assert same(*totals)
        out, head = [empty(wire, rows), empty(wire, rows)], []
        for how, to in zip((reference, kernels), out, strict=True):
            head.append(torch.tensor([0, -127]))
            how.sum_encode_rows(wire, wires, to, rows, head=head[-1])
        assert same(parts(wire, out[1], rows)[1], parts(wire, out[0], rows)[1])
        assert head[0].tolist() == head[1].tolist()


@pytest.mark.parametrize("scale", [1.0, torch.tensor(1024.0)])
@pytest.mark.parametrize("name", ["int8", "fp16"])
def test_what_rounding_takes(name, scale):
    wire = WIRE_FORMATS[name]
    for seed, before in enumerate((None, torch.randn(5000) * 1e-3)):
        rows = geometry(5000, 3 * seed, wire)
        given = values_of(5000, seed, "nonfinite")
        left = []
        for how in (reference, kernels):
            feedback = Feedback(before, scale)
            out = empty(wire, rows)
            left.append(how.encode_rows(wire, given, out, rows, divisor=3.0, feedback=feedback))
        assert same(*left)
        assert left[0].any()
        rows = one_row(4000, seed, wire)
        wires = wires_of(wire, rows, 3, "plain")
        left = []
        for how in (reference, kernels):
            feedback = Feedback(None if before is None else before[:4000], scale)
            out = empty(wire, rows)
            left.append(how.sum_encode_rows(wire, wires, out, rows, feedback=feedback))
        assert same(*left)


def test_places_beyond_two_to_the_31():
    import triton.language as tl

    @triton.jit
    def places(out, start, stride, rows, columns, count: tl.constexpr):
        at = tl.arange(0, count)
        row, column = tl.load(rows + at), tl.load(columns + at)
        tl.store(out + at, kernels_element_at(start, row, stride, column))

    rows = torch.tensor([0, 1, 255, 2**20], dtype=torch.int32)
    columns = torch.tensor([7, 2**31 - 256, 11, 3], dtype=torch.int64)
    out = torch.zeros(4, dtype=torch.int64)
    places[(1,)](out, 5, 2**31 - 1, rows, columns, count=4)
    expected = [
        5 + r * (2**31 - 1) + c for r, c in zip(rows.tolist(), columns.tolist(), strict=True)
    ]
    assert out.tolist() == expected


kernels_element_at: Any = kernel_code.element_at

"""Triton's kernels against the reference, to the bit, by Triton's interpreter; and compiled."""

import itertools
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from distamp.comm_hooks import WIRE_FORMATS, WireFormat, formats
from distamp.comm_hooks.formats import Feedback, Places, Source
from tests.comm_hooks.training import heavy_tailed

triton = pytest.importorskip("triton", reason="needs the package triton, of the test extra")

from distamp.comm_hooks import kernels  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        type(kernels.decode_kernel).__name__ != "InterpretedFunction",
        reason="Triton was imported before TRITON_INTERPRET=1 was set",
    ),
    # Of numpy, of which the interpreter is made: that inf and NaN come of what they should.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
KINDS = ["plain", "nonfinite", "ends", "tiny"]
by_name = pytest.mark.parametrize("wire", list(WIRE_FORMATS.values()), ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    # The interpreter takes its time for each.
    monkeypatch.setattr(kernels, "BLOCKS", 16)
    monkeypatch.setattr(kernels, "ENOUGH", 0)


def values_of(numel: int, seed: int, kind: str = "plain") -> Tensor:
    values = heavy_tailed(numel, seed)
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


def places_of(numel: int, seed: int) -> tuple[Places, int]:
    """Rows, and how many: of one run, apart from each other, or of parameters that begin a block.

    The first are aligned, where rows are few.
    """
    draw = random.Random(seed)
    rows = draw.choice([1, 2, 3, 7])
    if seed % 3 == 0:
        return Places(-(-numel // rows // 256) * 256 * rows, [(0, 0, numel // 4 * 4)]), rows
    if seed % 3 == 1:
        length = numel // rows * 3 // 4
        offsets = [row * (numel // rows) for row in range(rows)]
        return Places(-(-length // 256) * 256 or 256, [(0, 0, length)], offsets), rows
    edges = [0, *sorted(draw.choices(range(numel + 1), k=9)), numel]
    runs, begin = [], 0
    for first, stop in itertools.pairwise(edges):
        runs.append((begin, first, stop - first))
        begin += -(-(stop - first) // 256) * 256
    return Places(-(-begin // 256 // rows) * 256 * rows, runs), rows


def empty(wire: WireFormat, rows: int, numel: int) -> Tensor:
    """Rows with gaps between them, as those of an exchange may have."""
    return torch.zeros(rows, 48 + wire.row_bytes(numel), dtype=torch.uint8)[:, 48:]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether the bits are the same, but for those of NaN."""
    nan = a.isnan() & b.isnan()
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.view(as_int) == b.view(as_int)) | nan).all())


def same_rows(wire: WireFormat, a: Tensor, b: Tensor, numel: int) -> bool:
    (units, payload), (others, theirs) = wire.views(a, numel), wire.views(b, numel)
    return same(units, others) and same(payload.float(), theirs.float())


def source_of(given: Tensor, places: Places, rows: int, seed: int, inverse: float = 1.0) -> Source:
    """These values and up to two others, of which a row, or none, is not to be written."""
    others = torch.stack([values_of(len(given), 90 + other) for other in range(2)])[: seed % 3]
    return Source(given, others.to(given.dtype), places, seed % (rows + 1), inverse)


@pytest.mark.parametrize("kind", KINDS)
@by_name
def test_encode_and_decode(wire, kind):
    for seed, numel in enumerate((300, 1, 4096, 9001, 5003)):
        places, rows = places_of(numel, seed)
        values = values_of(numel, seed, kind)
        if kind == "plain":
            values = values.to((torch.float32, torch.float16, torch.float64)[seed % 3])
        source = source_of(values, places, rows, seed, 1 / (1.0, 3.0, 4.0, 0.25, 6.0)[seed])
        out = [empty(wire, rows, places.numel // rows) for _ in range(2)]
        formats.encode(wire, source, out[0])
        kernels.encode(wire, source, out[1])
        assert same_rows(wire, *out, places.numel // rows)
        for dtype in (torch.float32, torch.float16):
            read = [torch.full((numel,), 7.0, dtype=dtype) for _ in range(2)]
            formats.decode(wire, out[0], places, read[0])
            kernels.decode(wire, out[0], places, read[1])
            assert same(*read)


@pytest.mark.parametrize("kind", KINDS)
@by_name
def test_sums(wire, kind):
    for numel, count in ((300, 2), (5001, 4)):
        part = -(-numel // 256) * 256
        places = Places(part, [(0, 0, numel)], range(0, count * numel, numel))
        given = empty(wire, count, part)
        values = torch.cat([values_of(numel, 50 + row, kind) for row in range(count)])
        # What others sent of the second row; of which this rank's own is not read.
        all_of = Source(values, values.view(1, -1)[:0], places, count, 0.5)
        formats.encode(wire, all_of, given)
        given[1] = 255
        source = Source(values, values.view(1, -1) * 2, places, 1, 0.5)
        for dtype in (torch.float32, torch.float64):
            totals = [torch.zeros(numel, dtype=dtype) for _ in range(2)]
            formats.sum_rows(wire, source, given, totals[0])
            kernels.sum_rows(wire, source, given, totals[1])
            assert same(*totals)
        out = [empty(wire, 1, part) for _ in range(2)]
        formats.sum_encode(wire, source, given, out[0][0])
        kernels.sum_encode(wire, source, given, out[1][0])
        assert same_rows(wire, *out, part)


def feedback_of(residual: Tensor, scale: Tensor) -> Feedback:
    """Feedback of which no block was written."""
    written = torch.zeros(residual.numel() // 256, dtype=torch.bool)
    return Feedback(residual.clone(), written, scale)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_what_rounding_takes(scale):
    wire = WIRE_FORMATS["int8"]
    pair = torch.tensor([scale, 1 / scale])
    for seed in range(4):
        places, rows = places_of(5000, seed)
        numel = places.numel // rows
        values = values_of(5000, seed, "nonfinite")
        values[1000:3000] = 0.0
        source = source_of(values, places, rows, seed, 1 / 3)
        before = torch.randn(places.numel) * 1e-3
        left = [feedback_of(before, pair) for _ in range(2)]
        given = empty(wire, rows, numel)
        for how, feedback in zip((formats, kernels), left, strict=True):
            how.encode(wire, source, given, feedback)
        assert same(left[0].residual, left[1].residual)
        assert torch.equal(left[0].written, left[1].written)
        assert left[0].residual.isfinite().all()
        assert source.own == 0 == rows - 1 or not torch.equal(left[0].residual, before)
        sums = [feedback_of(before[:numel], pair) for _ in range(2)]
        mine = source._replace(own=source.own % rows)
        for how, feedback in zip((formats, kernels), sums, strict=True):
            how.sum_encode(wire, mine, given, empty(wire, 1, numel)[0], feedback)
        assert same(sums[0].residual, sums[1].residual)
        assert torch.equal(sums[0].written, sums[1].written)


# -- compiled for GPUs, which needs none ----------------------------------------------------------

ALL = [*WIRE_FORMATS]
KERNELS = ["encode_kernel", "decode_kernel", "sum_kernel", "sum_encode_kernel"]


@pytest.mark.parametrize(
    ("capability", "formats"),
    [
        (90, ["fp16", "int8"]),
        pytest.param(90, ALL, marks=pytest.mark.slow),
        pytest.param(80, ALL, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_a_gpu_round_every_product_and_take_16_bytes_at_once(
    capability, formats
):
    command = [sys.executable, "-m", "tests.comm_hooks.compiled_kernels", str(capability)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([*command, *formats], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    made = [(kernel, name) for kernel, name, _, _ in lines]
    assert made == [*itertools.product(KERNELS, formats)]
    # A product that is fused with a sum is not rounded as torch's is.
    assert {fused for _, _, fused, _ in lines} == {"0"}
    # Gradients alone are 8 loads or 4 stores of a thread.
    assert min(int(wide) for _, _, _, wide in lines) >= 4

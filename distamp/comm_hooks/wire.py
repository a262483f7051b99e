"""WireFormat: how gradients are written as bytes, and the formats that there are.

A wire is a 1-D uint8 tensor. Block formats write, of at most 256 elements that share it, a header
of two bytes: the block's unit as a bfloat16, whose sign says that an element of the block is inf or
NaN. All headers of a wire come first, then the elements in multiples of their block's unit. Bytes
of zero read as zeros.

==========  =====  =============  ===========================================================
name        bytes  unit           inf and NaN
==========  =====  =============  ===========================================================
bf16        2                     kept; so is torch's inf for the last 0.2 % of fp32's range
fp16        2      power of two   kept, each in its place
int8        1      amax / 127     NaN, each in its place
==========  =====  =============  ===========================================================

The other elements of a block that holds inf or NaN are written as if those were zeros. No block
format makes an inf of a finite value. A unit is at least 2^-126, the smallest normal fp32: ``fp16``
keeps what lies below it, for it has subnormal payloads, the integers round it to multiples of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from distamp.comm_hooks import reference
from distamp.comm_hooks.blocks import FP32_MAX
from distamp.comm_hooks.rows import BLOCK, Rows, one_row

__all__ = ["AS_FP16", "WIRE_FORMATS", "WireFormat", "wire_format"]

# Where the elements of a row begin, after its headers: what a GPU loads at once.
_ALIGNMENT = 16


@dataclass(frozen=True)
class WireFormat:
    """How gradients travel: the bytes of one format, written and read.

    Args:
        name: What ``wire_format`` and ``register`` call it.
        payload: dtype of an element on the wire.
        block: The most elements that share a header; 1 where there is none.
        header_bytes: Bytes of that header.
        needs_error_feedback: Whether its error is too large to be dropped at every step.
        top: Of block formats. For floating payloads, whose units are powers of two, a power of two
            that every payload is below; for integers the largest payload, and one less than its
            negative is NaN.
    """

    name: str
    payload: torch.dtype
    block: int = 1
    header_bytes: int = 0
    needs_error_feedback: bool = False
    top: int = 0

    @property
    def is_integer(self) -> bool:
        """Whether payloads are integers."""
        return not self.payload.is_floating_point

    @property
    def limit(self) -> float:
        """Finite magnitudes above this are written as this, lest they read back as inf."""
        step = 1 / self.top if self.is_integer else torch.finfo(self.payload).eps / 2
        return FP32_MAX * (1 - step)

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block and its header."""
        return self.block * self.payload.itemsize + self.header_bytes

    def headers(self, numel: int, extra: int = 0) -> int:
        """Return how many headers a wire of ``numel`` elements has."""
        return -(-numel // self.block) + extra if self.block > 1 else 0

    def payload_start(self, numel: int, extra: int = 0) -> int:
        """Return the byte at which the elements of a wire begin."""
        return _aligned(self.headers(numel, extra) * self.header_bytes)

    def nbytes(self, numel: int, extra: int = 0) -> int:
        """Return the length of the wire of ``numel`` elements, with so many headers beyond."""
        if not numel:
            return 0
        # Even, so that headers can be viewed in several wires that lie behind each other.
        return self.payload_start(numel, extra) + (numel * self.payload.itemsize + 1) // 2 * 2

    def part_numel(self, numel: int, parts: int) -> int:
        """Return the size of each of ``parts`` equal parts, in whole blocks, that hold ``numel``.

        The last parts may reach beyond ``numel``, or lie beyond it.
        """
        blocks = -(-numel // self.block)
        return -(-blocks // parts) * self.block

    def encode(
        self,
        values: Tensor,
        out: Tensor | None = None,
        *,
        divisor: float = 1.0,
        boundaries: Sequence[int] = (),
    ) -> Tensor:
        """Return the wire of ``values / divisor``, the division made in fp32 before the cast.

        Args:
            values: 1-D, contiguous, of any floating dtype; float64 passes through fp32.
            out: uint8 tensor of exactly as many bytes as the wire has, to write to.
            divisor: A positive number, such as the world size.
            boundaries: Where parameters begin in ``values``, ascending: no block crosses one.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ValueError: a tensor of another shape or dtype than described.
        """
        _check_values(values)
        if not (0 < divisor < math.inf):
            raise ValueError(f"divisor is {divisor}: it must be a positive finite number")
        rows = one_row(values.numel(), values.device, boundaries if self.block > 1 else ())
        nbytes = self.nbytes(rows.length, rows.extra)
        if out is None:
            out = torch.empty(nbytes, dtype=torch.uint8, device=values.device)
        self._check_wire(out, rows)
        if values.numel():
            reference.encode_rows(self, values, out.view(1, -1), rows, divisor=divisor)
        return out

    def decode(
        self,
        wire: Tensor,
        numel: int,
        out: Tensor | None = None,
        *,
        boundaries: Sequence[int] = (),
    ) -> Tensor:
        """Return the ``numel`` values of a wire in fp32, or in the dtype of ``out``.

        Args:
            wire: What ``encode`` returned.
            numel: How many values it holds.
            out: 1-D contiguous floating tensor of ``numel`` elements to write to.
            boundaries: Those that ``encode`` was given.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ValueError: a wire of another length, or an ``out`` that is not as described.
        """
        if out is None:
            out = torch.empty(numel, dtype=torch.float32, device=wire.device)
        rows = one_row(numel, wire.device, boundaries if self.block > 1 else ())
        self._check_wire(wire, rows)
        _check_values(out)
        if out.numel() != numel:
            raise ValueError(f"out holds {out.numel()} elements, the wire {numel}")
        if numel:
            reference.decode_rows(self, wire.view(1, -1), out, rows)
        return out

    def sum_decoded(self, wires: Tensor, numel: int, *, boundaries: Sequence[int] = ()) -> Tensor:
        """Return the fp32 sum of what several wires say, added up in their order.

        Args:
            wires: uint8, shape (ranks, bytes of a wire).
            numel: How many values each holds.
            boundaries: Those that ``encode`` was given.

        Raises:
            ValueError: wires of another shape or dtype than described.
        """
        rows = one_row(numel, wires.device, boundaries if self.block > 1 else ())
        nbytes = self.nbytes(numel, rows.extra)
        if wires.dim() != 2 or wires.dtype != torch.uint8 or wires.shape[1] != nbytes:
            raise ValueError(
                f"{self.name} wires of {numel} elements are uint8 of shape (ranks, {nbytes}), not "
                f"{wires.dtype} of shape {tuple(wires.shape)}"
            )
        total = torch.empty(numel, dtype=torch.float32, device=wires.device)
        if numel:
            reference.sum_rows(self, wires, total, rows)
        return total

    def has_nonfinite(self, wire: Tensor, numel: int) -> Tensor:
        """Return whether an element of a wire is inf or NaN, 0-d bool; of headers, where it has."""
        return reference.summary(self, wire.view(1, -1), self._one(wire, numel))[0] != 0

    def largest_exponent(self, wire: Tensor, numel: int) -> Tensor:
        """Return floor(log2) of the largest finite magnitude, 0-d int64; below -110 for zeros.

        The integer formats keep the unit alone, which makes it one too many at times.
        """
        return reference.summary(self, wire.view(1, -1), self._one(wire, numel))[1]

    def _one(self, wire: Tensor, numel: int) -> Rows:
        """Return a wire as one row, whose extra headers are what its length leaves for them."""
        spare = wire.numel() - numel * self.payload.itemsize if self.block > 1 else 0
        extra = max(0, spare // 2 - self.headers(numel)) if spare else 0
        return Rows(0, numel, numel, 1, numel, extra)

    def _check_wire(self, wire: Tensor, rows: Rows) -> None:
        nbytes = self.nbytes(rows.length, rows.extra)
        if wire.dtype != torch.uint8 or wire.shape != (nbytes,):
            raise ValueError(
                f"a {self.name} wire of {rows.length} elements is a uint8 tensor of shape "
                f"({nbytes},), not {wire.dtype} of shape {tuple(wire.shape)}"
            )


def _check_values(values: Tensor) -> None:
    if values.dim() != 1 or not values.is_floating_point() or not values.is_contiguous():
        raise ValueError(
            f"values are {values.dtype} of shape {tuple(values.shape)}: they must be a contiguous "
            "1-D floating tensor, such as a bucket's buffer or tensor.view(-1)"
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _in_blocks(name: str, payload: torch.dtype, top: int, *, fed_back: bool = False) -> WireFormat:
    return WireFormat(name, payload, BLOCK, 2, needs_error_feedback=fed_back, top=top)


WIRE_FORMATS: Mapping[str, WireFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            WireFormat("bf16", torch.bfloat16),
            _in_blocks("fp16", torch.float16, 1 << 15),
            _in_blocks("int8", torch.int8, (1 << 7) - 1, fed_back=True),
        )
    }
)


# fp16 gradients as they are, where blocks would make them wider.
AS_FP16 = WireFormat("fp16 as they are", torch.float16)
_GONE = {
    "int16": "use 'fp16', which takes the same bytes",
    "fp8_e4m3": "use 'int8', which takes the same bytes with less error",
    "fp16_plain": "use 'fp16', or torch's own fp16_compress_hook",
}


def wire_format(name: str) -> WireFormat:
    """Return the format of that name.

    Raises:
        ValueError: there is none; the message names the choices.
    """
    if name in _GONE:
        raise ValueError(f"the wire format {name!r} is gone: {_GONE[name]}")
    if name not in WIRE_FORMATS:
        raise ValueError(f"unknown wire format {name!r}: choose one of {', '.join(WIRE_FORMATS)}")
    return WIRE_FORMATS[name]

"""WireFormat: what every format of the wire can do; the base of the formats in ``wire``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["WireFormat", "exponent_field", "on_host", "pieces"]

# Elements worked on at a time on a CPU, so that every pass after the first finds them in the cache.
PIECE = 1 << 18
SUM_PIECE = 1 << 20
EXPONENT_BITS = 23


@dataclass(frozen=True)
class WireFormat:
    """How gradients travel: the bytes of one format, written and read.

    Args:
        name: What ``wire_format`` and ``register`` call it.
        payload: dtype of an element on the wire.
        block: Elements that share a header; 1 where there is none.
        header_bytes: Bytes of that header.
        needs_error_feedback: Whether its error is too large to be dropped at every step.
    """

    name: str
    payload: torch.dtype
    block: int = 1
    header_bytes: int = 0
    needs_error_feedback: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, header included: a wire may be cut at multiples of this."""
        return self.block * self.payload.itemsize + self.header_bytes

    def nbytes(self, numel: int) -> int:
        """Return the length of the wire of ``numel`` elements: whole blocks, headers included."""
        return -(-numel // self.block) * self.block_bytes

    def part_numel(self, numel: int, parts: int) -> int:
        """Return the size of each of ``parts`` equal parts, in whole blocks, that hold ``numel``.

        The last parts may reach beyond ``numel``, or lie beyond it.
        """
        blocks = -(-numel // self.block)
        return -(-blocks // parts) * self.block

    def encode(
        self, values: torch.Tensor, out: torch.Tensor | None = None, *, divisor: float = 1.0
    ) -> torch.Tensor:
        """Return the wire of ``values / divisor``, the division made in fp32 before the cast.

        Args:
            values: 1-D, contiguous, of any floating dtype; float64 passes through fp32.
            out: uint8 tensor of exactly ``nbytes(values.numel())`` bytes to write to.
            divisor: A positive number, such as the world size.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ValueError: a tensor of another shape or dtype than described.
        """
        _check_values(values)
        if not (0 < divisor < math.inf):
            raise ValueError(f"divisor is {divisor}: it must be a positive finite number")
        if out is None:
            out = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        self._check_wire(out, values.numel())
        if values.numel():
            self._encode(values, out, divisor)
        return out

    def decode(
        self, wire: torch.Tensor, numel: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the ``numel`` values of a wire in fp32, or in the dtype of ``out``.

        Args:
            wire: What ``encode`` returned.
            numel: How many values it holds.
            out: 1-D contiguous floating tensor of ``numel`` elements to write to.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ValueError: a wire of another length, or an ``out`` that is not as described.
        """
        if out is None:
            out = torch.empty(numel, dtype=torch.float32, device=wire.device)
        self._check_read(wire, numel, out)
        if numel:
            self._decode(wire, out, add=False)
        return out

    def add_decoded(self, wire: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the ``out.numel()`` values of a wire to ``out``, in fp32.

        Args:
            wire: What ``encode`` returned.
            out: 1-D contiguous fp32 tensor.

        Returns:
            ``out``.

        Raises:
            ValueError: a wire of another length, or an ``out`` that is not as described.
        """
        self._check_read(wire, out.numel(), out)
        if out.dtype != torch.float32:
            raise ValueError(f"the sum is {out.dtype}: it must be torch.float32")
        if out.numel():
            self._decode(wire, out, add=True)
        return out

    def sum_encoded(
        self, wires: torch.Tensor, numel: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the wire of the fp32 sum of several wires: what a rank does with its part.

        Goes through the cache piece by piece: no fp32 copy of the part is made.

        Args:
            wires: uint8, shape (ranks, ``nbytes(numel)``): a wire from each rank, in rank order.
            numel: How many values each holds.
            out: uint8 tensor of ``nbytes(numel)`` bytes to write to; not one of ``wires``.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ValueError: tensors of other shapes or dtypes than described.
        """
        if wires.dim() != 2 or wires.dtype != torch.uint8 or wires.shape[1] != self.nbytes(numel):
            raise ValueError(
                f"{self.name} wires of {numel} elements are uint8 of shape (ranks, "
                f"{self.nbytes(numel)}), not {wires.dtype} of shape {tuple(wires.shape)}"
            )
        if out is None:
            out = torch.empty(self.nbytes(numel), dtype=torch.uint8, device=wires.device)
        self._check_wire(out, numel)
        step = SUM_PIECE if on_host(out) else max(numel, 1)
        total = torch.empty(min(step, numel), device=out.device)
        for start in range(0, numel, step):
            part = total[: min(step, numel - start)]
            first = self.nbytes(start)
            last = first + self.nbytes(part.numel())
            self._decode(wires[0, first:last], part, add=False)
            for wire in wires[1:]:
                self._decode(wire[first:last], part, add=True)
            self._encode(part, out[first:last], 1.0)
        return out

    def has_nonfinite(self, wire: torch.Tensor, *, terms: int = 1) -> torch.Tensor:
        """Return whether an element is inf or NaN, 0-d bool; reads the headers where there are.

        Args:
            wire: What ``encode`` returned.
            terms: True as well where that many wires of such magnitudes may add up to inf, which
                the rank that adds them up would be alone to know.
        """
        raise NotImplementedError

    def largest_exponent(self, wire: torch.Tensor) -> torch.Tensor:
        """Return floor(log2) of the largest finite magnitude, 0-d int32; below -110 for zeros.

        The integer formats keep the unit alone, which makes it one too many at times.
        """
        raise NotImplementedError

    def _encode(self, values: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
        raise NotImplementedError

    def _decode(self, wire: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        raise NotImplementedError

    def _check_wire(self, wire: torch.Tensor, numel: int) -> None:
        if wire.dtype != torch.uint8 or wire.shape != (self.nbytes(numel),):
            raise ValueError(
                f"a {self.name} wire of {numel} elements is a uint8 tensor of shape "
                f"({self.nbytes(numel)},), not {wire.dtype} of shape {tuple(wire.shape)}"
            )

    def _check_read(self, wire: torch.Tensor, numel: int, out: torch.Tensor) -> None:
        self._check_wire(wire, numel)
        _check_values(out)
        if out.numel() != numel:
            raise ValueError(f"out holds {out.numel()} elements, the wire {numel}")


def _check_values(values: torch.Tensor) -> None:
    if values.dim() != 1 or not values.is_floating_point() or not values.is_contiguous():
        raise ValueError(
            f"values are {values.dtype} of shape {tuple(values.shape)}: they must be a contiguous "
            "1-D floating tensor, such as a bucket's buffer or tensor.view(-1)"
        )


def pieces(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first element, part of ``values``), parts that fit the cache on a CPU."""
    step = PIECE if on_host(values) else max(values.numel(), 1)
    for start in range(0, values.numel(), step):
        yield start, values[start : start + step]


def on_host(values: torch.Tensor) -> bool:
    """Return whether looking at a value costs nothing: eager, and on a CPU."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def exponent_field(values: torch.Tensor) -> torch.Tensor:
    """Return the biased exponents of non-negative fp32 values."""
    return values.view(torch.int32) >> EXPONENT_BITS

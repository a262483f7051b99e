"""Packed sequences: torch reads their lengths in C++, before any mode sees the call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["with_lengths"]

_RECURRENT: frozenset[Any] = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))


def with_lengths(
    func: Any, args: tuple[Any, ...], real: Callable[[Tensor], Tensor]
) -> tuple[Any, tuple[Any, ...]]:
    """A call as it can be made on fake tensors: one that takes lengths takes real ones.

    Args:
        func: A torch function.
        args: Its arguments.
        real: Gives the values of a fake tensor.
    """
    takes_lengths = func in _RECURRENT or func in _WRITTEN_OUT
    # A hidden state may stand in their place.
    if takes_lengths and isinstance(args[1], FakeTensor) and args[1].dtype is torch.int64:
        return _WRITTEN_OUT.get(func, func), (args[0], real(args[1]), *args[2:])
    return func, args


def _pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """``torch._pack_padded_sequence``: of each step, the sequences that are so long."""
    steps = padded.transpose(0, 1) if batch_first else padded
    known: list[int] = lengths.tolist()
    sizes = [sum(length > time for length in known) for time in range(max(known))]
    parts = [steps[time, :size] for time, size in enumerate(sizes)]
    return torch.cat(parts), torch.tensor(sizes)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total: int
) -> tuple[Tensor, Tensor]:
    """``torch._pad_packed_sequence``: the sequences, padded, and their lengths."""
    sizes: list[int] = batch_sizes.tolist()
    out = data.new_full((max(len(sizes), total), sizes[0], *data.shape[1:]), value)
    at = time = 0
    for size, run in itertools.groupby(sizes):
        steps = len(list(run))
        part = data[at : at + steps * size]
        out[time : time + steps, :size] = part.view(steps, size, *data.shape[1:])
        at, time = at + steps * size, time + steps
    lengths = torch.tensor([sum(size > i for size in sizes) for i in range(sizes[0])])
    return out.transpose(0, 1) if batch_first else out, lengths


_functions: Any = torch._C._VariableFunctions
_WRITTEN_OUT: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    _functions._pack_padded_sequence: _pack,
    _functions._pad_packed_sequence: _pad,
}

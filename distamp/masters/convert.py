"""Gradients of a lower precision to fp32 gradients of masters, unscaled and checked in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from distamp import host
from distamp.errors import SettingError
from distamp.gradients import flag_of

__all__ = ["Unscaling", "convert"]

# Elements that are converted and then unscaled while they lie in a cache, so that memory is read
# once and written once. On an accelerator, where a block is one launch for many tensors, it only
# bounds how much lies in memory twice.
_BLOCK_ON_HOST = 2**16
_BLOCK = 2**25

#: A parameter of the model, whose gradient is read, and its master, whose gradient is written.
_Move = tuple[Tensor, Tensor]


class Unscaling:
    """Multiplies fp32 gradients by a factor and looks for inf and NaN in the same pass.

    Args:
        inv_scale: 0-d float32.
        found_inf: 0-d float32, the flag of its own device.

    Attributes:
        flags: For each device that has gradients, 0-d float32: 1 where it has inf or NaN.
    """

    def __init__(self, inv_scale: Tensor, found_inf: Tensor) -> None:
        self.flags: dict[torch.device, Tensor] = {}
        self._found_inf = found_inf
        self._scales = {found_inf.device: inv_scale}

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Unscale dense gradients of one device and dtype, in place."""
        device = gradients[0].device
        if device not in self.flags:
            same = device == self._found_inf.device
            self.flags[device] = self._found_inf if same else flag_of(False, device)
        if device not in self._scales:
            self._scales[device] = host.moved(self._scales[self._found_inf.device], device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            list(gradients), self.flags[device], self._scales[device]
        )


def convert(moves: Iterable[_Move], unscaling: Unscaling | None) -> None:
    """Set each master's gradient to its parameter's in float32, and free the parameter's.

    Each is freed as soon as it is converted, so the gradient of the whole model never lies in
    memory twice. It is multiplied in float32, so nothing underflows. A master's own buffer is used
    again where it has one.

    Args:
        moves: Parameters that have gradients, with their masters.
        unscaling: None only converts.

    Raises:
        SettingError: The model was moved to another device than its masters; nothing is converted.
    """
    alike: dict[tuple[torch.device, torch.dtype, bool], list[_Move]] = {}
    for parameter, master in moves:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.device != master.device:
            raise SettingError(
                f"the model has gradients on {gradient.device} and its masters are on "
                f"{master.device}: it was moved after MasterParameters was made. Move the model "
                "first, then make the optimizer and its masters, and load their state_dicts"
            )
        kind = gradient.device, gradient.dtype, gradient.is_sparse
        alike.setdefault(kind, []).append((parameter, master))
    for (device, _, is_sparse), group in alike.items():
        limit = _BLOCK_ON_HOST if host.is_host(device) else _BLOCK
        for block in _blocks(group, limit):
            # Functions, so that no name here keeps a gradient while the next is converted.
            if is_sparse:
                _convert_sparse(block, unscaling)
            else:
                _convert_dense(block, unscaling, limit)
            for parameter, _ in block:
                parameter.grad = None


def _blocks(group: Sequence[_Move], limit: int) -> Iterator[list[_Move]]:
    """Yield moves together that have at most ``limit`` elements, but for a single larger one."""
    block: list[_Move] = []
    elements = 0
    for parameter, master in group:
        if block and elements + parameter.numel() > limit:
            yield block
            block, elements = [], 0
        block.append((parameter, master))
        elements += parameter.numel()
    yield block


def _convert_sparse(block: Sequence[_Move], unscaling: Unscaling | None) -> None:
    values = []
    for parameter, master in block:
        assert parameter.grad is not None
        # Values of one row are added up in float32, where they cannot overflow as in float16.
        master.grad = parameter.grad.float().coalesce()
        values.append(master.grad.values())
    if unscaling is not None:
        unscaling(values)


def _convert_dense(block: Sequence[_Move], unscaling: Unscaling | None, limit: int) -> None:
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for parameter, master in block:
        assert parameter.grad is not None
        if master.grad is None or master.grad.is_sparse:
            master.grad = torch.empty_like(parameter.grad, dtype=torch.float32)
        sources.append(parameter.grad)
        targets.append(master.grad)
    source, target = sources[0], targets[0]
    pieces = [(sources, targets)]
    large = len(sources) == 1 and source.numel() > limit and host.is_host(source.device)
    if large and source.is_contiguous() and target.is_contiguous():
        cut = zip(source.view(-1).split(limit), target.view(-1).split(limit), strict=True)
        pieces = [([piece], [into]) for piece, into in cut]
    for some, into in pieces:
        torch._foreach_copy_(into, some)
        if unscaling is not None:
            unscaling(into)

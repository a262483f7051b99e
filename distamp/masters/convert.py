"""Gradients of a lower precision to fp32 gradients of masters, unscaled and checked in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from distamp import host
from distamp.errors import SettingError
from distamp.gradients import flag_of, local_of
from distamp.masters.blocks import blocks

__all__ = ["Unscaling", "convert"]

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
    for (_, _, is_sparse), group in alike.items():
        if is_sparse:
            _convert_sparse(group, unscaling)
            continue
        for gradients, targets in blocks(_rows(group)):
            torch._foreach_copy_(targets, gradients)
            if unscaling is not None:
                unscaling(targets)
            del gradients, targets  # before the next are made


def _rows(moves: Iterable[_Move]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each gradient and where it goes; what is yielded is the last that holds it."""
    for parameter, master in moves:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if master.grad is None or master.grad.is_sparse:
            master.grad = torch.empty_like(gradient, dtype=torch.float32)
        row = local_of(gradient), local_of(master.grad)
        del gradient
        yield row
        del row


def _convert_sparse(moves: Iterable[_Move], unscaling: Unscaling | None) -> None:
    values = []
    for parameter, master in moves:
        assert parameter.grad is not None
        # Values of one row are added up in float32, where they cannot overflow as in float16.
        master.grad = parameter.grad.float().coalesce()
        parameter.grad = None
        values.append(master.grad.values())
    if unscaling is not None:
        unscaling(values)

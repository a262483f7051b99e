"""Gradients of a lower precision to fp32 gradients of masters, unscaled and checked in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distamp import host
from distamp.errors import SettingError
from distamp.gradients import flag_of, is_dtensor, local_of, local_part

__all__ = ["Transfer", "convert", "placed_like"]

# Elements that are converted and then unscaled while they lie in a cache, so that memory is read
# once and written once. On an accelerator, where a block is one launch for many tensors, it only
# bounds how much lies in memory twice.
_BLOCK_ON_HOST = 2**16
_BLOCK = 2**25


@dataclass(slots=True)
class Transfer:
    """One gradient on its way.

    Args:
        source: Whose ``.grad`` is read.
        target: Whose ``.grad`` is written: float32, of the same shape and placement.
        local: The local part of ``source.grad``, dense or sparse; gone once it is converted.
    """

    source: Tensor
    target: Tensor
    local: Tensor

    @classmethod
    def of(
        cls, source: Tensor, target: Tensor, owner: torch.optim.Optimizer, index: int
    ) -> Transfer:
        """Look at ``source.grad``, which must be there.

        Raises:
            GradientError: It is a Partial DTensor.
            SettingError: The model was moved to another device than its masters.
        """
        assert source.grad is not None
        if source.grad.device != target.device:
            raise SettingError(
                f"the model has gradients on {source.grad.device} and its masters are on "
                f"{target.device}: it was moved after MasterParameters was made. Move the model "
                "first, then make the optimizer and its masters, and load their state_dicts"
            )
        return cls(source, target, local_part(source.grad, owner, index))


def convert(
    transfers: Sequence[Transfer],
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    free: Callable[[Tensor], None],
) -> list[Tensor]:
    """Set every ``target.grad`` to ``source.grad.float() * inv_scale`` and look for inf and NaN.

    The product is taken in float32, so that nothing underflows. A target's own buffer is used again
    where it has one.

    Args:
        transfers: The gradients, of any devices and dtypes.
        inv_scale: 0-d float32; None copies only.
        found_inf: 0-d float32 flag, set to 1.0 where its own device holds an overflow.
        free: Called with each source as soon as its gradient is converted, so that the gradient of
            the whole model never lies in memory twice.

    Returns:
        One 0-d flag for each device that holds gradients; none where nothing was looked for.
    """
    flags: dict[torch.device, Tensor] = {}
    scales: dict[torch.device, Tensor] = {}

    def unscale(written: list[Tensor]) -> None:
        if inv_scale is None or found_inf is None:
            return
        device = written[0].device
        if device not in flags:
            same = device == found_inf.device
            flags[device] = found_inf if same else flag_of(False, device)
            scales[device] = host.moved(inv_scale, device)
        torch._amp_foreach_non_finite_check_and_unscale_(written, flags[device], scales[device])

    for block in _blocks(transfers):
        if block[0].local.is_sparse:
            unscale([_write_sparse(transfer) for transfer in block])
        else:
            for pieces, into in _pieces(block):
                torch._foreach_copy_(into, pieces)
                unscale(into)
                del pieces
        for transfer in block:
            del transfer.local
            free(transfer.source)
    return list(flags.values())


def _blocks(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Yield transfers together that one call can take: of one kind, and not too large."""
    alike: dict[tuple[torch.device, torch.dtype, bool], list[Transfer]] = {}
    for transfer in transfers:
        local = transfer.local
        alike.setdefault((local.device, local.dtype, local.is_sparse), []).append(transfer)
    for (device, _, _), group in alike.items():
        limit = _limit(device)
        block: list[Transfer] = []
        elements = 0
        for transfer in group:
            size = transfer.local.numel()
            if block and elements + size > limit:
                yield block
                block, elements = [], 0
            block.append(transfer)
            elements += size
        yield block


def _pieces(block: list[Transfer]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield what is to be copied into what; a single large tensor on the host is cut up."""
    sources = [transfer.local for transfer in block]
    targets = [_buffer(transfer) for transfer in block]
    source, target = sources[0], targets[0]
    limit = _limit(source.device)
    large = len(sources) == 1 and source.numel() > limit and host.is_host(source.device)
    if large and source.is_contiguous() and target.is_contiguous():
        for piece, into in zip(
            source.view(-1).split(limit), target.view(-1).split(limit), strict=True
        ):
            yield [piece], [into]
    else:
        yield sources, targets


def _limit(device: torch.device) -> int:
    return _BLOCK_ON_HOST if host.is_host(device) else _BLOCK


def _buffer(transfer: Transfer) -> Tensor:
    """Return the local part of ``target.grad``, made anew if there is none to write into."""
    buffer, gradient = transfer.target.grad, transfer.source.grad
    assert gradient is not None
    if buffer is not None and not buffer.is_sparse:
        return local_of(buffer)
    buffer = torch.empty_like(transfer.local, dtype=torch.float32)
    transfer.target.grad = placed_like(buffer, gradient)
    return buffer


def placed_like(local: Tensor, like: Tensor) -> Tensor:
    """Return ``local`` as this rank's part of a DTensor laid out as ``like``, where that is one."""
    if not is_dtensor(like):
        return local
    # from_local would move what FSDP2's CPU offload keeps on the host to the mesh's device.
    meta = like._spec.tensor_meta
    assert meta is not None
    spec = like._spec.shallow_copy_with_tensor_meta(meta._replace(dtype=local.dtype))
    placed: Tensor = type(like)(local, spec, requires_grad=False)
    return placed


def _write_sparse(transfer: Transfer) -> Tensor:
    # Values of one row are added up in float32, where they cannot overflow as in float16.
    local = transfer.local
    gradient = local.float().coalesce()
    transfer.target.grad = gradient
    return gradient._values()

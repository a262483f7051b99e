"""Gradients that an ``update`` left behind: scaled by a scale that is no longer the scaler's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from distamp.gradients import is_dtensor, local_of

__all__ = [
    "Leftover",
    "has_values",
    "left_behind",
    "pass_begins",
    "scales_of",
    "still_there",
    "storage_of",
    "versions",
]


# Others have no storage of their own.
_LAYOUTS = (torch.strided, torch.sparse_coo)


@dataclass(eq=False, slots=True)
class Leftover:
    """One such gradient.

    Args:
        parameter: Whose gradient it is.
        gradient: The gradient itself.
        version: Of the gradient, when it was last seen to be of that scale alone.
        norm: 0-d, of the gradient at that time; not every write changes the version.
        scale: 0-d float32, what it was made with.
        made: 0-d, its norm then: zeros have no scale.
        others: The scales of what was added to it since.
    """

    parameter: TensorWeakRef
    gradient: TensorWeakRef
    version: int
    norm: Tensor
    scale: float | Tensor
    made: Tensor
    others: list[float | Tensor] = field(default_factory=list)

    def is_there(self) -> bool:
        """Return whether the parameter still has this gradient."""
        parameter = self.parameter()
        return (
            parameter is not None
            and parameter.grad is not None
            and parameter.grad is self.gradient()
        )

    def scale_changes(self, before: Tensor) -> None:
        """Note that what was written to it so far may be of the scale until now."""
        gradient = self.gradient()
        if gradient is not None and version(gradient) != self.version:
            self.others.append(before)
            self.is_now(gradient)

    def is_now(self, gradient: Tensor) -> None:
        """Note what the gradient is after a pass that was watched, or a change of the scale."""
        self.gradient, self.version = TensorWeakRef(gradient), version(gradient)
        (self.norm,) = _norms([gradient])


def left_behind(parameters: Iterable[Tensor], scale: Tensor) -> list[Leftover]:
    """Return the gradients of these parameters, made with ``scale``."""
    filled = [(p, g) for p in parameters if (g := p.grad) is not None]
    norms = _norms([gradient for _, gradient in filled])
    return [
        Leftover(TensorWeakRef(p), TensorWeakRef(g), version(g), norm, scale, norm)
        for (p, g), norm in zip(filled, norms, strict=True)
    ]


def pass_begins(leftovers: list[Leftover], scale: float | Tensor) -> Callable[[], None]:
    """Return what to call at the end of a backward pass, to note what it added to.

    Args:
        leftovers: Those that are still there.
        scale: Of the pass.
    """
    gradients = [gradient for each in leftovers if (gradient := each.gradient()) is not None]
    # Norms are not read before the pass has ended, and only of those that it added to.
    before = list(zip(leftovers, _norms(gradients), map(version, gradients), strict=True))

    def ended() -> None:
        changed = []
        for each, norm, version_before in before:
            parameter, gradient = each.parameter(), each.gradient()
            now = None if parameter is None else parameter.grad
            if now is not None and (now is not gradient or version(now) != version_before):
                changed.append((each, norm, now))
        norms = _read(norm for _, norm, _ in changed)
        for (each, _, now), had in zip(changed, norms, strict=True):
            if had == 0.0:  # it was zeroed in place
                each.others = []
                each.made = torch.zeros_like(each.made)
            each.others.append(scale)
            each.is_now(now)

    return ended


def scales_of(
    leftovers: Iterable[Leftover], scale: Tensor
) -> tuple[list[Leftover], list[float | Tensor]]:
    """Return those that are still there and not zero, and the scales they were made with.

    Args:
        leftovers: Of one optimizer.
        scale: The present one, of whatever was written outside of a watched backward pass.
    """
    there = [(each, g) for each in still_there(leftovers) if (g := each.gradient()) is not None]
    norms = _norms([gradient for _, gradient in there])
    values = _read(
        each
        for (one, _), norm in zip(there, norms, strict=True)
        for each in (one.made, one.norm, norm)
    )
    found = []
    scales: dict[int, float | Tensor] = {}
    for place, (each, gradient) in enumerate(there):
        first, a, b = values[3 * place : 3 * place + 3]
        if b == 0.0:
            continue
        if version(gradient) != each.version or not (a == b or a != a):
            each.others.append(scale)
            each.is_now(gradient)
        found.append(each)
        own = [each.scale] if first != 0.0 else []
        scales.update((id(one), one) for one in (*own, *each.others))
    return found, list(scales.values())


def still_there(leftovers: Iterable[Leftover]) -> list[Leftover]:
    """Return those whose parameters still have them."""
    return [each for each in leftovers if each.is_there()]


def has_values(gradient: Tensor) -> bool:
    """Return whether this rank's part of a gradient has a number other than zero."""
    with torch.no_grad():
        return bool(_values(gradient).any())


def versions(parameters: Iterable[Tensor]) -> list[tuple[int, int] | None]:
    """Return for each gradient which tensor it is, and how often it was written to."""
    return [None if (g := p.grad) is None else (id(g), version(g)) for p in parameters]


def storage_of(gradient: Tensor | None) -> StorageWeakRef | None:
    """Return what tells whether a gradient's memory was freed: another may have its ``id`` then.

    Gradients are not referred to themselves: torch swaps no tensor with weak references.
    """
    if gradient is None or gradient.layout not in _LAYOUTS:
        return None
    return StorageWeakRef(_values(gradient).untyped_storage())


def version(gradient: Tensor) -> int:
    """Return how often a gradient was written to, as far as torch counts it."""
    if gradient.is_inference():
        return 0
    if is_dtensor(gradient):
        # FSDP2 adds to what a DTensor holds; operations on the DTensor itself count there alone.
        return gradient._version + gradient._local_tensor._version
    return gradient._version


def _values(gradient: Tensor) -> Tensor:
    values = local_of(gradient)
    return values._values() if values.is_sparse else values


def _norms(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Return the 1-norm of each, which is 0 for zeros alone."""
    with torch.no_grad():
        values = [v if (v := _values(g)).numel() else v.new_zeros(1) for g in gradients]
        return torch._foreach_norm(values, 1) if values else ()


def _read(norms: Iterable[Tensor]) -> list[float]:
    """Return the values; waits for a device once."""
    every = list(norms)
    if not every:
        return []
    device = every[0].device
    found: list[float] = torch.stack([each.to(device, torch.float32) for each in every]).tolist()
    return found

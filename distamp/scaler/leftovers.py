"""Gradients that an ``update`` left behind: scaled by a scale that is no longer the scaler's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from distamp.gradients import is_dtensor, local_of

__all__ = ["Leftover", "has_values", "left_behind", "still_there", "versions"]


@dataclass(eq=False, slots=True)
class Leftover:
    """One such gradient.

    Args:
        parameter: Whose gradient it is.
        gradient: The gradient itself.
        version: Of the gradient, when it was last seen to be of that scale alone.
        norm: 0-d, of the gradient at that time; not every write changes the version.
        scale: 0-d float32, what it was made with.
        added: Whether a backward pass with another scale has added to it since.
    """

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    version: int
    norm: Tensor
    scale: Tensor
    added: bool = False

    def is_there(self) -> bool:
        """Return whether the parameter still has this gradient."""
        parameter = self.parameter()
        return (
            parameter is not None
            and parameter.grad is not None
            and parameter.grad is self.gradient()
        )

    def has_values(self) -> bool:
        """Return whether the gradient has a number other than zero on this rank."""
        gradient = self.gradient()
        return gradient is not None and has_values(gradient)

    def was_written(self) -> bool:
        """Return whether something other than a watched backward pass has written to it."""
        gradient = self.gradient()
        if gradient is None:
            return False
        return version(gradient) != self.version or not torch.equal(self.norm, _norm(gradient))

    def pass_begins(self, current: bool) -> Callable[[], None]:
        """Return what to call at the end of a backward pass, to note whether it added to this.

        Args:
            current: Whether the pass is of the scaler's present scale.
        """
        parameter, gradient = self.parameter(), self.gradient()
        if parameter is None or gradient is None:
            return lambda: None
        before = version(gradient)
        written = before != self.version
        with torch.no_grad():
            # Not read before the pass has ended, and only if it added to this.
            had_values = _values(gradient).any()

        def ended() -> None:
            now = parameter.grad
            if now is None or (now is gradient and version(now) == before):
                return
            if current and not had_values:  # it was zeroed in place
                self.gradient = lambda: None  # type: ignore[assignment]
                return
            self.gradient, self.version, self.norm = weakref.ref(now), version(now), _norm(now)
            self.added |= current or written

        return ended


def left_behind(parameter: Tensor, scale: Tensor) -> list[Leftover]:
    """Return the gradient of a parameter, made with ``scale``, as a list of one; or of none."""
    gradient = parameter.grad
    if gradient is None:
        return []
    places = weakref.ref(parameter), weakref.ref(gradient)
    return [Leftover(*places, version(gradient), _norm(gradient), scale)]


def still_there(leftovers: Iterable[Leftover]) -> list[Leftover]:
    """Return those whose parameters still have them."""
    return [each for each in leftovers if each.is_there()]


def has_values(gradient: Tensor) -> bool:
    """Return whether this rank's part of a gradient has a number other than zero."""
    with torch.no_grad():
        return bool(_values(gradient).any())


def versions(parameters: Iterable[Tensor | None]) -> list[tuple[int, int] | None]:
    """Return for each gradient which tensor it is, and how often it was written to."""
    return [None if p is None or (g := p.grad) is None else (id(g), version(g)) for p in parameters]


def version(gradient: Tensor) -> int:
    """Return how often a gradient was written to, as far as torch counts it."""
    if is_dtensor(gradient):
        # FSDP2 adds to what a DTensor holds; operations on the DTensor itself count there alone.
        return gradient._version + gradient._local_tensor._version
    return gradient._version


def _values(gradient: Tensor) -> Tensor:
    values = local_of(gradient)
    return values._values() if values.is_sparse else values


def _norm(gradient: Tensor) -> Tensor:
    with torch.no_grad():
        norm: Tensor = torch.linalg.vector_norm(_values(gradient))
        return norm

"""Whether an optimizer has gradients that no step has used yet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from distamp.scaler.leftovers import storage_of, versions

__all__ = ["UsedGradients"]


class UsedGradients:
    """An optimizer's gradients at the end of the iteration that last used them.

    As far as two of its parameters tell: to ask all in every step would be slow.

    Attributes:
        places: Of those parameters; empty until they are chosen.
    """

    __slots__ = ("_storage", "_versions", "places")

    def __init__(self) -> None:
        self.places: tuple[int, ...] = ()
        self._versions: list[tuple[int, int] | None] | None = None
        self._storage: StorageWeakRef | None = None

    def choose(self, parameters: Sequence[Tensor]) -> None:
        """Choose the first and the last parameter that are trained and have gradients."""
        places = range(len(parameters))
        chosen = (
            next((i for i in each if _has_gradient(parameters[i])), None)
            for each in (places, reversed(places))
        )
        self.places = tuple(i for i in chosen if i is not None)

    def forget(self) -> None:
        """Take whatever gradients there are for new."""
        self._versions = None

    def note(self, parameters: Sequence[Tensor], alone: bool) -> None:
        """Note the gradients there are, which were unscaled or stepped.

        Args:
            parameters: All of the optimizer's.
            alone: Whether no other optimizer is known.
        """
        chosen = self._chosen(parameters)
        if False in [p.requires_grad for p in chosen]:
            self.choose(parameters)  # what was frozen since tells nothing
            chosen = self._chosen(parameters)
        self._versions = versions(chosen) or None
        # Alone, it is stepped before the next change of the scale, but for one by hand.
        self._storage = None if alone or not chosen else storage_of(chosen[-1].grad)

    def may_be_others(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether there may be gradients now that were not there then."""
        now = versions(self._chosen(parameters))
        if self._versions is None or self._versions != now:
            return True
        if self._storage is not None and self._storage.expired():
            return True
        # Where those are zeroed, a loss of another optimizer may have made others since.
        return not any(now) and any(p.grad is not None for p in parameters)

    def _chosen(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [parameters[i] for i in self.places if i < len(parameters)]


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None

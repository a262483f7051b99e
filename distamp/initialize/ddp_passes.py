"""DDP reduces one backward pass for each forward pass; a second one is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distamp.errors import StageError

__all__ = ["OnePassEach"]


class OnePassEach:
    """Watches the outputs of one DistributedDataParallel.

    torch reduces gradients in the first backward pass through an output and leaves those of a
    second one as each rank has them: the ranks diverge silently.

    Args:
        model: The wrapper itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pass: object | None = None
        model.register_forward_hook(self._watch)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Stand around one backward pass that is to be reduced."""
        self._pass = object()
        try:
            yield
        finally:
            self._pass = None

    def _watch(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        reduced_in: list[object] = []

        def arrived(gradient: Tensor) -> None:
            now = self._pass
            if now is None or (reduced_in and reduced_in[0] is now):
                return
            if reduced_in:
                raise StageError(
                    "a second backward() through one forward pass of DistributedDataParallel: it "
                    "reduces the first alone, and the ranks would part. Add the losses up before "
                    "backward(), or run the forward pass once for each"
                )
            reduced_in.append(now)

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(arrived)

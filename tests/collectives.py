"""Count the collectives that one rank issues, with their bytes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Collectives", "count_collectives"]


@dataclass
class Collectives:
    """Every c10d collective that this rank issued through a process group: name and bytes."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.calls)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.calls)


class _CollectiveMode(TorchDispatchMode):
    """Records calls of ProcessGroup from Python and from C++, where the reducer of DDP is."""

    def __init__(self, log: Collectives) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first, and comes back with its collectives.
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in func.name():
            name = func.name().split("::")[1].split(".")[0].strip("_")
            leaves = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            self.log.calls.append((name, sum(leaf.nbytes for leaf in leaves)))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count the collectives this thread issues.

    torch's ``CommDebugMode`` counts some of the operators; this counts all of them, and bytes.
    """
    log = Collectives()
    with _CollectiveMode(log):
        yield log

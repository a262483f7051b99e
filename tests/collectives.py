"""Count the collectives that one rank issues, with their bytes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Collectives", "count_collectives"]


@dataclass
class Collectives:
    """Every c10d collective that this rank issued, in order."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.calls)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.calls)

    def by_name(self) -> Counter[str]:
        return Counter(name for name, _ in self.calls)

    def add(self, name: str, tensors: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
        self.calls.append((name.strip("_"), sum(t.numel() * t.element_size() for t in leaves)))


class _CollectiveMode(TorchDispatchMode):
    """Sees what goes through ProcessGroup, from Python and from C++ (DDP's reducer) alike."""

    namespaces: ClassVar[set[str]] = {"c10d", "_c10d_functional"}

    def __init__(self, log: Collectives) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first, and comes back with its collectives
        if func.namespace in self.namespaces and "wait_tensor" not in func.name():
            self.log.add(func.name().split("::")[1].split(".")[0], args[0])
        return func(*args, **(kwargs or {}))


# What a Backend can be asked for directly, past the dispatcher.
_BACKEND_CALLS = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
)


@contextlib.contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count the collectives this thread issues, whichever way they are issued.

    torch's ``CommDebugMode`` counts some of the operators; this counts all of them, and the calls
    made on a backend object directly, with their bytes.
    """
    log = Collectives()
    backend = torch._C._distributed_c10d.Backend
    before = {name: backend.__dict__[name] for name in _BACKEND_CALLS if name in backend.__dict__}

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.add(name, args[0] if args else list(kwargs.values()))
            return original(self, *args, **kwargs)

        return call

    for name, original in before.items():
        setattr(backend, name, counted(name, original))
    try:
        with _CollectiveMode(log):
            yield log
    finally:
        for name, original in before.items():
            setattr(backend, name, original)

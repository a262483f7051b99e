"""Which module an op belongs to: names without wrappers, and autograd nodes back to modules.

Forward, a stack of entered modules answers. Backward there is no such stack, but every autograd
node carries the thread's sequence number at its creation, so the numbers that passed while a
module ran name the nodes it made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from distamp.autocast.report.rows import OUTSIDE
from distamp.autocast.tensors import tensors_in

__all__ = [
    "NOBODY",
    "GradOwners",
    "NodeOwners",
    "Owner",
    "mark_nodes",
    "module_names",
    "parameter_names",
    "tensors_in",
]

# Components of names that wrappers add: FSDP1 and fairscale, torch.compile, checkpoint wrappers.
_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_orig_mod", "_checkpoint_wrapped_module")
# AccumulateGrad has no number of its own; torch gives it the largest.
_ACCUMULATE = 2**64 - 1
_OWNERS_KEPT = 400_000
_KEY = "distamp.owner"


class Owner(NamedTuple):
    """Who made an autograd node."""

    module: str
    function: str = ""
    # Why the cast was made, if the node is a cast's.
    cause: str = ""
    weight: bool = False


NOBODY = Owner(OUTSIDE)


class NodeOwners:
    """The makers of autograd nodes of one thread, by runs of sequence numbers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._owners: list[Owner] = []
        self._next = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def claim(self, owner: Owner) -> None:
        """Give the nodes made since the last call, and those to come, to ``owner``."""
        owners = self._owners
        if not owners or owners[-1] != owner:
            if owners and self._starts[-1] == self._next:
                owners[-1] = owner
            else:
                self._starts.append(self._next)
                owners.append(owner)
                if len(owners) > _OWNERS_KEPT:
                    del self._starts[: _OWNERS_KEPT // 2], owners[: _OWNERS_KEPT // 2]
        self._next = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def of(self, number: int) -> Owner:
        """The maker of the node with this number, :data:`NOBODY` if it is older than we are."""
        at = bisect_right(self._starts, number) - 1
        return self._owners[at] if at >= 0 else NOBODY


class GradOwners:
    """The maker of any node: by its mark, its parameter, or its number in the home thread."""

    def __init__(self, home: NodeOwners, parameters: dict[int, str]) -> None:
        self._home = home
        self._parameters = parameters
        # Set once another thread has marked nodes; until then no node's metadata is looked at.
        self.marked = False

    def of(self, node: Any) -> Owner:
        """The owner of the node that is being evaluated; None means between nodes."""
        if node is None:
            return NOBODY
        if self.marked:
            owner = node.metadata.get(_KEY)
            if owner is not None:
                return owner  # type: ignore[no-any-return]
        number = node._sequence_nr()
        if number == _ACCUMULATE:
            variable = getattr(node, "variable", None)
            return Owner(self._parameters.get(id(variable), OUTSIDE), "accumulate_grad")
        return self._home.of(number)


def mark_nodes(outputs: Any, owners: NodeOwners, since: int, stop: set[Any]) -> None:
    """Write each node's maker on the node itself, where numbers of several threads would collide.

    Args:
        outputs: What the thread's outermost module returned.
        owners: The thread's record.
        since: The thread's sequence number when that module was entered.
        stop: Nodes that came in from outside the thread.
    """
    todo = [t.grad_fn for t in tensors_in(outputs) if t.grad_fn is not None]
    while todo:
        node = todo.pop()
        number = node._sequence_nr()
        metadata: dict[str, Any] = node.metadata  # type: ignore[assignment]
        if node in stop or number == _ACCUMULATE or number < since or _KEY in metadata:
            continue
        metadata[_KEY] = owners.of(number)
        todo.extend(each for each, _ in node.next_functions if each is not None)


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Every module of the model once, with the name it has without wrappers around it."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if not name:
            names[module] = ""
            continue
        head, _, leaf = name.rpartition(".")
        parent = model.get_submodule(head) if head else model
        above = names[parent]
        skip = leaf in _WRAPPERS or (leaf == "module" and _is_wrapper(parent, module))
        names[module] = above if skip else (f"{above}.{leaf}" if above else leaf)
    return names


def _is_wrapper(parent: nn.Module, child: nn.Module) -> bool:
    """Whether the parent adds nothing of its own, as DataParallel and its like."""
    return list(parent.children()) == [child] and not any(parent.parameters(recurse=False))


def parameter_names(names: Iterable[tuple[nn.Module, str]]) -> dict[int, str]:
    """``id(parameter)`` to the name of the first module that holds it."""
    owners: dict[int, str] = {}
    for module, name in names:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
    return owners

"""op_reference: what torch's documents say of each op, and what the running torch registered."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from distamp.autocast.op_lists import names
from distamp.autocast.op_lists.registered import registered
from distamp.autocast.op_lists.rules import Category

__all__ = ["OpReference", "op_reference"]


@dataclass(frozen=True)
class OpReference:
    """One op's category from two sources.

    Attributes:
        name: The op, as the documents write it, or else as the dispatcher does.
        documented: Document to category, for the documents that list it.
        registered: ``"lower_precision"``, ``"fp32"``, ``"promote"``, ``"banned"`` (it raises) or
            ``"unlisted"``; None where the running torch has no such op.
    """

    name: str
    documented: Mapping[str, str]
    registered: str | None


@functools.cache
def op_reference(device_type: str) -> Mapping[str, OpReference]:
    """What autocast does with each op: as documented, and as registered in this torch.

    Torch has the documents and the behaviour, and nothing that compares them.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` and so on. The device need not be here.

    Returns:
        Op to :class:`OpReference`, for every op that a document lists or this torch registers.

    Raises:
        ValueError: This torch has no autocast for ``device_type``.
    """
    if not torch.amp.is_autocast_available(device_type):
        raise ValueError(f"this torch has no autocast for {device_type!r}")
    documented: dict[str, dict[str, str]] = {}
    for document in names.documents():
        for category, listed in names.documented(document).get(device_type, {}).items():
            for name in listed:
                documented.setdefault(name, {})[document] = category
    covered = {op for name in documented if names.known(name) for op in names.resolve(name)}
    every = sorted({*documented, *(set(registered(device_type)) - covered)})
    return {
        name: OpReference(name, documented.get(name, {}), _registered(name, device_type))
        for name in every
    }


def _registered(name: str, device_type: str) -> str | None:
    if not names.known(name):
        return None
    found = {
        category if isinstance(category, str) else category.value
        for op in names.resolve(name)
        if (category := registered(device_type).get(op)) is not None
    }
    return found.pop() if len(found) == 1 else Category.UNLISTED.value

"""The categories a document's lists give every op of the running torch."""

from __future__ import annotations

from collections.abc import Mapping

from distamp.autocast.op_lists import names
from distamp.autocast.op_lists.registered import registered, registered_overloads
from distamp.autocast.op_lists.rules import Category

__all__ = ["documented_categories"]


def documented_categories(document: str, device_type: str) -> Mapping[str, Category]:
    """The ops that a document puts elsewhere than the running torch does, and where.

    Ops the document does not list run in the dtype of their inputs, whatever torch registered.

    Raises:
        ValueError: The document has no lists for ``device_type``.
    """
    lists = names.documented(document)
    if device_type not in lists:
        raise ValueError(f"{document} states lists for {', '.join(lists)}, not for {device_type!r}")
    torchs = registered_overloads(device_type)
    found = dict.fromkeys(registered(device_type), Category.UNLISTED)
    for category, listed in lists[device_type].items():
        for name in listed:
            if names.known(name):
                found.update(dict.fromkeys(names.resolve(name), Category(category)))
    return {
        op: category
        for op, category in found.items()
        if any(
            torchs.get(overload, Category.UNLISTED) is not category
            for overload in names.overloads(op)
        )
    }

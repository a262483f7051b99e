"""Op lists: which op runs in which precision, for one region."""

from distamp.autocast.op_lists.lists import (
    ListsInForce,
    OpLists,
    current,
    enter,
    push,
    restore,
)

__all__ = ["ListsInForce", "OpLists", "current", "enter", "push", "restore"]

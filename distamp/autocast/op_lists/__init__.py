"""Op lists: which op runs in which precision, for one region or one module."""

from distamp.autocast.op_lists.lists import OpLists, current, moves, pop, push, restore

__all__ = ["OpLists", "current", "moves", "pop", "push", "restore"]

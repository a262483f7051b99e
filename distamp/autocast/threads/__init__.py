"""Autocast's state by thread: the stack of regions, and how a state gets to other threads."""

__all__: list[str] = []

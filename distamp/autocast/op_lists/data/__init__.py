"""Data that op_lists and op_reference read."""

__all__: list[str] = []

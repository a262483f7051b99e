"""Steps taken together: which ranks agree, by one message, and how a step is taken or skipped."""

__all__: list[str] = []

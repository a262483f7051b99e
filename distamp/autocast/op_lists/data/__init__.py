"""The lists of torch's documents."""

__all__: list[str] = []

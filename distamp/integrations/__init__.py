"""One module for each trainer that distamp's scaler and hooks are fitted into.

Nothing here is imported with ``distamp``; each module needs the package that it is named after.
"""

__all__: list[str] = []

"""`CheckSettings`: which state a guard or scaler checks beyond the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distamp.errors import ConfigError

__all__ = ["NO_CHECKS", "CheckSettings"]

_ON_MISMATCH = ("raise", "warn")


@dataclass(frozen=True)
class CheckSettings:
    """The checks of weights and replicas that messages of a guard or scaler carry.

    Args:
        check_update: Whether the weights that a step wrote are checked for inf and NaN.
        check_replicas_every: Compare replicas after this many updates; None for never.
        on_mismatch: The reaction if replicas differ: ``"raise"`` or ``"warn"``.

    Raises:
        ConfigError: A setting is outside its range.
    """

    check_update: bool = False
    check_replicas_every: Any = None
    on_mismatch: str = "raise"

    def __post_init__(self) -> None:
        interval = self.check_replicas_every
        if interval is not None and (type(interval) is not int or interval < 1):
            raise ConfigError(
                "check_replicas_every must be a number of updates, an integer >= 1, or None, not "
                f"{interval!r}."
            )
        if self.on_mismatch not in _ON_MISMATCH:
            raise ConfigError(
                f"on_mismatch must be one of {_ON_MISMATCH}, not {self.on_mismatch!r}."
            )
        if not isinstance(self.check_update, bool):
            raise ConfigError(f"check_update must be True or False, not {self.check_update!r}.")

    def text(self) -> str:
        """Return the settings as ranks compare them; empty without a check."""
        text = ""
        if self.check_update:
            text += "\ncheck_update=True"
        if self.check_replicas_every is not None:
            text += f"\ncheck_replicas_every={self.check_replicas_every}"
            text += f"\non_mismatch={self.on_mismatch}"
        return text


NO_CHECKS = CheckSettings()

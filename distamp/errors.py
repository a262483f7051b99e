"""The exception tree.

::

    DistampError             everything distamp raises
    +-- ConfigError         (ValueError, AssertionError) a setting outside what is allowed
    +-- CallOrderError           (RuntimeError, AssertionError) scaler calls in an impossible order
    +-- GradientError        (RuntimeError) unreadable gradients, or changed behind the scaler
    +-- RankMismatchError        (RuntimeError) ranks differ in call, optimizer, scale or settings
    +-- NonFiniteGradientsError   (RuntimeError) too many steps in a row were skipped
    |   +-- LossScaleCollapseError  the same of a scaler

Each class also derives from the builtin that torch raises in the same place, so code written
against torch keeps catching what it caught. Other argument mistakes raise plain ``ValueError`` or
``TypeError``.
"""

from __future__ import annotations

__all__ = [
    "CallOrderError",
    "ConfigError",
    "DistampError",
    "GradientError",
    "LossScaleCollapseError",
    "NonFiniteGradientsError",
    "RankMismatchError",
]


class DistampError(Exception):
    """Base class of the named errors of distamp."""


class ConfigError(DistampError, ValueError, AssertionError):
    """A setting is outside its range; torch asserts some of these, hence the bases."""


class CallOrderError(DistampError, RuntimeError, AssertionError):
    """``scale``, ``unscale_``, ``step`` and ``update`` were called in an impossible order."""


class GradientError(DistampError, RuntimeError):
    """Gradients cannot be read as they are, or changed between two scaler calls."""


class RankMismatchError(DistampError, RuntimeError):
    """The ranks of a group differ in calls, optimizers, scales or settings."""


class NonFiniteGradientsError(DistampError, RuntimeError):
    """``max_consecutive_skips`` steps in a row were skipped; every rank raises it."""


class LossScaleCollapseError(NonFiniteGradientsError):
    """The same where a loss is scaled: the scale backed off each time, and did not help."""

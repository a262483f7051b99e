"""The exceptions that distamp raises, in one tree.

::

    DistampError                     every error of distamp
    +-- ConfigError                  (ValueError, AssertionError) a setting outside its range
    +-- CallOrderError               (RuntimeError, AssertionError) calls in an impossible order
    +-- GradientError                (RuntimeError) gradients that cannot be read
    |   +-- ReplicaMismatchError     replicas, or their gradients, that differ between ranks
    +-- RankMismatchError            (RuntimeError) ranks that differ in calls or settings
    +-- NonFiniteError               (RuntimeError) training cannot go on with inf or NaN
        +-- NonFiniteWeightsError    weights have inf or NaN
        +-- NonFiniteGradientsError  too many steps in a row were skipped
            +-- LossScaleCollapseError  too many in a row for a scaler, which backed off each time

Each class also derives from the builtin that torch raises in the same place, so code for torch
still catches the error. Other mistakes in arguments raise plain ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

__all__ = [
    "CallOrderError",
    "ConfigError",
    "DistampError",
    "GradientError",
    "LossScaleCollapseError",
    "NonFiniteError",
    "NonFiniteGradientsError",
    "NonFiniteWeightsError",
    "RankMismatchError",
    "ReplicaMismatchError",
]


class DistampError(Exception):
    """Base class of the named errors of distamp."""


class ConfigError(DistampError, ValueError, AssertionError):
    """A setting is outside its range; torch asserts some settings, hence the bases."""


class CallOrderError(DistampError, RuntimeError, AssertionError):
    """``scale``, ``unscale_``, ``step`` and ``update`` were called in an impossible order."""


class GradientError(DistampError, RuntimeError):
    """Gradients cannot be read, or changed between two scaler calls."""


class ReplicaMismatchError(GradientError):
    """Replicas that should be equal on all ranks differ; every rank raises it."""


class RankMismatchError(DistampError, RuntimeError):
    """The ranks of a group differ in calls, optimizers, scales or settings."""


class NonFiniteError(DistampError, RuntimeError):
    """Training cannot go on, because of inf or NaN; every rank raises it."""


class NonFiniteWeightsError(NonFiniteError):
    """Weights of the model have inf or NaN, so no later step can help; every rank raises it."""


class NonFiniteGradientsError(NonFiniteError):
    """``max_consecutive_skips`` steps in a row were skipped; every rank raises it."""


class LossScaleCollapseError(NonFiniteGradientsError):
    """A scaler skipped ``max_consecutive_skips`` steps in a row, although its scale backed off."""

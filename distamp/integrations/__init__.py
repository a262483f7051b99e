"""Adapters that put distamp's scaler and communication hooks into trainers, one module a trainer.

``import distamp`` imports no adapter. Each module needs the trainer's package. `Scaler` lists the
methods that an adapter for another trainer calls.
"""

from distamp.integrations.trainer_scaler import Scaler

__all__ = ["Scaler"]

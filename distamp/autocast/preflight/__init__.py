"""Preflight: the precision report of a device that is not here, and what to mend."""

from distamp.autocast.preflight.check import preflight
from distamp.autocast.preflight.finding import Finding
from distamp.autocast.preflight.result import Preflight

__all__ = ["Finding", "Preflight", "preflight"]

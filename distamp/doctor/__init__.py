"""What distamp finds on this machine: ``python -m distamp doctor``."""

from __future__ import annotations

from distamp.doctor.report import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]

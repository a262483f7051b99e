"""What ran in which precision: reports of real passes and of foreseen ones."""

from distamp.report.contract import Breach, Breaches, Contract
from distamp.report.findings import Finding, findings
from distamp.report.mismatch import mismatch
from distamp.report.nonfinite import NonFinite, TensorRange
from distamp.report.preflight import Preflight, preflight
from distamp.report.recording import precision_report
from distamp.report.replay import StepReplay, first_nonfinite
from distamp.report.rows import PrecisionReport
from distamp.report.updates import lost_updates

__all__ = [
    "Breach",
    "Breaches",
    "Contract",
    "Finding",
    "NonFinite",
    "PrecisionReport",
    "Preflight",
    "StepReplay",
    "TensorRange",
    "findings",
    "first_nonfinite",
    "lost_updates",
    "mismatch",
    "precision_report",
    "preflight",
]

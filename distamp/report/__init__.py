"""What ran in which precision: reports of real passes and of foreseen ones."""

from distamp.report.contract import ContractReport, PrecisionContract, Violation
from distamp.report.findings import Finding
from distamp.report.logprob_mismatch import logprob_mismatch
from distamp.report.nonfinite import NonFiniteOrigin, TensorRange
from distamp.report.preflight import Preflight, preflight
from distamp.report.recording import precision_report
from distamp.report.replay import StepReplay, find_first_nonfinite
from distamp.report.rows import PrecisionReport
from distamp.report.updates import lost_updates

__all__ = [
    "ContractReport",
    "Finding",
    "NonFiniteOrigin",
    "PrecisionContract",
    "PrecisionReport",
    "Preflight",
    "StepReplay",
    "TensorRange",
    "Violation",
    "find_first_nonfinite",
    "logprob_mismatch",
    "lost_updates",
    "precision_report",
    "preflight",
]

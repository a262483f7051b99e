"""Reports on the precisions of a step: ops, contracts, and numbers that are not finite."""

from distamp.report.compare_gradients import compare_gradients
from distamp.report.contract import ContractReport, PrecisionContract
from distamp.report.findings import Finding, Findings
from distamp.report.gradient_comparison import GradientComparison, GradientRow
from distamp.report.logprob_mismatch import LogprobMismatch, logprob_mismatch
from distamp.report.lost_updates import LostUpdates, lost_updates
from distamp.report.nonfinite import NonFiniteOrigin, TensorRange
from distamp.report.op_row import OpRow
from distamp.report.precision_report import PrecisionReport, precision_report
from distamp.report.preflight import Preflight, preflight
from distamp.report.replay import StepReplay, find_first_nonfinite
from distamp.report.violations import Violation

__all__ = [
    "ContractReport",
    "Finding",
    "Findings",
    "GradientComparison",
    "GradientRow",
    "LogprobMismatch",
    "LostUpdates",
    "NonFiniteOrigin",
    "OpRow",
    "PrecisionContract",
    "PrecisionReport",
    "Preflight",
    "StepReplay",
    "TensorRange",
    "Violation",
    "compare_gradients",
    "find_first_nonfinite",
    "logprob_mismatch",
    "lost_updates",
    "precision_report",
    "preflight",
]

"""The precision report: what ran where, in which dtype, counted while real code runs."""

from distamp.autocast.report.report import PrecisionReport, compare_reports, precision_report

__all__ = ["PrecisionReport", "compare_reports", "precision_report"]

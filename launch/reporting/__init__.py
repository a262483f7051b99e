"""What a run shows while it goes on, and what it leaves behind to look at."""

from launch.compare import METRICS
from launch.reporting.metrics import read_metrics
from launch.reporting.reporter import PLOT, Reporter, RunReporter
from launch.reporting.tracking import check_trackers

__all__ = ["METRICS", "PLOT", "Reporter", "RunReporter", "check_trackers", "read_metrics"]

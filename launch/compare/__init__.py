"""What a training run has left behind, read back: its records, a picture and a comparison.

``python -m launch.compare RUN RUN`` prints the comparison. It reads what ``launch.reporting``
writes: metrics.jsonl and config.json.
"""

from launch.compare.plot import draw
from launch.compare.records import METRICS, Record, Records, read_records
from launch.compare.run import Run, read_run, read_runs
from launch.compare.table import Comparison, compare, power_of_two

__all__ = [
    "METRICS",
    "Comparison",
    "Record",
    "Records",
    "Run",
    "compare",
    "draw",
    "power_of_two",
    "read_records",
    "read_run",
    "read_runs",
]

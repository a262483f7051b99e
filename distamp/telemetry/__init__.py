"""What a training run has left behind, read back: its records, a picture and a comparison.

It lives in the package, not in the launcher, so that ``python -m distamp compare`` works wherever
distamp is installed. All it knows of the launcher is two files, metrics.jsonl and config.json.
"""

from distamp.telemetry.compare import Comparison, compare, power_of_two
from distamp.telemetry.plot import draw
from distamp.telemetry.records import METRICS, Record, Records, read_records
from distamp.telemetry.run import Run, read_run, read_runs

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

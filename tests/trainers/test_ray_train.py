"""The Ray Train example, as a user would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.common import needs

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.xdist_group("beside"),
    # Starting Ray and its workers takes tens of seconds on a quiet machine.
    pytest.mark.timeout(600),
]
needs("ray")


def test_two_workers_go_on_from_a_checkpoint_to_the_same_weights():
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    whole, taken_up, saved = done.stdout.strip().splitlines()[-3:]
    assert whole.removeprefix("whole: ") == taken_up.removeprefix("taken up: ")
    assert "scale 512" in whole, "one worker overflowed once, and both skipped"
    assert "fp16 saved" in saved

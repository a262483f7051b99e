"""Write the states of the version that is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import distamp
from tests.scaler.states.samples import AFTER, BEFORE, SAMPLES, train


def main() -> None:
    (name,) = sys.argv[1:]
    folder = Path(__file__).parent / name
    folder.mkdir()
    for sample, make in SAMPLES.items():
        scaler = make()
        if "fresh" not in sample and sample != "default":
            train(scaler, BEFORE)
        written = {
            "distamp": distamp.__version__,
            "torch": torch.__version__.split("+")[0],
            "state": scaler.state_dict(),
        }
        if hasattr(scaler, "schedule_state_dict"):
            written["schedule_state"] = scaler.schedule_state_dict()
        written["trace"] = train(scaler, AFTER)
        file = folder / f"{sample.replace(', ', '-').replace(' ', '-')}.json"
        file.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()

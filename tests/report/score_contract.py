"""Count the planted violations that `PrecisionContract` finds.

``python -m tests.report.score_contract --write`` runs each plant of plants_contract.py on its ranks
and writes docs/results/contract.md; without ``--write`` it only prints the table.
"""

from __future__ import annotations

import datetime
import sys
import warnings
from pathlib import Path

import torch

from distamp import PrecisionContract
from tests.ranks import RankPool
from tests.report.plants_contract import PLANTS
from tests.torch_versions import read_commit

COMMAND = "python -m tests.report.score_contract --write"
PAGE = Path(__file__).parents[2] / "docs" / "results" / "contract.md"
TEXT = """\
Each violation is a mistake that people make in their training code, for example an `.to()` that
does nothing. The author of the violations (`tests/report/plants_contract.py`) had not seen the
check. At the first run 32 of 34 were found. The int8 hook and the average by hand were found after
a change of the check, and two further violations were added.

Twelve violations of other kinds (bytes of FSDP2, norms in Python, compiled code, collectives, a
subgroup, a pipeline) are in `tests/report/plants_contract_compiled.py`. They were committed with
their sha256 before the first run, on 2026-11-28, and `python -m pytest -m ""
tests/report/test_plants_compiled.py` runs them. At the first run **11 of 12** were found. The
twelfth, queries that `normalize` divides by their norm in bf16, is found now. Each of these steps
also ran under a contract that it keeps, and the check reported no violation, after one correction:
torch's RMS norm computes the mean of squares in float32 also for bf16 rows, and the check had not
known it.

[Levels in their layouts](level_cells.md) are steps without a violation."""


def find_violation(number: int) -> tuple[bool, str]:
    """Return whether this rank's report has the planted violation, and a line of the report."""
    plant = PLANTS[number]
    contract = PrecisionContract(**plant.contract)
    with warnings.catch_warnings(action="ignore"):
        report = contract.check(*plant.build())
    for violation in report:
        if plant.is_found_by(violation):
            return True, str(violation).partition("\n")[0]
    return False, str(report).partition("\n")[0]


def main() -> None:
    """Print a row for each planted violation, and write the page."""
    rows = []
    num_found = 0
    for world_size in sorted({plant.ranks for plant in PLANTS}):
        with RankPool(world_size) as pool:
            for number, plant in enumerate(PLANTS):
                if plant.ranks != world_size:
                    continue
                is_found, line = pool.run(find_violation, number)[0]
                num_found += is_found
                answer = "yes" if is_found else "**no**"
                rows.append(f"| {plant.name} | {world_size} | {answer} | {line} |")
                print(rows[-1], flush=True)
    result = f"{num_found} of {len(PLANTS)}"
    print(result)
    if "--write" not in sys.argv:
        return
    first_line = f"{datetime.date.today()}, at {read_commit()}, `{COMMAND}`."
    versions = f"torch {torch.__version__}, gloo: **{result}** violations are found."
    header = "| Violation | Ranks | Found | Report |\n|---|---|---|---|"
    paragraphs = ["# Planted violations of a contract", first_line, versions, TEXT]
    PAGE.write_text("\n\n".join([*paragraphs, "\n".join([header, *rows])]) + "\n")


if __name__ == "__main__":
    # Ranks import the functions of this module by its name.
    from tests.report import score_contract

    score_contract.main()

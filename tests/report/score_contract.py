"""How many planted breaches the contract finds.

``python -m tests.report.score_contract [--write]``.

Each plant of plants_contract.py runs one step under its contract. A breach is found where one has
the right key, dtype and place. ``--write`` puts the table into docs/results/contract.md.
"""

import datetime
import sys
import warnings
from pathlib import Path

import torch

from distamp import Contract
from tests.ranks import RankPool
from tests.report.plants_contract import PLANTS

PAGE = Path(__file__).parents[2] / "docs" / "results" / "contract.md"


def check(place: int) -> tuple[bool, str]:
    """Whether the plant is found, and what the contract says, on this rank."""
    plant = PLANTS[place]
    with warnings.catch_warnings(action="ignore"):
        breaches = Contract(**plant.declared).check(*plant.build())
    right = [
        each
        for each in breaches
        if each.key in (plant.keys or plant.declared)
        and plant.found in each.found
        and (not plant.where or any(plant.where in where for where in each.where))
    ]
    shown = (right or list(breaches) or ["nothing"])[0]
    return bool(right), str(shown).splitlines()[0]


def row(place: int) -> tuple[bool, str]:
    """Whether all ranks found a plant, and its row."""
    plant = PLANTS[place]
    with RankPool(plant.ranks, timeout=120) as pool:
        results = pool.run(check, place)
    found, said = all(right for right, _ in results), results[0][1].replace("|", "\\|")
    return found, f"| {plant.name} | {plant.ranks} | {'yes' if found else '**no**'} | {said} |"


def main() -> None:
    rows = [row(place) for place in range(len(PLANTS))]
    count = sum(found for found, _ in rows)
    table = ["| breach | ranks | found | what it says |", "|---|---|---|---|"]
    table += [line for _, line in rows]
    print(*table, f"{count} of {len(PLANTS)}", sep="\n")
    if "--write" in sys.argv:
        head = (
            "# Planted breaches that the contract finds\n\n"
            "Each is planted as people make it; whoever planted them had not seen the check. They\n"
            "were put into one table since its first run (`tests/report/plants_contract.py`).\n"
            f"`python -m tests.report.score_contract --write`, {datetime.date.today()}, torch "
            f"{torch.__version__}: **{count} of {len(PLANTS)}**.\n"
            "At its first run it was 32 of 34: the int8 hook and the average by hand were found\n"
            "after a repair each. [Clean set-ups](level_cells.md) break nothing.\n"
        )
        PAGE.write_text("\n".join([head, *table]) + "\n")


if __name__ == "__main__":
    main()

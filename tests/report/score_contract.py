"""How many planted breaches the contract finds.

``python -m tests.report.score_contract [--write]``.

Each plant of plants_contract.py runs one step under its contract. A breach is found where one has
the right key, dtype and place. ``--write`` puts the table into docs/results/contract.md.
"""

import datetime
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from distamp import Contract
from tests.ranks import RankPool
from tests.report.plants_contract import PLANTS
from tests.report.setups import CLEAN, clean

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


def table() -> tuple[int, list[str]]:
    """How many are found, and a row for each."""
    lines = ["| breach | ranks | found | what it says |", "|---|---|---|---|"]
    found: dict[str, Any] = {}
    for ranks in sorted({plant.ranks for plant in PLANTS}):
        with RankPool(ranks, timeout=120) as pool:
            for place, plant in enumerate(PLANTS):
                if plant.ranks == ranks:
                    try:
                        results = pool.run(check, place)
                    except Exception as error:
                        results = [(False, str(error).strip().splitlines()[-1])]
                    found[plant.name] = all(right for right, _ in results), results[0][1]
    for plant in PLANTS:
        right, said = found[plant.name]
        said = said.replace("|", "\\|")
        lines.append(f"| {plant.name} | {plant.ranks} | {'yes' if right else '**no**'} | {said} |")
    return sum(right for right, _ in found.values()), lines


def quiet() -> tuple[int, list[str]]:
    """How many clean set-ups of levels and layouts break nothing, and a row for each."""
    lines, kept = ["| level | layout | hook | breaches |", "|---|---|---|---|"], 0
    with RankPool(2, timeout=120) as pool:
        for setup in CLEAN:
            found = max(len(each) for each in pool.run(clean, *setup))
            kept += not found
            lines.append(f"| {setup[0]} | {setup[1]} | {setup[2] or '-'} | {found} |")
    return kept, lines


def main() -> None:
    count, lines = table()
    kept, rows = quiet()
    print("\n".join([*lines, "", *rows]))
    print(f"\n{count} of {len(PLANTS)}, {kept} of {len(CLEAN)} clean ones without a breach")
    if "--write" in sys.argv:
        head = (
            "# Planted breaches that the contract finds\n\n"
            "Each is planted as people make it; whoever planted them had not seen the check. They\n"
            "were put into one table since its first run (`tests/report/plants_contract.py`).\n"
            f"`python -m tests.report.score_contract --write`, {datetime.date.today()}, torch "
            f"{torch.__version__}: **{count} of {len(PLANTS)}**.\n"
            "At its first run it was 32: the int8 hook and the average by hand were found after a\n"
            "repair each.\n"
        )
        tail = (
            "\n## Clean set-ups\n\nEach level under its own contract (`amp.check`), in the layouts "
            f"it is for: {kept} of {len(CLEAN)}\nwithout a breach (`tests/report/setups.py`).\n"
        )
        PAGE.write_text("\n".join([head, *lines, tail, *rows]) + "\n")


if __name__ == "__main__":
    main()

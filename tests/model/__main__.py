"""``python -m tests.model``: every model and every planted fault, as a table.

The names of models choose some of them; ``--large`` runs the ones of a million states and more
instead of the others.
With ``--store`` it writes the walks for real ranks, for machines without SPIN.
"""

import json
import sys

from tests.model.check import MISSING, RUNS, Outcome, Run, check
from tests.model.programs import STORED, WALK_KINDS, spin_version, walk_model


def main() -> int:
    """Print the table; return the number of runs with another outcome than expected."""
    if MISSING:
        print(f"not found: {', '.join(MISSING)}")
        return 1
    if "--store" in sys.argv:
        store_walks()
        return 0
    print(f"{spin_version()}\n")
    print("| model | defines | result | states | depth | seconds |")
    print("|---|---|---|---|---|---|")
    models = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    num_wrong = num_held = num_found = 0
    for run in RUNS:
        if run.is_large != ("--large" in sys.argv):
            continue
        if models and run.model not in models:
            continue
        outcome = check(run)
        is_right = run.violation in outcome.violation
        is_right = is_right and bool(run.violation) == bool(outcome.violation)
        num_wrong += not is_right
        num_held += is_right and not run.violation
        num_found += is_right and bool(run.violation)
        print(table_row(run, outcome, is_right), flush=True)
    print(f"\n{num_held} models hold, {num_found} planted faults found, {num_wrong} runs wrong.")
    return num_wrong


def table_row(run: Run, outcome: Outcome, is_right: bool) -> str:
    """Return the row of a run in the table."""
    result = "holds"
    if outcome.violation:
        violation = outcome.violation.replace("|", "\\|")
        result = f"found: `{violation}`"
    if not is_right:
        result = f"**WRONG**, {result}"
    return (
        f"| {run.model} | {run.defines} | {result} | {outcome.states:,} | {outcome.depth} "
        f"| {outcome.seconds:.2f} |"
    )


def store_walks() -> None:
    """Write SPIN's walks through the models into walks.json."""
    stored: dict[str, object] = {"version": spin_version()}
    for kind in WALK_KINDS:
        stored[kind.name] = walk_model(kind)
    STORED.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

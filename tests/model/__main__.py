"""``python -m tests.model``: every model and every planted fault, as a table.

The names of models choose some of them; ``--large`` adds the runs of a million states and more.
With ``--store`` it writes the walks that real ranks follow where there is no SPIN.
"""

import json
import sys

from tests.model.check import MISSING, RUNS, check
from tests.model.programs import DRAWN, STORED, version, walks


def main() -> int:
    """Print the table; fail if something does not hold, or a fault is not found."""
    if MISSING:
        print(f"not found: {', '.join(MISSING)}")
        return 1
    if "--store" in sys.argv:
        stored = {
            f"{model} RANKS={size} {more}": walks(model, size, more) for model, size, more in DRAWN
        }
        STORED.write_text(json.dumps({"version": version(), **stored}, indent=1) + "\n")
        return 0
    print(f"{version()}\n")
    wrong = 0
    print("| model | defines | result | states | depth | seconds |")
    print("|---|---|---|---|---|---|")
    models = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for run in RUNS:
        if (run.large and "--large" not in sys.argv) or (models and run.model not in models):
            continue
        outcome = check(run)
        right = run.breaks in outcome.found if run.breaks else not outcome.found
        wrong += not right
        what = f"found: `{outcome.found.replace('|', chr(92) + '|')}`" if outcome.found else "holds"
        print(
            f"| {run.model} | {run.defines} | {what if right else '**WRONG**, ' + what} "
            f"| {outcome.states:,} | {outcome.depth} | {outcome.seconds:.2f} |",
            flush=True,
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main())

"""Check the models of the protocol with SPIN, and that each planted fault is found."""

import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MISSING", "RUNS", "Outcome", "Run", "check", "tool"]

FOLDER = Path(__file__).parent
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
# More than any run takes on a busy machine.
TIMEOUT_S = 300.0
STUCK = "invalid end state"


@dataclass(frozen=True)
class Run:
    """One run of the model checker.

    Args:
        model: ``scaler``, ``guard`` or ``exchange``.
        defines: What the model is told, without ``-D``.
        breaks: A part of what SPIN says of a planted fault; empty where all must hold.
        quick: Whether every test run has it.
        large: Whether it takes more than a million states; only with ``--large``.
    """

    model: str
    defines: str
    breaks: str = ""
    quick: bool = False
    large: bool = False

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.model} {self.defines}"


@dataclass(frozen=True)
class Outcome:
    """What SPIN found: its message where something broke, else nothing."""

    found: str
    states: int
    depth: int
    seconds: float


def _held(defines: str, model: str = "scaler", *, quick: bool = False, large: bool = False) -> Run:
    return Run(model, defines, quick=quick, large=large)


_SCALE = "own[1].scale==own[0].scale"
_TAKEN = "taken[1]==taken[0]"
_ALIKE = "different||any_error"

RUNS = [
    _held("RANKS=2 CALLS=5"),
    _held("RANKS=2 CALLS=6", large=True),
    _held("RANKS=3 CALLS=4"),
    _held("RANKS=3 CALLS=5", large=True),
    _held("RANKS=2 CALLS=5 ERROR"),
    _held("RANKS=2 CALLS=4 ERROR DIFFERS"),
    _held("RANKS=2 CALLS=5 ERROR DIFFERS", large=True),
    _held("RANKS=3 CALLS=3 ERROR DIFFERS"),
    _held("RANKS=3 CALLS=4 ERROR DIFFERS", large=True),
    _held("RANKS=2 CALLS=3 ERROR DIFFERS CATCHES"),
    _held("RANKS=2 CALLS=4 DEVICE ERROR DIFFERS"),
    _held("RANKS=2 CALLS=5 DEVICE ERROR DIFFERS", large=True),
    _held("RANKS=3 CALLS=3 DEVICE ERROR DIFFERS"),
    _held("RANKS=3 CALLS=4 DEVICE ERROR DIFFERS", large=True),
    _held("RANKS=2 CALLS=4 DEVICE ERROR CATCHES"),
    _held("RANKS=2 CALLS=5 DEVICE ERROR CATCHES", large=True),
    _held("RANKS=2 CALLS=3 DEVICE ERROR DIFFERS CATCHES"),
    _held("RANKS=2 CALLS=4 DEVICE ERROR DIFFERS CATCHES", large=True),
    _held("RANKS=2 CALLS=3 GROUPS JOINS ERROR DIFFERS", quick=True),
    _held("RANKS=2 CALLS=4 GROUPS JOINS ERROR DIFFERS", large=True),
    _held("RANKS=2 CALLS=3 DEVICE GROUPS JOINS ERROR DIFFERS"),
    _held("RANKS=2 CALLS=4 DEVICE GROUPS JOINS ERROR DIFFERS", large=True),
    _held("RANKS=2 CALLS=4 DEVICE GROUPS DIFFERS"),
    _held("RANKS=2 CALLS=5 DEVICE GROUPS DIFFERS", large=True),
    _held("RANKS=3 CALLS=3 JOINS"),
    _held("RANKS=3 CALLS=4 JOINS", large=True),
    _held("RANKS=2 CALLS=4 FAILS CATCHES"),
    _held("RANKS=2 CALLS=4 REPORTS CATCHES"),
    _held("RANKS=2 CALLS=3 ERROR DIFFERS", "guard", quick=True),
    _held("RANKS=2 CALLS=4 ERROR DIFFERS", "guard"),
    _held("RANKS=2 CALLS=3 ERROR DIFFERS CATCHES", "guard"),
    _held("RANKS=2 CALLS=4 ERROR DIFFERS CATCHES", "guard", large=True),
    _held("RANKS=3 CALLS=2 DEVICE ERROR DIFFERS", "guard"),
    _held("RANKS=3 CALLS=3 DEVICE ERROR DIFFERS", "guard", large=True),
    _held("RANKS=2 CALLS=3 DEVICE ERROR DIFFERS CATCHES", "guard"),
    _held("RANKS=2 CALLS=4 DEVICE ERROR DIFFERS CATCHES", "guard", large=True),
    _held("RANKS=2 CALLS=4 DEVICE ERROR CATCHES", "guard"),
    _held("RANKS=2 CALLS=5 DEVICE ERROR CATCHES", "guard", large=True),
    _held("RANKS=2 CALLS=3 GROUPS ERROR DIFFERS", "guard"),
    _held("RANKS=2 CALLS=4 GROUPS ERROR DIFFERS", "guard", large=True),
    _held("RANKS=2 CALLS=3 DEVICE GROUPS ERROR DIFFERS", "guard"),
    _held("RANKS=2 CALLS=4 DEVICE GROUPS ERROR DIFFERS", "guard", large=True),
    _held("RANKS=2 CALLS=5 LIMIT=2 ASKS", "guard"),
    _held("RANKS=2 CALLS=6 LIMIT=2 ASKS", "guard", large=True),
    _held("RANKS=2 CALLS=5 DEVICE LIMIT=2 ASKS", "guard"),
    _held("RANKS=2 CALLS=6 DEVICE LIMIT=2 ASKS", "guard", large=True),
    _held("RANKS=2 CALLS=4 DEVICE LIMIT=2 ERROR CATCHES", "guard"),
    _held("RANKS=2 CALLS=5 DEVICE LIMIT=2 ERROR CATCHES", "guard", large=True),
    _held("RANKS=2 CALLS=3 GROWS ERROR DIFFERS", "guard"),
    _held("RANKS=2 CALLS=4 GROWS ERROR DIFFERS", "guard", large=True),
    _held("RANKS=2 CALLS=3 DEVICE GROWS ERROR DIFFERS", "guard"),
    _held("RANKS=2 CALLS=4 DEVICE GROWS ERROR DIFFERS", "guard", large=True),
    _held("RANKS=2 CALLS=2 ABSENT", "guard", quick=True),
    _held("RANKS=2 CALLS=3 ABSENT DIFFERS CATCHES", "guard"),
    _held("RANKS=2 CALLS=3 DEVICE ABSENT CATCHES", "guard"),
    _held("RANKS=2 CALLS=3 FAILS CATCHES", "guard"),
    _held("RANKS=2 CALLS=3 DIFFERS FAILS CATCHES", "guard"),
    _held("RANKS=2 CALLS=4 DIFFERS FAILS CATCHES", "guard", large=True),
    _held("RANKS=2 CALLS=3 DEVICE FAILS CATCHES", "guard"),
    _held("RANKS=2 CALLS=4 REPORTS CATCHES", "guard"),
    _held("JOBS=2", "exchange", quick=True),
    _held("JOBS=3", "exchange"),
    _held("JOBS=4", "exchange"),
]
RUNS += [
    Run(model, f"{defines} FAULT_{fault}", breaks or "assertion violated", True)
    for model, defines, fault, breaks in [
        ("scaler", "CALLS=3", "OWN_FLAG", "verdict[0]"),
        ("scaler", "CALLS=3 ERROR", "ERROR_RAISED_ALONE", "different"),
        ("scaler", "CALLS=3 ERROR", "ONLY_THE_RANK_WITH_AN_ERROR_GATHERS", STUCK),
        ("scaler", "CALLS=4 DIFFERS", "DIGEST_WITHOUT_ITERATION", _SCALE),
        ("scaler", "CALLS=4 DIFFERS", "DIGEST_WITHOUT_SCALE", _SCALE),
        ("scaler", "CALLS=4 DIFFERS", "DIGEST_WITHOUT_OPTIMIZERS", ""),
        ("scaler", "CALLS=4 DIFFERS", "DIGEST_WITHOUT_CALLS", _TAKEN),
        ("scaler", "RANKS=3 CALLS=3 ERROR DIFFERS", "LINEAR_DIGEST", STUCK),
        ("scaler", "CALLS=4 DEVICE DIFFERS", "FLAGS_NOT_SET", "parted"),
        ("scaler", "CALLS=5 DEVICE GROUPS DIFFERS", "REPLY_LEFT_AT_A_NEW_GROUP", STUCK),
        ("scaler", "CALLS=5 GROUPS", "ITERATION_KEPT_IN_A_NEW_GROUP", _ALIKE),
        ("scaler", "CALLS=6 DEVICE JOINS DIFFERS", "REPLY_LEFT_AT_JOIN", STUCK),
        ("scaler", "CALLS=3", "NORM_SKIPS_ONLY_ITS_OWN", "left"),
        ("scaler", "CALLS=5 DIFFERS", "STEPS_COUNTED_ALIKE", _TAKEN),
        ("scaler", "CALLS=4 JOINS", "BEGUN_KEPT_AFTER_JOIN", _ALIKE),
        ("scaler", "CALLS=4 JOINS", "NOTHING_TAKEN_OVER", _SCALE),
        ("scaler", "CALLS=3 DIFFERS", "ORDER_IS_RAISED_ALONE", "refuses"),
        ("scaler", "CALLS=5 DIFFERS CATCHES", "UNSENT_IS_NOT_SENT", "owes"),
        ("scaler", "CALLS=4 FAILS CATCHES", "FAILURE_IS_NOT_SENT", _TAKEN),
        ("scaler", "CALLS=4 REPORTS CATCHES", "UPDATE_SENDS_NOTHING", STUCK),
        ("scaler", "CALLS=4 REPORTS CATCHES", "OVERFLOWED_IS_FORGOTTEN_FIRST", STUCK),
        ("guard", "CALLS=3", "OWN_NORM", "verdict"),
        ("guard", "CALLS=3", "NORM_SKIPS_ONE", "about!=3"),
        ("guard", "CALLS=3", "FOUND_BEFORE_IS_FORGOTTEN", "before"),
        ("guard", "CALLS=4 DEVICE GROUPS DIFFERS", "FOUND_BEFORE_IS_NOT_SENT", "verdict"),
        ("guard", "CALLS=3 DIFFERS", "DIGEST_WITHOUT_LIMIT", "verdict"),
        ("guard", "CALLS=4 DIFFERS", "DIGEST_WITHOUT_STEPS", _TAKEN),
        ("guard", "CALLS=3 DEVICE ERROR", "NO_NAN_WHERE_RANKS_DIFFER", "parted"),
        ("guard", "CALLS=3 DEVICE DIFFERS", "REPLICAS_ARE_SEEN_BEFORE_THE_REPLY", STUCK),
        ("guard", "CALLS=5 GROUPS", "CLIPS_AGREE_KEPT_IN_A_NEW_GROUP", "different"),
        ("guard", "CALLS=3 GROWS", "WHO_ASKS_COMPARES_ALONE", "different"),
        ("guard", "CALLS=4 DEVICE GROWS", "WHO_ASKS_COMPARES_ALONE", "different"),
        ("guard", "CALLS=4 LIMIT=2", "SPIKES_COUNT", "in_truth"),
        ("guard", "CALLS=4 LIMIT=2", "SKIPS_COUNT_BY_THEIR_OWN", "different"),
        ("guard", "CALLS=5 DEVICE LIMIT=2", "SKIPS_COUNT_BY_THEIR_OWN", "different"),
        ("guard", "CALLS=3 DIFFERS", "ORDER_IS_RAISED_ALONE", "refuses"),
        ("guard", "CALLS=4 DIFFERS CATCHES", "UNSENT_IS_NOT_SENT", "owes"),
        ("guard", "CALLS=3 FAILS CATCHES", "FAILURE_IS_NOT_SENT", _TAKEN),
        ("guard", "CALLS=3 REPORTS CATCHES", "UPDATE_SENDS_NOTHING", STUCK),
        ("guard", "CALLS=4 REPORTS CATCHES", "OVERFLOWED_IS_FORGOTTEN_FIRST", STUCK),
        ("guard", "CALLS=3 ABSENT", "OWN_ABSENCE", "verdict"),
        ("guard", "CALLS=2 ABSENT", "WHO_LACKS_SOME_FINDS_ALONE", STUCK),
        ("guard", "CALLS=4 ABSENT DIFFERS CATCHES", "ABSENT_IS_RAISED_ALONE", "owes"),
        ("exchange", "JOBS=2", "LANES_SHARE_MEMORY", "writer"),
        ("exchange", "JOBS=2", "LANES_SHARE_TAGS", "got=="),
        ("exchange", "JOBS=2", "NO_TURNS", "in_turn"),
        ("exchange", "JOBS=2", "TURNS_IN_ANOTHER_ORDER", STUCK),
        ("exchange", "JOBS=2", "SWAP_DOES_NOT_WAIT", "readers"),
    ]
]


def check(run: Run) -> Outcome:
    """Run the model checker over all states; about a second, the largest some twenty."""
    defines = [f"-D{each}" for each in run.defines.split()]
    with tempfile.TemporaryDirectory() as folder:
        model = FOLDER / f"{run.model}.pml"
        tool(["spin", "-a", *defines, str(model)], folder)
        # Optimization takes longer than it saves, except over a million states.
        level = "-O1" if run.large else "-O0"
        options = ["-DSAFETY", "-DCOLLAPSE", "-DNOFAIR", "-DMEMLIM=6000"]
        tool(["gcc", level, "-w", *options, "-o", "pan", "pan.c"], folder)
        start = time.perf_counter()
        said = tool(["./pan", "-m1000000"], folder)
        seconds = time.perf_counter() - start
    found = re.search(r"pan:\d+: (.*) \(at depth", said)
    if found is None and (
        "errors: 0" not in said or "Search not completed" in said or "max search depth" in said
    ):
        raise RuntimeError(f"{run.name}: {said}")
    states = re.search(r"(\d+) states, stored", said)
    depth = re.search(r"depth reached (\d+)", said)
    return Outcome(
        "" if found is None else found[1],
        0 if states is None else int(states[1]),
        0 if depth is None else int(depth[1]),
        seconds,
    )


def tool(command: list[str], folder: str) -> str:
    """What it says, where it is found to be right."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {said}")
    return said

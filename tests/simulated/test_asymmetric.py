"""Ranks that do not do the same, on simulated devices: replies that arrive late meet errors."""

from __future__ import annotations

import pytest

from tests.scaler.asymmetric_draws import draw_programs
from tests.scaler.asymmetric_judge import AsymmetricJudge
from tests.scaler.asymmetric_programs import ENDING, Event, Program, Setting

# Each went wrong on a device alone: a rank that could not measure asserted in the scaler; a rank
# that was replaced gathered what the other did not.
FOUND = {
    "no memory for a clip": Program(
        Setting(optimizers=2, kind="SGD", growth_interval=2),
        (Event("plain", how="clip"), Event("out of memory", rank=1, how="clip"), Event()),
    ),
    "a rank is replaced and clips": Program(
        Setting(optimizers=3, structure="tied", kind="SGD foreach", masters=True),
        (
            Event(how="unscale"),
            Event("thrown away", how="clip parameters"),
            Event("optimizer raises", optimizer=2, how="step_all"),
            Event("restart", how="clip parameters"),
        ),
    ),
}


def _wrong(sim2, programs: list[Program]) -> dict[Program, list[str]]:
    schedules = [("late", 0), ("random", 41)]
    found = {}
    for number, program in enumerate(programs):
        judge = AsymmetricJudge(sim2.under(*schedules[number % 2]))
        (wrong,) = judge.judge(program)
        if wrong:
            found[program] = wrong
    return found


def drawn(draws: int, seed: int) -> list[Program]:
    """Programs drawn from a seed; of those that end with an error, what comes before it.

    Ranks hear of each other's errors at the next message here, where the judge has them at once.
    """
    programs = []
    for program in draw_programs(draws, seed):
        events = tuple(event for event in program.events if event.what not in ENDING)
        if events:
            programs.append(Program(program.setting, events))
    return programs


@pytest.mark.parametrize("name", FOUND)
def test_what_went_wrong_goes_right(sim2, name):
    for schedule in ("late", "late_others"):
        assert AsymmetricJudge(sim2.under(schedule, 0)).judge(FOUND[name]) == [[]]


def test_ranks_agree_in_asymmetric_programs(sim2):
    assert _wrong(sim2, drawn(20, seed=0)) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_ranks_agree_in_a_thousand_asymmetric_programs(sim2, seed):
    assert _wrong(sim2, drawn(200, seed)) == {}

"""Judge asymmetric programs: ranks agree, values are the reference's, and errors reach every rank.

A call that one rank alone makes where a message is due either works as if all had made it, or every
rank raises in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.ranks import RankError, RankPool
from tests.scaler.asymmetric_events import BROKEN, NO_MEMORY
from tests.scaler.asymmetric_programs import ENDING, WORLD, Event, Program, Seen
from tests.scaler.asymmetric_reference import Expected
from tests.scaler.asymmetric_runner import run_on_rank

__all__ = ["AsymmetricJudge", "complaints", "new_pool"]

WAITED_IN_VAIN = ("Timed out", "timed out", "Connection closed", "Broken pipe", "Connection reset")


def complaints(program: Program, ranks: Sequence[Sequence[Seen]]) -> list[str]:
    """Where a program did not do what it should; empty where it did."""
    expected = Expected.of(program.setting)
    missed = [[[0, 0] for _ in expected.values] for _ in ranks]
    for number, event in enumerate(program.events):
        seen = [rank[number] if number < len(rank) else None for rank in ranks]
        here = [each for each in seen if each is not None]
        if len(here) < len(ranks):
            return [f"iteration {number} ({event.what}): some ranks ended before it"]
        if event.what in ENDING:
            found = _judge_ending(event, number, expected, ranks)
        else:
            found = _judge(event, number, expected, here, missed)
        if found:
            return [f"iteration {number} ({event.what}): {each}" for each in found]
        if event.what in ENDING:
            return []
    return []


def _judge(
    event: Event,
    number: int,
    expected: Expected,
    seen: Sequence[Seen],
    missed: list[list[list[int]]],
) -> list[str]:
    found = [f"rank {rank}: {wrong}" for rank, each in enumerate(seen) for wrong in each.wrong]
    text = {"out of memory": NO_MEMORY, "optimizer raises": BROKEN}.get(event.what)
    for rank, each in enumerate(seen):
        if text is None and each.error is not None:
            found.append(f"rank {rank} raised {each.error[0]}: {each.error[1][:600]}")
        if text is not None and (each.error is None or text not in each.error[1]):
            found.append(f"rank {rank} raised {each.error}, not {text!r}")
        if each.restarted:
            missed[rank] = [list(counts) for counts in expected.counts]
    expected.advance(number, event)
    expected.born(number, event)
    for rank_missed in missed:
        rank_missed += [[0, 0] for _ in range(len(expected.values) - len(rank_missed))]
    if text is not None:
        # An iteration that ended with an error leaves the scale, or moves it alike everywhere.
        states = {(each.scale, each.tracker) for each in seen}
        if len(states) > 1:
            found.append(f"after the error ranks hold scale and tracker {sorted(states)}")
        expected.rule.scale, expected.rule.tracker = seen[0].scale, seen[0].tracker
    for rank, each in enumerate(seen):
        if each.values != expected.values:
            found.append(f"rank {rank}: values {each.values}, should be {expected.values}")
        if each.scale != expected.rule.scale:
            found.append(f"rank {rank}: scale {each.scale}, should be {expected.rule.scale}")
        if each.error is None and not found:
            found += _judge_answers(rank, each, expected, missed[rank])
            found += _judge_norms(rank, each, expected)
    return found


def _judge_answers(rank: int, seen: Seen, expected: Expected, missed: list[list[int]]) -> list[str]:
    found = []
    for index, answer in enumerate(seen.answers):
        stepped = expected.stepped[index] if index < len(expected.stepped) else None
        if stepped is None:
            continue
        counts = [a - b for a, b in zip(expected.counts[index], missed[index], strict=True)]
        if answer != (stepped, *counts):
            found.append(
                f"rank {rank}, optimizer {index}: answers {answer}, should be {(stepped, *counts)}"
            )
    return found


def _judge_norms(rank: int, seen: Seen, expected: Expected) -> list[str]:
    if not expected.norms:
        return []
    if len(seen.norms) != len(expected.norms):
        return [f"rank {rank}: norms {seen.norms}, should be {expected.norms}"]
    return [
        f"rank {rank}: norm {norm:.6g}, should be {right:.6g}"
        for norm, right in zip(seen.norms, expected.norms, strict=True)
        if not math.isnan(right) and not abs(norm - right) <= 1e-5 * right
    ]


def _judge_ending(
    event: Event, number: int, expected: Expected, ranks: Sequence[Sequence[Seen]]
) -> list[str]:
    """Every rank raises in this iteration, and nothing is stepped."""
    found = []
    for rank, outcomes in enumerate(ranks):
        seen = outcomes[number]
        if seen.error is None:
            found.append(f"rank {rank} raised nothing")
        elif any(word in seen.error[1] for word in WAITED_IN_VAIN):
            found.append(f"rank {rank} waited in vain: {seen.error[1][:300]}")
        if seen.values != expected.values:
            found.append(f"rank {rank}: values {seen.values} after {expected.values}")
    return found


def new_pool() -> RankPool:
    """Ranks that do not wait long for each other."""
    return RankPool(WORLD, timeout=60.0, group_timeout=8.0)


class AsymmetricJudge:
    """Runs asymmetric programs on a pool of its ranks and says what is wrong with each."""

    def __init__(self, pool: RankPool, timeout: float = 120.0) -> None:
        self.pool = pool
        self.timeout = timeout

    def judge(self, *programs: Program) -> list[list[str]]:
        """For each program its complaints."""
        try:
            by_rank = self.pool.run(
                run_on_rank, list(programs), timeout=self.timeout + 2.0 * len(programs)
            )
        except RankError as error:
            found = [[str(error)]] * len(programs)
        else:
            found = [
                complaints(program, [outcomes[i] for outcomes in by_rank])
                for i, program in enumerate(programs)
            ]
        if any(found):
            # Ranks that parted may have left collectives behind for whatever ran after.
            self.pool.close()
            if len(programs) > 1:
                return [self.judge(program)[0] for program in programs]
        return found

"""One invariant, and a judge that runs programs on real ranks and holds them to it.

All ranks agree on skipped, scale and parameters; a skipped step changes nothing; a kept step equals
the float64 reference.
"""

from collections.abc import Sequence

from tests.ranks import RankError, RankPool
from tests.scaler.matrix.layout import Layout
from tests.scaler.matrix.layouts import ALL_LAYOUTS
from tests.scaler.matrix.programs import Iteration, Outcome, Program
from tests.scaler.matrix.runner import run_on_rank


def complaints(
    program: Program, ranks: Sequence[Sequence[Outcome]], refused: tuple[str, str] | None = None
) -> list[str]:
    """Where the invariant does not hold; empty where it does.

    Args:
        program: what was run.
        ranks: each rank's outcomes.
        refused: the error that the optimizer itself raises on this layout without any scaler.
    """
    found = _faults_that_did_not_land(program, ranks)
    domains: dict[int, list[int]] = {}
    for rank, outcomes in enumerate(ranks):
        domains.setdefault(outcomes[0].domain, []).append(rank)
    for ranks_of_domain in domains.values():
        lengths = [len(ranks[rank]) for rank in ranks_of_domain]
        if len(set(lengths)) != 1:
            found.append(f"ranks {ranks_of_domain} ended after different iterations: {lengths}")
        for number in range(min(lengths)):
            members = [(rank, ranks[rank][number]) for rank in ranks_of_domain]
            if number == len(program.iterations) - 1 and parted(program, members):
                wrong = _judge_error(members, ("RankMismatchError", ""))
            elif any(outcome.error for _, outcome in members):
                wrong = _judge_error(members, refused)
            else:
                wrong = _judge(members, ALL_LAYOUTS[program.layout])
            found += [f"iteration {number}: {each}" for each in wrong]
    return found


def _faults_that_did_not_land(program: Program, ranks: Sequence[Sequence[Outcome]]) -> list[str]:
    # Of domains that an error ended, only what they saw before it counts.
    return [
        f"iteration {number}: the fault did not land"
        for number, outcomes in enumerate(zip(*ranks, strict=False))
        for fault in program.iterations[number].faults
        if fault.optimizer == 0 and not any(any(o.expected_skips) for o in outcomes)
    ]


def parted(program: Program, members: Sequence[tuple[int, Outcome]]) -> bool:
    """Whether one of several ranks that train one model does something that must stop all.

    ``unscale_`` and the look inside ``step`` are the same message, so that is no such thing.
    """
    return (
        program.astray is not None
        and program.astray[0] != "call"
        and len(members) > 1
        and program.astray[1] in [rank for rank, _ in members]
    )


def _judge_error(members: list[tuple[int, Outcome]], refused: tuple[str, str] | None) -> list[str]:
    found = []
    for rank, outcome in members:
        if outcome.error is None:
            found.append(f"rank {rank} raised nothing while others did")
        elif refused is None:
            found.append(f"rank {rank} raised {outcome.error[0]}: {outcome.error[1][:2000]}")
        elif outcome.error[0] != refused[0] or refused[1] not in outcome.error[1]:
            found.append(f"rank {rank} raised {outcome.error}, not the optimizer's own {refused}")
        if not outcome.unchanged_by_error:
            found.append(f"rank {rank}: parameters changed although the step raised")
    return found


def _judge(members: list[tuple[int, Outcome]], layout: type[Layout]) -> list[str]:
    found = []
    digests: dict[str, dict[int, list[int]]] = {}
    for rank, o in members:
        if o.scale != o.expected_scale:
            found.append(f"rank {rank}: scale {o.scale}, should be {o.expected_scale}")
        for index, skip in enumerate(o.expected_skips):
            if o.moved[index] is not None and o.moved[index] == skip:
                found.append(
                    f"rank {rank}, optimizer {index}: should have "
                    f"{'skipped, parameters moved' if skip else 'stepped, nothing moved'}"
                )
            if o.said_stepped and o.said_stepped[index] == skip:
                found.append(f"rank {rank}, optimizer {index}: step_was_taken() says {not skip}")
        if not o.deviation <= layout.tolerance:
            found.append(f"rank {rank}: parameters are {o.deviation:.3g} off the reference")
        if not any(o.expected_skips):
            found += [
                f"rank {rank}: gradient norm {norm:.6g}, should be {expected:.6g}"
                for norm, expected in o.norms
                if not abs(norm - expected) <= layout.norm_tolerance * expected
            ]
        for name, digest in o.digests.items():
            digests.setdefault(name, {}).setdefault(digest, []).append(rank)
    for name, kept in digests.items():
        if len(kept) > 1:
            found.append(f"ranks hold different values of {name}: {sorted(kept.values())}")
    return found


class Judge:
    """Runs programs on a pool of 4 ranks and says what is wrong with each.

    Args:
        pool: 4 ranks.
        scaler: which of `SCALERS`.
        timeout: seconds for one program before it counts as hung.
    """

    def __init__(self, pool: RankPool, scaler: str = "distamp", timeout: float = 60.0) -> None:
        self.pool = pool
        self.scaler = scaler
        self.timeout = timeout
        self._refused: dict[tuple[str, str, int], tuple[str, str] | None] = {}

    def refused(self, program: Program) -> tuple[str, str] | None:
        """The error the optimizer itself raises on this layout with no scaler; None if it works."""
        key = (program.layout, program.kind, program.optimizers)
        if key not in self._refused:
            probe = Program(program.layout, program.kind, (Iteration(),), program.optimizers)
            error = self.run(probe, "none")[0][0].error
            # Object addresses and shapes of shards differ between runs and ranks.
            self._refused[key] = None if error is None else (error[0], error[1][:40])
        return self._refused[key]

    def judge(self, program: Program) -> list[str]:
        """What is wrong with it."""
        refused = self.refused(program)
        try:
            found = complaints(program, self.run(program, self.scaler), refused)
        except RankError as error:
            found = [str(error)]
        if found:
            # Ranks that parted may have left collectives behind for whatever ran after.
            self.pool.close()
        return found

    def run(self, program: Program, scaler: str) -> list[list[Outcome]]:
        """Every rank's outcomes."""
        group, timeout = ALL_LAYOUTS[program.layout].group, self.timeout
        return self.pool.run(run_on_rank, program, scaler, group=group, timeout=timeout)

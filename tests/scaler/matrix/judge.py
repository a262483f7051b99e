"""One invariant, and a judge that runs programs on real ranks and checks it.

All ranks agree on skips, scale and parameters; a skipped step changes nothing; a step that was
taken equals the float64 reference.
"""

from collections.abc import Sequence

from tests.ranks import RankError, RankPool
from tests.scaler.matrix.layout import Layout
from tests.scaler.matrix.layouts import ALL_LAYOUTS
from tests.scaler.matrix.programs import Iteration, Outcome, Program
from tests.scaler.matrix.runner import run_on_rank

# The name of an error, and the beginning of its text.
Error = tuple[str, str]
# The outcomes of one iteration: each rank's number with its outcome.
Members = list[tuple[int, Outcome]]


def complaints(
    program: Program, ranks: Sequence[Sequence[Outcome]], refused: Error | None = None
) -> list[str]:
    """Return a sentence for each violation of the invariant.

    Args:
        program: The program that was run.
        ranks: The outcomes of each rank.
        refused: The error that the optimizer itself raises in this layout without any scaler.
    """
    violations = _faults_without_effect(program, ranks)
    for ranks_of_domain in _ranks_by_domain(ranks):
        lengths = [len(ranks[rank]) for rank in ranks_of_domain]
        if len(set(lengths)) != 1:
            text = f"ranks {ranks_of_domain} ended after different iterations: {lengths}"
            violations.append(text)
        for number in range(min(lengths)):
            members = [(rank, ranks[rank][number]) for rank in ranks_of_domain]
            for text in _judge_iteration(program, number, members, refused):
                violations.append(f"iteration {number}: {text}")
    return violations


def _ranks_by_domain(ranks: Sequence[Sequence[Outcome]]) -> list[list[int]]:
    """Return the ranks of each domain, that is of each model."""
    domains: dict[int, list[int]] = {}
    for rank, outcomes in enumerate(ranks):
        domains.setdefault(outcomes[0].domain, []).append(rank)
    return list(domains.values())


def _faults_without_effect(program: Program, ranks: Sequence[Sequence[Outcome]]) -> list[str]:
    """Return a sentence for each fault of the first optimizer that no rank had to skip for.

    The iterations after an error of any domain are not looked at.
    """
    violations: list[str] = []
    for number, outcomes in enumerate(zip(*ranks, strict=False)):
        has_skip = False
        for outcome in outcomes:
            has_skip = has_skip or any(outcome.expected_skips)
        for fault in program.iterations[number].faults:
            if fault.optimizer == 0 and not has_skip:
                violations.append(f"iteration {number}: the fault did not land")
    return violations


def _judge_iteration(
    program: Program, number: int, members: Members, refused: Error | None
) -> list[str]:
    """Return a sentence for each violation in one iteration of one domain."""
    is_last = number == len(program.iterations) - 1
    if is_last and _deviation_must_raise(program, members):
        return _judge_error(members, ("RankMismatchError", ""))
    if any(outcome.error for _, outcome in members):
        return _judge_error(members, refused)
    return _judge_step(members, ALL_LAYOUTS[program.layout])


def _deviation_must_raise(program: Program, members: Members) -> bool:
    """Whether one of several ranks that train one model deviates from the others."""
    ranks = [rank for rank, _ in members]
    is_in_domain = program.deviating_rank in ranks
    return program.deviation_must_raise and len(ranks) > 1 and is_in_domain


def _judge_error(members: Members, expected: Error | None) -> list[str]:
    """Return a sentence for each rank that did not raise the expected error."""
    violations: list[str] = []
    for rank, outcome in members:
        if outcome.error is None:
            violations.append(f"rank {rank} raised nothing while others did")
        else:
            name, text = outcome.error
            if expected is None:
                violations.append(f"rank {rank} raised {name}: {text[:2000]}")
            elif name != expected[0] or expected[1] not in text:
                error = f"{outcome.error}, not the optimizer's own {expected}"
                violations.append(f"rank {rank} raised {error}")
        if not outcome.unchanged_by_error:
            violations.append(f"rank {rank}: parameters changed although the step raised")
    return violations


def _judge_step(members: Members, layout: type[Layout]) -> list[str]:
    """Return a sentence for each difference between the ranks, or from the reference."""
    violations: list[str] = []
    for rank, outcome in members:
        violations += _judge_scale(rank, outcome)
        violations += _judge_skips(rank, outcome)
        violations += _judge_values(rank, outcome, layout)
    violations += _judge_agreement(members)
    return violations


def _judge_scale(rank: int, outcome: Outcome) -> list[str]:
    if outcome.scale == outcome.expected_scale:
        return []
    return [f"rank {rank}: scale {outcome.scale}, should be {outcome.expected_scale}"]


def _judge_skips(rank: int, outcome: Outcome) -> list[str]:
    violations: list[str] = []
    for index, must_skip in enumerate(outcome.expected_skips):
        optimizer = f"rank {rank}, optimizer {index}"
        has_moved = outcome.moved[index]
        if must_skip and has_moved is True:
            violations.append(f"{optimizer}: should have skipped, parameters moved")
        if not must_skip and has_moved is False:
            violations.append(f"{optimizer}: should have stepped, nothing moved")
        if outcome.said_stepped and outcome.said_stepped[index] == must_skip:
            violations.append(f"{optimizer}: step_was_taken() says {not must_skip}")
    return violations


def _judge_values(rank: int, outcome: Outcome, layout: type[Layout]) -> list[str]:
    """Compare parameters and norms with the reference; a NaN is not near."""
    violations: list[str] = []
    is_near = outcome.deviation <= layout.tolerance
    if not is_near:
        text = f"parameters are {outcome.deviation:.3g} off the reference"
        violations.append(f"rank {rank}: {text}")
    if any(outcome.expected_skips):
        return violations
    for norm, expected in outcome.norms:
        is_near = abs(norm - expected) <= layout.norm_tolerance * expected
        if not is_near:
            text = f"gradient norm {norm:.6g}, should be {expected:.6g}"
            violations.append(f"rank {rank}: {text}")
    return violations


def _judge_agreement(members: Members) -> list[str]:
    """Compare the full parameters of all ranks, bit by bit."""
    ranks_by_digest: dict[str, dict[int, list[int]]] = {}
    for rank, outcome in members:
        for name, digest in outcome.digests.items():
            digests = ranks_by_digest.setdefault(name, {})
            digests.setdefault(digest, []).append(rank)
    violations: list[str] = []
    for name, digests in ranks_by_digest.items():
        if len(digests) > 1:
            groups = sorted(digests.values())
            violations.append(f"ranks hold different values of {name}: {groups}")
    return violations


class Judge:
    """Runs programs on a pool of 4 ranks and returns the violations of each.

    Args:
        pool: The ranks.
        scaler: A key of `SCALERS`.
        timeout: The seconds of one program before it counts as hung.
    """

    def __init__(self, pool: RankPool, scaler: str = "distamp", timeout: float = 60.0) -> None:
        self.pool = pool
        self.scaler = scaler
        self.timeout = timeout
        self._refused: dict[tuple[str, str, int], Error | None] = {}

    def refused(self, program: Program) -> Error | None:
        """Return the error that the optimizer itself raises in this layout without a scaler."""
        key = (program.layout, program.kind, program.optimizers)
        if key not in self._refused:
            probe = Program(program.layout, program.kind, (Iteration(),), program.optimizers)
            error = self.run(probe, "none")[0][0].error
            if error is not None:
                # Object addresses and shapes of shards differ between runs and ranks.
                name, text = error
                error = (name, text[:40])
            self._refused[key] = error
        return self._refused[key]

    def judge(self, program: Program) -> list[str]:
        """Run a program; return a sentence for each violation of the invariant."""
        try:
            ranks = self.run(program, self.scaler)
            has_error = any(outcomes[-1].error for outcomes in ranks)
            refused = self.refused(program) if has_error else None
            violations = complaints(program, ranks, refused)
        except RankError as error:
            violations = [str(error)]
        if violations:
            # Ranks that diverged may have left collectives behind for the next program.
            self.pool.close()
        return violations

    def run(self, program: Program, scaler: str) -> list[list[Outcome]]:
        """Run a program; return the outcomes of every rank."""
        group = ALL_LAYOUTS[program.layout].group
        return self.pool.run(run_on_rank, program, scaler, group=group, timeout=self.timeout)

"""The models hold, each planted fault is found, and real ranks do what the model's do."""

import json
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler
from tests.model.check import MISSING, RUNS, Run, check
from tests.model.programs import DRAWN, STORED, draw, run, version, walks
from tests.ranks import RankPool

needs_spin = pytest.mark.skipif(bool(MISSING), reason=f"not found: {', '.join(MISSING)}")

HELD = [each for each in RUNS if not each.breaks]
# Of faults that one assertion sees, every test run plants one; `python -m tests.model` all.
FAULTS = ["OWN_FLAG", "WITHOUT_SCALE", "WITHOUT_CALLS", "GATHERS", "FLAGS_NOT_SET", "MEMORY"]


@needs_spin
@pytest.mark.parametrize("each", [r for r in HELD if r.quick], ids=lambda r: r.name)
def test_a_model_holds(each: Run) -> None:
    assert check(each).found == ""


@needs_spin
@pytest.mark.parametrize(
    "each",
    [r for r in RUNS if r.breaks and r.defines.endswith(tuple(FAULTS))],
    ids=lambda r: r.name,
)
def test_a_planted_fault_is_found(each: Run) -> None:
    assert each.breaks in check(each).found


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("each", [r for r in RUNS if not r.quick], ids=lambda r: r.name)
def test_a_large_model_holds(each: Run) -> None:
    assert check(each).found == ""


@needs_spin
@pytest.mark.parametrize(("model", "size", "defines"), DRAWN)
def test_the_stored_walks_are_the_models(model: str, size: int, defines: str) -> None:
    """If not: python -m tests.model --store."""
    stored = json.loads(STORED.read_text())
    if stored["version"] != version():
        pytest.skip(f"stored by {stored['version']}; this is {version()}")
    assert stored[f"{model} RANKS={size} {defines}"] == walks(model, size, defines)


@pytest.mark.parametrize(("model", "size", "defines"), DRAWN)
def test_real_ranks_do_what_the_model_does(
    ranks: Callable[[int], RankPool], model: str, size: int, defines: str
) -> None:
    programs = draw(model, size, defines)
    assert programs
    limit = 2 if "LIMIT" in defines else None
    on_ranks = ranks(size).run(run, programs, model, limit, timeout=30)
    for rank, results in enumerate(on_ranks):
        for program, (steps, raised) in zip(programs, results, strict=True):
            assert (steps, raised) == (program[rank].steps, program[rank].raises), program


def _joined() -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DistGradScaler("cpu", init_scale=8.0)
    scales = []

    def step(new_scale: float | None = None) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update(new_scale)
        scales.append(scaler.get_scale())

    step()
    with Join([model, scaler]):
        for index in range(1 + dist.get_rank()):
            step(16.0 if index else None)
    step()
    return scales[-1:]


def test_a_scale_set_where_others_had_no_inputs_left_is_no_difference(ranks2: RankPool) -> None:
    """The model found it: BEGUN_KEPT_AFTER_JOIN."""
    assert ranks2.run(_joined, timeout=30) == [[16.0], [16.0]]

"""The scaler on simulated devices, beside the CPU.

Each job is run on the CPU and, under every schedule, on the device. A sample of the scaler's cells
is compared to the bit; all of them in ``make test-all``.
"""

from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distamp import DistGradScaler, StepGuard, device_utils
from tests.place import here
from tests.scaler.matrix.cells import cells, chains, sample
from tests.scaler.matrix.drawn import hold, programs
from tests.scaler.steps import INF
from tests.scaler.test_optimizers import momentum_after_skips
from tests.simulated.pools import under_schedules
from tests.simulated.scaler_cells import FOUR_RANKS, LAYOUTS, Pair


def _pair(sim_ranks, ranks, layout):
    size = 4 if layout in FOUR_RANKS else 2
    return Pair(ranks(size), sim_ranks(size))


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each not in FOUR_RANKS])
def test_a_sample_of_cells_is_as_on_the_cpu(sim_ranks, ranks, layout):
    wrong = _pair(sim_ranks, ranks, layout).wrong(sample(layout, "sim "))
    assert not wrong, "\n\n".join(wrong)  # pytest shortens a list to a line


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layout", "kind"), sorted({each[:2] for each in cells(LAYOUTS)}))
def test_every_cell_is_as_on_the_cpu(sim_ranks, ranks, layout, kind):
    pair = _pair(sim_ranks, ranks, layout)
    found = {program: pair.wrong(program) for program in chains(layout, kind)}
    assert {program: wrong for program, wrong in found.items() if wrong} == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_random_programs_are_as_on_the_cpu(sim2, ranks2, seed):
    pair = Pair(ranks2, sim2)

    def is_right(program):
        assert pair.wrong(program) == [], program

    hold(is_right, 50, seed, programs(), phases=[hypothesis.Phase.generate])


# -- jobs ------------------------------------------------------------------------------------------


class _Tape(TorchDispatchMode):
    """Remembers ops and their very tensors, and runs them again: as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        detached = tree_map_only(Tensor, Tensor.detach, (args, result))
        self._calls.append((func, detached[0], kwargs or {}, detached[1]))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def recorded(device: str, what: str) -> Any:
    """Forward and backward recorded and replayed, by themselves or with a fused step and update."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler, tape = DistGradScaler(device, init_scale=64.0, growth_interval=2), _Tape()
    x, factor = torch.ones(2, 4, device=device), torch.ones((), device=device)
    scales = []

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    def run() -> None:
        scaler.scale(model(x).square().mean() * factor).backward()
        if what == "step":
            step()

    for number in range(8):
        x.fill_(1.0 + number)
        factor.fill_(INF if number == 5 else 1.0)
        if device == "cpu" or number < 2:
            run()
        elif number > 2:
            tape.replay()
        else:
            with tape, mock.patch.object(device_utils, "is_capturing", return_value=what == "step"):
                run()
        if what == "backward":
            step()
        optimizer.zero_grad(set_to_none=False)
        scales.append(scaler.get_scale())
    return [p.detach().cpu() for p in model.parameters()], scales


CASES = [(momentum_after_skips, ()), (recorded, ("backward",)), (recorded, ("step",))]


@pytest.mark.parametrize(
    ("job", "arguments", "schedule", "seed"),
    under_schedules(CASES),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_job_is_done_as_on_the_cpu(sim, job, arguments, schedule, seed):
    expected = sim.one(job, "cpu", *arguments)
    found = sim.one(job, "sim", *arguments, schedule=schedule, seed=seed)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _waits_for_nothing(by: str, group: bool, calls: dict[str, Any]) -> int:
    """Fused steps, one of which overflows, with every kind of host sync refused but an event."""
    from tests.simulated.device import ALL_SYNCS, refuse

    model: nn.Module = nn.Linear(8, 4).to(here())
    if group:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    made = StepGuard() if by == "guard" else DistGradScaler("sim", init_scale=64.0)
    x = torch.ones(2, 8, device=here())
    # DDP itself reads on the host when it puts its buckets in order, in the second step.
    factors = [torch.full((), f, device=here()) for f in (1.0, 1.0, 1.0, INF, 1.0)]
    given = {**calls, **({"skip_norm_above": torch.full((), 1e6, device=here())} if calls else {})}
    kinds = [kind for kind in ALL_SYNCS if not (group and kind == "event")]
    for number, factor in enumerate(factors):
        with refuse(*kinds if number > 1 else ("no_meta",)):
            optimizer.zero_grad()
            made.scale(model(x).square().mean() * factor).backward()
            made.step(optimizer, **given)
            if calls:
                made.grad_norm()
            made.update()
    return made.step_counts(optimizer).skipped


@pytest.mark.parametrize("calls", [{}, {"max_norm": 0.5}], ids=["step", "max_norm"])
@pytest.mark.parametrize("by", ["scaler", "guard"])
def test_a_fused_step_waits_for_nothing_and_with_a_group_for_one_event(sim, sim2, by, calls):
    for schedule in ("late", "random"):
        assert sim.one(_waits_for_nothing, by, False, calls, schedule=schedule) == 1
        assert sim2.run(_waits_for_nothing, by, True, calls, schedule=schedule) == [1] * 2

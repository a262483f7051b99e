"""The scaler on simulated devices has the results of the CPU.

Each job runs on the CPU and, under every schedule, on the device. A sample of the scaler's cells
must be bit-identical; ``make test-all`` runs all cells.
"""

import itertools
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distamp import DistGradScaler, StepGuard, device_utils
from tests.place import rank_device
from tests.scaler.matrix.cells import cells, chains, sample
from tests.scaler.matrix.drawn import hold, programs
from tests.scaler.steps import INF
from tests.scaler.test_optimizers import momentum_after_skips
from tests.simulated.pools import under_schedules
from tests.simulated.scaler_cells import FOUR_RANKS, LAYOUTS, Pair


def _pair(sim_ranks, ranks, layout):
    size = 4 if layout in FOUR_RANKS else 2
    return Pair(ranks(size), sim_ranks(size))


# On the CPU, the tests of the scaler run every layout.
QUICK_LAYOUTS = ("DDP",)


def _sampled_layouts() -> list[Any]:
    parameters = []
    for layout in LAYOUTS:
        if layout not in FOUR_RANKS:
            marks = [] if layout in QUICK_LAYOUTS else [pytest.mark.slow]
            parameters.append(pytest.param(layout, marks=marks))
    return parameters


@pytest.mark.parametrize("layout", _sampled_layouts())
def test_a_sample_of_cells_has_the_results_of_the_cpu(sim_ranks, ranks, layout):
    program = sample(layout, "sim ")
    faults = _pair(sim_ranks, ranks, layout).find_faults(program)
    # A string, because pytest shortens a list to one line.
    assert not faults, "\n\n".join(faults)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layout", "kind"), sorted({cell[:2] for cell in cells(LAYOUTS)}))
def test_every_cell_has_the_results_of_the_cpu(sim_ranks, ranks, layout, kind):
    pair = _pair(sim_ranks, ranks, layout)
    faulty_programs = {}
    for program in chains(layout, kind):
        faults = pair.find_faults(program)
        if faults:
            faulty_programs[program] = faults
    assert faulty_programs == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_random_programs_have_the_results_of_the_cpu(sim2, ranks2, seed):
    pair = Pair(ranks2, sim2)

    def is_right(program):
        assert pair.find_faults(program) == [], program

    hold(is_right, 50, seed, programs(), phases=[hypothesis.Phase.generate])


# -- jobs ------------------------------------------------------------------------------------------


class _Tape(TorchDispatchMode):
    """Records ops with their tensors, and runs them again, as a CUDA graph does."""

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


def recorded(device: str, part: str) -> Any:
    """Record and replay training; return the weights, and the scale after each step.

    Args:
        device: The CPU, which only runs, or the device, which also records.
        part: ``"backward"`` records forward and backward; ``"step"`` also a fused step and update.
    """
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
        if part == "step":
            step()

    for number in range(8):
        x.fill_(1.0 + number)
        factor.fill_(INF if number == 5 else 1.0)
        if device == "cpu" or number < 2:
            run()
        elif number > 2:
            tape.replay()
        else:
            with tape, mock.patch.object(device_utils, "is_capturing", return_value=part == "step"):
                run()
        if part == "backward":
            step()
        optimizer.zero_grad(set_to_none=False)
        scales.append(scaler.get_scale())
    return [p.detach().cpu() for p in model.parameters()], scales


CASES = [(momentum_after_skips, ()), (recorded, ("backward",)), (recorded, ("step",))]


@pytest.mark.parametrize(
    ("job", "arguments", "schedule", "seed"),
    under_schedules(CASES),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_job_has_the_result_of_the_cpu(sim, job, arguments, schedule, seed):
    expected = sim.one(job, "cpu", *arguments)
    result = sim.one(job, "sim", *arguments, schedule=schedule, seed=seed)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def _clip_in_fused_steps(device: str) -> Tensor:
    """Return the clipped gradients of fused steps with gradients of 40 norms."""
    clipped_grads = []
    for number in range(40):
        weight = torch.zeros(64, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        weight.grad = torch.linspace(-1.0, 1.0, 64, device=device) * (1.0 + 0.1 * number)
        StepGuard().step(optimizer, max_norm=0.5)
        clipped_grads.append(weight.detach().cpu())
    return torch.stack(clipped_grads)


def test_a_fused_step_clips_to_the_bits_of_the_cpu(sim):
    expected = sim.one(_clip_in_fused_steps, "cpu")
    assert torch.equal(sim.one(_clip_in_fused_steps, "sim"), expected)


def _skips_without_host_syncs(by: str, in_group: bool, with_norm: bool) -> int:
    """Take fused steps, of them one with an overflow; return the number of skipped steps.

    Host syncs are refused, except an event if the model is in a group.
    """
    from tests.simulated.device import ALL_SYNCS, refuse

    model: nn.Module = nn.Linear(8, 4).to(rank_device())
    if in_group:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = StepGuard() if by == "guard" else DistGradScaler("sim", init_scale=64.0)
    x = torch.ones(2, 8, device=rank_device())
    # DDP itself reads on the host when it puts its buckets in order, in the second step.
    factors = [torch.full((), f, device=rank_device()) for f in (1.0, 1.0, 1.0, INF, 1.0)]
    limits: dict[str, Any] = {}
    if with_norm:
        limits["max_norm"] = 0.5
        limits["skip_norm_above"] = torch.full((), 1e6, device=rank_device())
    refused = set(ALL_SYNCS)
    if in_group:
        refused.remove("event")
    for number, factor in enumerate(factors):
        kinds = refused if number > 1 else {"no_meta"}
        with refuse(*kinds):
            optimizer.zero_grad()
            loss = model(x).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer, **limits)
            if with_norm:
                scaler.grad_norm()
            scaler.update()
    return scaler.step_counts(optimizer).skipped


def _fused_steps(*quick_cases: tuple[str, bool, str]) -> list[Any]:
    """Return the cases of a fused step; all but the quick ones are slow."""
    parameters = []
    for case in itertools.product(["scaler", "guard"], [False, True], ["late", "random"]):
        by, with_norm, schedule = case
        marks = [] if case in quick_cases else [pytest.mark.slow]
        case_id = f"{by}-{'max_norm' if with_norm else 'step'}-{schedule}"
        parameters.append(pytest.param(by, with_norm, schedule, id=case_id, marks=marks))
    return parameters


# Each value of a parameter is in one quick case.
@pytest.mark.parametrize(
    ("by", "with_norm", "schedule"),
    _fused_steps(("scaler", True, "late"), ("guard", False, "random")),
)
def test_a_fused_step_never_waits_for_the_device(sim, by, with_norm, schedule):
    skipped = sim.one(_skips_without_host_syncs, by, False, with_norm, schedule=schedule)
    assert skipped == 1


@pytest.mark.parametrize(("by", "with_norm", "schedule"), _fused_steps(("guard", False, "random")))
def test_a_fused_step_in_a_group_waits_for_events_alone(sim2, by, with_norm, schedule):
    skipped = sim2.run(_skips_without_host_syncs, by, True, with_norm, schedule=schedule)
    assert skipped == [1, 1]

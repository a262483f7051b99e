"""What rounding took comes back, through skips, scales, other buckets and checkpoints."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from tests.comm_hooks.training import agreed, inputs, mlp, wrapped

FED_BACK = [name for name, wire in comm_hooks.WIRE_FORMATS.items() if wire.needs_error_feedback]
WIDTHS = (19, 60, 41, 3)


def _sums(wire: str, numel: int, rounds: int) -> list[float]:
    """The error of the sum of all means so far, beside one mean, after 1 and after all rounds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = torch.stack([_gradient(numel, r) for r in range(size)])
    state = comm_hooks.CommHookState(wire)
    parameter = nn.Parameter(torch.zeros(numel))
    total = torch.zeros(numel)
    found = []
    for turn in range(1, rounds + 1):
        total += state.average(everyone[rank].clone(), [parameter]).wait()
        true = everyone.mean(0) * turn
        found.append(((total - true).norm() / everyone.mean(0).norm()).item())
    return [found[0], found[-1]]


def _gradient(numel: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("wire", FED_BACK)
@pytest.mark.parametrize(("size", "numel"), [(2, 5000), (4, 60_000)])
def test_errors_do_not_add_up(ranks, size, numel, wire):
    for first, last in ranks(size).run(_sums, wire, numel, 20):
        # Twenty independent errors would make 4.5 of one, and twenty of the same kind 20.
        assert last <= 2 * first


# -- under a scaler -------------------------------------------------------------------------------


def _trained(
    wire: str, scale: float, bad: int | None, *, attach: bool = True, saved: bool = False
) -> Tensor:
    """Parameters after six good steps, an overflow before the one numbered ``bad``."""
    model, state = wrapped(mlp(*WIDTHS), wire)
    scaler = DistGradScaler("cpu", init_scale=scale)
    if attach:
        scaler.attach(state)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        for spoilt in [True, False] if step == bad else [False]:
            sgd.zero_grad()
            loss = model(inputs(step, WIDTHS[0])).square().mean()
            if spoilt and dist.get_rank() == 0:
                # Only the last layer's gradients: other buckets go through clean.
                _spoil_once(model.module[-1].weight)
            scaler.scale(loss).backward()
            scaler.step(sgd)
            scaler.update()
            assert scaler.stepped(sgd) != spoilt
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _spoil_once(parameter: Tensor) -> None:
    def spoil(gradient: Tensor) -> Tensor:
        handle.remove()
        return torch.full_like(gradient, float("inf"))

    handle = parameter.register_hook(spoil)


def _equal(wire: str, scales: tuple[float, float], bad: int | None) -> tuple[bool, bool]:
    clean = _trained(wire, scales[0], None)
    other = _trained(wire, scales[1], bad)
    return torch.equal(clean, other), agreed(other)


@pytest.mark.parametrize("wire", FED_BACK)
def test_the_loss_scale_does_not_matter(ranks2, wire):
    assert ranks2.run(_equal, wire, (1.0, 2.0**24), None) == [(True, True)] * 2


class _TwoParts(nn.Module):
    """Two parameters in one bucket; the gradient of ``a`` is as large as ``factor`` says."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(numel)) for _ in range(2))

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return (self.a * x).sum() * factor + (self.b * x).sum()


def _one_overflows(wire: str, numel: int, every: int) -> tuple[float, bool]:
    """The error of ``b`` after 12 steps, against float64, and whether their bucket begins again.

    Every so many steps the gradient of ``a`` is inf on rank 0, and its optimizer skips.
    """
    model, state = wrapped(_TwoParts(numel), wire, bucket_cap_mb=25)
    scaler = DistGradScaler("cpu", init_scale=2.0**10, backoff_factor=0.5)
    scaler.attach(state)
    a, b = (torch.optim.SGD([p], lr=1.0) for p in (model.module.a, model.module.b))
    true, dropped = torch.zeros(numel, dtype=torch.float64), True
    for step in range(12):
        model.zero_grad()
        bad = every > 0 and step % every == every - 1
        factor = float("inf") if bad and dist.get_rank() == 0 else 1.0
        x = inputs(step, numel, rows=1)[0]
        scaler.scale(model(x, factor)).backward()
        scaler.step(a)
        scaler.step(b)
        assert (scaler.stepped(a), scaler.stepped(b)) == (not bad, True)
        (residuals,) = state.state_dict()["residuals"].values()
        dropped &= bool(residuals[1].any()) != bad
        scaler.update()
        everyone = x.double()
        dist.all_reduce(everyone)
        true -= everyone / dist.get_world_size()
    arrived = model.module.b.detach()
    return ((arrived.double() - true).norm() / true.norm()).item(), dropped


@pytest.mark.parametrize("wire", FED_BACK)
@pytest.mark.parametrize(("size", "numel"), [(2, 500), (4, 60_000)])
def test_a_bucket_of_an_optimizer_that_skips_begins_again(ranks, size, numel, wire):
    for every in (0, 3):
        for error, dropped in ranks(size).run(_one_overflows, wire, numel, every):
            assert error < 0.05
            assert dropped


def _after_nonfinite(attach: bool, ranks_per_host: int) -> list[float]:
    """Errors of ten means after a step in which one rank had inf and another NaN."""
    model = DistributedDataParallel(nn.Linear(5000, 1, bias=False))
    state = comm_hooks.register(model, "int8", ranks_per_host=ranks_per_host)
    scaler = DistGradScaler("cpu", init_scale=2.0**10)
    if attach:
        scaler.attach(state)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for step in range(12):
        sgd.zero_grad()
        x = inputs(step, 5000, rows=1)
        true = x[0].clone()
        dist.all_reduce(true)
        if step == 1:
            x[0, 10 + 2000 * dist.get_rank() % 5000] = (math.inf, math.nan)[dist.get_rank() % 2]
        scale = scaler.get_scale()
        scaler.scale(model(x).sum()).backward()
        mean = model.module.weight.grad[0] / scale
        scaler.step(sgd)
        assert scaler.stepped(sgd) == (step != 1)
        scaler.update()
        found.append(float((mean - true / dist.get_world_size()).norm() * 4 / true.norm()))
    return found


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("attach", [False, True])
def test_inf_and_nan_leave_ten_finite_and_right_steps(ranks4, attach, ranks_per_host):
    for errors in ranks4.run(_after_nonfinite, attach, ranks_per_host):
        assert not math.isfinite(errors[1])
        if attach:
            assert max(errors[2:]) < 0.02
        else:
            # The scale was halved, which a hook is told of by an attached scaler alone.
            assert max(errors[2:]) < 0.04


# -- with a scaler, and without -------------------------------------------------------------------

SCALE = 2.0**16


class _Exchanges:
    """Exchanges of one large parameter, and how far each mean is from the true one."""

    def __init__(self, *, attach: bool) -> None:
        self.model, self.state = wrapped(nn.Linear(1000, 1, bias=False), "int8")
        self.scaler = DistGradScaler("cpu", init_scale=SCALE)
        self.errors: list[float] = []
        if attach:
            self.scaler.attach(self.state)

    def exchange(self, *, scaled: bool = True, update: bool = True) -> None:
        x = inputs(len(self.errors), 1000, rows=1)
        true = x[0].clone()
        dist.all_reduce(true)
        self.model.zero_grad()
        loss = self.model(x).sum()
        (self.scaler.scale(loss) if scaled else loss).backward()
        self.note(true / dist.get_world_size(), SCALE if scaled else 1.0)
        if scaled and update:
            sgd = torch.optim.SGD(self.model.parameters(), lr=0.0)
            self.scaler.step(sgd)
            self.scaler.update(SCALE)

    def note(self, true: Tensor, scale: float) -> None:
        mean = self.model.module.weight.grad[0] / scale
        self.errors.append(((mean - true).norm() / true.norm()).item())


def _changed(what: str) -> list[float]:
    """The errors of exchanges between which the scaler comes or goes."""
    one = _Exchanges(attach=what != "attached late")
    one.exchange()
    one.exchange(update=what != "detached before the update")
    if what.startswith("detached"):
        one.scaler.detach(one.state)
    elif what == "attached late":
        one.scaler.attach(one.state)
    else:
        one.exchange(scaled=False)
    if what == "attached again":
        one.scaler.attach(one.state)
        one.scaler.attach(one.state)
    for _ in range(2):
        one.exchange(scaled=not what.startswith("detached"))
    return one.errors


@pytest.mark.parametrize(
    "what",
    [
        "attached late",
        "detached",
        "detached before the update",
        "attached again",
        "not used in one pass",
    ],
)
def test_residuals_in_other_units_are_dropped(ranks2, what):
    for errors in ranks2.run(_changed, what):
        assert max(errors) < 0.02, errors


def _loaded(saved: bool, loaded: bool) -> tuple[list[float], bool]:
    """The errors of exchanges before and after a checkpoint, and the units that it names."""
    before = _Exchanges(attach=saved)
    for _ in range(2):
        before.exchange()
    state = before.state.state_dict()
    after = _Exchanges(attach=loaded)
    after.state.load_state_dict(state)
    assert after.state.state_dict()["scaled"] is saved
    for _ in range(2):
        after.exchange()
    return before.errors + after.errors, state["scaled"]


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_a_checkpoint_says_in_which_units_residuals_are(ranks2, saved, loaded):
    for errors, units in ranks2.run(_loaded, saved, loaded):
        assert max(errors) < 0.02, errors
        assert units is saved


def _copied() -> tuple[str, bool]:
    one = _Exchanges(attach=True)
    one.exchange()
    with pytest.warns(UserWarning, match="a copy of a module"):
        other = copy.deepcopy(one.state)
    return other.wire.name, bool(other.state_dict()["residuals"])


def test_a_copy_has_the_format_alone(ranks2):
    assert ranks2.run(_copied) == [("int8", False)] * 2


# -- where buckets change -------------------------------------------------------------------------


def _resumed(wire: str, **settings: Any) -> tuple[float, float, bool]:
    """How far a run that was saved and loaded is from one that was not, and without loading."""
    ends = []
    for how in ("whole", "resumed", "forgotten"):
        model, state = wrapped(mlp(*WIDTHS), wire, **settings)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            if step == 4 and how != "whole":
                buffer = io.BytesIO()
                torch.save((model.module.state_dict(), state.state_dict()), buffer)
                buffer.seek(0)
                weights, saved = torch.load(buffer)
                model, state = wrapped(mlp(*WIDTHS), wire, **settings)
                model.module.load_state_dict(weights)
                if how == "resumed":
                    state.load_state_dict(saved)
                    assert set(state.state_dict()["residuals"]) == set(saved["residuals"])
                sgd = torch.optim.SGD(model.parameters(), lr=0.05)
            sgd.zero_grad()
            model(inputs(step, WIDTHS[0])).square().mean().backward()
            sgd.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    whole, resumed, forgotten = ends
    return (
        (resumed - whole).norm().item(),
        (forgotten - whole).norm().item(),
        {name for names in saved["residuals"] for name in names}
        == {name for name, _ in model.module.named_parameters()},
    )


@pytest.mark.parametrize("wire", FED_BACK)
@pytest.mark.filterwarnings("ignore:find_unused")
def test_a_run_goes_on_to_the_bit_where_ddp_keeps_its_buckets(ranks4, wire):
    # Else its first pass after a start has parameters in another order than all that follow.
    settings = {"find_unused_parameters": True}
    for resumed, forgotten, complete in ranks4.run(_resumed, wire, **settings):
        assert complete
        assert resumed == 0.0
        assert forgotten > 0

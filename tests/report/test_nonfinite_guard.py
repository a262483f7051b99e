"""A guard or scaler that keeps its steps says where the NaN of a skipped one was born."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distamp
from distamp.errors import StageError
from tests.ranks import RankPool, logged
from tests.report.test_nonfinite import INF, Net, ddp, inputs_of, log, on_rank_1, step_of


def replaying(model: nn.Module) -> distamp.StepGuard:
    guard = distamp.StepGuard()
    guard.replay = distamp.StepReplay(model)
    return guard


def trained(guard: Any, model: nn.Module, step: Any, *batches: Any, spoil: Any = None) -> None:
    """One iteration, kept."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    guard.keep(step, *batches)
    step()
    if spoil is not None:
        next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = spoil
    guard.step(optimizer)
    guard.update()


def test_a_guard_says_why_it_skipped(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    guard = replaying(model)
    trained(guard, model, step_of(model, inputs_of()))
    assert guard.replay.found is None
    running = model.bn.running_mean.clone()
    model.blocks[1].fault = log
    for _ in range(2):
        trained(guard, model, step_of(model, inputs_of()))
    assert guard.replay.found.op == "log"
    assert guard.replay.found.notes == ()
    told = [each for each in caplog.records if each.name == "distamp.report"]
    assert len(told) == 1, "once in a row of skipped steps"
    assert told[0].levelno == logging.WARNING
    assert "log in blocks.1 made inf" in told[0].getMessage()
    assert not torch.equal(running, model.bn.running_mean), "the step itself moved it"


def test_the_replay_begins_from_what_was_kept() -> None:
    """Dropout draws the same masks, and batch norm begins from the same statistics."""
    model, seen = Net(lambda x: x / (x - x)), []
    model.blocks[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output.detach())
    )
    model.bn.eval()
    guard = replaying(model)
    torch.rand(5)
    trained(guard, model, step_of(model, inputs_of()))
    drawn = torch.get_rng_state()
    assert guard.replay.found.op == "div"
    assert all(torch.equal(each, seen[i % 2]) for i, each in enumerate(seen))
    assert len(seen) > 4
    torch.manual_seed(0)
    assert not torch.equal(drawn, torch.get_rng_state())


def test_a_scaler_replays_a_nan_at_once_and_an_overflow_at_the_third() -> None:
    model = Net()
    replays = []

    class Counted(distamp.StepReplay):
        def step_ended(self, skipped: Any, scaled: bool) -> None:
            before, self.found = self.found, None
            super().step_ended(skipped, scaled)
            replays.append(self.found is not None)
            self.found = self.found or before

    scaler = distamp.DistGradScaler("cpu", init_scale=4.0)
    scaler.replay = Counted(model)

    def step() -> None:
        scaler.scale(model(inputs_of()[0]).sum()).backward()

    for spoil in (INF, INF, None, INF, INF, INF, INF, None, float("nan"), float("nan")):
        trained(scaler, model, step, spoil=spoil)
    wanted = [False, False, False, False, False, True, False, False, True, False]
    assert replays == wanted
    assert scaler.replay.found.kind == "unseen", "what was spoilt by hand the replay has not"


def test_a_scaled_step_is_replayed_at_the_scale_that_it_had() -> None:
    model = nn.Linear(8, 8)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    scaler = distamp.DistGradScaler("cpu", init_scale=2.0**127, max_scale=2.0**127)
    scaler.replay = distamp.StepReplay(model)
    scales = []

    def step() -> None:
        scales.append(scaler.get_scale())
        scaler.scale(model(torch.full((2, 8), 1e3)).sum()).backward()

    for _ in range(3):
        trained(scaler, model, step)
    assert scales == [2.0**127, 2.0**126, *[2.0**125] * 3]
    assert scaler.get_scale() == 2.0**124
    found = scaler.replay.found
    assert (found.op, found.kernel, found.direction) == ("linear", "mm", "backward")


def test_a_batch_that_changed_in_place_is_said() -> None:
    model, inputs = Net(log), inputs_of()
    guard = replaying(model)
    guard.keep(step_of(model, inputs), {"batches": [inputs]})
    step_of(model, inputs)()
    inputs.add_(1.0)
    guard.step(torch.optim.SGD(model.parameters()))
    guard.update()
    assert guard.replay.found.notes == ("a batch was changed in place since the step was kept",)


def test_keep_needs_something_that_replays() -> None:
    with pytest.raises(StageError, match=r"set \.replay = distamp\.StepReplay\(model\) first"):
        distamp.StepGuard().keep(lambda: None)
    with pytest.raises(TypeError, match=r"replay is a .* or None, not Linear"):
        distamp.StepGuard().replay = nn.Linear(1, 1)  # type: ignore[assignment]


def on_ranks() -> tuple[Any, list[str], bool]:
    model = ddp(Net(on_rank_1(log)))
    guard = replaying(model)
    weights = [each.clone() for each in model.parameters()]
    with logged("distamp.report") as lines:
        trained(guard, model, step_of(model, inputs_of(dist.get_rank())))
    kept = all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    return guard.replay.found, lines, kept


def test_all_ranks_find_the_same_and_one_logs_it(ranks2: RankPool) -> None:
    (found, lines, kept), (other, silent, _) = ranks2.run(on_ranks)
    assert (found.op, found.ranks) == ("log", (1,))
    assert found == other
    assert kept
    assert (len(lines), len(silent)) == (1, 0)

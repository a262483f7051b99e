"""Refusals, copies, retries, stand-ins: small things that torch's class does and this one must."""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import distamp
from distamp import DistGradScaler, Precision
from distamp.errors import SettingError
from distamp.scaler import MasterParameters
from tests.ranks import RankPool, subgroup
from tests.scaler.faults.tools import error_of
from tests.scaler.steps import INF, backward, cpu_scaler, iteration, leaf, sgd, torch_scaler

# -- copies ----------------------------------------------------------------------------------------


def _copied_with_a_group() -> Any:
    groups = [subgroup([0, 1]), subgroup([2, 3])]
    mine = groups[dist.get_rank() // 2]
    scaler = copy.deepcopy(cpu_scaler(process_group=mine))
    same = scaler.process_group is mine
    parameter, optimizer = sgd(1.0)
    # An overflow of ranks 2 and 3's group is no business of ranks 0 and 1.
    backward(scaler, parameter, INF if dist.get_rank() == 2 else 0.25)
    scaler.step(optimizer)
    scaler.update()
    return same, parameter.item(), scaler.get_scale()


def test_a_deep_copy_keeps_the_group_it_was_given(four: RankPool) -> None:
    assert four.run(_copied_with_a_group) == [(True, 0.75, 1024.0)] * 2 + [(True, 1.0, 512.0)] * 2


def test_a_deep_copy_of_a_used_scaler_goes_on_by_itself() -> None:
    results = []
    for scaler in (torch_scaler(growth_interval=3), cpu_scaler(growth_interval=3)):
        parameter, optimizer = sgd(1.0)
        iteration(scaler, optimizer, parameter, 0.25)
        copied = copy.deepcopy(scaler)
        iteration(copied, optimizer, parameter, INF)
        iteration(scaler, optimizer, parameter, 0.25)
        iteration(scaler, optimizer, parameter, 0.25)
        results.append((scaler.get_scale(), copied.get_scale(), parameter.item()))
    assert results[0] == results[1] == (2048.0, 512.0, 0.25)


# -- levels and initialize -------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["banana", "True", 1, 0, 2.5])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "bf16"])
@pytest.mark.parametrize("name", ["keep_batchnorm_fp32", "master_weights"])
def test_a_switch_that_is_no_switch_is_refused_at_every_level(
    level: str, name: str, value: Any
) -> None:
    if value in ("True", 1, 0) and not isinstance(value, float):
        # Apex takes these words and numbers for switches: accepted as such, or refused.
        try:
            made = Precision.of(level, **{name: value})
        except SettingError:
            return
        assert getattr(made, name) in (True, False, None)
        return
    with pytest.raises(SettingError, match=name):
        Precision.of(level, **{name: value})


def _with_a_temperature(level: str) -> tuple[Any, nn.Parameter]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.5)
    return distamp.initialize(model, optimizer, level), temperature


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "bf16"])
def test_an_optimizer_may_hold_a_parameter_outside_the_model(level: str) -> None:
    amp, temperature = _with_a_temperature(level)
    for _ in range(2):
        amp.zero_grad()
        temperature.grad = None
        with amp.autocast():
            output = amp.model(torch.ones(1, 4))
        amp.backward(output.float().sum() * 0.0 + temperature * 0.5)
        assert bool(amp.step())
    assert temperature.item() == 0.5


def test_an_optimizer_made_before_a_wrapper_that_shards_is_still_refused() -> None:
    model = nn.Linear(4, 2)
    other = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    with pytest.raises(SettingError, match="do not belong to the model"):
        distamp.initialize(model, optimizer, "O1")


def test_several_losses_make_no_optimizers_of_their_own() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    made: list[Any] = []
    begin = torch.optim.Optimizer.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        begin(self, *args, **kwargs)

    with mock.patch.object(torch.optim.Optimizer, "__init__", counted):
        amp = distamp.initialize(model, optimizer, "O1", num_losses=3, init_scale=1024.0)
        amp.zero_grad()
        for loss_id in range(3):
            amp.backward(amp.model(torch.ones(1, 4)).float().sum(), loss_id)
        assert bool(amp.step())
    assert made == []


# -- a retry after an error ------------------------------------------------------------------------


def _retries(how: str) -> list[Any]:
    """A float16 gradient on rank 1 is refused on every rank; the user tries again."""
    parameter = leaf(1.0, dtype=torch.float16 if dist.get_rank() == 1 else torch.float32)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.25)
    call = getattr(scaler, how)
    return [error_of(call, optimizer), error_of(call, optimizer), error_of(scaler.step, optimizer)]


@pytest.mark.parametrize("how", ["step", "unscale_"])
def test_a_retry_after_an_error_says_why_it_is_closed(pair: RankPool, how: str) -> None:
    for first, *again in pair.run(_retries, how):
        assert first is not None
        assert "FP16" in first[1]
        for error in again:
            assert error is not None
            assert "already been called" not in error[1]
            assert "FP16" in error[1], "the first error is repeated"
            assert "update()" in error[1], "and what to do"


# -- masters on an accelerator without sparse tensors ----------------------------------------------


class _NoSparse(TorchDispatchMode):
    """An out-of-tree accelerator that never implemented sparse COO."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "sparse" in func.name() or (isinstance(result, Tensor) and result.is_sparse):
            raise NotImplementedError(f"Could not run {func.name()!r} with this backend")
        return result


@pytest.mark.parametrize("set_to_none", [True, False])
def test_masters_need_no_sparse_tensors(set_to_none: bool) -> None:
    parameter = leaf(4.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    MasterParameters(optimizer)
    scaler = cpu_scaler(fp16_grads="master")
    with _NoSparse():
        for gradient, value in ((2.0, 2.0), (INF, 2.0), (1.0, 1.0)):
            backward(scaler, parameter, 0.5)
            optimizer.zero_grad(set_to_none)  # thrown away without a step
            backward(scaler, parameter, gradient)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none)
            assert parameter.item() == value


# -- stand-ins -------------------------------------------------------------------------------------


class StandInGroup:
    """As in torch's own tests of ShardedGradScaler: a rank and a size."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def test_a_stand_in_for_a_group_of_one_is_taken() -> None:
    group: Any = StandInGroup(0, 1)
    scaler = DistGradScaler("cpu", init_scale=2.0, process_group=group)
    assert scaler.scale(torch.full((1,), 4.0)).item() == 8.0
    parameter, optimizer = sgd(1.0)
    iteration(scaler, optimizer, parameter, 0.25)
    assert parameter.item() == 0.75
    # torch's test_inf_gradients_skip_optim_step.
    tensor = torch.tensor([INF])
    tensor.grad = tensor.clone()
    skipped = torch.optim.SGD([tensor], lr=1.0)
    scaler.scale(torch.full((1,), 4.0))
    assert scaler.step(skipped) is None


@pytest.mark.parametrize(
    "device", [mock.Mock(), mock.MagicMock(), torch.device("cpu"), torch.device("cpu", 0)]
)
def test_a_device_that_torchs_class_takes_is_taken(device: Any) -> None:
    results = []
    for kind in (torch.amp.GradScaler, DistGradScaler):
        scaler = kind(device, init_scale=1024.0)
        parameter, optimizer = sgd(1.0)
        iteration(scaler, optimizer, parameter, 0.25)
        results.append((parameter.item(), scaler.get_scale(), scaler.is_enabled()))
    assert results[0] == results[1]


# -- a skipped step is explained -------------------------------------------------------------------


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def _log_of_a_run(named: bool, how: str = "step") -> list[tuple[str, str]]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    handler = _Records()
    logger = logging.getLogger("distamp.scaler")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        settings = {"named_parameters": model.named_parameters()} if named else {}
        scaler = cpu_scaler(**settings)
        for number in range(4):
            optimizer.zero_grad()
            overflow = number == 2 and rank == (1 if dist.is_initialized() else 0)
            loss = model.bias.sum() * 0.25 + model.weight.sum() * (INF if overflow else 0.25)
            scaler.scale(loss).backward()
            if how == "unscale":
                scaler.unscale_(optimizer)
            if how == "clip":
                scaler.clip_grad_norm_(optimizer, 1.0)
            if how == "step_all":
                scaler.step_all([optimizer])
            else:
                scaler.step(optimizer)
            scaler.update()
    finally:
        logger.removeHandler(handler)
    return handler.lines


@pytest.mark.parametrize("how", ["step", "unscale", "clip", "step_all"])
def test_a_skipped_step_is_explained_on_rank_0(pair: RankPool, how: str) -> None:
    first, second = pair.run(_log_of_a_run, True, how)
    assert second == []
    assert len(first) == 1
    level, line = first[0]
    assert level == "INFO"
    assert "AdamW" in line
    assert "1024" in line, "the scale of the step that was skipped"
    assert "rank 1" in line
    assert "2" in line or "3" in line, "which step"


def test_the_parameter_is_named_where_it_is_known() -> None:
    ((level, line),) = _log_of_a_run(named=True)
    assert level == "INFO"
    assert "weight" in line
    assert "bias" not in line


def test_nothing_is_said_where_nothing_was_skipped_or_nobody_listens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parameter, optimizer = sgd(1.0)
    scaler = cpu_scaler()
    for gradient in (0.25, INF, 0.25):
        iteration(scaler, optimizer, parameter, gradient)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""

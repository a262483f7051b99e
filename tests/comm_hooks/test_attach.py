"""A scaler attached to a hook: the skips stay the same, and rounding errors are fed back."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from tests.comm_hooks.training import PrescribedGradients, agreed, inputs, mlp, relative, wrapped
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import subgroup
from tests.scaler.steps import through_a_file

WIDTHS = (17, 40, 30, 3)

# -- skips -----------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A value in the first element of a parameter's gradient, on one rank in the third step."""

    value: float
    rank: int
    param: int


class Run(NamedTuple):
    """Five steps: the optimizers that stepped, the loss scale after each step, the weights."""

    taken: list[list[bool]]
    scales: list[float]
    weights: Tensor


def _make_optimizers(params: list[nn.Parameter], layout: str) -> list[torch.optim.Optimizer]:
    if layout == "two optimizers":
        return [torch.optim.Adam(params[:3], 1e-3), torch.optim.Adam(params[3:], 1e-3)]
    if layout == "fused":
        return [torch.optim.Adam(params, 1e-3, fused=True)]
    return [torch.optim.Adam(params, 1e-3)]


def _backward(model: Any, scaler: DistGradScaler, step: int, layout: str) -> None:
    """Backpropagate the batch of a step, and another one before it if a layout accumulates."""
    if layout == "accumulate":
        with model.no_sync():
            loss = model(inputs(step, WIDTHS[0])).square().mean()
            scaler.scale(loss).backward()
        step += 100
    loss = model(inputs(step, WIDTHS[0])).square().mean()
    scaler.scale(loss).backward()


def train(
    format: str,
    layout: str = "plain",
    attach: bool = True,
    fault: Fault | None = None,
    scale: float = 1024.0,
) -> Run:
    """Train DDP with a hook, which the scaler knows if ``attach``."""
    group = None
    if layout == "two groups":
        groups = [subgroup([0, 1]), subgroup([2, 3])]
        group = groups[dist.get_rank() // 2]
    model = DistributedDataParallel(mlp(*WIDTHS), bucket_cap_mb=0.002, process_group=group)
    hook = comm_hooks.register_comm_hook(model, format)
    scaler = DistGradScaler("cpu", init_scale=scale, growth_interval=2, process_group=group)
    if attach:
        scaler.attach_comm_hook(hook)
    params = list(model.parameters())
    optimizers = _make_optimizers(params, layout)
    run = Run([], [], torch.empty(0))

    def spoil(grad: Tensor) -> Tensor:
        if step == 2 and dist.get_rank() == fault.rank:
            grad = grad.clone()
            grad.view(-1)[0] = fault.value
        return grad

    if fault is not None:
        params[fault.param].register_hook(spoil)
    for step in range(5):
        model.zero_grad()
        _backward(model, scaler, step, layout)
        if layout == "clip":
            scaler.clip_grad_norm_(optimizers[0], 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        run.taken.append([scaler.step_was_taken(optimizer) for optimizer in optimizers])
        run.scales.append(scaler.get_scale())
    weights = nn.utils.parameters_to_vector(params).detach()
    return run._replace(weights=weights)


def check_skips(format: str, layout: str, fault: Fault) -> tuple[Run, Run]:
    """Check that a hook changes no skip, and return the runs with and without attachment."""
    run = train(format, layout, attach=True, fault=fault)
    alone = train(format, layout, attach=False, fault=fault)
    assert run.taken == alone.taken
    assert run.scales == alone.scales
    has_fault = True
    if layout == "two groups":
        has_fault = dist.get_rank() // 2 == fault.rank // 2
    all_taken = [all(taken) for taken in run.taken]
    assert all_taken == [True, True, not has_fault, True, True]
    assert run.weights.isfinite().all()
    return run, alone


LAYOUTS = ["plain", "fused", "accumulate", "clip", "two optimizers", "two groups"]
QUICK_LAYOUTS = ["two groups"]


@on_ranks(4)
@pytest.mark.parametrize("layout", quick_cases(LAYOUTS, QUICK_LAYOUTS))
def test_a_hook_in_fp16_skips_the_same_steps_and_trains_the_same(layout):
    fault = Fault(math.inf, rank=3, param=1)
    run, alone = check_skips("fp16", layout, fault)
    torch.testing.assert_close(run.weights, alone.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@on_ranks(4)
@pytest.mark.parametrize("layout", ["plain", "clip"])
def test_a_hook_in_int8_skips_the_same_steps(layout):
    """Only an attached hook drops the error of a skipped step, so the weights may differ."""
    fault = Fault(math.nan, rank=0, param=5)
    check_skips("int8", layout, fault)


@on_ranks(2)
def test_the_loss_scale_does_not_matter():
    weights = train("int8", scale=1.0).weights
    assert torch.equal(weights, train("int8", scale=2.0**24).weights)
    assert agreed(weights)


# -- uneven inputs ---------------------------------------------------------------------------------

# Epochs begin at these numbers. After each, there is one step with inputs on all ranks.
EPOCHS = (0, 10)


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def wrap_for_uneven_inputs(counts: Sequence[int]) -> Any:
    # DDP orders buckets by rank 0's first gradients, unless it looks for unused parameters.
    return DistributedDataParallel(
        mlp(*WIDTHS), bucket_cap_mb=0.002, find_unused_parameters=counts[0] == 0
    )


def train_uneven(format: str, counts: Sequence[int], overflow: int | None) -> Tensor:
    """Train with a hook, a scaler and torch's Join, and return the weights.

    Args:
        format: The hook's format.
        counts: The number of inputs of each rank in an epoch.
        overflow: The number of the input with an infinite loss.
    """
    model = wrap_for_uneven_inputs(counts)
    scaler = DistGradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scaler.attach_comm_hook(comm_hooks.register_comm_hook(model, format))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        loss = model(inputs(number, WIDTHS[0])).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for epoch in EPOCHS:
        with Join([model, scaler]):
            for number in range(counts[dist.get_rank()]):
                step(epoch + number, math.inf if number == overflow else 1.0)
        step(1000 + epoch)
    return vector(model)


def train_with_zero_losses(counts: Sequence[int], overflow: int | None) -> Tensor:
    """Train torch's DDP, in which a rank without inputs has a loss of zero."""
    model = wrap_for_uneven_inputs(counts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        loss = model(inputs(number, WIDTHS[0])).square().mean() * factor
        loss.backward()
        optimizer.step()

    for epoch in EPOCHS:
        for number in range(max(counts)):
            if number != overflow:
                step(epoch + number, float(number < counts[dist.get_rank()]))
        step(1000 + epoch)
    return vector(model)


NO_OVERFLOW = pytest.param(None, marks=pytest.mark.slow, id="no overflow")
OVERFLOWS = pytest.mark.parametrize("overflow", [NO_OVERFLOW, 3])
FORMATS = pytest.mark.parametrize(
    ("format", "bound"), [pytest.param("fp16", 1e-3, marks=pytest.mark.slow), ("int8", 3e-2)]
)


def check_uneven_epochs(counts: Sequence[int], format: str, bound: float, overflow: Any) -> None:
    start = vector(mlp(*WIDTHS))
    weights = train_uneven(format, counts, overflow)
    exact = train_with_zero_losses(counts, overflow)
    assert relative(weights - start, exact - start) < bound
    assert agreed(weights)


@on_ranks(2)
@OVERFLOWS
@FORMATS
def test_epochs_in_which_a_rank_has_no_inputs_and_plain_steps_after_them(format, bound, overflow):
    check_uneven_epochs((0, 4), format, bound, overflow)


@pytest.mark.slow
@on_ranks(4)
@OVERFLOWS
@FORMATS
def test_epochs_of_uneven_inputs_and_plain_steps_after_them(format, bound, overflow):
    check_uneven_epochs((3, 0, 5, 1), format, bound, overflow)


# -- bad input -------------------------------------------------------------------------------------


@on_ranks(1)
def test_power_sgd_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"PowerSGD cannot be joined.*error feedback keeps an inf"):
        DistGradScaler("cpu").attach_comm_hook(PowerSGDState(None))


@pytest.mark.parametrize("state", [None, "fp16", object()], ids=lambda s: type(s).__name__)
def test_an_object_that_is_no_hook_is_refused(state):
    with pytest.raises(TypeError, match=r"attach_comm_hook\(\) takes what"):
        DistGradScaler("cpu").attach_comm_hook(state)


# -- error feedback --------------------------------------------------------------------------------

LARGE = (19, 60, 41, 3)


SIZES = [(2, 500), (4, 60_000)]


@on_ranks("size")
@pytest.mark.parametrize("interval", [0, 3])
@pytest.mark.parametrize(("size", "numel"), quick_cases(SIZES, quick=[(2, 500)]))
def test_a_bucket_of_an_optimizer_that_skips_begins_again(size, numel, interval):
    """Parameter ``b`` stays right, although ``a``, in the same bucket, skips at an interval."""
    model = DistributedDataParallel(PrescribedGradients(numel, numel))
    hook = comm_hooks.register_comm_hook(model, "int8")
    scaler = DistGradScaler("cpu", init_scale=2.0**10, backoff_factor=0.5)
    scaler.attach_comm_hook(hook)
    a, b = model.module.parts
    optimizer_a = torch.optim.SGD([a], lr=1.0)
    optimizer_b = torch.optim.SGD([b], lr=1.0)
    has_fault = interval > 0 and dist.get_rank() == 0
    exact = torch.zeros(numel, dtype=torch.float64)
    for step in range(12):
        model.zero_grad()
        skips = interval > 0 and step % interval == interval - 1
        grad = inputs(step, numel, rows=1)[0]
        grad_of_a = grad * math.inf if skips and has_fault else grad
        loss = model([grad_of_a, grad])
        scaler.scale(loss).backward()
        scaler.step(optimizer_a)
        scaler.step(optimizer_b)
        assert scaler.step_was_taken(optimizer_a) is not skips
        assert scaler.step_was_taken(optimizer_b)
        (residuals,) = hook.state_dict()["residuals"].values()
        residual_of_b = residuals[1]
        assert bool(residual_of_b.any()) is not skips
        scaler.update()
        total = grad.double()
        dist.all_reduce(total)
        exact -= total / size
    assert relative(b.detach(), exact) < 0.05


class LinearRun:
    """A large linear layer under DDP with an int8 hook, and a scaler."""

    def __init__(self, ranks_per_host: int) -> None:
        self.model = DistributedDataParallel(nn.Linear(5000, 1, bias=False))
        self.hook = comm_hooks.register_comm_hook(self.model, "int8", ranks_per_host=ranks_per_host)
        self.scaler = DistGradScaler("cpu", init_scale=2.0**17)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def error_of_step(self, step: int) -> float:
        """Take a step, and return the error of its gradient; the second one has inf and NaN."""
        self.optimizer.zero_grad()
        rank = dist.get_rank()
        grad = inputs(step, 5000, rows=1)
        exact = grad[0].clone()
        dist.all_reduce(exact)
        if step == 1:
            grad[0, 10 + 1000 * rank] = math.nan if rank % 2 else math.inf
        loss = self.model(grad).sum()
        self.scaler.scale(loss).backward()
        mean = self.model.module.weight.grad[0] / self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        assert self.scaler.step_was_taken(self.optimizer) == (step != 1)
        self.scaler.update()
        return relative(mean * dist.get_world_size(), exact)


# The number of hosts in the quick case.
ON_TWO_HOSTS = pytest.mark.parametrize("ranks_per_host", quick_cases([1, 2], quick=[2]))


def check_errors(errors: list[float], bound: float) -> None:
    assert not math.isfinite(errors[1])
    assert max(errors[2:]) < bound


@on_ranks(4)
@ON_TWO_HOSTS
def test_after_inf_and_nan_all_steps_of_an_attached_hook_are_finite_and_right(ranks_per_host):
    run = LinearRun(ranks_per_host)
    run.scaler.attach_comm_hook(run.hook)
    errors = [run.error_of_step(step) for step in range(12)]
    check_errors(errors, bound=0.02)


@pytest.mark.slow
@on_ranks(4)
@ON_TWO_HOSTS
def test_after_inf_and_nan_all_steps_of_a_detached_hook_are_finite_and_right(ranks_per_host):
    run = LinearRun(ranks_per_host)
    run.scaler.attach_comm_hook(run.hook)
    errors = [run.error_of_step(step) for step in range(4)]
    run.scaler.detach_comm_hook(run.hook)
    errors += [run.error_of_step(step) for step in range(4, 12)]
    check_errors(errors, bound=0.02)


@pytest.mark.slow
@on_ranks(4)
@ON_TWO_HOSTS
def test_after_inf_and_nan_all_steps_of_a_hook_without_scaler_are_finite(ranks_per_host):
    """Nothing tells this hook that the scale was halved, so its error is twice as large once."""
    run = LinearRun(ranks_per_host)
    errors = [run.error_of_step(step) for step in range(12)]
    check_errors(errors, bound=0.04)


class Sums(NamedTuple):
    """The sum of all received means of a parameter, and the exact sum."""

    received: Tensor
    exact: Tensor

    @classmethod
    def zeros(cls, numel: int) -> "Sums":
        return cls(torch.zeros(numel), torch.zeros(numel))

    def error(self) -> float:
        return relative(self.received, self.exact)


LARGE_SIZES = [(2, 3000), (4, 60_000)]


@pytest.mark.slow
@on_ranks("size")
@pytest.mark.parametrize(("size", "numel"), LARGE_SIZES)
def test_rounding_errors_do_not_add_up_and_wait_while_a_parameter_is_not_used(size, numel):
    """The second parameter is used in every other step."""
    net = PrescribedGradients(numel, numel)
    model: Any = DistributedDataParallel(net, find_unused_parameters=True)
    comm_hooks.register_comm_hook(model, "int8")
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(size, 2, numel, generator=generator)
    first = Sums.zeros(numel)
    second = Sums.zeros(numel)
    error_of_first_step = 0.0
    for step in range(32):
        used = [first, second] if step % 2 == 0 else [first]
        model.zero_grad()
        model(grads[dist.get_rank(), : len(used)]).backward()
        for index, sums in enumerate(used):
            sums.received.add_(net.parts[index].grad)
            sums.exact.add_(grads[:, index].mean(0))
        if step == 0:
            error_of_first_step = first.error()
    # 32 errors of one sign would leave the relative error as it is, and independent ones a sixth.
    assert first.error() <= 2 * error_of_first_step / 32
    # Half of the steps make twice the relative error, and lost feedback sixty times.
    assert second.error() < 4 * first.error()


# -- checkpoints -----------------------------------------------------------------------------------


def train_steps(model: Any, steps: Sequence[int]) -> Tensor:
    """Take plain steps of SGD, and return the weights."""
    for step in steps:
        model.zero_grad()
        model(inputs(step, LARGE[0])).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
    return vector(model)


def wrapped_large() -> tuple[Any, Any]:
    # Otherwise the first pass after a start has parameters in another order than all that follow.
    return wrapped(mlp(*LARGE), "int8", find_unused_parameters=True)


@on_ranks(2)
def test_a_resumed_run_is_bit_identical_if_ddp_keeps_its_buckets():
    model, hook = wrapped_large()
    train_steps(model, range(4))
    weights, residuals = through_a_file((model.module.state_dict(), hook.state_dict()))
    expected = train_steps(model, range(4, 8))

    resumed, resumed_hook = wrapped_large()
    resumed.module.load_state_dict(weights)
    resumed_hook.load_state_dict(residuals)
    assert torch.equal(train_steps(resumed, range(4, 8)), expected)

    without_residuals, _ = wrapped_large()
    without_residuals.module.load_state_dict(weights)
    assert not torch.equal(train_steps(without_residuals, range(4, 8)), expected)


@on_ranks(4)
def test_a_state_has_the_residuals_of_buckets_that_are_not_too_small():
    model, hook = wrapped_large()
    train_steps(model, range(4))
    names = set()
    for key in hook.state_dict()["residuals"]:
        _, _, params = key.partition(": ")
        names.update(params.split(", "))
    assert {"0.weight", "2.weight"} <= names


def trained_hook(ranks_per_host: int = 1) -> Any:
    """Return a hook that has reduced one step."""
    model, hook = wrapped(mlp(*LARGE), "int8", ranks_per_host=ranks_per_host)
    model(inputs(0, LARGE[0])).sum().backward()
    return hook


@on_ranks(4)
def test_a_rank_loads_its_own_residuals():
    state = trained_hook().state_dict()
    hook = trained_hook()
    hook.load_state_dict(state)
    assert hook.state_dict()["residuals"]


@on_ranks(4)
def test_residuals_of_other_hosts_are_dropped_with_a_warning():
    state = trained_hook(ranks_per_host=2).state_dict()
    hook = trained_hook()
    text = r"of 4 in 2x2, saved by 4 ranks, and this is rank . of 4 in 4x1"
    with pytest.warns(UserWarning, match=text):
        hook.load_state_dict(state)
    assert not hook.state_dict()["residuals"]


@on_ranks(4)
def test_residuals_of_another_rank_are_dropped_with_a_warning():
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, trained_hook().state_dict())
    hook = trained_hook()
    state_of_another = states[dist.get_rank() - 1]
    with pytest.warns(UserWarning, match="residuals are those of rank"):
        hook.load_state_dict(state_of_another)
    assert not hook.state_dict()["residuals"]


@on_ranks(2)
def test_a_dict_that_is_no_state_of_a_hook_is_refused():
    hook = trained_hook()
    damaged = {"a": [torch.full((3,), math.nan)]}
    for wrong in ({}, {"version": 1}, {**hook.state_dict(), "residuals": damaged}):
        with pytest.raises(ValueError, match=r"load what hook\.state_dict\(\) returned"):
            hook.load_state_dict(wrong)


@on_ranks(2)
def test_a_hook_without_names_of_parameters_has_no_state():
    model, _ = wrapped(mlp(*LARGE), None)
    hook = comm_hooks.CommHook("int8")
    model.register_comm_hook(hook, comm_hooks.fp16_compress_hook)
    model(inputs(0, LARGE[0])).sum().backward()
    with pytest.raises(RuntimeError, match=r"Call hook\.name_parameters"):
        hook.state_dict()

"""The scaler in a process: memory, torch.compile, defaults of torch, imports."""

import copy
import gc
import math
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import DistGradScaler
from distamp.scaler import HysteresisLossScale, MasterParameters, StepCounts
from tests.on_ranks import on_ranks
from tests.scaler.steps import INF, backward, cpu_scaler, iteration, leaf, sgd

# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Keep the objects of other tests out of `gc.collect`, which makes it fast."""
    gc.freeze()
    yield
    gc.unfreeze()


def train_one_optimizer(scaler: DistGradScaler, masters: bool) -> list[weakref.ref[Any]]:
    """Step a new optimizer once, and return weak references to it and to its parameter."""
    parameter = leaf(1.0, dtype=torch.float16 if masters else torch.float32)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    if masters:
        MasterParameters(optimizer)
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_([parameter] if masters else optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    return [weakref.ref(parameter), weakref.ref(optimizer)]


MASTERS = pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])


def scaler_for(masters: bool) -> DistGradScaler:
    return cpu_scaler(fp16_grads="master" if masters else "error")


@MASTERS
@pytest.mark.usefixtures("frozen_heap")
def test_a_scaler_keeps_no_optimizer_alive(masters: bool) -> None:
    scaler = scaler_for(masters)
    references = train_one_optimizer(scaler, masters)
    gc.collect()
    for reference in references:
        assert reference() is None


@pytest.mark.parametrize(
    "masters", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["float32", "masters"]
)
@pytest.mark.usefixtures("frozen_heap")
def test_a_scaler_does_not_grow_with_every_optimizer_that_is_gone(masters: bool) -> None:
    scaler = scaler_for(masters)

    def allocated_blocks_after_50_optimizers() -> int:
        for _ in range(50):
            train_one_optimizer(scaler, masters)
        gc.collect()
        # CPython caches up to 4,096 names that C code looks up by a new string at each call.
        sys._clear_type_cache()
        return sys.getallocatedblocks()

    before = allocated_blocks_after_50_optimizers()
    after = allocated_blocks_after_50_optimizers()
    assert after - before < 20, "a leak of one block for each optimizer would be 50"


# -- torch.compile ---------------------------------------------------------------------------------


def step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)


def unscale_and_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def clip_and_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.clip_grad_norm_(optimizer, 0.5, norm_type=1.0)
    scaler.step(optimizer)


def step_all(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step_all([optimizer])


StepFunction = Callable[[Any, torch.optim.Optimizer], None]


def train(step_function: StepFunction, compiled: bool) -> tuple[Any, ...]:
    """Train three iterations, and return parameters, scale and counts.

    The second iteration overflows on rank 1. A second optimizer steps after the third update.
    """
    parameter, optimizer = sgd(1.0, 2.0)
    late_parameter, late_optimizer = sgd()
    scaler = cpu_scaler(growth_interval=1)
    scaler.register_optimizers(optimizer, late_optimizer)

    def train_step(gradient: Tensor) -> None:
        optimizer.zero_grad()
        loss = (parameter * gradient).sum() + (late_parameter * 0.25).sum()
        scaler.scale(loss).backward()
        step_function(scaler, optimizer)
        scaler.update()

    gradients = [0.5, INF if dist.get_rank() == 1 else 0.5, 0.5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_step = torch.compile(train_step, backend="eager") if compiled else train_step
        for gradient in gradients:
            run_step(torch.tensor([0.25, gradient]))
        scaler.step(late_optimizer)
    torch._dynamo.reset()
    counts = scaler.step_counts(optimizer)
    return parameter.tolist(), late_parameter.item(), scaler.get_scale(), counts


# Both ranks import the compiler, which takes long.
@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("step_function", [step, unscale_and_step, clip_and_step, step_all])
def test_a_compiled_step_trains_as_without(step_function: StepFunction) -> None:
    eager = train(step_function, compiled=False)
    assert eager[1:] == (0.25, 2048.0, StepCounts(taken=2, skipped=1))
    assert train(step_function, compiled=True) == eager


# -- torch's defaults for a whole process ----------------------------------------------------------


def history_of_three_steps(fused: bool, settings: dict[str, Any]) -> list[Any]:
    """Return norm, flag, parameter and scale of three steps. The second step overflows."""
    masters = settings.get("fp16_grads") == "master"
    dtype = torch.float16 if masters else torch.float32
    parameter = nn.Parameter(torch.ones(2, dtype=dtype, device="cpu"))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=fused)
    if masters:
        MasterParameters(optimizer)
    scaler = cpu_scaler(**settings)
    history: list[Any] = []
    for gradient in (0.25, INF, 0.25):
        optimizer.zero_grad()
        weights = torch.full((2,), gradient, dtype=torch.float32, device="cpu")
        loss = (parameter.float() * weights).sum()
        scaler.scale(loss).backward()
        norm = scaler.clip_grad_norm_(optimizer, 100.0)
        scaler.step(optimizer)
        scaler.update()
        flag = scaler.found_inf(optimizer)
        history.extend([norm.item(), norm.dtype, flag.item(), flag.dtype])
        history.extend([parameter.tolist(), scaler.get_scale()])
    return history


FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {"growth_interval": 1},
        {"loss_scale": HysteresisLossScale(hysteresis=2)},
        {"fp16_grads": "master"},
    ],
    ids=["dynamic", "hysteresis", "masters"],
)


@on_ranks(2)
@FUSED
@SETTINGS
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float64, id="float64"),
        pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_torchs_default_dtype_changes_no_step(
    dtype: torch.dtype, settings: dict[str, Any], fused: bool
) -> None:
    expected = history_of_three_steps(fused, settings)
    torch.set_default_dtype(dtype)
    try:
        history = history_of_three_steps(fused, settings)
    finally:
        torch.set_default_dtype(torch.float32)
    assert history == expected


@on_ranks(2)
@FUSED
@SETTINGS
def test_torchs_default_device_changes_no_step(settings: dict[str, Any], fused: bool) -> None:
    expected = history_of_three_steps(fused, settings)
    with torch.device("meta"):
        history = history_of_three_steps(fused, settings)
    assert history == expected


# -- imports ---------------------------------------------------------------------------------------

# Plain training in one process needs none of these modules, and they are slow to import. The first
# optimizer of torch would import torch._dynamo, for these two functions, and sympy with it.
PROGRAM = """
import sys, torch
from types import SimpleNamespace

heavy = ("sympy", "mpmath", "torch._dynamo", "torch._inductor", "torch.fx.experimental")
heavy += tuple("torch.distributed." + name for name in ("tensor", "fsdp", "checkpoint"))
before = set(sys.modules)
import distamp
print(*[name for name in sorted(set(sys.modules) - before) if name.startswith(heavy)])
functions = {"disable": lambda function, *args, **settings: function, "graph_break": lambda: None}
torch._dynamo = sys.modules["torch._dynamo"] = SimpleNamespace(**functions)
p = torch.nn.Parameter(torch.ones(1)); o = torch.optim.SGD([p], lr=1.0)
before = set(sys.modules)
s = distamp.DistGradScaler("cpu")
s.scale((p * 0.25).sum()).backward(); s.clip_grad_norm_(o, 1.0); s.step(o); s.update()
print(*[name for name in sorted(set(sys.modules) - before) if name.startswith(heavy)])
"""


@pytest.mark.slow
def test_an_import_and_plain_training_load_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == []


# -- a disabled scaler -----------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [leaf(1.0), [leaf(1.0)], 3, None], ids=repr)
def test_a_disabled_scaler_returns_outputs_of_any_type_unchanged(outputs: Any) -> None:
    assert cpu_scaler(enabled=False).scale(outputs) is outputs


def test_a_disabled_scaler_checks_no_setting() -> None:
    scaler = cpu_scaler(math.inf, growth_factor=0.5, growth_interval=0, enabled=False)
    assert not scaler.is_enabled()


def test_a_disabled_scaler_steps_as_the_optimizer_alone() -> None:
    scaler = cpu_scaler(enabled=False)
    parameter, optimizer = sgd()
    iteration(scaler, optimizer, parameter, 0.25, unscale=True)
    assert parameter.item() == 0.75
    iteration(scaler, optimizer, parameter, 0.25, unscale=True)
    assert parameter.item() == 0.5


def test_a_disabled_scaler_returns_the_loss_of_a_closure() -> None:
    scaler = cpu_scaler(enabled=False)
    _, optimizer = sgd()
    assert scaler.step(optimizer, closure=lambda: torch.tensor(3.0)) == 3.0


def test_a_disabled_scaler_answers_every_question() -> None:
    scaler = cpu_scaler(enabled=False)
    parameter, optimizer = sgd()
    iteration(scaler, optimizer, parameter, 0.25, unscale=True)
    assert scaler.step_was_taken(optimizer) is True
    assert scaler.is_unscaled(optimizer) is False
    assert scaler.found_inf(optimizer) == 0.0
    assert scaler.get_scale() == 1.0


def test_copies_of_a_disabled_scaler_are_disabled() -> None:
    scaler = cpu_scaler(math.inf, growth_factor=0.5, growth_interval=0, enabled=False)
    loss = leaf(1.0)
    assert copy.deepcopy(scaler).scale(loss) is loss
    assert pickle.loads(pickle.dumps(scaler)).scale(loss) is loss

"""The scaler beside everything else in a process: memory, torch.compile, defaults."""

import copy
import gc
import math
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp.scaler import HysteresisLossScale, MasterParameters, StepCounts
from tests.on_ranks import on_ranks
from tests.scaler.steps import INF, backward, cpu_scaler, iteration, leaf, sgd

# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
def test_what_is_gone_is_gone_and_leaves_nothing_in_a_scaler(masters: bool) -> None:
    scaler = cpu_scaler(fp16_grads="master" if masters else "error")

    def train_one() -> list[weakref.ref[Any]]:
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

    def after(count: int) -> int:
        for _ in range(count):
            gone = train_one()
        gc.collect()
        assert [reference() for reference in gone] == [None, None]
        # Of names that C code looks up by a new string each time, CPython keeps up to 4,096, by
        # their addresses: the more memory a process has used, the longer until it is full.
        sys._clear_type_cache()
        return sys.getallocatedblocks()

    assert -after(100) + after(100) < 40, "a block for every second would be a leak already"


# -- torch.compile ---------------------------------------------------------------------------------


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale_": lambda scaler, optimizer: (scaler.unscale_(optimizer), scaler.step(optimizer)),
    "clip_grad_norm_": lambda scaler, optimizer: (
        scaler.clip_grad_norm_(optimizer, 0.5, norm_type=1.0),
        scaler.step(optimizer),
    ),
    "step_all": lambda scaler, optimizer: scaler.step_all([optimizer]),
}


def _trained(way: str, compiled: bool) -> Any:
    """Three steps, in which the second overflows on one rank, and a second optimizer waits."""
    (parameter, optimizer), (other, late), scaler = (
        sgd(1.0, 2.0),
        sgd(),
        cpu_scaler(growth_interval=1),
    )
    scaler.register_optimizers(optimizer, late)

    def train(gradient: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale((parameter * gradient).sum() + (other * 0.25).sum()).backward()
        WAYS[way](scaler, optimizer)
        scaler.update()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = torch.compile(train, backend="eager") if compiled else train
        for step in range(3):
            run(torch.tensor([0.25, INF if step == 1 and dist.get_rank() == 1 else 0.5]))
        scaler.step(late)
    torch._dynamo.reset()
    return parameter.tolist(), other.item(), scaler.get_scale(), scaler.step_counts(optimizer)


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_step_trains_as_without(way: str) -> None:
    eager = _trained(way, False)
    assert eager[1:] == (0.25, 2048.0, StepCounts(taken=2, skipped=1))
    assert _trained(way, True) == eager


# -- torch's defaults for a whole process, and what an import loads --------------------------------


def _stepped(fused: bool, settings: dict[str, Any]) -> list[Any]:
    """What steps leave of a parameter, the second of which overflows."""
    dtype = torch.float16 if "fp16_grads" in settings else torch.float32
    parameter = nn.Parameter(torch.ones(2, dtype=dtype, device="cpu"))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=fused)
    _kept = dtype is torch.float16 and MasterParameters(optimizer)
    scaler, seen = cpu_scaler(**settings), []
    for gradient in (0.25, INF, 0.25):
        optimizer.zero_grad()
        weights = torch.full((2,), gradient, dtype=torch.float32, device="cpu")
        scaler.scale((parameter.float() * weights).sum()).backward()
        norm = scaler.clip_grad_norm_(optimizer, 100.0)
        scaler.step(optimizer)
        scaler.update()
        flag = scaler.found_inf(optimizer)
        told = (norm.item(), norm.dtype, flag.item(), flag.dtype)
        seen.append((*told, parameter.tolist(), scaler.get_scale()))
    return seen


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"growth_interval": 1},
        {"loss_scale": HysteresisLossScale(hysteresis=2)},
        {"fp16_grads": "master"},
    ],
    ids=["dynamic", "hysteresis", "masters"],
)
def test_torchs_defaults_reach_no_tensor_of_ours(settings: dict[str, Any], fused: bool) -> None:
    expected = _stepped(fused, settings)
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            assert _stepped(fused, settings) == expected, dtype
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert _stepped(fused, settings) == expected


# Costly, and of no use to who trains plain tensors in one process. torch's own optimizers load
# torch._dynamo, and sympy with it, when one is made.
PROGRAM = """
import sys, torch

heavy = ("sympy", "mpmath", "torch._dynamo", "torch._inductor", "torch.fx.experimental")
heavy += tuple("torch.distributed." + name for name in ("tensor", "fsdp", "checkpoint"))
before = set(sys.modules)
import distamp
print(*[name for name in sorted(set(sys.modules) - before) if name.startswith(heavy)])
p = torch.nn.Parameter(torch.ones(1)); o = torch.optim.SGD([p], lr=1.0)
before = set(sys.modules)
s = distamp.DistGradScaler("cpu")
s.scale((p * 0.25).sum()).backward(); s.clip_grad_norm_(o, 1.0); s.step(o); s.update()
print(*[name for name in sorted(set(sys.modules) - before) if name.startswith(heavy)])
"""


def test_an_import_and_plain_training_load_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr[-2000:]


# -- a disabled scaler -----------------------------------------------------------------------------


def test_a_disabled_scaler_answers_everything_checks_nothing_and_does_nothing() -> None:
    scaler = cpu_scaler(math.inf, growth_factor=0.5, growth_interval=0, enabled=False)
    parameter, optimizer = sgd()
    for outputs in (parameter, [parameter], 3, None):
        assert scaler.scale(outputs) is outputs
    iteration(scaler, optimizer, parameter, 0.25, unscale=True)
    assert scaler.step(optimizer, closure=lambda: torch.tensor(3.0)) == 3.0
    assert (scaler.step_was_taken(optimizer), scaler.is_unscaled(optimizer)) == (True, False)
    assert (parameter.item(), scaler.get_scale(), scaler.found_inf(optimizer)) == (0.5, 1.0, 0.0)
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.scale(parameter) is parameter

"""A training step inside torch.compile steps as outside, on every rank: nothing sent is traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RankPool
from tests.scaler.steps import cpu_scaler, leaf

INF = float("inf")


def _step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)


def _unscale_and_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def _clip_and_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.clip_grad_norm_(optimizer, 0.5, norm_type=1.0)
    scaler.step(optimizer)


def _step_all(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step_all([optimizer])


WAYS: dict[str, Callable[..., None]] = {
    "step": _step,
    "unscale_": _unscale_and_step,
    "clip_grad_norm_": _clip_and_step,
    "step_all": _step_all,
}


def _trained(way: str, compiled: bool) -> tuple[list[float], float, int]:
    parameter = leaf(1.0, 2.0)
    optimizer = torch.optim.AdamW([parameter], lr=0.25)
    scaler = cpu_scaler()
    bad = dist.is_initialized() and dist.get_rank() == 1

    def train(gradient: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale((parameter * gradient).sum()).backward()
        WAYS[way](scaler, optimizer)
        scaler.update()

    call = torch.compile(train, backend="eager") if compiled else train
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            call(torch.tensor([0.25, INF if step == 1 and bad else 0.5]))
    torch._dynamo.reset()
    return parameter.tolist(), scaler.get_scale(), scaler.step_counts(optimizer).skipped


@pytest.mark.parametrize("way", ["step", "clip_grad_norm_"])
def test_a_compiled_training_step_trains_as_without(pair: RankPool, way: str) -> None:
    eager = pair.run(_trained, way, False)
    assert eager[0] == eager[1]
    assert eager[0][2] == 1
    assert pair.run(_trained, way, True) == eager


@pytest.mark.parametrize("way", ["unscale_", "step_all"])
def test_the_same_in_a_process_alone(way: str) -> None:
    assert _trained(way, True) == _trained(way, False)


def test_an_optimizer_that_is_compiled_itself_still_is() -> None:
    parameter, scaler, graphs = leaf(1.0, 2.0), cpu_scaler(), []
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]

    @torch.compile(backend="eager")
    def step() -> None:
        scaler.step(optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler.scale((parameter * 0.25).sum()).backward()
        step()
    torch._dynamo.reset()
    assert parameter.tolist() == [0.75, 1.75]
    assert graphs

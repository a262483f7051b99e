"""clip_grad_norm_ gives the norm of the unsharded model, whatever the layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distamp import DistGradScaler
from distamp.errors import SettingError, StageError
from tests.ranks import RankPool
from tests.scaler.layouts import LAYOUTS
from tests.scaler.reference import KINDS

MAX_NORM = 0.5
IN_GROUPS = sorted(name for name, layout in LAYOUTS.items() if layout.group == "default")


def _reference_norm(gradients: list[Tensor], norm_type: float) -> float:
    flat = torch.cat([g.flatten() for g in gradients]).double()
    return float(torch.linalg.vector_norm(flat, norm_type))


def _clipped(name: str, norm_type: float, unscale_first: bool) -> dict[str, Any]:
    layout = LAYOUTS[name]()
    kind = KINDS["SGD for-loop"]
    optimizer = layout.optimizer(kind, [p for part in layout.parts() for p in part])
    layout.attach([optimizer])
    scaler = DistGradScaler("cpu", process_group=layout.process_group())
    layout.backward(scaler, 0, 1, [1.0])
    reference = layout.reference(kind, 1)
    reference.backward(0, 1)
    gradients = [p.grad for p in reference.parameters.values() if p.grad is not None]
    if unscale_first:
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_(optimizer, MAX_NORM, norm_type, sharded=layout.sharded)
    clipped = scaler.clip_grad_norm_(optimizer, 1e30, norm_type, sharded=layout.sharded)
    return {
        "norm": norm.item(),
        "after": clipped.item(),
        "expected": _reference_norm(gradients, norm_type),
    }


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("name", IN_GROUPS)
def test_the_norm_is_that_of_the_unsharded_model(
    ranks4: RankPool, name: str, norm_type: float
) -> None:
    results = ranks4.run(_clipped, name, norm_type, False)
    for result in results:
        assert result["norm"] == pytest.approx(result["expected"], rel=1e-4)
        assert result["norm"] == results[0]["norm"] or "two groups" in name
        assert result["after"] == pytest.approx(min(MAX_NORM, result["expected"]), rel=1e-3)


def _overflowed() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DistGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for p in model.parameters():
        p.grad = torch.full_like(p, 4.0)
    if dist.get_rank() == 1:
        model.bias.grad.fill_(math.inf)
    norm = scaler.clip_grad_norm_(optimizer, 0.1)
    kept = model.weight.grad.clone()
    scaler.step(optimizer)
    return {"norm": norm.item(), "kept": kept, "stepped": scaler.stepped(optimizer)}


def test_a_norm_that_is_not_finite_changes_nothing(ranks2: RankPool) -> None:
    for result in ranks2.run(_overflowed):
        assert not math.isfinite(result["norm"])
        assert torch.equal(result["kept"], torch.ones(2, 2))
        assert not result["stepped"]


def _one_process() -> tuple[nn.Linear, torch.optim.Optimizer, DistGradScaler]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DistGradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.randn(4, 3)).pow(2).sum()).backward()
    return model, optimizer, scaler


def test_it_clips_as_torch_does_on_one_process() -> None:
    model, _, scaler = _one_process()
    expected = [p.grad / 8.0 for p in model.parameters() if p.grad is not None]
    copies = [nn.Parameter(torch.zeros_like(g)) for g in expected]
    for copy, gradient in zip(copies, expected, strict=True):
        copy.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(copies, 0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 0.25), norm)
    for p, copy in zip(model.parameters(), copies, strict=True):
        torch.testing.assert_close(p.grad, copy.grad)


def test_parameters_are_unscaled_first_where_the_scaler_knows_their_optimizer() -> None:
    model, optimizer, scaler = _one_process()
    with pytest.raises(StageError, match="Give clip_grad_norm_ the optimizer"):
        scaler.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(4, 3)).pow(2).sum()).backward()
    unscaled = [p.grad / scaler.get_scale() for p in model.parameters() if p.grad is not None]
    norm = scaler.clip_grad_norm_(model.parameters(), 1e9)
    assert norm.item() == pytest.approx(_reference_norm(unscaled, 2.0), rel=1e-5)


def test_clipping_works_with_a_disabled_scaler() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DistGradScaler("cpu", enabled=False)
    model(torch.randn(4, 3)).pow(2).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    norm = scaler.clip_grad_norm_(optimizer, 1e-3)
    assert norm.item() == pytest.approx(_reference_norm(gradients, 2.0), rel=1e-5)
    clipped = [p.grad for p in model.parameters() if p.grad is not None]
    assert _reference_norm(clipped, 2.0) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("bad", [{"max_norm": 0.0}, {"max_norm": -1.0}, {"norm_type": 0.0}])
def test_impossible_arguments_are_refused(bad: dict[str, float]) -> None:
    _, optimizer, scaler = _one_process()
    with pytest.raises(SettingError, match="must be > 0"):
        scaler.clip_grad_norm_(optimizer, **{"max_norm": 1.0, **bad})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_rows_of_a_sparse_gradient_that_come_twice_count_as_their_sum(
    norm_type: float, dtype: torch.dtype
) -> None:
    tokens = torch.tensor([3, 1, 3, 3, 0])
    norms = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(8, 4, sparse=sparse, dtype=dtype)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        scaler = DistGradScaler("cpu", init_scale=8.0, fp16_grads="inplace")
        weights = torch.tensor([[1.0], [2.0], [-3.0], [2.5], [0.5]])
        scaler.scale((table(tokens).float() * weights).sum()).backward()
        norms.append(float(scaler.clip_grad_norm_(optimizer, 0.5, norm_type)))
        scaler.step(optimizer)
        norms += table.weight.detach().flatten().tolist()
    half = len(norms) // 2
    assert norms[:half] == pytest.approx(norms[half:], rel=1e-3)

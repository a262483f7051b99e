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
from distamp.scaler import norms as norms_module
from tests.collectives import count_collectives
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
    with count_collectives() as seen:
        if unscale_first:
            scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, MAX_NORM, norm_type)
    clipped = scaler.clip_grad_norm_(optimizer, 1e30, norm_type)
    return {
        "norm": norm.item(),
        "after": clipped.item(),
        "expected": _reference_norm(gradients, norm_type),
        "messages": seen.count,
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


@pytest.mark.parametrize("name", ["DDP", "FSDP2 x TP"])
def test_the_partial_norms_travel_in_the_message_of_unscale(ranks4: RankPool, name: str) -> None:
    together = ranks4.run(_clipped, name, 2.0, False)
    apart = ranks4.run(_clipped, name, 2.0, True)
    assert [result["messages"] for result in together] == [1] * 4
    assert [result["messages"] for result in apart] == [2] * 4


def _alike_experts(same_gradients: bool) -> tuple[float, float]:
    """Each rank's own expert, all with the same initial values, beside a replicated layer."""
    torch.manual_seed(0)
    shared, expert = nn.Linear(2, 2), nn.Linear(2, 2)
    for p in expert.parameters():
        p._ddp_ignored = True
    optimizer = torch.optim.SGD([*shared.parameters(), *expert.parameters()], lr=0.1)
    scaler = DistGradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    rank = dist.get_rank()
    for p in shared.parameters():
        p.grad = torch.full_like(p, 2.0)
    for p in expert.parameters():
        p.grad = torch.full_like(p, 1.0 + rank)
    norm = scaler.clip_grad_norm_(optimizer, 1e9)
    return norm.item(), math.sqrt(6 * 4 + 6 * sum((1.0 + r) ** 2 for r in range(4)))


def test_experts_that_began_alike_count_each_for_itself(ranks4: RankPool) -> None:
    for norm, expected in ranks4.run(_alike_experts, False):
        assert norm == pytest.approx(expected, rel=1e-6)


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


def _first_clip_meets(value: float, rank: int) -> tuple[list[float], float]:
    """Two iterations over replicas and a part that began alike; the first meets ``value``."""
    torch.manual_seed(0)
    replica = nn.Parameter(torch.randn(6))
    part = nn.Parameter(torch.full((6,), 1.0 + dist.get_rank()))
    optimizer = torch.optim.SGD([replica, part], lr=0.1)
    scaler = DistGradScaler("cpu", init_scale=1.0, growth_interval=1000)
    norms = []
    for bad in (True, False, False):
        scaler.scale(torch.ones(()))
        replica.grad = torch.full((6,), 2.0)
        part.grad = torch.full((6,), 1.0 + dist.get_rank())
        if bad and rank in (dist.get_rank(), EVERY_RANK):
            replica.grad[0] = value
        norms.append(scaler.clip_grad_norm_(optimizer, 1e9).item())
        scaler.update(1.0)
    ranks = dist.get_world_size()
    return norms, math.sqrt(6 * 4 + 6 * sum((1.0 + r) ** 2 for r in range(ranks)))


EVERY_RANK = -1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rank", [0, 1, EVERY_RANK])
def test_a_first_clip_that_meets_inf_leaves_open_what_is_a_replica(
    ranks2: RankPool, value: float, rank: int
) -> None:
    for norms, expected in ranks2.run(_first_clip_meets, value, rank):
        assert not math.isfinite(norms[0])
        # Replicas that were taken for parts would count twice from here on.
        assert norms[1:] == pytest.approx([expected] * 2, rel=1e-6)


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


def _plans_of_ever_others(most: int) -> tuple[int, bool]:
    """Plans that are kept, of others in each step, and whether the norms are right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms_module, "_MOST_PLANNED", most)
        parameters = [nn.Parameter(torch.full((2,), 1.0 + place)) for place in range(9)]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        scaler = DistGradScaler("cpu", init_scale=8.0)
        right = True
        for step in range(20):
            optimizer.zero_grad()
            used = [parameters[step % 9], parameters[(step * 5 + 3) % 9]]
            scaler.scale(torch.stack(used).square().sum()).backward()
            scaler.unscale_(optimizer)
            filled = [p for p in parameters if p.grad is not None]
            gradients = [p.grad for p in filled if p.grad is not None]
            norm = scaler.clip_grad_norm_(filled, 1e6).item()
            right = right and norm == pytest.approx(_reference_norm(gradients, 2.0), rel=1e-5)
            scaler.step(optimizer)
            scaler.update()
        return len(scaler._plans._plans), right


def test_parameters_that_are_others_at_each_call_are_not_all_remembered(ranks2: RankPool) -> None:
    assert ranks2.run(_plans_of_ever_others, 10) == [(6, True)] * 2

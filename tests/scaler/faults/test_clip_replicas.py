"""The norm of the whole model counts each parameter once, whichever ranks hold a copy of it.

What is a copy and what a part is known for each parameter, not for each rank. The references are
square roots that can be taken by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from distamp import DistGradScaler
from tests.ranks import RankPool, mesh
from tests.scaler.faults.tools import error_of

SCALE = 1024.0


def _filled(size: int, gradient: float, value: float = 1.0) -> nn.Parameter:
    """A parameter of these values, whose gradient is of norm ``gradient``, times the scale."""
    parameter = nn.Parameter(torch.full((size,), value))
    parameter.grad = torch.full((size,), SCALE * gradient / math.sqrt(size))
    return parameter


def _clip(
    parameters: Sequence[Tensor],
    *,
    by_parameters: bool = False,
    two: bool = False,
    max_norm: float = 1.0,
    norm_type: float = 2.0,
    **declared: Callable[[Tensor], bool],
) -> tuple[float, float]:
    """The norm, and that of this rank's own gradients afterwards."""
    scaler = DistGradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    cut = len(parameters) // 2 if two else len(parameters)
    parts = [part for part in (parameters[:cut], parameters[cut:]) if part]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    if by_parameters:
        scaler.unscale_(*optimizers)
    given: Any = list(parameters) if by_parameters else optimizers[0]
    norm = scaler.clip_grad_norm_(given, max_norm, norm_type, **declared)
    left = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
    return norm.item(), left.item()


def _is_bias(parameter: Tensor) -> bool:
    return parameter.numel() == 4


def _is_part(parameter: Tensor) -> bool:
    return parameter.numel() == 8


def _last_bit_differs(**declared: Any) -> Any:
    """A replica whose gradient a kernel summed in another order on rank 1."""
    replica = _filled(4, 3.0)
    assert replica.grad is not None
    if dist.get_rank() == 1:
        replica.grad = torch.nextafter(replica.grad, torch.tensor(math.inf))
    return _clip([replica, _filled(8, 1.0 + dist.get_rank(), value=2.0)], **declared)[0]


def _last_bit_differs_declared() -> Any:
    return _last_bit_differs(replicated=_is_bias, sharded=_is_part)


def test_a_declared_replica_counts_once_though_its_last_bits_differ(ranks2: RankPool) -> None:
    once = math.sqrt(9 + 1 + 4)
    assert ranks2.run(_last_bit_differs_declared) == pytest.approx([once] * 2, rel=1e-5)


def bool_of(value: bool) -> Callable[[Tensor], bool]:
    return lambda _: value


def _marked_by_megatron(name: str, on: Sequence[int]) -> Any:
    parameter = _filled(4, 3.0)
    assert parameter.grad is not None
    if name == "shared" and dist.get_rank() == 1:
        parameter.grad = torch.nextafter(parameter.grad, torch.tensor(math.inf))
    if dist.get_rank() in on:
        setattr(parameter, name, True)
    other = _filled(8, 1.0 + dist.get_rank(), value=2.0)
    sharded = _is_part if name == "tensor_model_parallel" else bool_of(True)
    return _clip([parameter, other], sharded=sharded)[0]


def test_megatrons_marks_are_read(ranks2: RankPool) -> None:
    once, twice = math.sqrt(9 + 1 + 4), math.sqrt(9 + 9 + 1 + 4)
    part = ranks2.run(_marked_by_megatron, "tensor_model_parallel", [0, 1])
    assert part == pytest.approx([twice] * 2, rel=1e-6)
    # On all stages but one the tied embedding is marked as a copy of another stage's.
    copy = ranks2.run(_marked_by_megatron, "shared", [1])
    assert copy == pytest.approx([once] * 2, rel=1e-5)


def _both_declared() -> Any:
    parameter = _filled(4, 3.0)
    return error_of(
        _clip, [parameter], replicated=lambda p: True, sharded=lambda p: dist.get_rank() == 1
    )


def test_a_tensor_declared_both_is_refused_on_every_rank(pair: RankPool) -> None:
    for error in pair.run(_both_declared):
        assert error is not None
        assert error[0] == "SettingError"
        assert "replicated" in error[1]


def _predicate_fails() -> Any:
    def sharded(parameter: Tensor) -> bool:
        if dist.get_rank() == 1:
            raise KeyError("no such layer")
        return True

    return error_of(_clip, [_filled(4, 3.0)], sharded=sharded)


def test_a_predicate_that_raises_on_one_rank_stops_every_rank(pair: RankPool) -> None:
    for error in pair.run(_predicate_fails):
        assert error is not None
        assert "no such layer" in error[1]


def _alone(**declared: Any) -> Any:
    return _clip([_filled(4, 3.0), _filled(9, 4.0)], **declared)[0]


def test_declarations_change_nothing_where_there_is_one_rank() -> None:
    assert _alone(sharded=lambda p: True) == pytest.approx(5.0)
    assert _alone(replicated=lambda p: True) == pytest.approx(5.0)


def _no_gradient_on_one() -> Any:
    """A part that got no gradient on rank 1, as where an expert had no tokens."""
    expert, part = _filled(4, 3.0), _filled(8, 4.0, value=5.0 + dist.get_rank())
    if dist.get_rank() == 1:
        expert.grad = None
    return _clip([expert, part], sharded=lambda p: True)[0]


def test_a_missing_gradient_is_a_zero(ranks2: RankPool) -> None:
    expected = math.sqrt(9 + 16 + 16)
    assert ranks2.run(_no_gradient_on_one) == pytest.approx([expected] * 2, rel=1e-6)


def _hybrid_shards(declare: bool) -> Any:
    """FSDP1's HYBRID_SHARD on two groups of two; the gradient of all 40 elements is 0.5."""
    grid = mesh((2, 2), ("replicate", "shard"))
    model = FullyShardedDataParallel(
        nn.Linear(8, 5, bias=False),
        device_mesh=grid,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = DistGradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(torch.full((1, 8), 0.5)).sum()).backward()
    declared: dict[str, Any] = {"sharded": lambda p: grid["shard"]} if declare else {}
    norm = scaler.clip_grad_norm_(optimizer, 1.0, **declared)
    left = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return norm.item(), left.double().square().sum().item()


def test_the_copies_of_hybrid_shards_are_counted_once(ranks4: RankPool) -> None:
    found = ranks4.run(_hybrid_shards, True)
    assert [norm for norm, _ in found] == pytest.approx([math.sqrt(10.0)] * 4, rel=1e-6)
    # Each group of two holds the model once, clipped to 1.
    assert sum(left for _, left in found) == pytest.approx(2.0, rel=1e-4)


def _undeclared_hybrid_shards() -> Any:
    return error_of(_hybrid_shards, False)


def test_hybrid_shards_are_refused_until_they_are_declared(four: RankPool) -> None:
    for error in four.run(_undeclared_hybrid_shards):
        assert error is not None
        assert error[0] == "GradientError"
        assert "sharded=" in error[1]

"""distamp.clip_grad_norm_: torch's function, and the norm of the whole model without a scaler."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from distamp import clip_grad_norm_
from distamp.errors import SettingError
from tests.ranks import mesh
from tests.scaler.steps import INF, NAN, backward, cpu_scaler, error_of, leaf

TYPES = (2.0, 1.0, 3.0, math.inf)


def with_gradients(*gradients: list[float], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters of the gradients' sizes."""
    parameters: list[Tensor] = [leaf(*[1.0] * len(each), dtype=dtype) for each in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient, dtype=dtype)
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("norm_type", [*TYPES, "inf"])
def test_in_one_process_it_is_torchs(norm_type, dtype):
    for max_norm in (0.0, 0.5, 1e3):
        ends = []
        for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
            parameters = with_gradients([3.0, -4.0], [0.5], dtype=dtype)
            frozen = leaf(1.0)
            norm = clip([*parameters, frozen], max_norm, norm_type, foreach=True)
            ends.append([norm.float(), *(p.grad for p in parameters)])
        # torch takes the norm of bfloat16 norms in bfloat16, and 3 of 4 digits of it are wrong.
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(ends[0], ends[1], rtol=tolerance, atol=0)


def test_what_is_below_the_limit_is_not_written_to():
    parameters = with_gradients([3.0, 4.0])
    version = parameters[0].grad._version
    assert clip_grad_norm_(parameters, 5.1).item() == 5.0
    assert parameters[0].grad._version == version


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_norm_that_is_not_finite_changes_nothing_and_raises_as_torchs_does(value):
    parameters = with_gradients([value, 1.0])
    assert not clip_grad_norm_(parameters, 1.0).isfinite()
    with pytest.raises(RuntimeError, match=r"The total norm of order 2\.0 .* is non-finite"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert parameters[0].grad[1] == 1.0


def test_an_optimizer_that_steps_a_part_by_another_is_measured_whole():
    """As Muon with an AdamW inside, which is no share of a wrapper like ZeRO."""

    class Hybrid(torch.optim.SGD):
        def __init__(self, whole: list[Tensor], part: list[Tensor]) -> None:
            super().__init__(whole, lr=1.0)
            self.optimizer = torch.optim.AdamW(part)

    parameters = with_gradients([3.0], [4.0])
    assert clip_grad_norm_(Hybrid(parameters, parameters[1:]), 100.0).item() == 5.0
    scaler = cpu_scaler(4.0)
    scaler.scale(torch.ones(()))
    optimizer = Hybrid(parameters, parameters[1:])
    assert scaler.clip_grad_norm_(optimizer, 100.0).item() == 1.25


# -- several ranks ---------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def _whole(x: Tensor) -> list[float]:
    """Of each type the norm in float64."""
    model = _model().double()
    model(x.double()).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads if g is not None])
    return [torch.linalg.vector_norm(flat, each).item() for each in TYPES]


def _fsdp2() -> Any:
    model = fully_shard(_model(), mesh=mesh((dist.get_world_size(),), ("dp",)))
    return model, model.parameters()


def _ddp() -> Any:
    model = DistributedDataParallel(_model())
    return model, model.parameters()


def _zero() -> Any:
    model = DistributedDataParallel(_model())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)


def _sequence_parallel() -> Any:
    """The gradient of the norm is a summand on each rank, as torch leaves it."""
    model = parallelize_module(
        _model(),
        mesh((dist.get_world_size(),), ("tp",)),
        {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Replicate()),
        },
    )
    return model, model.parameters()


LAYOUTS = {"DDP": _ddp, "FSDP2": _fsdp2, "ZeRO": _zero, "sequence parallel": _sequence_parallel}


def _given(x: Tensor, name: str) -> Tensor:
    """What a rank gives its model: with sequence parallel, its part of the sequence."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()] if "parallel" in name else x


def _norms(name: str) -> Any:
    torch.manual_seed(1)
    x = torch.randn(2, 4, 6)
    model, given = LAYOUTS[name]()
    model(_given(x, name)).square().sum().backward()
    again = (lambda: given) if name == "ZeRO" else model.parameters
    found = [clip_grad_norm_(again(), 1e9, each).item() for each in TYPES]
    clip_grad_norm_(again(), found[0] / 2)
    return [*found, 2 * clip_grad_norm_(again(), 1e9).item()], [*(exact := _whole(x)), exact[0]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norm_is_that_of_the_whole_model(ranks2, name):
    for found, exact in ranks2.run(_norms, name):
        assert found == pytest.approx(exact, rel=1e-5)


def _sequence_parallel_steps() -> Any:
    """Weights after a clipped step, by the scaler; and of the whole model, by torch's."""
    torch.manual_seed(1)
    x = torch.randn(2, 4, 6)
    model, _ = _sequence_parallel()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), cpu_scaler()
    scaler.scale(model(_given(x, "sequence parallel")).square().sum()).backward()
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    whole = _model()
    whole(x).square().sum().backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    ours = [p.full_tensor() for p in model.parameters()]
    return [each.tolist() for each in ours], [p.tolist() for p in whole.parameters()]


def test_gradients_that_are_summands_are_unscaled_clipped_and_stepped(ranks2):
    for ours, whole in ranks2.run(_sequence_parallel_steps):
        for mine, exact in zip(ours, whole, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(exact))


def _mistakes(kind: str) -> Any:
    rank = dist.get_rank()
    parameters = with_gradients([3.0 + 2.0 * rank])
    if kind == "differing":
        return error_of(clip_grad_norm_, parameters, 1.0)
    if kind == "declared":
        return clip_grad_norm_(parameters, 1e3, sharded=lambda p: True).item()
    if kind == "not finite":
        parameters[0].grad = torch.tensor([INF if rank else 1.0])
        return error_of(clip_grad_norm_, parameters, 1.0, error_if_nonfinite=True)
    return error_of(clip_grad_norm_, parameters, -1.0 if rank else 1.0)


def test_what_differs_between_ranks_is_raised_on_all(ranks2):
    for name, text in ranks2.run(_mistakes, "differing"):
        assert (name, "sharded=" in text) == ("GradientError", True)
    assert ranks2.run(_mistakes, "declared") == [pytest.approx(math.sqrt(34.0))] * 2
    (_, said), (name, text) = ranks2.run(_mistakes, "a rank's mistake")
    assert "rank 1" in said
    assert (name, "max_norm must be >= 0" in text) == (SettingError.__name__, True)
    for name, text in ranks2.run(_mistakes, "not finite"):
        assert (name, "non-finite" in text) == ("RuntimeError", True)


def _on_a_group_of_one() -> float:
    groups = [dist.new_group([rank]) for rank in range(2)]
    parameters = with_gradients([3.0 + dist.get_rank()])
    return clip_grad_norm_(parameters, 1e3, process_group=groups[dist.get_rank()]).item()


def test_the_norm_is_over_the_group_that_is_given(ranks2):
    assert ranks2.run(_on_a_group_of_one) == [3.0, 4.0]


def test_a_frozen_parameter_of_no_optimizer_is_passed_over_by_the_scaler():
    parameter, frozen = leaf(3.0, 4.0), leaf(1.0).requires_grad_(False)
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), cpu_scaler()
    backward(scaler, parameter, [3.0, 4.0])
    scaler.add_optimizer(optimizer)
    assert scaler.clip_grad_norm_(copy.copy([frozen, parameter]), 1e3).item() == 5.0

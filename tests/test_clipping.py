"""distamp.clip_grad_norm_, and what it does otherwise than a scaler's.

Both are compared with torch's and with float64, in every layout, in `tests.scaler.test_clip`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from distamp import clip_grad_norm_
from distamp.scaler import MasterParameters
from tests.on_ranks import on_ranks
from tests.ranks import mesh
from tests.report.setups import Net, parallel
from tests.scaler.steps import INF, backward, cpu_scaler, error_of, leaf


def with_gradients(*gradients: list[float]) -> list[Tensor]:
    """Parameters of the gradients' sizes."""
    parameters: list[Tensor] = [leaf(*[1.0] * len(each)) for each in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def test_what_is_below_the_limit_is_not_written_to():
    parameters = with_gradients([3.0, 4.0])
    version = parameters[0].grad._version
    assert clip_grad_norm_(parameters, 5.1).item() == 5.0
    assert parameters[0].grad._version == version


def test_many_biases_beside_a_matrix_are_measured_as_if_they_were_one():
    values = [[float(n % 7)] * (n % 70 + 1) for n in range(200)]
    *biases, matrix = with_gradients(*values, [2.0] * 6)
    matrix.data, matrix.grad = torch.ones(3, 2), matrix.grad.view(3, 2)
    for half in biases[::2]:
        half.data, half.grad = half.data.half(), half.grad.half()
    squares = sum(len(each) * each[0] ** 2 for each in values) + 24.0
    assert clip_grad_norm_([*biases, matrix], 1e3).item() == pytest.approx(squares**0.5, rel=1e-6)


def test_a_gradient_without_elements_has_no_part_in_the_largest_magnitude():
    """torch refuses the norm of order inf for an empty shard."""
    parameters = with_gradients([], [3.0, -4.0])
    assert clip_grad_norm_(parameters, 1e9, INF).item() == 4.0


def test_an_optimizer_that_steps_a_part_by_another_is_measured_whole():
    """As Muon with an AdamW inside, which is no share of a wrapper like ZeRO."""

    class Hybrid(torch.optim.SGD):
        def __init__(self, whole: list[Tensor], part: list[Tensor]) -> None:
            super().__init__(whole, lr=1.0)
            self.optimizer = torch.optim.AdamW(part)

    parameters = with_gradients([3.0], [4.0])
    optimizer, scaler = Hybrid(parameters, parameters[1:]), cpu_scaler(4.0)
    assert clip_grad_norm_(optimizer, 100.0).item() == 5.0
    scaler.scale(torch.ones(()))
    assert scaler.clip_grad_norm_(optimizer, 100.0).item() == 1.25


def test_masters_that_nobody_scales_keep_their_gradients_in_a_second_clip():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    MasterParameters(optimizer)
    weight.grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    norms = [clip_grad_norm_(optimizer, limit).item() for limit in (100.0, 1.0)]
    optimizer.step()
    assert norms == [5.0, 5.0]
    assert torch.equal(weight, torch.tensor([0.7, 0.6]).bfloat16())


def test_a_frozen_parameter_of_no_optimizer_is_passed_over_by_the_scaler():
    parameter, frozen = leaf(3.0, 4.0), leaf(1.0).requires_grad_(False)
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), cpu_scaler()
    backward(scaler, parameter, [3.0, 4.0])
    scaler.register_optimizers(optimizer)
    assert scaler.clip_grad_norm_([frozen, parameter], 1e3).item() == 5.0


# -- several ranks ---------------------------------------------------------------------------------


@on_ranks(2)
def test_gradients_that_are_summands_or_whole_are_measured_clipped_and_stepped_as_the_whole():
    """Of sequence parallel: every rank has a summand of the norm's gradient, as torch leaves it.

    Of the embedding's shard it has the whole gradient.
    """
    net, whole = parallel(Net(attends=False), mesh((2,), ("tp",)), True), Net(attends=False)
    x = torch.arange(16).view(2, 8)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), cpu_scaler()
    scaler.scale(net(x).square().sum()).backward()
    norms = [clip_grad_norm_(net.parameters(), 1e9).item() / 1024.0]
    norms.append(scaler.clip_grad_norm_(optimizer, 0.5).item())
    scaler.step(optimizer)
    whole(x).square().sum().backward()
    norms.append(nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item())
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    assert norms[:2] == pytest.approx([norms[2]] * 2, rel=1e-5)
    ours = [p.full_tensor() for p in net.parameters()]
    torch.testing.assert_close(ours, [*whole.parameters()])


@on_ranks(2)
def test_a_rank_that_steps_all_of_zero_has_a_share_all_the_same():
    """Of one parameter the other rank steps nothing; a group of one rank has replicas."""
    parameters, alone = with_gradients([3.0]), with_gradients([4.0])
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=1.0)
    scaler, groups = cpu_scaler(), [dist.new_group([rank]) for rank in range(2)]
    own = groups[dist.get_rank()]
    replicas = ZeroRedundancyOptimizer(alone, torch.optim.SGD, process_group=own, lr=1.0)
    norms = [clip_grad_norm_(each, 1e9).item() for each in (zero, replicas)]
    assert norms == pytest.approx([3.0, 4.0])
    scaler.scale(torch.ones(()))
    assert scaler.clip_grad_norm_(zero, 1e9).item() == pytest.approx(3.0 / 1024)


# What each rank gives; what every rank raises.
MISTAKES: dict[str, tuple[list[tuple[float, float]], str, str]] = {
    "gradients differ": ([(3.0, 1.0), (5.0, 1.0)], "ReplicaMismatchError", "shard_group_fn="),
    "not finite": ([(1.0, 1.0), (INF, 1.0)], "RuntimeError", "The total norm of order 2.0 "),
    "max_norm": ([(3.0, 1.0), (3.0, -1.0)], "", "max_norm must be >= 0"),
}


def _mistake(name: str) -> Any:
    gradient, max_norm = MISTAKES[name][0][dist.get_rank()]
    parameters = with_gradients([gradient])
    return error_of(clip_grad_norm_, parameters, max_norm, error_if_nonfinite=True)


@pytest.mark.parametrize("name", MISTAKES)
def test_what_one_rank_does_wrong_is_raised_on_all(ranks2, name):
    _, expected, words = MISTAKES[name]
    (first, said), (second, text) = ranks2.run(_mistake, name)
    assert words in text
    if expected:
        assert (first, words in said) == (second, True) == (expected, True)
    else:
        assert (second, "rank 1" in said) == ("ConfigError", True)

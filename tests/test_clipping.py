"""distamp.clip_grad_norm_, and its differences from the method of a scaler.

`tests.scaler.test_clip` compares the function and the method with torch's and with float64, in
every layout.
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
    """Return a parameter of ones for each gradient, with that gradient."""
    parameters: list[Tensor] = []
    for gradient in gradients:
        parameter = leaf(*[1.0] * len(gradient))
        parameter.grad = torch.tensor(gradient)
        parameters.append(parameter)
    return parameters


def test_gradients_below_the_limit_are_not_written_to():
    parameters = with_gradients([3.0, 4.0])
    version = parameters[0].grad._version
    assert clip_grad_norm_(parameters, 5.1).item() == 5.0
    assert parameters[0].grad._version == version


def test_the_norm_covers_many_biases_of_two_dtypes_and_a_matrix():
    """The norm groups small gradients by their dtype, and groups must not change it."""
    parameters = []
    squared_norm = 0.0
    for number in range(200):
        size = number % 70 + 1
        value = float(number % 7)
        (bias,) = with_gradients([value] * size)
        if number % 2 == 0:
            bias.data = bias.data.half()
            bias.grad = bias.grad.half()
        parameters.append(bias)
        squared_norm += size * value**2
    matrix = nn.Parameter(torch.ones(3, 2))
    matrix.grad = torch.full((3, 2), 2.0)
    squared_norm += 6 * 2.0**2
    parameters.append(matrix)
    norm = clip_grad_norm_(parameters, 1e3)
    expected = squared_norm**0.5
    assert norm.item() == pytest.approx(expected, rel=1e-6)


def test_a_gradient_without_elements_does_not_change_the_largest_magnitude():
    """torch refuses the norm of order inf for an empty shard."""
    parameters = with_gradients([], [3.0, -4.0])
    assert clip_grad_norm_(parameters, 1e9, INF).item() == 4.0


def test_the_norm_covers_all_parameters_of_an_optimizer_with_an_optimizer_inside():
    """Muon has an AdamW for some of its parameters, and is no wrapper like ZeRO."""

    class Hybrid(torch.optim.SGD):
        def __init__(self, all_params: list[Tensor], adamw_params: list[Tensor]) -> None:
            super().__init__(all_params, lr=1.0)
            self.optimizer = torch.optim.AdamW(adamw_params)

    parameters = with_gradients([3.0], [4.0])
    optimizer, scaler = Hybrid(parameters, parameters[1:]), cpu_scaler(4.0)
    assert clip_grad_norm_(optimizer, 100.0).item() == 5.0
    scaler.scale(torch.ones(()))
    assert scaler.clip_grad_norm_(optimizer, 100.0).item() == 1.25


def test_a_second_clip_without_a_scaler_keeps_the_gradients_of_masters():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    MasterParameters(optimizer)
    weight.grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    assert clip_grad_norm_(optimizer, 100.0).item() == 5.0
    assert clip_grad_norm_(optimizer, 1.0).item() == 5.0
    optimizer.step()
    assert torch.equal(weight, torch.tensor([0.7, 0.6]).bfloat16())


def test_the_scaler_ignores_a_frozen_parameter_without_an_optimizer():
    parameter, frozen = leaf(3.0, 4.0), leaf(1.0).requires_grad_(False)
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), cpu_scaler()
    backward(scaler, parameter, [3.0, 4.0])
    scaler.register_optimizers(optimizer)
    assert scaler.clip_grad_norm_([frozen, parameter], 1e3).item() == 5.0


# -- several ranks ---------------------------------------------------------------------------------


@on_ranks(2)
def test_a_tensor_parallel_model_has_the_norm_and_the_step_of_one_process():
    """Partial gradients are added up for the norm, and a gradient that is complete is not.

    With sequence parallelism each rank has a partial gradient of the layer norm, as torch leaves
    it. Each rank has the complete gradient of its shard of the embedding.
    """
    sharded_net = parallel(Net(attends=False), mesh((2,), ("tp",)), True)
    reference_net = Net(attends=False)
    x = torch.arange(16).view(2, 8)

    reference_net(x).square().sum().backward()
    reference_norm = nn.utils.clip_grad_norm_(reference_net.parameters(), 0.5).item()
    torch.optim.SGD(reference_net.parameters(), lr=0.1).step()

    optimizer, scaler = torch.optim.SGD(sharded_net.parameters(), lr=0.1), cpu_scaler()
    scaler.scale(sharded_net(x).square().sum()).backward()
    scaled_norm = clip_grad_norm_(sharded_net.parameters(), 1e9).item()
    assert scaled_norm / 1024.0 == pytest.approx(reference_norm, rel=1e-5)
    norm = scaler.clip_grad_norm_(optimizer, 0.5).item()
    assert norm == pytest.approx(reference_norm, rel=1e-5)
    scaler.step(optimizer)
    weights = [param.full_tensor() for param in sharded_net.parameters()]
    torch.testing.assert_close(weights, list(reference_net.parameters()))


@on_ranks(2)
def test_the_norm_of_a_zero_optimizer_is_right_if_one_rank_owns_every_parameter():
    """ZeRO gives the only parameter to one rank, so the other rank owns none."""
    zero = ZeroRedundancyOptimizer(with_gradients([3.0]), torch.optim.SGD, lr=1.0)
    assert clip_grad_norm_(zero, 1e9).item() == pytest.approx(3.0)
    scaler = cpu_scaler()
    scaler.scale(torch.ones(()))
    assert scaler.clip_grad_norm_(zero, 1e9).item() == pytest.approx(3.0 / 1024)


@on_ranks(2)
def test_the_norm_of_a_zero_optimizer_in_a_group_of_one_rank_covers_that_rank():
    """Every rank owns the whole optimizer, so the gradients must not be added over ranks."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    zero = ZeroRedundancyOptimizer(
        with_gradients([4.0]),
        torch.optim.SGD,
        process_group=groups[dist.get_rank()],
        lr=1.0,
    )
    assert clip_grad_norm_(zero, 1e9).item() == pytest.approx(4.0)


def _error_of_a_clip(gradients: list[float], max_norms: list[float]) -> Any:
    """Clip the gradient of this rank; return the name and the message of the error."""
    rank = dist.get_rank()
    parameters = with_gradients([gradients[rank]])
    return error_of(clip_grad_norm_, parameters, max_norms[rank], error_if_nonfinite=True)


def test_replicas_with_different_gradients_raise_on_every_rank(ranks2):
    for name, message in ranks2.run(_error_of_a_clip, [3.0, 5.0], [1.0, 1.0]):
        assert name == "ReplicaMismatchError"
        assert "shard_group_fn=" in message


def test_a_norm_that_is_not_finite_raises_on_every_rank(ranks2):
    for name, message in ranks2.run(_error_of_a_clip, [1.0, INF], [1.0, 1.0]):
        assert name == "RuntimeError"
        assert "The total norm of order 2.0 " in message


def test_a_wrong_max_norm_on_one_rank_raises_on_the_other_rank_too(ranks2):
    errors = ranks2.run(_error_of_a_clip, [3.0, 3.0], [1.0, -1.0])
    (_, first_message), (second_name, second_message) = errors
    assert "rank 1" in first_message
    assert second_name == "ConfigError"
    assert "max_norm must be >= 0" in second_message

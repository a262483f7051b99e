"""Split masters: a bfloat16 weight and 16 bits are an exact float32 master, in half the memory.

That they train, load and are written to as whole ones is in `tests.scaler.test_masters`.
"""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import Tensor, nn

from distamp.errors import CallOrderError
from distamp.masters.split_tensors import join_fp32, split_fp32
from distamp.scaler import MasterParameters
from tests.scaler.masters import half_away, one_master

BF16, F32 = torch.bfloat16, torch.float32


def of_bits(first: int, last: int) -> Tensor:
    """All finite values from one to another."""
    values = torch.arange(first, last, dtype=torch.int64).to(torch.int32).view(F32)
    return values[values.isfinite()]


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    weights, remainders = values.to(BF16), torch.empty_like(values, dtype=torch.int16)
    split_fp32([(values.clone(), weights, remainders)])
    return weights, remainders


def joined(weights: Tensor, remainders: Tensor) -> Tensor:
    values = torch.empty_like(weights, dtype=F32)
    join_fp32([(values, weights, remainders)])
    return values


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    kind = torch.int16 if ours.dtype is BF16 else torch.int32
    return torch.equal(ours.view(kind), theirs.view(kind))


# -- the format ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0x0000, 0x0001, 0x3F80, 0x7F7F, 0x8000, 0xBF80, 0xFF7F])
def test_a_value_comes_back_to_the_bit_and_its_weight_is_rounded_half_away(start):
    """All values of two bfloat16 steps: around zero, among subnormal numbers, at the largest."""
    values = of_bits(start << 16, min((start + 2) << 16, 0xFF800000))
    weights, remainders = halves(values)
    assert same_bits(joined(weights, remainders), values)
    assert same_bits(weights, half_away(values))


@pytest.mark.slow
def test_no_finite_value_is_lost():
    """Rounded to nearest even 32,640 would be: a remainder of 2^15 does not fit in 16 bits."""
    for start in range(0, 2**32, 2**20):
        values = of_bits(start, start + 2**20)
        assert same_bits(joined(*halves(values)), values)


def test_what_is_not_finite_is_nan():
    """Also the NaN of an accelerator, all of whose lower bits are set."""
    bits = torch.tensor([0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00001, 0x7F800001])
    values = bits.to(torch.int32).view(F32)
    weights, remainders = halves(values)
    for found in (weights.float(), joined(weights, remainders)):
        assert found.isnan().all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (131_072,), (300, 500)])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_size_and_layout_is_split_whole(shape, transposed):
    """Large ones in pieces."""
    values = torch.randn(shape)
    values = values.t() if transposed and values.dim() == 2 else values
    weights, remainders = halves(values)
    assert torch.equal(joined(weights, remainders), values)
    assert torch.equal(weights, half_away(values))


# -- states, and weights that something else writes ------------------------------------------------


def test_a_state_of_whole_masters_is_one_of_split_masters_and_the_other_way_round():
    value = torch.tensor([1.0 + 2.0**-20, -3.0 - 2.0**-19])
    for here, there in itertools.permutations([False, True]):
        optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(2).to(BF16))]) for _ in "ab"]
        first = MasterParameters(optimizers[0], split=here)
        second = MasterParameters(optimizers[1], split=there)
        first.load_state_dict({"version": 1, "masters": {0: value}})
        second.load_state_dict(first.state_dict())
        assert torch.equal(second.state_dict()["masters"][0], value)
        assert second.model_params()[0].tolist() == [1.0, -3.0]


def test_the_master_of_a_written_weight_rounds_to_it_also_where_that_is_zero():
    """A remainder below zero has nothing to be taken from."""
    for value in (1.0 - 2.0**-20, 1.0 + 2.0**-20):
        for written in (0.0, -0.0, 3.0, -7.0):
            parameter, optimizer, masters = one_master(1.0, 1.0, split=True)
            masters.load_state_dict({"version": 1, "masters": {0: torch.full((2,), value)}})
            with torch.no_grad():
                parameter.fill_(written)
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            assert parameter.tolist() == [written, written]
            assert half_away(masters.state_dict()["masters"][0]).tolist() == [written, written]


def test_between_steps_a_master_reads_as_nan_and_is_not_written():
    parameter, _, masters = one_master(1.0, 1.0, split=True)
    master = masters.master_of(parameter)
    assert (master.shape, master.dtype) == (parameter.shape, F32)
    assert master.isnan().all()
    with torch.no_grad(), pytest.raises(CallOrderError, match=r"masters\.materialized"):
        master.add_(1.0)
    with torch.no_grad(), masters.materialized():
        assert master.tolist() == [1.0, 1.0]
        master.add_(1.0)
    assert parameter.tolist() == [2.0, 2.0]


# -- memory ----------------------------------------------------------------------------------------


def _alive(elements: int) -> int:
    """Bytes of all tensors that are alive and not small, each storage once, for each element."""
    found = {}
    for each in gc.get_objects():
        # Fake and sparse ones of other tests have no memory of their own.
        dense = type(each) in (Tensor, nn.Parameter) and not each.is_sparse
        if dense or type(each).__name__ == "PlaceholderTensor":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in found.values() if size > 1000) // elements


def test_between_steps_a_master_takes_two_bytes_and_its_gradient_none():
    elements, other = 100_000, _alive(100_000)
    model = nn.Linear(elements, 1, bias=False).to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    masters = MasterParameters(optimizer, split=True)
    within = []
    optimizer.register_step_pre_hook(lambda *_: within.append(_alive(elements) - other))
    for _ in range(2):
        optimizer.zero_grad()
        model.weight.grad = torch.ones_like(model.weight)
        assert _alive(elements) - other == 2 + 2 + 2  # the weight, its remainder, its gradient
        optimizer.step()
        assert _alive(elements) - other == 2 + 2
    assert within == [2 + 2 + 4 + 4] * 2  # and in float32 the value and its gradient
    assert masters.nbytes == 2 * elements

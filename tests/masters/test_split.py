"""Split masters: a bfloat16 weight and 16 bits are an exact float32 master, in half the memory.

That they train, load and are written to as whole ones is in `tests.scaler.test_masters`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from distamp.errors import CallOrderError
from distamp.masters.split_tensors import join_fp32, split_fp32
from distamp.scaler import MasterParameters
from tests.scaler.masters import half_away, one_master

BF16, F32 = torch.bfloat16, torch.float32
# Values that bfloat16 rounds to 1 and to -3.
BELOW_ONE = 1.0 - 2.0**-20
ABOVE_ONE = 1.0 + 2.0**-20
BELOW_MINUS_THREE = -3.0 - 2.0**-19


def values_of_bits(first: int, last: int) -> Tensor:
    """Return all finite values with bits from the first to before the last."""
    values = torch.arange(first, last, dtype=torch.int64).to(torch.int32).view(F32)
    return values[values.isfinite()]


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return bfloat16 weights and 16-bit remainders."""
    weights = values.to(BF16)
    remainders = torch.empty_like(values, dtype=torch.int16)
    split_fp32([(values.clone(), weights, remainders)])
    return weights, remainders


def joined(weights: Tensor, remainders: Tensor) -> Tensor:
    values = torch.empty_like(weights, dtype=F32)
    join_fp32([(values, weights, remainders)])
    return values


def same_bits(tensor: Tensor, expected: Tensor) -> bool:
    integer = torch.int16 if tensor.dtype is BF16 else torch.int32
    return torch.equal(tensor.view(integer), expected.view(integer))


# -- the format ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0x0000, 0x0001, 0x3F80, 0x7F7F, 0x8000, 0xBF80, 0xFF7F])
def test_a_value_comes_back_bit_identical_and_its_weight_is_rounded_half_away(start):
    """All values of two bfloat16 steps: around zero, among subnormal numbers, at the largest."""
    first = start << 16
    last = min(first + (2 << 16), 0xFF800000)
    values = values_of_bits(first, last)
    weights, remainders = halves(values)
    assert same_bits(joined(weights, remainders), values)
    assert same_bits(weights, half_away(values))


@pytest.mark.slow
def test_no_finite_value_is_lost():
    """Rounded to nearest even 32,640 would be: a remainder of 2^15 does not fit in 16 bits."""
    for start in range(0, 2**32, 2**20):
        values = values_of_bits(start, start + 2**20)
        weights, remainders = halves(values)
        assert same_bits(joined(weights, remainders), values)


def test_a_value_that_is_not_finite_becomes_nan():
    """An accelerator makes a NaN with all lower bits set."""
    bits = torch.tensor([0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00001, 0x7F800001])
    values = bits.to(torch.int32).view(F32)
    weights, remainders = halves(values)
    assert weights.isnan().all()
    assert joined(weights, remainders).isnan().all()


def check_split(values: Tensor) -> None:
    weights, remainders = halves(values)
    assert torch.equal(joined(weights, remainders), values)
    assert torch.equal(weights, half_away(values))


@pytest.mark.parametrize("numel", [0, 1, 131_072])
def test_every_size_is_split(numel):
    """Large tensors are split in pieces."""
    check_split(torch.randn(numel))


def test_a_scalar_and_a_matrix_are_split():
    check_split(torch.randn(()))
    check_split(torch.randn(300, 500))


def test_a_transposed_tensor_is_split():
    check_split(torch.randn(300, 500).t())


# -- states, and weights that something else writes ------------------------------------------------


def state_of(values: Tensor) -> dict[str, object]:
    """Return the state of the masters of one parameter."""
    return {"version": 1, "masters": {0: values}}


@pytest.mark.parametrize("split", [False, True])
def test_split_masters_load_a_state_of_whole_ones_and_whole_masters_one_of_split_ones(split):
    values = torch.tensor([ABOVE_ONE, BELOW_MINUS_THREE])
    # Masters hold only a weak reference to their optimizer.
    _, _saving_optimizer, saving = one_master(1.0, 1.0, dtype=BF16, split=split)
    parameter, _loading_optimizer, loading = one_master(1.0, 1.0, dtype=BF16, split=not split)
    saving.load_state_dict(state_of(values))
    loading.load_state_dict(saving.state_dict())
    (loaded,) = loading.state_dict()["masters"].values()
    assert torch.equal(loaded, values)
    assert parameter.tolist() == [1.0, -3.0]


@pytest.mark.parametrize("value", [BELOW_ONE, ABOVE_ONE])
@pytest.mark.parametrize("written", [0.0, -0.0, 3.0, -7.0])
def test_the_master_of_a_written_weight_rounds_to_it_also_if_it_is_zero(written, value):
    """A remainder below zero cannot be subtracted from a weight of zero."""
    parameter, optimizer, masters = one_master(1.0, 1.0, split=True)
    masters.load_state_dict(state_of(torch.full((2,), value)))
    with torch.no_grad():
        parameter.fill_(written)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert parameter.tolist() == [written, written]
    (master,) = masters.state_dict()["masters"].values()
    assert half_away(master).tolist() == [written, written]


def test_between_steps_a_master_reads_as_nan_and_is_not_written():
    parameter, _, masters = one_master(1.0, 1.0, split=True)
    master = masters.master_of(parameter)
    assert master.shape == parameter.shape
    assert master.dtype is F32
    assert master.isnan().all()
    with torch.no_grad(), pytest.raises(CallOrderError, match=r"masters\.materialized"):
        master.add_(1.0)
    with torch.no_grad(), masters.materialized():
        assert master.tolist() == [1.0, 1.0]
        master.add_(1.0)
    assert parameter.tolist() == [2.0, 2.0]


# -- memory ----------------------------------------------------------------------------------------


NUMEL = 100_000


def bytes_per_element() -> int:
    """Return the bytes of all storages that are alive and not small, divided by NUMEL."""
    sizes = {}
    for tensor in gc.get_objects():
        # Fake and sparse tensors of other tests have no memory.
        is_dense = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_sparse
        if is_dense or type(tensor).__name__ == "PlaceholderTensor":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in sizes.values() if size > 1000) // NUMEL


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Keep the objects of other tests out of `gc.get_objects`."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen_heap")
def test_between_steps_a_master_takes_two_bytes_and_its_gradient_none():
    model = nn.Linear(NUMEL, 1, bias=False).to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    masters = MasterParameters(optimizer, split=True)
    weight = remainder = grad = 2
    master = master_grad = 4
    in_steps = []

    def measure(*_: object) -> None:
        in_steps.append(bytes_per_element())

    optimizer.register_step_pre_hook(measure)
    for _ in range(2):
        optimizer.zero_grad()
        model.weight.grad = torch.ones_like(model.weight)
        assert bytes_per_element() == weight + remainder + grad
        optimizer.step()
        assert bytes_per_element() == weight + remainder
    assert in_steps == [weight + remainder + master + master_grad] * 2
    assert masters.nbytes == remainder * NUMEL

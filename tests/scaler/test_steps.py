"""Steps in one process: one inf or NaN skips the whole step, and the scaler reports it.

`test_oracle` compares steps with torch's, bit for bit. The cells of `test_invariant` and the
programs of `test_random_programs` compare steps on ranks with float64.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp.errors import CallOrderError
from distamp.scaler import StepCounts
from tests.scaler.steps import INF, NAN, backward, cpu_scaler, leaf, sgd, torch_scaler

# -- steps without gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    "parameters", [[leaf(1.0)], [{"params": []}]], ids=["no gradient", "empty"]
)
def test_a_step_without_any_gradient_raises_as_torchs_does(parameters, max_norm):
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = cpu_scaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(CallOrderError, match=r"No inf checks were recorded for this optimizer\."):
        scaler.step(optimizer, max_norm=max_norm)
    with pytest.raises(CallOrderError, match=r"No inf checks were recorded prior to update\."):
        scaler.update()


# -- sparse gradients ------------------------------------------------------------------------------

FINITE_ROWS = [[256.0, 512.0], [128.0, 0.0]]
# Both rows fit into float16, and their sum does not, because 40000 + 40000 > 65504.
LARGE_ROWS = [[40000.0, 40000.0], [40000.0, 40000.0]]
INFINITE_ROWS = [[INF, 1.0], [1.0, 1.0]]
ROWS = pytest.mark.parametrize(
    "rows",
    [FINITE_ROWS, LARGE_ROWS, INFINITE_ROWS],
    ids=["fits", "sum overflows float16", "inf"],
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
INDICES = pytest.mark.parametrize("indices", [[0, 2], [2, 2]], ids=["two rows", "one row twice"])


class SparseStep:
    """A table of ones with a sparse gradient, and the same gradient as a dense tensor.

    Attributes:
        finite: Whether the sum of the rows is finite in `dtype`.
        gradient: The dense gradient, divided by the loss scale.
    """

    def __init__(self, rows: list[list[float]], indices: list[int], dtype: torch.dtype) -> None:
        self.table = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        self.optimizer = torch.optim.SGD([self.table], lr=1.0)
        self.scaler = cpu_scaler(1024.0, fp16_grads="inplace")
        self.scaler.scale(torch.ones(()))

        values = torch.tensor(rows, dtype=dtype)
        self.table.grad = torch.sparse_coo_tensor([indices], values, (3, 2), check_invariants=True)

        dense = torch.zeros(3, 2)
        dense.index_add_(0, torch.tensor(indices), values.float())
        dense = dense.to(dtype)
        self.finite = bool(dense.isfinite().all())
        self.gradient = dense.float() / 1024.0

    def check(self, gradient: Tensor) -> None:
        """Check that the step subtracted this gradient, or was skipped where it is not finite."""
        assert self.scaler.step_was_taken(self.optimizer) == self.finite
        expected = torch.ones(3, 2)
        if self.finite:
            expected = expected - gradient
        table = self.table.detach().float()
        torch.testing.assert_close(table, expected, rtol=1e-3, atol=0)


def clip(gradient: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Return a clipped copy of a dense gradient."""
    norm = torch.linalg.vector_norm(gradient, norm_type)
    factor = max_norm / (norm + 1e-6)
    return gradient * factor.clamp(max=1.0)


@ROWS
@DTYPES
@INDICES
def test_a_step_by_a_sparse_gradient_is_that_by_a_dense_one(rows, dtype, indices):
    sparse = SparseStep(rows, indices, dtype)
    sparse.scaler.step(sparse.optimizer)
    sparse.check(sparse.gradient)


@ROWS
@DTYPES
@INDICES
def test_unscale_of_a_sparse_gradient_is_that_of_a_dense_one(rows, dtype, indices):
    sparse = SparseStep(rows, indices, dtype)
    sparse.scaler.unscale_(sparse.optimizer)
    sparse.scaler.step(sparse.optimizer)
    sparse.check(sparse.gradient)


@ROWS
@DTYPES
@INDICES
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
def test_a_clip_of_a_sparse_gradient_is_that_of_a_dense_one(rows, dtype, indices, norm_type):
    sparse = SparseStep(rows, indices, dtype)
    norm = sparse.scaler.clip_grad_norm_(sparse.optimizer, 0.25, norm_type)
    if sparse.finite:
        exact = torch.linalg.vector_norm(sparse.gradient, norm_type)
        assert norm.item() == pytest.approx(exact.item(), rel=1e-3)
    sparse.scaler.step(sparse.optimizer)
    sparse.check(clip(sparse.gradient, 0.25, norm_type))


@ROWS
@DTYPES
@INDICES
def test_three_clips_of_a_sparse_gradient_are_those_of_a_dense_one(rows, dtype, indices):
    sparse = SparseStep(rows, indices, dtype)
    gradient = sparse.gradient
    for norm_type in (2.0, 1.0, INF):
        sparse.scaler.clip_grad_norm_(sparse.optimizer, 0.25, norm_type)
        gradient = clip(gradient, 0.25, norm_type)
    sparse.scaler.step(sparse.optimizer)
    sparse.check(gradient)


@ROWS
@DTYPES
@INDICES
def test_a_step_by_norm_of_a_sparse_gradient_is_that_of_a_dense_one(rows, dtype, indices):
    sparse = SparseStep(rows, indices, dtype)
    sparse.scaler.step(sparse.optimizer, max_norm=0.25)
    sparse.check(clip(sparse.gradient, 0.25, 2.0))


# -- float16 gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("make_scaler", [torch_scaler, cpu_scaler])
def test_float16_gradients_are_refused_and_unchanged_as_by_torch(make_scaler, call):
    scaler = make_scaler()
    parameter = leaf(1.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    backward(scaler, parameter, 0.25)
    method = getattr(scaler, call)
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients"):
        method(optimizer)
    assert parameter.item() == 1.0
    assert parameter.grad.item() == 256.0


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("setting", ["fp16_grads='master'", "fp16_grads='inplace'"])
def test_the_refusal_of_float16_gradients_names_the_settings_that_take_them(setting, call):
    scaler = cpu_scaler()
    parameter = leaf(1.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    backward(scaler, parameter, 0.25)
    method = getattr(scaler, call)
    with pytest.raises(ValueError, match=setting):
        method(optimizer)


# -- arguments and results of a step ---------------------------------------------------------------


class ReturningSGD(torch.optim.SGD):
    """An optimizer with an argument of ``step`` that it returns."""

    def step(self, closure: Any = None, *, returned: float = 1.0) -> Any:
        super().step()
        return returned


def test_a_step_passes_arguments_on_and_returns_the_result_of_the_optimizer():
    scaler = cpu_scaler()
    parameter = leaf(1.0)
    backward(scaler, parameter, 0.25)
    assert scaler.step(ReturningSGD([parameter], lr=1.0), returned=3.0) == 3.0


def test_step_all_returns_the_results_of_the_optimizers_and_none_for_a_skipped_step():
    scaler = cpu_scaler()
    parameters = [leaf(1.0), leaf(1.0)]
    backward(scaler, parameters[0], INF)
    backward(scaler, parameters[1], 0.25)
    optimizers = [ReturningSGD([parameter], lr=1.0) for parameter in parameters]
    assert scaler.step_all(iter(optimizers)) == [None, 1.0]


# -- questions about a step ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step_was_taken", "found_inf", "step_counts"])
def test_questions_about_an_unknown_optimizer_raise(name):
    _, optimizer = sgd()
    question = getattr(cpu_scaler(), name)
    with pytest.raises(CallOrderError, match=rf"{name}\(\) was called before"):
        question(optimizer)


def test_the_counts_of_a_registered_optimizer_begin_at_zero():
    _, optimizer = sgd()
    scaler = cpu_scaler()
    scaler.register_optimizers(optimizer)
    assert scaler.step_counts(optimizer) == StepCounts(taken=0, skipped=0)


def test_the_scaler_reports_each_step_as_taken_or_skipped():
    parameter, optimizer = sgd()
    scaler = cpu_scaler()
    for gradient, flag in ((0.0, 0.0), (INF, 1.0), (0.0, 0.0), (NAN, 1.0)):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        scaler.unscale_(optimizer)
        assert scaler.found_inf(optimizer).item() == flag
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_taken(optimizer) is (flag == 0.0)
        assert scaler.found_inf(optimizer).item() == flag, "the flag is readable after update()"
    assert scaler.step_counts(optimizer) == StepCounts(taken=2, skipped=2)


def test_the_flag_of_an_overflow_is_a_float32_scalar_as_torchs():
    parameter, optimizer = sgd()
    scaler = cpu_scaler()
    backward(scaler, parameter, 0.0)
    scaler.unscale_(optimizer)
    flag = scaler.found_inf(optimizer)
    assert flag.shape == ()
    assert flag.dtype == torch.float32

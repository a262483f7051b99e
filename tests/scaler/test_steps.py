"""A step: taken whole or skipped whole by one bad value, and what is told of it.

In one process; `test_oracle` compares steps with torch's to the bit, and the cells of
`test_invariant` and `test_random_programs` with float64.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp.errors import StageError
from distamp.scaler import StepCounts
from tests.scaler.steps import (
    INF,
    NAN,
    backward,
    cpu_scaler,
    error_of,
    iteration,
    leaf,
    sgd,
    torch_scaler,
)

FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


# -- what overflows, and what does not -------------------------------------------------------------


@FUSED
def test_one_bad_element_of_any_gradient_skips_the_whole_step(fused):
    dtypes = [torch.float32] * 3 if fused else [torch.float32, torch.float64, torch.bfloat16]
    for bad, where in itertools.product((None, INF, -INF, NAN), range(3)):
        parameters = [leaf(*[1.0] * (3 - i), dtype=dtype) for i, dtype in enumerate(dtypes)]
        optimizer = torch.optim.SGD(parameters, lr=1.0, fused=fused)
        scaler = cpu_scaler()
        for parameter in parameters:
            backward(scaler, parameter, 0.25)
        if bad is not None:
            parameters[where].grad[-1] = bad
        scaler.step(optimizer)
        expected = 0.75 if bad is None else 1.0
        assert all((p == expected).all() for p in parameters), (bad, where)


@FUSED
def test_what_is_finite_empty_or_absent_is_no_overflow(fused):
    class Tagged(Tensor):
        pass

    empty, absent = nn.Parameter(torch.empty(0)), leaf(1.0)
    empty.grad = torch.empty(0)
    tagged = nn.Parameter(torch.ones(1).as_subclass(Tagged))
    for scale, others in ((2.0**100, []), (2.0, [empty, absent]), (2.0, [] if fused else [tagged])):
        parameter = leaf(1.0)
        optimizer = torch.optim.SGD([parameter, *others], lr=1.0, fused=fused)
        scaler = cpu_scaler(scale)
        for each in [parameter, *(p for p in others if p is tagged)]:
            backward(scaler, each, 0.25)
        scaler.step(optimizer)
        assert (parameter.item(), absent.item()) == (0.75, 1.0), (scale, others)
    assert fused or tagged.item() == 0.75


def test_an_optimizer_without_any_gradient_takes_a_clean_step_where_torch_asserts():
    for parameters in ([leaf(1.0)], [{"params": []}]):
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = cpu_scaler(growth_interval=1)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), scaler.stepped(optimizer)) == (2048.0, True)


ROWS = {
    "fits": [[256.0, 512.0], [128.0, 0.0]],
    "sum overflows float16": [[40000.0, 40000.0]] * 2,
    "inf": [[INF, 1.0], [1.0, 1.0]],
}


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize("values", ROWS)
def test_sparse_gradients_are_as_dense_ones(values, unscale):
    """Of rows that come twice the sum counts, in float16 too: 40000 + 40000 > 65504."""
    for dtype, indices in itertools.product((torch.float32, torch.float16), ([0, 2], [2, 2])):
        table = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        optimizer = torch.optim.SGD([table], lr=1.0)
        scaler = cpu_scaler(fp16_grads="inplace")
        scaler.scale(torch.ones(()))
        rows = torch.tensor(ROWS[values], dtype=dtype)
        table.grad = torch.sparse_coo_tensor([indices], rows, (3, 2), check_invariants=True)
        dense = torch.zeros(3, 2).index_add(0, torch.tensor(indices), rows.float()).to(dtype)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        finite = bool(dense.isfinite().all())
        assert scaler.stepped(optimizer) == finite, (dtype, indices)
        expected = 1.0 - dense.float() / 1024.0 if finite else torch.ones(3, 2)
        torch.testing.assert_close(table.detach().float(), expected, rtol=1e-3, atol=0)


# -- float16 and bfloat16 --------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_float16_gradients_are_refused_where_torch_refuses_them_and_stay_as_they_were(call):
    for scaler in (torch_scaler(), cpu_scaler()):
        wide, narrow = leaf(1.0), leaf(1.0, dtype=torch.float16)
        optimizer = torch.optim.SGD([wide, narrow], lr=1.0)
        for parameter in (wide, narrow):
            backward(scaler, parameter, 0.25)
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients") as refused:
            getattr(scaler, call)(optimizer)
        assert (wide.item(), narrow.item()) == (1.0, 1.0)
    assert (wide.grad.item(), narrow.grad.item()) == (256.0, 256.0)
    assert all(f"fp16_grads='{way}'" in str(refused.value) for way in ("master", "inplace"))


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_half_precision_are_unscaled_in_place(dtype, how):
    if how.get("fused") and dtype is torch.float16:
        pytest.skip("torch's own fused kernel on a CPU")
    parameter = leaf(1.0, 1.0, dtype=dtype)
    optimizer = torch.optim.SGD([parameter], lr=1.0, **how)
    scaler = cpu_scaler(fp16_grads="inplace" if dtype is torch.float16 else "error")
    iteration(scaler, optimizer, parameter, 0.25, unscale=True)
    assert parameter.grad.tolist() == [0.25, 0.25]
    iteration(scaler, optimizer, parameter, 0.25)
    iteration(scaler, optimizer, parameter, [0.25, 3e38])
    assert (parameter.tolist(), scaler.get_scale()) == ([0.5, 0.5], 512.0)


# -- several optimizers ----------------------------------------------------------------------------


class Returns(torch.optim.SGD):
    """``step`` takes an argument, and returns it."""

    def step(self, closure: Any = None, *, given: float = 1.0) -> Any:
        super().step()
        return given


@pytest.mark.parametrize("call", ["one by one", "step_all", "unscale_ of all", "unscale_ of one"])
def test_each_optimizer_goes_by_its_own_overflow_and_the_scale_moves_once(call):
    scaler, parameters = cpu_scaler(), [leaf(1.0), leaf(1.0), leaf(1.0)]
    optimizers = [Returns([p], lr=1.0) for p in parameters]
    for parameter, gradient in zip(parameters, (0.25, INF, INF), strict=True):
        backward(scaler, parameter, gradient)
    if call.startswith("unscale_"):
        scaler.unscale_(*optimizers[: 3 if call.endswith("all") else 1])
    if call in ("step_all", "unscale_ of one"):
        assert scaler.step_all(iter(optimizers)) == [1.0, None, None]
    else:
        assert [scaler.step(o, given=3.0) for o in optimizers] == [3.0, None, None]
    scaler.update()
    assert [p.item() for p in parameters] == [0.75, 1.0, 1.0]
    assert [scaler.stepped(o) for o in optimizers] == [True, False, False]
    assert [scaler.step_counts(o).skipped for o in optimizers] == [0, 1, 1]
    assert scaler.get_scale() == 512.0


def test_step_all_refuses_what_step_refuses_and_steps_none():
    scaler, (first, one), (second, other) = cpu_scaler(), sgd(), sgd()
    for parameter in (first, second):
        backward(scaler, parameter, 0.25)
    assert "given twice" in error_of(scaler.step_all, [one, one])[1]
    assert "given twice" in error_of(scaler.unscale_, one, one)[1]
    scaler.step(other)
    assert "step() has already been called" in error_of(scaler.step_all, [one, other])[1]
    assert (first.item(), second.item()) == (1.0, 0.75)


# -- what can be asked -----------------------------------------------------------------------------


def test_what_is_told_of_each_iteration():
    (parameter, optimizer), scaler, told = sgd(), cpu_scaler(), []
    scaler.add_optimizer(optimizer)
    assert scaler.step_counts(optimizer) == StepCounts(taken=0, skipped=0)
    for gradient in (0.0, INF, 0.0, NAN):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        before = scaler.is_unscaled(optimizer)
        scaler.unscale_(optimizer)
        flag, between = scaler.found_inf(optimizer), scaler.is_unscaled(optimizer)
        assert (flag.shape, flag.dtype) == ((), torch.float32)
        scaler.step(optimizer)
        assert (before, between, scaler.is_unscaled(optimizer)) == (False, True, False)
        scaler.update()
        told.append((scaler.stepped(optimizer), flag.item(), scaler.found_inf(optimizer).item()))
    assert told == [(True, 0.0, 0.0), (False, 1.0, 1.0)] * 2
    assert scaler.step_counts(optimizer) == StepCounts(taken=2, skipped=2)


def test_questions_before_their_time_are_named():
    scaler, (parameter, optimizer), (_, never) = cpu_scaler(), sgd(), sgd()
    questions = (scaler.stepped, scaler.found_inf, scaler.step_counts)
    backward(scaler, parameter, 0.25)
    for asked in (optimizer, never):
        for question in questions:
            with pytest.raises(StageError, match=rf"{question.__name__}\(\) was called before"):
                question(asked)
        if asked is optimizer:
            scaler.unscale_(optimizer)
            with pytest.raises(StageError, match=r"stepped\(\) was called before step\(\)"):
                scaler.stepped(optimizer)
            scaler.step(optimizer)
    assert not scaler.is_unscaled(never)
    with pytest.raises(TypeError):
        scaler.add_optimizer([never])


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_a_closure_is_refused_before_anything_changes(unscale):
    scaler, (parameter, optimizer) = cpu_scaler(), sgd()
    backward(scaler, parameter, 0.25)
    if unscale:
        scaler.unscale_(optimizer)
    for given in ([lambda: 1.0], []):
        named = {} if given else {"closure": lambda: 1.0}
        with pytest.raises(StageError, match="Closure use is not currently supported"):
            scaler.step(optimizer, *given, **named)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.75

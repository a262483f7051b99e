"""A step: as float64 takes it without a scaler, skipped whole by one bad value, and what is told.

In one process; on ranks the cells of `test_invariant` and `test_random_programs` hold it to this.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp.errors import StageError
from distamp.scaler import StepCounts
from tests.scaler.reference import KINDS, Kind
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
BAD = 2  # the iteration that overflows


class Fit:
    """A small regression, in any dtype, with a scaler or without one."""

    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randn(6, 8, 5, generator=generator).to(dtype)
        shapes = ((5, 4), (4, 1))
        weights = [torch.randn(*shape, generator=generator).mul(0.3).to(dtype) for shape in shapes]
        self.parameters = [nn.Parameter(weight) for weight in weights]
        how = {"foreach": False} if dtype is torch.float64 else kind.implementation
        self.optimizer = kind.cls(self.parameters, **kind.settings, **how)

    def run(self, scaler: Any, order: str) -> list[Tensor]:
        for number, x in enumerate(self.data):
            if scaler is None and number == BAD:
                continue
            self.optimizer.zero_grad()
            first, second = self.parameters
            loss = (torch.tanh(x @ first) @ second - 1.0).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None and number == BAD:
                second.grad[2] = NAN
            if scaler is not None and order in ("unscale", "torch's clip"):
                scaler.unscale_(self.optimizer)
            if scaler is not None and order == "clip":
                scaler.clip_grad_norm_(self.optimizer, 0.5)
            elif "clip" in order:
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
            if scaler is None:
                self.optimizer.step()
                continue
            scaler.step(self.optimizer)
            scaler.update()
        return [p.detach().clone() for p in self.parameters]


@pytest.mark.parametrize("order", ["step", "unscale", "clip", "torch's clip"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "capturable" not in kind])
def test_steps_are_float64s_without_a_scaler_and_torchs_to_the_bit(kind, order):
    expected = Fit(KINDS[kind], torch.float64).run(None, order)
    ours = Fit(KINDS[kind], torch.float32).run(cpu_scaler(2.0**16), order)
    torch.testing.assert_close([p.double() for p in ours], expected, rtol=2e-4, atol=2e-6)
    if order != "clip":
        theirs = Fit(KINDS[kind], torch.float32).run(torch_scaler(2.0**16), order)
        assert all(map(torch.equal, ours, theirs))


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

    empty = nn.Parameter(torch.empty(0))
    empty.grad = torch.empty(0)
    absent, tagged = leaf(1.0), nn.Parameter(torch.ones(1).as_subclass(Tagged))
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


def test_float16_rows_of_a_sparse_gradient_that_overflow_in_their_sum_skip_the_step():
    table = nn.Parameter(torch.ones(3, 1, dtype=torch.float16))
    optimizer = torch.optim.SGD([table], lr=1.0)
    scaler = cpu_scaler(2.0, fp16_grads="inplace")
    for value in (40000.0, 1.0):
        rows = torch.full((2, 1), value, dtype=torch.float16)
        table.grad = torch.sparse_coo_tensor([[1, 1]], rows, (3, 1), check_invariants=True)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.step_counts(optimizer) == StepCounts(taken=1, skipped=1)
    assert table.flatten().tolist() == [1.0, -1.0, 1.0]


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_sparse_gradients_are_as_dense_ones(unscale):
    rows = torch.tensor([[256.0, 512.0], [128.0, 0.0]])
    wide = torch.full((2, 2), 40000.0)
    cases = itertools.product((torch.float32, torch.float16), ([0, 2], [2, 2]), (rows, wide))
    for dtype, indices, values in (*cases, (torch.float32, [1, 1], rows * INF)):
        table = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        optimizer = torch.optim.SGD([table], lr=1.0)
        scaler = cpu_scaler(fp16_grads="inplace")
        scaler.scale(torch.ones(()))
        values = values.to(dtype)
        table.grad = torch.sparse_coo_tensor([indices], values, (3, 2), check_invariants=True)
        # Of rows that come twice the sum counts, in float16 too: 40000 + 40000 > 65504.
        dense = torch.zeros(3, 2).index_add(0, torch.tensor(indices), values.float()).to(dtype)
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
    for make in (torch_scaler, cpu_scaler):
        wide, narrow, scaler = leaf(1.0), leaf(1.0, dtype=torch.float16), make()
        optimizer = torch.optim.SGD([wide, narrow], lr=1.0)
        for parameter in (wide, narrow):
            backward(scaler, parameter, 0.25)
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients"):
            getattr(scaler, call)(optimizer)
        assert (wide.item(), narrow.item()) == (1.0, 1.0)
    assert (wide.grad.item(), narrow.grad.item()) == (256.0, 256.0)


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_half_precision_are_unscaled_in_place(dtype, how):
    if how.get("fused") and dtype is torch.float16:
        pytest.skip("torch's own fused kernel on a CPU")
    parameter = leaf(1.0, 1.0, dtype=dtype)
    optimizer = torch.optim.SGD([parameter], lr=1.0, **how)
    scaler = cpu_scaler(fp16_grads="inplace" if dtype is torch.float16 else "error")
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [0.25, 0.25]
    scaler.step(optimizer)
    scaler.update()
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
    scaler = cpu_scaler()
    parameters = [leaf(1.0) for _ in range(3)]
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
    assert [scaler.step_counts(o) for o in optimizers] == [
        StepCounts(1, 0),
        *[StepCounts(0, 1)] * 2,
    ]
    assert scaler.get_scale() == 512.0


def test_step_all_refuses_what_step_refuses_and_steps_none():
    scaler = cpu_scaler()
    (first, one), (second, other) = sgd(), sgd()
    for parameter in (first, second):
        backward(scaler, parameter, 0.25)
    assert "given twice" in error_of(scaler.step_all, [one, one])[1]
    assert "given twice" in error_of(scaler.unscale_, one, one)[1]
    scaler.step(other)
    with pytest.raises(StageError, match=r"step\(\) has already been called"):
        scaler.step_all([one, other])
    assert (first.item(), second.item()) == (1.0, 0.75)


# -- what can be asked -----------------------------------------------------------------------------


def test_what_is_told_of_each_iteration():
    parameter, optimizer = sgd()
    scaler = cpu_scaler()
    scaler.add_optimizer(optimizer)
    assert scaler.step_counts(optimizer) == StepCounts(taken=0, skipped=0)
    told = []
    for gradient in (0.0, INF, 0.0, NAN):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        assert not scaler.is_unscaled(optimizer)
        scaler.unscale_(optimizer)
        assert scaler.is_unscaled(optimizer)
        flag = scaler.found_inf(optimizer)
        assert (flag.shape, flag.dtype) == ((), torch.float32)
        scaler.step(optimizer)
        assert not scaler.is_unscaled(optimizer)
        scaler.update()
        told.append((scaler.stepped(optimizer), flag.item(), scaler.found_inf(optimizer).item()))
    assert told == [(True, 0.0, 0.0), (False, 1.0, 1.0)] * 2
    assert scaler.step_counts(optimizer) == StepCounts(taken=2, skipped=2)


def test_questions_before_their_time_are_named():
    (parameter, optimizer), (_, never) = sgd(), sgd()
    scaler = cpu_scaler()
    for question in ("stepped", "found_inf", "step_counts"):
        with pytest.raises(StageError, match=rf"{question}\(\) was called before"):
            getattr(scaler, question)(optimizer)
    backward(scaler, parameter, 0.25)
    scaler.unscale_(optimizer)
    with pytest.raises(StageError, match=r"stepped\(\) was called before step\(\)"):
        scaler.stepped(optimizer)
    scaler.step(optimizer)
    assert scaler.stepped(optimizer)
    for question in ("stepped", "found_inf", "step_counts"):
        with pytest.raises(StageError, match=rf"{question}\(\) was called before.* SGD"):
            getattr(scaler, question)(never)
    assert not scaler.is_unscaled(never)
    with pytest.raises(TypeError):
        scaler.add_optimizer([never])


@pytest.mark.parametrize("how", ["position", "name", "after unscale_"])
def test_a_closure_is_refused_before_anything_changes(how):
    scaler, calls = cpu_scaler(), []
    parameter, optimizer = sgd()
    backward(scaler, parameter, 0.25)
    if how == "after unscale_":
        scaler.unscale_(optimizer)
    args: list[Any] = [lambda: calls.append(1)] if how == "position" else []
    named = {} if args else {"closure": lambda: calls.append(1)}
    with pytest.raises(StageError, match="Closure use is not currently supported"):
        scaler.step(optimizer, *args, **named)
    assert (calls, parameter.item()) == ([], 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.75

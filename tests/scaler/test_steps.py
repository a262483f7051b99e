"""A step: taken whole or skipped whole by one bad value, and what is told of it.

In one process; `test_oracle` compares steps with torch's to the bit, and the cells of
`test_invariant` and `test_random_programs` with float64.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from distamp.errors import CallOrderError
from distamp.scaler import StepCounts
from tests.scaler.steps import INF, NAN, backward, cpu_scaler, leaf, sgd, torch_scaler

# -- what overflows, and what does not -------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    "parameters", [[leaf(1.0)], [{"params": []}]], ids=["no gradient", "empty"]
)
def test_a_step_without_any_gradient_raises_as_torchs_does(parameters, max_norm):
    optimizer, scaler = torch.optim.SGD(parameters, lr=1.0), cpu_scaler(growth_interval=1)
    scaler.scale(torch.ones(()))
    with pytest.raises(CallOrderError, match=r"No inf checks were recorded for this optimizer\."):
        scaler.step(optimizer, max_norm=max_norm)
    with pytest.raises(CallOrderError, match=r"No inf checks were recorded prior to update\."):
        scaler.update()


ROWS = {
    "fits": [[256.0, 512.0], [128.0, 0.0]],
    "sum overflows float16": [[40000.0, 40000.0]] * 2,
    "inf": [[INF, 1.0], [1.0, 1.0]],
}


# The types of norm that a call clips by.
CLIPS = {"clip_grad_norm_": (2.0, 1.0, INF), "max_norm": (2.0,)}


@pytest.mark.parametrize("call", ["step", "unscale_", *CLIPS])
@pytest.mark.parametrize("values", ROWS)
def test_sparse_gradients_are_as_dense_ones(values, call):
    """Of rows that come twice the sum counts, in float16 too: 40000 + 40000 > 65504."""
    for dtype, indices in itertools.product((torch.float32, torch.float16), ([0, 2], [2, 2])):
        table = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        optimizer, scaler = torch.optim.SGD([table], lr=1.0), cpu_scaler(fp16_grads="inplace")
        scaler.scale(torch.ones(()))
        rows = torch.tensor(ROWS[values], dtype=dtype)
        table.grad = torch.sparse_coo_tensor([indices], rows, (3, 2), check_invariants=True)
        dense = torch.zeros(3, 2).index_add(0, torch.tensor(indices), rows.float()).to(dtype)
        finite, gradient = bool(dense.isfinite().all()), dense.float() / 1024.0
        if call == "unscale_":
            scaler.unscale_(optimizer)
        for norm_type in CLIPS.get(call, ()):
            exact = torch.linalg.vector_norm(gradient, norm_type)
            gradient *= (0.25 / (exact + 1e-6)).clamp(max=1.0)
            if call == "clip_grad_norm_":
                norm = scaler.clip_grad_norm_(optimizer, 0.25, norm_type)
                assert not finite or norm.item() == pytest.approx(exact.item(), rel=1e-3)
        scaler.step(optimizer, **({"max_norm": 0.25} if call == "max_norm" else {}))
        assert scaler.step_was_taken(optimizer) == finite, (dtype, indices)
        expected = 1.0 - gradient if finite else torch.ones(3, 2)
        torch.testing.assert_close(table.detach().float(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("make", [torch_scaler, cpu_scaler])
def test_float16_gradients_are_refused_where_torch_refuses_them(make, call):
    scaler, parameter = make(), leaf(1.0, dtype=torch.float16)
    backward(scaler, parameter, 0.25)
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients") as refused:
        getattr(scaler, call)(torch.optim.SGD([parameter], lr=1.0))
    assert (parameter.item(), parameter.grad.item()) == (1.0, 256.0)
    ways = [f"fp16_grads='{way}'" in str(refused.value) for way in ("master", "inplace")]
    assert ways == [make is cpu_scaler] * 2


# -- several optimizers ----------------------------------------------------------------------------


class Returns(torch.optim.SGD):
    """``step`` takes an argument, and returns it."""

    def step(self, closure: Any = None, *, given: float = 1.0) -> Any:
        super().step()
        return given


def test_a_step_passes_arguments_on_and_returns_what_the_optimizer_returns():
    scaler, parameters = cpu_scaler(), [leaf(1.0), leaf(1.0), leaf(1.0)]
    optimizers = [Returns([p], lr=1.0) for p in parameters]
    for parameter, gradient in zip(parameters, (0.25, INF, 0.25), strict=True):
        backward(scaler, parameter, gradient)
    returned = [scaler.step(optimizers[0], given=3.0), *scaler.step_all(iter(optimizers[1:]))]
    assert returned == [3.0, None, 1.0]


# -- what can be asked -----------------------------------------------------------------------------


def test_what_is_told_of_each_iteration_and_before_its_time():
    (parameter, optimizer), scaler = sgd(), cpu_scaler()
    for question in (scaler.step_was_taken, scaler.found_inf, scaler.step_counts):
        with pytest.raises(CallOrderError, match=rf"{question.__name__}\(\) was called before"):
            question(optimizer)
    scaler.register_optimizers(optimizer)
    assert scaler.step_counts(optimizer) == StepCounts(taken=0, skipped=0)
    for gradient, bad in ((0.0, 0.0), (INF, 1.0), (0.0, 0.0), (NAN, 1.0)):
        optimizer.zero_grad()
        backward(scaler, parameter, gradient)
        scaler.unscale_(optimizer)
        flag = scaler.found_inf(optimizer)
        assert (flag.shape, flag.dtype, flag.item()) == ((), torch.float32, bad)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.step_was_taken(optimizer), scaler.found_inf(optimizer).item()) == (
            not bad,
            bad,
        )
    assert scaler.step_counts(optimizer) == StepCounts(taken=2, skipped=2)

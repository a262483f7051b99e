"""Error feedback against float64: nothing is lost, and a loss scale changes nothing."""

from __future__ import annotations

import math

import pytest
import torch

from distamp.comm_hooks.error_feedback import compensate, new_residual
from distamp.comm_hooks.wire import WIRE_FORMATS, WireFormat, wire_format


def lossy(wire: WireFormat, scales: list[float], feedback: bool) -> tuple[float, float]:
    """The relative error of the unscaled sum over all steps, and of what is left."""
    generator = torch.Generator().manual_seed(0)
    exact, arrived = torch.zeros(2, 1000, dtype=torch.float64)
    residual = torch.zeros(1000)
    for scale in scales:
        gradient = torch.randn(1000, generator=generator)
        whole = compensate(gradient * scale, residual, scale)
        read = wire.decode(wire.encode(whole), 1000)
        exact += gradient.double()
        arrived += read.double() / scale
        if feedback:
            residual = new_residual(whole, read, scale)
    owed_still = exact - arrived - residual.double()
    return float((exact - arrived).norm() / exact.norm()), float(owed_still.norm() / exact.norm())


@pytest.mark.parametrize("scales", [[1.0] * 50, [2.0 ** (i % 20) for i in range(50)]])
@pytest.mark.parametrize("name", list(WIRE_FORMATS))
def test_what_is_owed_is_all_that_is_missing(name, scales):
    if name == "fp16_plain":
        scales = [min(scale, 1024.0) for scale in scales]
    _, lost = lossy(wire_format(name), scales, feedback=True)
    assert lost < 1e-6


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_the_error_of_a_sum_falls_by_several_times(name):
    without, _ = lossy(wire_format(name), [1.0] * 50, feedback=False)
    with_feedback, _ = lossy(wire_format(name), [1.0] * 50, feedback=True)
    assert with_feedback < without / 4


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_owe_nothing(value):
    whole = torch.tensor([1.5, value])
    residual = new_residual(whole, torch.tensor([1.0, value]), 2.0)
    assert residual.tolist() == [0.25, 0.0]


def test_gradients_of_other_dtypes_are_added_up_in_fp32():
    gradient = torch.full((4,), 2048.0, dtype=torch.float16)
    whole = compensate(gradient, torch.full((4,), 0.25), torch.tensor(2.0))
    assert whole.dtype == torch.float32
    assert whole.tolist() == [2048.5] * 4

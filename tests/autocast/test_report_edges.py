"""Reports at odd places: sums of several lengths, and devices other than CUDA in preflight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distamp.autocast import findings, precision_report, preflight


@pytest.mark.parametrize("lengths", [(5000, 3), (3, 5000)])
def test_the_longest_sum_of_several_is_found(lengths):
    with precision_report() as report:
        for length in lengths:
            torch.ones(length, dtype=torch.bfloat16).sum()
    assert [row.length for row in report.rows if row.op == "sum"] == [5000]
    assert [found.rule for found in findings(report)] == ["long-sum"]


def test_what_the_cpu_lists_and_cuda_does_not_runs_in_the_dtype_of_its_inputs():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReflectionPad2d(1))
    for device_type, dtype in (("cuda", "float16"), ("cpu", "float32")):
        report = preflight(model, torch.zeros(1, 3, 8, 8), device_type, torch.float16).report
        (row,) = [row for row in report.rows if row.op == "reflection_pad2d"]
        assert row.outputs == (dtype,)


def test_modules_alike_but_for_an_index_and_a_class_are_shown_apart():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2))
    inputs = torch.zeros(1, 2)
    with precision_report(model) as report:
        model(inputs)
    lines = [line.split() for line in str(report).splitlines() if "forward" in line]
    assert {module: op for _, module, op, *_ in lines} == {"*": "linear", "2": "layer_norm"}


@pytest.mark.parametrize(("device_type", "refused"), [("cuda", 1), ("xpu", 1), ("cpu", 0)])
def test_binary_cross_entropy_is_refused_wherever_torch_refuses_it(device_type, refused):
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    done = preflight(
        model,
        torch.zeros(2, 4),
        device_type,
        torch.float16,
        loss_fn=lambda out: nn.functional.binary_cross_entropy(out.float(), torch.zeros(2, 1)),
    )
    assert [each.rule for each in done.errors] == ["forbidden"] * refused

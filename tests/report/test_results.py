"""Every result of a report is readable as text, and has plain values for programs."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distamp
from distamp import PrecisionContract, precision_report, preflight
from distamp.report import logprob_mismatch, lost_updates
from tests.on_ranks import on_ranks
from tests.report.setups import BF16, FP32, Net, sharded, trained


def half_softmax_report() -> Any:
    with precision_report() as report:
        torch.softmax(torch.ones(2, 4, dtype=BF16), -1)
    return report


def infinite_step_origin() -> Any:
    model = nn.Linear(2, 2)

    def step() -> None:
        (model(torch.ones(2)).square().sum() / 0).backward()

    return distamp.find_first_nonfinite(step, model)


def bf16_lost_updates() -> Any:
    step, model, optimizer = trained(Net().to(BF16))
    return lost_updates(step, model, optimizer)


def broken_contract() -> Any:
    return PrecisionContract(parameters="bf16").check(*trained(Net()))


def mismatch() -> Any:
    return logprob_mismatch(torch.zeros(1, 2), torch.ones(1, 2))


# A function that makes a result, and a part of its text.
RESULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "PrecisionReport": (half_softmax_report, "softmax"),
    "OpRow": (lambda: half_softmax_report().rows[-1], "softmax in the forward of (outside): bf16"),
    "Findings": (lambda: half_softmax_report().findings(), "warning: (outside), softmax"),
    "Finding": (lambda: half_softmax_report().findings()[0], "warning: (outside), softmax"),
    "Preflight": (lambda: preflight(nn.Linear(2, 2), torch.ones(1, 2)), "linear"),
    "ContractReport": (broken_contract, "declared bf16, found fp32"),
    "Violation": (lambda: broken_contract()[0], "declared bf16, found fp32"),
    "NonFiniteOrigin": (infinite_step_origin, "div in (outside) made inf"),
    "TensorRange": (lambda: infinite_step_origin().output, "float32 []: inf"),
    "LostUpdates": (bf16_lost_updates, "LayerNorm"),
    "LogprobMismatch": (mismatch, "mismatch/token_abs_mean"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_text_for_people_and_json_for_programs(name):
    make, text = RESULTS[name]
    result = make()
    assert type(result).__name__ == name
    assert text in str(result)
    assert not str(result).startswith((f"{name}(", "{", "("))
    values = json.dumps(result.to_dict())
    assert isinstance(json.loads(values), dict)


@pytest.mark.slow
@on_ranks(2)
def test_a_table_shows_the_kernels_of_fsdp2_only_if_it_is_asked_to():
    model: Any = sharded(Net(attends=False), None, param_dtype=BF16, reduce_dtype=FP32)
    step, *_ = trained(model)
    with precision_report(model) as report:
        step()
    table = report.table()
    complete_table = report.table(internals=True)
    for op in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"):
        assert op not in table
        assert op in complete_table
    assert "allgather_base" in table
    assert "reduce_scatter_base" in table
    assert "addmm" in table
    assert sum(row.internal for row in report.rows) > 5

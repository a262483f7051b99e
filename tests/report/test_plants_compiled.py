"""Planted violations and numbers that are not finite: bytes, norms in Python, compiled code."""

import warnings
from typing import Any

import pytest
import torch

import distamp
from distamp import PrecisionContract
from tests.on_ranks import on_ranks
from tests.report.plants_contract_compiled import PLANTS
from tests.report.plants_nonfinite_compiled import FAULTS

# Compilation takes seconds. Quick tests have smaller compiled models, in one process.
COMPILED_PLANTS = (
    "norms of compiled blocks in bf16",
    "a module that leaves the region in a compiled model",
    "compiled blocks under FSDP2 that reduce in bf16",
)
CONTRACTS: list[Any] = []
for index, plant in enumerate(PLANTS):
    marks = pytest.mark.slow if plant.name in COMPILED_PLANTS else ()
    CONTRACTS.append(pytest.param(plant.ranks, index, id=plant.name, marks=marks))
NONFINITE: list[Any] = []
for index, fault in enumerate(FAULTS):
    size = max(fault.ranks) + 1
    NONFINITE.append(pytest.param(size, index, id=fault.name))


@on_ranks("size")
@pytest.mark.parametrize(("size", "index"), CONTRACTS)
def test_a_violation_is_found(size, index):
    plant = PLANTS[index]
    # A warning of the compiler is an error on the ranks of a test.
    with warnings.catch_warnings(action="ignore"):
        violations = PrecisionContract(**plant.declared).check(*plant.build())
    answers = []
    for violation in violations:
        is_place = any(plant.where in name for name in violation.where)
        if (violation.key, violation.found) == (plant.key, plant.dtype) and is_place:
            answers.append(violation)
    assert answers, str(violations)


@on_ranks("size")
@pytest.mark.parametrize(("size", "index"), CONTRACTS)
def test_the_same_step_is_not_accused_under_the_contract_that_it_keeps(size, index):
    plant = PLANTS[index]
    with warnings.catch_warnings(action="ignore"):
        violations = PrecisionContract(**plant.clean).check(*plant.build())
    assert not violations, str(violations)


@pytest.mark.slow
@on_ranks("size")
@pytest.mark.parametrize(("size", "index"), NONFINITE)
def test_a_number_in_compiled_code_is_traced_to_its_operation_or_to_the_compiler(size, index):
    fault = FAULTS[index]
    # After eight compilations of one function dynamo runs it eagerly, without the fault.
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        step, model = fault.build()
        origin = distamp.find_first_nonfinite(step, model)
    assert origin is not None
    if fault.kind == "unseen":
        assert origin.kind == "unseen", str(origin)
        assert "compiled code is the suspect" in str(origin)
        return
    answer = (origin.kind, origin.module, origin.direction, origin.ranks)
    assert answer == (fault.kind, fault.module, fault.direction, fault.ranks), str(origin)
    assert fault.op in ("", origin.op), str(origin)

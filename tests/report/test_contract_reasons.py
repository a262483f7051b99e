"""A contract gives a reason for each key without an observation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from distamp import PrecisionContract
from tests.on_ranks import on_ranks
from tests.report.setups import Net, trained

ALL_KEYS = {
    "parameters": "fp32",
    "compute": "fp32",
    "norms": "fp32",
    "param_all_gather": "fp32",
    "grad_reduce": "fp32",
    "activations": "fp32",
    "master_weights": "fp32",
    "optimizer_state": "fp32",
}


class Bias(nn.Module):
    """A module without a product or a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def check_bias(optimizer_class: type | None, steps: bool = True) -> dict[str, str]:
    model = Bias()
    optimizer = None
    if optimizer_class is not None:
        optimizer = optimizer_class(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2)).sum().backward()
        if optimizer is not None and steps:
            optimizer.step()

    return PrecisionContract(**ALL_KEYS).check(step, model, optimizer).reasons


def test_a_step_without_an_optimizer():
    reasons = check_bias(None)
    assert reasons["compute"] == "no product of trained tensors ran"
    assert reasons["norms"] == "no norm ran"
    assert reasons["master_weights"] == "no optimizer was passed"
    assert reasons["optimizer_state"] == "no optimizer was passed"
    assert "parameters" not in reasons


def test_an_optimizer_without_a_state():
    reasons = check_bias(torch.optim.SGD)
    assert "master_weights" not in reasons
    assert reasons["optimizer_state"].startswith("the optimizers keep no tensors")


def test_an_optimizer_that_takes_no_step():
    assert check_bias(torch.optim.SGD, steps=False)["master_weights"] == "no optimizer took a step"


@on_ranks(2)
def test_two_ranks_that_send_nothing():
    reasons = PrecisionContract(**ALL_KEYS).check(*trained(Net(attends=False))).reasons
    assert reasons["grad_reduce"] == "no rank sent any, as DDP and FSDP do"
    assert reasons["activations"] == "no module sent any"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_step_that_runs_once():
    def fuse(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            with _disable_current_modes():
                return graph.forward(*args)

        return run

    module = nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2))
    model = nn.Sequential(torch.compile(module, backend=fuse), nn.Linear(2, 2))
    model(torch.ones(1, 2))
    with PrecisionContract(**ALL_KEYS).watch(model) as report:
        model(torch.ones(1, 2))
    assert report.reasons["norms"] == "compiled code computed all norms inside its kernels"


def test_a_module_whose_weight_its_caller_reads_is_not_called_idle():
    model = nn.ModuleDict({"table": nn.Embedding(2, 2), "idle": nn.Embedding(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model["table"].weight.sum().backward()
        optimizer.step()

    assert PrecisionContract().check(step, model, optimizer).unseen == (
        "idle: did not run in this step",
    )

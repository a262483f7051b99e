"""A contract runs a compiled step compiled, and once more eagerly for its products and norms."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import distamp
from distamp import PrecisionContract
from tests.on_ranks import on_ranks
from tests.report.setups import BF16, FP32, Net, trained

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


class CountingBackend:
    """A backend that counts the graphs that it compiles, and their runs."""

    def __init__(self) -> None:
        self.compiled = 0
        self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def compiled_net(backend: Any) -> Net:
    model = Net()
    model.blocks[0].compile(backend=backend)
    model.head = torch.compile(model.head, backend=backend)
    return model


@pytest.mark.slow
def test_the_step_runs_compiled_and_is_not_compiled_again():
    backend = CountingBackend()
    training = trained(compiled_net(backend), region=BF16)
    step, *_ = training
    step()
    compiled, runs_of_a_step = backend.compiled, backend.runs
    PrecisionContract(compute="bf16").check(*training)
    step()
    assert backend.compiled == compiled
    assert backend.runs == 3 * runs_of_a_step


@pytest.mark.slow
def test_products_and_norms_are_of_the_eager_run_and_all_else_of_the_compiled_step():
    training = trained(compiled_net("aot_eager"), region=BF16)
    report = PrecisionContract(compute="bf16", norms="fp32").check(*training)
    eager_report = PrecisionContract().check(*trained(Net(), region=BF16))
    assert not report, str(report)
    assert report.seen == eager_report.seen
    assert report.unseen == ()
    assert report.judged_by["norms"] == report.judged_by["compute"] == "eager step"
    assert report.judged_by["parameters"] == "compiled step"
    assert "judged by the eager step: compute, norms" in str(report)
    assert report.to_dict()["judged_by"] == report.judged_by


def test_a_model_that_is_not_compiled_is_judged_by_one_step():
    calls = []
    step, *models = trained(Net())
    report = PrecisionContract().check(lambda: calls.append(step()), *models)
    assert len(calls) == 1
    assert report.judged_by == {}
    assert "judged by" not in str(report)


@pytest.mark.slow
def test_a_norm_in_bf16_inside_a_compiled_module_is_found():
    model = compiled_net("aot_eager").bfloat16()
    (violation,) = PrecisionContract(norms="fp32").check(*trained(model))
    assert violation.where == ("blocks.*.norm", "blocks.*.norm2")
    assert violation.count == 4


@pytest.mark.parametrize("level", ["bf16", pytest.param("bf16-O2", marks=pytest.mark.slow)])
def test_the_eager_run_changes_no_weight_and_no_state(level):
    """Two models train two steps each, one of them under a check."""
    states = []
    for is_checked in (True, False):
        model = Net(batch_norm=True)
        optimizer = torch.optim.AdamW(model.parameters())
        amp = distamp.initialize(model, optimizer, level)
        amp.model.blocks[0].compile(backend="aot_eager")
        tokens = torch.arange(16).view(2, 8)

        def step(amp: Any = amp, tokens: Tensor = tokens) -> None:
            with amp.autocast():
                output = amp.model(tokens)
            output = nn.functional.dropout(output.float(), 0.5)
            amp.backward(output.square().mean())
            amp.step()
            amp.zero_grad()

        torch.manual_seed(0)
        if is_checked:
            assert not amp.check(step)
        else:
            step()
        step()
        states.append(copy.deepcopy((amp.model.state_dict(), optimizer.state_dict()["state"])))
    checked, unchecked = states
    torch.testing.assert_close(checked, unchecked, rtol=0, atol=0)


def test_gradients_of_the_compiled_step_stay():
    model = torch.compile(nn.Linear(2, 2), backend="aot_eager")
    PrecisionContract().check(lambda: model(torch.ones(1, 2)).sum().backward(), model)
    assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.slow
def test_a_watched_block_runs_once_and_names_the_modules_whose_norms_it_did_not_see():
    step, *models = trained(compiled_net("aot_eager"), region=BF16)
    with PrecisionContract(norms="fp32").watch(*models) as report:
        step()
    assert report.judged_by == {}
    (sentence,) = report.unseen
    assert sentence.startswith("blocks.0, head: compiled; ")


@pytest.mark.slow
@on_ranks(2)
def test_messages_of_a_compiled_model_under_fsdp2_are_of_the_compiled_step():
    model = Net(attends=False)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for block in model.blocks:
        block.compile(backend="aot_eager")
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    contract = PrecisionContract(param_all_gather="bf16", grad_reduce="bf16", compute="fp32")
    # A warning of the compiler is an error on the ranks of a test.
    with warnings.catch_warnings(action="ignore"):
        report = contract.check(*trained(model))
    assert {violation.key for violation in report} == {"grad_reduce", "compute"}
    assert report.judged_by["grad_reduce"] == "compiled step"
    assert report.seen["param_all_gather"].keys() == {"bf16"}

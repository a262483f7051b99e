"""Several listeners trace one step, and see it as if there were no other listener."""

import copy
import pickle
from collections import Counter

import torch
from torch import Tensor, nn

from distamp.report.contract_recorder import ContractRecorder
from distamp.report.nonfinite_tracer import NonFiniteTracer, merge_ranks
from distamp.report.precision_report import ReportRecorder
from distamp.report.tracing import ModuleFrame, OpCall, StepTracer, TraceListener
from tests.on_ranks import on_ranks
from tests.ranks import mesh
from tests.report.setups import Net, parallel


def model_of_two_ranks() -> nn.Module:
    """Return a model of DTensors: a report counts their ops, and other listeners unwrap them."""
    torch.manual_seed(0)
    return parallel(Net(attends=False), mesh((2,), ("tp",)))


def run(model: nn.Module) -> Tensor:
    loss = model(torch.ones(2, 8, dtype=torch.int64)).log().sum()
    loss.backward()
    return loss


@on_ranks(2)
def test_listeners_of_one_step_record_the_same_as_in_a_step_of_their_own():
    counts, rows, origins = [], [], []
    for together in (False, True):
        model = model_of_two_ranks()
        report, contract, search = ReportRecorder(), ContractRecorder([]), NonFiniteTracer(model)
        groups = [[report, contract, search]] if together else [[report], [contract], [search]]
        for listeners in groups:
            model.zero_grad()
            with StepTracer([model], listeners):
                loss = run(model)
            if search in listeners:
                search.check_result("loss", loss)
        rows.append(report.rows())
        counts.append(contract.result.counts)
        origins.append(merge_ranks([search.result]))
    assert rows[0] == rows[1]
    assert counts[0] == counts[1]
    assert any(observation.key == "activations" for observation in counts[0])
    assert str(origins[0]) == str(origins[1])
    assert origins[0].op == "log"


class OpsByModule(TraceListener):
    """An example of a tool: it counts ops by module."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.modules: list[str] = []

    def on_module(self, frame: ModuleFrame) -> None:
        self.modules.append(frame.name)

    def after_op(self, call: OpCall) -> None:
        self.counts[call.context.module] += not call.op.is_view


def test_a_listener_sees_modules_and_the_ops_of_forward_and_backward():
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    listener = OpsByModule()
    with StepTracer([model], [listener]):
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert listener.modules == ["", "0", "1"]
    assert listener.counts["0"] == listener.counts["1"] == 2


def test_a_model_that_is_copied_inside_the_block_has_no_trace():
    model = nn.Sequential(nn.Tanh())
    listener = OpsByModule()
    with StepTracer([model], [listener]):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for copied in copies:
            copied(torch.ones(2))
    assert "0" not in listener.counts

"""A contract sees norms, gathers and compiled modules that have no telling name."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distamp
from distamp import PrecisionContract
from distamp.report import ContractReport
from tests.on_ranks import on_ranks


class RootMeanSquareFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (16,))


class RootMeanSquare(nn.Module):
    """The norm of Llama, by a class name without the word norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        fp32 = x.float()
        variance = (fp32 * fp32).mean(-1, keepdim=True)
        normalized = fp32 * torch.rsqrt(variance + 1e-6)
        return self.weight * normalized.to(x.dtype)


class HalfRootMeanSquare(RootMeanSquare):
    """The same norm with its mean in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        variance = (x * x).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + 1e-6)


def check_level(model: nn.Module, params: list[nn.Parameter]) -> ContractReport:
    """Train a step at bf16, and check the contract of the level."""
    amp = distamp.initialize(model, torch.optim.AdamW(params), "bf16")

    def step() -> None:
        with amp.autocast():
            output = amp.model(torch.ones(4, 16))
        amp.backward(output.float().square().mean())
        amp.step()

    return amp.check(step)


@pytest.mark.parametrize("norm_class", [RootMeanSquareFunction, RootMeanSquare])
def test_a_norm_without_weight_or_without_its_name_is_seen(norm_class):
    model = nn.Sequential(nn.Linear(16, 16), norm_class(), nn.Linear(16, 1))
    report = check_level(model, list(model.parameters()))
    assert report.seen["norms"].keys() == {"fp32"}


def test_a_norm_in_python_in_half_precision_is_a_violation():
    model = nn.Sequential(nn.Linear(16, 16), HalfRootMeanSquare())
    contract = PrecisionContract(norms="fp32")
    region = torch.autocast("cpu", torch.bfloat16)
    with contract.watch(model) as report, region:
        model(torch.ones(4, 16))
    (violation,) = report
    assert violation.where == ("1",)
    assert violation.found == "bf16"


class WeightByLength(nn.Linear):
    """A layer that divides its weight's length by the norm of its rows."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.length = nn.Parameter(torch.ones(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(self.weight, dim=1, keepdim=True)
        return F.linear(x, self.weight * (self.length / norm))


def test_the_norm_of_a_weight_is_no_norm_of_activations():
    model = nn.Sequential(WeightByLength())
    with PrecisionContract(norms="fp16").watch(model) as report:
        model(torch.ones(2, 4)).sum().backward()
    assert not report, str(report)


def test_a_root_of_a_mean_outside_of_modules_is_no_norm():
    """A loss by rows has one."""
    model = nn.Linear(4, 4)
    with PrecisionContract(norms="fp16").watch(model) as report:
        output = model(torch.ones(2, 4))
        output.square().mean(-1).sqrt().sum().backward()
    assert not report


@on_ranks(2)
def test_a_gather_of_a_unit_with_two_dtypes_is_seen():
    """FSDP2 gathers a unit of frozen bf16 and trained fp32 parameters as bytes."""
    frozen = nn.Linear(16, 16).bfloat16().requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(16, 16))
    fully_shard(model)
    report = check_level(model, list(model[1].parameters()))
    assert {"bf16", "fp32"} <= report.seen["param_all_gather"].keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("level", ["bf16", pytest.param("bf16-O2", marks=pytest.mark.slow)])
def test_a_compiled_model_with_a_pinned_module_keeps_its_contract(level):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = distamp.initialize(model, optimizer, level, module_precision={"1": "fp32"})
    compiled_model = torch.compile(amp.model, backend="aot_eager")

    def step() -> None:
        with amp.autocast():
            output = compiled_model(torch.ones(4, 8))
        amp.backward(output.float().square().mean())
        amp.step()

    step()
    assert not amp.check(step)
    contract = PrecisionContract.from_level(amp.level, amp.model)
    with contract.watch(amp.model, amp.optimizers) as report:
        step()
    assert not report, str(report)
    (sentence,) = report.unseen
    assert "did not run" not in sentence
    assert "a function that torch.compile returned" in sentence


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_without_its_declared_dtypes_violates_its_contract():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    compiled_model = torch.compile(model, backend="aot_eager")

    def step() -> None:
        output = compiled_model(torch.ones(4, 8))
        output.square().mean().backward()

    step()
    contract = PrecisionContract(compute="bf16", modules={"1": {"compute": ("bf16", "fp16")}})
    violations = contract.check(step, model)
    assert {violation.key for violation in violations} == {"compute"}
    assert {violation.found for violation in violations} == {"fp32"}

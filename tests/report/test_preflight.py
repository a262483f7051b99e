"""Tests of `preflight`: the forward table of an absent device and the findings about it."""

import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distamp import autocast, precision_report, preflight, set_module_precision
from tests.autocast.counting import BF16, FP16, MODELS, Calls, mlp
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases

X = torch.ones(4, 4)
HALF = X.half()


def output_dtypes(result: Any) -> dict[str, str]:
    """Return the dtype of the first output of each operator."""
    dtypes = {}
    for row in result.report.rows:
        if row.outputs:
            dtypes[row.op] = row.outputs[0]
    return dtypes


def list_rules(findings: Any) -> list[str]:
    """Return the rule of each finding."""
    return [finding.rule for finding in findings]


def count_rows(report: Any) -> Counter[Any]:
    """Count equal rows, without the statistics of norms, for which fake kernels are inexact."""
    counts: Counter[Any] = Counter()
    for row in report.rows:
        if "norm" in row.op:
            row = replace(row, outputs=row.outputs[:1])
        counts[row] += 1
    return counts


@pytest.mark.parametrize("name", quick_cases(MODELS, quick=["mlp", "conv"]))
def test_the_table_of_a_cpu_is_that_of_a_real_forward_pass(name):
    make_model, shape = MODELS[name]
    model = make_model()
    x = torch.randn(shape)
    result = preflight(model, x, "cpu", BF16)
    with precision_report(model) as report, torch.autocast("cpu", BF16):
        model(x)
    assert count_rows(result.report) == count_rows(report)
    assert not result.errors


def compute_listed_operators(x: Tensor) -> Tensor:
    """Return a sum of operators that the autocast lists of CUDA and of the CPU treat differently.

    Both devices compute prod in fp32. CUDA computes tan in fp32, and the CPU the padding.
    """
    half = x @ x
    padded = F.pad(half[None], (1, 0), "reflect")
    return half.prod() + half.tan().sum() + padded.sum()


@pytest.mark.parametrize(
    ("device_type", "tan", "padding"),
    [
        pytest.param("cuda", "float32", "float16", id="cuda"),
        pytest.param("cpu", "float16", "float32", id="cpu"),
    ],
)
def test_each_device_computes_by_its_own_autocast_lists(device_type, tan, padding):
    result = preflight(Calls(compute_listed_operators), X, device_type, FP16)
    dtypes = output_dtypes(result)
    assert dtypes["mm"] == "float16"
    assert dtypes["prod"] == "float32"
    assert dtypes["tan"] == tan
    assert dtypes["reflection_pad1d"] == padding


def test_a_pinned_module_computes_in_the_dtype_of_its_pin():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    set_module_precision(model[1], "bf16")
    result = preflight(model, X, "cuda", FP16)
    dtypes = {}
    for row in result.report.rows:
        if row.op == "addmm":
            dtypes[row.module] = row.outputs
    assert dtypes == {"0": ("float16",), "1": ("bfloat16",), "2": ("float16",)}


def make_product_in_region(device_type: str | None, **region: Any) -> Calls:
    """Return a model that opens an autocast region for a product.

    Without ``device_type`` the region is for the device of the input, as in transformers.
    """

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device_type or x.device.type, **region):
            return x @ x

    return Calls(forward)


DEVICE_OF_REGION = pytest.mark.parametrize(
    "device_type",
    [
        pytest.param(None, id="device of the input"),
        pytest.param("cuda", id="cuda"),
        pytest.param("cpu", id="cpu"),
    ],
)


@DEVICE_OF_REGION
def test_a_region_that_disables_autocast_computes_in_fp32(device_type):
    model = make_product_in_region(device_type, enabled=False)
    dtypes = output_dtypes(preflight(model, X, "cuda", FP16))
    assert dtypes["mm"] == "float32"


@DEVICE_OF_REGION
def test_a_region_of_another_dtype_computes_in_its_dtype(device_type):
    model = make_product_in_region(device_type, dtype=BF16)
    dtypes = output_dtypes(preflight(model, X, "cuda", FP16))
    assert dtypes["mm"] == "bfloat16"
    assert not torch.is_autocast_enabled("cuda")


class RegionInside(nn.Module):
    """A linear layer in a region for CUDA that forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        with autocast("cuda", FP16):
            return self.linear(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_preflight_and_the_regions_of_this_machine_do_not_change_each_other():
    """Regions for CUDA stay disabled on a machine without it, except inside a preflight."""
    for _ in range(2):
        with pytest.warns(UserWarning, match="CUDA is not available") as messages:
            region = autocast("cuda", FP16)
        assert len(messages) == 1
        with region:
            assert not torch.is_autocast_enabled("cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = preflight(RegionInside(), X, "cuda", FP16)
        assert output_dtypes(result)["addmm"] == "float16"


def test_a_model_on_the_meta_device_needs_no_memory_for_weights():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(200_000, 300_000), nn.ReLU(), nn.Linear(300_000, 10))
    x = torch.empty(4, 200_000, device="meta")
    result = preflight(model, x)
    bytes_cast = 0
    for row in result.report.rows:
        if row.module == "0" and row.casts:
            bytes_cast += row.bytes_read
    weight_and_bias = 300_000 * 200_001
    assert bytes_cast == 4 * (weight_and_bias + 4 * 200_000)
    assert not result.errors


class Assigns(nn.Module):
    """A module that assigns an attribute and a buffer in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.last_input = x
        self.register_buffer("mean", x.mean())
        return torch.rand(2) + x


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    model.append(Assigns())
    tensors = model.state_dict(keep_vars=True)
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    random_state = torch.get_rng_state()
    result = preflight(model, X)
    assert not result.errors

    tensors_after = model.state_dict(keep_vars=True)
    assert tensors_after.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensors_after[name] is tensor
        assert torch.equal(tensor, values[name])
    for param in model.parameters():
        assert param.grad is None
    for module in model.modules():
        assert not module._forward_hooks
    assert not hasattr(model[-1], "last_input")
    assert torch.equal(torch.get_rng_state(), random_state)


def use_masks_and_lengths(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return a product, after branches on the values of the mask and the lengths."""
    if mask.all():
        raise AssertionError("the values of the mask were changed")
    longest = int(lengths.max())
    return x[:longest] @ x.t()


class Factor(nn.Module):
    """A module that moves tensors to CUDA and takes a number."""

    def forward(self, x: Tensor, factor: float) -> Tensor:
        product = x.cuda() @ x.to("cuda").t()
        return product * factor + torch.ones(4, 4, device="cuda")


MASK = torch.zeros(2, dtype=torch.bool)
LENGTHS = torch.tensor([1, 3])


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        pytest.param(
            Calls(use_masks_and_lengths), (X, MASK, LENGTHS), id="masks and lengths by value"
        ),
        pytest.param(Factor(), (X, 2.0), id="by position"),
        pytest.param(Factor(), {"x": X, "factor": 2}, id="by name"),
    ],
)
def test_a_preflight_runs_the_whole_forward_pass(model, inputs):
    result = preflight(model, inputs)
    assert not result.errors
    assert output_dtypes(result)["mm"] == "float16"


def test_a_module_that_fails_is_an_error_with_its_name():
    model = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: x @ x), nn.Linear(8, 8))
    result = preflight(model, torch.randn(4, 8))
    (error,) = result.errors
    assert error.rule == "fails"
    assert error.module == "1"
    assert "4x8 and 4x8" in error.what
    assert error.what in str(result)
    assert output_dtypes(result)["addmm"] == "float16"


def compute_binary_cross_entropy(y: Tensor) -> Tensor:
    """Return a loss that autocast of CUDA and XPU refuses."""
    return F.binary_cross_entropy(y.float(), torch.zeros(4, 1))


@pytest.mark.parametrize(
    ("device_type", "rules"),
    [
        pytest.param("cuda", ["forbidden"], id="cuda"),
        pytest.param("xpu", ["forbidden"], id="xpu"),
        pytest.param("cpu", [], id="cpu"),
    ],
)
def test_what_torch_forbids_on_the_device_is_an_error(device_type, rules):
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    loss_fn = Calls(compute_binary_cross_entropy)
    result = preflight(model, X, device_type, BF16, loss_fn=loss_fn)
    assert list_rules(result.errors) == rules


@pytest.mark.parametrize(
    ("loss_fn", "rules"),
    [
        pytest.param(torch.mean, ["fp16-loss"], id="mean"),
        pytest.param(lambda y: y.relu().amax(), ["fp16-loss"], id="maximum"),
        pytest.param(lambda y: F.l1_loss(y, y), [], id="in fp32 by the device's lists"),
        pytest.param(lambda y: y.float().mean(), [], id="cast to fp32"),
    ],
)
def test_a_loss_in_fp16_is_found_however_it_was_reduced(loss_fn, rules):
    model = Calls(lambda x: x.half())
    result = preflight(model, X, level=FP16, loss_fn=loss_fn)
    assert list_rules(result.findings) == rules


def test_json_has_report_and_findings(tmp_path):
    model = Calls(lambda x: F.softmax(x.half(), -1))
    result = preflight(model, X, "cpu", FP16)
    assert list_rules(result.findings) == ["half-softmax"]
    assert result.findings == result.report.findings()
    path = tmp_path / "preflight.json"
    result.to_json(path)
    document = json.loads(path.read_text())
    rules = [finding["rule"] for finding in document["findings"]]
    assert rules == ["half-softmax"]
    report_as_json = json.dumps(result.report.to_dict())
    assert document["report"] == json.loads(report_as_json)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "gpt"}, TypeError, "not str"),
        ({"device_type": "cudaa"}, ValueError, "Did you mean 'cuda'"),
        ({"device_type": "tpu"}, ValueError, "'tpu'"),
        ({"level": "float16"}, ValueError, "Did you mean 'fp16'"),
        ({"level": "fp32"}, ValueError, "fp32 is not one of its levels"),
    ],
)
def test_mistakes_are_named(change, error, message):
    arguments = {"model": mlp(), "example_inputs": torch.ones(1, 8)}
    arguments.update(change)
    with pytest.raises(error, match=message):
        preflight(**arguments)


def accumulate_two_backward_passes(x: Tensor) -> None:
    """Run two backward passes into one gradient."""
    weight = x.clone().requires_grad_()
    for _ in range(2):
        loss = (weight * 2).float().sum()
        loss.backward()


def multiply_long_rows(length: int) -> Tensor:
    """Return a product with sums of ``length`` half-precision numbers."""
    number = HALF[0, 0]
    return number.expand(2, length) @ number.expand(length, 2)


class RuleCase:
    """Code that breaks a rule of the findings, and code that keeps it."""

    rule: str

    def broken(self) -> None:
        raise NotImplementedError

    def clean(self) -> None:
        raise NotImplementedError


class Fp16Loss(RuleCase):
    """A loss in fp16."""

    rule = "fp16-loss"

    def broken(self) -> None:
        F.l1_loss(HALF, HALF, reduction="none")

    def clean(self) -> None:
        F.mse_loss(X, X)


class HalfSoftmax(RuleCase):
    """A softmax in half precision."""

    rule = "half-softmax"

    def broken(self) -> None:
        F.softmax(HALF, -1)

    def clean(self) -> None:
        F.softmax(X, -1)


class HalfLogsumexp(RuleCase):
    """A logsumexp in half precision."""

    rule = "half-softmax"

    def broken(self) -> None:
        torch.logsumexp(HALF, -1)

    def clean(self) -> None:
        torch.logsumexp(X, -1)


class SoftmaxOutsideOfAttention(RuleCase):
    """A softmax in half precision, unlike the softmax in the kernel of attention."""

    rule = "half-softmax"

    def broken(self) -> None:
        F.softmax(HALF, -1)

    def clean(self) -> None:
        F.scaled_dot_product_attention(HALF, HALF, HALF)


class HalfNorm(RuleCase):
    """A norm in half precision."""

    rule = "half-norm"

    def broken(self) -> None:
        F.layer_norm(HALF, (4,))

    def clean(self) -> None:
        F.layer_norm(X, (4,))


class LongSum(RuleCase):
    """A sum of many numbers in half precision."""

    rule = "long-sum"

    def broken(self) -> None:
        HALF.expand(1000, 4, 4).sum()

    def clean(self) -> None:
        HALF.expand(100, 4, 4).sum()


class LongProduct(RuleCase):
    """A product with sums of many numbers in half precision."""

    rule = "long-product"

    def broken(self) -> None:
        multiply_long_rows(2**15)

    def clean(self) -> None:
        multiply_long_rows(2**14)


class MixedHalf(RuleCase):
    """A sum of fp16 and bf16."""

    rule = "mixed-half"

    def broken(self) -> None:
        torch.add(HALF, X.bfloat16())

    def clean(self) -> None:
        torch.add(HALF, HALF)


class HalfAccumulation(RuleCase):
    """Gradients of two backward passes that are added in half precision."""

    rule = "half-accumulation"

    def broken(self) -> None:
        accumulate_two_backward_passes(HALF)

    def clean(self) -> None:
        accumulate_two_backward_passes(X)


class HalfReduction(RuleCase):
    """An all-reduce in half precision."""

    rule = "half-reduction"

    def broken(self) -> None:
        dist.all_reduce(HALF.clone())

    def clean(self) -> None:
        dist.all_reduce(X.clone())


def report_rules(function: Callable[[], Any]) -> list[str]:
    """Return the rules of the findings about a function."""
    with precision_report() as report:
        function()
    return list_rules(report.findings())


@on_ranks(2)
@pytest.mark.parametrize("rule_case", RuleCase.__subclasses__())
def test_a_report_has_a_finding_for_a_broken_rule_alone(rule_case):
    case = rule_case()
    assert case.rule in report_rules(case.broken)
    assert case.rule not in report_rules(case.clean)


def make_nested_tensor(layout: torch.layout) -> Tensor:
    """Return a nested tensor of two matrices with different numbers of rows."""
    return torch.nested.as_nested_tensor([X, X[:2]], layout=layout)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make_input",
    [
        pytest.param(X.to_sparse_coo, id="coo"),
        pytest.param(X.to_sparse_csr, id="csr"),
        pytest.param(X.to_sparse_csc, id="csc"),
        pytest.param(lambda: make_nested_tensor(torch.strided), id="strided"),
        pytest.param(lambda: make_nested_tensor(torch.jagged), id="jagged"),
    ],
)
def test_inputs_of_every_layout_are_taken(make_input):
    """Inputs that are not strided stay real, because fake tensors are strided."""
    model = Calls(lambda x: x @ HALF.float())
    result = preflight(model, make_input(), "cuda", FP16)
    for error in result.errors:
        assert "strides" not in error.what
    assert result.report.rows

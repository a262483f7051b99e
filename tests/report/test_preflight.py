"""Preflight: the forward table of a device that is not here, and what may go wrong in it."""

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

X = torch.ones(4, 4)
HALF = X.half()


def ran(result: Any) -> dict[str, Any]:
    return {row.op: row.outputs[0] for row in result.report.rows if row.outputs}


def counted(rows: Any) -> Counter[Any]:
    """Rows, without what torch's fake kernels say of norms' statistics."""
    return Counter(
        replace(row, outputs=row.outputs[:1]) if "norm" in row.op else row for row in rows
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_a_cpu_is_that_of_a_real_forward_pass(name):
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    result = preflight(model, x, "cpu", BF16)
    with precision_report(model) as report, torch.autocast("cpu", BF16):
        model(x)
    assert counted(result.report.rows) == counted(report.rows)
    assert not result.errors


def products(x: Tensor) -> Tensor:
    half = x @ x
    return half.prod() + half.tan().sum() + F.pad(half[None], (1, 0), "reflect").sum()


def test_the_devices_lists_and_a_pins_dtype_show():
    # Both devices' lists have prod as an fp32 op; CUDA's tan, and the CPU's padding.
    for device_type, *wanted in (("cuda", "float32", "float16"), ("cpu", "float16", "float32")):
        found = ran(preflight(Calls(products), X, device_type, FP16))
        given = [found[op] for op in ("mm", "prod", "tan", "reflection_pad1d")]
        assert given == ["float16", "float32", *wanted]
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    set_module_precision(net[1], "bf16")
    rows = preflight(net, X, "cuda", FP16).report.rows
    half = {row.module: row.outputs for row in rows if row.op == "addmm"}
    assert half == {"0": ("float16",), "1": ("bfloat16",), "2": ("float16",)}


def switched(device_type: str | None, **how: Any) -> Any:
    """A product in a region that the model opens."""

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device_type or x.device.type, **how):
            return x @ x

    return Calls(forward)


@pytest.mark.parametrize("device_type", [None, "cuda", "cpu"])
def test_regions_that_the_model_opens_are_followed_by_whatever_name(device_type):
    """As transformers switches autocast off: by the device of an input, or by name."""
    off = preflight(switched(device_type, enabled=False), X, "cuda", FP16)
    assert ran(off)["mm"] == "float32"
    other = preflight(switched(device_type, dtype=BF16), X, "cuda", FP16)
    assert ran(other)["mm"] == "bfloat16"
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
    for _ in range(2):
        with pytest.warns(UserWarning, match="CUDA is not available") as caught:
            region = autocast("cuda", FP16)
        assert len(caught) == 1
        with region:
            assert not torch.is_autocast_enabled("cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = preflight(RegionInside(), X, "cuda", FP16)
        assert ran(result)["addmm"] == "float16"


def test_no_weights_are_needed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(200_000, 300_000), nn.ReLU(), nn.Linear(300_000, 10))
    result = preflight(model, torch.empty(4, 200_000, device="meta"))
    casts = [row for row in result.report.rows if row.module == "0" and row.casts]
    assert sum(row.bytes_read for row in casts) == 4 * (300_000 * 200_001 + 4 * 200_000)
    assert not result.errors


class Assigns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        self.register_buffer("mean", x.mean())
        return torch.rand(2) + x


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    model.append(Assigns())
    state = model.state_dict(keep_vars=True)
    before = {name: (it, it.detach().clone()) for name, it in state.items()}
    random = torch.get_rng_state()
    assert not preflight(model, X).errors
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for name, (tensor, value) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert not hasattr(model[-1], "seen")
    assert torch.equal(torch.get_rng_state(), random)


def masked(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    if mask.all():
        raise AssertionError("another way")
    return x[: int(lengths.max())] @ x.t()


class Factor(nn.Module):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x.cuda() @ x.to("cuda").t() * factor + torch.ones(4, 4, device="cuda")


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Calls(masked), (X, torch.zeros(2, dtype=torch.bool), torch.tensor([1, 3]))),
        (Factor(), (X, 2.0)),
        (Factor(), {"x": X, "factor": 2}),
    ],
    ids=["masks and lengths by value", "by position", "by name"],
)
def test_it_comes_to_the_end(model, inputs):
    result = preflight(model, inputs)
    assert not result.errors
    assert ran(result)["mm"] == "float16"


def test_where_it_cannot_go_on_is_an_error_with_the_module():
    model = nn.Sequential(nn.Linear(8, 8), Calls(lambda x: x @ x), nn.Linear(8, 8))
    result = preflight(model, torch.randn(4, 8))
    (found,) = result.errors
    assert (found.rule, found.module) == ("fails", "1")
    assert "4x8 and 4x8" in found.what
    assert found.what in str(result)
    assert ran(result)["addmm"] == "float16"


@pytest.mark.parametrize(("device_type", "refused"), [("cuda", 1), ("xpu", 1), ("cpu", 0)])
def test_what_torch_forbids_on_the_device_is_an_error(device_type, refused):
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    loss = Calls(lambda y: F.binary_cross_entropy(y.float(), torch.zeros(4, 1)))
    result = preflight(model, X, device_type, BF16, loss_fn=loss)
    assert [each.rule for each in result.errors] == ["forbidden"] * refused


@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [
        (torch.mean, ["fp16-loss"]),
        (lambda y: y.relu().amax(), ["fp16-loss"]),
        (lambda y: F.l1_loss(y, y), []),  # in fp32 by the device's lists
        (lambda y: y.float().mean(), []),
    ],
)
def test_a_loss_in_fp16_is_found_however_it_was_reduced(loss_fn, found):
    half = Calls(lambda x: x.half())
    assert [it.rule for it in preflight(half, X, level=FP16, loss_fn=loss_fn).findings] == found


def test_json_has_report_and_findings(tmp_path):
    result = preflight(Calls(lambda x: F.softmax(x.half(), -1)), X, "cpu", FP16)
    assert [each.rule for each in result.findings] == ["half-softmax"]
    assert result.findings == result.report.findings()
    path = tmp_path / "preflight.json"
    result.to_json(path)
    values = json.loads(path.read_text())
    assert [each["rule"] for each in values["findings"]] == ["half-softmax"]
    assert values["report"] == json.loads(json.dumps(result.report.to_dict()))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "gpt"}, TypeError, "not str"),
        ({"device_type": "cudaa"}, ValueError, "Did you mean 'cuda'"),
        ({"device_type": "tpu"}, ValueError, "'tpu'"),
        ({"level": "float16"}, ValueError, "Did you mean 'fp16'"),
        ({"level": "fp32"}, ValueError, "fp32 is not one of its levels"),
    ],
)
def test_mistakes_are_named(change, error, says):
    arguments = {"model": mlp(), "example_inputs": torch.ones(1, 8)} | change
    with pytest.raises(error, match=says):
        preflight(**arguments)


def twice(x: Tensor) -> None:
    """Two backward passes into one gradient."""
    weight = x.clone().requires_grad_()
    for _ in range(2):
        (weight * 2).float().sum().backward()


# A rule, what breaks it and what does not.
RULES: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    (
        "fp16-loss",
        lambda: F.l1_loss(HALF, HALF, reduction="none"),
        lambda: F.mse_loss(X, X),
    ),
    ("half-softmax", lambda: F.softmax(HALF, -1), lambda: F.softmax(X, -1)),
    ("half-softmax", lambda: torch.logsumexp(HALF, -1), lambda: torch.logsumexp(X, -1)),
    (
        "half-softmax",
        lambda: F.softmax(HALF, -1),
        lambda: F.scaled_dot_product_attention(HALF, HALF, HALF),
    ),
    ("half-norm", lambda: F.layer_norm(HALF, (4,)), lambda: F.layer_norm(X, (4,))),
    ("long-sum", lambda: HALF.expand(1000, 4, 4).sum(), lambda: HALF.expand(100, 4, 4).sum()),
    (
        "long-product",
        lambda: HALF[0, 0].expand(2, 2**15) @ HALF[0, 0].expand(2**15, 2),
        lambda: HALF[0, 0].expand(2, 2**14) @ HALF[0, 0].expand(2**14, 2),
    ),
    ("mixed-half", lambda: HALF + X.bfloat16(), lambda: HALF + HALF),
    ("half-accumulation", lambda: twice(HALF), lambda: twice(X)),
    ("half-reduction", lambda: dist.all_reduce(HALF.clone()), lambda: dist.all_reduce(X.clone())),
]


@on_ranks(2)
@pytest.mark.parametrize("row", range(len(RULES)), ids=lambda row: RULES[row][0])
def test_findings_are_read_off_a_real_report(row):
    rule, *calls = RULES[row]
    found = []
    for call in calls:
        with precision_report() as report:
            call()
        found.append(rule in {each.rule for each in report.findings()})
    assert found == [True, False]


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "strided", "jagged"])
def test_inputs_of_every_layout_are_taken(layout):
    """A fake has no layout but the strided one: what is given in another stays real."""
    if layout in ("strided", "jagged"):
        x = torch.nested.as_nested_tensor([X, X[:2]], layout=getattr(torch, layout))
    else:
        x = getattr(X, f"to_sparse_{layout}")()
    result = preflight(Calls(lambda given: given @ HALF.float()), x, "cuda", FP16)
    assert not [each for each in result.errors if "strides" in each.what]
    assert {row.op for row in result.report.rows}

"""Tests of `precision_report`: its counts, its names of modules, its table and its JSON."""

import copy
import dataclasses
import json
import operator
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import OpLists, precision_report
from distamp.grads import to_local
from distamp.report import PrecisionReport, lost_updates
from distamp.scaler import master_params
from tests.autocast.counting import BF16, FP16, MODELS, Calls, Independent, mlp, transformer
from tests.levels.cells import wrapped
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh

OUTSIDE = "(outside)"
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_A_GPU = (pytest.mark.gpu, NO_GPU)


def train(model: nn.Module, shape: tuple[int, ...], region: Any) -> list[Tensor]:
    """Train on two microbatches in one region, and return the updated weights."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    device = next(model.parameters()).device
    first_batch = torch.randn(shape)
    second_batch = torch.randn(shape)
    with region:
        first_output = model(first_batch.to(device))
        first_loss = first_output.square().mean()
        second_output = model(second_batch.to(device))
        second_loss = second_output.square().mean()
        loss = first_loss + second_loss
    loss.backward()
    optimizer.step()
    return list(model.parameters())


def modules_of(report: PrecisionReport, phase: str = "forward") -> dict[str, str]:
    """Return the module of each operator in a phase."""
    return {row.op: row.module for row in report.rows if row.phase == phase}


def rows_of(report: PrecisionReport, op: str) -> list[Any]:
    """Return the rows of an operator."""
    return [row for row in report.rows if row.op == op]


def modules_and_ops(report: PrecisionReport, phase: str) -> set[tuple[str, str]]:
    """Return the pairs of a module and an operator in a phase."""
    return {(row.module, row.op) for row in report.rows if row.phase == phase}


def casts_by(rows: Any, *attributes: str) -> Counter[Any]:
    """Return the numbers of casts by attributes of their rows, without zeros."""
    counts: Counter[Any] = Counter()
    key = operator.attrgetter(*attributes)
    for row in rows:
        counts[key(row)] += row.casts
    return +counts


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(torch.autocast, id="torch", marks=pytest.mark.slow),
        pytest.param(distamp.autocast, id="distamp"),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", quick_cases(MODELS, quick=["mlp", "conv"]))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_totals_equal_an_independent_count_and_numbers_do_not_change(device, name, dtype, cls):
    """On a GPU, autograd runs the backward pass in another thread."""
    make_model, shape = MODELS[name]
    model = make_model()
    # The simulated CUDA device does not copy buffers.
    unreported_model = copy.deepcopy(model).to(device)
    model.to(device)
    expected = train(unreported_model, shape, cls(device, dtype=dtype))
    with Independent() as count, precision_report(model) as outer, precision_report(model) as inner:
        weights = train(model, shape, cls(device, dtype=dtype))
        assert inner.calls > 0
    assert count.agrees(inner)
    assert inner.rows == outer.rows
    assert count.casts > 4
    for weight, expected_weight in zip(weights, expected, strict=True):
        assert torch.equal(weight, expected_weight)


def test_a_users_cast_is_told_from_autocasts():
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            x.to(torch.float64)
            model(x).float().half()
            torch.softmax(x, -1, dtype=torch.float64)
            torch.empty(2).copy_(torch.ones(2, dtype=torch.int64))
        x.bfloat16()
    causes = casts_by(report.rows, "cause", "function")
    assert causes.pop(("autocast", "linear")) == 3
    for function in ("to", "float", "half", "softmax", "copy", "bfloat16"):
        assert causes.pop(("explicit", function)) == 1
    assert not causes


def test_the_gradient_of_a_cast_has_the_casts_cause_and_module():
    model = nn.Sequential(nn.Linear(4, 4), Calls(Tensor.float), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            out = model(x)
        out.float().sum().backward()
    backward_rows = [row for row in report.rows if row.phase == "backward"]
    casts = casts_by(backward_rows, "module", "cause")
    assert casts == {
        ("0", "autocast"): 2,
        ("1", "explicit"): 1,
        ("2", "autocast"): 3,
        (OUTSIDE, "explicit"): 1,
    }


class Twice(torch.autograd.Function):
    """A function with two explicit casts in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.double().cos().float()


class Nested(nn.Module):
    """A model with nested modules, and with a module that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Sigmoid()))
        self.shared = self.outer[0]
        self.custom = Calls(Twice.apply)

    def forward(self, x: Tensor) -> Tensor:
        exponential = self.outer(x).exp()
        return self.custom(self.shared(exponential))


def test_an_op_belongs_to_the_innermost_module_and_its_gradient_too():
    model = Nested()
    x = torch.ones(2, requires_grad=True)
    with precision_report(model) as report:
        model(x).exp2().sum().backward()
    expected = {"tanh": "outer.0", "sigmoid": "outer.1.0", "exp": "", "exp2": OUTSIDE}
    assert modules_of(report).items() >= expected.items()
    (tanh,) = rows_of(report, "tanh")
    assert tanh.calls == 2, "a shared module counts each use"
    expected = {"tanh_backward": "outer.0", "cos": "custom", "expand": OUTSIDE}
    assert modules_of(report, "backward").items() >= expected.items()
    assert report.casts_by_cause["explicit"] == 2


def test_gradients_of_a_forward_pass_before_the_report_belong_to_no_module():
    model = Nested()
    output = model(torch.ones(2, requires_grad=True))
    with precision_report(model) as report:
        output.sum().backward()
    assert set(modules_of(report, "backward").values()) == {OUTSIDE}


def report_checkpointed_step(implementation: CheckpointImpl) -> tuple[Independent, PrecisionReport]:
    """Return an independent count and the report of a step with a checkpoint under autocast."""
    body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = nn.Sequential(checkpoint_wrapper(body, implementation))
    x = torch.randn(2, 8, requires_grad=True)
    with Independent() as count, precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            out = model(x)
        out.float().sum().backward()
    return count, report


@pytest.mark.parametrize("implementation", CheckpointImpl)
def test_checkpointed_forward_is_counted_again_as_recompute(implementation):
    count, report = report_checkpointed_step(implementation)
    assert count.agrees(report)
    assert modules_of(report, "recompute")["tanh"] == "0.1"
    assert modules_of(report, "backward")["tanh_backward"] == "0.1"


@pytest.mark.parametrize("implementation", CheckpointImpl)
def test_a_recomputed_forward_pass_is_under_autocast_again(implementation):
    _, report = report_checkpointed_step(implementation)
    recomputed_rows = [row for row in report.rows if row.phase == "recompute"]
    products = [row for row in recomputed_rows if row.op == "addmm"]
    assert {row.function for row in products} == {"linear"}
    assert {row.outputs for row in products} == {("bfloat16",)}
    causes = casts_by(recomputed_rows, "cause")
    assert set(causes) == {"autocast"}


def test_another_thread_that_runs_the_model_is_followed():
    model = mlp()

    def work() -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            out = model(torch.randn(4, 8))
        torch.ones(2).exp()
        return out

    with precision_report(model) as report, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work) for _ in range(6)]
        outputs = torch.stack([future.result() for future in futures])
        outputs.float().sum().backward()
    calls = {row.module: row.calls for row in rows_of(report, "addmm")}
    assert calls == {"0": 6, "3": 6}
    assert modules_of(report, "backward")["native_layer_norm_backward"] == "2"
    message = "operators of the thread outside of the model are not counted"
    assert "exp" not in modules_of(report), message


@pytest.mark.parametrize("lengths", [(5000, 3), (3, 5000)])
def test_the_longest_sum_of_several_is_found(lengths):
    with precision_report() as report:
        for length in lengths:
            torch.ones(length, dtype=BF16).sum()
    (row,) = rows_of(report, "sum")
    assert row.length == 5000
    assert [finding.rule for finding in report.findings()] == ["long-sum"]


def test_findings_print_a_line_each_and_similar_modules_once():
    model = nn.Sequential(nn.Softmax(-1), nn.Softmax(-1))
    with precision_report(model) as report:
        assert str(report.findings()) == "no findings"
        model(torch.ones(2, 4, dtype=BF16))
    first, second = report.findings()
    assert first.module == "0"
    assert second.module == "1"
    assert str(second).startswith("warning: 1, softmax [half-softmax]: softmax in bfloat16")
    text = str(report.findings())
    assert text.startswith("warning: *, softmax [half-softmax]: softmax in bfloat16")
    assert "\n" not in text


FORWARD = {("0", "addmm"), ("1", "relu"), ("2", "native_layer_norm"), ("3", "addmm")}
BACKWARD = {("0", "mm"), ("1", "threshold_backward"), ("2", "native_layer_norm_backward")}


@on_ranks(2)
@pytest.mark.parametrize("kind", ["DDP", "FSDP1", "FSDP2"])
def test_a_wrapper_changes_no_name_and_hides_no_kernel(kind):
    """FSDP2 casts by its policy, and the other wrappers run under autocast."""
    uses_autocast = kind != "FSDP2"
    param_dtype = None if uses_autocast else BF16
    model = wrapped(mlp(), kind, param_dtype, "")
    x = torch.randn(4, 8)
    with Independent() as count, precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16, enabled=uses_autocast):
            out = model(x)
        out.float().sum().backward()
    assert count.agrees(report)
    assert count.casts > 0
    assert modules_and_ops(report, "forward") >= FORWARD
    assert modules_and_ops(report, "backward") >= BACKWARD
    causes = casts_by(report.rows, "cause")
    assert ("autocast" in causes) is uses_autocast


def make_compiled_model() -> nn.Module:
    """Return a compiled model."""
    compiled: Any = torch.compile(mlp(), backend="aot_eager")
    return compiled


def make_model_of_wrapped_modules() -> nn.Module:
    """Return a model with a checkpointed and a compiled module, under DataParallel."""
    linear, relu, norm, head = mlp()
    checkpointed = checkpoint_wrapper(linear)
    compiled: Any = torch.compile(relu, backend="eager")
    return nn.DataParallel(nn.Sequential(checkpointed, compiled, norm, head))


def make_model_with_a_module_named_module() -> nn.Module:
    """Return a model with a submodule that has the name of a wrapper's submodule."""
    return nn.Sequential(OrderedDict(module=nn.Linear(8, 8), other=nn.ReLU()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("make_model", "expected"),
    [
        pytest.param(make_compiled_model, FORWARD, id="compiled"),
        pytest.param(make_model_of_wrapped_modules, FORWARD, id="wrapped modules"),
        pytest.param(
            make_model_with_a_module_named_module, {("module", "addmm")}, id="named module"
        ),
    ],
)
def test_compiled_and_wrapped_modules_have_plain_names(make_model, expected):
    model = make_model()
    x = torch.randn(4, 8)
    with Independent() as count, precision_report(model) as report:
        model(x)
    assert count.agrees(report)
    assert modules_and_ops(report, "forward") >= expected


@pytest.fixture(scope="module")
def report() -> PrecisionReport:
    head = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model = nn.Sequential(transformer(), head)
    with precision_report(model) as report:
        train(model, (2, 5, 8), torch.autocast("cpu", dtype=BF16))
    return report


def test_the_table_has_modules_alike_as_one_and_those_of_two_classes_apart(report):
    heading, *lines = report.table().splitlines()
    assert f"{report.casts:,} casts" in heading
    similar_modules = [line for line in lines if "0.*.linear1" in line]
    assert len(similar_modules) == 2, "forward and backward"
    modules_and_functions = set()
    for line in lines:
        if "forward" in line:
            _, module, function, *_ = line.split()
            modules_and_functions.add((module, function))
    assert modules_and_functions >= {("1.0", "linear"), ("1.1", "layer_norm")}


def test_a_table_that_is_not_collapsed_has_a_line_for_each_module(report):
    lines = report.table(collapse=False).splitlines()
    first_module = [line for line in lines if "0.0.linear1" in line]
    assert len(first_module) == 2, "forward and backward"


def test_a_table_with_views_has_every_call(report):
    _, columns, *lines = report.table(views=True).splitlines()
    start = columns.index("calls")
    calls = 0
    for line in lines:
        number = line[start : start + 5]
        calls += int(number.replace(",", ""))
    assert calls == report.calls


def test_what_is_marked_for_a_profiler_is_no_row_of_the_table():
    """An optimizer marks its step with such a record."""
    model = nn.Linear(2, 2)
    with precision_report(model) as report:
        model(torch.ones(1, 2)).sum().backward()
        rows = str(report).splitlines()[1:]
        with torch.profiler.record_function("a step of the user"):
            pass
    assert str(report).splitlines()[1:] == rows


def test_settings_name_the_region_or_the_pin_of_each_module():
    first, pinned, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, pinned, last)
    distamp.set_module_precision(pinned, "fp32")
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            hidden = first(torch.ones(2, 4))
            hidden = pinned(hidden)
        last(hidden)
    expected = {"0": "autocast bf16", "1": "pinned to fp32 by 1", "2": "outside of a region"}
    assert report.settings == expected
    assert report.to_dict()["settings"] == expected


@pytest.mark.parametrize(("rate", "share"), [(1e-4, 1.0), (0.1, 0.0)])
def test_the_share_of_updates_below_half_an_ulp(rate, share):
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> None:
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        optimizer.step()

    assert lost_updates(step, model) == {"": share}
    changed_weights = model.weight.bfloat16() != 1
    share_of_changed_weights = changed_weights.float().mean().item()
    assert share_of_changed_weights == 1 - share, "rounding the weights gives the same share"


@pytest.mark.parametrize("compiled_part", [None, "model", "submodule", "function", "loss"])
def test_a_report_says_that_compiled_code_ran_eagerly(compiled_part, fresh_dynamo):
    """A report about an eager step has no such note, although a compiled module exists."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    forward: Any = model
    loss_fn: Any = torch.sum
    torch.compile(nn.Linear(4, 4), backend="eager")
    if compiled_part == "model":
        forward = torch.compile(model, backend="eager")
    elif compiled_part == "submodule":
        model[1].compile(backend="eager")
    elif compiled_part == "function":
        forward = torch.compile(lambda x: model(x), backend="eager")
    elif compiled_part == "loss":
        loss_fn = torch.compile(lambda x: x.sum(), backend="eager")
    with precision_report(model) as report:
        loss = loss_fn(forward(torch.ones(2, 4)))
        loss.backward()
    number_of_notes = 0 if compiled_part is None else 1
    assert str(report).count("compiled code ran eagerly") == number_of_notes
    assert len(report.notes) == number_of_notes
    assert report.to_dict()["notes"] == list(report.notes)


def test_a_step_of_complex_parameters_is_reported():
    weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=False)
    model = Calls(lambda x: (weight * x).abs().sum())
    with precision_report(model) as report:
        model(torch.ones(4)).backward()
        optimizer.step()
    assert weight[0].real < 1.0
    assert rows_of(report, "mul")


def test_the_json_file_has_every_row_with_its_fields(report, tmp_path):
    path = tmp_path / "report.json"
    report.to_json(path)
    document = json.loads(path.read_text())
    assert document["format"] == 2
    assert document["model"] == report.model
    for json_row, row in zip(document["rows"], report.rows, strict=True):
        fields = dataclasses.asdict(row)
        fields["inputs"] = list(row.inputs)
        fields["outputs"] = list(row.outputs)
        assert json_row == fields


def test_the_json_file_has_the_totals_of_its_rows(report, tmp_path):
    path = tmp_path / "report.json"
    report.to_json(path)
    totals = json.loads(path.read_text())["totals"]
    for name in ("calls", "casts", "bytes_read", "bytes_written"):
        numbers = [getattr(row, name) for row in report.rows]
        assert totals[name] == sum(numbers)
    for cause in ("autocast", "explicit", "autograd"):
        casts = [row.casts for row in report.rows if row.cause == cause]
        assert totals[f"{cause}_casts"] == sum(casts)


def test_the_rows_that_an_op_list_changes_are_a_difference_of_sets():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.ones(2, 4)
    with precision_report(model) as default_report, distamp.autocast("cpu", BF16):
        model(x)
    fp32_linear = OpLists(fp32={"linear"})
    with precision_report(model) as report, distamp.autocast("cpu", BF16, ops=fp32_linear):
        model(x)
    changed_rows = set(report.rows) - set(default_report.rows)
    dtypes_of_linear = {row.outputs for row in changed_rows if row.op == "addmm"}
    dtypes_of_relu = {row.outputs for row in changed_rows if row.function == "relu"}
    assert dtypes_of_linear == {("float32",)}
    assert dtypes_of_relu == {("float32",)}


def test_a_function_in_place_of_a_model_is_refused():
    report = precision_report(mlp)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not function"):
        report.__enter__()


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(nn.Linear(2, 2), id="a module"),
        pytest.param(nn.Sequential(nn.Linear(2, 2)), id="a module with a submodule"),
    ],
)
def test_a_traced_module_is_refused_by_its_name(module):
    traced = torch.jit.trace(module, torch.ones(2))
    model = nn.Sequential(nn.ReLU(), traced)
    report = precision_report(model)
    message = "Module '1' is scripted or traced"
    with pytest.raises(TypeError, match=message):
        report.__enter__()


def accumulate_gradients(
    level: str, layout: str, reduce_fp32: bool
) -> tuple[float, set[str], set[str]]:
    """Accumulate the gradients 2**k, 1 and -2**k with a sum of 1, which half precision rounds to 0.

    Return the sum of the gradients, and the modules and operators of the findings about it.
    """
    large = 256.0 if "bf16" in level else 2048.0
    model: Any = nn.Sequential(nn.Linear(4, 2, bias=False))
    distamp.cast_model(model, level)
    if layout == "FSDP2":
        reduce_dtype = torch.float32 if reduce_fp32 else None
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        shard = mesh((2,), ("shard",))
        fully_shard(model, mesh=shard, mp_policy=policy)
    elif layout == "HSDP":
        grid = mesh((2, 1), ("copies", "shard"))
        fully_shard(model, mesh=grid)
    elif layout == "DDP":
        model = DistributedDataParallel(model)
    elif layout == "FSDP1":
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {}
    if level == "fp16-O2":
        settings["init_scale"] = 1.0
    amp = distamp.initialize(model, optimizer, level, **settings)
    with precision_report(model) as report:
        for index, size in enumerate((large, 1.0, -large)):
            sync = amp.no_sync() if reduce_fp32 and index < 2 else nullcontext()
            with sync:
                output = amp.model(torch.full((1, 4), size))
                loss = output.float().sum()
                amp.backward(loss)
    amp.scaler.unscale_(optimizer)
    total = 0.0
    for param in master_params(optimizer):
        if param.grad is not None:
            grad = to_local(param.grad)
            total += grad.float().sum().item()
    accumulations = []
    for finding in report.findings():
        if finding.rule == "half-accumulation":
            accumulations.append(finding)
    modules = {finding.module for finding in accumulations}
    ops = {finding.op for finding in accumulations}
    return total, modules, ops


def check_gradient_is_lost(level: str, layout: str, module: str) -> None:
    """Assert that a gradient is lost, and that a finding names its module and operator."""
    total, modules, ops = accumulate_gradients(level, layout, reduce_fp32=False)
    assert total == 0.0, "the gradient of 1 is lost"
    assert ops == {"accumulate_grad (add)"}
    assert modules == {module}


@on_ranks(2)
@pytest.mark.parametrize("level", ["fp16-O2", "fp16-O3", "bf16-O2", "bf16-O3"])
def test_a_finding_names_gradients_that_a_level_adds_up_in_half_precision(level):
    check_gradient_is_lost(level, "FSDP2", "0")


@on_ranks(2)
@pytest.mark.parametrize("layout", ["HSDP", "DDP", "one process"])
def test_a_finding_names_gradients_that_a_layout_adds_up_in_half_precision(layout):
    check_gradient_is_lost("bf16-O2", layout, "0")


@on_ranks(2)
def test_gradients_that_fsdp1_adds_up_in_half_precision_belong_to_no_module():
    """FSDP1 accumulates the gradient of its flat parameter."""
    check_gradient_is_lost("bf16-O3", "FSDP1", OUTSIDE)


@on_ranks(2)
@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
def test_nothing_is_found_where_fsdp2_reduces_once_in_float32(level):
    total, modules, _ = accumulate_gradients(level, "FSDP2", reduce_fp32=True)
    assert total == 4.0, "a row of four ones on each rank"
    assert modules == set()

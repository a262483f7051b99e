"""What a precision report counts, beside an independent count; where it happened; how it reads."""

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
from tests.ranks import mesh

OUTSIDE = "(outside)"
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_A_GPU = (pytest.mark.gpu, NO_GPU)


def train(model: nn.Module, shape: tuple[int, ...], region: Any) -> list[Tensor]:
    """Two microbatches in one region, and an optimizer step; the weights after it."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    with region:
        device = next(model.parameters()).device
        microbatches = [torch.randn(shape).to(device) for _ in range(2)]
        losses = [model(microbatch).square().mean() for microbatch in microbatches]
    sum(losses).backward()
    optimizer.step()
    return list(model.parameters())


def modules_of(report: PrecisionReport, phase: str = "forward") -> dict[str, str]:
    return {row.op: row.module for row in report.rows if row.phase == phase}


def casts_by(rows: Any, *names: str) -> Counter[Any]:
    """How many casts there are by these attributes of rows, where there are any."""
    counts: Counter[Any] = Counter()
    for row in rows:
        counts[operator.attrgetter(*names)(row)] += row.casts
    return +counts


@pytest.mark.parametrize("cls", [torch.autocast, distamp.autocast], ids=["torch", "distamp"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_totals_equal_an_independent_count_and_numbers_do_not_change(device, name, dtype, cls):
    """On a GPU backward runs in a thread of autograd's own."""
    make, shape = MODELS[name]
    model = make().to(device)
    plain = train(copy.deepcopy(model), shape, cls(device, dtype=dtype))
    with Independent() as count, precision_report(model) as outer, precision_report(model) as inner:
        reported = train(model, shape, cls(device, dtype=dtype))
        assert inner.calls > 0
    assert count.agrees(inner)
    assert inner.rows == outer.rows
    assert count.casts > 4
    assert all(map(torch.equal, reported, plain))


def test_a_users_cast_is_told_from_autocasts():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
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
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            out = model(torch.randn(2, 4))
        out.float().sum().backward()
    casts = casts_by([r for r in report.rows if r.phase == "backward"], "module", "cause")
    by_hand = {("1", "explicit"): 1, (OUTSIDE, "explicit"): 1}
    assert casts == {("0", "autocast"): 2, ("2", "autocast"): 3, **by_hand}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.double().cos().float()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Sigmoid()))
        self.again, self.custom = self.outer[0], Calls(Twice.apply)

    def forward(self, x: Tensor) -> Tensor:
        return self.custom(self.again(self.outer(x).exp()))


def test_an_op_belongs_to_the_innermost_module_and_its_gradient_too():
    model, x = Nested(), torch.ones(2, requires_grad=True)
    before = model(x)
    with precision_report(model) as report:
        model(x).exp2().sum().backward()
    expected = {"tanh": "outer.0", "sigmoid": "outer.1.0", "exp": "", "exp2": OUTSIDE}
    assert modules_of(report).items() >= expected.items()
    assert [row.calls for row in report.rows if row.op == "tanh"] == [2], "shared, so once a use"
    expected = {"tanh_backward": "outer.0", "cos": "custom", "expand": OUTSIDE}
    assert modules_of(report, "backward").items() >= expected.items()
    assert report.casts_by_cause["explicit"] == 2
    with precision_report(model) as report:
        before.sum().backward()
    assert set(modules_of(report, "backward").values()) == {OUTSIDE}


@pytest.mark.parametrize("how", CheckpointImpl)
def test_checkpointed_forward_is_counted_again_as_recompute(how):
    body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = nn.Sequential(checkpoint_wrapper(body, how))
    with Independent() as count, precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            out = model(torch.randn(2, 8, requires_grad=True))
        out.float().sum().backward()
    assert count.agrees(report)
    assert modules_of(report, "recompute")["tanh"] == "0.1"
    assert modules_of(report, "backward")["tanh_backward"] == "0.1"
    recomputed = [row for row in report.rows if row.phase == "recompute"]
    products = {(row.function, row.outputs) for row in recomputed if row.op == "addmm"}
    assert products == {("linear", ("bfloat16",))}
    assert {row.cause for row in recomputed if row.casts} == {"autocast"}


def test_another_thread_that_runs_the_model_is_followed():
    model = mlp()

    def work() -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            out = model(torch.randn(4, 8))
        torch.ones(2).exp()
        return out

    with precision_report(model) as report, ThreadPoolExecutor(2) as pool:
        outputs = [pool.submit(work) for _ in range(6)]
        sum(out.result().float().sum() for out in outputs).backward()
    calls = Counter({row.module: row.calls for row in report.rows if row.op == "addmm"})
    assert calls == {"0": 6, "3": 6}
    assert modules_of(report, "backward")["native_layer_norm_backward"] == "2"
    assert "exp" not in modules_of(report), "the thread itself was not asked about"


@pytest.mark.parametrize("lengths", [(5000, 3), (3, 5000)])
def test_the_longest_sum_of_several_is_found(lengths):
    with precision_report() as report:
        for length in lengths:
            torch.ones(length, dtype=BF16).sum()
    assert [row.length for row in report.rows if row.op == "sum"] == [5000]
    assert [finding.rule for finding in report.findings()] == ["long-sum"]


def test_findings_print_a_line_each_and_similar_modules_once():
    model = nn.Sequential(nn.Softmax(-1), nn.Softmax(-1))
    with precision_report(model) as report:
        assert str(report.findings()) == "no findings"
        model(torch.ones(2, 4, dtype=BF16))
    findings = report.findings()
    assert str(findings[1]).startswith("warning: 1, softmax [half-softmax]: softmax in bfloat16")
    assert [finding.module for finding in findings] == ["0", "1"]
    assert str(findings).startswith("warning: *, softmax [half-softmax]: softmax in bfloat16")
    assert str(findings).count("\n") == 0


# Models in torch's wrappers: names as without them, nothing missed.

FORWARD = {("0", "addmm"), ("1", "relu"), ("2", "native_layer_norm"), ("3", "addmm")}
BACKWARD = {("0", "mm"), ("1", "threshold_backward"), ("2", "native_layer_norm_backward")}


@on_ranks(2)
@pytest.mark.parametrize("kind", ["DDP", "FSDP1", "FSDP2"])
def test_a_wrapper_changes_no_name_and_hides_no_kernel(kind):
    model = wrapped(mlp(), kind, BF16 if kind == "FSDP2" else None, "")
    with Independent() as count, precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16, enabled=kind != "FSDP2"):
            out = model(torch.randn(4, 8))
        out.float().sum().backward()
    assert count.agrees(report)
    assert count.casts > 0
    for phase, expected in (("forward", FORWARD), ("backward", BACKWARD)):
        assert expected <= {(row.module, row.op) for row in report.rows if row.phase == phase}
    autocasts = any(row.casts and row.cause == "autocast" for row in report.rows)
    assert autocasts is (kind != "FSDP2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_traced_and_wrapped_modules_have_plain_names():
    x, compiled = torch.randn(4, 8), torch.compile(nn.ReLU(), backend="eager")
    parts = nn.Sequential(checkpoint_wrapper(mlp()[0]), compiled, *mlp()[2:])
    inside = nn.Sequential(OrderedDict(module=nn.Linear(8, 8), other=nn.ReLU()))
    whole: list[tuple[Any, Any]] = [
        (torch.compile(mlp(), backend="aot_eager"), FORWARD),
        (nn.DataParallel(parts), FORWARD),
        (inside, {("module", "addmm")}),
    ]
    for model, expected in whole:
        with Independent() as count, precision_report(model) as report:
            model(x)
        assert count.agrees(report)
        assert {(row.module, row.op) for row in report.rows} >= expected


# The table and the JSON of a report.


@pytest.fixture(scope="module")
def report() -> PrecisionReport:
    model = nn.Sequential(transformer(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    with precision_report(model) as report:
        train(model, (2, 5, 8), torch.autocast("cpu", dtype=BF16))
    return report


def test_the_table_has_modules_alike_as_one_and_those_of_two_classes_apart(report):
    lines = report.table().splitlines()
    assert f"{report.casts:,} casts" in lines[0]
    assert sum("0.*.linear1" in line for line in lines) == 2, "forward and backward"
    assert sum("0.0.linear1" in line for line in report.table(collapse=False).splitlines()) == 2
    forward = [line.split() for line in lines if "forward" in line]
    named = {(module, op) for _, module, op, *_ in forward}
    assert named >= {("1.0", "linear"), ("1.1", "layer_norm")}
    lines = report.table(views=True).splitlines()
    column = lines[1].index("calls")
    shown = [int(line[column : column + 5].replace(",", "")) for line in lines[2:]]
    assert sum(shown) == report.calls


def test_what_is_marked_for_a_profiler_is_no_row_of_the_table():
    """As an optimizer marks its step."""
    model = nn.Linear(2, 2)
    with precision_report(model) as report:
        model(torch.ones(1, 2)).sum().backward()
        rows = str(report).splitlines()[1:]
        with torch.profiler.record_function("mine"):
            pass
    assert str(report).splitlines()[1:] == rows


def test_settings_name_the_region_or_the_pin_of_each_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    distamp.set_module_precision(model[1], "fp32")
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            y = model[1](model[0](torch.ones(2, 4)))
        model[2](y)
    expected = {"0": "autocast bf16", "1": "pinned to fp32 by 1", "2": "outside of a region"}
    assert report.settings == expected
    assert report.to_dict()["settings"] == expected


@pytest.mark.parametrize(("rate", "lost"), [(1e-4, 1.0), (0.1, 0.0)])
def test_the_share_of_updates_below_half_an_ulp(rate, lost):
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    assert lost_updates(step, model) == {"": lost}
    kept = (model.weight.bfloat16() != 1).float().mean().item()
    assert kept == 1 - lost, "as rounding itself has it"


@pytest.mark.parametrize("how", ["eager", "model", "submodule", "function", "loss"])
def test_a_report_says_that_compiled_code_ran_eagerly(how, fresh_dynamo):
    """And of an eager step it says nothing, beside compiled code that does not run."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    call, loss = model, torch.sum
    torch.compile(nn.Linear(4, 4), backend="eager")
    if how == "model":
        call = torch.compile(model, backend="eager")
    elif how == "submodule":
        model[1].compile(backend="eager")
    elif how == "function":
        call = torch.compile(lambda x: model(x), backend="eager")
    elif how == "loss":
        loss = torch.compile(lambda x: x.sum(), backend="eager")
    with precision_report(model) as report:
        loss(call(torch.ones(2, 4))).backward()
    lines = [line for line in str(report).splitlines() if "compiled code ran eagerly" in line]
    assert len(lines) == (how != "eager")
    assert len(report.notes) == (how != "eager")
    assert report.to_dict()["notes"] == list(report.notes)


def test_a_step_of_complex_parameters_is_reported():
    weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=False)
    model = Calls(lambda x: (weight * x).abs().sum())
    with precision_report(model) as report:
        model(torch.ones(4)).backward()
        optimizer.step()
    assert weight[0].real < 1.0
    assert any(row.op == "mul" for row in report.rows)


def test_the_json_file_has_every_row_with_its_fields(report, tmp_path):
    path = tmp_path / "report.json"
    report.to_json(path)
    values = json.loads(path.read_text())
    assert (values["format"], values["model"]) == (2, report.model)
    assert len(values["rows"]) == len(report.rows)
    for written, row in zip(values["rows"], report.rows, strict=True):
        fields = dataclasses.asdict(row)
        fields["inputs"] = list(row.inputs)
        fields["outputs"] = list(row.outputs)
        assert written == fields
    totals = values["totals"]
    for name in ("calls", "casts", "bytes_read", "bytes_written"):
        assert totals[name] == sum(getattr(row, name) for row in report.rows)
    for cause in ("autocast", "explicit", "autograd"):
        casts = [row.casts for row in report.rows if row.cause == cause]
        assert totals[f"{cause}_casts"] == sum(casts)


def test_the_rows_that_an_op_list_changes_are_a_difference_of_sets():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    reports = []
    for op_lists in (None, OpLists(fp32={"linear"})):
        with precision_report(model) as report, distamp.autocast("cpu", BF16, ops=op_lists):
            model(x)
        reports.append(report)
    changed = set(reports[1].rows) - set(reports[0].rows)
    assert {row.outputs for row in changed if row.op == "addmm"} == {("float32",)}
    assert {row.outputs for row in changed if row.function == "relu"} == {("float32",)}


def of_traced(inside: nn.Module) -> None:
    model = nn.Sequential(nn.ReLU(), torch.jit.trace(inside, torch.ones(2)))
    precision_report(model).__enter__()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: precision_report(mlp).__enter__(),  # type: ignore[arg-type]
            TypeError,
            r"torch\.nn\.Module, not function",
        ),
        (lambda: of_traced(nn.Linear(2, 2)), TypeError, "Module '1' is scripted or traced"),
        (
            lambda: of_traced(nn.Sequential(nn.Linear(2, 2))),
            TypeError,
            "Module '1' is scripted or traced",
        ),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def _accumulated(level: str, layout: str, reduce_fp32: bool) -> tuple[float, set[str], set[str]]:
    """The sum of three gradients, 2**k + 1 - 2**k, and the modules and rules of the findings."""
    large = 256.0 if "bf16" in level else 2048.0
    model: Any = nn.Sequential(nn.Linear(4, 2, bias=False))
    distamp.cast_model(model, level)
    if layout == "FSDP2":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if reduce_fp32 else None)
        fully_shard(model, mesh=mesh((2,), ("shard",)), mp_policy=policy)
    elif layout == "HSDP":
        fully_shard(model, mesh=mesh((2, 1), ("copies", "shard")))
    elif layout == "DDP":
        model = DistributedDataParallel(model)
    elif layout == "FSDP1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scale = {"init_scale": 1.0} if level == "fp16-O2" else {}
    amp = distamp.initialize(model, optimizer, level, **scale)
    with precision_report(model) as report:
        for index, size in enumerate((large, 1.0, -large)):
            with amp.no_sync() if reduce_fp32 and index < 2 else nullcontext():
                amp.backward(amp.model(torch.full((1, 4), size)).float().sum())
    amp.scaler.unscale_(optimizer)
    grads = [to_local(p.grad) for p in master_params(optimizer) if p.grad is not None]
    accumulations = [
        finding for finding in report.findings() if finding.rule == "half-accumulation"
    ]
    total = sum(grad.float().sum().item() for grad in grads)
    modules = {finding.module for finding in accumulations}
    ops = {finding.op for finding in accumulations}
    return total, modules, ops


@on_ranks(2)
@pytest.mark.parametrize(
    ("level", "layout"),
    [
        *((level, "FSDP2") for level in ("fp16-O2", "fp16-O3", "bf16-O2", "bf16-O3")),
        ("bf16-O2", "HSDP"),
        ("bf16-O2", "DDP"),
        ("bf16-O2", "one process"),
        ("bf16-O3", "FSDP1"),
    ],
)
def test_findings_name_gradients_that_are_added_up_in_half_precision(level, layout):
    total, modules, ops = _accumulated(level, layout, reduce_fp32=False)
    assert total == 0.0, "the one is lost"
    assert ops == {"accumulate_grad (add)"}
    assert modules == {OUTSIDE if layout == "FSDP1" else "0"}


@on_ranks(2)
@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
def test_nothing_is_found_where_fsdp2_reduces_once_in_float32(level):
    total, modules, _ = _accumulated(level, "FSDP2", reduce_fp32=True)
    assert total == 4.0, "a row of four ones on each rank"
    assert modules == set()

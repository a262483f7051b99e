"""What a precision report counts: as an independent dispatch mode does, and where it happened."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import distamp
from distamp import OpLists, PrecisionReport, precision_report
from tests.autocast.counting import (
    BF16,
    FP16,
    MODELS,
    Calls,
    Independent,
    mlp,
    transformer,
)

OUTSIDE = "(outside)"


def train(model: nn.Module, shape: tuple[int, ...], region: Any) -> None:
    """Two microbatches in one region, and an optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters())
    with region:
        losses = [model(torch.randn(shape)).square().mean() for _ in range(2)]
    sum(losses).backward()
    optimizer.step()


@pytest.mark.parametrize("cls", [torch.autocast, distamp.autocast], ids=["torch", "distamp"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_totals_equal_an_independent_count(name, dtype, cls):
    make, shape = MODELS[name]
    model = make()
    with Independent() as count, precision_report(model) as outer, precision_report(model) as inner:
        assert inner.rows == ()
        train(model, shape, cls("cpu", dtype=dtype))
        assert inner.totals.calls > 0
    assert count.agrees(inner)
    assert inner.rows == outer.rows
    assert count.casts > 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mlp", "transformer", "conv"])
def test_totals_equal_an_independent_count_on_a_gpu(name):
    """Backward runs in a thread of autograd's own there."""
    make, shape = MODELS[name]
    model = make().cuda()
    with Independent() as count, precision_report(model) as report:
        with distamp.autocast("cuda", FP16):
            out = model(torch.randn(shape, device="cuda"))
        out.float().sum().backward()
    assert count.agrees(report)
    assert count.casts
    backward = {row.module for row in report.rows if row.phase == "backward"}
    assert backward >= {row.module for row in report.rows if row.op == "addmm"}


def test_a_users_cast_is_told_from_autocasts():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            x.to(torch.float64)
            model(x).float().half()
            torch.softmax(x, -1, dtype=torch.float64)
            torch.empty(2).copy_(torch.ones(2, dtype=torch.int64))
        x.bfloat16()
    causes: Counter[Any] = Counter()
    for row in report.rows:
        causes[row.cause, row.function] += row.casts
    by_hand = ("to", "float", "half", "softmax", "copy", "bfloat16")
    assert +causes == {("autocast", "linear"): 3, **{("explicit", name): 1 for name in by_hand}}


class Converts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).float())


def test_the_gradient_of_a_cast_has_the_casts_cause_and_module():
    model = Converts()
    with precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            out = model(torch.randn(2, 4))
        out.float().sum().backward()
    casts: Counter[Any] = Counter()
    for row in report.rows:
        if row.phase == "backward":
            casts[row.module, row.cause] += row.casts
    assert +casts == {
        ("a", "autocast"): 2,
        ("b", "autocast"): 3,
        ("", "explicit"): 1,
        (OUTSIDE, "explicit"): 1,
    }


def test_casts_of_op_lists_are_autocasts():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    lists = OpLists(fp32={"linear"}, lower_precision={"softmax"})
    with precision_report(model) as report, distamp.autocast("cpu", BF16, ops=lists):
        model(torch.randn(4, 8))
    ran = {row.op: row.outputs for row in report.rows if row.op in ("addmm", "_softmax")}
    assert ran == {"addmm": ("float32",), "_softmax": ("bfloat16",)}
    assert {row.cause for row in report.rows if row.casts} == {"autocast"}


def test_inference_is_counted_and_outside_of_regions_nothing_is_cast():
    model = mlp()
    for mode, region, casts in (
        (torch.inference_mode(), torch.autocast("cpu", dtype=BF16), True),
        (nullcontext(), nullcontext(), False),
    ):
        with Independent() as count, precision_report(model) as report, mode, region:
            model(torch.randn(4, 8))
        assert count.agrees(report)
        assert report.totals.autocast_casts == report.totals.casts
        assert bool(report.totals.casts) is casts


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Sigmoid()))
        self.again = self.outer[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.outer(x).exp())


def modules_of(report: PrecisionReport, phase: str = "forward") -> dict[str, str]:
    return {row.op: row.module for row in report.rows if row.phase == phase}


def test_an_op_belongs_to_the_innermost_module_and_its_gradient_too():
    model, x = Nested(), torch.ones(2, requires_grad=True)
    before = model(x)
    with precision_report(model) as report:
        model(x).exp2().sum().backward()
    found = modules_of(report)
    assert found["exp2"] == found["sum"] == OUTSIDE
    assert {op: found[op] for op in ("tanh", "sigmoid", "exp")} == {
        "tanh": "outer.0",
        "sigmoid": "outer.1.0",
        "exp": "",
    }
    assert [row.calls for row in report.rows if row.op == "tanh"] == [2], "shared, so once a use"
    found = modules_of(report, "backward")
    assert (found["tanh_backward"], found["sigmoid_backward"]) == ("outer.0", "outer.1.0")
    assert found["expand"] == OUTSIDE, "the gradient of the sum"
    with precision_report(model) as report:
        before.sum().backward()
    assert set(modules_of(report, "backward").values()) == {OUTSIDE}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.double().sin().float()


def test_the_gradient_of_a_custom_function_belongs_to_its_module():
    model = nn.Sequential(nn.Identity(), Calls(Twice.apply))
    with precision_report(model) as report:
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert modules_of(report, "backward")["sin"] == "1"
    assert report.totals.explicit_casts == 2


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forward_is_counted_again_as_recompute(reentrant):
    model = Checkpointed(reentrant)
    with Independent() as count, precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16):
            out = model(torch.randn(2, 8, requires_grad=True))
        out.float().sum().backward()
    assert count.agrees(report)
    assert modules_of(report, "recompute")["tanh"] == "body.1"
    assert modules_of(report, "backward")["tanh_backward"] == "body.1"
    again = {row.outputs for row in report.rows if (row.phase, row.op) == ("recompute", "addmm")}
    assert again == {("bfloat16",)}


class Bad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_a_module_or_a_block_that_raises_is_left_again():
    model = nn.Sequential(nn.Linear(2, 2), Bad())
    with contextlib.suppress(ZeroDivisionError), precision_report(model) as report:
        with contextlib.suppress(ZeroDivisionError):
            model(torch.ones(2))
        torch.ones(2).exp()
        model(torch.ones(2))
    assert modules_of(report)["exp"] == OUTSIDE
    calls = report.totals.calls
    model[0](torch.ones(2))
    assert report.totals.calls == calls
    hooks = [(it._forward_hooks, it._forward_pre_hooks) for it in model.modules()]
    assert not any(map(any, hooks))


def test_another_thread_that_runs_the_model_is_followed():
    model, outputs = mlp(), []

    def work() -> None:
        for _ in range(3):
            with torch.autocast("cpu", dtype=BF16):
                outputs.append(model(torch.randn(4, 8)))
        torch.ones(2).exp()

    with precision_report(model) as report:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sum(out.float().sum() for out in outputs).backward()
    calls = Counter({row.module: row.calls for row in report.rows if row.op == "addmm"})
    assert calls == {"0": 6, "3": 6}
    assert modules_of(report, "backward")["native_layer_norm_backward"] == "2"
    assert "exp" not in modules_of(report), "the thread itself was not asked about"


def test_replicas_have_the_models_names_and_copies_carry_no_recorder():
    model, buffer = mlp(), io.BytesIO()
    with precision_report(model) as report:
        replica = model[0]._replicate_for_data_parallel()
        replica.weight, replica.bias = model[0].weight, model[0].bias
        replica(torch.randn(4, 8))
        found = modules_of(report)["addmm"]
        copied = copy.deepcopy(model)
        torch.save(model, buffer)
        copied(torch.randn(4, 8))
    assert found == "0"
    assert {row.module for row in report.rows if row.op == "addmm"} == {"0", OUTSIDE}
    buffer.seek(0)
    torch.load(buffer, weights_only=False)(torch.randn(4, 8))


def test_numbers_do_not_change_while_recording():
    model, x, found = transformer(), torch.randn(2, 5, 8), []
    for context in (nullcontext(), precision_report(model)):
        model.zero_grad()
        with context:
            with torch.autocast("cpu", dtype=BF16):
                out = model(x)
            out.float().sum().backward()
        found.append([out, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore")
def test_a_higher_order_operator_is_one_kernel():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    x = torch.randn(2, 2, 16, 8)
    with precision_report() as report:
        out = flex.flex_attention(x, x, x)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x))
    (row,) = [row for row in report.rows if row.op == "flex_attention"]
    assert (row.module, row.calls, row.outputs[0]) == (OUTSIDE, 1, "float32")
    assert "no model" in str(report)


def test_only_a_module_can_be_reported_on():
    optimizer = torch.optim.SGD([torch.ones(1)])
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got SGD"):
        precision_report(optimizer).__enter__()  # type: ignore[arg-type]


# What a report is written as: a table, JSON, the difference of two.


@pytest.fixture(scope="module")
def report():
    model = transformer()
    with precision_report(model) as found:
        train(model, (2, 5, 8), torch.autocast("cpu", dtype=BF16))
    return found


def test_the_table_has_each_phase_once_and_modules_alike_as_one(report):
    lines = report.table().splitlines()
    assert f"{report.totals.casts:,} casts" in lines[0]
    assert sum("*.linear1" in line for line in lines) == 2, "forward and backward"
    assert not any("linear (t)" in line for line in lines)
    assert sum("0.linear1" in line for line in report.table(collapse=False).splitlines()) == 2
    lines = report.table(views=True).splitlines()
    assert any("linear (t)" in line for line in lines)
    column = lines[1].index("calls")
    shown = [int(line[column : column + 5].replace(",", "")) for line in lines[2:]]
    assert sum(shown) == report.totals.calls


def test_rich_shows_the_same_cells(report):
    rich = pytest.importorskip("rich.console")
    out = io.StringIO()
    rich.Console(width=200, file=out).print(report)
    assert "*.linear1" in out.getvalue()
    assert f"{report.totals.calls:,} kernels" in out.getvalue()


def test_json_comes_back_equal_and_another_file_is_refused_by_name(report, tmp_path):
    path = tmp_path / "report.json"
    report.to_json(path)
    again = PrecisionReport.from_json(path)
    assert (again.rows, again.model, again.totals) == (report.rows, report.model, report.totals)
    for text in ("{}", "[]", "no", '{"format": 1}', '{"format": 99}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"report\.json"):
            PrecisionReport.from_json(path)


def recorded(ops: OpLists | None = None, calls: int = 1) -> PrecisionReport:
    torch.manual_seed(0)
    model = mlp()
    with precision_report(model) as report, distamp.autocast("cpu", BF16, ops=ops):
        for _ in range(calls):
            model(torch.randn(4, 8))
    return report


def test_the_difference_is_what_changed_and_nothing_else():
    before, after = recorded(), recorded(OpLists(fp32={"linear"}))
    assert not before.compare(recorded())
    difference = before.compare(after)
    for rows, dtype in ((difference.before, "bfloat16"), (difference.after, "float32")):
        assert {row.module for row in rows} == {"0", "1", "2", "3"}
        assert {row.outputs for row in rows if row.op == "addmm"} == {(dtype,)}
    assert "addmm" in str(difference)
    assert before.compare(recorded(calls=2)), "a number of calls is a difference too"
    with pytest.raises(TypeError, match="got int"):
        before.compare(3)  # type: ignore[arg-type]

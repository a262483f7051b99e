"""What a precision report is written as: a table, JSON, the difference of two."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from distamp import OpLists, autocast, precision_report
from distamp.autocast import PrecisionReport
from distamp.autocast.report import OpRow
from tests.autocast.test_report import BF16, mlp, train, transformer


@pytest.fixture(scope="module")
def report():
    model = transformer()
    with precision_report(model) as found:
        train(model, (2, 5, 8))
    return found


def test_the_table_has_each_phase_once_and_modules_alike_as_one(report):
    lines = report.table().splitlines()
    assert f"{report.totals.casts:,} casts" in lines[0]
    assert sum("*.qkv" in line for line in lines) == 2, "forward and backward"
    assert not any("transpose" in line for line in lines)
    assert sum("0.qkv" in line for line in report.table(collapse=False).splitlines()) == 2
    assert any("linear (t)" in line for line in report.table(views=True).splitlines())


def test_the_table_s_counts_add_up(report):
    lines = report.table(views=True).splitlines()
    column = lines[1].index("calls")
    shown = [int(line[column : column + 5].replace(",", "")) for line in lines[2:]]
    assert sum(shown) == report.totals.calls
    assert sum(row.casts for row in report.rows if row.cause) == report.totals.casts


def test_rich_shows_the_same_cells(report):
    rich = pytest.importorskip("rich.console")
    out = io.StringIO()
    rich.Console(width=200, file=out).print(report)
    shown = out.getvalue()
    assert "*.qkv" in shown
    assert f"{report.totals.calls:,} kernels" in shown


def test_json_comes_back_equal(report, tmp_path):
    report.to_json(tmp_path / "report.json")
    again = PrecisionReport.from_json(tmp_path / "report.json")
    assert again.rows == report.rows
    assert (again.model, again.totals) == (report.model, report.totals)


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"format": 1}', '{"format": 99}'])
def test_another_file_is_refused_by_name(text, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        PrecisionReport.from_json(path)


def recorded(ops=None):
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(4, 8)
    with precision_report(model) as report, autocast("cpu", BF16, ops=ops):
        model(x)
    return report


def test_the_difference_is_what_changed_and_nothing_else():
    before, after = recorded(), recorded(OpLists(fp32={"linear"}))
    assert not before.compare(recorded())
    difference = before.compare(after)
    assert difference
    assert {row.module for row in (*difference.before, *difference.after)} == {"0", "1", "2", "3"}
    assert {row.outputs for row in difference.before if row.op == "addmm"} == {("bfloat16",)}
    assert {row.outputs for row in difference.after if row.op == "addmm"} == {("float32",)}
    assert "addmm" in str(difference)
    with pytest.raises(TypeError, match="got int"):
        before.compare(3)


def test_a_number_of_calls_is_a_difference_too():
    row = OpRow("0", "Linear", "forward", "linear", "addmm", ("float32",), ("float32",), calls=1)
    more = OpRow("0", "Linear", "forward", "linear", "addmm", ("float32",), ("float32",), calls=2)
    one, two = PrecisionReport([row]), PrecisionReport([more])
    assert one.compare(two).after == (more,)
    assert not PrecisionReport([row, row]).compare(two)


def test_a_report_without_a_model_has_no_names():
    with precision_report() as report:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert {row.module for row in report.rows} == {"(outside)"}
    assert "no model" in str(report)

"""A precision report read by people and programs: text, rich, JSON, pictures, comparisons."""

from __future__ import annotations

import builtins
import json
import re

import pytest
import torch
from distamp.autocast.report.rows import OpRow, Totals, collapse, total
from distamp.autocast.report.table import human_bytes, text_table

from distamp import precision_report
from distamp.autocast import PrecisionReport, compare_reports
from tests.autocast.report.test_report import BF16, conv, mlp, train, transformer


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    model = transformer()
    with precision_report(model) as report:
        train(model, (2, 5, 8))
    return report


def row(module="", kind="M", op="mm", **values):
    return OpRow(module, kind, "forward", "", op, ("float32",), ("float32",), **values)


def test_the_text_shows_every_total(report):
    first, head, _, *lines = report.table().splitlines()
    assert first == "Precision report: Sequential"
    everything = next(line for line in lines if line.startswith("all"))
    totals = report.totals
    assert re.split(r"\s{2,}", head.strip()) == [
        "kernels",
        "casts",
        "by autocast",
        "read",
        "written",
        "cache hits",
        "saved",
    ]
    assert re.split(r"\s{2,}", everything)[1:] == [
        f"{totals.calls:,}",
        f"{totals.casts:,}",
        f"{totals.autocast_casts:,}",
        human_bytes(totals.bytes_read),
        human_bytes(totals.bytes_written),
        f"{totals.hits:,}",
        human_bytes(totals.bytes_saved),
    ]


def numbers(lines, column):
    head = next(line for line in lines if line.startswith("module"))
    end = head.index(column) + len(column)
    start = end - max(len(column), 5)
    cells = [line[start:end].strip().replace(",", "") for line in lines if "--" not in line]
    return [int(cell) for cell in cells if cell.isdigit()]


@pytest.mark.parametrize("together", [True, False])
def test_the_lines_of_a_section_add_up_to_its_totals(report, together):
    text = report.table(collapse=together, views=True)
    for phase in ("forward", "backward"):
        section = text.split(f"\n{phase}\nmodule")[1].split("\n\n")[0]
        lines = ("module" + section).splitlines()
        totals = report.totals_of(phase)
        assert sum(numbers(lines, "casts")) == totals.casts
        assert sum(numbers(lines, "hits")) == totals.hits


def test_modules_alike_but_for_an_index_are_one(report):
    text = str(report)
    assert re.search(r"^\*\.qkv  x2 +linear \(addmm\) +bf16 +bf16 +4 ", text, re.M)
    assert "0.qkv" not in text
    assert "0.qkv" in report.table(collapse=False)


def test_only_modules_of_one_class_and_varying_index_are_one():
    rows = [row(f"stages.{i}.{j}", kind) for i in (0, 1) for j, kind in enumerate(("Conv", "Norm"))]
    assert collapse([*rows, row("head"), row("")]) == {
        "stages.0.0": "stages.*.0",
        "stages.1.0": "stages.*.0",
        "stages.0.1": "stages.*.1",
        "stages.1.1": "stages.*.1",
        "head": "head",
        "": "",
    }


def test_nothing_recorded_prints_so():
    with precision_report(mlp()) as report:
        pass
    assert "nothing ran" in str(report)


def test_labels_say_the_public_name_and_what_the_kernel_adds():
    labels = {
        ("linear", "addmm"): "linear (addmm)",
        ("softmax", "_softmax"): "softmax",
        ("gelu", "gelu_backward"): "gelu (backward)",
        ("", "mm"): "mm",
        ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"): (
            "scaled_dot_product_attention (flash_attention_for_cpu)"
        ),
    }
    for (function, op), label in labels.items():
        assert OpRow("", "", "forward", function, op, (), ()).label == label


def test_rich_shows_the_same_lines(report):
    from rich.console import Console

    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(report)
    assert len(re.findall(r"linear \(addmm\)", capture.get())) == len(
        re.findall(r"linear \(addmm\)", str(report))
    )


def test_json_gives_the_report_back(report, tmp_path):
    path = tmp_path / "report.json"
    report.to_json(path)
    again = PrecisionReport.from_json(path)
    assert again.rows == report.rows
    assert str(again) == str(report)
    values = json.loads(path.read_text())
    assert values["totals"]["casts"] == sum(r["casts"] for r in values["rows"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="report"):
        PrecisionReport.from_json(path)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn(report, tmp_path, suffix):
    path = tmp_path / f"report.{suffix}"
    report.plot(path, modules=3)
    data = path.read_bytes()
    assert len(data) > 5_000
    if suffix == "svg":
        assert b"<svg" in data


def test_the_picture_of_nothing_is_drawn(tmp_path):
    PrecisionReport([]).plot(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_the_picture_names_the_extra_it_needs(report, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"distamp\[report\]"):
        report.plot(tmp_path / "report.png")


def test_a_report_compared_with_itself_is_the_same(report):
    comparison = report.compare(report)
    assert not comparison
    assert str(comparison) == "The reports are the same."


def test_comparing_shows_which_op_changed_its_dtype():
    model = conv()
    reports = []
    for enabled in (False, True):
        with precision_report(model) as report, torch.autocast("cpu", BF16, enabled=enabled):
            model(torch.randn(2, 1, 8, 8))
        reports.append(report)
    comparison = compare_reports(*reports)
    change = next(
        c for c in comparison.changes if (c.module, c.op) == ("0", "conv2d (convolution)")
    )
    assert change.before == {"float32 -> float32": 1}
    assert change.after == {"bfloat16 -> bfloat16": 1}
    assert change.dtypes_differ
    assert comparison.after.casts - comparison.before.casts == 5
    assert "1 x bfloat16 -> bfloat16" in str(comparison)


def test_a_comparison_is_written_as_json(report, tmp_path):
    comparison = report.compare(PrecisionReport([]))
    comparison.to_json(tmp_path / "comparison.json")
    values = json.loads((tmp_path / "comparison.json").read_text())
    assert len(values["changes"]) == len(comparison.changes) > 10
    assert values["after"] == Totals().to_dict()


def test_only_reports_can_be_compared(report):
    with pytest.raises(TypeError, match="expected a PrecisionReport, got str"):
        report.compare("report.json")


def test_totals_add_up():
    rows = [
        row(calls=1, casts=2, cause="autocast", bytes_read=8, bytes_written=4),
        row(calls=2, casts=1, cause="explicit", hits=3, bytes_saved=5),
    ]
    assert total(rows) == Totals(3, 3, 2, 1, 0, 8, 4, 3, 5)


def test_bytes_have_binary_units():
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30)] == [
        "0 B",
        "1,023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]


def test_columns_are_aligned():
    assert text_table(("a", "n"), [("long", "1"), ("b", "22")], right=(1,)) == [
        "a      n",
        "----  --",
        "long   1",
        "b     22",
    ]

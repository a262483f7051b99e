"""``python -m launch.compare``: two runs over each other, and a table of their ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.compare import compare, read_records, read_run, read_runs
from launch.compare.__main__ import main
from launch.compare.plot import picture
from tests.launch import jobs, pooled
from tests.launch.test_strategies import SMALL

Rows = list[dict[str, Any]]


def _rows(steps: int, loss: float = 3.0, **more: Any) -> Rows:
    """Records as the launcher writes them, with losses that are easy to check."""
    rows: Rows = [{"step": 0, "validation_loss": loss + 1, "validation_accuracy": 0.1}]
    for step in range(1, steps + 1):
        rows.append({"step": step, "loss": loss + 1 / step, "loss_scale": 1.0, "stepped": True})
        rows[-1] |= {"skipped": 0, "tokens_per_second": 100.0 * step} | more
        if step % 2 == 0:
            rows.append({"step": step, "validation_loss": loss, "validation_accuracy": 0.5})
    return rows


def _fp16(rows: Rows) -> Rows:
    """The same steps with a scale that halves at each second step, which is skipped."""
    skipped = 0
    for row in (r for r in rows if "loss" in r):
        row["loss_scale"] = 2.0 ** (10 - skipped)
        row["stepped"] = row["step"] % 2 == 1
        skipped += not row["stepped"]
        row["skipped"] = skipped
    return rows


def _run(folder: Path, rows: Rows, tail: str = "", **settings: object) -> Path:
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + tail)
    if settings:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


def _table(text: str) -> dict[str, list[str]]:
    """The rows of a printed table, by name."""
    cut = (line.split("  ") for line in text.splitlines() if not line.startswith("note:"))
    cells = [[cell.strip() for cell in row if cell.strip()] for row in cut]
    return {row[0]: row[1:] for row in cells if row}


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    one = _run(tmp_path / "one", _rows(4, 2.0), model="gpt", precision="fp32")
    other = _run(tmp_path / "other", _fp16(_rows(4, 2.5)), model="gpt", precision="fp16")
    return one, other


def test_the_ends_of_two_runs_are_printed_and_the_picture_is_written(two, tmp_path, capsys):
    picture_path = tmp_path / "new" / "both.png"
    assert main([*map(str, two), "--out", str(picture_path)]) == 0
    out, err = capsys.readouterr()
    assert not err
    table = _table(out)
    assert table["step"] == ["4", "4"]
    assert table["loss"] == ["2.2500", "2.7500", "+22.22%"]
    assert table["validation loss"] == ["2.0000", "2.5000", "+25.00%"]
    assert table["accuracy"] == ["50.00%", "50.00%"]
    assert table["loss scale"] == ["-", "2^9"]
    assert table["skipped steps"] == ["-", "2"]
    assert table["tokens/s (median)"] == ["250", "250"]
    assert "note: other settings: precision fp32 / fp16" in out
    assert f"wrote {picture_path}" in out
    assert picture_path.read_bytes().startswith(b"\x89PNG")


def test_losses_scales_and_skipped_steps_of_both_are_drawn(two):
    top, bottom = picture(read_runs(two)).axes
    drawn = [[tuple(map(float, xy)) for xy in line.get_xydata()] for line in top.lines]
    for loss, (training, validation) in zip((2.0, 2.5), (drawn[:2], drawn[2:]), strict=True):
        assert training == [(step, loss + 1 / step) for step in (1.0, 2.0, 3.0, 4.0)]
        assert validation == [(0.0, loss + 1), (2.0, loss), (4.0, loss)]
    scale, skipped = bottom.lines  # of the run in fp16 alone
    assert list(scale.get_ydata()) == [2.0**10, 2.0**10, 2.0**9, 2.0**9]
    assert list(skipped.get_xdata()) == [2, 4]
    legend = [text.get_text() for axis in (top, bottom) for text in axis.get_legend().get_texts()]
    assert legend == ["one, validation", "other, validation", "other, skipped (2)"]


def test_runs_without_a_scale_have_no_picture_of_one(tmp_path):
    runs = read_runs([_run(tmp_path / name, _rows(2)) for name in "ab"])
    assert len(picture(runs).axes) == 1


def test_text_is_drawn_in_bits_per_byte(tmp_path):
    rows = [{"step": 0, "validation_loss": 2.0, "validation_bits_per_byte": 2.9}]
    rows += [{"step": 1, "loss": 1.0, "bits_per_byte": 1.4}]
    [axis] = picture([read_run(_run(tmp_path / "run", rows))]).axes
    assert axis.get_ylabel() == "bits per byte"
    assert [list(line.get_ydata()) for line in axis.lines] == [[1.4], [2.9]]


def test_runs_of_different_length_are_also_compared_where_both_were_validated(tmp_path):
    short = _run(tmp_path / "short", _rows(4, 2.0))
    long_rows = _rows(8, 2.0)
    for row in long_rows:
        if "validation_loss" in row and row["step"] == 8:
            row["validation_loss"] = 1.0
    shown = compare(read_runs([short, _run(tmp_path / "long", long_rows)]))
    table = _table(str(shown))
    assert table["validation loss"] == ["2.0000", "1.0000", "-50.00%"]
    assert table["validation loss at step 4"] == ["2.0000", "2.0000"]
    assert any("end at different steps" in note for note in shown.notes)


def test_accuracies_differ_by_points(tmp_path):
    better = _rows(2)
    better[-1]["validation_accuracy"] = 0.6
    runs = [_run(tmp_path / name, rows) for name, rows in (("one", _rows(2)), ("two", better))]
    assert _table(str(compare(read_runs(runs))))["accuracy"] == [
        "50.00%",
        "60.00%",
        "+10.00 points",
    ]


def test_more_than_two_runs_are_compared(tmp_path):
    folders = [
        _run(tmp_path / name, _rows(2, loss)) for name, loss in zip("abc", (1, 2, 3), strict=True)
    ]
    shown = compare(read_runs(folders))
    assert _table(str(shown))["validation loss"] == ["1.0000", "2.0000", "3.0000"]
    assert len(picture(read_runs(folders)).axes[0].lines) == 6


@pytest.mark.parametrize("tail", ['{"step": 5, "lo', '{"step": 5, "loss": 1.0', "\0\0\0"])
def test_a_last_line_half_written_by_a_killed_run_is_passed_over(tmp_path, tail):
    killed = _run(tmp_path / "killed", _rows(4), tail=tail)
    whole = _run(tmp_path / "whole", _rows(4))
    shown = compare(read_runs([killed, whole]))
    assert _table(str(shown))["step"] == ["4", "4"]
    assert shown.notes[0] == "killed: its last line is half written and was passed over"


def test_a_killed_run_with_nothing_half_written_has_no_note(tmp_path):
    runs = read_runs([_run(tmp_path / name, _rows(2), model="gpt") for name in "ab"])
    assert compare(runs).notes == ()


@pytest.mark.parametrize("broken", ["no record", "[1]", '"loss"', '{"loss": 1.0}', '{"step": "1"}'])
def test_a_broken_line_before_the_last_is_named(tmp_path, broken):
    folder = _run(tmp_path / "run", _rows(2))
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], broken, *lines[1:]]) + "\n")
    assert read_records(path).broken == (2,)
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 is no record of a step; remove"):
        read_run(folder)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"model": "hf:gpt2"}, "of different models: gpt and hf:gpt2; their losses may not"),
        ({"model": "gpt", "shape": {"width": 64}}, "of different shape: width 96 / 64"),
        ({"model": "gpt", "data": "books"}, "of different data: data default / books"),
        ({"model": "gpt", "lr": 0.1}, "other settings: lr default / 0.1"),
        ({}, "other: no config.json; what it was asked to do is not known"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_differs_between_the_runs_is_noted(tmp_path, settings, note):
    shape = {"width": 96}
    one = _run(tmp_path / "one", _rows(2), model="gpt", data=None, shape=shape, run_dir="a")
    settings = {"data": None, "shape": shape, "run_dir": "b", **settings} if settings else {}
    shown = compare(read_runs([one, _run(tmp_path / "other", _rows(2), **settings)]))
    assert len(shown.notes) == 1
    assert note in shown.notes[0]
    assert "\n" not in shown.notes[0]


def test_text_beside_images_is_noted_and_drawn_in_nats(tmp_path):
    images = _run(tmp_path / "images", _rows(2))
    text_rows = [r | ({"bits_per_byte": 1.0} if "loss" in r else {}) for r in _rows(2)]
    runs = read_runs([images, _run(tmp_path / "text", text_rows)])
    assert picture(runs).axes[0].get_ylabel() == "loss"
    assert "only some of the runs are of text" in " ".join(compare(runs).notes)


def _no_metrics(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _no_step(folder: Path) -> Path:
    return _run(folder, _rows(0))


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda folder: folder, "run: no such folder; give the folder of a run"),
        (_no_metrics, "run: no metrics.jsonl in it; give the folder of a run"),
        (_no_step, "metrics.jsonl: no step in it yet"),
    ],
    ids=["missing", "no metrics", "no step"],
)
def test_a_folder_that_holds_no_run_is_one_line_and_exit_code_2(tmp_path, capsys, make, shown):
    whole = _run(tmp_path / "whole", _rows(2))
    out = tmp_path / "out.png"
    given = [str(whole), str(make(tmp_path / "run")), "--out", str(out)]
    assert main(given) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert shown in printed.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("names", "out", "shown"),
    [
        (("a",), "out.png", "compare needs two runs or more, got 1"),
        (("a", "a"), "out.png", "given twice; there is nothing to compare"),
        (("a", "b"), "out.foo", "cannot write out.foo: Format 'foo' is not supported"),
        (("a", "b"), "a/metrics.jsonl/out.png", "cannot write a/metrics.jsonl/out.png"),
        (tuple("abcdefg"), "out.png", "1 to 6 runs can be drawn over each other, got 7"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path, monkeypatch, capsys, names, out, shown):
    monkeypatch.chdir(tmp_path)
    for name in set(names):
        _run(tmp_path / name, _rows(2))
    assert main([*names, "--out", out]) == 2
    err = capsys.readouterr().err
    assert shown in err
    assert err.count("\n") == 1


def test_without_matplotlib_the_table_is_printed_and_one_line_says_what_is_missing(two, tmp_path):
    hidden = "import sys; sys.modules['matplotlib'] = None;"
    hidden += "from launch.compare.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", hidden, *map(str, two), "--out", "both.png"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert _table(done.stdout)["validation loss"] == ["2.0000", "2.5000", "+25.00%"]
    assert done.stderr == (
        "error: cannot write both.png: a picture of runs needs matplotlib:"
        " pip install 'distamp[report]'\n"
    )


def test_runs_of_the_launcher_are_compared(tmp_path, monkeypatch, capsys):
    data = jobs.text_file(tmp_path)
    flags = ("--data", data, *SMALL)
    one = pooled.train(tmp_path / "fp32", flags)
    pooled.train(tmp_path / "fp16", (*flags, "--precision", "fp16", "--init-scale", 2.0**40))
    monkeypatch.chdir(tmp_path)
    assert main(["fp32", "fp16"]) == 0
    out = capsys.readouterr().out
    table = _table(out)
    assert table["validation loss"][0] == f"{one[-1]['validation_loss']:.4f}"
    assert table["loss scale"] == ["-", "2^35"]  # the last step's, which was skipped too
    assert table["skipped steps"] == ["-", "6"]
    assert "init_scale 65536.0 / 1099511627776.0" in out
    assert (tmp_path / "compare.png").is_file()

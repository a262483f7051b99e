"""The output of a run: lines in a log file, the summary, utilisation, and pictures."""

import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import parse
from launch.data import load_data
from launch.folder import list_checkpoints
from launch.job import Job, make_job
from launch.metrics import draw_figure, flops_per_example, format_steps, read_records
from launch.parallel import Layout
from launch.train import run
from tests.launch import jobs
from tests.launch.jobs import FP16, TINY

# The tests share runs and ranks.
pytestmark = pytest.mark.xdist_group("launch metrics")

SKIPPING_RUN = ("--steps", 12, "--overwrite", "--no-check-precision")
SHORT_RUN = ("--steps", 2, "--keep-checkpoints", 0, "--peak-tflops", 1e-3)


def print_run(
    folder: Path, *args: object, seconds: Iterable[float] = itertools.repeat(math.inf)
) -> str:
    """Return the output of a run without a terminal. Its clock reads the seconds in turn."""
    remaining = iter(seconds)
    words = [str(arg) for arg in args]
    with jobs.pool_rank() as printed:
        config = parse([*words, "--run-dir", str(folder)])
        run(config, lambda: (False, next(remaining)))
    return printed.getvalue()


def list_skips(rows: jobs.Rows) -> list[int]:
    """Return the numbers of the skipped steps."""
    return [row["step"] for row in rows if not row.get("taken", True)]


def summarize_skips(skipped: list[int]) -> str:
    """Return the sentence of the summary, which lists the last eight of the skipped steps."""
    steps = [str(step) for step in skipped[-8:]]
    if len(skipped) > 8:
        steps.insert(0, "...")
    listed_steps = ", ".join(steps)
    return f"skipped {len(skipped)} on every rank: {listed_steps}."


@pytest.fixture(scope="module")
def skipping_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of many skipped steps, with a checkpoint, and its output."""
    folder = tmp_path_factory.mktemp("skipping")
    return folder, print_run(folder, "--data", text, *TINY, *FP16, *SKIPPING_RUN)


@pytest.fixture(scope="module")
def short_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run without a checkpoint, with the peak of the device, and its output."""
    folder = tmp_path_factory.mktemp("short")
    return folder, print_run(folder, "--data", text, *TINY, *SHORT_RUN)


def test_first_line_has_the_flags_of_the_run(skipping_run, text):
    _, printed = skipping_run
    first_line = printed.splitlines()[0]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d ", first_line)
    _, _, printed_flags = first_line.partition(": ")
    flags = [str(word) for word in ("--data", text, *TINY, *FP16, *SKIPPING_RUN)]
    printed_config = parse(printed_flags.split())
    assert printed_config == parse(flags)


def test_log_file_has_a_line_for_each_record(skipping_run):
    folder, printed = skipping_run
    assert printed.count("checkpoint written") == 1
    lines = [line for line in printed.splitlines() if "tokens/s" in line]
    rows = jobs.training_records(jobs.records(folder))
    assert len(rows) == 12
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(f"step {row['step']:>2}/12  loss {row['loss']:.4f}  ")
        assert f"lr {row['learning_rate']:.3g} " in line
        assert f"scale {row['loss_scale']:.10g} " in line
        speed = r"[\d,]+ tokens/s  0:\d\d:\d\d left"
        assert re.search(f"skipped {row['skipped']}  {speed}", line)
        assert ("SKIPPED: not finite" in line) == (not row["taken"])


def test_time_left_is_no_longer_than_max_time(text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 100_000, "--keep-checkpoints", 0)
    printed = print_run(tmp_path, *args, seconds=(90.0, 3.0, 0.0))
    assert re.findall(r"tokens/s  (.*) left", printed) == ["0:01:30", "0:00:03", "0:00:00"]


def test_summary_lists_the_skipped_steps(skipping_run):
    folder, printed = skipping_run
    skipped = list_skips(jobs.records(folder))
    assert summarize_skips(skipped) in printed


@pytest.mark.slow
def test_last_line_names_the_next_command_if_there_is_a_checkpoint(skipping_run, short_run):
    folder, printed = skipping_run
    assert f"launch.sample {folder}" in printed.splitlines()[-1]
    _, printed = short_run
    assert "without a checkpoint (--keep-checkpoints 0)" in printed.splitlines()[-1]
    assert "launch.sample" not in printed


def test_a_record_lists_the_skipped_steps_since_the_record_before_it(text, tmp_path):
    args = ("--data", text, *TINY, *FP16, "--steps", 12, "--no-check-precision")
    skipped = list_skips(jobs.train(tmp_path / "every step", args))
    assert skipped
    printed = print_run(tmp_path / "sixth steps", *args, "--log-every", 6)
    first, second = jobs.training_records(jobs.records(tmp_path / "sixth steps"))
    assert first["step"] == 6
    assert second["step"] == 12
    assert first["skipped_steps"] + second["skipped_steps"] == skipped
    earlier_steps = [str(step) for step in skipped if step < 6]
    earlier = ", ".join(earlier_steps)
    assert f"SKIPPED since the last line: steps {earlier}" in printed
    assert summarize_skips(skipped) in printed


def find_crosses(axes: Any) -> Any:
    """Return the line of a picture that marks the skipped steps."""
    (crosses,) = (line for line in axes.lines if line.get_marker() == "x")
    return crosses


def test_picture_has_a_cross_for_a_skipped_step_between_two_records(tmp_path):
    first = {"step": 5, "loss": 2.0, "taken": True, "skipped_steps": [3]}
    second = {"step": 10, "loss": 1.0, "taken": True, "skipped_steps": []}
    (axes,) = figure(tmp_path, [first, second]).axes
    crosses = find_crosses(axes)
    assert crosses.get_xydata().tolist() == [[3.0, 2.0]]


def test_run_that_starts_again_removes_what_it_replaces(text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 2, "--save-every", 1)
    jobs.train(tmp_path, args)
    assert len(list_checkpoints(tmp_path)) == 2
    for name in ("nonfinite.jsonl", "precision.toml", "tokenizer.json"):
        (tmp_path / name).write_text("of the old run")
    jobs.train(tmp_path, (*args, "--steps", 1, "--overwrite"))
    checkpoints = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert checkpoints == ["step-00000001"]
    for name in ("nonfinite.jsonl", "precision.toml", "tokenizer.json"):
        assert not (tmp_path / name).exists()


@pytest.fixture
def tiny(text: Path) -> Job:
    """The model, optimizer and data of a tiny run."""
    config = parse([str(word) for word in ("--data", text, *TINY)])
    return make_job(config, load_data(config), Layout(), torch.device("cpu"))


def test_operations_of_an_example_are_those_counted_by_hand(tiny):
    layers = 2
    heads = 4
    width = 16
    length = 16
    vocabulary = 256
    attention_weights = 4 * width * width
    feed_weights = 8 * width * width
    embedding_weights = vocabulary * width + length * width
    head_weights = vocabulary * width
    block_weights = layers * (attention_weights + feed_weights)
    num_weights = embedding_weights + block_weights + head_weights
    # PaLM, appendix B: a token costs 6 N + 12 L H Q T.
    attention_flops = 12 * layers * heads * (width // heads) * length
    assert flops_per_example(tiny) == length * (6 * num_weights + attention_flops)


@pytest.mark.slow
def test_utilisation_is_operations_a_second_as_a_part_of_the_peak(tiny, short_run):
    folder, _ = short_run
    flops_per_token = flops_per_example(tiny) / 16
    peak_flops = 1e9  # --peak-tflops 1e-3
    for row in jobs.training_records(read_records(folder)):
        utilisation = row["tokens_per_second"] * flops_per_token / peak_flops
        assert row["mfu"] == pytest.approx(utilisation, abs=1e-4)


def figure(folder: Path, rows: list[dict[str, Any]]) -> Any:
    """Draw the picture of a run with these records."""
    lines = [json.dumps(row) + "\n" for row in rows]
    records = folder / "metrics.jsonl"
    records.write_text("".join(lines))
    return draw_figure([folder])


@pytest.fixture
def picture(tmp_path: Path) -> Any:
    """The picture of a run with skipped steps at its first step and at a later one."""
    rows = [{"step": 0, "validation_loss": 3.0}]
    for step in range(1, 20):
        taken = step not in (1, 7)
        loss_scale = 65536.0 / step
        rows.append({"step": step, "loss": 3.0, "loss_scale": loss_scale, "taken": taken})
    picture = figure(tmp_path, rows)
    # The layout is computed when the picture is drawn.
    picture.draw_without_rendering()
    return picture


def test_picture_has_each_line_in_its_legend_and_crosses_inside_its_frame(picture):
    loss_axes, scale_axes = picture.axes
    for axes in (loss_axes, scale_axes):
        legend = {text.get_text() for text in axes.get_legend().get_texts()}
        assert {line.get_label() for line in axes.lines} == legend
    crosses = find_crosses(scale_axes)
    frame = scale_axes.get_window_extent()
    radius = crosses.get_markersize() / 72 * picture.dpi / 2
    for x, y in scale_axes.transData.transform(crosses.get_xydata()):
        assert frame.x0 + radius < x < frame.x1 - radius
        assert frame.y0 + radius < y < frame.y1 - radius


def test_picture_without_a_loss_scale_has_one_panel_and_its_crosses_in_it(tmp_path):
    skipped = {"step": 1, "loss": 1.0, "taken": False}
    taken = {"step": 2, "loss": 0.5, "taken": True}
    (axes,) = figure(tmp_path, [skipped, taken]).axes
    crosses = find_crosses(axes)
    assert crosses.get_xydata().tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("number", "expected"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps")])
def test_a_summary_counts_one_step_in_the_singular(number, expected):
    assert format_steps(number) == expected

"""Records in TensorBoard and Weights & Biases: all of them, once, over resumes and full disks."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from launch.reporting import RunReporter, tracking
from launch.train import main
from launch.train import train as train_job
from tests.launch import jobs, pooled
from tests.launch.finished import SKIPPING, finish
from tests.launch.test_checkpoint import _files_at_most
from tests.launch.test_strategies import SMALL

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


# -- TensorBoard ----------------------------------------------------------------------------------


def _events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar that TensorBoard itself reads from a run's folder."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def _check_events(folder: Path) -> None:
    """TensorBoard shows each record once, and no other."""
    rows = jobs.records(folder)
    events = _events(folder)
    losses = [(r["step"], pytest.approx(r["loss"])) for r in rows if "loss" in r]
    assert events["train/loss"] == losses
    scales = [(r["step"], r["loss_scale"]) for r in rows if "loss" in r]
    assert events["train/loss_scale"] == scales
    skipped = [(r["step"], 1 - r["stepped"]) for r in rows if "loss" in r]
    assert [(step, 1 - stepped) for step, stepped in events["train/stepped"]] == skipped
    validation = [(r["step"], r) for r in rows if "validation_loss" in r]
    for name in ("loss", "bits_per_byte", "accuracy"):
        expected = [(step, pytest.approx(r[f"validation_{name}"])) for step, r in validation]
        assert events[f"validation/{name}"] == expected


@pytest.fixture
def tensorboard() -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_shows_every_record(text, tmp_path):
    flags = ("--data", text, *SMALL, *SKIPPING, "--tensorboard")
    ended = finish(tmp_path, *flags)
    assert f"tensorboard --logdir {tmp_path} shows it" in ended["printed"]
    _check_events(tmp_path)


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_shows_a_resumed_run_as_one_never_stopped(text, tmp_path):
    flags = ("--data", text, *SMALL, *SKIPPING, "--tensorboard")
    finish(tmp_path, *flags)
    middle = tmp_path / "checkpoints" / "step-00000003"
    finish(tmp_path, *flags, "--resume", middle)  # steps 4 to 6 come a second time
    _check_events(tmp_path)
    other = tmp_path / "other"  # a folder that knows nothing of the first steps
    finish(other, *flags, "--resume", middle)
    _check_events(other)
    finish(other, *flags, "--overwrite", "--steps", 4)
    _check_events(other)


class Flushed:
    """A tracker that notes which checkpoints there are whenever it is to write what it holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[int, list[str]]] = []
        self.held = 0

    def write(self, record: object) -> None:
        self.held += 1

    def flush(self) -> None:
        self.seen.append((self.held, sorted(path.name for path in self.folder.glob("step-*"))))
        self.held = 0

    def close(self) -> None:
        pass


def test_trackers_write_what_they_hold_before_a_checkpoint_that_knows_of_it(text, tmp_path):
    # Else a run killed right after the checkpoint would go on without those records.
    flags = ("--data", text, *SMALL, "--checkpoint-every", 3, "--run-dir", tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        job = pooled.job(*flags)
        assert isinstance(job.report, RunReporter)
        tracker = Flushed(tmp_path / "checkpoints")
        job.report.trackers["tensorboard"] = tracker
        with job.report:
            train_job(job)
    # Three steps and their validation each, and the validation before the first.
    assert tracker.seen == [(5, []), (4, ["step-00000003"])]


class Failing:
    """A tracker that fails as one does whose disk is full."""

    def __init__(self, *_: object) -> None:
        self.calls = 0

    def write(self, record: object) -> None:
        self.calls += 1
        if self.calls == 2:
            raise OSError(28, "No space left on device")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("tensorboard")
def test_a_tracker_that_fails_is_left_behind_and_the_run_goes_on(text, tmp_path):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        job = pooled.job("--data", text, *SMALL, "--run-dir", tmp_path, "--tensorboard")
        assert isinstance(job.report, RunReporter)
        job.report.trackers["tensorboard"].close()
        job.report.trackers["tensorboard"] = Failing()
        with job.report:
            train_job(job)
            job.report.finish(job.summary())
    assert shown.getvalue().count("Warning: --tensorboard cannot write: [Errno 28] No space") == 1
    assert jobs.records(tmp_path)[-1]["step"] == 6
    assert "--logdir" not in shown.getvalue()


@pytest.mark.usefixtures("tensorboard")
def test_a_full_disk_costs_tensorboards_events_and_not_the_run(text, tmp_path, monkeypatch):
    # TensorBoard writes in a thread, which may end with the error and say so too.
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_type))
    before = set(threading.enumerate())
    job = pooled.job("--data", text, *SMALL, "--run-dir", tmp_path, "--tensorboard")
    shown: list[str] = []
    job.report.note = shown.append  # type: ignore[method-assign]
    record = {**job.losses(1.0), "loss_scale": 1.0, "stepped": True, "skipped": 0}
    with job.report:
        for step in range(1, 40):
            job.report.step({"step": step, **record}, tokens=1)
        job.report.flush()
        [events] = (tmp_path / "tensorboard").glob("events.*")
        metrics = (tmp_path / "metrics.jsonl").stat().st_size
        assert events.stat().st_size > metrics + 2000
        with _files_at_most(events.stat().st_size):
            job.report.step({"step": 40, **record}, tokens=1)
            job.report.flush()
        job.report.step({"step": 41, **record}, tokens=1)
    assert len(shown) == 1
    assert shown[0].startswith("Warning: --tensorboard cannot ")
    assert shown[0].endswith("the run goes on without it")
    assert jobs.records(tmp_path)[-1]["step"] == 41
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=2)  # one that did not meet the error itself waits for more
    assert set(ended) <= {OSError}


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_reported_in_one_line_before_training(
    text, tmp_path, monkeypatch, capsys, package
):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None if name == package else 1)
    run = [*map(str, ("--data", text, *SMALL, f"--{package}", "--run-dir", tmp_path / "run"))]
    assert main(run) == 2
    out, err = capsys.readouterr()
    assert err == (
        f"error: --{package}: no {package} here; pip install -e '.[{package}]' brings it\n"
    )
    assert not out
    assert not (tmp_path / "run").exists()


# -- Weights & Biases -----------------------------------------------------------------------------


def _offline_rows(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The id and the rows in the file of an offline run, which is a log of LevelDB's format."""
    from wandb.proto import wandb_internal_pb2 as pb

    data = path.read_bytes()
    position, record, identity, rows = 7, b"", "", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # a block ends with zeros where no header fits
            position += left
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        part = data[position + 7 : position + 7 + length]
        position += 7 + length
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            message = pb.Record()
            message.ParseFromString(record)
            identity = message.run.run_id or identity
            if message.HasField("history"):
                items = message.history.item
                rows.append(
                    {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
    return identity, rows


def test_weights_and_biases_keeps_every_record_offline_and_the_id_over_a_resume(
    text, tmp_path, monkeypatch
):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    run = ["--data", text, *SMALL, *SKIPPING, "--wandb", "--run-dir", tmp_path]
    flags = [*map(str, run)]
    script = "import sys; from launch.train import main; sys.exit(main(sys.argv[1:]))"

    def do(*more: object) -> str:
        # A process of its own: wandb starts one beside it, and both are to end.
        command = [sys.executable, "-c", script, *flags, *map(str, more)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=jobs.ROOT, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert f"wandb sync {tmp_path}/wandb/offline-run-* uploads it" in do()
    [first] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    identity, rows = _offline_rows(first)
    steps = [r for r in jobs.records(tmp_path) if "loss" in r]
    kept = [row for row in rows if "train/loss" in row]
    assert [row["_step"] for row in kept] == [r["step"] for r in steps]
    assert [row["train/loss"] for row in kept] == pytest.approx([r["loss"] for r in steps])
    assert any("validation/bits_per_byte" in row for row in rows)

    do("--resume", tmp_path / "checkpoints" / "step-00000003")
    [second] = set((tmp_path / "wandb").glob("offline-run-*/*.wandb")) - {first}
    again, rows = _offline_rows(second)
    assert again == identity == (tmp_path / "wandb" / "id.txt").read_text().strip()
    assert [row["_step"] for row in rows if "train/loss" in row] == [4, 5, 6]

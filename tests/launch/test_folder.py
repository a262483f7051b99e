"""What is in a run's folder survives whatever is refused, and two runs never write in one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.train import main
from tests.launch import jobs, pooled
from tests.launch.test_checkpoint import _files_at_most
from tests.launch.test_strategies import SMALL

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]

SAVING = ("--checkpoint-every", 3, "--evaluate-every", 6)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


def _flags(text: Path, folder: Path, *more: object) -> list[str]:
    return [*map(str, ("--data", text, *SMALL, *SAVING, "--run-dir", folder, *more))]


def _content(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its lock, which says who wrote there last."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_resuming_into_the_folder_of_another_run_leaves_that_run_alone(text, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        assert main(_flags(text, folder)) == 0
    before = _content(two)
    assert main(["--resume", str(one), "--run-dir", str(two), "--steps", "8"]) == 2
    assert f"--run-dir {two}: it already holds a run" in capsys.readouterr().err
    assert _content(two) == before
    assert main(["--resume", str(one), "--run-dir", str(two), "--steps", "8", "--overwrite"]) == 0


def test_a_run_that_cannot_be_built_leaves_what_it_was_to_go_on_from(text, tmp_path, capsys):
    run = tmp_path / "run"
    model = ("--model", "tests.launch.test_models:make_own")
    assert main(_flags(text, run, *model)) == 0
    before = _content(run)
    first = run / "checkpoints" / "step-00000003"
    assert main(["--resume", str(first), "--checkpoint-activations", "full"]) == 2
    assert "has no blocks" in capsys.readouterr().err
    assert _content(run) == before


def test_a_disk_that_is_full_leaves_the_flags_of_the_run(text, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(_flags(text, run)) == 0
    before = _content(run)
    with _files_at_most(200):
        assert main(["--resume", str(run), "--steps", "8"]) == 2
    assert "cannot write there (File too large)" in capsys.readouterr().err
    assert _content(run) == before


def test_checkpoints_that_cannot_be_read_are_not_written_over(text, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(_flags(text, run)) == 0
    for path in run.glob("checkpoints/*/__0_0.distcp"):
        path.write_bytes(b"")
    before = _content(run)
    assert main(_flags(text, run, "--auto-resume")) == 2
    assert "is not whole" in capsys.readouterr().err
    assert _content(run) == before


def test_a_checkpoint_named_from_its_own_folder_goes_on_in_its_run(
    text, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    assert main(_flags(text, run)) == 0
    monkeypatch.chdir(run / "checkpoints")
    assert main(["--resume", "step-00000003", "--steps", "7"]) == 0
    assert jobs.records(run)[-1]["step"] == 7
    assert not (run / "checkpoints" / "step-00000003" / "config.json").exists()


def test_the_folder_of_checkpoints_stands_for_its_run(text, tmp_path):
    run = tmp_path / "run"
    assert main(_flags(text, run)) == 0
    assert main(["--resume", str(run / "checkpoints"), "--steps", "7"]) == 0
    assert jobs.records(run)[-1]["step"] == 7


def test_a_run_that_ended_before_its_first_record_is_in_nobodys_way(text, tmp_path, capsys):
    run = tmp_path / "run"
    model = ("--model", "tests.launch.test_models:make_own")
    assert main(_flags(text, run, *model, "--checkpoint-activations", "full")) == 2
    assert main(_flags(text, run, *model)) == 0


# -- two processes --------------------------------------------------------------------------------

WRITING = """
import sys
from pathlib import Path
from launch.folder import Lock
lock = Lock(Path(sys.argv[1]) / ".lock")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
def test_a_run_that_is_being_written_is_left_alone(text, tmp_path, capsys, how):
    run = tmp_path / "run"
    assert main(_flags(text, run)) == 0
    before = _content(run)
    command = [sys.executable, "-c", WRITING, str(run)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=jobs.ROOT, text=True, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        more = ("--resume", run, "--steps", 8) if how == "--resume" else ("--overwrite",)
        assert main(_flags(text, run, *more)) == 2
        assert f"another run is writing there (process {other.pid} on " in capsys.readouterr().err
        assert _content(run) == before
        other.kill()
    assert main(_flags(text, run, *more)) == 0


def test_a_job_that_has_ended_has_unlocked_its_folder(text, tmp_path):
    job = pooled.job(*_flags(text, tmp_path / "run"))
    assert "another run is writing" in pooled.refusal(*_flags(text, tmp_path / "run"))
    job.report.close()
    pooled.job(*_flags(text, tmp_path / "run")).report.close()


# -- flags ----------------------------------------------------------------------------------------


def test_a_setting_that_no_flag_has_is_named_and_not_passed_over(text, tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"learning_rate": 0.1}))
    assert main(_flags(text, tmp_path / "run", "--config", path)) == 2
    assert capsys.readouterr().err == (
        f"error: --config {path}: no flag is called learning_rate (--help lists every flag)\n"
    )


def test_flags_that_cannot_be_read_are_named_with_their_file(text, tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"steps": "many"}))
    assert main(["--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --config {path}: ")
    assert "invalid literal" in err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--seed", "-1", "--seed -1: it must be at least 0 and below 2^32"),
        ("--seed", str(2**70), f"--seed {2**70}: it must be at least 0 and below 2^32"),
        ("--timeout", "1e12", "--timeout 1000000000000.0: it must be at most"),
        ("--data", "x" * 300, "File name too long"),
        ("--run-dir", "x" * 300, "File name too long"),
        ("--resume", "x" * 300, "File name too long"),
        ("--config", "x" * 300, "File name too long"),
    ],
    ids=lambda value: value[:12],
)
def test_what_no_machine_can_do_is_one_line(tmp_path, capsys, flag, value, message):
    assert main([flag, value]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--strategy", ""), "--strategy : it must be one of"),
        (("--data", ""), "--data: it names nothing"),
        (("--model", ":x"), "--model :x: Empty module name"),
        (("--model", "os:getcwd"), "--model os:getcwd: it cannot be called so"),
        (("--gather-fp32",), "--gather-fp32: it is for --strategy fsdp2 or hsdp or fsdp2+tp"),
        (("--tp", "4"), "--tp: it is for --strategy fsdp2+tp, and this is none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_would_be_passed_over_is_refused(text, tmp_path, args, message):
    assert message in pooled.refusal(*_flags(text, tmp_path / "run", *args))


# -- checkpoints that cannot be -------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["progress", "scaler", "model", "settings", "data", "files"])
def test_a_manifest_that_lacks_something_is_passed_over(text, tmp_path, capsys, lost):
    run = tmp_path / "run"
    assert main(_flags(text, run)) == 0
    path = run / "checkpoints" / "step-00000006" / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in (lost, "digest"):
        del manifest[name]
    path.write_text(json.dumps(manifest))
    assert main(["--resume", str(run)]) == 0
    assert "step-00000006 is not whole" in capsys.readouterr().out


def test_a_file_in_the_place_of_the_checkpoints_is_refused_before_training(text, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").touch()
    assert main(_flags(text, run)) == 2
    assert "cannot write there (File exists)" in capsys.readouterr().err


def test_checkpoints_that_are_there_are_not_counted_twice(text, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    keep = ("--keep-checkpoints", 1)
    assert main(_flags(text, run, *keep)) == 0
    job = pooled.job(*_flags(text, tmp_path / "other"))
    job.report.close()
    # As much as one checkpoint takes, where the run has left one.
    free = shutil.disk_usage(tmp_path)._replace(free=int(1.5 * 12 * job.parameters))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert main(_flags(text, tmp_path / "new", *keep)) == 2
    assert "1 checkpoint and the next one need" in capsys.readouterr().err
    assert main(["--resume", str(run), "--steps", "7"]) == 0

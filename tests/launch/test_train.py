"""The launcher as a job: started by torchrun, killed, resumed, and given bad input."""

from __future__ import annotations

import itertools
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.train import main
from tests.launch import jobs
from tests.launch.jobs import TINY

# Jobs of several processes each: one at a time, beside whatever the other test workers do.
pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


# Overflow on purpose: 2^40 is far above what fp16 gradients can hold, and growth every 20 clean
# steps overflows again later; dropout draws random numbers that differ between ranks.
KILLED = (
    *("--precision", "fp16", "--init-scale", 2.0**40, "--growth-interval", "20"),
    *("--dropout", "0.1", "--steps", "60", "--checkpoint-every", "7", "--evaluate-every", "20"),
    *("--lr", "1e-2"),
)


@dataclass
class Finished:
    """A run that has ended, and what it printed."""

    folder: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def never_killed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("never_killed")
    done = jobs.run(2, "--data", text, "--run-dir", folder, *TINY, *KILLED)
    assert done.returncode == 0, done.stderr
    return Finished(folder, done)


def test_run_killed_and_resumed_writes_the_losses_of_one_never_killed(never_killed, text, tmp_path):
    run = ("--data", text, "--run-dir", tmp_path, *TINY, *KILLED)
    killed = jobs.start(2, *run)
    jobs.wait_for_step(tmp_path, 25)
    killed.kill(everything=True)
    assert killed.process.returncode != 0
    before = jobs.records(tmp_path)[-1]["step"]
    assert 25 <= before < 60

    resumed = jobs.run(2, *run, "--resume", tmp_path)

    assert resumed.returncode == 0, resumed.stderr
    expected = jobs.without_speed(jobs.records(never_killed.folder))
    assert jobs.without_speed(jobs.records(tmp_path)) == expected
    assert expected[-1]["step"] == 60
    assert sum(not row.get("stepped", True) for row in expected) > 10


def test_run_on_two_ranks_learns_and_says_where_its_results_are(never_killed):
    folder, done = never_killed.folder, never_killed.done
    validations = [r for r in jobs.records(folder) if "validation_loss" in r]
    assert [r["step"] for r in validations] == [0, 20, 40, 60]
    assert 7.5 < validations[0]["validation_bits_per_byte"] < 8.5
    assert validations[-1]["validation_bits_per_byte"] < 6.5
    assert f"Results are in {folder}" in done.stdout
    assert done.stdout.count("Results are in") == 1
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoints" / "step-00000060" / "manifest.json").is_file()
    assert not done.stderr


def test_precisions_end_at_the_same_loss(text, tmp_path):
    def last_loss(precision: str) -> float:
        run = ("--data", str(text), *TINY, "--steps", "60", "--precision", precision)
        assert main([*run, "--run-dir", str(tmp_path / precision)]) == 0
        loss: float = jobs.records(tmp_path / precision)[-1]["validation_loss"]
        return loss

    fp32 = last_loss("fp32")
    assert last_loss("fp16") == pytest.approx(fp32, rel=0.01)
    assert last_loss("bf16") == pytest.approx(fp32, rel=0.01)


def test_learning_rate_waits_while_steps_are_skipped(text, tmp_path):
    run = ("--data", str(text), *TINY, "--precision", "fp16", "--init-scale", str(2.0**40))
    run = (*run, "--warmup", "0")  # at the end of a warmup two steps share the peak
    assert main([*run, "--steps", "30", "--run-dir", str(tmp_path / "run")]) == 0
    steps = [r for r in jobs.records(tmp_path / "run") if "loss" in r]

    assert not steps[0]["stepped"]
    assert steps[-1]["stepped"]
    assert [r["skipped"] for r in steps] == [
        sum(not s["stepped"] for s in steps[: i + 1]) for i in range(30)
    ]
    for before, after in itertools.pairwise(steps):
        assert (before["learning_rate"] != after["learning_rate"]) == before["stepped"]


def _worker_exit_codes(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What torchrun's own summary says about each rank."""
    rows = [row.split(":", 1)[1] for row in done.stderr.splitlines() if "exitcode  :" in row]
    return [row.split()[0] for row in rows]


def test_bad_input_on_two_ranks_is_one_line_and_exit_code_2_from_each(tmp_path):
    done = jobs.run(2, "--data", tmp_path / "nowhere", "--run-dir", tmp_path / "run")

    assert done.returncode != 0
    errors = [row for row in done.stderr.splitlines() if row.startswith("error:")]
    assert errors == [f"error: --data {tmp_path / 'nowhere'}: no such file or folder"]
    assert _worker_exit_codes(done) == ["2", "2"]
    # torchrun prints a traceback of its own; none of its frames is ours.
    assert "launch/train.py" not in "".join(r for r in done.stderr.splitlines() if "File" in r)
    assert not (tmp_path / "run").exists()


def test_script_alone_exits_with_code_2(tmp_path):
    command = [*jobs.torchrun(1)[:1], str(jobs.SCRIPT), "--steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert done.stderr == "error: --steps 0: it must be more than 0\n"
    assert not done.stdout


def _tiny(folder: Path, text: Path, *more: str) -> list[str]:
    return ["--data", str(text), "--run-dir", str(folder), *TINY, "--steps", "2", *more]


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--precision", "fp64"], "invalid choice 'fp64'"),
        (["--width", "17"], "--width 17: it must be a multiple of --heads 2"),
        (["--batch", "5", "--accumulate", "2"], "--batch 5: it must be a multiple of"),
        (["--layers", "0"], "--layers 0: it must be more than 0"),
        (["--dropout", "1"], "--dropout 1.0: it must be at least 0 and below 1"),
        (["--width", "1000000"], "and there are"),
        (["--block", "4000"], "--block 4000: the last tenth of"),
        (["--batch", "100000"], "--batch 100000:"),
        (["--layer", "2"], "perhaps you meant --layers"),
        (["--layers", "two"], "invalid literal for int"),
        (["--device", "toaster"], "--device toaster: not a device"),
        (["--device", "mtia"], "--device mtia: not on this machine"),
        (["--precision", "fp16", "--init-scale", "inf"], "init_scale"),
        (["--model", "gtp"], "--model gtp: it must be gpt, digits, hf:NAME or module:factory"),
        (["--model", "digits"], "text, and --model digits is for images"),
        (["--strategy", "dpp"], "--strategy dpp: it must be one of"),
        (["--strategy", "fairscale_fsdp"], "--strategy fairscale_fsdp: it needs several ranks"),
        (["--timeout", "0"], "--timeout 0.0: it must be more than 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_argument_is_one_line(text, tmp_path, capsys, args, shown):
    assert main(_tiny(tmp_path / "run", text, *args)) == 2

    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert shown in err
    assert not out
    assert not (tmp_path / "run").exists()


def _refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a refused run prints."""
    capsys.readouterr()
    assert main(list(args)) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert not out
    return err


@pytest.mark.parametrize("kind", ["missing", "empty", "empty folder", "binary"])
def test_data_that_holds_no_text_is_refused(tmp_path, capsys, kind):
    data = tmp_path / "data"
    if kind == "empty":
        data.touch()
    elif kind == "empty folder":
        data.mkdir()
    elif kind == "binary":
        data.write_bytes(b"\x7fELF\0\0" * 1000)
    err = _refusal(capsys, "--data", str(data), "--run-dir", str(tmp_path / "run"))
    assert err.startswith(f"error: --data {data}: ")


def test_resuming_another_model_text_or_finished_run_is_refused(text, tmp_path, capsys):
    old = tmp_path / "old"
    assert main(_tiny(old, text)) == 0
    other_text = jobs.text_file(tmp_path, kilobytes=16)
    resume = ("--resume", str(old))

    err = _refusal(capsys, *_tiny(tmp_path / "run", text, *resume, "--width", "32"))
    assert "another model, with width 16 where this run has 32; pass --width 16" in err
    err = _refusal(capsys, *_tiny(tmp_path / "run", other_text, *resume, "--steps", "4"))
    assert "it was trained on other data" in err
    err = _refusal(capsys, *_tiny(tmp_path / "run", text, *resume))
    assert "all its 2 steps are done" in err


def test_folder_that_holds_a_run_is_kept_unless_it_is_overwritten(text, tmp_path, capsys):
    assert main(_tiny(tmp_path / "run", text)) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()

    assert "it already holds a run" in _refusal(capsys, *_tiny(tmp_path / "run", text))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert main(_tiny(tmp_path / "run", text, "--overwrite")) == 0


def test_folder_that_cannot_be_made_is_refused(text, tmp_path, capsys):
    (tmp_path / "file").touch()
    err = _refusal(capsys, *_tiny(tmp_path / "file" / "run", text))
    assert f"{tmp_path / 'file'} is no folder" in err


def test_resuming_with_other_settings_says_which(text, tmp_path, capsys):
    assert main(_tiny(tmp_path / "run", text)) == 0
    more = ("--resume", str(tmp_path / "run"), "--steps", "4", "--lr", "0.5")
    assert main(_tiny(tmp_path / "run", text, *more)) == 0
    assert "with other settings: steps 2 -> 4, lr 0.004 -> 0.5" in capsys.readouterr().out


def test_missing_extra_is_named(tmp_path):
    hidden = "import importlib.util as u, runpy, sys; real = u.find_spec;"
    hidden += "u.find_spec = lambda name: None if name == 'rich' else real(name);"
    hidden += f"sys.argv = ['train.py']; runpy.run_path({str(jobs.SCRIPT)!r}, run_name='__main__')"
    command = [*jobs.torchrun(1)[:1], "-c", hidden]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert done.stderr == "error: no rich here; pip install -e '.[train]' brings it\n"


THREADS_LEFT = """
import sys
from pathlib import Path
from launch.train import main
code = main(sys.argv[1:])
for task in Path("/proc/self/task").iterdir():
    name = (task / "comm").read_text().strip()
    if "gloo" in name:
        print("left behind:", name, flush=True)
sys.exit(code)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc")
@pytest.mark.parametrize(
    "steps", [2, pytest.param(0, marks=pytest.mark.slow)], ids=["trained", "refused"]
)
def test_no_thread_of_the_group_outlives_a_run(text, tmp_path, steps):
    # One that does may abort the process, should it need the interpreter while that is ending.
    script = tmp_path / "script.py"
    script.write_text(THREADS_LEFT)
    run = ("--data", text, "--run-dir", tmp_path / "run", *TINY, "--steps", steps)
    done = jobs.run(2, *run, script=script)
    assert (done.returncode == 0) == (steps > 0), done.stderr
    assert "left behind" not in done.stdout

"""What a person runs into: a kill too early, too large a learning rate, one rank, a folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from launch.data import Data
from launch.train import main
from tests.launch import jobs, pooled
from tests.launch.test_strategies import SMALL, _agree

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


def _flags(text: Path, folder: Path, *more: object) -> list[str]:
    return [*map(str, ("--data", text, *SMALL, "--run-dir", folder, *more))]


# -- advice that can be followed ------------------------------------------------------------------


def test_before_the_first_checkpoint_nobody_is_advised_to_resume(text, tmp_path):
    job = pooled.job(*_flags(text, tmp_path / "run"))
    job.report.close()
    assert "--resume" not in job.position
    assert "--overwrite" in job.position
    job.run.progress.step = 1
    job.save(must=True)
    assert job.position == f"in step 2; go on with --resume {tmp_path / 'run'}"


def test_a_resumed_run_without_a_checkpoint_of_its_own_names_the_one_it_came_from(text, tmp_path):
    old = tmp_path / "old"
    assert main(_flags(text, old)) == 0
    job = pooled.job(*_flags(text, tmp_path / "new", "--resume", old, "--steps", 9))
    job.report.close()
    newest = old / "checkpoints" / "step-00000006"
    assert job.position == f"in step 7; go on with --resume {newest}"


# -- losses that are not finite -------------------------------------------------------------------

# Weights of 1e30 have products that are inf.
LARGE = ("--lr", 1e30, "--warmup", 0, "--checkpoint-every", 4, "--evaluate-every", 50)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_ends_the_run_before_any_checkpoint(
    text, tmp_path, capsys, precision
):
    run = _flags(text, tmp_path, *LARGE, "--precision", precision)
    assert main(run) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: step 2: the loss is ")
    assert ", at learning rate 9.39711e+29" in err
    assert "--allow-nan" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("checkpoints/*"))
    assert [row["loss"] for row in jobs.records(tmp_path) if "loss" in row][1:] == [None]


def test_a_run_that_may_go_on_does_and_its_summary_keeps_every_line(text, tmp_path, capsys):
    assert main(_flags(text, tmp_path, *LARGE, "--allow-nan")) == 0
    out = capsys.readouterr().out
    assert jobs.records(tmp_path)[-1]["step"] == 6
    for name in ("Loss", "Bits per byte"):
        [line] = [row for row in out.splitlines() if row.startswith(f"{name}  ")]
        assert line.endswith("-> nan")


def test_a_validation_loss_that_is_not_finite_ends_the_run(text, tmp_path, capsys):
    run = _flags(text, tmp_path, *LARGE, "--precision", "fp16", "--init-scale", 1024)
    assert main([*run, "--steps", "3"]) == 2
    assert "error: step 3: the validation loss is nan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("--lr", "inf"), ("--lr", "nan"), ("--clip", "inf"), ("--eps", "inf")]
)
def test_a_number_that_is_not_finite_is_refused(text, tmp_path, capsys, flag, value):
    assert main(_flags(text, tmp_path, flag, value)) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} {value}: it must be finite")


# -- one rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_rank_trains_as_no_rank_does(text, tmp_path, strategy, precision):
    more = ("--precision", precision, "--init-scale", 1024) if precision == "fp16" else ()
    expected = pooled.train(tmp_path / "none", _flags(text, tmp_path / "none", *more))
    assert main(_flags(text, tmp_path / "one", *more, "--strategy", strategy)) == 0
    _agree(jobs.without_speed(jobs.records(tmp_path / "one")), expected, precision)


# -- the flags of a run that is resumed -----------------------------------------------------------


def test_resume_alone_takes_the_flags_of_the_run(text, tmp_path, capsys):
    flags = _flags(text, tmp_path / "run", "--checkpoint-every", 3, "--precision", "fp16")
    assert main(flags) == 0
    straight = jobs.without_speed(jobs.records(tmp_path / "run"))
    capsys.readouterr()
    assert main(["--resume", str(tmp_path / "run" / "checkpoints" / "step-00000003")]) == 0
    assert jobs.without_speed(jobs.records(tmp_path / "run")) == straight
    assert "with other" not in capsys.readouterr().out
    assert main(["--resume", str(tmp_path / "run")]) == 2
    assert "all its 6 steps are done; pass a --steps above 6" in capsys.readouterr().err


def test_flags_given_beside_resume_win_and_are_named(text, tmp_path, capsys):
    assert main(_flags(text, tmp_path / "run", "--precision", "fp16")) == 0
    capsys.readouterr()
    more = ["--steps", "8", "--lr=0.5", "--evaluate-every", "4", "--opt-level", "O2"]
    assert main(["--resume", str(tmp_path / "run"), *more]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "with other settings: precision fp16 -> None, opt_level None -> O2, steps 6 -> 8,"
        " lr 0.01 -> 0.5, evaluate_every 3 -> 4" in shown
    )
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["lr"], config["shape"]["width"]) == (0.5, 16)


def test_a_run_whose_flags_are_lost_is_resumed_with_those_given(text, tmp_path, capsys):
    assert main(_flags(text, tmp_path / "run")) == 0
    (tmp_path / "run" / "config.json").unlink()
    more = ("--resume", tmp_path / "run", "--steps", 7)
    assert main(_flags(text, tmp_path / "run", *more)) == 0
    assert "with other settings: steps 6 -> 7" in capsys.readouterr().out


def test_config_takes_the_flags_of_another_run_and_not_its_folder(text, tmp_path, capsys):
    assert main(_flags(text, tmp_path / "one")) == 0
    given = ["--config", str(tmp_path / "one" / "config.json"), "--run-dir", str(tmp_path / "two")]
    assert main([*given, "--steps", "4"]) == 0
    one, two = (jobs.without_speed(jobs.records(tmp_path / name)) for name in ("one", "two"))
    assert [row["step"] for row in two if "loss" in row] == [1, 2, 3, 4]
    assert [row["gradient_norm"] for row in two if row["step"] == 1] == [
        row["gradient_norm"] for row in one if row["step"] == 1
    ]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (None, "no such file"),
        ("{", "it is no JSON"),
        ("[1]", "it is no config.json of a run"),
        ('{"steps": "many"}', "invalid literal for int"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, capsys, content, shown):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    assert main(["--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert shown in err
    assert err.count("\n") == 1


# -- the folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "device"])
def test_a_folder_below_what_is_no_folder_is_named(text, tmp_path, capsys, kind):
    path = Path("/dev/null") if kind == "device" else tmp_path / "file"
    if kind == "file":
        path.touch()
    assert main(_flags(text, path / "run")) == 2
    assert capsys.readouterr().err == f"error: --run-dir {path / 'run'}: {path} is no folder\n"


# -- how long -------------------------------------------------------------------------------------


def test_a_run_out_of_time_saves_and_exits_as_a_preempted_one(text, tmp_path, capsys):
    run = _flags(text, tmp_path / "run")
    assert main([*run, "--max-minutes", "1e-9"]) == 143
    assert f"Stopped as asked after step 1; go on with --resume {tmp_path / 'run'}" in (
        capsys.readouterr().out
    )
    assert main(["--resume", str(tmp_path / "run"), "--max-minutes", "600"]) == 0
    expected = pooled.train(tmp_path / "straight", _flags(text, tmp_path / "straight"))
    assert jobs.without_speed(jobs.records(tmp_path / "run")) == expected


@pytest.mark.parametrize("every", [2, 4])
def test_records_come_as_often_as_asked_and_say_the_same(text, tmp_path, every):
    flags = ("--precision", "fp16", "--init-scale", 2.0**18, "--evaluate-every", 50)
    full = pooled.train(tmp_path / "full", _flags(text, tmp_path / "full", *flags))
    more = ("--log-every", every)
    rows = pooled.train(tmp_path / "few", _flags(text, tmp_path / "few", *flags, *more))
    wanted = [s for s in range(1, 7) if s % every == 0 or s == 6]
    assert [row["step"] for row in rows if "loss" in row] == wanted
    assert any(row.get("skipped") for row in full)
    assert rows == [row for row in full if row["step"] in (0, *wanted)]


def test_none_are_kept_where_none_are_wanted(text, tmp_path, capsys):
    assert main(_flags(text, tmp_path, "--keep-checkpoints", 0)) == 0
    assert not (tmp_path / "checkpoints").exists()
    assert math.isfinite(jobs.records(tmp_path)[-1]["validation_loss"])
    assert "--resume" not in capsys.readouterr().out


# -- models of one's own --------------------------------------------------------------------------


class Own(nn.Module):
    """A byte model with a mistake."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.embed, self.unused = nn.Embedding(256, 256), nn.Linear(2, 2)
        self.unused.requires_grad_(mistake == "unused")
        self.embed.requires_grad_(mistake != "frozen")

    def forward(self, x: Tensor) -> Any:
        logits = self.embed(x)
        if self.mistake == "short":
            return logits[:, :-1]
        if self.mistake == "nan":
            return logits * math.nan
        return (logits,) if self.mistake == "tuple" else logits


def make_own(data: Data, mistake: str) -> Own:
    return Own(mistake)


@pytest.mark.parametrize(
    ("mistake", "strategy", "message"),
    [
        ("short", "none", "--model: it must return logits (32, 16, classes), not (32, 15, 256)"),
        ("tuple", "none", "--model: it must return logits (32, 16, classes), not tuple"),
        ("frozen", "fsdp2", "make_own: it has no parameter to train"),
        ("unused", "ddp", "unused.weight takes no part in what it returns, and DDP waits for"),
        ("nan", "none", "step 0: the validation loss is nan: --model"),
    ],
)
def test_a_model_with_a_mistake_is_one_line(text, tmp_path, capsys, mistake, strategy, message):
    model = ("--model", f"{__name__}:make_own", "--model-args", f"mistake={mistake}")
    assert main(_flags(text, tmp_path, *model, "--strategy", strategy)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1

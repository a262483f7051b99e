"""What people try first: help, flags of other programs, their own errors, and Ctrl-C."""

import os
import subprocess
import sys

import pytest
import torch

from launch.config import Config, parser
from launch.job import make_model
from launch.optim import make_optimizers
from launch.parallel import Layout
from launch.stop import exit_code_of
from launch.train import main
from tests.launch import jobs
from tests.launch.jobs import TINY
from tests.launch.test_refusals import refused

# What other programs call a flag.
ELSEWHERE = {
    "--learning-rate 1": "--lr",
    "--batch-size 8": "--batch",
    "--epochs 2": "--steps",
    "--max_steps=7": "--steps",
    "--block-size 8": "--block",
    "--opt-level O1": "--precision",
    "--fp16": "--precision",
    "--gradient-accumulation-steps 2": "--accumulate",
    "--max-grad-norm 1": "--clip",
    "--output-dir x": "--run-dir",
    "--precison fp16": "--precision",
}


@pytest.mark.parametrize("given", ELSEWHERE)
def test_flag_of_another_program_is_answered_with_ours(text, tmp_path, capsys, given):
    said = refused(capsys, "--data", text, *TINY, "--run-dir", tmp_path / "run", *given.split())
    assert ELSEWHERE[given] in said.removeprefix(f"error: {given.split()[0]}")


def test_help_has_groups_and_one_line_for_each_flag():
    lines = parser().format_help().splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert len(titles) >= 6
    flags = [line for line in lines if line.startswith("  --")]
    assert all(len(line.split("  ")[-1].strip()) > 4 for line in flags)
    assert len(flags) == len([line for line in lines if line.startswith("  ")]) - 1  # -h


def test_betas_eps_and_weight_decay_reach_the_optimizer():
    config = Config(beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.3)
    model = torch.nn.Linear(2, 2)
    (group, bias) = make_optimizers(model, config)[0].param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.99), 1e-6, 0.3)
    assert bias["weight_decay"] == 0.0


# A module of the user's own, whose functions go wrong inside.
MINE = """
import torch

def data():
    return [][0]

def pairs():
    return [(torch.zeros(2), 0)] * 8, [(torch.zeros(2), 0)], 2

def model(data):
    return torch.nn.Linear(2, "two")

class Wrong(torch.nn.Linear):
    def __init__(self, data):
        super().__init__(2, 2)
    def forward(self, x):
        return super().forward(x.reshape(3, 5))
"""


@pytest.mark.parametrize(
    ("flags", "line", "error"),
    [
        ("--data mine:data", 5, "IndexError"),
        ("--data mine:pairs --model mine:model", 11, "TypeError"),
        ("--data mine:pairs --model mine:Wrong", 17, "RuntimeError"),
        ("--data broken:data", 1, "ZeroDivisionError"),
    ],
)
def test_error_of_ones_own_names_its_line_and_keeps_its_traceback(
    tmp_path, monkeypatch, capsys, flags, line, error
):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    # What is raised again, Python prints with its traceback, and exits with 1.
    with pytest.raises((LookupError, TypeError, RuntimeError, ArithmeticError)) as raised:
        main([*map(str, TINY), *flags.split(), "--run-dir", str(tmp_path / "run")])
    assert type(raised.value).__name__ == error
    (first,) = capsys.readouterr().err.splitlines()
    file = flags.split()[-1].partition(":")[0] if "broken" in flags else "mine"
    assert first.startswith(f"error in {tmp_path / file}.py, line {line}: {error}")


def test_ctrl_c_before_the_first_step_is_one_line(capsys):
    def program() -> None:
        raise KeyboardInterrupt

    assert exit_code_of(program) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_check_says_alone_whether_flags_can_run(text, tmp_path, capsys):
    given = [*map(str, ("--data", text, *TINY)), "--run-dir", str(tmp_path / "run"), "--check"]
    assert main([*given, "--shard", "2", "--tp", "2"]) == 0
    assert "on 4 ranks" in capsys.readouterr().out
    assert "--heads" in refused(capsys, *given, "--heads", 3)
    assert not (tmp_path / "run").exists()
    code = [sys.executable, "-m", "launch.train", "--check", "--lr", "x"]
    environment = {**os.environ, "PYTHONPATH": str(jobs.ROOT)}
    done = subprocess.run(code, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_weights_of_a_tensor_depend_on_its_name_alone():
    small, large = (
        make_model(Config(layers=layers), _Classes(), Layout(), torch.device("cpu"))
        for layers in (1, 2)
    )
    of_large = dict(large.named_parameters())
    for name, weight in small.named_parameters():
        alike = weight.equal(of_large[name])
        assert alike or name.endswith(("attention_out.weight", "feed_out.weight")), name
    assert not of_large["blocks.0.qkv.weight"].equal(of_large["blocks.1.qkv.weight"])


def eager(data: object) -> torch.nn.Module:
    """A model that leaves the region for its products."""

    class Eager(torch.nn.Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(tokens) @ torch.eye(256)

    return Eager(256, 256)


def test_breach_of_the_first_step_is_a_warning_with_its_fix(text, tmp_path, capsys):
    args = [*map(str, ("--data", text, *TINY)), "--steps", "2", "--precision", "bf16", "--run-dir"]
    args += [str(tmp_path), "--model", f"{__name__}:eager", "--keep", "0"]
    assert main(args) == 0
    said = capsys.readouterr().out
    assert "Warning: --precision bf16: compute: declared bf16, found fp32" in said
    assert "fix:" in said
    assert (tmp_path / "precision.txt").read_text().startswith("1 breach")
    assert main([*args, "--no-check-precision", "--overwrite"]) == 0
    assert "Warning" not in capsys.readouterr().out


def test_precision_of_a_file_pins_modules_and_goes_along_with_the_run(text, tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text('level = "bf16"\n[modules]\n"head" = "fp32"\n')
    args = ("--data", text, *TINY, "--steps", 2, "--precision", file)
    rows = jobs.train(tmp_path / "run", args)
    assert rows != jobs.train(tmp_path / "plain", (*args[:-1], "bf16"))
    file.unlink()
    again = jobs.train(tmp_path / "run", ("--resume", tmp_path / "run", "--steps", 3))
    assert again[-1]["step"] == 3
    given = [*map(str, ("--data", text, *TINY)), "--run-dir", str(tmp_path / "no"), "--precision"]
    for content in ('level = "bf17"', "level =", "", '[modules]\n"head" = "fp32"'):
        (tmp_path / "bad.toml").write_text(content)
        assert "bad.toml" in refused(capsys, *given, tmp_path / "bad.toml")


class _Classes:
    classes = 256

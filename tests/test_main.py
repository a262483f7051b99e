"""The command line: what it prints, writes and exits with."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import distamp
from distamp.__main__ import main


def with_loss():
    return nn.Linear(8, 8), torch.zeros(4, 8), lambda y: y.exp().mean()


def on_meta():
    model = nn.Linear(8, 8)
    assert model.weight.is_meta
    return model, torch.zeros(4, 8)


def reads_values():
    scale = torch.ones(1).item()
    return nn.Linear(8, int(scale)), torch.zeros(4, 8)


def trains():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    return step, model, optimizer


def trains_as_declared():
    step, model, optimizer = trains()
    contract = distamp.Contract(compute="fp32")
    return {"step": step, "model": model, "optimizer": optimizer, "contract": contract}


def wrong():
    return nn.Linear(8, 8)


def raises():
    raise RuntimeError("no data")


not_callable = 3


def test_check_says_whether_a_step_keeps_its_contract(capsys, tmp_path):
    path = tmp_path / "contract.json"
    assert main(["check", "tests.test_main:trains", "--json", str(path)]) == 0
    assert "0 breaches" in capsys.readouterr().out
    assert json.loads(path.read_text())["seen"]["compute"] == {"bf16": 2}
    assert main(["check", "tests.test_main:trains", "--level", "O0"]) == 1
    assert "declared fp32, found bf16" in capsys.readouterr().out
    assert main(["check", "tests.test_main:trains_as_declared"]) == 1


def run(capsys, *arguments):
    code = main(["preflight", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_options_are_followed_and_an_error_is_exit_code_1(capsys, tmp_path):
    path = tmp_path / "preflight.json"
    chosen = ("--device-type", "cpu", "--dtype", "bfloat16", "--json", str(path))
    code, out, _ = run(capsys, "tests.test_main:with_loss", *chosen)
    assert code == 0
    assert "bfloat16" in out
    assert "exp" in out
    assert "findings" in json.loads(path.read_text())
    code, out, _ = run(capsys, "examples.precision_report:mistaken")
    assert code == 1
    assert "binary_cross_entropy" in out


def test_weights_are_made_only_where_it_is_asked_for(capsys):
    assert run(capsys, "tests.test_main:on_meta")[0] == 0
    assert run(capsys, "tests.test_main:reads_values")[0] == 2
    assert run(capsys, "tests.test_main:reads_values", "--allocate")[0] == 0


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("tests.test_main", "package.module:name"),
        ("tests.absent:fine", "tests.absent"),
        ("tests.test_main:absent", "absent"),
        ("tests.test_main:not_callable", "not callable"),
        ("tests.test_main:wrong", "Linear"),
        ("tests.test_main:raises", "no data"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, factory, message):
    code, out, err = run(capsys, factory)
    assert (code, out) == (2, "")
    assert err.startswith("distamp: ")
    assert err.count("\n") == 1
    assert message in err


def test_it_runs_as_a_module_from_any_folder(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.zeros(1, 2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "distamp", "preflight", "mine:make"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "linear" in done.stdout) == (0, True), done.stderr

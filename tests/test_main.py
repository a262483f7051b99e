"""The command line: what it prints, writes and exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from distamp.__main__ import main
from distamp.autocast import PrecisionReport


class Net(nn.Module):
    """Fails under CUDA autocast."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 1)

    def forward(self, x):
        return torch.nn.functional.binary_cross_entropy(self.body(x).sigmoid(), x[:, :1].sigmoid())


def fine():
    return nn.Linear(8, 8), torch.zeros(4, 8)


def with_loss():
    return nn.Linear(8, 8), torch.zeros(4, 8), lambda y: y.exp().mean()


def fails():
    return {"model": Net(), "example_inputs": torch.zeros(4, 8)}


def unfinished():
    model = nn.Linear(8, 8)
    model.register_forward_hook(lambda *_: torch.cuda.current_stream() and None)
    return model, torch.zeros(4, 8)


def on_meta():
    model = nn.Linear(8, 8)
    assert model.weight.is_meta
    return model, torch.zeros(4, 8)


def reads_values():
    scale = torch.ones(1).item()
    return nn.Linear(8, int(scale)), torch.zeros(4, 8)


def wrong():
    return nn.Linear(8, 8)


def raises():
    raise RuntimeError("no data")


not_callable = 3


def run(capsys, *arguments):
    code = main(["preflight", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table_and_the_findings_are_printed(capsys):
    code, out, err = run(capsys, "tests.test_main:fine")
    assert (code, err) == (0, "")
    assert "Precision report: Linear, cuda, float16, simulated" in out
    assert "linear (addmm)" in out
    assert "not measured" in out or torch.cuda.is_available()


def test_an_error_is_exit_code_1(capsys):
    code, out, _ = run(capsys, "tests.test_main:fails")
    assert code == 1
    assert "ERROR    (model): binary_cross_entropy  [autocast-error]" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_an_unfinished_step_is_exit_code_1_unless_allowed(capsys):
    code, out, _ = run(capsys, "tests.test_main:unfinished", "--findings")
    assert code == 1
    assert out.startswith("forward NOT FINISHED, 1 of 1 modules visited\n")
    assert "ERROR    (model): forward  [not-simulated]" in out
    code, out, _ = run(capsys, "tests.test_main:unfinished", "--allow-unfinished")
    assert code == 0
    assert "forward NOT FINISHED" in out


def test_the_findings_alone(capsys):
    _, out, _ = run(capsys, "tests.test_main:fails", "--findings")
    assert "\n\nfindings\nERROR" in out
    assert "Precision report" not in out


def test_device_dtype_and_phases_are_chosen(capsys):
    _, out, _ = run(
        capsys,
        "tests.test_main:with_loss",
        *("--device-type", "cpu", "--dtype", "bfloat16", "--no-measure"),
    )
    assert "Linear, cpu, bfloat16, simulated" in out
    assert "exp" in out
    assert "\nbackward" not in out
    assert out.rstrip().endswith("No findings.")


def test_json_and_picture_are_written(capsys, tmp_path):
    json_path, picture = tmp_path / "new" / "preflight.json", tmp_path / "preflight.svg"
    code, out, _ = run(
        capsys, "tests.test_main:fine", "--json", str(json_path), "--plot", str(picture)
    )
    assert code == 0
    assert f"wrote {json_path}" in out
    values = json.loads(json_path.read_text())
    assert values["forward"] is True
    assert values["visited"] == [""]
    (tmp_path / "report.json").write_text(json.dumps(values["report"]))
    assert PrecisionReport.from_json(tmp_path / "report.json").model == "Linear"
    assert "<svg" in picture.read_text()


def test_weights_are_not_made(capsys):
    assert run(capsys, "tests.test_main:on_meta")[0] == 0


def test_a_factory_that_reads_values_is_told_of_allocate(capsys):
    code, _, err = run(capsys, "tests.test_main:reads_values")
    assert code == 2
    assert "--allocate" in err
    assert run(capsys, "tests.test_main:reads_values", "--allocate")[0] == 0


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("tests.test_main", "named package.module:name, got 'tests.test_main'"),
        ("tests.absent:fine", "cannot import tests.absent"),
        ("tests.test_main:absent", "tests.test_main has no 'absent'"),
        ("tests.test_main:not_callable", "not callable, but a int"),
        ("tests.test_main:wrong", "must return (model, example_inputs)"),
        ("tests.test_main:raises", "raised RuntimeError: no data"),
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
        [sys.executable, "-m", "distamp", "preflight", "mine:make", "--findings"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("forward finished, 1 of 1 modules visited")


def test_help_names_the_factory(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["preflight", "--help"])
    assert stopped.value.code == 0
    assert "package.module:name" in capsys.readouterr().out

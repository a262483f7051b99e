"""``python -m distamp``: what it finds, prints and exits with; and doctor never hangs."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import distamp
from distamp.__main__ import main
from distamp.doctor import diagnose

ROOT = Path(__file__).parents[1]


def on_rank(
    rank: int | None, world: int, port: int, changed: dict[str, str], args: list[str]
) -> tuple[int, str, str]:
    """Run the command as torchrun starts it; returns exit code, output and errors.

    ``changed`` is what rank 1 has otherwise: variables, and ``"version"``.
    """
    rank = int(os.environ["RANK"]) if rank is None else rank
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    changed = changed if rank == 1 else {}
    version = changed.pop("version", distamp.__version__)
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {**place, **changed, "RANK": str(rank)}),
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(world)}),
        mock.patch.object(distamp, "__version__", version),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = main(["doctor", *args])
    return code, output.getvalue(), errors.getvalue()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def two(pool: Any, *args: str, **changed: str) -> list[tuple[int, str, str]]:
    """What two ranks say."""
    return pool.run(on_rank, None, 2, free_port(), changed, list(args), group="none")


def test_a_sound_machine_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    versions = diagnosis["facts"]["distamp"], diagnosis["facts"]["torch"]
    assert versions == (distamp.__version__, torch.__version__)
    assert (diagnosis["problems"], diagnosis["ranks"]) == ([], 1)


def test_it_tells_nothing_of_who_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "secret-host")
    text = diagnose().to_json()
    for private in (socket.gethostname(), str(Path.home()), str(ROOT), "secret-host"):
        assert private not in text


def test_two_ranks_are_alike_or_both_are_told_what_differs(ranks2: Any) -> None:
    (first, out, _), (second, silent, _) = two(ranks2)
    assert (first, second, silent) == (0, 0, "")
    page = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (page["ranks"], page["problems"]) == ("2", "none")
    (first, out, _), (second, silent, error) = two(ranks2, version="9.9")
    assert (first, second, silent) == (1, 1, "")
    wanted = f"distamp differs between ranks: {distamp.__version__} on [0], 9.9 on [1]"
    assert wanted in out
    assert wanted in error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_its_peer_ends_with_a_reason(rank: int) -> None:
    code, *said = on_rank(rank, 2, free_port(), {}, ["--timeout", "1"])
    assert code == 1
    assert f"rank {rank} does not reach the 2 ranks" in said[rank]


def test_a_group_that_cannot_connect_is_a_problem_on_all_ranks(ranks2: Any) -> None:
    answers = two(ranks2, "--timeout", "5", GLOO_SOCKET_IFNAME="no-such-interface")
    assert [code for code, _, _ in answers] == [1, 1]


# -- preflight and check ---------------------------------------------------------------------------


def with_loss():
    return nn.Linear(8, 8), torch.zeros(4, 8), lambda y: y.exp().mean()


def on_meta():
    model = nn.Linear(8, 8)
    assert model.weight.is_meta
    return model, torch.zeros(4, 8)


def reads_values():
    return nn.Linear(8, int(torch.ones(1).item())), torch.zeros(4, 8)


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
    contract = distamp.PrecisionContract(compute="fp32")
    return {"step": step, "model": model, "optimizer": optimizer, "contract": contract}


def wrong():
    return nn.Linear(8, 8)


def raises():
    raise RuntimeError("no data")


not_callable = 3


def only_a_step():
    return (print,)


def nothing():
    return {}


def no_model():
    return {"step": print, "optimizer": None}


def a_list_of_names():
    return print, ["a", "b"]


def too_many():
    return print, nn.Linear(2, 2), None, "more"


def another_word():
    return {
        "step": print,
        "model": nn.Linear(2, 2),
        "example_inputs": torch.ones(1, 2),
        "optimiser": None,
    }


def nothing_at_all():
    pass


def needs_a_name(name):
    return print, nn.Linear(2, 2)


def without_parameters():
    return print, nn.ReLU()


def a_step_with_a_batch():
    return lambda batch: batch, nn.Linear(2, 2)


def a_step_that_is_a_number():
    return 3, nn.Linear(2, 2)


def a_step_that_raises():
    return lambda: {}["loss"], nn.Linear(2, 2)


def an_optimizer_of_names():
    return lambda: None, nn.Linear(2, 2), ["adam"]


def a_contract_of_words():
    return {"step": lambda: None, "model": nn.Linear(2, 2), "contract": {"compute": "bf16"}}


def a_loss_that_is_a_word():
    return nn.Linear(2, 2), torch.ones(1, 2), "mse"


def a_model_of_nothing():
    return nn.ReLU(), torch.ones(1, 2)


def test_check_says_whether_a_step_keeps_its_contract(capsys, tmp_path):
    path = tmp_path / "contract.json"
    assert main(["check", "tests.test_doctor:trains", "--json", str(path)]) == 0
    assert "0 violations" in capsys.readouterr().out
    assert json.loads(path.read_text())["seen"]["compute"] == {"bf16": 2}
    assert main(["check", "tests.test_doctor:trains", "--level", "fp32"]) == 1
    assert "declared fp32, found bf16" in capsys.readouterr().out
    assert main(["check", "tests.test_doctor:trains_as_declared"]) == 1


def run(capsys, *arguments):
    code = main(["preflight", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_options_are_followed_and_an_error_is_exit_code_1(capsys, tmp_path):
    path = tmp_path / "preflight.json"
    chosen = ("--device-type", "cpu", "--level", "bf16", "--json", str(path))
    code, out, _ = run(capsys, "tests.test_doctor:with_loss", *chosen)
    assert code == 0
    assert "bfloat16" in out
    assert "exp" in out
    assert "findings" in json.loads(path.read_text())
    code, out, _ = run(capsys, "examples.precision_report:mistaken")
    assert code == 1
    assert "binary_cross_entropy" in out


def test_weights_are_made_only_where_it_is_asked_for(capsys):
    for code, *given in ((0, "on_meta"), (2, "reads_values"), (0, "reads_values", "--allocate")):
        assert run(capsys, f"tests.test_doctor:{given[0]}", *given[1:])[0] == code


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("tests.test_doctor", "package.module:name"),
        ("tests.absent:fine", "tests.absent"),
        ("tests.test_doctor:absent", "tests.test_doctor has no absent. "),
        ("tests.test_doctor:with_los", "has no with_los. Did you mean 'with_loss'?"),
        ("tests.test_doctor:nothing_at_all", "returned None, not (model, example_inputs"),
        ("tests.test_doctor:needs_a_name", "must take no arguments, and takes (name)"),
        ("tests.test_doctor:a_loss_that_is_a_word", "returned a str as loss_fn"),
        ("tests.test_doctor:a_model_of_nothing", "a model without parameters, ReLU"),
        ("tests.test_doctor:a_step_that_raises", "returned a function as the model"),
        ("tests.test_doctor:not_callable", "not callable"),
        ("tests.test_doctor:wrong", "returned a Linear, not (model, example_inputs, loss_fn)"),
        ("tests.test_doctor:raises", "tests.test_doctor:raises raised RuntimeError: no data"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, factory, message):
    code, out, err = run(capsys, factory)
    assert (code, out) == (2, "")
    assert err.startswith("distamp: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("without_parameters", "returned a model without parameters, ReLU"),
        ("a_step_with_a_batch", "must take no arguments, and takes (batch)"),
        ("a_step_that_is_a_number", "returned is an int, which is not callable"),
        ("a_step_that_raises", "a_step_that_raises returned raised KeyError: 'loss'."),
        ("an_optimizer_of_names", "optimizer= is a torch.optim.Optimizer or several of them"),
        ("a_contract_of_words", "returned a dict as the contract"),
        ("a_list_of_names", "returned a str as the model"),
        ("nothing_at_all", "returned None, not (step, model, optimizer)"),
    ],
)
def test_check_refuses_other_values_of_a_factory_in_a_sentence(capsys, factory, message):
    assert main(["check", f"tests.test_doctor:{factory}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("distamp: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_module_that_raises_while_it_is_imported_is_named(capsys, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("1 +")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "broken_module:make"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("distamp: Importing broken_module for broken_module:make raised Syntax")


@pytest.mark.parametrize("command", ["check", "preflight"])
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("only_a_step", "returned no "),
        ("nothing", "returned no "),
        ("no_model", "returned no model"),
        ("a_list_of_names", ""),
        ("too_many", "returned 4 values"),
        ("another_word", "optimiser, which this command does not take"),
    ],
)
def test_a_factory_that_gives_too_little_or_too_much_ends_in_a_sentence(
    capsys, command, factory, message
):
    assert main([command, f"tests.test_doctor:{factory}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("distamp: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("distamp preflight mine:make", 0, "linear"),
        ("distamp.doctor", 1, "the command is python -m distamp doctor"),
    ],
)
def test_it_runs_as_a_module_from_any_folder(tmp_path, words, code, said):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.zeros(1, 2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", *words.split()],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr

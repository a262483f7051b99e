"""``python -m distamp``: its findings, its output and its exit codes. Doctor never hangs."""

import contextlib
import io
import json
import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import distamp
from distamp.__main__ import main
from distamp.doctor import diagnose
from tests.forked_commands import run_commands

ROOT = Path(__file__).parents[1]


def on_rank(
    rank: int | None, world: int, port: int, changed: dict[str, str], args: list[str]
) -> tuple[int, str, str]:
    """Run the command as torchrun starts it; return exit code, output and errors.

    Args:
        rank: This rank, or None for the rank of the pool.
        world: The number of ranks.
        port: The port of the store.
        changed: Environment variables of rank 1 alone, and its ``"version"`` of distamp.
        args: The arguments of ``doctor``.
    """
    rank = int(os.environ["RANK"]) if rank is None else rank
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    version = distamp.__version__
    if rank == 1:
        version = changed.pop("version", version)
        environment |= changed
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment),
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


def run_on_two(pool: Any, *args: str, **changed: str) -> list[tuple[int, str, str]]:
    """Run ``doctor`` on two ranks; return exit code, output and errors of each."""
    return pool.run(on_rank, None, 2, free_port(), changed, list(args), group="none")


def test_a_sound_machine_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    versions = diagnosis["facts"]["distamp"], diagnosis["facts"]["torch"]
    assert versions == (distamp.__version__, torch.__version__)
    assert (diagnosis["problems"], diagnosis["ranks"]) == ([], 1)


def test_a_diagnosis_contains_no_host_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "secret-host")
    text = diagnose().to_json()
    for private in (socket.gethostname(), str(Path.home()), str(ROOT), "secret-host"):
        assert private not in text


def test_two_ranks_without_a_problem_print_one_page(ranks2: Any) -> None:
    (first_code, output, _), (second_code, second_output, _) = run_on_two(ranks2)
    assert (first_code, second_code) == (0, 0)
    assert second_output == ""
    page = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert page["ranks"] == "2"
    assert page["problems"] == "none"


def test_two_ranks_with_different_versions_both_name_the_difference(ranks2: Any) -> None:
    first, second = run_on_two(ranks2, version="9.9")
    assert (first[0], second[0]) == (1, 1)
    problem = f"distamp differs between ranks: {distamp.__version__} on [0], 9.9 on [1]"
    assert problem in first[1]
    assert second[1] == ""
    assert problem in second[2]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_without_its_peer_ends_with_a_reason(rank: int) -> None:
    code, output, errors = on_rank(rank, 2, free_port(), {}, ["--timeout", "1"])
    assert code == 1
    page = output if rank == 0 else errors
    assert f"rank {rank} does not reach the 2 ranks" in page


@pytest.mark.slow
def test_a_group_that_cannot_connect_is_a_problem_on_all_ranks(ranks2: Any) -> None:
    answers = run_on_two(ranks2, "--timeout", "3", GLOO_SOCKET_IFNAME="no-such-interface")
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


def test_check_writes_a_step_without_violations(capsys, tmp_path):
    path = tmp_path / "contract.json"
    assert main(["check", "tests.test_doctor:trains", "--json", str(path)]) == 0
    assert "0 violations" in capsys.readouterr().out
    contract = json.loads(path.read_text())
    assert contract["seen"]["compute"] == {"bf16": 2}


def test_check_finds_a_violation_of_the_level(capsys):
    assert main(["check", "tests.test_doctor:trains", "--level", "fp32"]) == 1
    assert "declared fp32, found bf16" in capsys.readouterr().out


def test_check_finds_a_violation_of_the_contract_that_the_factory_returns():
    assert main(["check", "tests.test_doctor:trains_as_declared"]) == 1


def run(capsys, *arguments):
    """Run ``preflight``; return its exit code, its output and its errors."""
    code = main(["preflight", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_preflight_follows_its_options(capsys, tmp_path):
    path = tmp_path / "preflight.json"
    options = ("--device-type", "cpu", "--level", "bf16", "--json", str(path))
    code, out, _ = run(capsys, "tests.test_doctor:with_loss", *options)
    assert code == 0
    assert "bfloat16" in out
    assert "exp" in out
    assert "findings" in json.loads(path.read_text())


def test_an_error_that_preflight_finds_is_exit_code_1(capsys):
    code, out, _ = run(capsys, "examples.precision_report:mistaken")
    assert code == 1
    assert "binary_cross_entropy" in out


@pytest.mark.parametrize(
    ("arguments", "expected_code"),
    [
        pytest.param(["tests.test_doctor:on_meta"], 0, id="weights are on meta"),
        pytest.param(["tests.test_doctor:reads_values"], 2, id="values cannot be read"),
        pytest.param(["tests.test_doctor:reads_values", "--allocate"], 0, id="--allocate"),
    ],
)
def test_preflight_allocates_weights_only_if_it_is_told_to(capsys, arguments, expected_code):
    code, _, _ = run(capsys, *arguments)
    assert code == expected_code


def assert_one_line(errors: str, message: str) -> None:
    """Assert that a command printed one line that contains a message, and no traceback."""
    assert errors.startswith("distamp: ")
    assert errors.count("\n") == 1
    assert message in errors


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
    assert code == 2
    assert out == ""
    assert_one_line(err, message)


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
    assert_one_line(captured.err, message)


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
    assert_one_line(captured.err, message)


def test_the_package_runs_as_a_module_from_any_folder(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.zeros(1, 2)\n"
    )
    commands = ["python -m distamp preflight mine:make", "python -m distamp.doctor"]
    preflight, doctor = run_commands(commands, tmp_path)
    assert preflight.exit_code == 0, preflight.output
    assert "linear" in preflight.output
    assert doctor.exit_code == 1
    assert "the command is python -m distamp doctor" in doctor.output

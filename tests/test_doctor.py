"""``python -m distamp doctor``: what it finds, what it exits with, and that it never hangs."""

from __future__ import annotations

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

import distamp
from distamp import DistGradScaler, SettingError
from distamp.__main__ import main
from distamp.doctor import diagnose, speed
from distamp.doctor.environment import versions

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
        code = main(["doctor", "--no-measure", *args])
    return code, output.getvalue(), errors.getvalue()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def two(pool: Any, *args: str, **changed: str) -> list[tuple[int, str, str]]:
    """What two ranks say."""
    return pool.run(on_rank, None, 2, free_port(), changed, list(args), group="none")


def test_a_sound_machine_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert "an overflow was skipped and the next step taken" in printed
    assert printed.endswith("Problems\n  none\n")


def test_json_holds_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["distamp"] == distamp.__version__
    assert {part["state"] for part in found["parts"]} <= {"works", "missing"}
    assert (found["problems"], found["ranks"]) == ([], None)


def test_a_part_that_is_broken_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistGradScaler, "stepped", lambda self, optimizer: True)
    found = diagnose(measure=False)
    assert [problem.split(":")[0] for problem in found.problems] == ["scaler broken"]
    monkeypatch.undo()
    assert diagnose(measure=False).problems == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without NCCL")
def test_a_part_that_is_required_and_missing_is_a_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--no-measure", "--require", "nccl"]) == 1
    assert "nccl missing: needs a CUDA device" in capsys.readouterr().out


def test_an_unknown_part_is_named_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingError, match="there is no part 'tpu'; parts are torch, autocast"):
        diagnose(["tpu"], measure=False)
    assert main(["doctor", "--no-measure", "--require", "tpu"]) == 2
    assert main(["doctor", "--timeout", "0"]) == 2
    assert "--timeout must be more than 0 seconds" in capsys.readouterr().err


def test_it_tells_nothing_of_who_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "secret-host")
    text = diagnose(measure=False).to_json()
    for private in (socket.gethostname(), str(Path.home()), str(ROOT), "secret-host"):
        assert private not in text


def test_each_dtype_is_timed_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {torch.float32: 4.0, torch.bfloat16: 2.0, torch.float16: 400.0}
    monkeypatch.setattr(speed, "_median_ms", lambda device, dtype, *_: took[dtype])
    found = speed.measured_speeds("cpu")
    assert [(s.op, s.dtype, s.of_float32, s.verdict) for s in found[:3]] == [
        ("matmul", "float32", 1.0, "as float32"),
        ("matmul", "bfloat16", 0.5, "fast"),
        ("matmul", "float16", 100.0, "slow"),
    ]


def test_a_dtype_that_the_device_refuses_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(device: str, dtype: torch.dtype, *_: Any) -> float:
        if dtype is torch.float16:
            raise RuntimeError("not implemented for 'Half'\nand more")
        return 1.0

    monkeypatch.setattr(speed, "_median_ms", refuse)
    half = speed.measured_speeds("cpu")[2]
    assert (half.verdict, half.why) == ("cannot", "not implemented for 'Half'")


def test_real_ops_are_timed() -> None:
    found = speed.measured_speeds("cpu", seconds=0.3)
    assert {s.op for s in found} == {"matmul", "conv2d"}
    assert all(s.milliseconds is not None and s.milliseconds > 0 for s in found)


def test_two_ranks_that_are_alike_have_no_problem(ranks2: Any) -> None:
    (first, out, _), (second, silent, _) = two(ranks2)
    assert (first, second, silent) == (0, 0, "")
    assert "rank 0 of 2, all alike" in out


def test_two_ranks_of_other_versions_are_both_told(ranks2: Any) -> None:
    (first, out, _), (second, silent, error) = two(ranks2, version="9.9")
    assert (first, second, silent) == (1, 1, "")
    differs = f"distamp differs: {distamp.__version__} on rank 0, 9.9 on rank 1"
    assert f"Problems\n  {differs}" in out
    assert error.startswith(f"rank 1: {differs}")


def test_a_setting_that_differs_is_a_note_and_no_problem(ranks2: Any) -> None:
    (first, out, _), (second, _, _) = two(ranks2, TORCH_NCCL_BLOCKING_WAIT="1")
    assert (first, second) == (0, 0)
    assert "TORCH_NCCL_BLOCKING_WAIT differs: not set on rank 0, 1 on rank 1" in out


def test_a_rank_that_never_comes_is_named_and_nothing_hangs() -> None:
    code, out, _ = on_rank(0, 3, free_port(), {}, ["--timeout", "1"])
    assert code == 1
    assert "ranks 1, 2 of 3 did not answer in 1 s" in out


def test_a_rank_without_a_first_rank_ends_with_its_reason() -> None:
    code, out, error = on_rank(1, 2, free_port(), {}, ["--timeout", "1"])
    assert (code, out) == (1, "")
    assert "rank 1 could not meet the others at 127.0.0.1:" in error


def test_a_group_that_cannot_connect_is_a_problem_on_all_ranks(ranks2: Any) -> None:
    found = two(ranks2, "--timeout", "5", GLOO_SOCKET_IFNAME="no-such-interface")
    assert [code for code, _, _ in found] == [1, 1]
    assert "gloo does not connect the ranks: " in found[0][1]
    assert "Name the network interface: GLOO_SOCKET_IFNAME" in found[0][1]


def test_versions_import_nothing() -> None:
    program = (
        "import sys, distamp.doctor.environment as e; before = set(sys.modules); e.versions(); "
        "print({'lightning', 'transformers', 'rich'} & (set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr
    assert "torch" in versions()

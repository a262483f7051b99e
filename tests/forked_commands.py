"""Run several Python commands, each in a fork of a rank that has imported torch.

An interpreter takes seconds to import torch and distamp, and the server of the ranks has done so.
A fork takes milliseconds, and has run no op yet, so each command finds the state of a new process.
"""

import contextlib
import multiprocessing
import os
import runpy
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.multiprocessing

from tests.ranks import RankPool

__all__ = ["FinishedCommand", "run_commands"]

ROOT = Path(__file__).parents[1]
# For all commands of a call. The slowest takes a few seconds on a quiet machine.
TIMEOUT_S = 220.0


@dataclass(frozen=True)
class FinishedCommand:
    """The result of one command.

    Attributes:
        exit_code: Its exit code.
        output: Everything that it and its children printed, errors included.
    """

    exit_code: int
    output: str


def run_commands(commands: Sequence[str], folder: Path = ROOT) -> list[FinishedCommand]:
    """Run commands such as ``python -m distamp doctor``, one after another.

    Args:
        commands: Each begins with ``python``.
        folder: The working directory of each command.
    """
    arguments = [shlex.split(command)[1:] for command in commands]
    with RankPool(1, timeout=TIMEOUT_S) as pool:
        (results,) = pool.run(_run_in_forks, arguments, str(folder), group="none")
    return [FinishedCommand(*result) for result in results]


def _run_in_forks(commands: list[list[str]], folder: str) -> list[tuple[int, str]]:
    """Run commands on a rank; return the exit code and the output of each."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[variable]
    # A command may start processes, which a daemon may not.
    multiprocessing.current_process().daemon = False
    # A rank makes warnings errors, and an interpreter prints them.
    warnings.simplefilter("default")
    _fork_ranks()
    return [_run_in_fork(command, folder) for command in commands]


def _run_in_fork(arguments: list[str], folder: str) -> tuple[int, str]:
    """Run one command in a fork; return its exit code and its output."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            exit_code = _run_here(arguments, folder)
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(exit_code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def _run_here(arguments: list[str], folder: str) -> int:
    """Run one command in this process as the interpreter would; return its exit code."""
    os.chdir(folder)
    try:
        if arguments[0] == "-m":
            module, *sys.argv[1:] = arguments[1:]
            sys.path[0] = folder
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            script, *sys.argv[1:] = arguments
            sys.path[0] = str(Path(script).parent.resolve())
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
            return 1
        return ending.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _fork_ranks() -> None:
    """Let ``torch.multiprocessing.spawn`` fork, so that no rank imports torch again."""

    def spawn(function, args=(), nprocs=1, join=True, daemon=False, start_method="fork"):  # type: ignore[no-untyped-def]
        return torch.multiprocessing.start_processes(
            function, args, nprocs, join, daemon, start_method="fork"
        )

    torch.multiprocessing.spawn = spawn

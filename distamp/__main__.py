"""The command line: ``python -m distamp doctor`` and ``python -m distamp preflight``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distamp.autocast.preflight import Preflight, preflight
from distamp.doctor import diagnose
from distamp.errors import SettingError

__all__ = ["main", "parser"]

_FACTORY = """\
factory: a callable, named package.module:name, that takes nothing and returns (model,
example_inputs), (model, example_inputs, loss_fn), or a dict of preflight's arguments. It is called
with tensors on the meta device, so no weights are allocated; --allocate calls it as it is.

exit code: 0, or 1 if there is a finding of severity error, such as a step that could not be
simulated to its end (unless --allow-unfinished), or 2 if the command cannot run.
"""


class _Mistake(Exception):
    """What the user can mend, in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except _Mistake as mistake:
        print(f"distamp: {mistake}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command; the site's page of them is made from it."""
    made = argparse.ArgumentParser(
        prog="python -m distamp", description="Mixed precision tools for PyTorch models."
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="command")
    _add_doctor(commands)
    _add_preflight(commands)
    return made


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="show what works on this machine, for a bug report",
        description="Show versions, devices, which parts of distamp work here and which dtypes are "
        "fast. Under torchrun all ranks are compared, and rank 0 prints.",
        epilog="exit code: 0, or 1 if there is a problem, or 2 if the command cannot run.",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--require",
        nargs="+",
        default=(),
        metavar="PART",
        help="parts that must work, such as nccl or hook-kernels: exit with 1 if one does not",
    )
    command.add_argument("--no-measure", action="store_true", help="do not time dtypes (5 s)")
    command.add_argument(
        "--timeout", type=float, default=30.0, help="seconds that ranks wait for each other (30)"
    )
    command.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if not options.timeout > 0:
        raise _Mistake(f"--timeout must be more than 0 seconds, got {options.timeout:g}")
    try:
        found = diagnose(options.require, measure=not options.no_measure, timeout=options.timeout)
    except SettingError as error:
        raise _Mistake(f"--require: {error}") from error
    if found.ranks is None or found.ranks.rank == 0:
        print(found.to_json() if options.json else found)
    elif found.problems:
        print(f"rank {found.ranks.rank}: {'; '.join(found.problems)}", file=sys.stderr)
    return 1 if found.problems else 0


def _add_preflight(commands: Any) -> None:
    command = commands.add_parser(
        "preflight",
        help="show what a model would run in which dtype, and what to mend",
        description="Show what a training step would run in which dtype, with no device and no "
        "weights, and what to mend.",
        epilog=_FACTORY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("factory", help="package.module:name of what makes the model")
    command.add_argument("--device-type", default="cuda", choices=("cuda", "cpu"))
    command.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    command.add_argument("--no-measure", action="store_true", help="do not time ops here")
    command.add_argument(
        "--allow-unfinished", action="store_true", help="pass what cannot be simulated to its end"
    )
    command.add_argument("--allocate", action="store_true", help="make the weights for real")
    command.add_argument("--findings", action="store_true", help="print no table")
    command.add_argument("--json", type=Path, metavar="FILE", help="write table and findings")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw modules by dtype")
    command.set_defaults(run=_preflight)


def _preflight(options: argparse.Namespace) -> int:
    given = _call_factory(options.factory, options.allocate)
    chosen = {
        "device_type": options.device_type,
        "dtype": getattr(torch, options.dtype),
        "measure": not options.no_measure,
        "allow_unfinished": options.allow_unfinished,
    }
    try:
        result = preflight(**(chosen | given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _Mistake(str(error)) from error
    _show(result, options.findings)
    _write(options.json, result.to_json)
    _write(options.plot, result.report.plot)
    return 1 if result.errors else 0


def _call_factory(name: str, allocate: bool) -> dict[str, Any]:
    factory = _load(name)
    try:
        if allocate:
            made = factory()
        else:
            with torch.device("meta"):
                made = factory()
    except Exception as error:
        hint = "" if allocate else "; if it needs real tensors, add --allocate"
        raise _Mistake(f"{name}() raised {type(error).__name__}: {error}{hint}") from error
    if isinstance(made, Mapping):
        return dict(made)
    if isinstance(made, tuple) and len(made) in (2, 3):
        return dict(zip(("model", "example_inputs", "loss_fn"), made, strict=False))
    raise _Mistake(
        f"{name}() must return (model, example_inputs), (model, example_inputs, loss_fn) or a dict "
        f"of preflight's arguments, got {type(made).__name__}"
    )


def _load(name: str) -> Callable[[], Any]:
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise _Mistake(f"the factory is named package.module:name, got {name!r}")
    # As for `python -m`, what lies in the current folder can be imported.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise _Mistake(f"cannot import {module_name}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _Mistake(f"{module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise _Mistake(f"{name} is not callable, but a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _show(result: Preflight, findings_only: bool) -> None:
    text = str(result)
    if findings_only:
        text = text[text.rindex(result.summary) :]
    elif sys.stdout.isatty():
        try:
            from rich import print as rich_print
        except ModuleNotFoundError:
            pass
        else:
            rich_print(result)
            return
    print(text)


def _write(path: Path | None, writer: Callable[[Path], None]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer(path)
    except (OSError, ModuleNotFoundError, ValueError) as error:
        raise _Mistake(f"cannot write {path}: {error}") from error
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())

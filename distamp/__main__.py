"""The command line: ``python -m distamp doctor``, ``preflight`` and ``check``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distamp.doctor import diagnose
from distamp.precision_level import LEVELS
from distamp.report import PrecisionContract, preflight

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command; the site's page of them is made from it."""
    made = argparse.ArgumentParser(
        prog="python -m distamp", description="Mixed precision tools for PyTorch models."
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="show what works on this machine, for a bug report",
        description="Show versions and devices; under torchrun also the differences between ranks. "
        "Exits with 1 if ranks differ.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for ranks")
    foresee = commands.add_parser(
        "preflight",
        help="show what a model would run in which dtype, and what to mend",
        description="Show what a forward pass would run in which dtype, with no device and no "
        "weights, and what to mend. Exits with 1 if there is a finding of severity error.",
    )
    foresee.add_argument(
        "factory",
        help="package.module:name of a callable that takes nothing and returns preflight's "
        "arguments: (model, example_inputs), (model, example_inputs, loss_fn) or a dict",
    )
    foresee.add_argument("--device-type", default="cuda", choices=("cuda", "cpu"))
    foresee.add_argument("--level", default="fp16", help="fp16 or bf16")
    foresee.add_argument("--allocate", action="store_true", help="make the weights for real")
    foresee.add_argument("--json", type=Path, metavar="FILE", help="write table and findings")
    check = commands.add_parser(
        "check",
        help="run one training step and show whether it keeps the precisions that you declare",
        description="Run one step for real and compare which precisions ran with a contract: the "
        "model's parameters, products and norms, what ranks send, what the optimizer steps and "
        "keeps. Under torchrun every rank runs it. Exits with 1 if something is not as declared.",
    )
    check.add_argument(
        "factory",
        help="package.module:name of a callable that takes nothing and returns the arguments of "
        "PrecisionContract.check: (step, model), (step, model, optimizer) or a dict, which may "
        "have the 'contract' too",
    )
    check.add_argument(
        "--level",
        default="bf16",
        help="the level whose contract is checked, if the factory returns none: "
        + ", ".join(LEVELS),
    )
    check.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a problem found, 2 if it cannot run."""
    options = parser().parse_args(arguments)
    try:
        return {"doctor": _doctor, "preflight": _preflight, "check": _check}[options.command](
            options
        )
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        print(f"distamp: {error}", file=sys.stderr)
        return 2


def _doctor(options: argparse.Namespace) -> int:
    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout:g}: it is seconds, above 0")
    found = diagnose(options.timeout)
    if os.environ.get("RANK", "0") == "0":
        print(found.to_json() if options.json else found)
    elif found.problems:
        print(*found.problems, sep="\n", file=sys.stderr)
    return 1 if found.problems else 0


def _call_factory(
    name: str, arguments: Sequence[str], required: int, keywords: Sequence[str]
) -> dict[str, Any]:
    """Return a factory's result as keyword arguments.

    Args:
        name: The factory, as ``"package.module:name"``.
        arguments: What its result consists of, in the order of a tuple.
        required: How many of these may not be left out.
        keywords: What a dict may have besides.

    Raises:
        ValueError: The factory raised, or its result lacks something or has too much.
        TypeError: Its result is neither a tuple, a list nor a dict.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"the factory is named package.module:name, got {name!r}")
    sys.path.insert(0, os.getcwd())  # as for `python -m`
    factory = getattr(importlib.import_module(module), attribute)
    try:
        result = factory()
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
    expected = (
        f"({', '.join(arguments)}), of which the last may be left out, or a dict of these by name"
    )
    if isinstance(result, Mapping):
        values = dict(result)
    elif isinstance(result, tuple | list):
        if len(result) > len(arguments):
            raise ValueError(f"{name} returned {len(result)} values, not {expected}")
        values = dict(zip(arguments, result, strict=False))
    else:
        raise TypeError(f"{name} returned a {type(result).__name__}, not {expected}")
    missing = [key for key in arguments[:required] if values.get(key) is None]
    if missing:
        raise ValueError(f"{name} returned no {' and no '.join(missing)}. It returns {expected}")
    unknown = [str(key) for key in values if key not in (*arguments, *keywords)]
    if unknown:
        raise ValueError(
            f"{name} returned a dict with {', '.join(unknown)}, which this command does not take. "
            f"It takes {', '.join((*arguments, *keywords))}"
        )
    return values


def _preflight(options: argparse.Namespace) -> int:
    with torch.device("cpu" if options.allocate else "meta"):
        values = _call_factory(
            options.factory, ("model", "example_inputs", "loss_fn"), 2, ("device_type", "level")
        )
    defaults = {"device_type": options.device_type, "level": options.level}
    result = preflight(**defaults | values)
    print(result)
    if options.json is not None:
        result.to_json(options.json)
    return 1 if result.errors else 0


def _check(options: argparse.Namespace) -> int:
    values = _call_factory(
        options.factory, ("step", "model", "optimizer"), 2, ("hooks", "contract", "process_group")
    )
    model = values["model"]
    models = (model,) if isinstance(model, torch.nn.Module) else model
    if not isinstance(models, tuple | list) or not all(
        isinstance(each, torch.nn.Module) for each in models
    ):
        raise TypeError(
            f"{options.factory} returned a {type(model).__name__} as the model, which is a "
            "torch.nn.Module or several in a tuple"
        )
    contract = values.pop("contract", None) or PrecisionContract.from_level(options.level, *models)
    result = contract.check(**values)
    if os.environ.get("RANK", "0") == "0":
        print(result)
        if options.json is not None:
            result.to_json(options.json)
    return 1 if result else 0


if __name__ == "__main__":
    sys.exit(main())

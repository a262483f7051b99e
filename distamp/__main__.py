"""The command line: ``python -m distamp doctor``, ``preflight`` and ``check``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distamp.doctor import diagnose
from distamp.error_text import similar_names
from distamp.precision_level import LEVELS
from distamp.report import PrecisionContract, preflight

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command; the site generates its page of commands from it."""
    main_parser = argparse.ArgumentParser(
        prog="python -m distamp", description="Mixed precision tools for PyTorch models."
    )
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="show versions and devices of this machine, for a bug report",
        description="Show versions and devices; under torchrun also the differences between ranks. "
        "Exits with 1 if ranks differ.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for ranks")
    dry_run = commands.add_parser(
        "preflight",
        help="show the dtypes in which a model would run, and mistakes to fix",
        description="Show the dtypes in which a forward pass would run, without a device and "
        "without weights, and mistakes to fix. Exits with 1 if there is a finding of severity "
        "error.",
    )
    dry_run.add_argument(
        "factory",
        help="package.module:name of a callable that takes nothing and returns preflight's "
        "arguments: (model, example_inputs), (model, example_inputs, loss_fn) or a dict",
    )
    dry_run.add_argument("--device-type", default="cuda", choices=("cuda", "cpu"))
    dry_run.add_argument("--level", default="fp16", help="fp16 or bf16")
    dry_run.add_argument("--allocate", action="store_true", help="allocate the weights")
    dry_run.add_argument("--json", type=Path, metavar="FILE", help="write table and findings")
    check = commands.add_parser(
        "check",
        help="run one training step and compare its precisions with the precisions you declare",
        description="Run one training step and compare its precisions with a contract: the model's "
        "parameters, products and norms, messages between ranks, the tensors that the optimizer "
        "steps, and its state. Under torchrun every rank runs it. Exits with 1 if a precision "
        "violates the contract.",
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
    check.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0, 1 if it finds a problem, 2 if it cannot run."""
    options = parser().parse_args(arguments)
    commands = {"doctor": _doctor, "preflight": _preflight, "check": _check}
    command = commands[options.command]
    try:
        return command(options)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        print(f"distamp: {error}", file=sys.stderr)
        return 2


def _doctor(options: argparse.Namespace) -> int:
    if not options.timeout > 0:
        raise ValueError(f"--timeout must be a number of seconds > 0, not {options.timeout:g}.")
    diagnosis = diagnose(options.timeout)
    if _is_first_rank():
        print(diagnosis.to_json() if options.json else diagnosis)
    elif diagnosis.problems:
        print(*diagnosis.problems, sep="\n", file=sys.stderr)
    return 1 if diagnosis.problems else 0


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _call_factory(
    name: str, arguments: Sequence[str], required: int, keywords: Sequence[str]
) -> dict[str, Any]:
    """Return a factory's result as keyword arguments.

    Args:
        name: The factory, as ``"package.module:name"``.
        arguments: The names of the values that the factory returns, in the order of a tuple.
        required: The number of arguments, from the first, that must not be left out.
        keywords: Other names that a dict may have.

    Raises:
        ValueError: The factory raised, or a value of its result is missing or unknown.
        TypeError: It cannot be called, or its result is neither a tuple, a list nor a dict.
    """
    factory = _import_factory(name)
    _check_no_arguments(name, factory)
    try:
        result = factory()
    except Exception as error:
        raise ValueError(f"{name} raised {_describe_error(error)}") from error
    names = ", ".join(arguments)
    expected = f"({names}), with or without the last, or a dict with these keys"
    if isinstance(result, Mapping):
        values = dict(result)
    elif isinstance(result, tuple | list):
        if len(result) > len(arguments):
            raise ValueError(f"{name} returned {len(result)} values, not {expected}.")
        values = dict(zip(arguments, result, strict=False))
    elif result is None:
        raise TypeError(f"{name} returned None, not {expected}.")
    else:
        raise TypeError(f"{name} returned {_describe_type(result)}, not {expected}.")
    missing = []
    for key in arguments[:required]:
        if values.get(key) is None:
            missing.append(key)
    if missing:
        missing_names = " and no ".join(missing)
        raise ValueError(f"{name} returned no {missing_names}. Return {expected}.")
    accepted = [*arguments, *keywords]
    unknown = [str(key) for key in values if key not in accepted]
    if unknown:
        unknown_names = ", ".join(unknown)
        accepted_names = ", ".join(accepted)
        raise ValueError(
            f"{name} returned a dict with {unknown_names}, which this command does not take. "
            f"Use {accepted_names}."
        )
    return values


def _import_factory(name: str) -> Any:
    """Return the object of a name such as ``"package.module:name"``.

    Raises:
        ValueError: There is no such module or name, or the module raised.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"The factory must be package.module:name, not {name!r}.")
    # The factory may be in the current folder, as modules for `python -m` may.
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        description = _describe_error(error)
        raise ValueError(f"Importing {module_name} for {name} raised {description}") from error
    if not hasattr(module, attribute):
        public_names = [key for key in vars(module) if not key.startswith("_")]
        hint = similar_names(attribute, public_names)
        raise ValueError(f"{module_name} has no {attribute}. {hint}")
    return getattr(module, attribute)


def _check_no_arguments(name: str, function: Any) -> None:
    """Raise TypeError for an object that cannot be called without arguments."""
    if not callable(function):
        raise TypeError(f"{name} is {_describe_type(function)}, which is not callable.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some functions in C have no signature.
        return
    try:
        signature.bind()
    except TypeError:
        raise TypeError(
            f"{name} must take no arguments, and takes {signature}. Bind them with "
            "functools.partial."
        ) from None


def _check_model(name: str, model: object) -> None:
    """Raise for another object than a module, and for a module without tensors."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{name} returned {_describe_type(model)} as the model. Return a torch.nn.Module."
        )
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors:
        raise ValueError(
            f"{name} returned a model without parameters, {type(model).__name__}, which has no "
            "precision to check. Return the model that is trained."
        )


def _describe_type(value: object) -> str:
    class_name = type(value).__name__
    article = "an" if class_name[0].lower() in "aeiou" else "a"
    return f"{article} {class_name}"


def _describe_error(error: Exception) -> str:
    """Return the class and the first line of an error, which then fits into one sentence."""
    lines = str(error).strip().splitlines() or ["no message"]
    text = lines[0].rstrip(".")
    return f"{type(error).__name__}: {text}."


def _preflight(options: argparse.Namespace) -> int:
    device = "cpu" if options.allocate else "meta"
    with torch.device(device):
        values = _call_factory(
            options.factory,
            arguments=("model", "example_inputs", "loss_fn"),
            required=2,
            keywords=("device_type", "level"),
        )
    _check_model(options.factory, values["model"])
    loss_fn = values.get("loss_fn")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(
            f"{options.factory} returned {_describe_type(loss_fn)} as loss_fn. Return a function "
            "from the model's output to the loss."
        )
    values.setdefault("device_type", options.device_type)
    values.setdefault("level", options.level)
    result = preflight(**values)
    print(result)
    if options.json is not None:
        result.to_json(options.json)
    return 1 if result.errors else 0


def _check(options: argparse.Namespace) -> int:
    values = _call_factory(
        options.factory,
        arguments=("step", "model", "optimizer"),
        required=2,
        keywords=("hooks", "contract", "process_group"),
    )
    name = options.factory
    model = values["model"]
    models = tuple(model) if isinstance(model, tuple | list) else (model,)
    for module in models:
        _check_model(name, module)
    contract = values.pop("contract", None)
    if not contract:
        contract = PrecisionContract.from_level(options.level, *models)
    if not isinstance(contract, PrecisionContract):
        raise TypeError(
            f"{name} returned {_describe_type(contract)} as the contract. Return a "
            "distamp.PrecisionContract."
        )
    step = values["step"]
    _check_no_arguments(f"The step that {name} returned", step)
    values["step"] = _named_step(name, step)
    result = contract.check(**values)
    if _is_first_rank():
        print(result)
        if options.json is not None:
            result.to_json(options.json)
    return 1 if result else 0


def _named_step(name: str, step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a step with an error that names its factory."""

    def run_step() -> Any:
        try:
            return step()
        except Exception as error:
            description = _describe_error(error)
            raise ValueError(f"The step that {name} returned raised {description}") from error

    return run_step


if __name__ == "__main__":
    sys.exit(main())

"""The public names with their signatures, as lines of text.

    python -m tests.public_api --write    # after a change that is meant; note it in CHANGELOG.md

``tests/public_api.txt`` is what was promised. Modules of ``distamp.integrations`` are read and not
imported, since each needs a package of its own.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distamp

PROMISED = Path(__file__).with_name("public_api.txt")
MODULES = [
    "distamp",
    "distamp.comm_hooks",
    "distamp.cpu.amp",
    "distamp.cuda.amp",
    "distamp.precision",
    "distamp.scaler",
]
# Of classes whose other methods are for distamp's own modules: what users call.
PROMISED_OF = {
    "CommHookState": {"load_state_dict", "process_group", "state_dict", "stats"},
    "LowPrecisionState": {"stats"},
    "MasterParameters": {
        "for_checkpoint",
        "load_state_dict",
        "master_of",
        "nbytes",
        "optimizer",
        "pairs",
        "parameter_of",
        "refresh",
        "state_dict",
        "zero_grad",
    },
    "WireFormat": {"decode", "encode", "nbytes"},
}
INTEGRATIONS = [
    "accelerate",
    "fabric",
    "lightning/callbacks",
    "lightning/precision",
    "transformers",
]


def lines() -> list[str]:
    """Every public name, with what it takes and returns."""
    return [line for name in MODULES for line in _module(name)] + list(_integrations())


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    for each in sorted(module.__all__):
        value = getattr(module, each)
        full = f"{name}.{each}"
        own_name = getattr(value, "__name__", each)
        # A class is written out once, in the first module that has it under its own name.
        if inspect.isclass(value) and (name == "distamp" or not hasattr(distamp, each)):
            yield full if own_name == each else f"{full} = {own_name}"
            yield from _class(full, value) if own_name == each else ()
        elif inspect.isclass(value):
            yield full
        elif callable(value):
            yield f"{full}{_signature(value)}"
        elif each == "__version__":
            yield full
        else:
            yield f"{full}: {type(value).__name__}"


def _class(full: str, cls: type[Any]) -> Iterator[str]:
    made_by = inspect.getattr_static(cls, "__init__")
    if getattr(made_by, "__module__", "").startswith("distamp") or dataclasses.is_dataclass(cls):
        yield f"{full}{_signature(cls)}"
    fields = (
        {each.name for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    )
    names = set(_own_names(cls)) - fields
    for name in sorted(names & PROMISED_OF.get(cls.__name__, names)):
        value = inspect.getattr_static(cls, name)
        if isinstance(value, property):
            yield f"{full}.{name}"
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"{full}.{name}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{full}.{name}{_signature(value)}"


def _own_names(cls: type[Any]) -> Iterator[str]:
    """Public names that classes of distamp's define; what they take over from torch is torch's."""
    for base in cls.__mro__:
        if base.__module__.startswith("distamp"):
            yield from (name for name in vars(base) if not name.startswith("_"))


def _signature(function: Any) -> str:
    """Return parameters with their annotations as written, and what is returned."""
    signature = inspect.signature(function)
    parameters = [
        each if isinstance(each.annotation, str) else each.replace(annotation=each.empty)
        for each in signature.parameters.values()
    ]
    returns = signature.return_annotation
    returns = returns if isinstance(returns, str) else signature.empty
    return str(inspect.Signature(parameters, return_annotation=returns)).replace("'", "")


def _integrations() -> Iterator[str]:
    folder = Path(distamp.__file__).with_name("integrations")
    for name in INTEGRATIONS:
        tree = ast.parse((folder / f"{name}.py").read_text())
        exported = set(_exports(tree))
        module = f"distamp.integrations.{name.split('/')[0]}"
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name not in exported:
                continue
            if isinstance(node, ast.FunctionDef):
                yield f"{module}.{node.name}{_written(node)}"
                continue
            yield f"{module}.{node.name}"
            yield from (
                f"{module}.{node.name}.{each.name}{_written(each)}"
                for each in node.body
                if isinstance(each, ast.FunctionDef) and each.name == "__init__"
            )


def _exports(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _written(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def main() -> None:
    """Print the lines, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"to {PROMISED.name}")
    text = "\n".join(lines()) + "\n"
    if parser.parse_args().write:
        PROMISED.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

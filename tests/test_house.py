"""The shape of the package: its import graph, its public names, and how its files read."""

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import distamp
from tests.house_style import (
    LIBRARY,
    Style,
    count_expressions,
    goals_for,
    load_exceptions,
    load_private_names,
    measure,
    source_files,
    too_high,
    walk,
)

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "distamp"

# Each room and the rooms that it may import. Rooms of one floor do not import each other.
FOUNDATION = {
    "callers",
    "error_text",
    "errors",
    "linear_recipe",
    "module_names",
    "observers",
    "precision_level",
}
GRADIENTS = {"device_utils", "fsdp_params", "fsdp_unit", "grads", "optim_utils"}
ROOMS: dict[str, set[str]] = {
    "error_text": set(),
    "errors": set(),
    "module_names": set(),
    "linear_recipe": set(),
    "precision_level": {"error_text", "errors", "linear_recipe", "module_names"},
    "observers": set(),
    "callers": set(),
    # Gradients, from parameters to local tensors, which a scaler and masters use.
    "device_utils": set(),
    "process_group": {"errors", "device_utils"},
    "fsdp_unit": set(),
    "fsdp_params": {"errors", "fsdp_unit"},
    "grads": {"device_utils", "fsdp_params"},
    "optim_utils": {"grads"},
    "clip_grad": {"errors", *GRADIENTS},
    "masters": {*FOUNDATION, *GRADIENTS},
    "autocast": FOUNDATION,
    "report": {*FOUNDATION, "autocast", "process_group", "guard", "masters", *GRADIENTS},
    "guard": {*FOUNDATION, *GRADIENTS, "process_group", "clip_grad"},
    "scaler": {*FOUNDATION, *GRADIENTS, "process_group", "clip_grad", "guard", "masters"},
    "comm_hooks": {*FOUNDATION, "device_utils", "fsdp_params", "fsdp_unit"},
    # Modules with the other spellings of names in the documents.
    "cuda": {"autocast", "scaler"},
    "cpu": {"autocast", "scaler"},
    "levels": {
        *FOUNDATION,
        *GRADIENTS,
        "process_group",
        "clip_grad",
        "guard",
        "masters",
        "autocast",
        "report",
        "scaler",
        "comm_hooks",
    },
    "installation": {"errors", "guard", "scaler", "cpu", "cuda"},
    # Only users of the trainers import these modules.
    "integrations": {*FOUNDATION, "optim_utils", "autocast", "guard", "scaler", "comm_hooks"},
    "": {
        *FOUNDATION,
        "clip_grad",
        "guard",
        "masters",
        "autocast",
        "report",
        "scaler",
        "comm_hooks",
        "levels",
        "installation",
        "cpu",
        "cuda",
    },
    # It prints the version of the package.
    "doctor": {""},
    "__main__": {*FOUNDATION, "autocast", "report", "scaler", "comm_hooks", "levels", "doctor"},
}
# Packages of extras, which are imported in functions.
OPTIONAL = {"matplotlib", "fairscale", "numpy", "torchao"}
# Packages that a module of `integrations` imports at its top.
TRAINERS_OF = {"integrations": {"accelerate", "lightning", "transformers"}}


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a module, without their contexts."""
    return walk(tree_of(PATHS[module]))


# The worker that has parsed the package runs all tests that read its syntax trees.
reads_trees = pytest.mark.xdist_group("syntax trees of the package")


def _targets(node: ast.AST) -> list[str]:
    """Return the full names of the modules that an import may load."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, "imports name the package"
    targets = []
    for alias in node.names:
        name = f"{node.module}.{alias.name}"
        is_module = name in PATHS or node.module == "distamp"
        targets.append(name if is_module else str(node.module))
    return targets


@functools.cache
def _imports(module: str) -> set[str]:
    """Return the full names of all modules that a module may load, at import time or later."""
    imports: set[str] = set()
    for node in nodes_of(module):
        imports.update(_targets(node))
    return imports


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _wrong_imports(module: str) -> list[str]:
    """Return a line for each forbidden import of a module."""
    room = _room(module)
    rooms = {room, *ROOMS[room]}
    packages = {"torch", *sys.stdlib_module_names, *OPTIONAL, *TRAINERS_OF.get(room, set())}
    wrong = []
    for name in sorted(_imports(module)):
        package, target = name.split(".")[0], _room(name)
        if target not in ROOMS:
            target = ""  # A name of distamp/__init__.py.
        if package != "distamp":
            if package not in packages:
                wrong.append(f"{module} imports {name}: the core needs torch alone")
        elif target not in rooms:
            wrong.append(f"{module} imports {name}: it may import {sorted(ROOMS[room])}")
    return wrong


def test_each_module_is_in_a_room():
    rooms = set(map(_room, PATHS))
    assert rooms <= set(ROOMS), "place the new room in ROOMS and in architecture.md"


@reads_trees
def test_imports_run_one_way():
    for module in PATHS:
        assert _wrong_imports(module) == []


def test_all_has_exactly_the_visible_names():
    public = {"__version__"}
    for name in dir(distamp):
        if not name.startswith("_") and not isinstance(getattr(distamp, name), ModuleType):
            public.add(name)
    assert list(distamp.__all__) == sorted(public)


def _import_if_installed(name: str) -> ModuleType | None:
    """Import a module of the package; return None if a package of an extra is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package not in OPTIONAL | TRAINERS_OF["integrations"]:
            raise
        return None


def _modules_with_marks() -> list[Any]:
    """Return the modules. The tests of the trainers import the integrations, which takes long."""
    modules = []
    for module in PATHS:
        is_integration = module.startswith("distamp.integrations.")
        marks = [pytest.mark.slow] if is_integration else []
        modules.append(pytest.param(module, marks=marks))
    return modules


@pytest.mark.parametrize("name", _modules_with_marks())
def test_a_module_has_the_names_that_it_exports(name):
    module = _import_if_installed(name)
    if module is not None:
        exported = getattr(module, "__all__", ["__all__"])
        assert [attribute for attribute in exported if not hasattr(module, attribute)] == []


def _private_reads(nodes: list[ast.AST]) -> list[str]:
    """Return each ``x._name`` in a module, unless x is self, cls, super() or a module."""
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                modules.add(re.escape(name.split(".")[0]))
    allowed = re.compile(rf"self|cls|super\(\)|({'|'.join(modules)})(\.\w+)*")
    reads = []
    for node in nodes:
        is_private = isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr)
        if is_private and not allowed.fullmatch(ast.unparse(node.value)):
            reads.append(f"{ast.unparse(node)} in line {node.lineno}")
    return reads


@reads_trees
def test_no_module_reads_private_attributes_of_other_objects():
    for module in PATHS:
        assert _private_reads(nodes_of(module)) == [], module


@reads_trees
def test_no_modules_import_each_other():
    """Imports in functions and imports for types count as well."""
    waiting: dict[str, set[str]] = {}
    for name in PATHS:
        # A package is imported before its modules, so they may name it.
        waiting[name] = {t for t in _imports(name) if not f"{name}.".startswith(f"{t}.")}
    while True:
        free = [name for name, imports in waiting.items() if not imports & set(waiting)]
        if not free:
            break
        for name in free:
            del waiting[name]
    assert set(waiting) == set()


# -- how the files read ------------------------------------------------------------------------

MOST_EXPRESSIONS = 250
# Functions of the library and the launcher with more expressions, each with its reason.
LONG_FUNCTIONS = {
    "StepGuardBase._step_or_skip": "It decides on a step, and a reader needs the whole decision.",
    "StepGuardBase.clip_grad_norm_": "It has a message, a norm and a clip in one order.",
    "initialize": "Its signature and the order of the set-up are long.",
    "PrecisionLevel.contract": "It has a line for each part of the contract.",
    "train": "It is the training loop, which is read from top to bottom.",
}

# The worker that has measured the files runs all tests that read the measures.
reads_styles = pytest.mark.xdist_group("styles of the files")


@pytest.fixture(scope="module")
def styles() -> dict[str, Style]:
    """Return the measures of all files, which takes seconds."""
    return {file: measure((ROOT / file).read_text()) for file in source_files()}


@reads_styles
def test_no_file_reads_worse_than_its_goal_or_its_exception(styles):
    """Density, names, prose and summaries; exceptions are lowered by `tests.house_style`."""
    exceptions = load_exceptions()
    worse = {}
    for file, style in styles.items():
        measures = too_high(file, style, exceptions)
        if measures:
            worse[file] = measures
    assert worse == {}


@reads_styles
def test_no_exception_is_left_for_a_file_that_meets_its_goal(styles):
    """An exception that is not needed any more goes, so the list only shrinks."""
    advice = "run python -m tests.house_style"
    for file, measures in load_exceptions().items():
        assert file in styles, advice
        for name in measures:
            value = getattr(styles[file], name)
            assert value > goals_for(file)[name], f"{file}: {name}, {advice}"


@reads_styles
def test_private_names_of_torch_are_read_only_where_they_are_listed(styles):
    """A private name may change with every release of torch, so few files may read one."""
    listed = load_private_names()
    for file, style in styles.items():
        if file.split("/")[0] in LIBRARY:
            unlisted = style.torch_private - set(listed.get(file, []))
            assert unlisted == set(), file


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions in a node with their qualified names."""
    for child in ast.iter_child_nodes(node):
        name = prefix + getattr(child, "name", "")
        if isinstance(child, ast.FunctionDef):
            yield name, child
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _functions(child, f"{name}.")


@reads_trees
def test_a_function_of_many_expressions_has_a_reason():
    """A long function is hard to read, unless it tells one story from top to bottom."""
    long_functions = set()
    for file in source_files():
        if file.split("/")[0] in LIBRARY:
            tree = tree_of(ROOT / file)
            for name, function in _functions(tree):
                if count_expressions(walk(function)) > MOST_EXPRESSIONS:
                    long_functions.add(name)
    assert long_functions == set(LONG_FUNCTIONS)

"""The shape of the package: its import graph, its public names, and how its files read."""

import ast
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import distamp
from tests.house_style import (
    LIBRARY,
    goals_for,
    load_exceptions,
    load_private_names,
    measure,
    source_files,
    too_high,
)

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "distamp"

# Each room and the rooms it may import. Rooms beside each other never meet but below.
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
    # Gradients, from parameters to local tensors: what a scaler and masters stand on.
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
    # The documents' other spellings, thin modules over the rooms.
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
    # What only those import who train with these packages.
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
# Behind extras: imported where they are used, which a test of imports sees.
OPTIONAL = {"matplotlib", "fairscale", "numpy", "torchao"}
# What a module of `integrations` is for, and imports at once.
TRAINERS_OF = {"integrations": {"accelerate", "lightning", "transformers"}}


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {_module_name(path): ast.parse(path.read_text()) for path in FILES}


def _targets(node: ast.AST) -> list[str]:
    """Full names of what an import may load."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, "imports name the package"
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [
        name if name in TREES or node.module == "distamp" else str(node.module) for name in names
    ]


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _wrong_imports(module: str, tree: ast.AST) -> list[str]:
    """What this module imports and should not, one line each."""
    room = _room(module)
    wrong = []
    elsewhere = {"torch", *sys.stdlib_module_names, *OPTIONAL, *TRAINERS_OF.get(room, set())}
    for name in (name for node in ast.walk(tree) for name in _targets(node)):
        top, target = name.split(".")[0], _room(name)
        target = target if target in ROOMS else ""  # a name of distamp/__init__.py
        if top == "distamp" and target not in {room, *ROOMS[room]}:
            wrong.append(f"{module} imports {name}: it may import {sorted(ROOMS[room])}")
        elif top not in {"distamp", *elsewhere}:
            wrong.append(f"{module} imports {name}: the core needs torch alone")
    return wrong


def test_imports_run_one_way():
    assert set(map(_room, TREES)) <= set(ROOMS), (
        "place the new room in ROOMS and in architecture.md"
    )
    assert [wrong for module in TREES.items() for wrong in _wrong_imports(*module)] == []


def test_all_is_exactly_what_is_visible_and_each_module_has_what_it_exports():
    public = {name for name in dir(distamp) if not name.startswith("_")}
    public = {name for name in public if not isinstance(getattr(distamp, name), ModuleType)}
    assert list(distamp.__all__) == sorted(public | {"__version__"})
    missing = []
    for name in TREES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if str(error.name).split(".")[0] not in OPTIONAL | TRAINERS_OF["integrations"]:
                raise
            continue
        exported = getattr(module, "__all__", ["__all__"])
        missing += [f"{name}.{each}" for each in exported if not hasattr(module, each)]
    assert missing == []


def _private_reads(tree: ast.AST) -> list[str]:
    """``x._name`` where x is not self, cls, super() or a module."""
    modules = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    own = re.compile(rf"self|cls|super\(\)|({'|'.join(map(re.escape, modules))})(\.\w+)*")
    return [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr)
        if not own.fullmatch(ast.unparse(node.value))
    ]


def test_nobody_reads_private_attributes_of_anothers_objects():
    assert {name: reads for name, tree in TREES.items() if (reads := _private_reads(tree))} == {}


def test_no_modules_import_each_other():
    """At import time, later, or for types alone."""
    waiting = {}
    for name, tree in TREES.items():
        targets = {each for node in ast.walk(tree) for each in _targets(node)}
        # A package that is named in its own modules is there already.
        waiting[name] = {each for each in targets if not f"{name}.".startswith(f"{each}.")}
    while free := {name for name, imports in waiting.items() if not imports & set(waiting)}:
        for name in free:
            del waiting[name]
    assert set(waiting) == set()


# -- how the files read ------------------------------------------------------------------------

STYLES = {file: measure((ROOT / file).read_text()) for file in source_files()}


def test_no_file_reads_worse_than_its_goal_or_its_exception():
    """Density, names, prose and summaries; exceptions are lowered by `tests.house_style`."""
    exceptions = load_exceptions()
    worse = {
        file: measures
        for file, style in STYLES.items()
        if (measures := too_high(file, style, exceptions))
    }
    assert worse == {}


def test_no_exception_is_left_for_a_file_that_meets_its_goal():
    """An exception that is not needed any more goes, so the list only shrinks."""
    idle = []
    for file, measures in load_exceptions().items():
        for name in measures:
            if file not in STYLES or getattr(STYLES[file], name) <= goals_for(file)[name]:
                idle.append(f"{file}: {name}")
    assert idle == [], "run python -m tests.house_style"


def test_private_names_of_torch_are_read_only_where_they_are_listed():
    """A private name may change with every release of torch, so each stands in few known files."""
    listed = load_private_names()
    unlisted = {
        file: sorted(names)
        for file, style in STYLES.items()
        if file.split("/")[0] in LIBRARY
        if (names := style.torch_private - set(listed.get(file, [])))
    }
    assert unlisted == {}

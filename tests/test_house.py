"""The shape of the package: which room may import which, and which names are public."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import distamp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "distamp"

# Each room and the rooms it may import. Rooms beside each other never meet but below.
FOUNDATION = {"callers", "errors", "precision", "protocols"}
GRADIENTS = {"host", "optimizers", "gradients", "sources"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "precision": {"errors"},
    "protocols": set(),
    "callers": set(),
    # Gradients, from parameters to local tensors: what a scaler and masters stand on.
    "host": set(),
    "optimizers": set(),
    "gradients": {"errors", "host", "optimizers"},
    "sources": {"gradients", "optimizers"},
    "masters": {*FOUNDATION, *GRADIENTS},
    "autocast": FOUNDATION,
    "scaler": {*FOUNDATION, *GRADIENTS, "masters"},
    "comm_hooks": {*FOUNDATION, "host"},
    # The documents' other spellings, thin modules over the rooms.
    "cuda": {"autocast", "scaler"},
    "cpu": {"autocast", "scaler"},
    "initialize": {*FOUNDATION, *GRADIENTS, "masters", "autocast", "scaler", "comm_hooks"},
    "installation": {"errors", "scaler", "cpu", "cuda"},
    # What only those import who train with these packages.
    "integrations": {*FOUNDATION, "optimizers", "autocast", "scaler", "comm_hooks"},
    "": {
        *FOUNDATION,
        "autocast",
        "scaler",
        "comm_hooks",
        "initialize",
        "installation",
        "cpu",
        "cuda",
    },
    # Tries every other room, and what `import distamp` gives.
    "doctor": {"", *FOUNDATION, "autocast", "scaler", "comm_hooks", "initialize"},
    "__main__": {*FOUNDATION, "autocast", "scaler", "comm_hooks", "initialize", "doctor"},
}
# Behind extras: only inside functions.
OPTIONAL = {"rich", "matplotlib", "fairscale", "numpy", "triton"}
# What a module of `integrations` is for, and imports at once.
TRAINERS = {"accelerate", "lightning", "transformers"}
# Imported themselves in a function, where the extra is there.
BEHIND_AN_EXTRA = {
    "distamp.comm_hooks.kernels": "triton",
}


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(module, whether at import time, line) of each import but those for type checking alone."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, not lazy, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from ((name, not lazy, child.lineno) for name in _targets(path, child))
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, lazy or inside)

    yield from walk(ast.parse(path.read_text()), lazy=False)


def _targets(path: Path, node: ast.ImportFrom) -> list[str]:
    """Full names of what ``from x import y`` may load, relative imports resolved."""
    base = node.module or ""
    if node.level:
        package = _module_name(path).split(".")
        if path.name != "__init__.py":
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        base = ".".join([*package, *([node.module] if node.module else [])])
    if base == "distamp":
        return [f"distamp.{alias.name}" for alias in node.names]
    names = [f"{base}.{alias.name}" for alias in node.names]
    return [name if _is_module(name) else base for name in names]


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _wrong_imports(path: Path) -> list[str]:
    """What this file imports and should not, one line each."""
    room = _room(_module_name(path))
    wrong = []
    for module, eager, line in _imports(path):
        top = module.split(".")[0]
        where = f"{path.relative_to(ROOT)}:{line} imports {module}"
        if top == "distamp":
            target = _room(module)
            if target not in ROOMS:
                target = ""  # a name of distamp/__init__.py
            if target != room and target not in ROOMS[room]:
                wrong.append(f"{where}: {room or 'distamp'} may import {sorted(ROOMS[room])}")
        elif top in OPTIONAL:
            if eager and BEHIND_AN_EXTRA.get(_module_name(path)) != top:
                wrong.append(f"{where} at import time: an extra is imported where it is used")
        elif top in TRAINERS and room == "integrations":
            continue
        elif top != "torch" and top not in sys.stdlib_module_names:
            wrong.append(f"{where}: the core needs torch and the standard library alone")
    return wrong


def test_every_room_has_its_place():
    rooms = {_room(_module_name(path)) for path in _files()}
    assert rooms - set(ROOMS) == set(), "place the new room in ROOMS and in docs/architecture.md"


def test_imports_run_one_way():
    assert [wrong for path in _files() for wrong in _wrong_imports(path)] == []


def _visible(module: ModuleType) -> set[str]:
    """Names without a leading underscore that are not submodules."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def test_all_is_exactly_what_is_visible():
    assert set(distamp.__all__) == _visible(distamp) | {"__version__"}
    assert list(distamp.__all__) == sorted(set(distamp.__all__)), "sorted, each name once"


def _modules() -> list[str]:
    found = pkgutil.walk_packages(distamp.__path__, "distamp.")
    return [module.name for module in found if not module.name.endswith("__main__")]


def test_each_module_names_what_it_exports():
    """A module without ``__all__`` exports everything that it imports."""
    wrong = {}
    for name in _modules():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if str(error.name).split(".")[0] not in OPTIONAL | TRAINERS:
                raise
            continue
        exported = getattr(module, "__all__", ["__all__"])
        wrong[name] = [each for each in exported if not hasattr(module, each)]
    assert {name: missing for name, missing in wrong.items() if missing} == {}


def _private_reads(tree: ast.AST) -> list[str]:
    """``x._name`` where x is not self, cls, super() or a module."""
    modules = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not re.match(r"_(?!_)", node.attr):
            continue
        base: ast.AST = node.value
        while isinstance(base, ast.Attribute):
            base = base.value
        direct = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
        parent = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
        if not direct and not parent and not (isinstance(base, ast.Name) and base.id in modules):
            found.append(f"{ast.unparse(node)} in line {node.lineno}")
    return found


def test_nobody_reads_private_attributes_of_anothers_objects():
    reads = {str(p.relative_to(ROOT)): _private_reads(ast.parse(p.read_text())) for p in _files()}
    assert {path: found for path, found in reads.items() if found} == {}


def _circle(files: list[Path]) -> set[str]:
    """Modules that import each other: at import time, later, or for types alone."""
    waiting = {
        _module_name(path): {
            target
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            for target in _targets(path, node)
            # A package that is named in its own modules is there already.
            if not f"{_module_name(path)}.".startswith(f"{target}.")
        }
        for path in files
    }
    while free := {name for name, imports in waiting.items() if not imports & set(waiting)}:
        for name in free:
            del waiting[name]
    return set(waiting)


def test_no_modules_import_each_other():
    assert _circle(_files()) == set()

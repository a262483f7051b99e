"""Planted faults as data: a piece of syntax in one function, what takes its place, and the tests.

A plant names a file, a function (``Class.method``, or nothing for the whole module) and a piece of
its code, an expression or statements. Where it lies and how it is laid out do not matter; a plant
whose piece is not there exactly once fails by name.
"""

import ast
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Which test found a fault last, which is tried first.
RECORD = Path(__file__).parent / "found_by.json"


@dataclass(frozen=True)
class Fault:
    name: str
    room: str
    file: str
    loses: str
    replace: str
    by: str
    tests: tuple[str, ...]
    function: str = ""

    def mutated(self, text: str) -> str:
        """The file with the fault in it, without its comments."""
        tree = ast.parse(text)
        planting = _Planting(*_pieces(self.replace, self.by))
        planting.visit(_found(tree, self.function))
        if planting.count != 1:
            where = f"{self.function or 'module'} of {self.file}"
            raise ValueError(f"{self.name}: its code is {planting.count} times in {where}")
        return ast.unparse(ast.fix_missing_locations(tree))


def _pieces(*codes: str) -> list[list[ast.AST]]:
    """Of each code its one expression, or, where any is more than that, its statements."""
    bodies = [ast.parse(code).body for code in codes]
    if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in bodies):
        return [[body[0].value] for body in bodies]
    return [list(body) for body in bodies]


def _found(tree: ast.AST, function: str) -> ast.AST:
    for name in filter(None, function.split(".")):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        nodes = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.name == name]
        if not nodes:
            return ast.Pass()
        tree = nodes[0]
    return tree


class _Planting(ast.NodeTransformer):
    """Puts one piece of syntax in the place of another."""

    def __init__(self, old: list[ast.AST], new: list[ast.AST]) -> None:
        self.old, self.new, self.count = [ast.dump(node) for node in old], new, 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and len(value) >= len(self.old):
                self._replace_in(value)
        return super().generic_visit(node)

    def _replace_in(self, nodes: list[ast.AST]) -> None:
        size = len(self.old)
        for start in range(len(nodes) - size, -1, -1):
            dumped = [isinstance(n, ast.AST) and ast.dump(n) for n in nodes[start : start + size]]
            if dumped == self.old:
                nodes[start : start + size] = self.new
                self.count += 1

    def visit(self, node: ast.AST) -> ast.AST:
        if len(self.old) == len(self.new) == 1 and ast.dump(node) == self.old[0]:
            self.count += 1
            return self.new[0]
        return super().visit(node)


def planted() -> list[Fault]:
    """Every fault, room by room: a room is a file of this folder."""
    faults = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        room = tomllib.loads(path.read_text())
        tests = tuple(room.pop("tests"))
        faults += [Fault(n, path.stem, **fault, tests=tests) for n, fault in room.items()]
    return faults


def recorded() -> dict[str, str]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def record(found: dict[str, str]) -> None:
    known = {fault.name for fault in planted()}
    kept = {name: test for name, test in (recorded() | found).items() if name in known}
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")

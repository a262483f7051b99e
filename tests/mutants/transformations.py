"""Transformations of a syntax tree that put a fault into one place of a function.

A transformation finds its place by structure, so that new names, comments and formatting leave it
intact. Only the text of the changed expression or statement is replaced; the rest of the file
keeps its text and its line numbers above the change.
"""

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The classes of comparison operators in `ast`, by name.
OPPOSITES = {
    "Eq": "NotEq",
    "NotEq": "Eq",
    "Lt": "GtE",
    "GtE": "Lt",
    "Gt": "LtE",
    "LtE": "Gt",
    "In": "NotIn",
    "NotIn": "In",
    "Is": "IsNot",
    "IsNot": "Is",
}
# Stands for any expression in a pattern.
WILDCARD = "_"
# A context manager without an effect, in a file that may not import contextlib.
_NO_CONTEXT = '(__import__("contextlib").nullcontext())'


class PlantError(ValueError):
    """A transformation does not fit the code: its function or its place is not there once."""


@dataclass(frozen=True)
class Transformation:
    """One change of one place in a function.

    ``call``, ``constant`` and ``pattern`` select the place. A transformation has one of the three,
    except for ``return_none``, which changes the whole function.

    Attributes:
        function: The qualified name of the function, such as ``"Checkpoints.read"``.
        operation: A key of `OPERATIONS`.
        call: Select calls by the last name of the called function: ``"rmtree"`` selects
            ``shutil.rmtree(...)``.
        constant: Select constants by value.
        pattern: Select expressions or statements by their form, in which ``_`` stands for any
            expression: ``"_ and _"``, ``"_ += _"``, ``"min(_, _)"``.
        nth: The number of the place, from 1, if several match; 0 requires a single match.
        operand: The number of the operand, from 1, that ``keep_operand`` keeps.
        value: The constant that ``replace_constant`` and ``replace_value`` write, and the name that
            ``rename`` writes.
    """

    function: str
    operation: str
    call: str = ""
    constant: Any = None
    pattern: str = ""
    nth: int = 0
    operand: int = 1
    value: Any = None

    def apply(self, source: str) -> str:
        """Return the source with the fault in it.

        Raises:
            PlantError: The function or the place does not exist exactly once, or the operation does
                not apply to the place.
        """
        function = find_function(parse(source), self.function)
        node = function if self.operation == "return_none" else self._find_place(function)
        operation = OPERATIONS[self.operation]
        start, end, text = operation(node, self)
        return splice(source, start, end, text)

    def _find_place(self, function: ast.AST) -> ast.AST:
        places = []
        for node in ast.walk(function):
            if self._selects(node):
                places.append(node)
        places.sort(key=_start)
        if not self.nth and len(places) == 1:
            return places[0]
        if 0 < self.nth <= len(places):
            return places[self.nth - 1]
        raise PlantError(f"{len(places)} places match in {self.function}, nth is {self.nth}")

    def _selects(self, node: ast.AST) -> bool:
        if self.call:
            if not isinstance(node, ast.Call):
                return False
            return _last_name(node.func) == self.call
        if self.pattern:
            return matches(parse_pattern(self.pattern), node)
        if not isinstance(node, ast.Constant):
            return False
        if type(node.value) is not type(self.constant):
            return False
        return bool(node.value == self.constant)


# Trees of all files would make each full garbage collection take seconds.
@functools.lru_cache(maxsize=4)
def parse(source: str) -> ast.AST:
    """Return the syntax tree of a source. No operation changes a tree."""
    return ast.parse(source)


def find_function(tree: ast.AST, qualified_name: str) -> ast.AST:
    """Return the function or class of a qualified name.

    Raises:
        PlantError: There is none, or more than one.
    """
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    node = tree
    for name in qualified_name.split("."):
        nodes = []
        for candidate in ast.walk(node):
            if isinstance(candidate, definitions) and candidate.name == name:
                nodes.append(candidate)
        if len(nodes) != 1:
            raise PlantError(f"{len(nodes)} definitions of {name} in {qualified_name}")
        node = nodes[0]
    return node


def parse_pattern(pattern: str) -> ast.AST:
    """Return the expression or the statement of a pattern."""
    statement = ast.parse(pattern).body[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


def matches(pattern: Any, node: Any) -> bool:
    """Return True if a node has the form of a pattern."""
    if isinstance(pattern, ast.Name) and pattern.id == WILDCARD:
        return isinstance(node, ast.expr)
    if isinstance(pattern, list):
        return _match_lists(pattern, node)
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    if type(pattern) is not type(node):
        return False
    for name, value in ast.iter_fields(pattern):
        if name == "ctx":
            continue
        counterpart = getattr(node, name)
        if not matches(value, counterpart):
            return False
    return True


def _match_lists(patterns: list[Any], nodes: Any) -> bool:
    if not isinstance(nodes, list) or len(patterns) != len(nodes):
        return False
    return all(map(matches, patterns, nodes))


def splice(source: str, start: tuple[int, int], end: tuple[int, int], text: str) -> str:
    """Return the source with other text between two positions.

    Args:
        source: The source of a file.
        start: The line, from 1, and the offset in UTF-8 bytes, as syntax trees have them.
        end: The position after the last byte.
        text: The new text.
    """
    lines = source.encode().splitlines(keepends=True)
    start_line, start_byte = start
    end_line, end_byte = end
    head = b"".join(lines[: start_line - 1])
    head += lines[start_line - 1][:start_byte]
    tail = lines[end_line - 1][end_byte:]
    tail += b"".join(lines[end_line:])
    planted = head + text.encode() + tail
    return planted.decode()


def _start(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


# -- operations --------------------------------------------------------------------------------
# Each returns the start and the end of the text to replace, and the new text.

Edit = tuple[tuple[int, int], tuple[int, int], str]
Operation = Callable[[Any, Transformation], Edit]


def _replace_by(node: ast.AST, new: ast.expr) -> Edit:
    """Replace an expression; the brackets keep its precedence."""
    text = ast.unparse(new)
    return _start(node), _end(node), f"({text})"


def negate_condition(node: ast.AST, how: Transformation) -> Edit:
    """Replace a condition by its negation."""
    if not isinstance(node, ast.expr):
        raise PlantError(f"a {type(node).__name__} is not a condition")
    negation = ast.UnaryOp(ast.Not(), node)
    return _replace_by(node, negation)


def swap_comparison(node: ast.AST, how: Transformation) -> Edit:
    """Replace a comparison by its opposite: ``==`` by ``!=``, ``<`` by ``>=``."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise PlantError(f"a {type(node).__name__} is not one comparison")
    name = type(node.ops[0]).__name__
    opposite = getattr(ast, OPPOSITES[name])()
    swapped = ast.Compare(node.left, [opposite], node.comparators)
    return _replace_by(node, swapped)


def drop_statement(node: ast.AST, how: Transformation) -> Edit:
    """Replace a statement by ``pass``."""
    if not isinstance(node, ast.stmt):
        raise PlantError(f"a {type(node).__name__} is not a statement")
    return _start(node), _end(node), "pass"


def drop_call(node: ast.AST, how: Transformation) -> Edit:
    """Replace a call by None, as if the function did nothing and returned nothing."""
    if not isinstance(node, ast.Call):
        raise PlantError(f"a {type(node).__name__} is not a call")
    return _replace_by(node, ast.Constant(None))


def drop_context(node: ast.AST, how: Transformation) -> Edit:
    """Replace a context manager by one without an effect."""
    if not isinstance(node, ast.expr):
        raise PlantError(f"a {type(node).__name__} is not a context manager")
    return _start(node), _end(node), _NO_CONTEXT


def replace_constant(node: ast.AST, how: Transformation) -> Edit:
    """Replace a constant by another one."""
    if not isinstance(node, ast.Constant):
        raise PlantError(f"a {type(node).__name__} is not a constant")
    return _replace_by(node, ast.Constant(how.value))


def replace_value(node: ast.AST, how: Transformation) -> Edit:
    """Replace an expression, or the value of an assignment, by a constant."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
        return _replace_by(node.value, ast.Constant(how.value))
    if not isinstance(node, ast.expr):
        raise PlantError(f"a {type(node).__name__} has no value")
    return _replace_by(node, ast.Constant(how.value))


def keep_operand(node: ast.AST, how: Transformation) -> Edit:
    """Replace an expression by one of its operands, or a call by one of its arguments."""
    operands: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        operands = [node.left, node.right]
    elif isinstance(node, ast.BoolOp):
        operands = node.values
    elif isinstance(node, ast.IfExp):
        operands = [node.body, node.orelse]
    elif isinstance(node, ast.Call):
        operands = node.args
    elif isinstance(node, ast.Subscript):
        operands = [node.value]
    if how.operand > len(operands):
        raise PlantError(f"a {type(node).__name__} has {len(operands)} operands")
    operand = operands[how.operand - 1]
    return _replace_by(node, operand)


def keep_receiver(node: ast.AST, how: Transformation) -> Edit:
    """Replace a method call by its object: ``a.b(c)`` by ``a``."""
    function = node.func if isinstance(node, ast.Call) else None
    if not isinstance(function, ast.Attribute):
        raise PlantError(f"a {type(node).__name__} is not a call of a method")
    return _replace_by(node, function.value)


def rename(node: ast.AST, how: Transformation) -> Edit:
    """Replace the last name of a called function, an attribute or a variable by another name."""
    target = node.func if isinstance(node, ast.Call) else node
    name: ast.expr
    if isinstance(target, ast.Attribute):
        name = ast.Attribute(target.value, how.value)
    elif isinstance(target, ast.Name):
        name = ast.Name(how.value)
    else:
        raise PlantError(f"a {type(target).__name__} has no name")
    return _replace_by(target, name)


def return_none(node: ast.AST, how: Transformation) -> Edit:
    """Replace the body of a function by ``return None``."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise PlantError(f"a {type(node).__name__} is not a function")
    first = node.body[0]
    last = node.body[-1]
    return _start(first), _end(last), "return None"


OPERATIONS: dict[str, Operation] = {}
for operation in (
    drop_call,
    drop_context,
    drop_statement,
    keep_operand,
    keep_receiver,
    negate_condition,
    rename,
    replace_constant,
    replace_value,
    return_none,
    swap_comparison,
):
    OPERATIONS[operation.__name__] = operation

"""Measure how a file reads: density, names, prose, docstring summaries, private names of torch.

``python -m tests.house_style`` lowers the exceptions in ``tests/house_style.json`` to the present
values of the files. It never raises one: a file that reads worse than before fails the test.
"""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXCEPTIONS = ROOT / "tests" / "house_style.json"
LIBRARY = ("distamp", "launch")

# Pronouns, participles and adverbs, which say nothing about the object that a name stands for.
VAGUE_NAMES = frozenset(
    """\
    one ones own owns given givens kept keep found made mine ours theirs yours each every some
    several other others rest whole alone alike here there beside around inside outside known seen
    held named left wanted asked asks said says told tells spoken meant what who whose whom which
    why then where when wide before after it its them they this that these those thing things
    anyone anything everyone everything nothing nobody verdict begun lost met meets
    """.split()  # noqa: SIM905
)
RELATIVE_PHRASE = re.compile(
    r"\b(what|whose|whom|who|those|theirs|its own|of which|of what|by which|by what|the one"
    r"|the other|none is|but for|beside|whatever|whoever|thereof|alike|each of)\b",
    re.IGNORECASE,
)
# A string hides the number signs in it. A string of one line ends with its line at the latest.
STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""'''
    r"|'''(?:\\.|[^\\])*?'''"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
    r"|(#[^\n]*)",
    re.DOTALL,
)
VAGUE_OPENING = re.compile(r"(What|Where|Which|Whose|Whether|Who|Of|That|Those|These|As|By)\b")


# The types of most values in a node that a walk leaves out.
CHILDLESS = frozenset({int, str, type(None), ast.Load, ast.Store, ast.Del})
# The nodes of a syntax tree in the order of a walk, by their exact type.
NodesByType = dict[type[ast.AST], list[Any]]


@dataclass(frozen=True)
class Style:
    """The measures of one file; the first four are better when they are lower.

    Attributes:
        density: Expression nodes for each statement.
        names: Vague names among all names that the file binds, in per cent.
        prose: Relative phrases in 1,000 words of docstrings and comments.
        summaries: Docstrings with a vague first sentence, in per cent.
        torch_private: Private names of torch that the file reads.
    """

    density: float
    names: float
    prose: float
    summaries: float
    torch_private: frozenset[str]


GOALS = {
    "library": {"density": 5.4, "names": 1.0, "prose": 3.0, "summaries": 5.0},
    "tests": {"density": 6.0, "names": 3.0, "prose": 6.0, "summaries": 100.0},
}


def source_files() -> list[str]:
    """Return the Python files that are measured, relative to the repository."""
    folders = (*LIBRARY, "tests", "benchmarks", "examples")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def goals_for(file: str) -> dict[str, float]:
    """Return the highest values that a file may have without an exception."""
    return GOALS["library" if file.split("/")[0] in LIBRARY else "tests"]


def walk(root: ast.AST) -> list[ast.AST]:
    """Return the nodes that `ast.walk` yields, in its order, but without Load, Store and Del.

    It takes half as long.
    """
    nodes = [root]
    # The list grows while the loop runs.
    for node in nodes:
        if type(node) in (ast.Name, ast.Constant):
            continue
        for value in vars(node).values():
            value_type = type(value)
            if value_type is list:
                nodes += [child for child in value if isinstance(child, ast.AST)]
            elif value_type not in CHILDLESS and isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


def count_expressions(nodes: Iterable[ast.AST]) -> int:
    """Return how many of the nodes are expressions."""
    return sum(isinstance(node, ast.expr) for node in nodes)


def measure(source: str) -> Style:
    """Measure the source text of one file."""
    nodes: NodesByType = defaultdict(list)
    for node in walk(ast.parse(source)):
        nodes[type(node)].append(node)
    statements = -sum(map(_is_docstring, nodes[ast.Expr]))
    expressions = 0
    for node_type, nodes_of_type in nodes.items():
        if issubclass(node_type, ast.expr):
            expressions += len(nodes_of_type)
        elif issubclass(node_type, ast.stmt):
            statements += len(nodes_of_type)

    names = list(_bound_names(nodes))
    vague_names = sum(name.strip("_") in VAGUE_NAMES for name in names)

    docstrings = list(_docstrings(nodes))
    vague_summaries = sum(map(_has_vague_summary, docstrings))
    words = phrases = 0
    for text in (*docstrings, *_comments(source)):
        words += len(text.split())
        phrases += len(RELATIVE_PHRASE.findall(text))

    return Style(
        density=_ratio(expressions, statements),
        names=_ratio(100 * vague_names, len(names)),
        prose=_ratio(1000 * phrases, words),
        summaries=_ratio(100 * vague_summaries, len(docstrings)),
        torch_private=frozenset(_private_names_of_torch(nodes)),
    )


def _ratio(numerator: int, denominator: int) -> float:
    return round(numerator / max(denominator, 1), 1)


def _is_docstring(statement: ast.Expr) -> bool:
    constant = statement.value
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)


def _bound_names(nodes: NodesByType) -> Iterator[str]:
    for node in nodes[ast.Name]:
        if type(node.ctx) is ast.Store:
            yield node.id
    for node in nodes[ast.Attribute]:
        if type(node.ctx) is ast.Store:
            yield node.attr
    for node in nodes[ast.arg]:
        if node.arg not in {"self", "cls"}:
            yield node.arg
    for node_type in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        for node in nodes[node_type]:
            yield node.name


def _docstrings(nodes: NodesByType) -> Iterator[str]:
    for node_type in (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        for node in nodes[node_type]:
            # The measures are the same without the indentation.
            text = ast.get_docstring(node, clean=False)
            if text:
                yield text


def _comments(source: str) -> Iterator[str]:
    directives = ("#!", "# type:", "# noqa", "# ruff")
    for match in STRING_OR_COMMENT.finditer(source):
        comment = match[1]
        if comment and not comment.startswith(directives):
            yield comment.lstrip("# ")


def _has_vague_summary(docstring: str) -> bool:
    first_sentence = re.split(r"(?<=[.:])\s", docstring.strip(), maxsplit=1)[0]
    if VAGUE_OPENING.match(first_sentence):
        return True
    return RELATIVE_PHRASE.search(first_sentence) is not None


def _private_names_of_torch(nodes: NodesByType) -> Iterator[str]:
    modules = {"torch": "torch"}
    for node in nodes[ast.Import]:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch" and alias.asname:
                modules[alias.asname] = alias.name
    for node in nodes[ast.ImportFrom]:
        if str(node.module).split(".")[0] == "torch":
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = full_name
                if _is_private(full_name):
                    yield full_name
    for node in nodes[ast.Attribute]:
        # The text of an attribute takes long to make.
        if not _is_private(node.attr):
            continue
        text = ast.unparse(node)
        variable, _, attributes = text.partition(".")
        module = modules.get(variable)
        if module is not None and re.fullmatch(r"[\w.]+", attributes):
            full_name = f"{module}.{attributes}"
            yield full_name


def _is_private(name: str) -> bool:
    """Return whether the last part of a name is private, so that a prefix is not counted again."""
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.startswith("__")


def load_exceptions() -> dict[str, dict[str, float]]:
    """Return the measures above their goals that files are allowed to have, by file."""
    text = EXCEPTIONS.read_text()
    exceptions: dict[str, dict[str, float]] = json.loads(text)["measures"]
    return exceptions


def load_private_names() -> dict[str, list[str]]:
    """Return the private names of torch that files may read, by file."""
    text = EXCEPTIONS.read_text()
    names: dict[str, list[str]] = json.loads(text)["torch_private"]
    return names


def too_high(file: str, style: Style, exceptions: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the measures of a file that lie above both its goal and its exception."""
    allowed = exceptions.get(file, {})
    high = {}
    for name, goal in goals_for(file).items():
        value = getattr(style, name)
        if value > max(goal, allowed.get(name, 0.0)):
            high[name] = value
    return high


def write_exceptions(first_time: bool = False) -> None:
    """Lower every exception to the value that its file measures now.

    Args:
        first_time: Write the values also where they are higher than before.
    """
    exceptions = {} if first_time else load_exceptions()
    private_names = {} if first_time else load_private_names()
    measures: dict[str, dict[str, float]] = {}
    torch_private: dict[str, list[str]] = {}
    for file in source_files():
        style = measure((ROOT / file).read_text())
        allowed = exceptions.get(file, {})
        for name, goal in goals_for(file).items():
            value = getattr(style, name)
            ceiling = value if first_time else allowed.get(name, 0.0)
            if value > goal and ceiling > goal:
                measures.setdefault(file, {})[name] = min(value, ceiling)
        names = style.torch_private
        if not first_time:
            names &= frozenset(private_names.get(file, []))
        if names and file.split("/")[0] in LIBRARY:
            torch_private[file] = sorted(names)
    content = {"measures": measures, "torch_private": torch_private}
    text = json.dumps(content, indent=1)
    EXCEPTIONS.write_text(text + "\n")


if __name__ == "__main__":
    write_exceptions()

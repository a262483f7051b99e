"""Measure how a file reads: density, names, prose, docstring summaries, private names of torch.

``python -m tests.house_style`` lowers the exceptions in ``tests/house_style.json`` to what the
files measure now. It never raises one: a file that reads worse than before fails the test.
"""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
VAGUE_OPENING = re.compile(r"(What|Where|Which|Whose|Whether|Who|Of|That|Those|These|As|By)\b")


@dataclass(frozen=True)
class Style:
    """The measures of one file; the first four are better when they are lower.

    Attributes:
        density: Expression nodes for each statement.
        names: Vague names among all names that the file binds, in per cent.
        prose: Relative phrases in 1,000 words of docstrings and comments.
        summaries: Docstrings whose first sentence is vague, in per cent.
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


def measure(source: str) -> Style:
    """Measure the source text of one file."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    statements = sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in nodes)
    expressions = sum(isinstance(node, ast.expr) for node in nodes)

    names = list(_bound_names(nodes))
    vague_names = sum(name.strip("_") in VAGUE_NAMES for name in names)

    docstrings = list(_docstrings(nodes))
    texts = docstrings + list(_comments(source))
    words = sum(len(text.split()) for text in texts)
    phrases = sum(len(RELATIVE_PHRASE.findall(text)) for text in texts)
    vague_summaries = sum(map(_has_vague_summary, docstrings))

    return Style(
        density=_ratio(expressions, statements),
        names=_ratio(100 * vague_names, len(names)),
        prose=_ratio(1000 * phrases, words),
        summaries=_ratio(100 * vague_summaries, len(docstrings)),
        torch_private=frozenset(_private_names_of_torch(nodes)),
    )


def _ratio(numerator: int, denominator: int) -> float:
    return round(numerator / max(denominator, 1), 1)


def _is_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _bound_names(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in {"self", "cls"}:
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def _docstrings(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def _comments(source: str) -> Iterator[str]:
    directives = ("#!", "# type:", "# noqa", "# ruff")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(directives):
            yield token.string.lstrip("# ")


def _has_vague_summary(docstring: str) -> bool:
    first_sentence = re.split(r"(?<=[.:])\s", docstring.strip(), maxsplit=1)[0]
    opens_vaguely = VAGUE_OPENING.match(first_sentence) is not None
    return opens_vaguely or RELATIVE_PHRASE.search(first_sentence) is not None


def _private_names_of_torch(nodes: list[ast.AST]) -> Iterator[str]:
    modules = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = full_name
                if _is_private(full_name):
                    yield full_name
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in modules and re.fullmatch(r"[\w.]+", rest):
                full_name = f"{modules[first]}.{rest}"
                if _is_private(full_name):
                    yield full_name


def _is_private(name: str) -> bool:
    """Return whether the last part of a name is private, so that a prefix is not counted again."""
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.startswith("__")


def load_exceptions() -> dict[str, dict[str, float]]:
    """Return the measures above their goals that files are allowed to have, by file."""
    exceptions: dict[str, dict[str, float]] = json.loads(EXCEPTIONS.read_text())["measures"]
    return exceptions


def load_private_names() -> dict[str, list[str]]:
    """Return the private names of torch that files may read, by file."""
    private: dict[str, list[str]] = json.loads(EXCEPTIONS.read_text())["torch_private"]
    return private


def too_high(file: str, style: Style, exceptions: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the measures of a file that lie above both its goal and its exception."""
    allowed = exceptions.get(file, {})
    return {
        name: value
        for name, goal in goals_for(file).items()
        if (value := getattr(style, name)) > max(goal, allowed.get(name, 0.0))
    }


def write_exceptions(first_time: bool = False) -> None:
    """Lower every exception to the value that its file measures now.

    Args:
        first_time: Write the values also where they are higher than before.
    """
    old = {} if first_time else load_exceptions()
    measures: dict[str, dict[str, float]] = {}
    private: dict[str, list[str]] = {}
    for file in source_files():
        style = measure((ROOT / file).read_text())
        for name, goal in goals_for(file).items():
            value = getattr(style, name)
            ceiling = value if first_time else old.get(file, {}).get(name, 0.0)
            if value > goal and ceiling > goal:
                measures.setdefault(file, {})[name] = min(value, ceiling)
        if style.torch_private and file.split("/")[0] in LIBRARY:
            private[file] = sorted(style.torch_private)
    if not first_time:
        known = load_private_names()
        private = {
            file: kept
            for file, names in private.items()
            if (kept := sorted(set(names) & set(known.get(file, []))))
        }
    text = json.dumps({"measures": measures, "torch_private": private}, indent=1)
    EXCEPTIONS.write_text(text + "\n")


if __name__ == "__main__":
    write_exceptions()

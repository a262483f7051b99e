"""What MkDocs runs while it builds the site: generated pages, and links out of ``docs/``.

Pages that are made from the code have no file to go stale: the command line and the launcher's
flags come from their parsers, examples from the examples, the project's own pages from the root.
"""

from __future__ import annotations

import argparse
import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages of the site that are made from a file outside of docs/.
FROM_ROOT = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")
_COMPARE = (
    "Two or more runs of the launcher beside each other; see "
    "[Training with the launcher](../training.md#what-a-run-leaves-behind)."
)
_LAUNCHER = (
    "Made from `python launch/train.py --help`. [Training with the launcher](../training.md) shows "
    "how they are used."
)
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are generated."""
    sys.path.insert(0, str(ROOT))
    pages = {page: (ROOT / name).read_text() for name, page in FROM_ROOT.items()}
    pages["reference/launcher.md"] = launcher()
    pages["reference/command_line.md"] = command_line()
    pages["reference/ops.md"] = ops()
    for path in sorted((ROOT / "examples").glob("*.py")):
        pages[f"examples/{path.stem}.md"] = example(path)
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to pages of the site, or to the repository."""
    uri = page.file.src_uri
    sources = {page: ROOT / name for name, page in FROM_ROOT.items()}
    source = sources.get(uri, DOCS / uri)
    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else _relinked(part, source, uri, config["repo_url"])
        for part in parts
    )


def _relinked(text: str, source: Path, uri: str, repository: str | None) -> str:
    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, _, anchor = target.partition("#")
        there = (source.parent / path).resolve()
        inside = _uri_of(there)
        if inside is not None:
            place = posixpath.relpath(inside, posixpath.dirname(uri) or ".")
            return f"{mark}[{label}]({place}{'#' + anchor if anchor else ''})"
        name = there.relative_to(ROOT).as_posix()
        if repository:
            return f"{mark}[{label}]({repository.rstrip('/')}/blob/main/{name})"
        return label if name in label else f"{label} (`{name}`)"

    return _LINK.sub(link, text)


def _uri_of(path: Path) -> str | None:
    """Return the page or file of the site that shows ``path``; None if there is none."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name in FROM_ROOT:
        return FROM_ROOT[name]
    if name == "README.md":
        return "index.md"
    if path.parent == ROOT / "examples" and path.suffix == ".py":
        return f"examples/{path.stem}.md"
    return None


def example(path: Path) -> str:
    """Return a page that shows an example."""
    code = path.read_text()
    title = (ast.get_docstring(ast.parse(code)) or path.stem).splitlines()[0].rstrip(".")
    return f"# {title}\n\n`examples/{path.name}`\n\n```python\n{code}```\n"


def launcher() -> str:
    """Return the flags of ``launch/train.py``, from its own help."""
    from launch.config import COMMAND

    text = COMMAND.generate_docs("markdown", include_hidden=False)
    flags = text.partition("**The model**")
    return "\n".join(["# The launcher's flags", "", _LAUNCHER, "", "".join(flags[1:])])


def ops() -> str:
    """Return what this torch lists, op by op."""
    sys.path.insert(0, str(DOCS))
    from op_reference import page

    return "\n".join(page())


def command_line() -> str:
    """Return every command of ``python -m distamp``, from its parser."""
    from distamp.__main__ import parser

    made = parser()
    commands = next(a for a in made._actions if isinstance(a, argparse._SubParsersAction))
    page = ["# The command line", "", made.description or ""]
    for name, command in commands.choices.items():
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        page += ["", f"## python -m distamp {name}", "", "```text", command.format_help().strip()]
        page.append("```")
    page += ["", "## python -m launch.compare", "", _COMPARE]
    return "\n".join([*page, ""])

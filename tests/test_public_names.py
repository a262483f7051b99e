"""The public names: every one that the docs use exists, whatever was imported before it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import distamp
from distamp import comm_hooks
from distamp.scaler import MasterParameters

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_CODE = re.compile(r"```.*?```|`[^`\n]+`|^    .*$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"(?<![\w./-])distamp(?:\.[A-Za-z_]\w*)+(?!/)")
_IMPORT = re.compile(r"^\s*from (distamp[\w.]*) import ([\w, ]+)", re.MULTILINE)
_COMMAND = re.compile(r"python\d* -m distamp[\w.]*")


def names_on(page: Path) -> set[str]:
    """Every ``distamp.x.y`` in a page's code, and what its code imports."""
    code = _COMMAND.sub("", "\n".join(_CODE.findall(page.read_text())))
    imported = {
        f"{module}.{name.strip().split(' as ')[0]}"
        for module, names in _IMPORT.findall(code)
        for name in names.split(",")
    }
    return imported | set(_NAME.findall(code))


def test_every_name_on_a_page_exists() -> None:
    missing = []
    for name in sorted(set().union(*map(names_on, PAGES))):
        module, _, attribute = name.rpartition(".")
        found: object = distamp
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        if found is None and not _is_imported_from(module, attribute):
            missing.append(name)
    assert missing == []


def _is_imported_from(module: str, attribute: str) -> bool:
    """Whether ``from module import attribute`` works, or would with the extra that it is for."""
    try:
        exec(f"from {module} import {attribute}", {})
    except ImportError:
        return _source(f"{module}.{attribute}") != "" or f'"{attribute}"' in _source(module)
    return True


def _source(module: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    for each in (path.with_suffix(".py"), path / "__init__.py"):
        if each.is_file():
            return each.read_text()
    return ""


def test_the_pages_do_name_what_they_describe() -> None:
    found = set().union(*map(names_on, PAGES))
    assert {"distamp.autocast", "distamp.DataParallel", "distamp.pin_precision"} <= found


# What pages call the objects that they make, and what those are.
OBJECTS: dict[str, object] = {
    "scaler": distamp.DistGradScaler("cpu"),
    "amp": distamp.initialize(nn.Linear(2, 2), opt_level="O0"),
    "hook": comm_hooks.CommHookState,
    "masters": MasterParameters,
    "comm_hooks": comm_hooks,
}
_ATTRIBUTE = re.compile(rf"(?<![\w.\"'/-])({'|'.join(OBJECTS)})\.([a-z_]\w*)")
# Apex's, on the pages that put it beside ours.
APEXS = {"scale_loss", "master_params", "half_function", "float_function", "promote_function",
         "register_half_function", "register_float_function", "register_promote_function",
         "disable_casts", "initialize"}  # fmt: skip


def test_every_method_on_a_page_exists() -> None:
    code = "\n".join(block for page in PAGES for block in _CODE.findall(page.read_text()))
    missing = {
        f"{name}.{attribute}"
        for name, attribute in _ATTRIBUTE.findall(code)
        if not hasattr(OBJECTS[name], attribute)
        and not (name == "amp" and attribute in APEXS)
        and attribute not in ("py", "md")
    }
    assert missing == set()


def test_methods_on_pages_are_found() -> None:
    code = "`scaler.stepped(optimizer)` `amp.no_sync()` `scaler.no_such_thing`"
    found = _ATTRIBUTE.findall(code)
    assert ("scaler", "no_such_thing") in found
    assert len(found) == 3


STATEMENTS = [
    "import distamp",
    "import distamp.autocast",
    "import distamp.autocast.region",
    "from distamp.autocast import OpLists",
    "from distamp.autocast.state import AutocastState",
    "import distamp.initialize.entry",
    "from distamp import initialize",
    "import distamp.cuda.amp",
]
# Each order in a fork of an interpreter that has torch and nothing of ours.
FORKS = """
import os, sys, torch
for order in eval(sys.argv[1]):
    child = os.fork()
    if child == 0:
        names = {}
        for statement in order:
            exec(statement, names)
            import distamp
            kind = distamp.autocast
            right = isinstance(kind, type) and issubclass(kind, torch.autocast)
            if not right or not callable(distamp.initialize):
                os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), order)
"""


def test_the_class_and_the_function_stay_what_they_are_in_every_order_of_imports() -> None:
    """Each statement first, as that one loads the package, and then all the others after it."""
    orders = [[*STATEMENTS[at:], *STATEMENTS[:at]] for at in range(len(STATEMENTS))]
    done = subprocess.run(
        [sys.executable, "-c", FORKS, repr(orders)], capture_output=True, text=True, check=True
    )
    results = done.stdout.splitlines()
    assert len(results) == len(orders)
    assert [line for line in results if not line.startswith("0 ")] == []


HEAVY = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "sympy", "rich")


@pytest.mark.parametrize("module", ["distamp.autocast.region", "distamp.autocast.report"])
def test_importing_autocast_loads_little_that_torch_does_not(module: str) -> None:
    """The package around it, distamp itself, is stubbed: other rooms are for others to count."""
    program = (
        "import sys, torch, types, json\n"
        "before = set(sys.modules)\n"
        "stub = types.ModuleType('distamp')\n"
        f"stub.__path__ = [{str(ROOT / 'distamp')!r}]\n"
        "sys.modules['distamp'] = stub\n"
        f"import {module}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(eval(done.stdout))
    others = {name for name in loaded if not name.startswith("distamp")}
    assert {name for name in others if name.startswith(HEAVY)} == set()
    assert len(others) <= 25, sorted(others)

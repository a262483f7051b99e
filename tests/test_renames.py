"""docs/renames.csv: every old name is gone from the code, and every new one exists."""

import csv
import dataclasses
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distamp.__main__ import parser
from distamp.precision_level import APEX_NAMES, LEVELS
from launch.config import Config

ROOT = Path(__file__).parents[1]
KINDS = ("name", "method", "argument", "value", "flag", "error", "module", "state key")
CHANGES = ("renamed", "moved", "removed", "value")
ARGUMENT = re.compile(r"([\w.]+)\((\w+)=\)")


class Rename(NamedTuple):
    """One row of the table; ``new`` is empty if something was removed."""

    kind: str
    old: str
    new: str
    change: str


def read_renames() -> list[Rename]:
    with (ROOT / "docs" / "renames.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == Rename._fields
    return [Rename(*row) for row in rows]


RENAMES = read_renames()


def of_kind(*kinds: str) -> pytest.MarkDecorator:
    """Return the mark with a case for each row of some kinds.

    A row of the integrations is slow, because it imports the package of a trainer.
    """
    cases = []
    for row in RENAMES:
        if row.kind in kinds:
            is_integration = row.old.startswith("distamp.integrations.")
            marks = [pytest.mark.slow] if is_integration else []
            cases.append(pytest.param(row, id=row.old, marks=marks))
    return pytest.mark.parametrize("row", cases)


def find(path: str) -> Any:
    """Return the object at a dotted path, which may begin with modules; None if there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            target: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for position, name in enumerate(parts[length:], length):
            if not hasattr(target, name):
                is_last = position == len(parts) - 1
                return name if is_last and name in instance_attributes(target) else None
            target = getattr(target, name)
        return target
    return None


@functools.cache
def instance_attributes(cls: Any) -> set[str]:
    """Return the attributes that a class documents or that a dataclass has."""
    if not inspect.isclass(cls):
        return set()
    fields = (
        {field.name for field in dataclasses.fields(cls)}
        if dataclasses.is_dataclass(cls)
        else set()
    )
    return fields | set(re.findall(r"self\.(\w+)\b(?:: [^=\n]+)? =", inspect.getsource(cls)))


PREFLIGHT = "python -m distamp preflight"


def flags() -> set[str]:
    """Return the flags of the launcher, and of the preflight command with the command before."""
    names = {f"--{name.replace('_', '-')}" for name in Config.model_fields}
    options = parser().parse_args(["preflight", "module:factory"])
    return names | {f"{PREFLIGHT} --{name.replace('_', '-')}" for name in vars(options)}


def test_each_row_has_a_known_kind_and_change() -> None:
    assert {row.kind for row in RENAMES} <= set(KINDS)
    assert {row.change for row in RENAMES} <= set(CHANGES)
    assert all((row.change == "removed") is (row.new == "") for row in RENAMES)
    assert len({(row.kind, row.old) for row in RENAMES}) == len(RENAMES), "an old name is twice"


@of_kind("name", "method", "error", "module")
def test_an_old_name_is_gone_and_its_new_name_exists(row: Rename) -> None:
    if row.kind == "module":
        with pytest.raises(ImportError):
            importlib.import_module(row.old)
    else:
        assert find(row.old) is None
    if row.new:
        assert find(row.new) is not None, row.new


@of_kind("argument")
def test_an_old_argument_is_gone_and_its_new_name_exists(row: Rename) -> None:
    old = ARGUMENT.fullmatch(row.old)
    assert old is not None
    function = find(old[1])
    if function is not None:
        assert old[2] not in inspect.signature(function).parameters
    if row.new:
        new = ARGUMENT.fullmatch(row.new)
        assert new is not None
        assert new[2] in inspect.signature(find(new[1])).parameters


@of_kind("flag")
def test_an_old_flag_is_gone_and_its_new_name_exists(row: Rename) -> None:
    if row.change != "value":
        assert row.old not in flags()
    if row.new:
        flag = row.new if row.change != "value" else row.new.split()[0]
        assert flag in flags()


def test_values_of_levels_are_those_of_the_code() -> None:
    levels = {row.old: row.new for row in RENAMES if row.old.startswith("level ")}
    assert levels == {f'level "{apex}"': f'level "{name}"' for apex, name in APEX_NAMES.items()}
    assert set(APEX_NAMES.values()) <= set(LEVELS)


def distinctive_names() -> set[str]:
    """Return old names that cannot be ordinary words or names of another library."""
    names: set[str] = set()
    for row in RENAMES:
        old = row.old.rpartition(".")[2]
        new = row.new.rpartition(".")[2]
        is_compound = "_" in old or re.search(r"[a-z][A-Z]", old)
        if row.kind in ("name", "method", "error") and is_compound and old != new:
            names.add(old)
    return names


DISTINCTIVE = distinctive_names()


@functools.cache
def words_of_the_code() -> frozenset[str]:
    """Return every word of the code, its comments included."""
    words: set[str] = set()
    for folder in ("distamp", "launch", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            words.update(re.findall(r"\w+", path.read_text()))
    return frozenset(words)


@pytest.mark.parametrize("name", sorted(DISTINCTIVE))
def test_no_code_uses_an_old_name(name: str) -> None:
    assert len(DISTINCTIVE) > 15
    assert name not in words_of_the_code()

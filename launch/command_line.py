"""The command line: flags, those of another run below them, and what is wrong with them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import tyro

from launch.config import Config, Shape
from launch.errors import UsageError
from launch.help import completion, help_text
from launch.places import run_of

__all__ = ["differences", "flags_of", "parse", "read"]

# Where a run is and how it was begun are its own, and no other's.
_OWN = frozenset({"run_dir", "resume", "auto_resume", "overwrite", "config", "max_minutes"})
# What belongs to a level of precision goes when another is asked for.
_LEVEL = ("precision", "opt_level")
_OF_A_LEVEL = frozenset({*_LEVEL, "keep_batchnorm_fp32", "master_weights", "loss_scale"})
_OF_A_LEVEL |= {"init_scale", "growth_interval", "schedule"}
_OF_A_STRATEGY = frozenset({"strategy", "replicas", "shards", "tp", "adamw", "gather_fp32"})


def parse(args: Sequence[str] | None, *, quiet: bool = False) -> Config:
    """Read the command line.

    The flags of a run that ``--resume`` or ``--config`` names count where none are given.

    Args:
        args: The arguments; ``sys.argv[1:]`` when None.
        quiet: Print no help (another rank does).

    Raises:
        UsageError: With tyro's own message as one line.
        SystemExit: With code 0, after ``--help`` or ``--completion``.
    """
    given = sys.argv[1:] if args is None else [*args]
    _answer_questions(given, quiet)
    inherited: list[str] = []
    if (run := _value(given, "resume")) is not None:
        folder = run_of(Path(run))
        if folder is not None:
            inherited += _inherited(folder / "config.json", given, resumed=True)
    if (path := _value(given, "config")) is not None:
        inherited += _inherited(Path(path), given, resumed=False)
    return _parse([*inherited, *given])


def read(args: Sequence[str] | None, *, quiet: bool = False) -> Config | UsageError:
    """Parse and check; return what is wrong, not raise it: the ranks are to report it together."""
    try:
        config = parse(args, quiet=quiet)
        config.check()
        return config
    except UsageError as error:
        return error


def flags_of(path: Path) -> Config | None:
    """Return what a config.json asks for; None where there is none that can be read."""
    try:
        return _parse(_as_arguments(_loaded(path)))
    except (UsageError, OSError, ValueError):
        return None


def differences(before: Config, now: Config) -> list[str]:
    """Say which flags of two runs differ, but for those that say where a run is."""
    one, other = _flat(before), _flat(now)
    return [
        f"{name} {one[name]} -> {other[name]}"
        for name in one
        if one[name] != other[name] and name not in _OWN and name != "strategy"
    ]


def _flat(config: Config) -> dict[str, object]:
    settings = asdict(config)
    return {**settings, **settings.pop("shape")}


def _answer_questions(given: Sequence[str], quiet: bool) -> None:
    shell = _value(given, "completion")
    if not {"-h", "--help"} & {*given} and shell is None:
        return
    if not quiet:
        print(help_text(width=_width()) if shell is None else completion(shell), end="")
    raise SystemExit(0)


def _width() -> int:
    with contextlib.suppress(OSError, ValueError):
        return max(60, min(100, os.get_terminal_size(sys.stdout.fileno()).columns))
    return 100


def _parse(args: list[str]) -> Config:
    errors, output = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            return tyro.cli(
                Config,
                prog="launch/train.py",
                args=args,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit:
        raise UsageError(_one_line(errors.getvalue())) from None


# -- the flags of another run ---------------------------------------------------------------------


def _value(args: Sequence[str], name: str) -> str | None:
    """Return what a flag is given last; None if it is not."""
    found = None
    for index, word in enumerate(args):
        flag, equals, _ = word.replace("_", "-").partition("=")
        if flag == f"--{name.replace('_', '-')}":
            following = args[index + 1] if index + 1 < len(args) else None
            found = word.partition("=")[2] if equals else following
    return found


def _inherited(path: Path, given: Sequence[str], *, resumed: bool) -> list[str]:
    """Return the flags in a config.json, but for those that cannot go with what is given.

    Args:
        path: The file, or the folder of its run.
        given: The arguments beside it.
        resumed: Whether it is that of the run that goes on: it may lack then, or be another
            version's.

    Raises:
        UsageError: Naming the file and what is wrong in it.
    """
    flag = "--resume" if resumed else "--config"
    with _reading(flag, path):
        if path.is_dir():
            path = path / "config.json"
        if resumed and not path.exists():  # an old run, or none; find() names which
            return []
        settings = _loaded(path)
    known = {each.name for kind in (Config, Shape) for each in fields(kind)}
    if not resumed and (unknown := [name for name in settings if name not in known]):
        raise UsageError(
            f"--config {path}: no flag is called {unknown[0]} (--help lists every flag)"
        )
    try:
        _parse(_as_arguments(settings))
    except UsageError as error:
        raise UsageError(f"{flag} {path}: {error}") from None
    if any(_value(given, name) is not None for name in _LEVEL):
        settings = {name: v for name, v in settings.items() if name not in _OF_A_LEVEL}
    if _value(given, "strategy") is not None:
        settings = {name: v for name, v in settings.items() if name not in _OF_A_STRATEGY}
    return _as_arguments({name: v for name, v in settings.items() if name not in _OWN})


@contextlib.contextmanager
def _reading(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"{flag} {path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot read it ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{flag} {path}: {error}") from None


def _loaded(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError("it is no JSON") from None
    if not isinstance(settings, dict):
        raise ValueError("it is no config.json of a run")
    shape = settings.pop("shape", {})
    return {**settings, **(shape if isinstance(shape, dict) else {})}


def _as_arguments(settings: dict[str, Any]) -> list[str]:
    """Return settings as they would be given; those of another version are left out."""
    flags = {each.name: each.type for kind in (Config, Shape) for each in fields(kind)}
    found: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if name not in flags or name == "shape" or value in (None, []):
            continue
        if isinstance(value, list):
            found += [flag, *map(str, value)]
        elif flags[name] == "bool":
            found.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            found.append(f"{flag}={value}")
    return found


# -- what is wrong --------------------------------------------------------------------------------


def _one_line(box: str) -> str:
    """Take the message, and the close match if there is one, out of tyro's framed error."""
    message, *more = _parts(box)
    for part in more:
        if meant := re.match(r"Perhaps you meant:\s+(\S+)", part):
            message += f"; perhaps you meant {meant[1]}"
    return f"{message} (--help lists every flag)"


def _parts(box: str) -> Iterator[str]:
    # The first row is a title; rules are drawn in ASCII where the terminal has no better.
    part: list[str] = []
    for row in (row.strip("│ ") for row in (*box.splitlines()[1:], "---")):
        if re.match(r"[╰─]|---", row):
            if part:
                yield " ".join(part)
            part = []
        elif row:
            part.append(row)

"""The command line of any program here: flags by tyro, and refusals in one sentence."""

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import tyro


class UsageError(Exception):
    """What a user asked for cannot be done; one sentence says what can."""


def require(holds: object, sentence: str) -> None:
    """Raise `UsageError` unless something holds."""
    if not holds:
        raise UsageError(sentence)


def flag(name: str) -> str:
    """Return the flag of an attribute."""
    return f"--{name.replace('_', '-')}"


def read_flags(f: Any, prog: str, args: Sequence[str] | None = None, **default: Any) -> Any:
    """Call ``f`` with what the command line says, by tyro; ``--help`` prints, and ends.

    Args:
        f: A class or a function.
        prog: What the program is called.
        args: None: those of the process.
        default: ``default=`` an instance, whose values count where no flag is given.

    Raises:
        UsageError: A flag or a value cannot be read.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            found, unknown = tyro.cli(
                f,
                prog=prog,
                args=args,
                return_unknown_args=True,
                console_outputs=_speaks(),
                **default,
            )
    except SystemExit as done:
        if not done.code:
            raise
        # tyro draws a box around it, with a rule below what is wrong.
        lines = [line.strip("│ ") for line in box.getvalue().splitlines()[1:]]
        fault = " ".join(itertools.takewhile(lambda line: "──" not in line, lines))
        raise UsageError(fault.removeprefix("Error parsing ")) from None
    if unknown:
        hint = near(unknown[0], map(flag, inspect.signature(f).parameters))
        raise UsageError(f"{unknown[0]}: no such flag or value{hint}")
    return found


def near(name: str, known: Iterable[str]) -> str:
    """Return a question after what is known and written alike, or nothing."""
    return "".join(f"; did you mean {each}?" for each in get_close_matches(name, known, 1))


def program(name: str, main: Callable[..., None]) -> int:
    """Run a function as ``python -m NAME``, its arguments as flags; return the exit code."""

    @functools.wraps(main)
    def later(*args: Any, **flags: Any) -> Callable[[], None]:
        return functools.partial(main, *args, **flags)

    return refusing(lambda: read_flags(later, f"python -m {name}")())


def refusing(body: Callable[[], None]) -> int:
    """Run the body of a program; return its exit code, which is 2 if the user asked too much.

    Every rank finds the same fault. The first of each machine prints it and ends, upon which
    torchrun sends the others SIGTERM; they wait for that, so that nobody is cut off.
    """
    try:
        body()
        return 0
    except UsageError as error:
        if _speaks():
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    time.sleep(10)
    return 2


def _speaks() -> bool:
    """Whether this is the first rank of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Turn ``name=value`` into keyword arguments; a value is JSON, or else text."""
    found: dict[str, Any] = dict(pair.split("=", 1) for pair in pairs)
    for name, text in found.items():
        with contextlib.suppress(ValueError):
            found[name] = json.loads(text)
    return found


def load_own(flag: str, name: str) -> Any:
    """Import ``module:name``, also from the folder in which the run was started.

    Raises:
        UsageError: If it is not there.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{flag} {name}: {error}") from None

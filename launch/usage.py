"""The command line of any program here; refusals in one sentence, and errors that are a user's."""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

# Files of ours and of installed packages; any other is the user's.
_NOT_THEIRS = (
    *(str(Path(__file__).resolve().parents[1] / name) + os.sep for name in ("launch", "distamp")),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


class UsageError(Exception):
    """What a user asked for cannot be done; one sentence says what can."""


def require(holds: object, sentence: str) -> None:
    """Raise `UsageError` unless something holds."""
    if not holds:
        raise UsageError(sentence)


def flag(name: str) -> str:
    """Return the flag of an attribute."""
    return f"--{name.replace('_', '-')}"


def near(name: str, known: Iterable[str]) -> str:
    """Return a question after what is known and written alike, or nothing."""
    return "".join(f"; did you mean {each}?" for each in get_close_matches(name, known, 1))


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises `UsageError`; of all ranks, the first prints its help.

    Args:
        prog: What the program is called.
        description: What it does.
        meant: Names that other programs have for flags of this one.
    """

    def __init__(self, prog: str, description: str, meant: dict[str, str] | None = None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog=prog,
            usage=f"{prog} [flags]",
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: layout(prog, max_help_position=36, width=120),
        )
        self._meant = meant or {}

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below the usage."""
        raise UsageError(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        """Print all flags; of all ranks, the first does."""
        if speaks():
            super().print_help(file)

    def read(self, args: Sequence[str] | None) -> argparse.Namespace:
        """Read the command line.

        Args:
            args: None: those of the process.

        Raises:
            UsageError: A flag or a value cannot be read.
        """
        values, unknown = self.parse_known_args(args)
        if unknown:
            name = unknown[0].partition("=")[0]
            meant = self._meant.get(name.lstrip("-").replace("-", "_"))
            known = [each for action in self._actions for each in action.option_strings]
            hint = f"; here it is {flag(meant)}" if meant else near(name, known)
            self.error(f"{unknown[0]}: no such flag or value{hint}")
        return values


def exit_code_of(program: Callable[[], None]) -> int:
    """Run a program; return its exit code, which is 2 if the user asked for what cannot be.

    Every rank finds the same fault. The first of each machine prints it and ends, upon which
    torchrun sends the others SIGTERM; they wait for that, so that nobody is cut off. An error of
    the user's own code keeps its traceback, below the line of it that went wrong.
    """
    try:
        program()
        return 0
    except UsageError as error:
        message, code = f"error: {error}", 2
    except KeyboardInterrupt:
        message, code = "stopped before there was anything to save", 130
    except Exception as error:
        if (place := place_of_user(error)) is None:
            raise
        print(f"error in {place}: {type(error).__name__}: {error}", file=sys.stderr)
        traceback.print_exc()
        return 1
    if speaks():
        print(message, file=sys.stderr, flush=True)
        return code
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    time.sleep(10)
    return code


def speaks() -> bool:
    """Whether this is the first rank of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def place_of_user(error: BaseException) -> str | None:
    """Return the innermost line of the user's own files that an error came through, if any."""
    lines = traceback.extract_tb(error.__traceback__)
    places = [(os.path.realpath(line.filename), line) for line in lines if line.filename[0] != "<"]
    theirs = [line for path, line in places if not path.startswith(_NOT_THEIRS)]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else None


@contextlib.contextmanager
def refusing(what: str, *faults: type[Exception]) -> Iterator[None]:
    """Turn faults, unless they are of the user's own code, into a sentence that begins so."""
    try:
        yield
    except faults as error:
        if place_of_user(error):
            raise
        raise UsageError(f"{what}: {error}") from None


def arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Turn ``name=value`` into keyword arguments; a value is JSON, or else text."""
    values: dict[str, Any] = dict(pair.split("=", 1) for pair in pairs)
    for name, text in values.items():
        with contextlib.suppress(ValueError):
            values[name] = json.loads(text)
    return values


def load_own(flag: str, name: str) -> Any:
    """Import ``module:name``, also from the folder in which the run was started.

    Raises:
        UsageError: It is not there; an error inside the module is the user's own.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        is_there = importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError) as error:
        if place_of_user(error):
            raise
        is_there = False
    require(is_there, f"{flag} {name}: no module {module!r} here, nor where Python looks")
    loaded = importlib.import_module(module)
    hint = near(attribute, dir(loaded))
    require(hasattr(loaded, attribute), f"{flag} {name}: {module} has no {attribute!r}{hint}")
    return getattr(loaded, attribute)

"""What all programs here have: a command line, refusals in one sentence, whose an error is."""

import argparse
import contextlib
import importlib
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

# Folders of ours and of installed packages; a file in any other is the user's.
_OURS = [Path(__file__).resolve().parents[1] / name for name in ("launch", "distamp")]
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_THEIRS = tuple(f"{folder}{os.sep}" for folder in (*_OURS, *_INSTALLED))


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
    """An ``ArgumentParser`` that raises `UsageError`.

    Args:
        prog: What the program is called.
        description: What it does.
        elsewhere: From names that other programs have to attributes of this one.
    """

    def __init__(self, prog: str, description: str, elsewhere: Mapping[str, str] = {}) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [flags]",
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(
                prog, max_help_position=46, width=130
            ),
        )
        self._elsewhere = elsewhere

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below the usage."""
        raise UsageError(message.removeprefix("argument "))

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
            ours = self._elsewhere.get(name.lstrip("-").replace("-", "_"))
            known = [each for action in self._actions for each in action.option_strings]
            hint = f"; here it is {flag(ours)}" if ours else near(name, known)
            self.error(f"{unknown[0]}: no such flag or value{hint}")
        return values


def place_of_user(error: BaseException) -> str | None:
    """Return the innermost line of the user's own files that an error came through, if any."""
    for line in reversed(traceback.extract_tb(error.__traceback__)):
        if line.filename[0] != "<" and not os.path.realpath(line.filename).startswith(_NOT_THEIRS):
            return f"{line.filename}, line {line.lineno}"
    return None


@contextlib.contextmanager
def refusing(what: str, *faults: type[Exception]) -> Iterator[None]:
    """Turn faults, unless they are of the user's own code, into a sentence that begins so."""
    try:
        yield
    except faults as error:
        if place_of_user(error) or isinstance(error, UsageError):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{what}: {first}") from None


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
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another that is not
        raise UsageError(
            f"{flag} {name}: no module {module!r} here, nor where Python looks"
        ) from None
    hint = near(attribute, dir(loaded))
    require(hasattr(loaded, attribute), f"{flag} {name}: {module} has no {attribute!r}{hint}")
    return getattr(loaded, attribute)

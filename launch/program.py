"""Command lines, usage errors, exit codes and signals for the programs of this folder."""

import contextlib
import ctypes
import json
import os
import pkgutil
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import cyclopts
import pydantic

_REPOSITORY = Path(__file__).parents[1]


def _library_folders() -> tuple[str, ...]:
    """Return the folders of this repository's packages and of installed packages."""
    folders = [str(_REPOSITORY / "launch"), str(_REPOSITORY / "distamp")]
    for scheme in ("stdlib", "platstdlib", "purelib", "platlib"):
        folders.append(sysconfig.get_path(scheme))
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)


# A file in any other folder belongs to the user.
_LIBRARY_FOLDERS = _library_folders()


class UsageError(Exception):
    """A request that cannot be carried out, with a message for the user."""


class UnknownNameError(ValueError):
    """A value that is not among the names that a flag accepts.

    Attributes:
        names: The names that the value may be.
    """

    def __init__(self, message: str, names: Collection[str]) -> None:
        super().__init__(message)
        self.names = names


def require(condition: object, message: str) -> None:
    """Raise `UsageError` with this message if the condition is false."""
    if not condition:
        raise UsageError(message)


def flag(name: str) -> str:
    """Return the flag of an attribute."""
    dashed = name.replace("_", "-")
    return f"--{dashed}"


def suggest(valid_names: Collection[str], *names: str) -> str:
    """Return a question that offers a similar valid name for each name, or an empty string."""
    matches: list[str] = []
    for name in names:
        matches += get_close_matches(name, valid_names, 1)
    if not matches:
        return ""
    offers = ", ".join(matches)
    return f". Did you mean {offers}?"


# -- the command line ------------------------------------------------------------------------------


def make_app(name: str, function: Callable[..., object]) -> cyclopts.App:
    """Return a command line with the arguments of a function, and its docstring as the help."""
    # A flag may be repeated, as in other programs: the last value counts.
    defaults = cyclopts.Parameter(allow_repeating=True, negative_iterable="")
    app = cyclopts.App(
        name,
        version_flags=[],
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        default_parameter=defaults,
    )
    app.default(function)
    return app


def run_app(
    app: cyclopts.App,
    args: Sequence[str] | None = None,
    foreign_names: Mapping[str, str] = {},
    renamed: Mapping[str, str] = {},
) -> Any:
    """Call the function of a command line, or print the help for ``--help`` and return None.

    Args:
        app: A command line from `make_app`.
        args: The words of the command line. None takes the words of this process.
        foreign_names: From names of arguments in other programs to names here.
        renamed: From former names of arguments to present names.

    Raises:
        UsageError: A flag or a value cannot be read.
    """
    try:
        return app(args, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        if isinstance(error.__cause__, pydantic.ValidationError):
            raise first_usage_error(error.__cause__) from None
        message = str(error)
        if isinstance(error, cyclopts.UnknownOptionError):
            valid_flags: list[str] = []
            for argument in app.assemble_argument_collection():
                valid_flags += argument.names
            typed = str(error.token.keyword)
            message = describe_unknown_flag(typed, valid_flags, foreign_names, renamed)
        elif isinstance(error, cyclopts.UnusedCliTokensError):
            unused = " ".join(error.unused_tokens or [])
            message = f"{unused}: no flag takes this. --help lists every flag."
        raise UsageError(message) from None


def describe_unknown_flag(
    typed: str,
    valid_flags: Sequence[str],
    foreign_names: Mapping[str, str] = {},
    renamed: Mapping[str, str] = {},
) -> str:
    """Return the message for a flag that does not exist, with the flag that was probably meant.

    Args:
        typed: The flag that the user typed.
        valid_flags: The flags of the program.
        foreign_names: From names of arguments in other programs to names here.
        renamed: From former names of arguments to present names.
    """
    name = typed.lstrip("-").replace("-", "_")
    if name in renamed:
        present = flag(renamed[name])
        return f"{typed}: this flag was renamed. Write {present}."
    if name in foreign_names:
        present = flag(foreign_names[name])
        return f"{typed}: there is no such flag. It is called {present} here."
    candidates = {}
    for names in (foreign_names, renamed):
        for former, present in names.items():
            candidates[flag(former)] = flag(present)
    for present in valid_flags:
        candidates[present] = present
    advice = "--help lists every flag."
    dashed = typed.replace("_", "-")
    for match in get_close_matches(dashed, candidates, 1):
        advice = f"Did you mean {candidates[match]}?"
    return f"{typed}: there is no such flag. {advice}"


# Messages for the faults that pydantic finds in a value, with the names of pydantic's context.
_VALUE_FAULTS = {
    "float_parsing": "this is not a number. Give one such as 0.5 or 1e-3.",
    "int_parsing": "this is not a whole number. Give one such as 4.",
    "int_from_float": "this is not a whole number. Give one such as 4.",
    "finite_number": "the number is not finite. Give a finite one.",
    "greater_than": "the number is too small. Give one above {gt:g}.",
    "greater_than_equal": "the number is too small. Give {ge:g} or more.",
    "less_than": "the number is too large. Give one below {lt:g}.",
    "less_than_equal": "the number is too large. Give {le:g} or less.",
    "literal_error": "there is no such choice. Choose {expected}.",
}


def first_usage_error(error: pydantic.ValidationError) -> UsageError:
    """Return the message for the first fault that pydantic found, with a similar valid value."""
    fault = error.errors()[0]
    kind = fault["type"]
    value = fault["input"]
    context = fault.get("ctx", {})
    message = fault["msg"].removeprefix("Value error, ")
    if kind in _VALUE_FAULTS:
        message = _VALUE_FAULTS[kind].format(**context).replace("'", "")
    names: Collection[str] = ()
    cause = context.get("error")
    if kind == "literal_error":
        names = re.findall(r"'([^']+)'", context["expected"])
    elif isinstance(cause, UnknownNameError):
        names = cause.names
    if isinstance(value, str):
        for match in get_close_matches(value, names, 1):
            message += f" Did you mean {match}?"
    name = str(fault["loc"][0])
    return UsageError(f"{flag(name)} {value}: {message}")


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Convert ``name=value`` to keyword arguments; a value that is not JSON is text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, text = pair.split("=", 1)
        values[name] = text
        with contextlib.suppress(ValueError):
            values[name] = json.loads(text)
    return values


# -- code of the user ------------------------------------------------------------------------------


def find_user_line(error: BaseException) -> str | None:
    """Return the innermost line of the user's files in a traceback, or None."""
    # A syntax error has no frame in the file that contains it.
    if isinstance(error, SyntaxError) and error.filename and _is_user_path(error.filename):
        return f"{error.filename}, line {error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_user_path(frame.filename):
            return f"{frame.filename}, line {frame.lineno}"
    return None


def _is_user_path(path: str) -> bool:
    # Python writes <string> and <frozen ...> for code without a file.
    if path.startswith("<"):
        return False
    return not os.path.realpath(path).startswith(_LIBRARY_FOLDERS)


@contextlib.contextmanager
def convert_to_usage_error(subject: str, *error_types: type[Exception]) -> Iterator[None]:
    """Convert errors of these types to a `UsageError` that begins with the subject.

    An error that came through the user's own code is raised unchanged.
    """
    try:
        yield
    except error_types as error:
        if find_user_line(error) or isinstance(error, UsageError):
            raise
        reason = str(error).strip() or type(error).__name__
        first_line = reason.splitlines()[0]
        raise UsageError(f"{subject}: {first_line}") from None


def import_object(flag: str, name: str) -> Any:
    """Import ``module:name``, also from the folder in which the run was started.

    Raises:
        UsageError: The module or the name does not exist. An error inside the module is raised
            unchanged.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        # Code of the user that fails, also an import in it, has a line in a file of the user.
        if find_user_line(error):
            raise
        module_name, _, attribute = name.partition(":")
        message = str(error)
        if isinstance(error, ModuleNotFoundError):
            message = _describe_missing_module(module_name, error.name)
        elif isinstance(error, AttributeError):
            message = _describe_missing_attribute(sys.modules.get(module_name), name, attribute)
        raise UsageError(f"{flag} {name}: {message}") from None


def _describe_missing_module(module_name: str, missing_name: str | None) -> str:
    """Return the message for a module that was not found, with the folders that were searched."""
    package = module_name.partition(".")[0]
    searched = []
    for entry in sys.path:
        folder = Path(entry or ".").resolve()
        is_user_folder = folder.is_dir() and _is_user_path(f"{folder}{os.sep}")
        if is_user_folder and str(folder) not in searched:
            searched.append(str(folder))
    folders = ", ".join(searched)
    return (
        f"there is no module {missing_name or module_name}. Looked for {package}.py and for a "
        f"folder {package} in {folders}, and in the installed packages. Start the run from the "
        f"folder that holds {package}, or add that folder to PYTHONPATH"
    )


def _describe_missing_attribute(module: ModuleType | None, name: str, attribute: str) -> str:
    """Return the message for a module that has no such attribute, with a similar name."""
    if module is None:
        return f"there is no {name}"
    file = getattr(module, "__file__", None) or "a built-in module of Python"
    hint = suggest(vars(module), attribute)
    return f"{module.__name__}, which is {file}, has no {attribute}{hint}"


# -- the end of a program --------------------------------------------------------------------------


def run_to_exit_code(action: Callable[[], object]) -> int:
    """Run an action and return the exit code of the process, which is 2 after a `UsageError`.

    Every rank raises the same `UsageError`. The first rank of each machine prints it and exits,
    and torchrun then sends SIGTERM to the other ranks. They wait for that signal, so that the
    message is complete before torchrun ends. An error in the user's own code keeps its traceback,
    below a line that names the user's file.
    """
    try:
        action()
        return 0
    except UsageError as error:
        message = f"error: {error}"
        code = 2
    except KeyboardInterrupt:
        message = "Stopped before there was anything to save."
        code = 130
    except Exception as error:
        if location := find_user_line(error):
            print(f"error in {location}: {type(error).__name__}: {error}", file=sys.stderr)
            sys.stderr.flush()
        raise
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
        return code
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    time.sleep(10)
    return code


def make_main(name: str, function: Callable[..., object]) -> Callable[..., int]:
    """Return a ``main`` that takes the words of a command line and returns the exit code."""
    app = make_app(name, function)

    def run(args: Sequence[str] | None) -> None:
        try:
            run_app(app, args)
            sys.stdout.flush()
        except BrokenPipeError:  # The reader of the pipe ended early, as `head` does.
            # Python flushes stdout once more at its end, which would raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)

    return lambda args=None: run_to_exit_code(lambda: run(args))


# Returns whether a signal has asked this process to stop, and the seconds until --max-time.
StopCheck = Callable[[], tuple[bool, float]]


@contextlib.contextmanager
def watch_for_stop(seconds: float) -> Iterator[StopCheck]:
    """Catch SIGTERM and SIGINT, and watch the clock.

    Args:
        seconds: The time that the process has, from now on.
    """
    deadline = time.monotonic() + seconds
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        # A second Ctrl-C ends the process at once.
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    def check_stop() -> tuple[bool, float]:
        return bool(received), deadline - time.monotonic()

    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            former_handler = signal.signal(number, receive)
            stack.callback(signal.signal, number, former_handler)
        yield check_stop


def die_with_parent(*_: object) -> None:
    """Let Linux kill this process when its parent dies: torchrun, or the rank of a data worker.

    Otherwise a rank would continue to write to the folder of the run after torchrun was killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

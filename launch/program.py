"""What every program here has: a command line, refusals in one sentence, and how it ends."""

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
from typing import Any

import cyclopts
import pydantic

# Folders of ours and of installed packages; a file in any other is the user's.
_OURS = [str(Path(__file__).parents[1] / name) for name in ("launch", "distamp")]
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_THEIRS = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in (*_OURS, *_INSTALLED))


class UsageError(Exception):
    """What a user asked for cannot be done; one sentence says what can."""


class UnknownNameError(ValueError):
    """A value that is none of some names.

    Attributes:
        names: The names that the value may be.
    """

    def __init__(self, sentence: str, names: Collection[str]) -> None:
        super().__init__(sentence)
        self.names = names


def require(holds: object, sentence: str) -> None:
    """Raise `UsageError` unless something holds."""
    if not holds:
        raise UsageError(sentence)


def flag(name: str) -> str:
    """Return the flag of an attribute."""
    return f"--{name.replace('_', '-')}"


def suggest(known: Collection[str], *names: str) -> str:
    """Return a question that offers a similar known name for each name, or an empty string."""
    matches: list[str] = []
    for name in names:
        matches += get_close_matches(name, known, 1)
    return f". Did you mean {', '.join(matches)}?" if matches else ""


def command(name: str, function: Callable[..., object]) -> cyclopts.App:
    """Return a command line: a function's arguments, and its docstring as the help."""
    app = cyclopts.App(
        name,
        version_flags=[],
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        # As elsewhere, the last one counts.
        default_parameter=cyclopts.Parameter(allow_repeating=True, negative_iterable=""),
    )
    app.default(function)
    return app


def call(
    app: cyclopts.App,
    args: Sequence[str] | None = None,
    elsewhere: Mapping[str, str] = {},
    renamed: Mapping[str, str] = {},
) -> Any:
    """Call the function of a command line; where ``--help`` is asked, print that, and return None.

    Args:
        app: Of `command`.
        args: None: those of the process.
        elsewhere: From names of arguments in other programs to names here.
        renamed: From former names of arguments to present names.

    Raises:
        UsageError: A flag or a value cannot be read.
    """
    try:
        return app(args, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        if isinstance(error.__cause__, pydantic.ValidationError):
            raise first_usage_error(error.__cause__) from None
        if isinstance(error, cyclopts.UnknownOptionError):
            arguments = app.assemble_argument_collection()
            flags = [name for argument in arguments for name in argument.names]
            typed = str(error.token.keyword)
            raise UsageError(unknown_flag(typed, flags, elsewhere, renamed)) from None
        if isinstance(error, cyclopts.UnusedCliTokensError):
            unused = " ".join(error.unused_tokens or [])
            raise UsageError(f"{unused}: no flag takes this. --help lists every flag.") from None
        raise UsageError(str(error)) from None


def unknown_flag(
    typed: str,
    flags: Sequence[str],
    elsewhere: Mapping[str, str] = {},
    renamed: Mapping[str, str] = {},
) -> str:
    """Return the message for a flag that does not exist, with the flag that was probably meant.

    Args:
        typed: The flag that the user typed.
        flags: The flags of the program.
        elsewhere: From names of arguments in other programs to names here.
        renamed: From former names of arguments to present names.
    """
    name = typed.lstrip("-").replace("-", "_")
    if name in renamed:
        return f"{typed}: this flag was renamed. Write {flag(renamed[name])}."
    if name in elsewhere:
        return f"{typed}: there is no such flag. It is called {flag(elsewhere[name])} here."
    candidates: dict[str, str] = {}
    for names in (elsewhere, renamed):
        for former, present in names.items():
            candidates[flag(former)] = flag(present)
    for present in flags:
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


def find_user_line(error: BaseException) -> str | None:
    """Return the innermost line of the user's own files that an error came through, if any.

    An error of syntax has no frame in the file in which it is.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{error.filename}, line {error.lineno}"
    for line in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(line.filename):
            return f"{line.filename}, line {line.lineno}"
    return None


def _is_users(filename: str) -> bool:
    return filename[0] != "<" and not os.path.realpath(filename).startswith(_NOT_THEIRS)


@contextlib.contextmanager
def convert_to_usage_error(what: str, *faults: type[Exception]) -> Iterator[None]:
    """Turn faults, unless they are of the user's own code, into a sentence that begins so."""
    try:
        yield
    except faults as error:
        if find_user_line(error) or isinstance(error, UsageError):
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


def import_object(flag: str, name: str) -> Any:
    """Import ``module:name``, also from the folder in which the run was started.

    Raises:
        UsageError: It is not there; an error inside the module is the user's own.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, attribute = name.partition(":")
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        # One that the user's own file imports has a line in that file.
        if find_user_line(error):
            raise
        first = module.partition(".")[0]
        places = [Path(folder or ".").resolve() for folder in sys.path]
        places = [place for place in places if _is_users(f"{place}{os.sep}") and place.is_dir()]
        looked = ", ".join(map(str, dict.fromkeys(places)))
        raise UsageError(
            f"{flag} {name}: there is no module {error.name or module}. Looked for {first}.py and "
            f"for a folder {first} in {looked}, and in the installed packages. Start the run from "
            f"the folder that holds {first}, or add that folder to PYTHONPATH"
        ) from None
    except AttributeError as error:
        if find_user_line(error):
            raise
        file = getattr(sys.modules.get(module), "__file__", None) or "a module of Python's own"
        known = vars(sys.modules[module]) if module in sys.modules else ()
        hint = suggest(known, attribute)
        raise UsageError(
            f"{flag} {name}: {module}, which is {file}, has no {attribute}{hint}"
        ) from None
    except (ImportError, ValueError) as error:
        if find_user_line(error):
            raise
        raise UsageError(f"{flag} {name}: {error}") from None


# -- how a program ends ----------------------------------------------------------------------------


def run_to_exit_code(action: Callable[[], object]) -> int:
    """Do something; return the exit code, which is 2 if the user asked for what cannot be.

    Every rank finds the same fault. The first of each machine prints it and ends, upon which
    torchrun sends the others SIGTERM; they wait for that, so that nobody is cut off. An error of
    the user's own code keeps its traceback, below the line of it that went wrong.
    """
    try:
        action()
        return 0
    except UsageError as error:
        message, code = f"error: {error}", 2
    except KeyboardInterrupt:
        message, code = "stopped before there was anything to save", 130
    except Exception as error:
        if place := find_user_line(error):
            print(f"error in {place}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
        return code
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    time.sleep(10)
    return code


def program(name: str, function: Callable[..., object]) -> Callable[..., int]:
    """Return the ``main`` of a program: from the words of its command line to its exit code."""
    app = command(name, function)

    def printed(args: Sequence[str] | None) -> None:
        try:
            call(app, args)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever reads has seen enough, as `head`
            # What is left goes nowhere: else Python fails again as it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)

    return lambda args=None: run_to_exit_code(lambda: printed(args))


# Whether a signal asks a process to end, and the seconds that --max-time leaves it.
StopCheck = Callable[[], tuple[bool, float]]


@contextlib.contextmanager
def watch_for_stop(seconds: float) -> Iterator[StopCheck]:
    """Listen to signals, and watch the clock.

    Args:
        seconds: Time after which the process is asked to end.
    """
    end = time.monotonic() + seconds
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        if number == signal.SIGINT and heard:
            raise KeyboardInterrupt  # someone at a terminal will not wait
        heard.append(number)

    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, hear))
        yield lambda: (bool(heard), end - time.monotonic())


def die_with_parent(*_: object) -> None:
    """Have Linux kill this process where its parent dies: torchrun, or the rank of a reader.

    Nobody else would end a rank whose torchrun was killed, and it would go on writing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

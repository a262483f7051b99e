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


def near(known: Collection[str], *names: str) -> str:
    """Return a question after what is known and written like some names, or nothing."""
    alike = [each for name in names for each in get_close_matches(name, known, 1)]
    return f"; did you mean {', '.join(alike)}?" if alike else ""


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
    app: cyclopts.App, args: Sequence[str] | None = None, elsewhere: Mapping[str, str] = {}
) -> Any:
    """Call the function of a command line; where ``--help`` is asked, print that, and return None.

    Args:
        app: Of `command`.
        args: None: those of the process.
        elsewhere: From names that other programs have to those here.

    Raises:
        UsageError: A flag or a value cannot be read.
    """
    try:
        return app(args, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        if isinstance(error.__cause__, pydantic.ValidationError):
            raise refusal_of(error.__cause__) from None
        sentence = str(error)
        if isinstance(error, cyclopts.UnknownOptionError):
            name = str(error.token.keyword)
            ours = elsewhere.get(name.lstrip("-").replace("-", "_"))
            sentence = f"{name}: no such flag; here it is {flag(ours)}" if ours else sentence
        raise UsageError(sentence) from None


def refusal_of(error: pydantic.ValidationError) -> UsageError:
    """Return pydantic's first complaint as a sentence, with a word that is written alike."""
    fault = error.errors()[0]
    allowed = fault["msg"].removeprefix("Value error, ").replace("Input", "it", 1)
    given = fault["input"]
    context = fault.get("ctx", {})
    names: Collection[str] = ()
    if fault["type"] == "literal_error":
        names = re.findall(r"'([^']+)'", context["expected"])
    elif isinstance(context.get("error"), UnknownNameError):
        names = context["error"].names
    hint = near(names, given) if isinstance(given, str) else ""
    return UsageError(f"{flag(str(fault['loc'][0]))} {given}: {allowed}{hint}")


def place_of_user(error: BaseException) -> str | None:
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
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, attribute = name.partition(":")
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        # One that the user's own file imports has a line in that file.
        if place_of_user(error):
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
        if place_of_user(error):
            raise
        file = getattr(sys.modules.get(module), "__file__", None) or "a module of Python's own"
        known = vars(sys.modules[module]) if module in sys.modules else ()
        raise UsageError(
            f"{flag} {name}: {module}, which is {file}, has no {attribute}{near(known, attribute)}"
        ) from None
    except (ImportError, ValueError) as error:
        if place_of_user(error):
            raise
        raise UsageError(f"{flag} {name}: {error}") from None


# -- how a program ends ----------------------------------------------------------------------------


def exit_code_of(action: Callable[[], object]) -> int:
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
        if place := place_of_user(error):
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

    return lambda args=None: exit_code_of(lambda: printed(args))


# Whether a signal asks a process to end, and the seconds that --max-time leaves it.
Asked = Callable[[], tuple[bool, float]]


@contextlib.contextmanager
def listening(minutes: float) -> Iterator[Asked]:
    """Listen to signals, and watch the clock.

    Args:
        minutes: After which the process is asked to end.
    """
    end = time.monotonic() + 60 * minutes
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

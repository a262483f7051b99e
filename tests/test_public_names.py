"""The public names: each name in the docs exists, and imports in any order bind the same."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
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
    """Return each ``distamp.x.y`` in the code of a page, and each name that its code imports."""
    code = "\n".join(_CODE.findall(page.read_text()))
    code = _COMMAND.sub("", code)
    names = set(_NAME.findall(code))
    for module, imported in _IMPORT.findall(code):
        for name in imported.split(","):
            original_name = name.strip().split(" as ")[0]
            names.add(f"{module}.{original_name}")
    return names


def _exists(name: str) -> bool:
    """Return whether a full name is an attribute of the package, or in a module's source.

    A module that needs an extra may not be imported, so its source is searched.
    """
    value: object = distamp
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    if value is not None:
        return True
    module, _, attribute = name.rpartition(".")
    path = ROOT.joinpath(*module.split("."))
    if (path / f"{attribute}.py").is_file():
        return True
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file() and f'"{attribute}"' in file.read_text():
            return True
    return False


def test_each_name_on_a_page_exists() -> None:
    names: set[str] = set()
    for page in PAGES:
        names |= names_on(page)
    # The modules of this package need the trainers' packages.
    names.discard("distamp.integrations")
    assert [name for name in sorted(names) if not _exists(name)] == []


# The variables of the pages' code, and their values.
OBJECTS: dict[str, object] = {
    "guard": distamp.StepGuard(),
    "scaler": distamp.DistGradScaler("cpu"),
    "amp": distamp.initialize(nn.Linear(2, 2), level="fp32"),
    "hook": comm_hooks.CommHook,
    "masters": MasterParameters,
    "comm_hooks": comm_hooks,
}
_ATTRIBUTE = re.compile(rf"(?<![\w.\"'/-])({'|'.join(OBJECTS)})\.([a-z_]\w*)")
# Names of Apex, on the pages that compare it with distamp.
APEXS = frozenset(
    """
    scale_loss master_params initialize disable_casts half_function float_function promote_function
    register_half_function register_float_function register_promote_function
    """.split()  # noqa: SIM905
)


# The public functions and methods that send to other ranks. A method is under the class that
# defines it.
COLLECTIVE = set(
    """
    Amp.check
    Amp.clip_grad_norm_
    Amp.flat_state_dict
    Amp.load
    Amp.master_params
    Amp.save
    Amp.step
    StepGuardBase.nonfinite_report
    PrecisionContract.check
    PrecisionContract.watch
    DistGradScaler.update
    StepGuard.update
    StepReplay.on_update
    StepGuardBase.check_replicas
    StepGuardBase.check_weights
    StepGuardBase.clip_grad_norm_
    StepGuardBase.raise_on_all_ranks
    StepGuardBase.repair_replicas
    StepGuardBase.step
    StepGuardBase.step_all
    StepGuardBase.unscale_
    clip_grad_norm_
    compare_gradients
    find_first_nonfinite
    initialize
    logprob_mismatch
    register_comm_hook
    """.split()  # noqa: SIM905
)


def _public_functions() -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each public function and method."""
    rooms = (distamp, distamp.levels, distamp.report, distamp.scaler, comm_hooks)
    for room in rooms:
        for value in vars(room).values():
            if not getattr(value, "__module__", "").startswith("distamp"):
                continue
            if inspect.isclass(value):
                yield from _public_methods(value)
            elif inspect.isfunction(value):
                yield value.__name__, value.__doc__ or ""


def _public_methods(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each public method that distamp defines."""
    for base in cls.__mro__:
        if not base.__module__.startswith("distamp"):
            continue
        for name, method in vars(base).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                yield f"{base.__name__}.{name}", method.__doc__ or ""


def test_each_function_that_sends_to_other_ranks_is_documented_as_collective() -> None:
    sentence = re.compile(r"^ *Collective: every rank of .* must call this[. ]", re.MULTILINE)
    documented = set()
    for name, docstring in _public_functions():
        if sentence.search(docstring):
            documented.add(name)
    assert documented == COLLECTIVE


# The names at the top level, which docs/reference/index.md explains.
TOP_LEVEL = frozenset(
    """
    autocast custom_fwd custom_bwd AutocastState OpLists set_module_precision
    GradScaler DistGradScaler StepGuard clip_grad_norm_ DataParallel
    initialize cast_model PrecisionLevel patch_torch unpatch_torch
    precision_report preflight PrecisionContract find_first_nonfinite
    DistampError RankMismatchError __version__
    """.split()  # noqa: SIM905
)
INDEX = ROOT / "docs" / "reference" / "index.md"


def test_the_top_level_has_these_names() -> None:
    assert set(distamp.__all__) == TOP_LEVEL


def test_the_index_has_a_line_for_every_public_name() -> None:
    listed = set(re.findall(r"`(\w+)`", INDEX.read_text()))
    public = set(TOP_LEVEL) - {"__version__"}
    rooms = ("guard", "scaler", "masters", "autocast", "report", "comm_hooks", "errors", "levels")
    for room in rooms:
        public.update(sys.modules[f"distamp.{room}"].__all__)
    assert public - listed == set()


def _is_apexs(variable: str, attribute: str) -> bool:
    return variable == "amp" and attribute in APEXS


def test_each_method_on_a_page_exists() -> None:
    missing = set()
    for page in PAGES:
        code = "\n".join(_CODE.findall(page.read_text()))
        for variable, attribute in _ATTRIBUTE.findall(code):
            is_file_name = attribute in ("py", "md")
            if is_file_name or _is_apexs(variable, attribute):
                continue
            if not hasattr(OBJECTS[variable], attribute):
                missing.add(f"{variable}.{attribute}")
    assert missing == set()


# Each program runs in a fork of one interpreter, because the value of a name can depend on the
# imports before it. A program finds the modules that torch loads in ``modules_of_torch``.
FORKS = """
import os, sys, traceback, torch
modules_of_torch = set(sys.modules)
# A reference to the class would be reported by `patch_torch`.
scaler_of_torch = id(torch.amp.GradScaler)
first_program, programs = eval(sys.stdin.read())
exec(first_program)
for program in programs:
    child = os.fork()
    if child == 0:
        try:
            exec(program)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def assert_that_programs_end_without_an_error(
    programs: dict[str, str], first_program: str = ""
) -> None:
    """Run each program in a fork of a new interpreter, which has run the first program."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKS],
        input=repr((first_program, list(programs.values()))),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    exit_codes = done.stdout.splitlines()
    assert len(exit_codes) == len(programs), done.stderr
    for name, exit_code in zip(programs, exit_codes, strict=True):
        assert exit_code == "0", f"{name}: {done.stderr}"


SPELLINGS = [
    "from distamp import autocast as cls",
    "import distamp; cls = distamp.autocast",
    "from distamp.autocast import autocast as cls",
    "from distamp.autocast.region import autocast as cls",
    "import distamp.autocast.region; cls = distamp.autocast",
    "import distamp.autocast as cls",
    "import distamp.autocast.autocast_state, distamp; cls = distamp.autocast",
    "from distamp.autocast import AutocastState; from distamp import autocast as cls",
    "import distamp.levels.initialize; from distamp import initialize, autocast as cls",
    "import distamp.cuda.amp; cls = distamp.autocast",
    "from distamp import *; cls = autocast",
    "from distamp.autocast import *; cls = autocast",
]
IS_THE_CLASS = """
import distamp
assert issubclass(cls, torch.autocast) and cls is distamp.autocast and callable(distamp.initialize)
with cls("cpu"):
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
"""
#: Packages of extras, and modules that take long to import.
HEAVY = set(
    """
    torch._dynamo torch._inductor sympy lightning transformers tokenizers rich matplotlib fairscale
    tqdm hypothesis pytest numpy triton datasets accelerate
    """.split()  # noqa: SIM905
)
BENCHMARK_FILES = (ROOT / "benchmarks").glob("*.py")
BENCHMARKS = [f"benchmarks.{path.stem}" for path in BENCHMARK_FILES]
PROGRAMS_AFTER_THE_IMPORT = {
    "an import loads nothing heavy": f"""
assert not {HEAVY} & (set(sys.modules) - modules_of_torch)
""",
    "an import changes no name of torch": """
assert id(torch.amp.GradScaler) == scaler_of_torch
assert distamp.patch_torch().late == ()
""",
}
SLOW_PROGRAMS_AFTER_THE_IMPORT = {
    "no module needs an extra, except the integrations": """
import importlib, pkgutil
for module in pkgutil.walk_packages(distamp.__path__, "distamp."):
    if not module.name.startswith("distamp.integrations."):
        importlib.import_module(module.name)
extras = {"matplotlib", "fairscale", "torchao", "lightning", "accelerate"}
assert not extras & (set(sys.modules) - modules_of_torch)
""",
    "doctor imports no trainer": """
import distamp.doctor
before = set(sys.modules)
distamp.doctor.diagnose()
assert not {"lightning", "transformers", "rich"} & (set(sys.modules) - before)
""",
    "benchmarks can be imported": f"import {', '.join(BENCHMARKS)}",
    "each spelling binds the class after the others": IS_THE_CLASS.join([*SPELLINGS, ""]),
}


def test_an_import_has_no_side_effect_in_a_fresh_interpreter() -> None:
    assert_that_programs_end_without_an_error(PROGRAMS_AFTER_THE_IMPORT, "import distamp")


@pytest.mark.slow  # They import more than the package does by itself.
def test_further_imports_have_no_side_effect_in_a_fresh_interpreter() -> None:
    assert_that_programs_end_without_an_error(SLOW_PROGRAMS_AFTER_THE_IMPORT, "import distamp")


@pytest.mark.slow  # Each program imports the package again.
def test_each_spelling_binds_the_class_in_a_fresh_interpreter() -> None:
    programs = {spelling: spelling + IS_THE_CLASS for spelling in SPELLINGS}
    packages = "import torch.distributed.fsdp, torch.distributed.tensor"
    assert_that_programs_end_without_an_error(programs, packages)

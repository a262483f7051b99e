"""The public names: every one that the docs use exists, whatever was imported before it."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
        if name == "distamp.integrations":
            continue  # Its modules need the trainers' packages.
        if found is None and not _is_imported_from(module, attribute):
            missing.append(name)
    assert missing == []


def _is_imported_from(module: str, attribute: str) -> bool:
    """Whether the module exports it, which may need an extra to be imported."""
    path = ROOT.joinpath(*module.split("."))
    files = [path.with_suffix(".py"), path / "__init__.py", path / f"{attribute}.py"]
    source = "".join(each.read_text() for each in files if each.is_file())
    return (path / f"{attribute}.py").is_file() or f'"{attribute}"' in source


# What pages call the objects that they make, and what those are.
OBJECTS: dict[str, object] = {
    "guard": distamp.StepGuard(),
    "scaler": distamp.DistGradScaler("cpu"),
    "amp": distamp.initialize(nn.Linear(2, 2), level="fp32"),
    "hook": comm_hooks.CommHook,
    "masters": MasterParameters,
    "comm_hooks": comm_hooks,
}
_ATTRIBUTE = re.compile(rf"(?<![\w.\"'/-])({'|'.join(OBJECTS)})\.([a-z_]\w*)")
# Apex's, on the pages that put it beside ours.
APEXS = {"scale_loss", "master_params", "half_function", "float_function", "promote_function",
         "register_half_function", "register_float_function", "register_promote_function",
         "disable_casts", "initialize"}  # fmt: skip


# The public functions and methods that send to other ranks. A method is under the class that
# defines it.
COLLECTIVE = {
    "Amp.check",
    "Amp.clip_grad_norm_",
    "Amp.flat_state_dict",
    "Amp.load",
    "Amp.master_params",
    "Amp.save",
    "Amp.step",
    "StepGuardBase.nonfinite_report",
    "PrecisionContract.check",
    "PrecisionContract.watch",
    "DistGradScaler.update",
    "StepGuard.update",
    "StepReplay.on_update",
    "StepGuardBase.check_replicas",
    "StepGuardBase.check_weights",
    "StepGuardBase.clip_grad_norm_",
    "StepGuardBase.raise_on_all_ranks",
    "StepGuardBase.repair_replicas",
    "StepGuardBase.step",
    "StepGuardBase.step_all",
    "StepGuardBase.unscale_",
    "clip_grad_norm_",
    "compare_gradients",
    "find_first_nonfinite",
    "initialize",
    "logprob_mismatch",
    "register_comm_hook",
}


def _public_functions() -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each public function and method."""
    rooms = (distamp, distamp.levels, distamp.report, distamp.scaler, comm_hooks)
    for room in rooms:
        for value in vars(room).values():
            if not getattr(value, "__module__", "").startswith("distamp"):
                continue
            if inspect.isclass(value):
                for base in value.__mro__:
                    if base.__module__.startswith("distamp"):
                        for name, method in vars(base).items():
                            if inspect.isfunction(method) and not name.startswith("_"):
                                yield f"{base.__name__}.{name}", method.__doc__ or ""
            elif inspect.isfunction(value):
                yield value.__name__, value.__doc__ or ""


def test_what_sends_to_other_ranks_says_so() -> None:
    sentence = re.compile(r"^ *Collective: every rank of .* must call this[. ]", re.MULTILINE)
    documented = {name for name, text in _public_functions() if sentence.search(text)}
    assert documented == COLLECTIVE


# The names that docs/reference/index.md explains, and no other is at the top level.
TOP_LEVEL = {
    *("autocast", "custom_fwd", "custom_bwd", "AutocastState", "OpLists", "set_module_precision"),
    *("GradScaler", "DistGradScaler", "StepGuard", "clip_grad_norm_", "DataParallel"),
    *("initialize", "cast_model", "PrecisionLevel", "patch_torch", "unpatch_torch"),
    *("precision_report", "preflight", "PrecisionContract", "find_first_nonfinite"),
    *("DistampError", "RankMismatchError", "__version__"),
}
INDEX = ROOT / "docs" / "reference" / "index.md"


def test_the_top_level_has_these_names() -> None:
    assert set(distamp.__all__) == TOP_LEVEL


def test_the_index_has_a_line_for_every_public_name() -> None:
    listed = set(re.findall(r"`(\w+)`", INDEX.read_text()))
    rooms = ("guard", "scaler", "masters", "autocast", "report", "comm_hooks", "errors", "levels")
    public = {name for room in rooms for name in sys.modules[f"distamp.{room}"].__all__}
    assert TOP_LEVEL - {"__version__"} | public <= listed


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


# Programs, each in a fork of one interpreter that has torch and nothing of ours: what an import
# binds depends on what was imported before.
FORKS = """
import os, sys, traceback, torch, torch.distributed.fsdp, torch.distributed.tensor
for number, program in enumerate(eval(sys.stdin.read())):
    child = os.fork()
    if child == 0:
        try:
            exec(program, {"before": set(sys.modules), "sys": sys, "torch": torch})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
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
HEAVY = {
    *("torch._dynamo", "torch._inductor", "sympy", "lightning", "transformers", "tokenizers"),
    *("rich", "matplotlib", "fairscale", "tqdm", "hypothesis", "pytest", "numpy"),
    *("triton", "datasets", "accelerate"),
}
EXTRAS = "{'matplotlib', 'fairscale', 'torchao', 'lightning', 'accelerate'}"
# All modules but those that are for an extra alone.
EVERY_MODULE = f"""
import importlib, pkgutil, distamp
for each in pkgutil.walk_packages(distamp.__path__, "distamp."):
    if not each.name.startswith("distamp.integrations."):
        importlib.import_module(each.name)
assert not {EXTRAS} & (set(sys.modules) - before)
"""
PROGRAMS = [
    EVERY_MODULE,
    *(f"{spelling}\n{IS_THE_CLASS}" for spelling in SPELLINGS),
    # What only an extra installs, and what takes long.
    f"import distamp; assert not {HEAVY} & (set(sys.modules) - before)",
    "theirs = torch.amp.GradScaler; import distamp; assert torch.amp.GradScaler is theirs; assert "
    "distamp.patch_torch().late == ()",
    "import distamp.doctor; before = set(sys.modules); distamp.doctor.diagnose(); "
    "assert not {'lightning', 'transformers', 'rich'} & (set(sys.modules) - before)",
    "import " + ", ".join(f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")),
]


def test_imports_in_a_fresh_interpreter() -> None:
    """Every spelling finds the class, nothing heavy is loaded, and nothing of torch's changes."""
    command = [sys.executable, "-W", "error", "-c", FORKS]
    done = subprocess.run(command, input=repr(PROGRAMS), capture_output=True, text=True, cwd=ROOT)
    wanted = [f"{number} 0" for number in range(len(PROGRAMS))]
    assert done.stdout.splitlines() == wanted, done.stderr

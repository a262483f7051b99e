"""What can be counted of the cost: modules that an import loads, ops and messages of a step."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

# Costly, and of no use to who trains plain tensors in one process.
HEAVY = (
    "sympy",
    "mpmath",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch._inductor",
    "torch.fx.experimental.symbolic_shapes",
    "fairscale",
)


def _run(program: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def _loaded(what: str, beside: str, folder: Path) -> list[str]:
    """The modules that ``what`` loads beyond those of ``beside``."""
    program = (
        "import sys, torch\n"
        f"{beside}\n"
        "before = set(sys.modules)\n"
        f"{what}\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    return _run(program, folder).split()


def _is_heavy(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in HEAVY)


# torch's own optimizers load torch._dynamo, and sympy with it, when one is made.
TRAIN = (
    "p = torch.nn.Parameter(torch.ones(1)); o = torch.optim.SGD([p], lr=1.0)\n"
    "s = {}('cpu')\n"
    "s.scale((p * 0.25).sum()).backward(); {}; s.step(o); s.update()\n"
    "assert p.item() == 0.75"
)
TORCH_TRAINS = TRAIN.format(
    "torch.amp.GradScaler", "s.unscale_(o); torch.nn.utils.clip_grad_norm_([p], 1.0)"
)
TRAINS = "import distamp\n" + TRAIN.format("distamp.DistGradScaler", "s.clip_grad_norm_(o, 1.0)")
# Without an optimizer of torch's there is nothing that loads them but this package.
TRAINS_BY_HAND = TRAINS.replace(
    "o = torch.optim.SGD([p], lr=1.0)",
    "o = type('O', (), {'param_groups': [{'params': [p]}], "
    "'step': lambda o: p.data.sub_(p.grad)})()",
)


@pytest.mark.parametrize(
    ("what", "beside"),
    [("import distamp", ""), (TRAINS, TORCH_TRAINS), (TRAINS_BY_HAND, "")],
    ids=["import", "train", "train without torch.optim"],
)
def test_plain_training_loads_nothing_heavy(what: str, beside: str, tmp_path: Path) -> None:
    loaded = _loaded(what, beside, tmp_path)
    assert [module for module in loaded if _is_heavy(module)][:5] == []
    foreign = [module for module in loaded if not module.startswith("distamp")]
    assert len(foreign) <= 40, foreign


PARTS = ("distamp.autocast", "distamp.scaler", "distamp.initialize", "distamp.comm_hooks")
NAMES = ("autocast", "initialize", "DistGradScaler", "Precision")
# Each case in a process of its own, forked once torch is there, which takes most of the time.
IN_A_FORK = """
import importlib, inspect, os, sys, torch
def check():
    import distamp
    for name in distamp.__all__: getattr(distamp, name)
    assert inspect.isclass(distamp.autocast), distamp.autocast
    assert callable(distamp.initialize) and not inspect.ismodule(distamp.initialize)
    import distamp.autocast, distamp.initialize
    from distamp import autocast, initialize, DistGradScaler
    assert inspect.isclass(autocast), autocast
    assert not inspect.ismodule(initialize), initialize
    with distamp.autocast('cpu'): pass
    from distamp.scaler import DistGradScaler as inner
    assert inner is DistGradScaler is distamp.DistGradScaler is distamp.GradScaler
def case(text):
    parts = text.split()
    if parts[0] != '-':
        import distamp
        before = getattr(distamp, parts[0])
    for part in parts[1:]: importlib.import_module(part)
    if parts[0] != '-':
        assert getattr(distamp, parts[0]) is before, (parts, getattr(distamp, parts[0]))
    check()
for text in sys.argv[1:]:
    if not (child := os.fork()):
        try: case(text)
        except BaseException as error: print(text, ':', type(error).__name__, error, flush=True)
        finally: os._exit(0)
    os.waitpid(child, 0)
"""


def _wrong_cases(cases: list[str], folder: Path) -> str:
    return _run(IN_A_FORK, folder, *cases)


def test_every_order_of_import_gives_the_same_names(tmp_path: Path) -> None:
    # distamp.autocast is a class and a package: loading the package late must not rebind it.
    orders = [" ".join(("-", *order)) for order in itertools.permutations(PARTS)]
    assert _wrong_cases(orders, tmp_path) == ""


def test_a_name_that_was_used_is_not_rebound_by_an_import(tmp_path: Path) -> None:
    cases = [f"{name} {part}" for name in NAMES for part in PARTS]
    assert _wrong_cases(cases, tmp_path) == ""

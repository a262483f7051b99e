"""What can be counted of the cost: modules that an import loads, ops and messages of a step."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("what", "beside"),
    [("import distamp", ""), (TRAINS, TORCH_TRAINS)],
    ids=["import", "train"],
)
def test_plain_training_loads_nothing_heavy(what: str, beside: str, tmp_path: Path) -> None:
    loaded = _loaded(what, beside, tmp_path)
    assert [module for module in loaded if _is_heavy(module)][:5] == []
    foreign = [module for module in loaded if not module.startswith("distamp")]
    assert len(foreign) <= 40, foreign

"""The code on the pages of README and docs: found, given a stage, and run.

Each block runs alone, with ``model``, ``optimizer``, ``batches``, ``loss_fn`` and ``schedule``
defined, and on the CPU instead of CUDA. A block that needs the names of an earlier one begins with
the line ``# Continues the block above.`` or ``# Continues the first block.`` A comment before a
block gives an exception::

    <!-- ranks: 2 -->            the whole page runs on that many ranks, with a process group
    <!-- not run: the reason --> it is compiled, and not run
    <!-- run: name -->           a test of its own runs it, which looks for the name
    <!-- printed -->             lines that the code above prints, numbers and files apart
    <!-- output of: python ... --> lines that the command prints
"""

import contextlib
import io
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = [
    "PAGES",
    "Block",
    "as_torchrun_starts_it",
    "blocks_of",
    "not_printed",
    "output_of",
    "ranks_of",
    "run_page",
]

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"(?:<!-- (?P<how>[^>]*?) -->\n+)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_CONTINUES = re.compile(r"# Continues the (block above|first block)\b")
#: Pages that were not rewritten yet. Each block of them continues the block above.
SILENTLY_CONTINUED: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Block:
    """One block of code.

    Args:
        language: As the fence has it.
        code: Its text.
        line: Where it begins on the page.
        how: The comment before it.
    """

    language: str
    code: str
    line: int
    how: str

    @property
    def continued(self) -> str:
        """Which block it continues: ``"block above"``, ``"first block"``, or nothing."""
        match = _CONTINUES.match(self.code)
        return match[1] if match else ""

    @property
    def is_run_here(self) -> bool:
        """Whether `run_page` runs it."""
        return self.language == "python" and not re.match("run:|not run:", self.how)


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["code"].splitlines()) + "\n"
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(match["language"], code, line, match["how"] or ""))
    return found


def ranks_of(page: Path) -> int:
    """Return how many ranks a page's code is for."""
    sizes = [int(b.how.split(":")[1]) for b in blocks_of(page) if b.how.startswith("ranks:")]
    return max(sizes, default=1)


def stage() -> dict[str, Any]:
    """Return what pages take for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]
    return {
        "__name__": "__page__",
        "inputs": batches[0][0],
        "targets": batches[0][1],
        "torch": torch,
        "nn": nn,
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.LinearLR(optimizer),
        "batches": batches,
        "loss_fn": nn.functional.mse_loss,
    }


def run_page(path: str) -> list[str]:
    """Run the code of a page; returns what went wrong, with page and line."""
    page, faults = Path(path), []
    is_silent = page.relative_to(ROOT).as_posix() in SILENTLY_CONTINUED
    first: dict[str, Any] = {}
    names: dict[str, Any] = {}
    logging.disable(logging.WARNING)
    printed = io.StringIO()
    with (
        _shared_folder() as folder,
        contextlib.chdir(folder),
        warnings.catch_warnings(action="ignore"),
    ):
        for block in blocks_of(page):
            if block.how == "printed":
                lines = not_printed(block.code, printed.getvalue())
                faults += [f"{page.name}:{block.line}: not printed: {line}" for line in lines]
            if block.language != "python":
                continue
            code = block.code.replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')
            # Lines as they are on the page.
            compiled = compile("\n" * block.line + code, str(page), "exec")
            if not block.is_run_here:
                continue
            if block.continued == "first block":
                names = first
            elif not names or not (block.continued or is_silent):
                names = stage()
            first = first or names
            try:
                with contextlib.redirect_stdout(printed):
                    exec(compiled, names)
            except Exception as error:
                faults.append(f"{page.name}:{block.line}: {type(error).__name__}: {error}"[:500])
    logging.disable(logging.NOTSET)
    return faults


@contextlib.contextmanager
def _shared_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)
        yield shared[0]
        if dist.is_initialized():
            dist.barrier()


def as_torchrun_starts_it(port: int, run: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Run code that makes the process group itself, and end the group."""
    # The store is the test's, as it is torchrun's agent's: no port is let go and taken again.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        return run(*args, **given)
    finally:
        dist.destroy_process_group()


def not_printed(shown: str, printed: str) -> list[str]:
    """Return which lines of an example output were not printed; numbers and files may differ."""
    found = {_alike(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if _alike(line) not in found]


def _alike(line: str) -> str:
    line = re.sub(r"\S+\.(?:py|md):\d+", "FILE", line)
    return " ".join(re.sub(r"\d+\.\d+", "NUMBER", line).split())


def output_of(command: str) -> str:
    """Run a command in an interpreter of its own; returns what it prints.

    In one where an op was on a list, its weights are cast anew in each call, which a report shows.
    """
    _, *given = shlex.split(command)
    run = subprocess.run(
        [sys.executable, *given], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return run.stdout + run.stderr

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
        """The block that it continues: ``"block above"``, ``"first block"``, or ``""``."""
        match = _CONTINUES.match(self.code)
        return match[1] if match else ""

    @property
    def is_run_here(self) -> bool:
        """Whether `run_page` runs it."""
        return self.language == "python" and not re.match("run:|not run:", self.how)


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    blocks = []
    for match in _BLOCK.finditer(text):
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["code"].splitlines()) + "\n"
        line = text.count("\n", 0, match.start("language")) + 1
        blocks.append(Block(match["language"], code, line, match["how"] or ""))
    return blocks


def ranks_of(page: Path) -> int:
    """Return how many ranks a page's code is for."""
    sizes = [int(b.how.split(":")[1]) for b in blocks_of(page) if b.how.startswith("ranks:")]
    return max(sizes, default=1)


def stage() -> dict[str, Any]:
    """Return the names that pages use without a definition."""
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
    """Run the code of a page; return its errors, with page and line."""
    page, faults = Path(path), []
    is_silent = page.relative_to(ROOT).as_posix() in SILENTLY_CONTINUED
    first_names: dict[str, Any] = {}
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
            # Empty lines before the code give errors the line numbers of the page.
            compiled = compile("\n" * block.line + code, str(page), "exec")
            if not block.is_run_here:
                continue
            if block.continued == "first block":
                names = first_names
            elif not names or not (block.continued or is_silent):
                names = stage()
            first_names = first_names or names
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


def as_torchrun_starts_it(port: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run code that makes the process group itself, and end the group."""
    # The test holds the store, as torchrun's agent does, so no other process can take the port.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        return run(*args, **kwargs)
    finally:
        dist.destroy_process_group()


def not_printed(shown: str, printed: str) -> list[str]:
    """Return the lines of an example output that were not printed, except numbers and files."""
    printed_lines = {_normalize(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if _normalize(line) not in printed_lines]


def _normalize(line: str) -> str:
    line = re.sub(r"\S+\.(?:py|md):\d+", "FILE", line)
    return " ".join(re.sub(r"\d+\.\d+", "NUMBER", line).split())

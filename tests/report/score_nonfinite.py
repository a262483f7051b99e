"""How many planted faults three tools name: `find_first_nonfinite` and the two that people have.

``python -m tests.report.score_nonfinite [--write]``.

Each plant of plants_nonfinite.py runs on two ranks. transformers' DebugUnderflowOverflow hooks
every module and stops at the first output that is not finite; here it goes on, as a rank that stops
alone would hang the others. torch's set_detect_anomaly raises. Each part of an answer counts by
itself: operation, module or parameter, forward or backward, ranks. Of the two, an operation counts
where the class of the module, or the function whose backward returned a NaN, is the right one: one
of the plant's kernels, or the function in which find_first_nonfinite saw that kernel.
``--write`` puts the table into docs/results/nonfinite.md.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distamp
import tests.ranks
from tests.ranks import RankError, RankPool
from tests.report.plants_nonfinite import MODELS, PLANTS, Plant, build

PAGE = Path(__file__).parents[2] / "docs" / "results" / "nonfinite.md"
PARTS = ("operation", "module", "direction", "ranks", "micro-batch")
OUTSIDE = ("", "(outside)")
FIRST_RUN = """\
First run, at commit 2edabc7: operation 38, module 40, direction 40, ranks 39, micro-batch 40.
The two that are not right are weights under FSDP2, which an all-gather reads before their module
does. DebugUnderflowOverflow goes on here after its first find, as a rank that stops alone hangs the
others; set_detect_anomaly raises.

Ten faults in compiled models are in `tests/report/plants_nonfinite_compiled.py`, committed with its
sha256 before the first run, on 2026-11-28. At the first run 9 of 10 had the right answer; the tenth
was no fault, because torch.compile leaves a single module of torch.nn uncompiled, and the answer
was None. With another module in its place it is right too."""


@dataclass(frozen=True)
class Answer:
    """What a tool names, as far as it does."""

    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    forward: bool | None = None
    ranks: tuple[int, ...] = ()
    micro_batch: int | None = None
    said: str = "nothing"


def by_find_first_nonfinite(place: int) -> Answer:
    model, step = build(PLANTS[place])
    found = distamp.find_first_nonfinite(step, model)
    if found is None:
        return Answer()
    return Answer(
        (found.op, found.kernel),
        (found.parameter, *(OUTSIDE if found.module in OUTSIDE else (found.module,))),
        found.direction == "forward",
        found.ranks,
        found.micro_batch,
        found.sentence(),
    )


def by_hooks(place: int) -> Answer:
    """transformers' DebugUnderflowOverflow, which prints the frames until the first bad one."""
    from transformers.debug_utils import DebugUnderflowOverflow

    frames: list[tuple[str, str, int]] = []

    class GoesOn(DebugUnderflowOverflow):
        def forward_hook(self, module: Any, inputs: Any, output: Any) -> None:
            try:
                super().forward_hook(module, inputs, output)
            except ValueError:
                name = self.module_names[module].removeprefix("module.")
                frames.append((name, type(module).__name__, self.batch_number))
                self.detected_overflow = False

    model, step = build(PLANTS[place])
    with contextlib.redirect_stdout(io.StringIO()):
        GoesOn(model)
        step()
    first: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(first, frames[0] if frames else None)
    ranks = tuple(rank for rank, each in enumerate(first) if each is not None)
    if not ranks:
        return Answer()
    name, kind, batch = first[ranks[0]]
    op = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()
    modules = (name, f"{name}.weight", f"{name}.bias")
    return Answer((op,), modules, True, ranks, batch, f"{name} ({kind})")


def by_anomaly(place: int) -> None:
    """torch's set_detect_anomaly, which raises in the first backward function that returns NaN."""
    _, step = build(PLANTS[place])
    with torch.autograd.set_detect_anomaly(True):
        step()


def anomaly(pool: RankPool, place: int) -> Answer:
    try:
        pool.run(by_anomaly, place)
    except RankError as error:
        text = str(error)
        named = re.findall(r"Function '(\w+?)(?:Backward)?\d*' returned nan", text)
        if not named:
            return Answer(said=text.strip().splitlines()[-1])
        parts = re.split(r"^rank ([\d, ]+) (?=raised|was|returned)", text, flags=re.MULTILINE)
        told = [
            (n, t) for n, t in zip(parts[1::2], parts[2::2], strict=True) if "returned nan" in t
        ]
        ranks = sorted(int(rank) for numbers, _ in told for rank in numbers.split(","))
        op = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", named[0]).lower()
        return Answer((op, f"_{op}"), (), False, tuple(ranks), None, f"{named[0]}Backward")
    return Answer()


def right(plant: Plant, answer: Answer, ops: set[str]) -> tuple[bool, ...]:
    """Which parts of an answer are right."""
    return (
        bool({*answer.ops} & ops),
        bool({*answer.modules} & {*plant.modules}),
        answer.forward is plant.forward,
        answer.ranks == plant.ranks,
        answer.micro_batch == plant.micro_batch,
    )


def on_ranks(function: Callable[[int], Answer], pool: RankPool, place: int) -> Answer:
    try:
        one, other = pool.run(function, place)
    except RankError as error:
        return Answer(said=str(error).strip().splitlines()[-1])
    return one if one == other else Answer(said=f"ranks differ: {one.said} / {other.said}")


TOOLS: dict[str, Callable[[RankPool, int], Answer]] = {
    "find_first_nonfinite": lambda pool, place: on_ranks(by_find_first_nonfinite, pool, place),
    "DebugUnderflowOverflow": lambda pool, place: on_ranks(by_hooks, pool, place),
    "set_detect_anomaly": anomaly,
}


def main() -> None:
    # So that a pool that starts again after an error has the models.
    tests.ranks.PRELOAD += ["transformers.debug_utils", "tests.report.plants_nonfinite"]
    sums = {tool: [0] * len(PARTS) for tool in TOOLS}
    rows = []
    with RankPool(2, timeout=60) as pool:
        for place, plant in enumerate(PLANTS):
            cells, said, ops = [], "", {*plant.ops}
            for tool, asked in TOOLS.items():
                answer = asked(pool, place)
                marks = right(plant, answer, ops)
                sums[tool] = [a + b for a, b in zip(sums[tool], marks, strict=True)]
                wrong = [part for part, mark in zip(PARTS, marks, strict=True) if not mark]
                cells.append("right" if not wrong else "not " + ", ".join(wrong))
                if tool == "find_first_nonfinite":
                    said = answer.said
                    ops |= {*answer.ops} if marks[0] else set()
                    cells[-1] = f"**{cells[-1]}**" if wrong else cells[-1]
            where = " ".join(filter(None, (plant.model, plant.wrapper, plant.precision)))
            rows.append(f"| {plant.name} | {where} | " + " | ".join(cells) + f" | {said} |")
            print(rows[-1], flush=True)
    head = [f"| of {len(PLANTS)} | " + " | ".join(PARTS) + " |", "|---|" + "---|" * len(PARTS)]
    head += [f"| {tool} | " + " | ".join(map(str, sums[tool])) + " |" for tool in TOOLS]
    print("\n".join(head))
    if "--write" in sys.argv:
        kinds = len({plant.kind for plant in PLANTS})
        text = (
            "# Planted faults, and which tool names them\n\n"
            f"{len(PLANTS)} faults of {kinds} kinds in {len(MODELS)} models; their author had not "
            "seen the tool\n(`tests/report/plants_nonfinite.py`).\n\n"
            f"    python -m tests.report.score_nonfinite --write\n\n"
            f"{FIRST_RUN}\n\n"
            f"{datetime.date.today()}, torch {torch.__version__}, two gloo ranks.\n\n"
        )
        table = ["| fault | in | " + " | ".join(TOOLS) + " | what find_first_nonfinite says |"]
        table += ["|---|" + "---|" * (len(TOOLS) + 2)]
        PAGE.write_text(text + "\n".join([*head, "", *table, *rows]) + "\n")


if __name__ == "__main__":
    # Ranks find functions by this name.
    from tests.report import score_nonfinite

    score_nonfinite.main()

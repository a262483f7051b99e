"""A score of three tools by the planted faults that make inf or NaN.

``python -m tests.report.score_nonfinite [--write]`` runs each plant of plants_nonfinite.py on two
ranks under each tool, and prints the score. ``--write`` writes it into docs/results/nonfinite.md.

The tools are `find_first_nonfinite`, transformers' DebugUnderflowOverflow and torch's
set_detect_anomaly. DebugUnderflowOverflow hooks every module, and stops at the first output that is
not finite. It continues here, because a rank that stops alone would hang the other rank.
set_detect_anomaly raises an error.

Each part of an answer counts for itself: operation, module or parameter, direction, ranks and
microbatch. The right operations are the kernels of the plant, and the function in which
`find_first_nonfinite` saw such a kernel. The operation of DebugUnderflowOverflow is the class of
the module, and the operation of set_detect_anomaly is the function with a NaN in its gradients.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import re
import sys
from collections import Counter
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
HEAD = """\
# Planted faults, and which tool names them

{plants} faults of {kinds} kinds in {models} models; their author had not seen the tool
(`tests/report/plants_nonfinite.py`).

    python -m tests.report.score_nonfinite --write

First run, at commit 2edabc7: operation 38, module 40, direction 40, ranks 39, micro-batch 40.
The two that are not right are weights under FSDP2, which an all-gather reads before their module
does. DebugUnderflowOverflow goes on here after its first find, as a rank that stops alone hangs the
others; set_detect_anomaly raises.

Ten faults in compiled models are in `tests/report/plants_nonfinite_compiled.py`, committed with its
sha256 before the first run, on 2026-11-28. At the first run 9 of 10 had the right answer; the tenth
was no fault, because torch.compile leaves a single module of torch.nn uncompiled, and the answer
was None. With another module in its place it is right too.

{date}, torch {torch}, two gloo ranks.

"""


@dataclass(frozen=True)
class Answer:
    """The answer of a tool, as far as it has one.

    Args:
        ops: Names of the operation.
        modules: Names of the module, or of its parameter.
        forward: Whether the direction is forward; None without an answer.
        ranks: The ranks.
        micro_batch: The microbatch; None without an answer.
        text: The answer for the table.
    """

    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    forward: bool | None = None
    ranks: tuple[int, ...] = ()
    micro_batch: int | None = None
    text: str = "nothing"


def snake_case(name: str) -> str:
    """Return a name such as ``LayerNorm`` as ``layer_norm``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def last_line(text: str) -> str:
    """Return the last line of a text."""
    return text.strip().splitlines()[-1]


def search_on_rank(index: int) -> Answer:
    """Return the answer of `find_first_nonfinite` on this rank."""
    model, step = build(PLANTS[index])
    origin = distamp.find_first_nonfinite(step, model)
    if origin is None:
        return Answer()
    modules: tuple[str, ...] = (origin.module,)
    if origin.module in OUTSIDE:
        modules = OUTSIDE
    return Answer(
        ops=(origin.op, origin.kernel),
        modules=(origin.parameter, *modules),
        forward=origin.direction == "forward",
        ranks=origin.ranks,
        micro_batch=origin.micro_batch,
        text=origin.sentence(),
    )


def hook_modules_on_rank(index: int) -> Answer:
    """Return the answer of DebugUnderflowOverflow, from the first frames of both ranks."""
    from transformers.debug_utils import DebugUnderflowOverflow

    frames: list[tuple[str, str, int]] = []

    class Recorder(DebugUnderflowOverflow):
        """Hooks that record an output that is not finite, and continue."""

        def forward_hook(self, module: Any, inputs: Any, output: Any) -> None:
            try:
                super().forward_hook(module, inputs, output)
            except ValueError:
                name = self.module_names[module].removeprefix("module.")
                class_name = type(module).__name__
                frames.append((name, class_name, self.batch_number))
                self.detected_overflow = False

    model, step = build(PLANTS[index])
    with contextlib.redirect_stdout(io.StringIO()):
        Recorder(model)
        step()
    first_frame = frames[0] if frames else None
    frame_of_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(frame_of_rank, first_frame)
    ranks = []
    for rank, frame in enumerate(frame_of_rank):
        if frame is not None:
            ranks.append(rank)
    if not ranks:
        return Answer()
    name, class_name, micro_batch = frame_of_rank[ranks[0]]
    return Answer(
        ops=(snake_case(class_name),),
        modules=(name, f"{name}.weight", f"{name}.bias"),
        forward=True,
        ranks=tuple(ranks),
        micro_batch=micro_batch,
        text=f"{name} ({class_name})",
    )


def detect_anomaly_on_rank(index: int) -> None:
    """Run a step that raises in the first backward function with a NaN in its gradients."""
    _, step = build(PLANTS[index])
    with torch.autograd.set_detect_anomaly(True):
        step()


def ranks_with_nan(error_text: str) -> tuple[int, ...]:
    """Return the ranks on which a backward function returned NaN, by the text of a RankError."""
    _, *parts = re.split(r"^rank ([\d, ]+) (?=raised|was|returned)", error_text, flags=re.MULTILINE)
    rank_lists = parts[0::2]
    messages = parts[1::2]
    ranks = []
    for rank_list, message in zip(rank_lists, messages, strict=True):
        if "returned nan" in message:
            ranks.extend(int(rank) for rank in rank_list.split(","))
    return tuple(sorted(ranks))


def ask_every_rank(
    function: Callable[[int], Answer],
) -> Callable[[RankPool, int], Answer]:
    """Return a tool with the answer of a function, which must be the same on both ranks."""

    def ask(pool: RankPool, index: int) -> Answer:
        try:
            answer, answer_of_rank_1 = pool.run(function, index)
        except RankError as error:
            return Answer(text=last_line(str(error)))
        if answer != answer_of_rank_1:
            return Answer(text=f"ranks differ: {answer.text} / {answer_of_rank_1.text}")
        return answer

    return ask


def ask_anomaly_detection(pool: RankPool, index: int) -> Answer:
    """Return the answer of set_detect_anomaly, which is in the error that it raises."""
    try:
        pool.run(detect_anomaly_on_rank, index)
    except RankError as error:
        text = str(error)
    else:
        return Answer()
    functions = re.findall(r"Function '(\w+?)(?:Backward)?\d*' returned nan", text)
    if not functions:
        return Answer(text=last_line(text))
    function = functions[0]
    op = snake_case(function)
    return Answer(
        ops=(op, f"_{op}"),
        forward=False,
        ranks=ranks_with_nan(text),
        text=f"{function}Backward",
    )


OUR_TOOL = "find_first_nonfinite"
TOOLS: dict[str, Callable[[RankPool, int], Answer]] = {
    OUR_TOOL: ask_every_rank(search_on_rank),
    "DebugUnderflowOverflow": ask_every_rank(hook_modules_on_rank),
    "set_detect_anomaly": ask_anomaly_detection,
}


def wrong_parts(plant: Plant, answer: Answer, ops: set[str]) -> list[str]:
    """Return the parts of an answer that are wrong or missing."""
    is_right = {
        "operation": not ops.isdisjoint(answer.ops),
        "module": not set(plant.modules).isdisjoint(answer.modules),
        "direction": answer.forward is plant.forward,
        "ranks": answer.ranks == plant.ranks,
        "micro-batch": answer.micro_batch == plant.micro_batch,
    }
    return [part for part in PARTS if not is_right[part]]


def score_plant(pool: RankPool, index: int, right_answers: Counter[tuple[str, str]]) -> str:
    """Return the row of a plant, and count the right parts of the answers."""
    plant = PLANTS[index]
    ops = set(plant.ops)
    cells = []
    sentence = ""
    for tool, ask in TOOLS.items():
        answer = ask(pool, index)
        wrong = wrong_parts(plant, answer, ops)
        for part in PARTS:
            right_answers[tool, part] += part not in wrong
        cell = "right"
        if wrong:
            cell = "not " + ", ".join(wrong)
        if tool == OUR_TOOL:
            sentence = answer.text
            if "operation" not in wrong:
                ops.update(answer.ops)
            if wrong:
                cell = f"**{cell}**"
        cells.append(cell)
    setup = " ".join(filter(None, (plant.model, plant.wrapper, plant.precision)))
    return make_row(plant.name, setup, *cells, sentence)


def make_row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def make_heading(*cells: str) -> list[str]:
    """Return the first two lines of a Markdown table."""
    return [make_row(*cells), "|" + "---|" * len(cells)]


def make_head() -> str:
    """Return the text of the page before its tables."""
    kinds = {plant.kind for plant in PLANTS}
    return HEAD.format(
        plants=len(PLANTS),
        kinds=len(kinds),
        models=len(MODELS),
        date=datetime.date.today(),
        torch=torch.__version__,
    )


def main() -> None:
    """Print the score, and write the page if an argument says so."""
    # A pool that starts again after an error has the models, too.
    tests.ranks.PRELOAD += ["transformers.debug_utils", "tests.report.plants_nonfinite"]
    right_answers: Counter[tuple[str, str]] = Counter()
    rows = []
    with RankPool(2, timeout=60) as pool:
        for index in range(len(PLANTS)):
            row = score_plant(pool, index, right_answers)
            print(row, flush=True)
            rows.append(row)
    score = make_heading(f"of {len(PLANTS)}", *PARTS)
    for tool in TOOLS:
        numbers = [right_answers[tool, part] for part in PARTS]
        score.append(make_row(tool, *numbers))
    print("\n".join(score))
    if "--write" in sys.argv:
        table = make_heading("fault", "in", *TOOLS, "what find_first_nonfinite says")
        lines = [*score, "", *table, *rows]
        PAGE.write_text(make_head() + "\n".join(lines) + "\n")


if __name__ == "__main__":
    # Ranks find functions by this name.
    from tests.report import score_nonfinite

    score_nonfinite.main()

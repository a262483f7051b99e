"""The table of levels as it stands in docs/levels.md.

``python -m distamp.initialize.table`` writes it there, between its two marks.
"""

from __future__ import annotations

from pathlib import Path

import torch

from distamp.precision import LEVELS, Precision

__all__ = ["levels_table", "page_with_table"]

_BEGIN, _END = "<!-- levels: begin -->\n", "<!-- levels: end -->"
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", None: "as computed"}
_HEADER = (
    *("Level", "Parameters", "Compute", "Batch norms", "Optimizer steps"),
    *("Gradients reduced in", "Model returns", "Loss scale", "Scaler"),
)


def levels_table() -> str:
    """Return every level of ``distamp.precision.LEVELS`` as a row of a Markdown table."""
    rows = [_HEADER, ("---",) * len(_HEADER), *map(_row, LEVELS.values())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page_with_table(page: str) -> str:
    """Return a page with the table put between its marks."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}{levels_table()}{_END}{after}"


def _row(precision: Precision) -> tuple[str, ...]:
    compute = _SHORT[precision.compute]
    batchnorm = torch.float32 if precision.keep_batchnorm_fp32 else precision.param
    return (
        f"`{precision.level}`",
        _SHORT[precision.param],
        f"{compute}, op by op" if precision.autocasts else compute,
        _SHORT[batchnorm],
        "fp32 masters" if precision.master_weights else "the parameters",
        _SHORT[precision.reduce],
        _SHORT[precision.output],
        str(precision.loss_scale),
        "yes" if precision.scales else "no",
    )


if __name__ == "__main__":
    _page = Path("docs/levels.md")
    _page.write_text(page_with_table(_page.read_text()))

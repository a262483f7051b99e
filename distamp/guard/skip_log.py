"""Log lines about skipped steps, and their levels.

Python's default logging shows warnings. A guard's skips are rare and mean trouble, so the first of
them are warnings. A scaler's skips are a part of the method, so only runs of them are warnings.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distamp.error_text import names_with_ranks_text
from distamp.grads import to_local
from distamp.guard.nonfinite_report import find_overflows, named_grad_tensors
from distamp.optim_utils import describe_optimizer

__all__ = [
    "SkipRecord",
    "guard_log_level",
    "log_norm_skip",
    "log_requested_skip",
    "log_scale_search",
    "log_skip",
    "scaler_log_level",
]

#: The first run of skips under a scaler that is a warning.
_SCALER_RUN = 4
#: The same before the first step that was taken. A scaler may start at a loss scale of 2^30.
_SEARCH_RUN = 32
#: From this run of skips on, a line has its length and names the tool for the cause.
_LONG_RUN = 8


# -- levels ----------------------------------------------------------------------------------------


def guard_log_level(skips_in_a_row: int, skips: int) -> int:
    """Return the log level of a skip without a loss scale, or by a norm.

    The 1st, 2nd, 4th, 8th, ... skip is a warning, and so is the 2nd, 4th, 8th, ... in a row.

    Args:
        skips_in_a_row: The number of skips since the last step that was taken, with this one.
        skips: The number of all skips, with this one.
    """
    is_run = skips_in_a_row > 1 and _is_power_of_two(skips_in_a_row)
    return logging.WARNING if is_run or _is_power_of_two(skips) else logging.INFO


def scaler_log_level(skips_in_a_row: int, steps_taken: int) -> int:
    """Return the log level of a skip under a loss scale.

    After the first step that was taken, the 4th, 8th, 16th, ... skip in a row is a warning. Before
    it, the scaler searches its first scale.

    Args:
        skips_in_a_row: The number of skips since the last step that was taken, with this one.
        steps_taken: The number of steps that were taken.
    """
    first = _SCALER_RUN if steps_taken else _SEARCH_RUN
    is_run = skips_in_a_row >= first and _is_power_of_two(skips_in_a_row)
    return logging.WARNING if is_run else logging.INFO


def _is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


# -- lines -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SkipRecord:
    """A step that was skipped because of inf or NaN, as its log line describes it.

    Args:
        logger: The name of the logger.
        level: The log level.
        step: The number of the step.
        skips_in_a_row: The number of skips since the last step that was taken, with this one.
        scale_text: The loss scale as text; empty without a scale.
        ranks_text: The ranks that found inf or NaN as text, with a space before it; or empty.
        overflow_ranks: The ranks that found inf or NaN, if they are known.
        grads_unchanged: Whether the gradients are unchanged since the skipped step, so that a
            search finds the parameter.
        bad_names: For each of ``overflow_ranks`` the name of its first bad parameter; an empty text
            if it is not known. Empty if the ranks sent no names.
    """

    logger: str
    level: int
    step: int
    skips_in_a_row: int
    scale_text: str
    ranks_text: str
    overflow_ranks: Sequence[int] | None
    grads_unchanged: bool
    bad_names: Sequence[str] = ()

    def bad_names_text(self) -> str:
        """Return the names of the bad parameters, each with the ranks that sent the name."""
        rank_names: list[tuple[int, str]] = []
        for rank, name in zip(self.overflow_ranks or (), self.bad_names, strict=False):
            if name:
                rank_names.append((rank, name))
        names = {name for _, name in rank_names}
        if not names:
            return ""
        if len(names) == 1:  # The line has the ranks already.
            return f", first in {rank_names[0][1]}"
        return f", first in {names_with_ranks_text(rank_names)}"


def log_skip(optimizer: Any, record: SkipRecord, names: dict[Tensor, str]) -> None:
    """Log that a step of ``optimizer`` was skipped because of inf or NaN, and where they are.

    Args:
        optimizer: The optimizer that was not stepped.
        record: The skip.
        names: Names of parameters and buffers. A buffer that the line names as not finite is
            removed.
    """
    logger = logging.getLogger(record.logger)
    if not logger.isEnabledFor(record.level):
        return
    first = record.bad_names_text()
    if not first and record.grads_unchanged:
        overflow = next(find_overflows(named_grad_tensors([optimizer], names), 0), None)
        if overflow is not None:
            first = f", first in {overflow.name}"
    sentences = [
        f"Skipped step {record.step} of {describe_optimizer(optimizer)}{record.scale_text}: inf or "
        f"NaN in the gradients{record.ranks_text}{first}."
    ]
    if record.skips_in_a_row >= _LONG_RUN:
        sentences.append(
            f"These are {record.skips_in_a_row} skips in a row. distamp.find_first_nonfinite finds "
            "the operation that made the first inf or NaN."
        )
    buffers = ", ".join(_pop_nonfinite_buffers(names))
    if buffers:
        sentences.append(
            f"The forward pass left inf or NaN in {buffers}, which a skip does not undo."
        )
    if not names and not any(group.get("param_names") for group in optimizer.param_groups):
        sentences.append("Pass named_parameters= for names.")
    logger.log(record.level, "%s", " ".join(sentences))


def log_norm_skip(
    logger: str,
    level: int,
    optimizer: Any,
    step: int,
    norm: float,
    limit: float,
    skips_in_a_row: int,
) -> None:
    """Log that a step was skipped because its norm exceeded the limit."""
    text = (
        f"Skipped step {step} of {describe_optimizer(optimizer)}: gradient norm {norm:g} exceeds "
        f"skip_norm_above={limit:g}."
    )
    if skips_in_a_row >= _LONG_RUN:
        text += f" These are {skips_in_a_row} skips by the norm in a row."
    logging.getLogger(logger).log(level, "%s", text)


def log_requested_skip(logger: str, optimizer: Any, step: int) -> None:
    """Log at INFO that a step was skipped because a rank requested it."""
    logging.getLogger(logger).info(
        "Skipped step %s of %s: a rank requested it by skip_if.",
        step,
        describe_optimizer(optimizer),
    )


def log_scale_search(
    logger: str, optimizer: Any, skips: int, first_scale: float, scale: float
) -> None:
    """Log at INFO that a scaler has found its first loss scale.

    Args:
        logger: The name of the logger.
        optimizer: The optimizer, which took its first step.
        skips: The number of steps that were skipped before.
        first_scale: The loss scale of the first skipped step.
        scale: The loss scale of the step that was taken.
    """
    logging.getLogger(logger).info(
        "%s took its first step. Before it, %s skipped while the loss scale fell from %s to %s.",
        describe_optimizer(optimizer),
        "1 step was" if skips == 1 else f"{skips} steps were",
        _scale_name(first_scale),
        _scale_name(scale),
    )


def _scale_name(scale: float) -> str:
    """Return a loss scale as text, as a power of two if it is one."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


@torch.no_grad()
def _pop_nonfinite_buffers(names: dict[Tensor, str]) -> list[str]:
    """Remove buffers that are not finite from ``names``, so that each is logged once."""
    bad_buffers: list[Tensor] = []
    for tensor in names:
        is_buffer = not tensor.requires_grad and tensor.grad is None
        if not is_buffer or not tensor.dtype.is_floating_point:
            continue
        if not to_local(tensor).isfinite().all():
            bad_buffers.append(tensor)
    return [names.pop(tensor) for tensor in bad_buffers]

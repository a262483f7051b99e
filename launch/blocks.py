"""What is done to each block of a model before it is parallelized: checkpointing and compiling.

A block is a member of an outermost ModuleList: what sharding gathers as one. Its ``forward`` alone
is replaced, so that the hooks of wrappers stay outside, and no parameter gets another name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from launch.config import Config
from launch.errors import UsageError
from launch.parallel import units

__all__ = ["check_blocks", "prepare_blocks"]

_ATEN = torch.ops.aten
# What selective checkpointing keeps: the results that take longest to compute again.
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


def check_blocks(config: Config, strategy: str) -> None:
    """Refuse what cannot be done to the blocks of this model.

    Raises:
        UsageError: Naming the flag.
    """
    for name, given in _asked(config).items():
        if given and strategy == "dp":
            raise UsageError(
                f"--{name}: --strategy dp copies the model in each step, compiled blocks and all;"
                " take ddp"
            )
    if config.compile and config.report:
        raise UsageError(
            "--report: a compiled block runs kernels and not ops, so there is nothing to report of"
            " it; leave out --report or --compile"
        )


def prepare_blocks(model: nn.Module, config: Config) -> None:
    """Checkpoint and compile the blocks of a model as the flags ask for.

    Raises:
        UsageError: The model has no blocks.
    """
    wanted = [f"--{name}" for name, given in _asked(config).items() if given]
    if not wanted:
        return
    blocks = [block for _, _, block in units(model)]
    if not blocks:
        raise UsageError(
            f"{wanted[0]}: --model {config.model} has no blocks (members of a ModuleList)"
        )
    if config.compile and config.checkpoint_activations == "selective":
        # torch warns on each rank; launch/facts.py does once, where it is news.
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    for block in blocks:
        forward: Callable[..., Any] = block.forward
        # Compiled last, so that the compiler sees what is to be computed again.
        if config.checkpoint_activations != "none":
            forward = _checkpointed(forward, selective=config.checkpoint_activations == "selective")
        if config.compile:
            forward = torch.compile(forward)
        block.forward = forward


def _asked(config: Config) -> dict[str, bool]:
    return {
        "compile": config.compile,
        "checkpoint-activations": config.checkpoint_activations != "none",
    }


def _is_news(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def _checkpointed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    extra: dict[str, Any] = {}
    if selective:
        extra["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)

    return checkpointed


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

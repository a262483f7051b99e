"""Attention as a GPU runs it, where there is none for torch to choose a kernel for.

Without CUDA, ``scaled_dot_product_attention`` takes its reference kernels, which compute half
precision inputs in float32. On a GPU a fused kernel computes in half precision, so the simulation
calls one: flash attention, or memory-efficient attention with a mask. Which of the fused kernels
a GPU chooses does not change a dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

__all__ = ["fused_attention", "stands_in"]

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256


def stands_in(func: Any, device_type: str) -> bool:
    """Whether a call of ``func`` is attention that torch cannot choose a kernel for here."""
    return (
        func is F.scaled_dot_product_attention
        and device_type == "cuda"
        and not torch.cuda.is_available()
    )


def fused_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What the fused kernel returns, or None where the reference kernels are the right ones."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors = [given["query"], given["key"], given["value"]]
    if torch.is_autocast_enabled("cuda"):
        # scaled_dot_product_attention stands on autocast's list; the kernel it ends in does not.
        to = torch.get_autocast_dtype("cuda")
        tensors = [t.to(to) if t.dtype == torch.float32 else t for t in tensors]
    query, key, value = tensors
    fits = all(t.dim() == 4 and t.dtype == query.dtype for t in tensors)
    if not fits or query.dtype not in _HALF or query.shape[1] != key.shape[1]:
        return None
    dropout, causal = float(given.get("dropout_p") or 0.0), bool(given.get("is_causal", False))
    mask, scale = given.get("attn_mask"), given.get("scale")
    aten = torch.ops.aten
    if mask is None and query.shape[-1] <= _LARGEST_HEAD and query.shape[-1] % 8 == 0:
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )
        return out[0]  # type: ignore[no-any-return]
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        mask = mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    log_sumexp = query.requires_grad or key.requires_grad or value.requires_grad
    out = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, log_sumexp, dropout, causal, scale=scale
    )
    return out[0]  # type: ignore[no-any-return]

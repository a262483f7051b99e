"""Attention as a GPU runs it, where there is none for torch to choose a kernel for.

Without CUDA, ``scaled_dot_product_attention`` takes its reference kernels, which compute half
precision inputs in float32. On a GPU it takes flash attention, or memory-efficient attention where
there is a mask, wherever they can be taken. Which of the fused kernels does not change a dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

__all__ = ["attention_without_device"]

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256


@contextmanager
def attention_without_device() -> Iterator[None]:
    """Register the kernels that a GPU would run for attention on CUDA tensors, for a while."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        # Autocast has cast its inputs by then, as on the device.
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", _attention, key)
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    aten, tensors = torch.ops.aten, (query, key, value)
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    same = all(t.dim() == 4 and t.dtype == query.dtype for t in tensors)
    half, size = query.dtype in _HALF, query.shape[-1]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        masked = attn_mask.logical_not()
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = attn_mask.masked_fill_(masked, float("-inf"))
    if same and half and attn_mask is None and size <= _LARGEST_HEAD and value.shape[-1] == size:
        # Flash attention takes heads of a multiple of 8 alone.
        scale = size**-0.5 if scale is None else scale
        query, key, value = (F.pad(t, (0, -size % 8)) if size % 8 else t for t in tensors)
        out: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :size] if size % 8 else out
    aligned = all(t.shape[-1] % (8 if half else 4) == 0 for t in tensors)
    if same and aligned and not grouped and query.dtype != torch.float64:
        if attn_mask is not None:
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        options: Any = (attn_mask, any(t.requires_grad for t in tensors), dropout_p, is_causal)
        return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, *options, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]

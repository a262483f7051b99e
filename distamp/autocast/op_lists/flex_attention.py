"""flex_attention by op lists, as scaled_dot_product_attention: it is no op of the dispatcher's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from distamp.autocast.op_lists.rules import Category, cast_list, stashed, widest
from distamp.autocast.threads.thread_state import local

__all__ = ["register_flex_attention"]


def register_flex_attention(listed: DispatchKey, slots: dict[Any, int]) -> None:
    """Give flex_attention a kernel at the lists' key, which follows the rule of attention.

    torch lists it too, since 2.12 or so: queries, keys and values in lower precision.

    Args:
        listed: The key.
        slots: The numbers of the kernels by overload; filled as kernels are registered.
    """
    from torch._higher_order_ops.flex_attention import flex_attention

    attention = torch.ops.aten.scaled_dot_product_attention.default

    def kernel(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        state = local.state
        lists = stashed() if state.lists is None else state.lists[0]
        exclude = torch._C.DispatchKeySet(listed)
        inputs = query, key, value
        for rule in lists.rules.get(slots.get(attention), ()):
            excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(rule.key)
            if rule.device_type != query.device.type or excluded:
                continue
            exclude = exclude.add(rule.key)
            if rule.category is not Category.UNLISTED:
                to = torch.float32
                if rule.category is Category.LOWER_PRECISION:
                    to = torch.get_autocast_dtype(rule.device_type)
                elif rule.category is Category.PROMOTE:
                    to = widest(inputs, rule)
                inputs = cast_list(inputs, to, rule)  # type: ignore[assignment]
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            return flex_attention(*inputs, *args, **kwargs)

    flex_attention.py_impl(listed)(kernel)

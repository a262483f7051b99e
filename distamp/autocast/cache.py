"""The step cache: casts of weights that outlive their region, until the weight changes.

torch's own cache knows nothing of a weight's changes and so ends with the outermost region. This
one holds, for each thread, at most one cast for each weight and dtype, and looks at the weight's
version before every use.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from distamp.autocast import op_lists
from distamp.autocast.threads.stack import thread

__all__ = [
    "CastCacheStats",
    "cast_cache_stats",
    "clear_cast_cache",
    "pop_mode",
    "push_mode",
    "set_cast_cache_limit",
]

# What runs in the lower precision on every device type that autocast knows, each under the names
# by which a torch function mode sees it. Calls of anything else reach torch's autocast as they are.
_FUNCTIONS: dict[Callable[..., Any], str] = {
    F.linear: "linear",
    torch.matmul: "matmul",
    Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul",
    Tensor.__rmatmul__: "matmul",
    torch.mm: "mm",
    Tensor.mm: "mm",
    torch.bmm: "bmm",
    Tensor.bmm: "bmm",
    torch.addmm: "addmm",
    Tensor.addmm: "addmm",
    torch.addbmm: "addbmm",
    Tensor.addbmm: "addbmm",
    torch.baddbmm: "baddbmm",
    Tensor.baddbmm: "baddbmm",
    F.conv1d: "conv1d",
    F.conv2d: "conv2d",
    F.conv3d: "conv3d",
    F.conv_transpose1d: "conv_transpose1d",
    F.conv_transpose2d: "conv_transpose2d",
    F.conv_transpose3d: "conv_transpose3d",
    F.multi_head_attention_forward: "linear",
}


@dataclass(frozen=True)
class CastCacheStats:
    """What the step caches hold and have done, summed over threads.

    Attributes:
        entries: Casts held now.
        nbytes: Bytes of the casts held now.
        hits: Casts not made because one was held.
        casts: Casts made and kept.
        uncached: Casts made and not kept, as the limit was reached.
        dropped: Casts thrown away because their weight changed or an optimizer stepped.
    """

    entries: int
    nbytes: int
    hits: int
    casts: int
    uncached: int
    dropped: int


class _Held:
    """One cast and what its weight was when it was made."""

    __slots__ = ("cast", "data_ptr", "version", "weight")

    def __init__(self, weight: Tensor, cast: Tensor) -> None:
        self.weight = weakref.ref(weight)
        self.version = weight._version
        self.data_ptr = weight.data_ptr()
        self.cast = cast

    def is_of(self, weight: Tensor) -> bool:
        return (
            self.weight() is weight
            and self.version == weight._version
            and self.data_ptr == weight.data_ptr()
        )


class _CastCache:
    """The casts one thread holds."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], _Held] = {}
        self.nbytes = 0
        self.hits = 0
        self.casts = 0
        self.uncached = 0
        self.dropped = 0

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """``weight`` in ``dtype``: the cast that is held, if it is still right, or a new one."""
        key = id(weight), dtype
        held = self._held.get(key)
        # A cast made without a graph gives no gradient; one with a graph serves no_grad as well.
        grad = torch.is_grad_enabled()
        tracked = weight.requires_grad and grad
        if held is not None:
            if held.is_of(weight) and (held.cast.requires_grad == tracked or not grad):
                self.hits += 1
                if tracked and _is_sharding():
                    used: Tensor = _Use.apply(weight, held.cast.detach())  # type: ignore[no-untyped-call]
                    return used
                return held.cast
            self._drop(key)
        cast = weight.to(dtype)
        limit = _limit.nbytes
        if limit is not None and self.nbytes + cast.nbytes > limit:
            self.uncached += 1
        elif type(cast) is Tensor and (tracked or not torch.is_inference_mode_enabled()):
            self.casts += 1
            self._held[key] = _Held(weight, cast)
            self.nbytes += cast.nbytes
        return cast

    def _drop(self, key: tuple[int, torch.dtype]) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.nbytes -= held.cast.nbytes
            self.dropped += 1

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        for key in list(self._held):
            self._drop(key)


class _Use(torch.autograd.Function):
    """A held cast with a node of its own in the graph of this forward pass.

    FSDP2 reduces a module's gradients when the engine comes to its inputs. Nodes run youngest
    first, so one kept from an earlier pass would give the weight its gradient after that.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def _is_sharding() -> bool:
    """Whether ``fully_shard`` was applied to any module in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and bool(fsdp.FSDPModule.__subclasses__())


class _CastWeights(TorchFunctionMode):
    """Hands lower precision functions the held casts of their weights."""

    def __init__(self, cache: _CastCache) -> None:
        super().__init__()
        self._cache = cache

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_dynamo_compiling() or func not in _FUNCTIONS or not _applies(_FUNCTIONS[func]):
            return func(*args, **kwargs) if kwargs else func(*args)
        args = tuple([self._cast(a) if type(a) is nn.Parameter else a for a in args])
        if not kwargs:
            return func(*args)
        if "out" not in kwargs and "out_dtype" not in kwargs:
            kwargs = {k: self._cast(a) if type(a) is nn.Parameter else a for k, a in kwargs.items()}
        return func(*args, **kwargs)

    def _cast(self, weight: Tensor) -> Tensor:
        device_type = weight.device.type
        if weight.dtype is not torch.float32 or not torch.is_autocast_enabled(device_type):
            return weight
        return self._cache.cast(weight, torch.get_autocast_dtype(device_type))


def _applies(op: str) -> bool:
    """Whether, here and now, ``op`` casts its weights as torch's own lists say."""
    here = thread.here
    stack = here.stack
    if not here.step_regions or (stack and not stack[-1][0]._step_cache):
        return False
    # A traced graph must hold the cast; a functorch transform's tensors do not outlive it.
    if torch._C._get_tracing_state() is not None:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    lists = op_lists.current()
    return lists is None or not any(op_lists.moves(op, device) for device, _ in lists.lists)


class _Thread(threading.local):
    """This thread's cache, and the mode that uses it."""

    def __init__(self) -> None:
        self.cache = _CastCache()
        self.mode = _CastWeights(self.cache)
        with _lock:
            _caches.add(self.cache)


class _Limit:
    nbytes: int | None = None


_limit = _Limit()
_lock = threading.Lock()
_caches: weakref.WeakSet[_CastCache] = weakref.WeakSet()
_thread = _Thread()


@functools.cache
def _watch_optimizers() -> None:
    # The version counter sees no change made through .data, nor FSDP2's all-gather into a weight;
    # both follow an optimizer's step. Not before the first use: others' steps pay nothing.
    register_optimizer_step_post_hook(_after_step)


def push_mode() -> None:
    """Begin to use this thread's cache."""
    _watch_optimizers()
    _thread.mode.__enter__()  # type: ignore[no-untyped-call]


def pop_mode() -> None:
    """Stop using this thread's cache; it keeps what it holds."""
    _thread.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _all_caches() -> list[_CastCache]:
    with _lock:
        return list(_caches)


def clear_cast_cache() -> None:
    """Drop every cast that ``cache_enabled="step"`` keeps, in all threads.

    Needed after weights were changed in a way that torch's version counter does not see, such as
    ``weight.data.copy_(...)`` outside an optimizer's step.
    """
    for cache in _all_caches():
        cache.clear()


def cast_cache_stats() -> CastCacheStats:
    """What the step caches of all threads hold and have done so far."""
    caches = _all_caches()
    return CastCacheStats(
        entries=sum(len(cache) for cache in caches),
        nbytes=sum(cache.nbytes for cache in caches),
        hits=sum(cache.hits for cache in caches),
        casts=sum(cache.casts for cache in caches),
        uncached=sum(cache.uncached for cache in caches),
        dropped=sum(cache.dropped for cache in caches),
    )


def set_cast_cache_limit(nbytes: int | None) -> None:
    """Bound what each thread's step cache holds.

    Without a limit a thread holds at most one cast of each weight and dtype: for fp32 weights in
    half precision, half the weights' own bytes.

    Args:
        nbytes: Bytes of casts a thread may hold; casts beyond it are made at each use. None is
            no limit.

    Raises:
        ValueError: ``nbytes`` is negative.
        TypeError: ``nbytes`` is no integer.
    """
    if nbytes is not None:
        if not isinstance(nbytes, int) or isinstance(nbytes, bool):
            raise TypeError(f"nbytes must be an int or None, got {nbytes!r}")
        if nbytes < 0:
            raise ValueError(f"nbytes must be 0 or more, or None for no limit, got {nbytes}")
    _limit.nbytes = nbytes


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    clear_cast_cache()

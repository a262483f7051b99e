"""Backward through fake tensors of a device that is not here.

torch's engine asks the accelerator for its current stream when a gradient of its device arrives,
which nothing can answer without the device. Calling the nodes one by one, in the engine's order,
needs no stream. It is done inside one node of a CPU graph, so that what looks for a running
backward (checkpointing does) finds it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from distamp.autocast.report.recording import Recorder

__all__ = ["backward_without_device"]

_Node = Any


def backward_without_device(
    roots: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    recorder: Recorder,
) -> None:
    """Call every autograd node from ``roots`` down; no ``.grad`` is written.

    Args:
        roots: Tensors with a ``grad_fn``.
        grads: Their gradients, of the same shapes and dtypes.
        recorder: Told each node before it is called; it counts nothing else.
    """

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            try:
                with recorder.paused(False):
                    _call_nodes(roots, grads, recorder.running)
            finally:
                recorder.running(None)
            return grad

    with recorder.paused(), torch.enable_grad():
        start = Inside.apply(torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        torch.autograd.backward([start], [torch.zeros(())])


def _call_nodes(
    roots: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    running: Callable[[_Node | None], None],
) -> None:
    waiting = _dependencies([root.grad_fn for root in roots])
    buffers: dict[_Node, list[torch.Tensor | None]] = {}
    ready: list[tuple[int, int, _Node]] = []
    count = 0

    def arrive(node: _Node, at: int, grad: torch.Tensor | None) -> None:
        buffer = buffers.setdefault(node, [None] * _width(node))
        held = buffer[at]
        if grad is not None:
            buffer[at] = grad if held is None else held + grad

    def release(node: _Node) -> None:
        nonlocal count
        count += 1
        heapq.heappush(ready, (-node._sequence_nr(), count, node))

    for root, grad in zip(roots, grads, strict=True):
        arrive(root.grad_fn, root.output_nr, grad)
    for node in dict.fromkeys(root.grad_fn for root in roots):
        if waiting[node] == 0:
            release(node)
    while ready:
        node = heapq.heappop(ready)[2]
        given = buffers.pop(node, [None] * _width(node))
        nexts = node.next_functions
        running(node)
        outs = _call(node, given) if any(g is not None for g in given) else (None,) * len(nexts)
        for (after, at), out in zip(nexts, outs, strict=False):
            if after is None:
                continue
            arrive(after, at, None if out is None else _fit(out, after._input_metadata[at]))
            waiting[after] -= 1
            if waiting[after] == 0:
                release(after)


def _dependencies(nodes: Sequence[_Node]) -> Counter[_Node]:
    """How many edges lead to each node from nodes that will run."""
    counts: Counter[_Node] = Counter()
    seen = set(nodes)
    todo = list(seen)
    while todo:
        for after, _ in todo.pop().next_functions:
            if after is not None:
                counts[after] += 1
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    return counts


def _width(node: _Node) -> int:
    return len(node._input_metadata)


def _call(node: _Node, grads: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    if hasattr(node, "variable"):
        # AccumulateGrad keeps the first gradient it is given, detached.
        assert grads[0] is not None
        grads[0].detach()
        return ()
    metadata = node._input_metadata
    if isinstance(node, BackwardCFunction):
        if getattr(node, "materialize_grads", True):
            grads = [
                torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
                for g, m in zip(grads, metadata, strict=True)
            ]
        outs = node.apply(*grads)
    else:
        outs = node(*grads)
    return outs if isinstance(outs, tuple) else (outs,)


def _fit(grad: torch.Tensor, metadata: Any) -> torch.Tensor:
    """The gradient in the shape and dtype of the output it is for, as the engine makes it."""
    if tuple(grad.shape) != tuple(metadata.shape):
        grad = grad.sum_to_size(tuple(metadata.shape))
    return grad if grad.dtype == metadata.dtype else grad.to(metadata.dtype)

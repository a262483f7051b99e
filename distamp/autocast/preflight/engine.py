"""Backward through fake tensors of a device that is not here.

torch's engine asks the accelerator for its current stream when a gradient of its device arrives,
which nothing can answer without the device. Calling the nodes one by one, in the engine's order,
needs no stream. It is done inside one node of a CPU graph, so that what looks for a running
backward (checkpointing does) finds it. Hooks on tensors and nodes are not called.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from distamp.autocast.report.recording import Recorder

__all__ = ["engine_without_device"]

_Node = Any
_Grads = list[torch.Tensor | None]
_in_backward = torch._C._current_graph_task_id


@contextmanager
def engine_without_device(recorder: Recorder) -> Iterator[None]:
    """Give ``torch.autograd.backward`` and ``grad`` this engine wherever fake tensors meet them.

    Args:
        recorder: Told each node before it is called.
    """
    torchs = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(
        outputs: Any, grads: Any, keep: bool, create: bool, inputs: Any, *rest: Any, **options: Any
    ) -> Any:
        if not any(isinstance(each, FakeTensor) for each in outputs):
            return torchs(outputs, grads, keep, create, inputs, *rest, **options)
        edges = [_edge(each) for each in inputs]
        step = _Backward(edges, recorder, accumulate=options["accumulate_grad"])
        roots = [(*_edge(output), grad) for output, grad in zip(outputs, grads, strict=True)]
        if _in_backward() != -1:
            step.run(roots, create)
        else:
            _in_a_graph_task(lambda: step.run(roots, create), recorder)
        return tuple(step.captured.get(edge) for edge in edges)

    with patch.object(torch.autograd, "_engine_run_backward", run):
        yield


def _edge(tensor: torch.Tensor) -> tuple[_Node, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _in_a_graph_task(work: Callable[[], None], recorder: Recorder) -> None:
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with recorder.paused(False):
                work()
            return grad

    with recorder.paused(), torch.enable_grad():
        start = Inside.apply(torch.zeros((), device="cpu", requires_grad=True))  # type: ignore[no-untyped-call]
        torch.autograd.Variable._execution_engine.run_backward(
            (start,), (torch.zeros((), device="cpu"),), False, False, (), accumulate_grad=True
        )


class _Backward:
    """One call of the engine.

    Args:
        inputs: (node, output number) of the tensors whose gradients are asked for; none asks for
            those of all leaves.
        recorder: Told each node before it is called.
        accumulate: Whether leaves get their ``.grad``.
    """

    def __init__(self, inputs: list[Any], recorder: Recorder, accumulate: bool) -> None:
        self.captured: dict[tuple[_Node, int], torch.Tensor | None] = {}
        self._inputs = inputs
        self._recorder = recorder
        self._accumulate = accumulate

    def run(self, roots: Sequence[tuple[_Node, int, torch.Tensor]], create_graph: bool) -> None:
        """Call every node from ``roots`` down that a gradient reaches."""
        with torch.set_grad_enabled(create_graph):
            before = self._recorder.thread().node
            try:
                self._call_nodes(roots)
            finally:
                self._recorder.running(before)

    def _call_nodes(self, roots: Sequence[tuple[_Node, int, torch.Tensor]]) -> None:
        waiting = _dependencies([node for node, _, _ in roots])
        needed = _leading_to({node for node, _ in self._inputs}, waiting)
        gathered: dict[_Node, _Grads] = {}
        ready: list[tuple[int, int, _Node]] = []
        count = itertools.count()

        def arrive(node: _Node, at: int, grad: torch.Tensor | None) -> None:
            grads = gathered.setdefault(node, [None] * len(node._input_metadata))
            before = grads[at]
            if grad is not None:
                grads[at] = grad if before is None else before + grad

        def release(node: _Node) -> None:
            heapq.heappush(ready, (-node._sequence_nr(), next(count), node))

        for node, at, grad in roots:
            arrive(node, at, grad)
        for node in dict.fromkeys(node for node, _, _ in roots):
            if waiting[node] == 0:
                release(node)
        while ready:
            node = heapq.heappop(ready)[2]
            grads = gathered.pop(node, [None] * len(node._input_metadata))
            nexts = node.next_functions
            runs = (not self._inputs or node in needed) and any(g is not None for g in grads)
            self._recorder.running(node)
            outs = self._call(node, grads) if runs else (None,) * len(nexts)
            for (after, at), out in zip(nexts, outs, strict=False):
                if after is None:
                    continue
                arrive(after, at, None if out is None else _fit(out, after._input_metadata[at]))
                waiting[after] -= 1
                if waiting[after] == 0:
                    release(after)

    def _call(self, node: _Node, grads: _Grads) -> tuple[torch.Tensor | None, ...]:
        asked = [edge for edge in self._inputs if edge[0] is node]
        if not self._accumulate:
            self.captured |= {edge: grads[edge[1]] for edge in asked}
        if hasattr(node, "variable"):
            if self._accumulate:
                _accumulate(node.variable, grads[0])
            return ()
        if asked and not any(after for after, _ in node.next_functions):
            return (None,) * len(node.next_functions)
        if isinstance(node, BackwardCFunction):
            if getattr(node, "materialize_grads", True):
                metadata = node._input_metadata  # type: ignore[attr-defined]
                grads = [
                    torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
                    for g, m in zip(grads, metadata, strict=True)
                ]
            outs = node.apply(*grads)
            outs = outs if isinstance(outs, tuple) else (outs,)
            # A gradient for each argument of forward; edges are of those that are tensors.
            needed = zip(outs, node.needs_input_grad, strict=True)
            wanted = (out for out, is_needed in needed if is_needed)
            return tuple(after and next(wanted, None) for after, _ in node.next_functions)
        outs = node(*grads)
        return outs if isinstance(outs, tuple) else (outs,)


def _accumulate(leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
    """What AccumulateGrad does; a tensor that is not of the simulation keeps its ``.grad``."""
    if grad is None or not isinstance(leaf, FakeTensor):
        return
    if leaf.grad is None:
        leaf.grad = grad if grad.is_sparse else grad.detach()
    else:
        leaf.grad += grad


def _dependencies(nodes: Sequence[_Node]) -> Counter[_Node]:
    """How many edges lead to each node from nodes that will run."""
    counts: Counter[_Node] = Counter(dict.fromkeys(nodes, 0))
    todo = list(counts)
    while todo:
        for after, _ in todo.pop().next_functions:
            if after is not None:
                if after not in counts:
                    todo.append(after)
                counts[after] += 1
    return counts


def _leading_to(targets: set[_Node], nodes: Counter[_Node]) -> set[_Node]:
    """The nodes from which a target can be reached, targets too."""
    above: dict[_Node, list[_Node]] = {}
    for node in nodes:
        for after, _ in node.next_functions:
            above.setdefault(after, []).append(node)
    found, todo = set(targets), list(targets)
    while todo:
        for node in above.get(todo.pop(), ()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def _fit(grad: torch.Tensor, metadata: Any) -> torch.Tensor:
    """The gradient in the shape and dtype of the output it is for, as the engine makes it."""
    if tuple(grad.shape) != tuple(metadata.shape):
        grad = grad.sum_to_size(tuple(metadata.shape))
    return grad if grad.dtype == metadata.dtype else grad.to(metadata.dtype)

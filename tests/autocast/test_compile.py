"""Regions and torch.compile: whole graphs, graph breaks, and lists that are never dropped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp import autocast
from distamp.autocast import AutocastState, OpLists, precision_report, propagate

X = torch.ones(4, 4)
LISTS = OpLists(fp32={"matmul"})


class MyAutocast(autocast):
    """A user's subclass, as frameworks have."""


LISTED = MyAutocast("cpu", ops=LISTS)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting() -> tuple[Callable[..., Any], list[Any]]:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    return backend, graphs


@pytest.mark.parametrize("cls", [torch.autocast, autocast])
def test_a_graph_break_in_a_region_makes_two_graphs(cls: Any) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        with cls("cpu"):
            first = x @ x
            torch._dynamo.graph_break()
            second = x @ x
        return first, second, x @ x

    backend, graphs = counting()
    out = torch.compile(fn, backend=backend)(X)
    assert [t.dtype for t in out] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert len(graphs) == 2


def test_a_subclass_with_lists_keeps_them_in_a_compiled_function() -> None:
    def made_outside(x: Tensor) -> Tensor:
        with LISTED:
            return x @ x

    def made_inside(x: Tensor) -> Tensor:
        with MyAutocast("cpu", ops=LISTS):
            return x @ x

    for fn in (made_outside, made_inside):
        assert torch.compile(fn, backend="eager")(X).dtype is torch.float32


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_lists_in_a_whole_graph_are_refused_with_what_to_do(where: str) -> None:
    def made_outside(x: Tensor) -> Tensor:
        with LISTED:
            return x @ x

    def made_inside(x: Tensor) -> Tensor:
        with autocast("cpu", ops=LISTS):
            return x @ x

    fn = made_outside if where == "outside" else made_inside
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Enter it around the call"):
        torch.compile(fn, backend="eager", fullgraph=True)(X)


def test_an_applied_state_in_compiled_code_is_followed_or_refused_with_what_to_do() -> None:
    with autocast("cpu", ops=LISTS):
        state = AutocastState.capture()

    def fn(x: Tensor) -> Tensor:
        with state.apply():
            return x @ x

    assert torch.compile(fn, backend="eager")(X.bfloat16()).dtype is torch.float32
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Apply it around the call"):
        torch.compile(fn, backend="eager", fullgraph=True)(X)


def test_a_propagated_function_is_compiled_without_a_warning_of_the_compilers() -> None:
    with autocast("cpu", ops=LISTS):
        fn = propagate(lambda x: x @ x)
    compiled = torch.compile(fn, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(X.bfloat16()).dtype is torch.float32
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Apply it around the call"):
        torch.compile(fn, backend="eager", fullgraph=True)(X)


def test_a_model_first_called_inside_a_report_is_compiled_afterwards() -> None:
    model = nn.Linear(4, 4)
    backend, graphs = counting()
    compiled = torch.compile(model, backend=backend)
    with precision_report(model) as report:
        compiled(X)
    assert {row.function for row in report.rows} == {"linear"}
    assert graphs == []
    compiled(X)
    assert len(graphs) == 1


def test_an_optimizer_compiled_whole_steps_after_a_region_was_made() -> None:
    with autocast("cpu"):
        pass
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(optimizer.step, backend="eager", fullgraph=False)()
    assert weight.tolist() == [0.0, 0.0]


class Regions(nn.Module):
    """A region that forward makes, and one that it found."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls, self.region = cls, cls("cpu")

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with self.cls("cpu"):
            made = x @ x
        with self.region:
            found = x @ x
        return made, found, x @ x


HOW: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "compiled whole": lambda it: torch.compile(it, backend="aot_eager", fullgraph=True),
    "exported": lambda it: torch.export.export(it, (X,)).module(),
    "exported strict": lambda it: torch.export.export(it, (X,), strict=True).module(),
    "traced": lambda it: torch.jit.trace(it, X),
}


def scripted(x: Tensor) -> tuple[Tensor, Tensor]:
    with autocast("cpu", dtype=torch.bfloat16):
        inside = x @ x
    return inside, x @ x


@pytest.mark.filterwarnings("ignore")
def test_a_region_may_be_scripted_as_torchs() -> None:
    out = torch.jit.script(scripted)(X)
    assert [t.dtype for t in out] == [torch.bfloat16, torch.float32]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("cls", [torch.autocast, autocast])
def test_regions_are_part_of_the_graph_as_torchs_are(cls: Any, how: str) -> None:
    out = HOW[how](Regions(cls))(X)
    assert [t.dtype for t in out] == [torch.bfloat16, torch.bfloat16, torch.float32]

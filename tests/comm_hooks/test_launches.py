"""How many launches an exchange on a device takes, counted on a CPU in the place of a device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from distamp.comm_hooks import arithmetic, blocks, layout, reference, stats
from distamp.comm_hooks.engine import Engine
from distamp.comm_hooks.headers import lockstep_words
from distamp.comm_hooks.residuals import Residuals
from distamp.comm_hooks.wire import wire_format

# Nothing is computed, or it is memory alone.
FREE = {
    *("view", "as_strided", "slice", "select", "unsqueeze", "expand", "alias", "detach"),
    *("squeeze", "unbind", "split", "permute", "empty", "empty_like", "new_empty", "_unsafe_view"),
    *("empty_strided", "new_empty_strided", "unflatten", "view_as", "lift_fresh"),
}


class Launches(TorchDispatchMode):
    """Counts what would be launched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().split("::")[1].split(".")[0]
        if name not in FREE:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


class Alone:
    """A channel on which every rank sends what this one does."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.device = size, size // 2, torch.device("cpu")
        self.ranks, self.on_host, self.backend_name = list(range(size)), False, "nccl"

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        rows = sent.view(self.size, -1)
        received.view(self.size, -1).copy_(rows[self.rank])
        return self

    def gather(self, received: Tensor, row: Tensor) -> Any:
        with _disable_current_modes():
            own = row.clone()  # which may lie in what is received
        received.view(self.size, -1).copy_(own)
        return self

    def wait(self) -> None:
        pass


def launches(
    wire: str,
    size: int,
    numel: int,
    *,
    shards: bool,
    fed_back: bool = False,
    split: bool = True,
) -> Counter[str]:
    engine = Engine(wire_format(wire), Alone(size), stats.Account())
    # A bucket of several parameters, of which some begin within 256 elements.
    edges = [300, 1000, numel // 2 + 7, numel - 100] if split else []
    how = engine.layout("it", 0, numel, torch.float32, edges, shards=shards)
    words = lockstep_words(0, None, torch.device("cpu"))
    out = torch.empty(numel // size) if shards else None
    residuals = Residuals([numel], size) if fed_back else None
    count = Launches()
    for _ in range(2):  # what is made the first time does not count
        count.seen.clear()
        if residuals is not None:
            residuals.begin(torch.tensor(8.0))
        with count:
            engine.exchange(torch.ones(numel), how, words, out=out, feedback=residuals)
        if residuals is not None:
            residuals.end(torch.tensor(False))
    return count.seen


def a_piece(size: int, wire: str, **how: Any) -> float:
    """Launches of one piece more."""
    few, many = (launches(wire, size, pieces * 65_536, **how).total() for pieces in (1, 2))
    return many - few


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the ways that a device takes, in small pieces."""
    for module in (reference, blocks):
        monkeypatch.setattr(module, "on_host", lambda _: False)
    for name, value in {
        "PIECE": 65_536,
        "ROW": 1,
        "SHARD_PIECE": 65_536,
        "DIRECT_BYTES": 0,
    }.items():
        monkeypatch.setattr(layout, name, value)


@pytest.fixture
def with_kernels(on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs the package triton, of the test extra")
    from distamp.comm_hooks import kernels

    # Stands for the launch. Nothing is computed: with 256 ranks the interpreter takes its time.
    monkeypatch.setattr(kernels, "_launch", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(
        "distamp.comm_hooks.engine.arithmetic_for", lambda _: (kernels, kernels.NAME)
    )


@pytest.mark.parametrize("size", [2, 256])
@pytest.mark.parametrize(
    ("wire", "how"),
    [
        ("fp16", {"shards": False}),
        ("bf16", {"shards": True}),
        ("int16", {"shards": True}),
        ("int8", {"shards": False, "fed_back": True}),
    ],
)
def test_a_piece_takes_at_most_ten_launches_by_kernels(with_kernels, wire, how, size):
    assert a_piece(size, wire, **how) <= 10


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("wire", ["fp16", "int16"])
def test_without_kernels_a_piece_takes_as_many_at_any_number_of_ranks(on_a_device, wire, shards):
    counts = {size: a_piece(size, wire, shards=shards, split=False) for size in (8, 256)}
    assert counts[8] == counts[256]
    assert max(a_piece(size, wire, shards=shards) for size in (8, 256)) <= 200


def test_stats_say_that_triton_is_missing(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "distamp.comm_hooks.kernels", raising=False)
    monkeypatch.delattr("distamp.comm_hooks.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    how, name = arithmetic.arithmetic_for(torch.device("cuda"))
    assert how is reference
    assert name in str(stats.HookStats(exchanges=1, arithmetic=name))
    assert arithmetic.arithmetic_for(torch.device("cpu")) == (reference, "torch ops")

"""On an accelerator nothing is read on the host; here the CPU plays the accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from distamp import DistGradScaler, host
from distamp.errors import LockstepError
from distamp.scaler import message
from tests.ranks import RankPool

_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "nonzero")


@contextmanager
def _as_accelerator(reads: list[str]) -> Iterator[None]:
    """Take the accelerator's code path, and note every read of a tensor on the host."""
    allowed = host.HostCopy.values

    def values(self: host.HostCopy) -> list[float]:
        before = len(reads)
        result = allowed(self)
        del reads[before:]
        return result

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any) -> Any:
            reads.append(name)
            return original(self, *args)

        return read

    with (
        mock.patch.object(host, "is_host", return_value=False),
        mock.patch.object(host.HostCopy, "values", values),
        mock.patch.multiple(Tensor, **{name: noting(name) for name in _READS}),
    ):
        yield


def _fused_run(overflow_at: dict[int, int], steps: int, swap_at: int | None = None) -> Any:
    """Run ``steps`` iterations; ``overflow_at`` maps an iteration to the rank that overflows."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    models = [nn.Linear(3, 3), nn.Linear(3, 2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in models]
    scaler = DistGradScaler("cpu")
    loss = torch.ones((), requires_grad=True)
    reads: list[str] = []
    error = None
    with _as_accelerator(reads):
        for step in range(steps):
            scaler.scale(loss)
            bad = overflow_at.get(step) == rank
            for model in models:
                for p in model.parameters():
                    p.grad = torch.full_like(p, float("inf") if bad else 65536.0)
            order = optimizers[::-1] if step == swap_at and rank == 1 else optimizers
            if step == 1:
                reads.clear()  # at first sight of an optimizer the reply is read once
            try:
                for optimizer in order:
                    scaler.step(optimizer)
            except LockstepError as raised:
                error = (step, str(raised))
                break
            scaler.update()
        during = list(reads)
    return {
        "reads": during,
        "weights": [p.detach().clone() for m in models for p in m.parameters()],
        "scale": scaler.get_scale(),
        "taken": scaler.step_counts(optimizers[0]).taken,
        "error": error,
    }


def test_a_fused_iteration_reads_nothing_on_the_host(ranks2: RankPool) -> None:
    for result in ranks2.run(_fused_run, {2: 1}, 5):
        assert result["reads"] == []
        assert result["taken"] == 4
        assert result["scale"] == 2.0**15


def test_the_deferred_path_decides_as_the_immediate_one(ranks2: RankPool) -> None:
    results = ranks2.run(_fused_run, {1: 0, 3: 1}, 6)
    torch.manual_seed(0)
    models = [nn.Linear(3, 3), nn.Linear(3, 2)]
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=0.1)
    scale = 2.0**16
    for step in range(6):
        if step in (1, 3):
            scale /= 2
            continue
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 65536.0 / scale)
        optimizer.step()
    expected = [p.detach() for m in models for p in m.parameters()]
    for result in results:
        torch.testing.assert_close(result["weights"], expected)


def _steps_together(calls: list[str]) -> Any:
    """Step the optimizers of each call at once; rank 0 reads replies late, as kernels skip there.

    Rank 1's optimizers are stepped by the host, which reads every reply before.
    """
    rank = torch.distributed.get_rank()
    group = torch.distributed.new_group([0, 1])
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(6)]
    optimizers = [torch.optim.AdamW([p], lr=0.1, fused=rank == 0) for p in parameters]
    scaler = DistGradScaler("cpu", process_group=group)
    lengths: list[int] = []
    original = message._sum

    def noting(group: Any, packed: Tensor) -> None:
        lengths.append(packed.numel())
        original(group, packed)

    loss = torch.ones((), requires_grad=True)
    with _as_accelerator([]), mock.patch.object(message, "_sum", noting):
        for call in calls:
            scaler.scale(loss)
            for p in parameters:
                p.grad = torch.full_like(p, 65536.0)
            scaler.step_all([optimizers[int(number)] for number in call])
            scaler.update()
    taken = [scaler.step_counts(o).taken for o in optimizers[: len(set("".join(calls)))]]
    return lengths, taken, scaler.get_scale()


EACH = ["0", "1", "2", "3"]  # at first sight of an optimizer every rank reads the reply at once


@pytest.mark.parametrize(
    "calls",
    [
        [*EACH, "012", "012"],
        [*EACH, "01", "0123", "0", "0123"],
        [*EACH, "0123", "01", "23", "3210"],
    ],
    ids=" ".join,
)
def test_messages_are_as_long_on_a_rank_that_has_not_read_the_last_reply(
    ranks2: RankPool, calls: list[str]
) -> None:
    first, second = ranks2.run(_steps_together, calls)
    assert first == second
    lengths, taken, scale = first
    assert lengths[-1] >= len(calls[-1])  # one message takes them all by then
    assert taken == ["".join(calls).count(number) for number in "0123"]
    assert scale == 2.0**16


def test_ranks_apart_step_nothing_and_all_raise_at_the_next_call(ranks2: RankPool) -> None:
    before = ranks2.run(_fused_run, {}, 2)[0]["weights"]
    for result in ranks2.run(_fused_run, {}, 5, 2):
        step, text = result["error"]
        assert step == 2
        assert "not in lockstep" in text
        torch.testing.assert_close(result["weights"], before, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fused_iteration_on_a_gpu_never_synchronises() -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = DistGradScaler("cuda")
    inputs = torch.randn(2, 4, device="cuda")
    for step in range(4):
        if step == 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.scale(model(inputs).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.step_counts(optimizer).taken == 4


def _first_step_skipped() -> tuple[list[float], list[str]]:
    """Fused SGD with momentum, whose first step overflows and whose later ones do not."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9, fused=True)
    scaler = DistGradScaler("cpu", init_scale=4.0)
    reads: list[str] = []
    with _as_accelerator(reads):
        for gradient in (float("inf"), 1.0, 1.0, 1.0):
            scaler.scale(torch.ones((), requires_grad=True))
            parameter.grad = torch.full_like(parameter, gradient) * scaler._scale
            reads.clear()
            scaler.step(optimizer)
            last = list(reads)
            scaler.update()
    return parameter.tolist(), last


def test_a_skipped_first_step_leaves_no_garbage_for_momentum() -> None:
    values, reads_of_the_last = _first_step_skipped()
    reference = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([reference], lr=0.5, momentum=0.9)
    for _ in range(3):
        reference.grad = torch.ones(3)
        optimizer.step()
    assert values == pytest.approx(reference.tolist())
    assert reads_of_the_last == []

"""The message itself: how many words and kernels it takes, and what the sum of its words says."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from distamp import host
from distamp.gradients import flag_of
from distamp.scaler.groups import Group
from distamp.scaler.message import exchange
from tests.ranks import RankPool

CPU = torch.device("cpu")
MOST_OPS = 8


class _Ops(TorchDispatchMode):
    """Notes every aten op."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name().startswith("aten::"):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def _ops_on_a_device() -> tuple[list[str], float]:
    """A message about one optimizer where the CPU plays an accelerator."""
    with mock.patch.object(host, "is_host", return_value=False):
        group = Group(dist.group.WORLD, CPU)
        flag = flag_of(dist.get_rank() == 1, CPU)
        ops = _Ops()
        with ops:
            reply = exchange(group, 12345, [[flag]], None, takes_rows=False)
            (agreed,) = reply.flags(CPU)
    # What is made on the host to be copied into is none of the device's.
    on_device = [name for name in ops.seen if name != "aten::empty.memory_format"]
    return on_device, agreed.item()


def test_a_message_on_a_device_is_few_ops(ranks2: RankPool) -> None:
    for ops, flag in ranks2.run(_ops_on_a_device):
        assert len(ops) <= MOST_OPS, ops
        assert flag == 1.0


def _who_overflowed(on_device: bool, optimizers: int) -> Any:
    """Each rank sets the flag of the optimizer of its own number, and of the last."""
    with mock.patch.object(host, "is_host", return_value=not on_device):
        group = Group(dist.group.WORLD, CPU)
        group.length.capacity = optimizers
        rank = dist.get_rank()
        flags = [[flag_of(i in (rank, optimizers - 1), CPU)] for i in range(optimizers)]
        reply = exchange(group, 2**32 - 1, flags, None, takes_rows=False)
        values = [flag.item() for flag in reply.flags(CPU)]
        return values, [reply.overflowed(i) for i in range(optimizers)], reply.in_agreement


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("optimizers", [5, 9, 20])
def test_each_flag_is_set_where_a_rank_set_it(
    ranks4: RankPool, on_device: bool, optimizers: int
) -> None:
    expected = [[i] if i < 4 else [] for i in range(optimizers - 1)] + [[0, 1, 2, 3]]
    for values, ranks, in_agreement in ranks4.run(_who_overflowed, on_device, optimizers):
        assert ranks == expected
        assert values == [float(bool(each)) for each in expected]
        assert in_agreement


def _another_digest(on_device: bool) -> Any:
    with mock.patch.object(host, "is_host", return_value=not on_device):
        group = Group(dist.group.WORLD, CPU)
        reply = exchange(
            group, 7 + dist.get_rank(), [[flag_of(False, CPU)]], None, takes_rows=False
        )
        return [flag.item() for flag in reply.flags(CPU)], reply.in_agreement


def test_another_digest_sets_every_flag_on_a_device_unread(ranks2: RankPool) -> None:
    assert ranks2.run(_another_digest, True) == [([1.0], False)] * 2
    assert [agreed for _, agreed in ranks2.run(_another_digest, False)] == [False] * 2

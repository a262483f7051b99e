"""Precision reports of models in torch's wrappers: names as without them, nothing missed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import precision_report
from tests.autocast.counting import BF16, Independent, mlp
from tests.ranks import RankPool, mesh

# Module, op and phase of what the same step runs without a wrapper.
SAME = {
    ("0", "addmm", "forward"),
    ("1", "relu", "forward"),
    ("2", "native_layer_norm", "forward"),
    ("3", "addmm", "forward"),
    ("0", "mm", "backward"),
    ("1", "threshold_backward", "backward"),
    ("2", "native_layer_norm_backward", "backward"),
    ("3", "mm", "backward"),
}


def _to_half(state, bucket):
    half = bucket.buffer().half()
    torch.distributed.all_reduce(half)
    future = torch.futures.Future()
    future.set_result(half.float().div_(2))
    return future


def wrapped(kind: str) -> nn.Module:
    model = mlp()
    if kind == "DDP":
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, _to_half)
        return ddp
    if kind == "FSDP1":
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear),
        )
    over = mesh((2,), ("dp",))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for each in (*model, model):
        fully_shard(each, mesh=over, mp_policy=policy)
    return model


def _steps() -> Any:
    found = {}
    for kind in ("DDP", "FSDP1", "FSDP2"):
        model = wrapped(kind)
        with Independent() as count, precision_report(model) as report:
            with torch.autocast("cpu", dtype=BF16, enabled=kind != "FSDP2"):
                out = model(torch.randn(4, 8))
            out.float().sum().backward()
        missing = SAME - {(row.module, row.op, row.phase) for row in report.rows}
        causes = {row.cause for row in report.rows if row.casts}
        found[kind] = missing, count.agrees(report), report.model == "Sequential", causes
    return found


def test_a_wrapper_changes_no_name_and_hides_no_kernel(ranks2: RankPool):
    for found in ranks2.run(_steps):
        assert found["DDP"][:3] == (set(), True, True)
        assert found["DDP"][3] >= {"autocast", "explicit"}
        assert found["FSDP1"][:3] == (set(), True, True)
        missing, agrees, _, causes = found["FSDP2"]
        assert (missing, agrees) == (set(), True)
        assert causes
        assert "autocast" not in causes


def rows_of(model: nn.Module, x: torch.Tensor) -> set[tuple[str, str]]:
    with Independent() as count, precision_report(model) as report:
        got = model(x)
    assert count.agrees(report)
    assert torch.equal(got, model(x))
    return {(row.module, row.op) for row in report.rows}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_traced_and_wrapped_modules_have_plain_names():
    model, x = mlp(), torch.randn(4, 8)
    same = {(name, op) for name, op, phase in SAME if phase == "forward"}
    assert rows_of(torch.compile(model, backend="aot_eager"), x) >= same  # type: ignore[arg-type]
    compiled = torch.compile(nn.ReLU(), backend="eager")
    parts = nn.Sequential(checkpoint_wrapper(model[0]), compiled, *model[2:])
    assert rows_of(nn.DataParallel(parts), x) >= same
    assert {op for _, op in rows_of(torch.jit.trace(mlp(), x), x)} >= {op for _, op in same}
    nested = nn.Sequential()
    nested.add_module("module", nn.Linear(8, 8))
    nested.add_module("other", nn.ReLU())
    assert rows_of(nested, x) >= {("module", "addmm"), ("other", "relu")}

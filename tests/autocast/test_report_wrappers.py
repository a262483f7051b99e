"""Precision reports of models in torch's wrappers: names as without them, nothing missed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import precision_report
from distamp.autocast.recording import module_names
from distamp.autocast.report import OUTSIDE
from tests.autocast.test_report import BF16, Independent, kernels, mlp
from tests.ranks import mesh

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


def _step(model, autocast=True):
    with Independent() as count, precision_report(model) as report:
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            out = model(torch.randn(4, 8))
        out.float().sum().backward()
    found = {(row.module, row.op, row.phase) for row in report.rows}
    casts = [(row.module, row.phase, row.cause) for row in report.rows if row.casts]
    return found, kernels(report) == count.kernels, report.model, casts


def _ddp():
    model = DistributedDataParallel(mlp())
    model.register_comm_hook(None, _to_half)
    return _step(model)


def _to_half(state, bucket):
    half = bucket.buffer().half()
    torch.distributed.all_reduce(half)
    future = torch.futures.Future()
    future.set_result(half.float().div_(2))
    return future


def test_ddp_changes_no_name_and_hides_no_kernel(ranks2):
    for found, equal, model, casts in ranks2.run(_ddp):
        assert found >= SAME
        assert equal
        assert model == "Sequential"
        inside = [cause for name, phase, cause in casts if phase == "forward" and name != OUTSIDE]
        assert set(inside) == {"autocast"}
        assert "explicit" in {cause for *_, cause in casts}, "the cast of the communication hook"


def _fsdp2():
    model = mlp()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for child in model:
        fully_shard(child, mesh=mesh((2,), ("dp",)), mp_policy=policy)
    fully_shard(model, mesh=mesh((2,), ("dp",)), mp_policy=policy)
    return _step(model, autocast=False)


def test_fsdp2_changes_no_name_and_its_casts_are_not_autocasts(ranks2):
    for found, equal, _, casts in ranks2.run(_fsdp2):
        assert found >= SAME
        assert equal
        assert casts
        assert "autocast" not in {cause for *_, cause in casts}


def _fsdp1():
    wrapped = FullyShardedDataParallel(
        mlp(),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear),
    )
    return _step(wrapped)


def test_fsdp1_changes_no_name(ranks2):
    for found, equal, model, _ in ranks2.run(_fsdp1):
        assert found >= SAME
        assert equal
        assert model == "Sequential"


def test_wrappers_leave_names_alone():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), torch.compile(nn.ReLU()))
    wrapped = nn.DataParallel(model)
    names = set(module_names(wrapped).values())
    assert names == {"", "0", "1"}
    nested = nn.Module()
    nested.module = nn.ReLU()
    nested.other = nn.ReLU()
    assert set(module_names(nested).values()) == {"", "module", "other"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_reported(backend):
    model = mlp()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(4, 8)
    expected = model(x)
    with Independent() as count, precision_report(compiled) as report:
        got = compiled(x)
        got.sum().backward()
    assert torch.equal(got, expected)
    assert kernels(report) == count.kernels
    assert ("0", "addmm") in {(row.module, row.op) for row in report.rows}


def test_a_traced_model_is_reported():
    x = torch.randn(4, 8)
    traced = torch.jit.trace(mlp(), x)
    with Independent() as count, precision_report(traced) as report:
        traced(x)
    assert kernels(report) == count.kernels
    assert "addmm" in {row.op for row in report.rows}

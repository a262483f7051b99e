"""The names that torch keeps to itself are there, and do what hooks need, in this torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp.comm_hooks import torch_compat
from tests.ranks import mesh


def _groups() -> dict[str, Any]:
    group = dist.group.WORLD
    cpu = torch.device("cpu")
    backend = torch_compat.new_gloo("a test", group)
    rank, size = group.rank(), group.size()
    received = torch.zeros(1)
    receiving = backend.recv([received], 1 - rank, 0)
    backend.send([torch.full((1,), 1.0 + rank)], 1 - rank, 0).wait()
    receiving.wait()
    members = torch_compat.new_communicator("a test's", group, [rank], cpu)
    summed = torch.ones(1)
    members.allreduce([summed]).wait()
    part = torch.zeros(1)
    torch_compat.reduce_scatter(part, torch.arange(float(size)), group)
    return {
        "default": torch_compat.default_group() is group,
        "rows": (received.tolist(), summed.tolist(), part.tolist()),
    }


def test_groups(ranks2):
    for rank, found in enumerate(ranks2.run(_groups)):
        rows = ([2.0 - rank], [1.0], [2.0 * rank])
        assert found == {"default": True, "rows": rows}


def _modules() -> dict[str, Any]:
    ddp = DistributedDataParallel(nn.Linear(3, 5))
    before = torch_compat.ddp_hook_name(ddp)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    inside: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: inside.append(torch_compat.in_backward_pass()))
    (x * 2).sum().backward()
    fsdp1 = FullyShardedDataParallel(nn.Linear(3, 5), device_id=torch.device("cpu"))
    fsdp1.register_comm_hook(None, print)
    whole = mesh((dist.get_world_size(),), ("shard",))
    fsdp2 = fully_shard(nn.Linear(3, 5), mesh=whole)
    (group,) = torch_compat.param_groups(fsdp2)
    custom = torch_compat.custom_reduce_scatter(group)
    fsdp2.set_custom_reduce_scatter(print)
    over = mesh((dist.get_world_size(), 1), ("replicate", "shard"))
    (replicated,) = torch_compat.param_groups(fully_shard(nn.Linear(3, 5), mesh=over))
    return {
        "names": (before, torch_compat.ddp_hook_name(ddp)),
        "inside": (inside, torch_compat.in_backward_pass()),
        "hook": torch_compat.fsdp1_hook(fsdp1) is print,
        "custom": (custom, torch_compat.custom_reduce_scatter(group)),
        "hsdp": [torch_compat.is_hsdp(each) for each in (group, replicated)],
        "meshes": [len(torch_compat.mesh_groups(each)) for each in (group, replicated)],
    }


def test_wrappers(ranks2):
    for found in ranks2.run(_modules):
        assert found == {
            "names": (None, "fp16_compress_hook"),
            "inside": ([True], False),
            "hook": True,
            "custom": (None, "builtin_function_or_method"),
            "hsdp": [False, True],
            "meshes": [1, 2],
        }


@pytest.mark.parametrize("module", ["distamp.comm_hooks"])
def test_what_takes_a_second_to_import_is_imported_when_used(module):
    code = (
        "import sys, torch; before = set(sys.modules); import distamp.comm_hooks.registration;"
        "import distamp.comm_hooks as hooks; hooks.LowPrecisionState;"
        "new = set(sys.modules) - before;"
        "print(*sorted(n for n in new if n.split('.')[0] in ('sympy', 'mpmath', 'triton')"
        " or n.startswith(('torch.distributed.fsdp', 'torch.distributed.tensor'))))"
    )
    # Not by way of distamp's own __init__, whose other rooms are not this one's business.
    stub = (
        "import sys, types, importlib.util as u, pathlib;"
        "spec = u.find_spec('distamp'); package = types.ModuleType('distamp');"
        "package.__path__ = list(spec.submodule_search_locations);"
        "sys.modules['distamp'] = package;"
    )
    done = subprocess.run(
        [sys.executable, "-c", stub + code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []

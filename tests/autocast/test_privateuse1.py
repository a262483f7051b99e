"""Op lists in a process with an out-of-tree accelerator, which has PrivateUse1 and its autocast."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A backend as far as autocast knows it: a name, a module, kernels of its own at its autocast key.
BACKEND = """
import types, warnings
import torch, torch.nn.functional as F
from torch._subclasses import FakeTensorMode

torch.utils.rename_privateuse1_backend("npu")
npu = types.ModuleType("torch.npu")
npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
npu.is_available = lambda: True
npu.device_count = lambda: 1
npu.current_device = lambda: 0
npu.is_initialized = lambda: True
npu._is_in_bad_fork = lambda: False
torch._register_device_module("npu", npu)

key = "AutocastPrivateUse1"
fallback = torch.library.Library("_", "IMPL")
fallback.fallback(torch.library.fallthrough_kernel, key)
library = torch.library.Library("aten", "IMPL")
def lower(op):
    def kernel(*args):
        to = torch.get_autocast_dtype("npu")
        excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*(a.to(to) if isinstance(a, torch.Tensor) else a for a in args))
    return kernel
library.impl("mm", lower(torch.mm), key)
library.impl("linear", lower(F.linear), key)
"""

CPU = """
from distamp import AutocastState, OpLists, autocast
x = torch.randn(4, 4)
lists = OpLists(fp32={"mm"}, lower_precision={"tanh"})
before = AutocastState.capture()
for _ in range(2):
    with autocast("cpu", ops=lists):
        assert (x @ x).dtype is F.linear(x, x).dtype is torch.float32
        assert torch.tanh(x).dtype is torch.bfloat16
        assert F.conv2d(x[None, None], x[None, None]).dtype is torch.bfloat16
        state = AutocastState.capture()
    assert AutocastState.capture() == before
with autocast("cpu"):
    assert (x @ x).dtype is torch.bfloat16
with state.apply():
    assert (x @ x).dtype is torch.float32
assert "npu" in [name for name, _, _ in state.devices]
weight = torch.randn(4, 4, requires_grad=True)
with autocast("cpu", ops=lists):
    F.linear(x, weight).sum().backward()
with torch.autocast("cpu", enabled=False):
    assert torch.equal(weight.grad, x.sum(0).expand(4, 4))
"""

NPU = """
from distamp import OpLists, autocast
with FakeTensorMode():
    x = torch.empty(4, 4, device="npu")
    with autocast("npu", torch.bfloat16):
        assert torch.mm(x, x).dtype is torch.bfloat16
    with autocast("npu", torch.bfloat16, ops=OpLists(fp32={"mm"}, lower_precision={"tanh"})):
        assert torch.mm(x, x).dtype is torch.float32
        assert F.linear(x, x).dtype is torch.float32
        assert torch.tanh(x).dtype is torch.bfloat16
        with autocast("npu", enabled=False):
            assert torch.tanh(x).dtype is torch.float32
"""

COMPILED = """
torch.accelerator.is_available = lambda: False  # torch.compile asks a backend for its stream
from distamp import OpLists, autocast
x = torch.randn(4, 4)
graphs = []
compiled = torch.compile(lambda x: x @ x, backend=lambda graph, _: graphs.append(graph) or graph)
for ops in (None, OpLists(fp32={"mm"}), OpLists(fp32={"erf"})) * 2:
    with autocast("cpu", ops=ops):
        assert compiled(x).dtype is (x @ x).dtype
assert len(graphs) == 3
"""


@pytest.mark.parametrize("programs", [(CPU, NPU), (COMPILED,)], ids=["eager", "compiled"])
def test_lists_work_beside_such_a_backend(programs: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join((BACKEND, *programs, "print('done')"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "done\n"

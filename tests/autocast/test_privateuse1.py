"""Op lists in a process with an out-of-tree accelerator, which has PrivateUse1 and its autocast."""

import subprocess
import sys

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

PROGRAM = """
from distamp import AutocastState, OpLists, autocast
x = torch.randn(4, 4)
lists = OpLists(fp32={"mm"}, lower_precision={"tanh"})
with autocast("cpu", ops=lists):
    assert (x @ x).dtype is F.linear(x, x).dtype is torch.float32
    assert torch.tanh(x).dtype is F.conv2d(x[None, None], x[None, None]).dtype is torch.bfloat16
    state = AutocastState.capture()
with autocast("cpu"):
    assert (x @ x).dtype is torch.bfloat16
with state.apply():
    assert (x @ x).dtype is torch.float32
assert "npu" in [name for name, _, _ in state.devices]
with FakeTensorMode():
    y = torch.empty(4, 4, device="npu")
    with autocast("npu", torch.bfloat16):
        assert torch.mm(y, y).dtype is torch.bfloat16
    with autocast("npu", torch.bfloat16, ops=lists):
        assert torch.mm(y, y).dtype is F.linear(y, y).dtype is torch.float32
        assert torch.tanh(y).dtype is torch.bfloat16
        with autocast("npu", enabled=False):
            assert torch.tanh(y).dtype is torch.float32

torch.accelerator.is_available = lambda: False  # torch.compile asks a backend for its stream
compiled = torch.compile(lambda x: x @ x, backend="eager")
for ops in (None, lists, OpLists(fp32={"erf"})) * 2:
    with autocast("cpu", ops=ops):
        assert compiled(x).dtype is (x @ x).dtype
print("done")
"""


def test_lists_work_beside_such_a_backend() -> None:
    command = [sys.executable, "-c", BACKEND + PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr[-3000:]

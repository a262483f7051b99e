"""torch's own autocast test lists, under this package's region."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from distamp import autocast

pytest.importorskip("expecttest", reason="torch.testing._internal needs the test extra")


@pytest.fixture(scope="module")
def torch_lists() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import autocast_test_lists
    return autocast_test_lists


# List, dtype the ops run in (None: the dtype that the list gives), home of the functions.
CPU_LISTS = [
    ("torch_16", "lower", torch),
    ("torch_fp32", torch.float32, torch),
    ("nn_16", "lower", torch._C._nn),
    ("nn_fp32", torch.float32, torch._C._nn),
    ("torch_need_autocast_promote", torch.float32, torch),
    ("torch_expect_builtin_promote", None, torch),
    ("methods_expect_builtin_promote", None, None),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("name", "runs_in", "module"), CPU_LISTS, ids=[it[0] for it in CPU_LISTS])
def test_every_op_of_torchs_cpu_lists(
    torch_lists: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    runs_in: Any,
    module: Any,
    dtype: torch.dtype,
) -> None:
    """Torch's own check: the output's dtype, and bitwise the result of casting by hand."""
    monkeypatch.setattr(torch.amp, "autocast", autocast)
    check = torch_lists.TestAutocast()
    lower = dtype if runs_in == "lower" else torch.float32
    for op, *given in getattr(torch_lists.AutocastCPUTestLists(torch.device("cpu")), name):
        args, out_type, kwargs = given[0], None, {}
        if "promote" in name:
            args = given[0] if dtype is torch.bfloat16 else given[1]
            out_type = given[2] if runs_in is None else None
        elif len(given) == 2:
            kwargs = given[1]
        check._run_autocast_outofplace(
            op,
            args,
            lower,
            device="cpu",
            out_type=out_type,
            module=module,
            add_kwargs=kwargs,
            amp_dtype=dtype,
        )


# Runs where an op that aborts takes only itself down. Prints what each op's output is, or, of an
# op that needs a GPU to finish, what its inputs are cast to.
CUDA = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from benchmarks.op_reference.observed import LastInputs
from distamp.autocast.devices import autocast_without_device

LISTS = {
    "torch_fp16": torch, "torch_fp32": torch, "torch_need_autocast_promote": torch,
    "torch_expect_builtin_promote": torch, "nn_fp16": torch._C._nn, "nn_fp32": torch._C._nn,
    "linalg_fp16": torch._C._linalg, "methods_fp16": torch.Tensor, "methods_fp32": torch.Tensor,
    "methods_expect_builtin_promote": torch.Tensor, "banned": torch._C._nn,
}
real = torch.cuda.is_available()
right, wrong = [], []
with torch.no_grad() if real else FakeTensorMode(allow_non_fake_inputs=True):
    lists = AutocastTestLists(torch.device("cuda"))
    for name, home in LISTS.items():
        for op, args, *more in getattr(lists, name):
            kwargs = more[0] if more and isinstance(more[0], dict) else {}
            want = torch.float32
            if name.endswith("_fp16"):
                want = torch.float16
            elif "builtin_promote" in name:
                want = more[0]
            call = getattr(home, op, None)
            if op == "einsum":
                args = (args, (more[0] if more else None))
            if call is None:
                call = getattr(torch.Tensor, op)
            try:
                with LastInputs() as inputs, autocast_without_device("cuda", torch.float16):
                    out = call(*args, **kwargs)
                out = out[0] if isinstance(out, (tuple, list)) else out
                got = out.dtype if isinstance(out, torch.Tensor) else want
            except Exception as error:
                got = repr(error)
                if name == "banned" and "unsafe to autocast" in got:
                    got = want
                elif not real and inputs.dtype is not None:
                    # A CUDA build's fake kernel may ask the driver which kernel is to run. What
                    # autocast does, casting the inputs, is done by then.
                    got = inputs.dtype
            (right if got == want else wrong).append(f"{name}: {op} gave {got}, not {want}")
print(json.dumps([right, wrong]))
"""


def test_torchs_cuda_lists_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CUDA], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    right, wrong = json.loads(done.stdout.splitlines()[-1])
    print(len(right), wrong)
    assert len(right) >= 115, wrong

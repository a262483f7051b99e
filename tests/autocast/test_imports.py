"""Every spelling of the imports that should work, and the names and signatures of the old ones."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

import distamp
from distamp import autocast

SPELLINGS = [
    "from distamp import autocast; cls = autocast",
    "import distamp; cls = distamp.autocast",
    "from distamp.autocast import autocast; cls = autocast",
    "from distamp.autocast.region import autocast; cls = autocast",
    "import distamp.autocast; cls = distamp.autocast",
    "import distamp.autocast.region; cls = distamp.autocast",
    "import distamp.autocast as cls",
    "import distamp.autocast.state, distamp; cls = distamp.autocast",
    "from distamp.autocast import AutocastState; from distamp import autocast as cls",
    "import distamp as amp; cls = amp.autocast",
    "from distamp import *; cls = autocast",
    "from distamp.autocast import *; cls = autocast",
]


# Each spelling in a fork of an interpreter that has torch and nothing of ours: what an import binds
# depends on what was imported before.
FORKS = """
import os, sys, traceback, torch, torch.distributed.tensor
for number, spelling in enumerate(eval(sys.argv[1])):
    child = os.fork()
    if child == 0:
        try:
            names = {}
            exec(spelling, names)
            cls = names["cls"]
            assert issubclass(cls, torch.autocast), cls
            with cls("cpu"):
                assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(number, os.waitpid(child, 0)[1])
"""


def test_a_fresh_interpreter_finds_the_class_under_every_spelling():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKS, repr(SPELLINGS)],
        capture_output=True,
        text=True,
        check=True,
    )
    failed = [
        SPELLINGS[int(n)] for n, code in map(str.split, done.stdout.splitlines()) if int(code)
    ]
    assert failed == [], done.stderr
    assert len(done.stdout.splitlines()) == len(SPELLINGS)


def test_the_package_is_a_package_and_its_parent_holds_the_class():
    package = importlib.import_module("distamp.autocast")
    assert package.autocast is distamp.autocast is autocast
    assert package.__path__
    assert importlib.import_module("distamp.autocast.region").autocast is autocast


def test_the_class_pickles_by_its_module():
    assert pickle.loads(pickle.dumps(autocast)) is autocast


def _parameters(called: object) -> list[tuple[str, object]]:
    made = called.__init__ if isinstance(called, type) else called
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    found = [p for p in inspect.signature(made).parameters.values() if p.kind in plain]
    return [(p.name, p.default) for p in found if p.name != "self"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["autocast", "GradScaler"])
def test_the_old_spellings_have_the_old_signatures(device_type, name):
    ours = getattr(importlib.import_module(f"distamp.{device_type}.amp"), name)
    theirs = getattr(importlib.import_module(f"torch.{device_type}.amp"), name)
    assert _parameters(ours) == _parameters(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no such device
        assert isinstance(ours(), getattr(torch.amp, name))


def test_torch_cuda_amp_warns_and_ours_does_not():
    x = torch.ones(2, 2)
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.cpu.amp.autocast()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with distamp.cpu.amp.autocast(True, torch.float16):
            assert (x @ x).dtype is torch.float16
        assert distamp.cpu.amp.GradScaler(4.0).get_scale() == 4.0


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_old_function_decorators_know_their_device_type(device_type):
    amp = importlib.import_module(f"distamp.{device_type}.amp")

    class Double(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append((x.dtype, torch.is_autocast_enabled(device_type)))
            return x * 2

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, grad):
            return grad * 2

    seen: list[tuple[torch.dtype, bool]] = []
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    found = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, True)
    try:
        Double.apply(x).sum().backward()
    finally:
        torch.set_autocast_enabled(device_type, found)
    # Only a tensor of the decorator's own device type is cast.
    cast = torch.float32 if device_type == "cpu" else torch.bfloat16
    assert seen == [(cast, False)]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_old_spelling_of_the_scaler_warns_from_the_callers_line():
    with pytest.warns(UserWarning, match="not available") as caught:
        distamp.cuda.amp.GradScaler()
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize("name", ["autocast", "GradScaler"])
def test_the_old_spellings_pickle_by_their_module(name):
    cls = getattr(distamp.cpu.amp, name)
    assert pickle.loads(pickle.dumps(cls)) is cls


def test_the_old_autocast_is_reusable_as_the_new_one_is():
    region = distamp.cpu.amp.autocast()
    with region, region:
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")

"""What the documents say of torch.autocast, asked of both classes; and the machinery around it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from distamp import autocast
from distamp.autocast import AutocastState, checkpoint_contexts
from distamp.autocast.op_lists import OpLists
from tests.autocast.conftest import thread_state

F32 = torch.ones(4, 4)
LOW = (torch.float16, torch.bfloat16)


def _outcome(fn: Callable[[], Any]) -> Any:
    """The result's dtype, or the error's type and first line."""
    try:
        out = fn()
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return [t.dtype for t in (out if isinstance(out, tuple) else (out,))]


def _inplace(op: str, left: torch.Tensor, *args: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: getattr(left.clone(), op)(*args)


CALLS: dict[str, Callable[[torch.dtype], Any]] = {
    "lower precision": lambda low: torch.mm(F32, F32),
    "fp32 list": lambda low: torch.nn.functional.softplus(F32.to(low)),
    "unlisted": lambda low: torch.relu(F32),
    "mixed inputs of an unlisted op": lambda low: F32.to(low) + F32,
    "promote to the widest": lambda low: torch.stack([F32, F32.to(low)]),
    "promote low with low": lambda low: torch.cat([F32.to(low), F32.to(low)]),
    "promote with float64": lambda low: torch.cat([F32.double(), F32.to(low)]),
    "float64 alone": lambda low: torch.mm(F32.double(), F32.double()),
    "float64 with float32": lambda low: torch.mm(F32.double(), F32),
    "integers": lambda low: torch.mm(F32.long(), F32.long()),
    "in place, kept in its dtype": lambda low: _inplace("addmm_", F32, F32, F32)(),
    "in place, dtypes differ": lambda low: _inplace("addmm_", F32, F32, F32.to(low))(),
    "out variant": lambda low: torch.mm(F32, F32, out=torch.empty(4, 4)),
    "out variant, dtypes differ": lambda low: torch.mm(F32, F32.to(low), out=torch.empty(4, 4)),
    "explicit dtype": lambda low: torch.softmax(F32.to(low), 0, dtype=torch.float64),
    "explicit low dtype": lambda low: torch.sum(F32, dtype=low),
    "matmul of low inputs": lambda low: torch.matmul(F32.to(low), F32),
    "linear": lambda low: F.linear(F32, F32, F32[0]),
    "convolution": lambda low: F.conv1d(F32[None], F32[:, :, None]),
    "attention": lambda low: F.scaled_dot_product_attention(F32[None], F32[None], F32[None]),
    "bce on half": lambda low: F.binary_cross_entropy(torch.sigmoid(F32).to(low), F32.to(low)),
    "bce with logits": lambda low: F.binary_cross_entropy_with_logits(F32.to(low), F32),
    "layer norm": lambda low: F.layer_norm(F32.to(low), (4,)),
    "lstm": lambda low: nn.LSTM(4, 4)(F32[None])[0],
    "disabled inside": lambda low: _disabled(lambda: torch.mm(F32, F32)),
    "low input where disabled": lambda low: _disabled(lambda: torch.mm(F32.to(low), F32)),
}


def _disabled(fn: Callable[[], Any]) -> Any:
    with type_in_use[-1]("cpu", enabled=False):
        return fn()


type_in_use: list[type[torch.autocast]] = [torch.autocast]


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_each_rule_holds_as_under_torchs_class(name, low):
    outcomes = []
    for cls in (autocast, torch.autocast):
        type_in_use.append(cls)
        with cls("cpu", dtype=low):
            outcomes.append(_outcome(lambda: CALLS[name](low)))
        type_in_use.pop()
    assert outcomes[0] == outcomes[1]


def test_bce_on_cuda_is_refused_with_torchs_advice():
    from torch._subclasses import FakeTensorMode

    torch.set_autocast_enabled("cuda", True)
    state = AutocastState.capture()
    torch.set_autocast_enabled("cuda", False)
    with FakeTensorMode():
        # Without requires_grad: a fake CUDA tensor with it aborts a process that has no GPU.
        x = torch.empty(2, device="cuda")
        with state.apply():
            with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
                F.binary_cross_entropy(x, x)
            with autocast("cuda", enabled=False):
                assert F.binary_cross_entropy(x, x).dtype is torch.float32


def test_results_outside_a_region_keep_their_dtype():
    with autocast("cpu"):
        low = F32 @ F32
    assert low.dtype is torch.bfloat16
    assert _outcome(lambda: low @ F32) == _outcome(lambda: F32.bfloat16() @ F32)


def test_forward_hooks_see_the_region():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen: list[Any] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, x: seen.append(thread_state()))
        module.register_forward_hook(lambda m, x, y: seen.append(thread_state()))
    with autocast("cpu", torch.float16):
        expected = thread_state()
        model(F32)
    assert seen == [expected] * 6


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_sees_what_the_forward_pass_saw(reentrant):
    from torch.utils.checkpoint import checkpoint

    seen: list[Any] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(thread_state()[0])
        return (x @ x).float()

    with autocast("cpu", torch.float16):
        out = checkpoint(block, torch.ones(4, 4, requires_grad=True), use_reentrant=reentrant)
    with autocast("cpu", torch.bfloat16):
        out.sum().backward()
    assert seen == [("cpu", True, torch.float16)] * 2


def test_recomputation_follows_op_lists_with_our_contexts():
    from torch.utils.checkpoint import checkpoint

    seen: list[torch.dtype] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        out = torch.mm(x, x)
        seen.append(out.dtype)
        return torch.mm(out, x)  # recomputation ends with the last tensor that backward needs

    with autocast("cpu", ops=OpLists(fp32={"mm"})):
        x = torch.ones(4, 4, requires_grad=True)
        out = checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts)
    out.sum().backward()
    assert seen == [torch.float32] * 2


REGION = autocast("cpu", dtype=torch.float16)


def _made_inside(x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu", dtype=torch.float16):
        y = x @ x
        with autocast("cpu", enabled=False):
            z = x @ x
    return y.float() + z + (x @ x)


def _made_outside(x: torch.Tensor) -> torch.Tensor:
    with REGION:
        y = x @ x
    with REGION:
        return y + x @ x


@autocast("cpu", dtype=torch.float16)
def _decorated(x: torch.Tensor, depth: int = 2) -> torch.Tensor:
    return _decorated(x, depth - 1) + x @ x if depth else x @ x


def _called_in_a_region(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("fn", [_made_inside, _made_outside, _decorated, _called_in_a_region])
def test_compiled_whole_it_computes_as_eager(fn, backend, request):
    if torch.__version__ < "2.13" and backend == "inductor" and fn is _called_in_a_region:
        reason = "torch 2.11's inductor caches by all but autocast's dtype, for torch's class too"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    x = torch.randn(4, 4)
    before = thread_state()
    for region in (autocast("cpu", enabled=False), autocast("cpu"), autocast("cpu", torch.float16)):
        with region:
            ours, theirs = compiled(x), fn(x)
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert thread_state() == before


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_gradients_are_eagers():
    grads = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        x = torch.randn(4, 4, generator=torch.manual_seed(0)).requires_grad_()
        wrap(_made_inside)(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_graph_break_in_a_region_stays_in_the_region():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with autocast("cpu"):
            first = x @ x
            torch._dynamo.graph_break()
            second = x @ x
        return first, second, x @ x

    out = torch.compile(fn, backend="eager")(F32)
    assert [t.dtype for t in out] == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.usefixtures("_fresh_compiler")
def test_an_error_in_a_compiled_region_leaves_it():
    def fn(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu"):
            return x @ x[:3]

    before = thread_state()
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|size"):
        torch.compile(fn, backend="eager")(F32)
    assert thread_state() == before


LISTED = autocast("cpu", ops=OpLists(fp32={"matmul"}))


@pytest.mark.usefixtures("_fresh_compiler")
def test_op_lists_in_compiled_code_are_followed_or_refused_never_dropped():
    def fn(x: torch.Tensor) -> torch.Tensor:
        with LISTED:
            return x @ x

    assert torch.compile(fn, backend="eager")(F32).dtype is torch.float32
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Enter it around the call"):
        torch.compile(fn, backend="eager", fullgraph=True)(F32)


@pytest.mark.usefixtures("_fresh_compiler")
def test_op_lists_made_in_compiled_code_are_followed_or_refused_never_dropped():
    lists = OpLists(fp32={"matmul"})

    def fn(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", ops=lists):
            return x @ x

    assert torch.compile(fn, backend="eager")(F32).dtype is torch.float32
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Enter it around the call"):
        torch.compile(fn, backend="eager", fullgraph=True)(F32)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_traced_and_frozen_model_computes_in_the_region_it_was_traced_in():
    """The inference path of document 003: trace under autocast without the cache, then freeze."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).eval()
    x = torch.randn(1, 3, 4, 4)
    with torch.no_grad(), autocast("cpu", cache_enabled=False, dtype=torch.bfloat16):
        traced = torch.jit.freeze(torch.jit.trace(model, x))
        expected = model(x)
    with torch.no_grad():
        for _ in range(3):
            out = traced(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripting_a_decorated_function_says_why_not():
    with pytest.raises(RuntimeError, match=r"autocast\(\.\.\.\) cannot decorate"):
        torch.jit.script(_decorated)


def test_an_exported_program_holds_the_region():
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with autocast("cpu", dtype=torch.bfloat16):
                y = x @ x
            return y.float() + x @ x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(Model(), (torch.randn(4, 4),), strict=False)
    assert "wrap_with_autocast" in exported.graph_module.code
    x = torch.randn(4, 4)
    torch.testing.assert_close(exported.module()(x), Model()(x))


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_fake_cuda_weight_aborts_torch_and_our_state_is_read_without_one():
    """Whatever looks at CUDA's autocast here reads settings alone, and touches no fake tensor."""
    aborts = """
import torch
from torch._subclasses import FakeTensorMode
torch.set_autocast_enabled("cuda", True)
with FakeTensorMode():
    w = torch.empty(2, 2, device="cuda", requires_grad=True)
    torch.mm(w, w).sum().backward()
print("survived")
"""
    reads = """
import torch
from distamp.autocast import AutocastState, propagate
torch.set_autocast_enabled("cuda", True)
torch.set_autocast_dtype("cuda", torch.bfloat16)
state = AutocastState.capture()
torch.set_autocast_enabled("cuda", False)
with state.apply():
    assert torch.is_autocast_enabled("cuda")
assert ("cuda", True, torch.bfloat16) in state.devices
assert not torch.cuda.is_initialized()
print("survived")
"""
    theirs = _run(aborts)
    ours = _run(reads)
    assert "survived" not in theirs.stdout
    assert ours.stdout == "survived\n", ours.stderr

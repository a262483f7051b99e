"""The backward pass of compiled code runs in the precision that forward declared."""

import contextlib
import importlib
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config

from distamp import AutocastState, autocast, initialize, set_module_precision
from distamp.autocast import OpLists
from tests.levels.cells import wrapped
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]
# The name distamp.autocast is the class in the package.
compiled_backward = importlib.import_module("distamp.autocast.compiled_backward")
BF16 = torch.bfloat16
FP16 = torch.float16
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
# bfloat16 rounds it to 1.
FACTOR = 1 + 1 / 300
X = torch.ones(1, 4) * FACTOR
SETTING = "same_as_forward"


class Inner(nn.Module):
    """A linear layer in a region that forward enters."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make_region = lambda: autocast("cpu", *arguments, **settings)

    def forward(self, x: Tensor) -> Tensor:
        with self.make_region():
            return self.linear(x.float())


def pinned_linear(precision: str) -> nn.Module:
    """Return a linear layer with a pinned precision."""
    return set_module_precision(nn.Linear(4, 4), precision)


#: The dtype of the outer region, and a module that computes in another dtype inside it.
MODULES: dict[str, tuple[torch.dtype, Callable[[], nn.Module]]] = {
    "fp32 pin in bf16": (BF16, lambda: pinned_linear("fp32")),
    "fp32 pin in fp16": (FP16, lambda: pinned_linear("fp32")),
    "bf16 pin in fp16": (FP16, lambda: pinned_linear("bf16")),
    "region off in bf16": (BF16, lambda: Inner(enabled=False)),
    "region off in fp16": (FP16, lambda: Inner(enabled=False)),
    "bf16 region in fp16": (FP16, lambda: Inner(BF16)),
}


def net(name: str) -> nn.Sequential:
    """Return three layers. The second one is the module of this name."""
    _, make_module = MODULES[name]
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), make_module(), nn.Linear(4, 1))


def loss_of(out: Tensor) -> Tensor:
    """Return a loss with a gradient that bfloat16 would round."""
    return (out.float() * FACTOR).sum()


def gradients(
    model: nn.Sequential, call: Callable[[Tensor], Tensor], region: AbstractContextManager[Any]
) -> Tensor:
    """Return the gradients of the module inside, for a loss as large as a loss scale makes it."""
    with region:
        out = call(X)
    loss = loss_of(out) * 2.0**15
    loss.backward()
    grads = []
    for param in model[1].parameters():
        grads.append(param.grad.double().flatten())  # type: ignore[union-attr]
    return torch.cat(grads)


def compile_model(model: nn.Sequential, backend: str) -> Callable[[Tensor], Tensor]:
    model.compile(backend=backend)
    return model


def by_block(model: nn.Sequential, backend: str) -> Callable[[Tensor], Tensor]:
    for block in model:
        block.compile(backend=backend)
    return model


def compile_function(model: nn.Sequential, backend: str) -> Callable[[Tensor], Tensor]:
    """Compile a function that calls the model."""

    def function(x: Tensor) -> Tensor:
        output: Tensor = model(x) * 1
        return output

    return torch.compile(function, backend=backend)


def wrap_model(model: nn.Sequential, backend: str) -> Callable[[Tensor], Tensor]:
    """Return the module in which ``torch.compile`` wraps the model."""
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


#: A way to compile a model.
WAYS: dict[str, Callable[[nn.Sequential, str], Callable[[Tensor], Tensor]]] = {
    "model.compile()": compile_model,
    "blocks": by_block,
    "a function around": compile_function,
    "torch.compile(model)": wrap_model,
}


#: Every module in one way, and every way for two modules.
CASES = [
    *((name, "torch.compile(model)") for name in MODULES),
    *((name, way) for name in ("fp32 pin in fp16", "region off in bf16") for way in [*WAYS][:3]),
]
QUICK_CASES = [
    ("bf16 region in fp16", "torch.compile(model)"),
    ("region off in bf16", "blocks"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "way"), quick_cases(CASES, QUICK_CASES))
def test_a_compiled_backward_is_the_eager_one(name, way, backend):
    dtype, _ = MODULES[name]
    eager = net(name)
    compiled = net(name)
    expected = gradients(eager, eager, torch.autocast("cpu", dtype))
    # Every worker imports this file, so a test imports the compiler, which takes long.
    from torch._inductor import config as inductor_config

    # Inductor keeps float32 between ops that it fuses, unless this setting makes it round.
    with inductor_config.patch(emulate_precision_casts=True):
        call = WAYS[way](compiled, backend)
        grads = gradients(compiled, call, autocast("cpu", dtype))
    assert torch.isfinite(grads).all()
    torch.testing.assert_close(grads, expected, rtol=1e-6, atol=0)


def test_a_pinned_head_has_the_gradient_of_float64():
    """The head alone is in float32, so its gradient must have float32's error and no more."""
    head = set_module_precision(nn.Linear(4, 1), "fp32")
    exact = nn.Linear(4, 1).double()
    exact.load_state_dict(head.state_dict())
    head.compile(backend="aot_eager")
    with autocast("cpu"):
        out = head(X)
    assert out.dtype is torch.float32
    loss_of(out).backward()
    exact_loss = (exact(X.double()) * FACTOR).sum()
    exact_loss.backward()
    for param, exact_param in zip(head.parameters(), exact.parameters(), strict=True):
        grad = param.grad.double()  # type: ignore[union-attr]
        torch.testing.assert_close(grad, exact_param.grad, rtol=1e-6, atol=0)


def in_thread(run: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1) as pool, autocast("cpu"):
        return pool.submit(AutocastState.wrap(run)).result()


def in_state(run: Callable[[], Tensor]) -> Tensor:
    with autocast("cpu"):
        state = AutocastState.capture()
    with state.apply():
        return run()


def in_lists(run: Callable[[], Tensor]) -> Tensor:
    with autocast("cpu", ops=OpLists(fp32={"softmax"})):
        return run()


def in_decorated(run: Callable[[], Tensor]) -> Tensor:
    return autocast("cpu")(run)()


def in_a_disabled_region_inside(run: Callable[[], Tensor]) -> Tensor:
    with autocast("cpu"), autocast("xpu", FP16, enabled=False):
        return run()


CARRIERS = [in_thread, in_state, in_lists, in_decorated, in_a_disabled_region_inside]


@pytest.mark.parametrize("around", quick_cases(CARRIERS, quick=[in_thread]))
def test_it_holds_in_whatever_carries_the_region(around):
    outcomes = []
    for compile_it in (True, False):
        model = net("fp32 pin in bf16")
        if compile_it:
            model.compile(backend="aot_eager")
        out = around(lambda model=model: model(X))
        loss_of(out).backward()
        outcomes.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*outcomes, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_graph_break_inside_a_compiled_region_changes_nothing():
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with autocast("cpu"):
            hidden = x * 1
            torch._dynamo.graph_break()
            return model(hidden)  # type: ignore[no-any-return]

    outcomes = []
    for run in (torch.compile(step, backend="aot_eager"), step):
        model = net("fp32 pin in bf16")
        loss_of(run(model, X)).backward()
        outcomes.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*outcomes, rtol=1e-6, atol=0)


def norm_of_a_step(way: str, layout: str, level: str, pin: str) -> float:
    """Train a step on this rank with a pinned head; return the norm of the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if way == "blocks":
        by_block(model, "aot_eager")
    model = wrapped(model, layout, None, "")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    settings: dict[str, Any] = {"init_scale": 2.0**15} if level == "fp16" else {}
    amp = initialize(model, optimizer, level, module_precision={"1": pin}, **settings)
    call = torch.compile(amp.model, backend="aot_eager") if way == "model" else amp.model
    with amp.autocast():
        out = call(X)
    amp.backward(loss_of(out))
    norm = amp.clip_grad_norm_(1e9).item()
    assert amp.step()
    return norm


CASES_ON_RANKS = [
    ("DDP", "bf16", "fp32"),
    ("DDP", "fp16", "fp32"),
    ("DDP", "fp16", "bf16"),
    ("FSDP1", "bf16", "fp32"),
    ("FSDP1", "fp16", "fp32"),
    ("FSDP1", "fp16", "bf16"),
    ("FSDP2", "bf16", "fp32"),
    ("FSDP2", "fp16", "fp32"),
    ("FSDP2", "fp16", "bf16"),
]


# Every rank imports the compiler, which takes long.
@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(("layout", "level", "pin"), CASES_ON_RANKS)
def test_a_compiled_backward_is_the_eager_one_in_every_layout(layout, level, pin):
    with warnings.catch_warnings():
        # Warnings of torch.compile are errors on the ranks.
        warnings.simplefilter("ignore")
        expected = norm_of_a_step("eager", layout, level, pin)
        for way in ("blocks", "model"):
            norm = norm_of_a_step(way, layout, level, pin)
            assert norm == pytest.approx(expected, rel=1e-6)


# -- torch's setting ---------------------------------------------------------------------------


def test_torchs_setting_is_changed_in_a_region_and_restored():
    region = autocast("cpu")
    with region, region:
        assert config.backward_pass_autocast == "off"
        with autocast("cpu", FP16), autocast("cpu", enabled=False):
            assert config.backward_pass_autocast == "off"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: config.backward_pass_autocast).result() == SETTING
    assert config.backward_pass_autocast == SETTING
    with autocast("cpu", enabled=False):
        assert config.backward_pass_autocast == SETTING
    outer = autocast("cpu")
    inner = autocast("cpu", FP16)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)  # out of order
    assert config.backward_pass_autocast == SETTING
    with autocast("cpu"):
        state = AutocastState.capture()
    with contextlib.suppress(ZeroDivisionError), state.apply():
        assert config.backward_pass_autocast == "off"
        _ = 1 / 0
    assert config.backward_pass_autocast == SETTING


def test_a_setting_of_the_users_stays():
    with config.patch(backward_pass_autocast=[{"device_type": "cpu", "dtype": BF16}]):
        setting = config.backward_pass_autocast
        with autocast("cpu"):
            assert config.backward_pass_autocast == setting
        assert config.backward_pass_autocast == setting


# -- where it cannot be had --------------------------------------------------------------------


class Block(nn.Module):
    """A module with a part in another precision, which has a name in it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = head

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


@pytest.fixture
def none_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with no warning given, as a new process does."""
    monkeypatch.setattr(compiled_backward, "_warned", set())


def warned(head: nn.Module, region: AbstractContextManager[Any], calls: int = 2) -> list[str]:
    """Return the warnings of compiling a block with a head, again and again."""
    block = Block(head)
    block.compile(backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            torch._dynamo.reset()
            with region:
                block(X)
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if "backward pass of" in message]


@pytest.mark.usefixtures("none_warned")
@pytest.mark.parametrize(
    ("head", "pattern"),
    [
        pytest.param(
            lambda: set_module_precision(nn.Linear(4, 4), "fp32"),
            r"Linear 'head', .* torch\.float32",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: set_module_precision(nn.Linear(4, 4), "fp16"),
            r"Linear 'head', .* torch\.float16",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: Inner(enabled=False),
            r"autocast\(enabled=False\) in the module 'head'",
            marks=pytest.mark.slow,
        ),
        (lambda: Inner(FP16), r"autocast\('cpu', torch\.float16\) in the module 'head'"),
    ],
)
def test_a_region_of_torchs_own_class_warns_once_and_names_the_module(head, pattern):
    (message,) = warned(head(), torch.autocast("cpu"))
    assert re.search(pattern, message)
    assert "is compiled in torch.bfloat16" in message
    assert "Enter distamp.autocast" in message


@pytest.mark.slow
@pytest.mark.usefixtures("none_warned")
def test_there_is_no_warning_where_the_precision_is_right():
    head = pinned_linear("fp32")
    with torch.no_grad():
        assert warned(head, torch.autocast("cpu"), 1) == []
    with config.patch(backward_pass_autocast="off"):
        assert warned(head, torch.autocast("cpu"), 1) == []
    half_precision_head = pinned_linear("bf16")
    assert warned(half_precision_head, torch.autocast("cpu"), 1) == []
    assert warned(head, autocast("cpu"), 1) == []
    assert warned(head, autocast("cpu", enabled=False), 1) == []


@pytest.mark.slow
@pytest.mark.usefixtures("none_warned")
def test_a_torch_without_the_setting_warns_in_every_region(monkeypatch):
    monkeypatch.setattr(compiled_backward, "_NAME", "a_setting_torch_has_not")
    (message,) = warned(pinned_linear("fp32"), autocast("cpu"))
    assert f"torch {torch.__version__} has no setting for that" in message
    assert "Linear 'head'" in message

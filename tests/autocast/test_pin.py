"""set_module_precision gives one module another precision than the model around it."""

import copy
import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim.swa_utils import AveragedModel

from distamp import AutocastState, autocast, set_module_precision
from tests.autocast.counting import Calls, tensors_in
from tests.quick_cases import quick_cases

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def pinned(*dtypes: Any) -> nn.Sequential:
    """Return three layers; the middle one is pinned to one dtype after another."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for dtype in dtypes:
        set_module_precision(net[1], dtype)
    return net


def output_dtypes(net: nn.Sequential) -> list[torch.dtype]:
    """Call the layers one after another in a bfloat16 region; return the dtypes of outputs."""
    dtypes, x = [], X
    with autocast("cpu"):
        for module in net:
            x = module(x)
            dtypes.append(x.dtype)
    return dtypes


def assert_equal_grads(net: nn.Module, reference: nn.Module, dtype: torch.dtype) -> None:
    """Assert that a net has the gradients of a reference, cast to a dtype."""
    for param, expected in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad.to(dtype))  # type: ignore[union-attr, arg-type]


def test_a_pin_is_bit_identical_to_a_region_and_a_cast():
    net, reference = pinned("fp32"), pinned()
    with autocast("cpu"):
        net(X).float().sum().backward()
        hidden = reference[0](X)
        with torch.autocast("cpu", enabled=False):
            hidden = reference[1](hidden.float())
        reference[2](hidden).float().sum().backward()
    assert_equal_grads(net, reference, FP32)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", FP16), ("bf16", BF16), (FP16, FP16)])
def test_a_half_precision_holds_wherever_the_module_is_called(name, dtype):
    layer = set_module_precision(nn.Linear(4, 4), name)
    assert layer(X).dtype is dtype
    with autocast("cpu", enabled=False):
        assert layer(X).dtype is dtype
    assert set_module_precision(layer, None)(X).dtype is FP32


def test_a_pin_holds_for_the_modules_inside():
    net, inner_dtypes = nn.Sequential(pinned(), nn.Linear(4, 4)), []
    for layer in net[0]:
        layer.register_forward_hook(lambda module, args, out: inner_dtypes.append(out.dtype))
    for dtype in ("fp32", "fp16", "fp32"):
        set_module_precision(net[0], dtype)
    assert output_dtypes(net) == [FP32, BF16]
    assert inner_dtypes == [FP32, FP32, FP32]


def test_none_undoes_all_pins_and_may_be_repeated():
    net = nn.Sequential(pinned(), nn.Linear(4, 4))
    for dtype in ("fp32", "fp16", "fp32"):
        set_module_precision(net[0], dtype)
    for _ in range(2):
        set_module_precision(net[0], None)
        assert output_dtypes(net) == [BF16, BF16]
        assert type(net[0]) is nn.Sequential


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))  # type: ignore[no-any-return]


def averaged(module: nn.Module) -> nn.Module:
    return AveragedModel(module).module


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled, averaged])
def test_a_copy_keeps_the_pin(copy_of):
    twin = copy_of(pinned("fp32"))
    assert output_dtypes(twin) == [BF16, FP32, BF16]
    assert isinstance(twin[1], nn.Linear)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled, averaged])
def test_a_copy_has_weights_of_its_own(copy_of):
    net = pinned("fp32")
    twin = copy_of(net)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert output_dtypes(twin) == output_dtypes(net)
    assert net(X).any()
    assert not twin(X).any()


def input_dtypes(*tensors: Tensor) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


def test_a_pin_casts_half_precision_inputs_and_no_others():
    module = set_module_precision(Calls(input_dtypes), "fp32")
    dtypes = module(X.bfloat16(), torch.arange(2), X.double(), X.half())
    assert dtypes == [FP32, torch.int64, torch.float64, FP32]


class HalfModel:
    """A float32 norm in a model of half precision, and its output in float32.

    Attributes:
        layer: A layer of the model.
        norm: The norm, pinned to float32.
        hidden: The input of the norm, in the dtype of the model.
        expected: The output of the norm in float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.layer = nn.Linear(4, 4).to(dtype)
        self.norm = set_module_precision(nn.LayerNorm(4), "fp32")
        # A weight that half precision would round to 1.
        self.norm.weight.data += 1e-5
        self.hidden = self.layer(X.to(dtype)).detach()
        layer_norm = torch.nn.functional.layer_norm
        self.expected = layer_norm(self.hidden.float(), (4,), self.norm.weight, self.norm.bias)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_a_float32_norm_returns_the_half_precision_of_its_input(dtype):
    model = HalfModel(dtype)
    out = model.norm(model.hidden)
    assert torch.equal(out, model.expected.to(dtype))
    assert model.layer(out).dtype is dtype
    assert model.norm(X).dtype is FP32, "a float32 input has a float32 output"


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_a_float32_norm_returns_float32_in_a_region(dtype):
    model = HalfModel(dtype)
    with autocast("cpu", dtype):
        assert model.norm(model.hidden).dtype is FP32


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_a_float32_norm_returns_float32_with_keep_output(dtype):
    model = HalfModel(dtype)
    norm = set_module_precision(model.norm, "fp32:keep_output")
    assert torch.equal(norm(model.hidden), model.expected)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_a_pinned_embedding_returns_the_dtype_of_the_model(dtype):
    table = set_module_precision(nn.Embedding(4, 4), "fp32", model_dtype=dtype)
    assert table(torch.arange(2)).dtype is dtype


class Block(nn.Module):
    """A module that sums each tensor of its arguments, and returns the sums in float32."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        sums = [tensor.sum().float() for tensor in tensors_in((args, kwargs))]
        return torch.stack(sums)


TIMESTEP, TOKENS, DOUBLE = torch.ones(2), torch.arange(2), torch.ones(2).double()
HALF, BFLOAT = X.half(), X.bfloat16()


def hidden_first(block: nn.Module) -> Tensor:
    return block(BFLOAT, TIMESTEP)  # type: ignore[no-any-return]


def timestep_first(block: nn.Module) -> Tensor:
    return block(TIMESTEP, BFLOAT)  # type: ignore[no-any-return]


def float16_hidden(block: nn.Module) -> Tensor:
    return block(TIMESTEP, HALF)  # type: ignore[no-any-return]


def hidden_by_keyword(block: nn.Module) -> Tensor:
    return block(TIMESTEP, hidden=BFLOAT)  # type: ignore[no-any-return]


def only_keywords(block: nn.Module) -> Tensor:
    return block(time=TIMESTEP, hidden=BFLOAT)  # type: ignore[no-any-return]


def nested_hidden(block: nn.Module) -> Tensor:
    containers = {"hidden": [None, (BFLOAT,)]}
    return block(TIMESTEP, containers)  # type: ignore[no-any-return]


def both_halves(block: nn.Module) -> Tensor:
    return block(TIMESTEP, HALF, BFLOAT)  # type: ignore[no-any-return]


def only_float32(block: nn.Module) -> Tensor:
    return block(TIMESTEP, X)  # type: ignore[no-any-return]


DTYPES_OF_CALLS = {
    hidden_first: BF16,
    timestep_first: BF16,
    float16_hidden: FP16,
    hidden_by_keyword: BF16,
    only_keywords: BF16,
    nested_hidden: BF16,
    both_halves: FP16,
    only_float32: FP32,
}
CALLS = list(itertools.product(DTYPES_OF_CALLS, [False, True]))
# A compilation takes long.
QUICK_CALLS = [(call, False) for call in DTYPES_OF_CALLS]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("call", "compiled"), quick_cases(CALLS, QUICK_CALLS))
def test_the_output_has_the_half_precision_of_the_inputs(call, compiled):
    dtype = DTYPES_OF_CALLS[call]
    block = set_module_precision(Block(), "fp32")
    if compiled:
        block.compile(backend="aot_eager")
    assert call(block).dtype is dtype
    with autocast("cpu"):
        assert call(block).dtype is FP32
    set_module_precision(block, "fp32:keep_output")
    assert call(block).dtype is FP32


def pinned_block(model_dtype: torch.dtype | None) -> nn.Module:
    """Return a block with bfloat16 weights in a model of a dtype, pinned to float32."""
    block = Block()
    block.weight = nn.Parameter(torch.ones(2, dtype=BF16))
    return set_module_precision(block, "fp32", model_dtype=model_dtype)


def test_without_half_precision_inputs_the_output_has_the_dtype_of_the_model():
    block = pinned_block(FP16)
    assert block(TOKENS).dtype is FP16


def test_without_a_model_dtype_the_output_has_the_dtype_of_the_weights():
    block = pinned_block(None)
    assert block(TOKENS).dtype is BF16


def test_the_weights_decide_between_inputs_of_both_half_precisions():
    block = pinned_block(None)
    assert block(HALF, BFLOAT).dtype is BF16


def test_the_model_decides_between_inputs_of_both_half_precisions():
    block = pinned_block(FP16)
    assert block(BFLOAT, HALF).dtype is FP16


def test_the_output_of_a_float64_input_stays_in_full_precision():
    block = pinned_block(FP16)
    assert block(DOUBLE, TOKENS).dtype is FP32


def test_a_half_precision_pin_casts_back_to_the_other_half_precision():
    product = set_module_precision(Calls(lambda x, y: torch.mm(x, y.T)), "bf16")
    assert product(X, X.half()).dtype is FP16
    assert product(X.bfloat16(), X.half()).dtype is FP16
    assert product(X, X.bfloat16()).dtype is BF16


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_a_float32_module_computes_with_its_half_precision_weights_in_float32(dtype):
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)).to(dtype)
    reference = copy.deepcopy(net).float()
    set_module_precision(net, "fp32:keep_output")
    x = X.to(dtype)
    out, expected = net(x), reference(x.float())
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_equal_grads(net, reference, dtype)
    reference.to(dtype)
    for buffer, expected_buffer in zip(net.buffers(), reference.buffers(), strict=True):
        assert torch.equal(buffer, expected_buffer)


class Mark:
    """A base that another library adds to the class of a module."""


def add_class(module: nn.Module) -> None:
    """Replace the class of a module by a derived one, as ``fully_shard`` does."""
    cls = type(module)
    module.__class__ = type(f"Sharded{cls.__name__}", (Mark, cls), {})


def add_parametrization(module: nn.Module) -> None:
    torch.nn.utils.parametrizations.weight_norm(module)


def add_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def is_changed(module: nn.Module, change: Callable[[nn.Module], None]) -> bool:
    """Return whether a module has the change that a function made."""
    if change is add_class:
        return isinstance(module, Mark)
    if change is add_parametrization:
        return hasattr(module, "parametrizations")
    return len(module._forward_hooks) > 0


CHANGES = [add_class, add_parametrization, add_hook]


@pytest.fixture(params=["pin first", "change first"])
def changed_module(request: pytest.FixtureRequest, change: Any) -> nn.Module:
    """A pinned module that another library changed, before the pin or after it."""
    module = nn.Linear(4, 4)
    if request.param == "pin first":
        set_module_precision(module, "fp32")
        change(module)
    else:
        change(module)
        set_module_precision(module, "fp32")
    return module


@pytest.mark.parametrize("change", CHANGES)
def test_a_pin_can_be_undone_and_set_again_on_a_changed_module(change, changed_module):
    for module in (changed_module, copy.deepcopy(changed_module)):
        with autocast("cpu"):
            assert module(X).dtype is FP32
            assert set_module_precision(module, None)(X).dtype is BF16
            assert set_module_precision(module, "fp32")(X).dtype is FP32


@pytest.mark.parametrize("change", CHANGES)
def test_the_end_of_a_pin_leaves_the_change_of_another_library(change, changed_module):
    classes = type(changed_module).__mro__
    hooks = dict(changed_module._forward_hooks)
    set_module_precision(changed_module, None)
    for candidate in CHANGES:
        if candidate is not add_hook:
            assert is_changed(changed_module, candidate) is (candidate is change)
    assert dict(changed_module._forward_hooks) == hooks
    assert type(changed_module) in classes


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", quick_cases([FP32, FP16, BF16], quick=[FP32]))
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 breaks the graph at a region")
def test_a_pinned_module_compiles_in_one_graph(dtype):
    net = pinned("fp32").to(dtype)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    x = X.to(dtype)
    with autocast("cpu", enabled=dtype is FP32):
        torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=0)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match=r"must be one of .*, got 'fp8'. "):
        set_module_precision(nn.Linear(1, 1), "fp8")


def test_a_function_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function"):
        set_module_precision(torch.nn.functional.softmin, "fp32")  # type: ignore[type-var]


def test_a_module_with_a_replaced_forward_is_refused():
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="forward"):
        set_module_precision(layer, "fp32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_pin_holds_on_the_devices_of_all_its_inputs():
    module = set_module_precision(Calls(lambda lengths, x: x @ x), "fp32")
    # The tensors are fake, because this machine has no second device.
    state = replace(AutocastState.capture(), devices=(("cuda", True, BF16),))
    with FakeTensorMode(), state.apply():
        x: Tensor = torch.empty(2, 2, device="cuda")
        assert (x @ x).dtype is BF16
        assert module(torch.ones(2), x).dtype is FP32

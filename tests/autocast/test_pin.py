"""set_module_precision: one module in a precision of its own."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from distamp import AutocastState, autocast, set_module_precision
from tests.autocast.counting import Calls

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def pinned(*dtypes: Any) -> nn.Sequential:
    """Three layers, the middle one pinned to one dtype after the other."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for dtype in dtypes:
        set_module_precision(net[1], dtype)
    return net


def dtypes(net: nn.Sequential) -> list[torch.dtype]:
    found, x = [], X
    with autocast("cpu"):
        for module in net:
            x = module(x)
            found.append(x.dtype)
    return found


def test_a_pin_is_a_region_and_a_cast_to_the_bit():
    ours, plain = pinned("fp32"), pinned()
    with autocast("cpu"):
        ours(X).float().sum().backward()
        hidden = plain[0](X)
        with torch.autocast("cpu", enabled=False):
            hidden = plain[1](hidden.float())
        plain[2](hidden).float().sum().backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "dtype"), [("fp16", FP16), ("bf16", BF16), (FP16, FP16)])
def test_a_half_precision_holds_wherever_the_module_is_called(name, dtype):
    layer = set_module_precision(nn.Linear(4, 4), name)
    assert layer(X).dtype is dtype
    with autocast("cpu", enabled=False):
        assert layer(X).dtype is dtype
    assert set_module_precision(layer, None)(X).dtype is FP32


def test_a_pin_holds_for_the_modules_inside_and_none_undoes_all():
    net, seen = nn.Sequential(pinned(), nn.Linear(4, 4)), []
    for layer in net[0]:
        layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    for dtype in ("fp32", "fp16", "fp32"):
        set_module_precision(net[0], dtype)
    assert (dtypes(net), seen) == ([FP32, BF16], [FP32] * 3)
    for _ in range(2):
        set_module_precision(net[0], None)
        assert (dtypes(net), type(net[0])) == ([BF16, BF16], nn.Sequential)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda it: pickle.loads(pickle.dumps(it)),
        lambda it: AveragedModel(it).module,
    ],
)
def test_copies_keep_the_pin_and_their_own_weights(copied):
    net = pinned("fp32")
    twin = copied(net)
    with torch.no_grad():
        for each in twin.parameters():
            each.zero_()
    assert dtypes(twin) == dtypes(net) == [BF16, FP32, BF16]
    assert isinstance(twin[1], nn.Linear)
    assert net(X).any()


def test_integer_and_float64_inputs_are_handed_on():
    module = set_module_precision(Calls(lambda *tensors: [each.dtype for each in tensors]), "fp32")
    given = X.bfloat16(), torch.arange(2), X.double(), X.half()
    assert module(*given) == [FP32, torch.int64, torch.float64, FP32]


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_what_half_precision_brings_in_goes_out_in_it_unless_kept_or_in_a_region(dtype):
    layer, norm = nn.Linear(4, 4).to(dtype), set_module_precision(nn.LayerNorm(4), "fp32")
    with torch.no_grad():
        norm.weight += 1e-5  # what the model's dtype cannot hold
        x = layer(X.to(dtype))
        wanted = torch.nn.functional.layer_norm(x.float(), (4,), norm.weight, norm.bias)
        assert torch.equal(norm(x), wanted.to(dtype))
        assert (layer(norm(x)).dtype, norm(X).dtype) == (dtype, FP32)
        with autocast("cpu", dtype):
            assert norm(x).dtype is FP32
        assert torch.equal(set_module_precision(norm, "fp32:keep_output")(x), wanted)
        table = set_module_precision(nn.Embedding(4, 4), "fp32", model_dtype=dtype)
        assert table(torch.arange(2)).dtype is dtype


class Block(nn.Module):
    """Sums each tensor of its arguments, in whatever container, and returns the sums in float32."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        return torch.stack([each.sum().float() for each in tensors])


TIMESTEP, TOKENS, DOUBLE = torch.ones(2), torch.arange(2), torch.ones(2).double()
#: A call of a module pinned to fp32 outside of a region, and the dtype of its output.
CALLS: dict[str, tuple[Callable[[nn.Module], Tensor], torch.dtype]] = {
    "hidden first": (lambda block: block(X.bfloat16(), TIMESTEP), BF16),
    "timestep first": (lambda block: block(TIMESTEP, X.bfloat16()), BF16),
    "float16": (lambda block: block(TIMESTEP, X.half()), FP16),
    "by keyword": (lambda block: block(TIMESTEP, hidden=X.bfloat16()), BF16),
    "only keywords": (lambda block: block(time=TIMESTEP, hidden=X.bfloat16()), BF16),
    "nested": (lambda block: block(TIMESTEP, {"hidden": [None, (X.bfloat16(),)]}), BF16),
    "both halves": (lambda block: block(TIMESTEP, X.half(), X.bfloat16()), FP16),
    "only float32": (lambda block: block(TIMESTEP, X), FP32),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_half_precision_among_the_inputs_is_that_of_the_output(name, compiled):
    call, dtype = CALLS[name]
    block = set_module_precision(Block(), "fp32")
    if compiled:
        block.compile(backend="aot_eager")
    assert call(block).dtype is dtype
    with autocast("cpu"):
        assert call(block).dtype is FP32
    assert call(set_module_precision(block, "fp32:keep_output")).dtype is FP32


@pytest.mark.parametrize(
    ("inputs", "model_dtype", "dtype"),
    [
        ((TOKENS,), None, BF16),
        ((TOKENS,), FP16, FP16),
        ((X.half(), X.bfloat16()), None, BF16),
        ((X.bfloat16(), X.half()), FP16, FP16),
        ((DOUBLE, TOKENS), FP16, FP32),
    ],
)
def test_the_model_around_and_then_the_weights_decide_where_inputs_do_not(
    inputs, model_dtype, dtype
):
    block = Block()
    block.weight = nn.Parameter(torch.ones(2, dtype=BF16))
    set_module_precision(block, "fp32", model_dtype=model_dtype)
    assert block(*inputs).dtype is dtype


def test_a_half_precision_pin_casts_back_to_the_other_half_precision():
    product = set_module_precision(Calls(lambda x, y: torch.mm(x, y.T)), "bf16")
    assert product(X, X.half()).dtype is FP16
    assert product(X.bfloat16(), X.half()).dtype is FP16
    assert product(X, X.bfloat16()).dtype is BF16


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_half_precision_weights_of_a_module_in_fp32_are_taken_in_fp32(dtype):
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)).to(dtype)
    head, plain = (
        set_module_precision(copy.deepcopy(net), "fp32:keep_output"),
        copy.deepcopy(net).float(),
    )
    found, wanted = head(X.to(dtype)), plain(X.to(dtype).float())
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for one, other in zip(head.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad.to(dtype))  # type: ignore[union-attr, arg-type]
    assert all(map(torch.equal, head.buffers(), plain.to(dtype).buffers()))


def sharded(module: nn.Module) -> Any:
    """A class over the module's own, as fully_shard lays one."""
    cls = type(module)
    module.__class__ = type(f"Sharded{cls.__name__}", (Mark, cls), {})
    return module


class Mark:
    """What another library lays over a module's class."""


OVER: dict[str, Any] = {
    "a class": sharded,
    "a parametrization": torch.nn.utils.parametrizations.weight_norm,
    "a hook": lambda module: module.register_forward_hook(lambda *_: None) and module,
}


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("first", [True, False])
def test_what_others_lay_over_a_pin_or_under_it_stays(over, first):
    module = nn.Linear(4, 4)
    steps = [lambda: set_module_precision(module, "fp32"), lambda: OVER[over](module)]
    for step in steps if first else steps[::-1]:
        step()
    kinds, hooks = type(module).__mro__, dict(module._forward_hooks)
    for each in (module, copy.deepcopy(module)):
        with autocast("cpu"):
            assert each(X).dtype is FP32
            assert set_module_precision(each, None)(X).dtype is BF16
            assert set_module_precision(each, "fp32")(X).dtype is FP32
            set_module_precision(each, None)
    stays = (isinstance(module, Mark), hasattr(module, "parametrizations"))
    assert stays == (over == "a class", over == "a parametrization")
    assert dict(module._forward_hooks) == hooks
    assert type(module) in kinds


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 breaks the graph at a region")
def test_a_pinned_module_compiles_in_one_graph(dtype):
    net = pinned("fp32").to(dtype)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with autocast("cpu", enabled=dtype is FP32):
        torch.testing.assert_close(compiled(X.to(dtype)), net(X.to(dtype)), rtol=0, atol=0)


def test_mistakes_are_named():
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    wrong: list[tuple[Any, str, type[Exception], str]] = [
        (nn.Linear(1, 1), "fp8", ValueError, "must be one of .*, got 'fp8'. "),
        (torch.nn.functional.softmin, "fp32", TypeError, r"torch\.nn\.Module, got function"),
        (layer, "fp32", ValueError, "forward"),
    ]
    for module, dtype, error, says in wrong:
        with pytest.raises(error, match=says):
            set_module_precision(module, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_pin_holds_on_the_devices_of_all_its_inputs():
    module = set_module_precision(Calls(lambda lengths, x: x @ x), "fp32")
    # Fake, as a CPU stands beside no other device here.
    state = replace(AutocastState.capture(), devices=(("cuda", True, BF16),))
    with FakeTensorMode(), state.apply():
        x: Tensor = torch.empty(2, 2, device="cuda")
        assert ((x @ x).dtype, module(torch.ones(2), x).dtype) == (BF16, FP32)

"""pin_precision: one module in a precision of its own."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from distamp import AutocastState, autocast, pin_precision

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def dtypes(net: nn.Sequential) -> list[torch.dtype]:
    found = []
    x = X
    with autocast("cpu"):
        for module in net:
            x = module(x)
            found.append(x.dtype)
    return found


def test_one_module_runs_in_fp32_and_its_neighbours_do_not() -> None:
    net = model()
    pin_precision(net[1], "fp32")
    assert dtypes(net) == [BF16, FP32, BF16]


def test_by_hand_torch_needs_a_region_and_a_cast() -> None:
    """What the pin does, written out: results and gradients are the same bits."""
    pinned, plain = model(), model()
    pin_precision(pinned[1], "fp32")
    with autocast("cpu"):
        pinned(X).float().sum().backward()
        hidden = plain[0](X)
        with torch.autocast("cpu", enabled=False):
            hidden = plain[1](hidden.float())
        plain[2](hidden).float().sum().backward()
    for ours, theirs in zip(pinned.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours.grad, Tensor)
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", FP16), ("bf16", BF16), (FP16, FP16)])
def test_a_half_precision_holds_outside_of_a_region_too(name: str, dtype: torch.dtype) -> None:
    layer = pin_precision(nn.Linear(4, 4), name)
    assert layer(X).dtype is dtype
    assert pin_precision(layer, None)(X).dtype is FP32


def test_a_pin_holds_for_the_modules_inside() -> None:
    net = nn.Sequential(model(), nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    for layer in net[0]:
        layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    pin_precision(net[0], "fp32")
    assert dtypes(net) == [FP32, BF16]
    assert seen == [FP32] * 3


def test_none_undoes_the_last_pin_and_those_before() -> None:
    net = model()
    for dtype in ("fp32", "fp16", "fp32"):
        pin_precision(net[1], dtype)
    assert repr(net) == repr(model())
    assert isinstance(net[1], nn.Linear)
    assert dtypes(net) == [BF16, FP32, BF16]
    for _ in range(2):
        pin_precision(net[1], None)
        assert dtypes(net) == [BF16] * 3
        assert type(net[1]) is nn.Linear


def test_copies_pickles_and_averages_keep_the_pin_and_their_own_weights() -> None:
    net = model()
    pin_precision(net[1], "fp32")
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), averaged.module):
        with torch.no_grad():
            for each in twin.parameters():
                each.zero_()
        assert dtypes(twin) == [BF16, FP32, BF16]
        with autocast("cpu"):
            assert not twin(X).any()
            assert net(X).any()
    averaged.update_parameters(net)  # The first one copies.
    for ours, theirs in zip(averaged.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        theirs.data.zero_()
    averaged.update_parameters(net)
    assert torch.equal(averaged.module[1].weight, model()[1].weight / 2)
    assert dtypes(averaged.module) == [BF16, FP32, BF16]


def test_integer_and_float64_inputs_are_handed_on() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor, *, index: Tensor) -> tuple[torch.dtype, torch.dtype]:
            return x.dtype, index.dtype

    module = pin_precision(Module(), "fp32")
    assert module(X.bfloat16(), index=torch.arange(2)) == (FP32, torch.int64)
    assert module(X.double(), index=X.half()) == (torch.float64, FP32)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_pinned_module_compiles_in_one_graph(backend: str) -> None:
    net = model()
    pin_precision(net[1], "fp32")
    pin_precision(net[2], "fp32")
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with autocast("cpu"):
        assert torch.equal(compiled(X), net(X))
        assert compiled(X).dtype is FP32


def test_mistakes() -> None:
    with pytest.raises(
        ValueError, match="precision must be 'fp32', 'fp16' or 'bf16', got 'fp8'; did you mean"
    ):
        pin_precision(nn.Linear(1, 1), "fp8")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        pin_precision(torch.nn.functional.softmin, "fp32")  # type: ignore[arg-type]
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"before .* its forward replaced"):
        pin_precision(layer, "fp32")


def test_a_tied_weight_may_be_used_by_a_pinned_module_in_a_region_of_another_dtype() -> None:
    head, pinned = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    pinned.weight = head.weight
    pin_precision(pinned, "bf16")
    with autocast("cpu", FP16):
        found = [head(X).dtype, pinned(X).dtype, head(X).dtype]
    assert found == [FP16, BF16, FP16]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_pin_holds_on_the_devices_of_all_its_inputs() -> None:
    class Lengths(nn.Module):
        def forward(self, lengths: Tensor, x: Tensor) -> Tensor:
            return x @ x

    module = Lengths()
    pin_precision(module, "fp32")
    # Fake, as a CPU stands beside no other device here.
    state = replace(AutocastState.capture(), devices=(("cuda", True, BF16),))
    with FakeTensorMode(), state.apply():
        x = torch.empty(2, 2, device="cuda")
        assert (x @ x).dtype is BF16
        assert module(torch.ones(2), x).dtype is FP32


class WithoutCache(nn.Linear):
    """Has something that cannot be pickled, and says what can."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.cache = (each for each in ())

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "cache"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_pinned_module_is_copied_by_its_own_getstate(copied: Any) -> None:
    layer = WithoutCache()
    pin_precision(layer, "fp32")
    twin = copied(layer)
    assert not hasattr(twin, "cache")
    assert isinstance(twin, WithoutCache)
    with autocast("cpu"):
        assert torch.equal(twin(X), layer(X))
        assert twin(X).dtype is FP32

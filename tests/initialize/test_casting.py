"""A model cast to a lower precision: what is cast, what stays, and what goes in and comes out."""

import copy
import io
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from distamp import cast_model
from distamp.errors import SettingError
from tests.initialize.nets import net

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


class OwnBatchNorm(nn.BatchNorm1d):
    pass


BATCHNORMS = {
    "1d": lambda: nn.BatchNorm1d(3),
    "2d": lambda: nn.BatchNorm2d(3),
    "3d": lambda: nn.BatchNorm3d(3),
    "synced": lambda: nn.SyncBatchNorm(3),
    "a subclass": lambda: OwnBatchNorm(3),
    "no affine parameters": lambda: nn.BatchNorm1d(3, affine=False),
    "no statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
}


def floating(module: nn.Module) -> set[torch.dtype]:
    tensors = [*module.parameters(), *module.buffers()]
    return {t.dtype for t in tensors if t.is_floating_point()}


@pytest.mark.parametrize(
    ("level", "overrides", "dtype", "norm"),
    [
        ("O2", {}, F16, F32),
        ("O3", {}, F16, F16),
        ("bf16-O2", {}, BF16, F32),
        ("bf16-O3", {}, BF16, BF16),
        ("O2", {"keep_batchnorm_fp32": "False"}, F16, F16),
        ("O0", {}, F32, F32),
        ("O1", {}, F32, F32),
        ("bf16", {}, F32, F32),
    ],
)
def test_what_is_cast_and_what_stays(level, overrides, dtype, norm):
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.GRU(3, 2))
    model[0].register_buffer("seen", torch.zeros(2))
    model[0].register_buffer("count", torch.arange(2))
    norms = nn.Sequential(*(make() for make in BATCHNORMS.values()))
    assert cast_model(nn.Sequential(model, norms), level, **overrides)[0] is model
    for module in model:
        assert floating(module) == {dtype}
    for module in norms:
        assert floating(module) <= {norm}
    assert model[0].count.dtype is norms[0].num_batches_tracked.dtype is torch.int64


class Both(NamedTuple):
    first: Tensor
    second: Tensor


class Echo(nn.Module):
    """Returns what it is given, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return args, kwargs


def test_floating_inputs_are_cast_in_and_outputs_out_however_nested():
    model = cast_model(Echo(), "O2")
    x, count = torch.ones(2), torch.arange(2)
    returned = model(x, [count, {"deep": x.double()}], both=Both(x, count), name="text")
    for dtype, ((one, (two, deep)), given) in ((F16, model.seen), (F32, returned)):
        assert one.dtype is deep["deep"].dtype is given["both"].first.dtype is dtype
        assert two.dtype is given["both"].second.dtype is torch.int64
        assert given["name"] == "text"


@pytest.mark.parametrize("level", ["O2", "bf16-O2"])
def test_a_mask_of_the_lowest_number_stays_finite_and_infinities_stay(level):
    model = cast_model(Echo(), level)
    model(torch.tensor([torch.finfo(F32).min, -torch.inf, 1.0]))
    half = model.weight.dtype
    ((mask,), _) = model.seen
    assert mask.tolist() == [torch.finfo(half).min, -torch.inf, 1.0]


def test_gradients_flow_back_through_both_casts():
    model = cast_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "O2")
    x = torch.randn(32, 3, requires_grad=True)
    model(x).square().sum().backward()
    norm, linear = model[1], model[0]
    assert (x.grad.dtype, norm.weight.grad.dtype, linear.weight.grad.dtype) == (F32, F32, F16)
    reference = nn.functional.linear(x.half(), linear.weight, linear.bias).float()
    torch.testing.assert_close(norm.running_mean, 0.1 * reference.mean(0), rtol=1e-2, atol=1e-2)


def test_parameters_stay_the_same_objects_and_tied_ones_tied():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    weight = model[1].weight = model[0].weight
    cast_model(model, "O2")
    assert model[0].weight is model[1].weight is weight
    assert weight.dtype is F16


def test_copies_and_pickles_cast_as_the_original_does_and_twice_is_once():
    model = cast_model(cast_model(nn.Linear(3, 2), "O2"), "O2")
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    x = torch.randn(4, 3)
    wanted = nn.functional.linear(x.half(), model.weight, model.bias).float()
    for other in (model, copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert torch.equal(other(x), wanted)


@pytest.mark.parametrize("other", ["O3", "bf16-O2"])
def test_a_cast_model_cannot_become_another(other):
    model = cast_model(net(), "O2")
    with pytest.raises(SettingError, match="build the model again"):
        cast_model(model, other)

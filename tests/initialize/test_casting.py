"""A model cast to a lower precision: what is cast, what stays, and what goes in and comes out."""

from __future__ import annotations

import copy
import io
from typing import NamedTuple

import pytest
import torch
from torch import nn

from distamp import Precision, cast_model
from distamp.errors import SettingError
from tests.initialize.nets import net

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF_LEVELS = {"O2": F16, "O3": F16, "bf16-O2": BF16, "bf16-O3": BF16}


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


def floating_dtypes(module: nn.Module) -> set[torch.dtype]:
    tensors = [*module.parameters(), *module.buffers()]
    return {t.dtype for t in tensors if t.is_floating_point()}


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_all_but_batch_norms_is_cast(level):
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.BatchNorm1d(3), nn.GRU(3, 2))
    model[0].register_buffer("seen", torch.zeros(2))
    cast_model(model, level)
    keeps = Precision.of(level).keep_batchnorm_fp32
    for index, module in enumerate(model):
        wanted = F32 if index == 2 and keeps else HALF_LEVELS[level]
        assert floating_dtypes(module) == {wanted}


@pytest.mark.parametrize("kind", BATCHNORMS)
def test_every_kind_of_batch_norm_stays_in_fp32_at_o2_and_none_at_o3(kind):
    for level, wanted in (("O2", F32), ("O3", F16)):
        made = BATCHNORMS[kind]()
        cast_model(nn.Sequential(made), level)
        assert floating_dtypes(made) <= {wanted}


def test_counts_and_indices_keep_their_dtype():
    model = cast_model(nn.Sequential(nn.BatchNorm1d(3)), "O3")
    assert model[0].num_batches_tracked.dtype is torch.int64


@pytest.mark.parametrize("level", ["O0", "O1", "bf16"])
def test_a_level_with_a_float32_model_leaves_it_as_it_is(level):
    model = net()
    assert cast_model(model, level) is model
    assert floating_dtypes(model) == {F32}
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class Both(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Echo(nn.Module):
    """Returns what it is given, and says which dtypes it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return args, kwargs


def test_floating_inputs_are_cast_in_and_outputs_out_however_nested():
    model = cast_model(Echo(), "O2")
    x, count = torch.ones(2), torch.arange(2)
    args, kwargs = model(x, [count, {"deep": x.double()}], both=Both(x, count), name="text")
    (one, (two, deep)), given = model.seen
    assert one.dtype is deep["deep"].dtype is given["both"].first.dtype is F16
    assert two.dtype is given["both"].second.dtype is torch.int64
    assert given["name"] == "text"
    assert args[0].dtype is args[1][1]["deep"].dtype is kwargs["both"].first.dtype is F32
    assert isinstance(kwargs["both"], Both)
    assert args[1][0].dtype is torch.int64


def test_gradients_flow_back_through_both_casts():
    model = cast_model(nn.Linear(3, 2), "O2")
    x = torch.randn(4, 3, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.dtype is F32
    torch.testing.assert_close(
        x.grad, model.weight.float().sum(0).expand(4, 3), rtol=1e-3, atol=1e-3
    )


def test_parameters_stay_the_same_objects_and_tied_ones_tied():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    before = list(model.parameters())
    cast_model(model, "O2")
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype is F16


def test_casting_twice_is_casting_once():
    model = cast_model(cast_model(net(), "O2"), "O2")
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


@pytest.mark.parametrize("other", ["O3", "bf16-O2"])
def test_a_cast_model_cannot_become_another(other):
    model = cast_model(net(), "O2")
    with pytest.raises(SettingError, match="build the model again"):
        cast_model(model, other)


def test_an_override_decides_on_batch_norms():
    model = cast_model(net(), "O2", keep_batchnorm_fp32="False")
    assert floating_dtypes(model) == {F16}


def test_copies_and_pickles_cast_as_the_original_does():
    model = cast_model(nn.Linear(3, 2), "O2")
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    x = torch.randn(4, 3)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert other(x).dtype is F32
        torch.testing.assert_close(other(x), model(x))


def test_a_batch_norm_in_fp32_trains_in_a_model_of_fp16():
    model = cast_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "O2")
    x = torch.randn(32, 3) * 5
    model(x).square().sum().backward()
    reference = nn.functional.linear(x.half(), model[0].weight, model[0].bias).float()
    torch.testing.assert_close(model[1].running_mean, 0.1 * reference.mean(0), rtol=1e-2, atol=1e-2)
    assert model[1].weight.grad.dtype is F32
    assert model[0].weight.grad.dtype is F16

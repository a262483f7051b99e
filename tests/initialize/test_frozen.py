"""A frozen base in any dtype under adapters that train: each level beside float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp import initialize
from distamp.errors import SettingError
from tests.initialize.cells import Adapted
from tests.initialize.nets import batches, loss_of, net

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BATCH = next(batches(1))
EPS = {F16: 2.0**-10, BF16: 2.0**-7}


def adapted(base: torch.dtype) -> nn.Module:
    model = net(batchnorm=False).requires_grad_(False).to(base)
    for name in ("hidden", "output"):
        setattr(model, name, Adapted(getattr(model, name)))
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def gradients(model: nn.Module, level: str) -> list[Tensor]:
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    scale: dict[str, Any] = {"init_scale": 2.0**8} if level in ("O1", "O2") else {}
    amp = initialize(model, optimizer, level, **scale)
    with amp.autocast():
        logits = amp.model(BATCH[0])
    amp.backward(loss_of(logits, BATCH[1]))
    amp.clip_grad_norm_(1e9)
    found = [p.grad for p in amp.master_params(optimizer)]
    assert amp.step()
    return [getattr(g, "full_tensor", lambda g=g: g)().float() for g in found]


def test_half_base_that_is_frozen_breaks_no_contract():
    model = adapted(BF16)
    amp = initialize(model, torch.optim.SGD(trained(model), lr=0.1), "bf16")

    def step() -> None:
        with amp.autocast():
            logits = amp.model(BATCH[0])
        amp.backward(loss_of(logits, BATCH[1]))
        amp.step()

    assert not amp.check(step)
    model.requires_grad_(True)
    assert "parameters" in str(amp.check(step))


def quantized(base: torch.dtype) -> nn.Module:
    """The adapted net with its frozen linear layers in int8, which give out ``base``."""
    quantization = pytest.importorskip("torchao.quantization")
    model = adapted(base)
    quantization.quantize_(
        model,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda m, _: isinstance(m, nn.Linear) and not m.weight.requires_grad,
    )
    return model


def dequantized(model: nn.Module) -> list[Tensor]:
    return [p.dequantize().double() for p in model.parameters() if hasattr(p, "qdata")]


@pytest.mark.parametrize(
    ("level", "base"),
    [("O0", F32), ("O1", F32), ("bf16", F32), ("O2", F32), ("bf16-O2", F32)]
    + [("bf16", BF16), ("bf16-O2", BF16)],
)
def test_adapters_on_an_int8_base_train_and_the_base_stays_int8(level, base):
    model = quantized(base)
    exact, before = copy.deepcopy(model), dequantized(model)
    for part in exact.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            value = parameter.dequantize() if hasattr(parameter, "qdata") else parameter
            double = nn.Parameter(value.detach().double(), parameter.requires_grad)
            part.register_parameter(name, double)
    loss_of(exact(BATCH[0]), BATCH[1]).backward()
    for found, parameter in zip(gradients(model, level), trained(exact), strict=True):
        wanted = parameter.grad.float()  # type: ignore[union-attr]
        assert (found - wanted).norm() < 8 * EPS[BF16] * wanted.norm()
    after = dequantized(model)
    assert len(after) == 2
    for one, other in zip(before, after, strict=True):
        assert (one - other).norm() < EPS[BF16] * one.norm()  # the scales may be cast


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_an_int8_base_that_gives_another_dtype_than_the_levels_is_refused(level):
    with pytest.raises(SettingError, match="take bf16"):
        gradients(quantized(BF16), level)

"""A frozen base in any dtype under adapters that train: each level beside float64."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize
from distamp.errors import ConfigError
from tests.levels import nets
from tests.levels.cells import EPS, Adapted
from tests.levels.nets import batches, llama, loss_of, net
from tests.on_ranks import on_ranks
from tests.ranks import mesh

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BATCH = next(batches(1))


def adapted(base: torch.dtype) -> nn.Module:
    model = net(batchnorm=False).requires_grad_(False).to(base)
    for name in ("hidden", "output"):
        setattr(model, name, Adapted(getattr(model, name)))
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def gradients(model: nn.Module, level: str) -> list[Tensor]:
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    scale: dict[str, Any] = {"init_scale": 2.0**8} if level in ("fp16", "fp16-O2") else {}
    amp = initialize(model, optimizer, level, **scale)
    with amp.autocast():
        logits = amp.model(BATCH[0])
    amp.backward(loss_of(logits, BATCH[1]))
    amp.clip_grad_norm_(1e9)
    found = [p.grad for p in amp.master_params(optimizer)]
    assert amp.step()
    return [getattr(g, "full_tensor", lambda g=g: g)().float() for g in found]


@pytest.mark.parametrize("kind", [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8)])
@pytest.mark.parametrize("base", [F16, BF16])
@pytest.mark.parametrize("level", ["fp16", "bf16"])
def test_a_frozen_half_norm_takes_whatever_a_region_gives_it(kind, base, level):
    """As in a region on CUDA; torch's kernels for the CPU want weights of the input's dtype."""
    model = nn.Sequential(nn.Linear(8, 8), kind().to(base).requires_grad_(False))
    amp, x = initialize(model, torch.optim.SGD(trained(model), lr=0.1), level), torch.randn(4, 8)
    with amp.autocast():
        for given in (x, x.half(), x.bfloat16()):
            assert torch.equal(amp.model[1](given), copy.deepcopy(model[1]).float()(given.float()))
    batch = x, torch.zeros(4, dtype=torch.int64)
    assert not amp.check(lambda: nets.train(amp, [batch]))


def test_half_norms_of_a_cast_model_bring_no_lists_which_compiled_code_could_not_follow():
    model = cast_model(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), "fp16-O3")
    amp = initialize(model, torch.optim.SGD(trained(model), lr=0.1), "fp16-O3")
    assert amp.autocast().ops is None


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
    [("fp32", F32), ("fp16", F32), ("bf16", F32), ("fp16-O2", F32), ("bf16-O2", F32)]
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


@pytest.mark.parametrize("level", ["fp32", "fp16-O2"])
def test_an_int8_base_that_gives_another_dtype_than_the_levels_is_refused(level):
    with pytest.raises(ConfigError, match="Use bf16"):
        gradients(quantized(BF16), level)


# -- peft's LoRA and DoRA: trained on two ranks, saved and resumed ---------------------------------

STEPS = 4
IDS = torch.randint(0, 32, (STEPS, 4, 8), generator=torch.Generator().manual_seed(0))


def llama_adapted(dora: bool, base: torch.dtype = BF16) -> Any:
    import peft

    model = llama().to(BF16).to(base)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=dora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that transformers has given new ones
        return peft.get_peft_model(model, lora)


def made(layout: str, level: str, dora: bool) -> Any:
    model = llama_adapted(dora)
    if layout == "DDP":
        model = DistributedDataParallel(cast_model(model, level))
    else:
        policy = MixedPrecisionPolicy(BF16 if level == "bf16-O2" else None, F32)
        for part in (*model.base_model.model.model.layers, model):
            fully_shard(part, mesh=mesh((2,), ("shard",)), mp_policy=policy)
    return initialize(model, torch.optim.AdamW(trained(model), lr=0.01), level)


def train(amp: Any, steps: range) -> list[float]:
    """Losses; both ranks have the same batch, so that one process is the reference."""
    losses = []
    for step in steps:
        amp.zero_grad()
        with amp.autocast():
            loss = amp.model(input_ids=IDS[step], labels=IDS[step]).loss.float()
        amp.backward(loss)
        amp.clip_grad_norm_(1.0)
        assert amp.step()
        losses.append(loss.item())
    return losses


def reference(dora: bool) -> list[float]:
    """The same in float32, from the weights that the half base has."""
    model = llama_adapted(dora, F32)
    amp = initialize(model, torch.optim.AdamW(trained(model), lr=0.01), "fp32")
    return train(amp, range(STEPS))


@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "level", "dora"), [("DDP", "bf16-O2", False), ("FSDP2", "bf16", True)]
)
def test_adapters_train_and_go_on_to_the_bit(layout, level, dora):
    pytest.importorskip("peft")
    amp = made(layout, level, dora)
    losses = train(amp, range(2))
    state = [copy.deepcopy(part.state_dict()) for part in (amp.model, amp.optimizers[0], amp)]
    losses += train(amp, range(2, STEPS))
    assert losses == pytest.approx(reference(dora), rel=5e-3)
    resumed = made(layout, level, dora)
    for part, saved in zip((resumed.model, resumed.optimizers[0], resumed), state, strict=True):
        part.load_state_dict(saved)
    assert train(resumed, range(2, STEPS)) == losses[2:]

"""A frozen base in any dtype under adapters that train: each level compared with float64."""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize
from distamp.errors import ConfigError
from tests.levels import nets
from tests.levels.cells import EPS, Adapted, trained_params
from tests.levels.nets import batches, llama, loss_of, net
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BATCH = next(batches(1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained_params(model), lr=0.1)


# -- norms ---------------------------------------------------------------------------------------

HALF_NORMS = {
    "layer norm": functools.partial(nn.LayerNorm, 8),
    "group norm": functools.partial(nn.GroupNorm, 2, 8),
}


def with_frozen_norm(norm: str, base: torch.dtype) -> nn.Sequential:
    """Return a trained layer with a frozen norm in half precision."""
    frozen = HALF_NORMS[norm]().to(base).requires_grad_(False)
    return nn.Sequential(nn.Linear(8, 8), frozen)


@pytest.mark.parametrize("norm", HALF_NORMS)
@pytest.mark.parametrize("base", [F16, BF16])
@pytest.mark.parametrize("level", ["fp16", "bf16"])
def test_a_frozen_half_norm_takes_any_dtype_in_a_region(norm, base, level):
    """On CUDA, a region lets it; torch's kernels for the CPU want weights of the input's dtype."""
    model = with_frozen_norm(norm, base)
    amp = initialize(model, sgd(model), level)
    exact_norm = copy.deepcopy(model[1]).float()
    x = torch.randn(4, 8)
    with amp.autocast():
        for inputs in (x, x.half(), x.bfloat16()):
            output = amp.model[1](inputs)
            assert torch.equal(output, exact_norm(inputs.float()))


@pytest.mark.parametrize("norm", HALF_NORMS)
@pytest.mark.parametrize("base", [F16, BF16])
@pytest.mark.parametrize("level", ["fp16", "bf16"])
def test_a_model_with_a_frozen_half_norm_keeps_its_contract(norm, base, level):
    model = with_frozen_norm(norm, base)
    amp = initialize(model, sgd(model), level)
    batch = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    assert not amp.check(lambda: nets.train(amp, [batch]))


def test_half_norms_of_a_cast_model_need_no_op_lists():
    """Compiled code could not follow op lists."""
    model = cast_model(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), "fp16-O3")
    amp = initialize(model, sgd(model), "fp16-O3")
    assert amp.autocast().ops is None


# -- adapters on a quantized base ----------------------------------------------------------------


def quantized(base: torch.dtype) -> nn.Module:
    """Return an adapted net with frozen linear layers in int8, which return ``base``."""
    quantization = pytest.importorskip("torchao.quantization")
    model: Any = net(batchnorm=False).requires_grad_(False).to(base)
    model.hidden = Adapted(model.hidden)
    model.output = Adapted(model.output)

    def is_frozen_linear(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not module.weight.requires_grad

    config = quantization.Int8WeightOnlyConfig()
    quantization.quantize_(model, config, filter_fn=is_frozen_linear)
    return model


def is_quantized(param: Tensor) -> bool:
    return hasattr(param, "qdata")


def in_float64(model: nn.Module) -> nn.Module:
    """Return a copy of a model with dequantized parameters in float64."""
    exact = copy.deepcopy(model)
    for module in exact.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            value = param.dequantize() if is_quantized(param) else param
            double = nn.Parameter(value.detach().double(), param.requires_grad)
            module.register_parameter(name, double)
    return exact


def gradients_at_level(model: nn.Module, level: str) -> list[Tensor]:
    """Take a step, and return the gradients that the optimizer got, in float32."""
    optimizer = sgd(model)
    settings: dict[str, Any] = {}
    if level in ("fp16", "fp16-O2"):
        settings["init_scale"] = 2.0**8
    amp = initialize(model, optimizer, level, **settings)
    context, following = BATCH
    with amp.autocast():
        logits = amp.model(context)
    amp.backward(loss_of(logits, following))
    amp.clip_grad_norm_(1e9)
    grads = [param.grad.float() for param in amp.master_params(optimizer)]
    assert amp.step()
    return grads


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor - exact).norm() / exact.norm())


FLOAT32_AND_BFLOAT16_BASES = [
    ("fp32", F32),
    ("fp16", F32),
    ("bf16", F32),
    ("fp16-O2", F32),
    ("bf16-O2", F32),
    ("bf16", BF16),
    ("bf16-O2", BF16),
]


@pytest.mark.parametrize(("level", "base"), FLOAT32_AND_BFLOAT16_BASES)
def test_adapters_on_an_int8_base_get_the_gradients_of_float64(level, base):
    model = quantized(base)
    exact = in_float64(model)
    context, following = BATCH
    loss_of(exact(context), following).backward()
    grads = gradients_at_level(model, level)
    for grad, param in zip(grads, trained_params(exact), strict=True):
        assert relative_error(grad, param.grad.float()) < 8 * EPS[BF16]


@pytest.mark.parametrize(("level", "base"), FLOAT32_AND_BFLOAT16_BASES)
def test_an_int8_base_stays_int8_in_a_step(level, base):
    model = quantized(base)
    before = [param.dequantize().double() for param in model.parameters() if is_quantized(param)]
    gradients_at_level(model, level)
    after = [param.dequantize().double() for param in model.parameters() if is_quantized(param)]
    assert len(after) == 2
    for weight, exact in zip(after, before, strict=True):
        assert relative_error(weight, exact) < EPS[BF16]  # the scales may be cast


@pytest.mark.parametrize("level", ["fp32", "fp16-O2"])
def test_an_int8_base_that_returns_another_dtype_than_the_levels_is_refused(level):
    model = quantized(BF16)
    with pytest.raises(ConfigError, match="Use bf16"):
        initialize(model, sgd(model), level)


# -- peft's LoRA and DoRA: trained on two ranks, saved and resumed -------------------------------

STEPS = 4
IDS = torch.randint(0, 32, (STEPS, 4, 8), generator=torch.Generator().manual_seed(0))


def adapted_llama(dora: bool, base: torch.dtype) -> Any:
    """Return a Llama with adapters, and with the same weights in any base."""
    import peft

    model = llama().to(BF16).to(base)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=dora)
    with warnings.catch_warnings():
        # peft reads names that transformers has replaced.
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, lora)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained_params(model), lr=0.01)


def lora_in_ddp() -> Any:
    model = cast_model(adapted_llama(False, BF16), "bf16-O2")
    model = DistributedDataParallel(model)
    return initialize(model, adamw(model), "bf16-O2")


def dora_in_fsdp2() -> Any:
    model = adapted_llama(True, BF16)
    settings: Any = {"mesh": mesh((2,), ("shard",))}
    settings["mp_policy"] = MixedPrecisionPolicy(None, F32)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return initialize(model, adamw(model), "bf16")


def train(amp: Any, steps: range) -> list[float]:
    """Return losses. Both ranks have the same batch, so that one process is the reference."""
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


def in_float32(model: nn.Module) -> Any:
    return initialize(model, adamw(model), "fp32")


Train = Callable[[Any, range], list[float]]


def check_training_and_resumption(make_amp: Callable[[], Any], exact: Any, train: Train) -> None:
    """Check that a run has the losses of an exact one, and resumes bit-identical at step 2."""
    amp = make_amp()
    losses = train(amp, range(2))
    parts = (amp.model, amp.optimizers[0], amp)
    saved = [copy.deepcopy(part.state_dict()) for part in parts]
    losses += train(amp, range(2, STEPS))
    exact_losses = train(exact, range(STEPS))
    assert losses == pytest.approx(exact_losses, rel=5e-3)
    resumed = make_amp()
    resumed.model.load_state_dict(saved[0])
    resumed.optimizers[0].load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    assert train(resumed, range(2, STEPS)) == losses[2:]


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_lora_in_ddp_trains_and_resumes_bit_identical():
    pytest.importorskip("peft")
    exact = in_float32(adapted_llama(False, F32))
    check_training_and_resumption(lora_in_ddp, exact, train)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_dora_in_fsdp2_trains_and_resumes_bit_identical():
    pytest.importorskip("peft")
    exact = in_float32(adapted_llama(True, F32))
    check_training_and_resumption(dora_in_fsdp2, exact, train)


# -- the same adapters without peft, which takes long to import ----------------------------------


def adapted_net(base: torch.dtype) -> nn.Module:
    """Return a net with a frozen base in a dtype, and with the same weights in any dtype."""
    model: Any = net(batchnorm=False).requires_grad_(False).to(BF16).to(base)
    model.hidden = Adapted(model.hidden)
    model.output = Adapted(model.output)
    return model


def adapted_net_in_ddp() -> Any:
    model = cast_model(adapted_net(BF16), "bf16-O2")
    model = DistributedDataParallel(model)
    return initialize(model, adamw(model), "bf16-O2")


def adapted_net_in_fsdp2() -> Any:
    model = adapted_net(BF16)
    policy = MixedPrecisionPolicy(None, F32)
    fully_shard(model, mesh=mesh((2,), ("shard",)), mp_policy=policy)
    return initialize(model, adamw(model), "bf16")


def train_net(amp: Any, steps: range) -> list[float]:
    batches_of_steps = itertools.islice(batches(STEPS), steps.start, steps.stop)
    return nets.train(amp, batches_of_steps, max_norm=1.0)


LAYOUTS = [adapted_net_in_ddp, adapted_net_in_fsdp2]


@on_ranks(2)
@pytest.mark.parametrize("make_amp", quick_cases(LAYOUTS, quick=[adapted_net_in_ddp]))
def test_adapters_in_a_layout_train_and_resume_bit_identical(make_amp):
    exact = in_float32(adapted_net(F32))
    check_training_and_resumption(make_amp, exact, train_net)

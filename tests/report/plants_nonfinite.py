"""Forty faults that make inf or NaN, of more than twenty kinds, in six models; for a score.

Written from the documentation of the kinds of faults alone, before the tool that is scored had been
seen. A plant says how it is made and what a right answer names: the operation (any of ``ops``, by
aten's names without overloads), the module or its parameter (any of ``modules``; "" is outside of
all), forward or backward, the ranks, and the micro-batch.

``build(plant)`` makes the model and a step of two micro-batches on this rank of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

__all__ = ["PLANTS", "Plant", "build"]

HALF, FP32 = torch.float16, torch.float32
BOTH, FIRST, SECOND = (0, 1), (0,), (1,)
INF, NAN = float("inf"), float("nan")

# -- models ----------------------------------------------------------------------------------------


def _quiet(config: Any) -> Any:
    config.use_cache = False
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    return config


def _gpt2() -> nn.Module:
    import transformers as t

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    config = t.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, attn_implementation="eager")
    return t.GPT2LMHeadModel(_quiet(config))


_DECODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 16,
}


def _llama() -> nn.Module:
    import transformers as t

    return t.LlamaForCausalLM(_quiet(t.LlamaConfig(**_DECODER)))


def _moe() -> nn.Module:
    import transformers as t

    return t.MixtralForCausalLM(_quiet(t.MixtralConfig(**_DECODER, num_local_experts=4)))


def _t5() -> nn.Module:
    import transformers as t

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    config = t.T5Config(**sizes, num_heads=2, decoder_start_token_id=0, pad_token_id=0)
    config.use_cache = False
    return t.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    import transformers as t

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    images = {"intermediate_size": 32, "image_size": 8, "patch_size": 4, "num_labels": 4}
    return t.ViTForImageClassification(t.ViTConfig(**sizes, **images))


class ConvNet(nn.Module):
    """Two convolutions with batch norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.pool(self.body(self.stem(pixels))).flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "moe": _moe,
    "t5": _t5,
    "vit": _vit,
    "conv": ConvNet,
}
IMAGES = ("vit", "conv")


def _logits(model: nn.Module, name: str, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    if name == "conv":
        return model(inputs)
    if name == "vit":
        return model(pixel_values=inputs).logits
    if name == "t5":
        return model(input_ids=inputs, decoder_input_ids=labels).logits
    return model(input_ids=inputs).logits


def _batches(name: str, rank: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(10 + rank)
    if name in IMAGES:
        shape, labels = (4, 3, 8, 8), (4,)
        inputs = [torch.randn(shape, generator=draw).to(dtype) for _ in range(2)]
        return [(x, torch.randint(0, 4, labels, generator=draw)) for x in inputs]
    made = [torch.randint(2, 32, (2, 8), generator=draw) for _ in range(2)]
    return [(x, x.clone()) for x in made]


# -- what goes wrong at a module's output ----------------------------------------------------------


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / torch.zeros_like(grad)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _exp(y: Tensor) -> Tensor:
    return y + torch.exp(y.float() * 0 + 100).to(y.dtype)


def _log(y: Tensor) -> Tensor:
    return y + torch.log(F.relu(y - 1e4))


def _unit_length(y: Tensor) -> Tensor:
    z = y * 0
    return y + z / z.abs().amax(-1, keepdim=True)


def _inverse_deviation(y: Tensor) -> Tensor:
    return y * (y * 0).square().mean(-1, keepdim=True).rsqrt()


def _square_in_half(y: Tensor) -> Tensor:
    z = y.to(HALF) * 0 + 300
    return y + (z * z).to(y.dtype)


def _sum_in_half(y: Tensor) -> Tensor:
    return y + torch.full((64,), 2000.0, dtype=HALF).sum().to(y.dtype)


def _row_all_masked(y: Tensor) -> Tensor:
    scores = y.float().masked_fill(torch.ones_like(y, dtype=torch.bool), -INF)
    return y * scores.softmax(-1).to(y.dtype)


def _masked_twice(y: Tensor) -> Tensor:
    mask = torch.full_like(y, torch.finfo(y.dtype).min)
    return y * (y * 0 + (mask + mask)).softmax(-1)


def _arc(y: Tensor) -> Tensor:
    return y + torch.acos(y * 0 + 1.5)


def _no_epsilon(y: Tensor) -> Tensor:
    return y + F.layer_norm(y * 0, y.shape[-1:], eps=0.0)


def _nobody_chosen(y: Tensor) -> Tensor:
    weights = y.softmax(-1) * (y > 1e9)
    return y * (weights / weights.sum(-1, keepdim=True))


def _sum_over_ranks(y: Tensor) -> Tensor:
    return y + _SumOverRanks.apply(torch.full((4,), 60000.0, dtype=HALF)).sum().to(y.dtype)


def _feeds_a_sum(y: Tensor) -> Tensor:
    grown = torch.exp(y.float().mean() * 0 + (100.0 if dist.get_rank() == 1 else 1.0))
    return y + _SumOverRanks.apply(grown).to(y.dtype)


def _root_of_nothing(y: Tensor) -> Tensor:
    return y + (y * 0).abs().sqrt()


def _half_power(y: Tensor) -> Tensor:
    return y + (y * 0).pow(0.5)


def _hidden_by_where(y: Tensor) -> Tensor:
    return y + torch.where(y > 1e9, torch.log(y * 0), y)


def _bad_backward(y: Tensor) -> Tensor:
    return _BadBackward.apply(y)


def _arc_of_one(y: Tensor) -> Tensor:
    return y + torch.acos((y * 0 + 1.0).clamp(-1.0, 1.0))


class Faulty(nn.Module):
    """A module whose output goes through a function, on some ranks."""

    def __init__(self, inner: nn.Module, function: Callable[[Tensor], Tensor], here: bool) -> None:
        super().__init__()
        self.inner, self.function, self.here = inner, function, here

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return self.function(out) if self.here else out


# -- plants ----------------------------------------------------------------------------------------

_Change = Callable[[nn.Module, int], None]


@dataclass(frozen=True)
class Plant:
    """One fault, and what a right answer names."""

    name: str
    kind: str
    model: str
    ops: Sequence[str]
    modules: Sequence[str]
    ranks: tuple[int, ...] = BOTH
    forward: bool = True
    wrapper: str = ""
    precision: str = "fp32"
    change: _Change | None = None
    inputs: Callable[[list[tuple[Tensor, Tensor]], int], None] | None = None
    scale: float = 1.0
    micro_batch: int = 0


def _at(path: str, function: Callable[[Tensor], Tensor], ranks: tuple[int, ...] = BOTH) -> _Change:
    def change(model: nn.Module, rank: int) -> None:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        faulty = Faulty(owner.get_submodule(name), function, rank in ranks)
        if isinstance(owner, nn.Sequential | nn.ModuleList):
            owner[int(name)] = faulty
        else:
            setattr(owner, name, faulty)

    return change


def _weights(path: str, write: Callable[[Tensor], Any], ranks: tuple[int, ...] = BOTH) -> _Change:
    def change(model: nn.Module, rank: int) -> None:
        if rank in ranks:
            with torch.no_grad():
                write(model.get_parameter(path))

    return change


def _inf_at(micro_batch: int, rank_: int) -> Callable[[list[tuple[Tensor, Tensor]], int], None]:
    def inputs(batches: list[tuple[Tensor, Tensor]], rank: int) -> None:
        if rank == rank_:
            batches[micro_batch][0].view(-1)[5] = INF

    return inputs


def _all_ignored(micro_batch: int, rank_: int) -> Callable[[list[Any], int], None]:
    def inputs(batches: list[Any], rank: int) -> None:
        if rank == rank_:
            batches[micro_batch][1].fill_(-100)

    return inputs


def _large(weight: Tensor) -> None:
    weight.fill_(3e4)


def _nothing_in(model: nn.Module, rank: int) -> None:
    """A head of large weights, and nothing that reaches it: forward 0, backward beyond 65504."""
    norm = model.get_submodule("transformer.ln_f")
    head = model.get_submodule("lm_head")
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.zero_()
        signs = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)).sign()
        head.weight = nn.Parameter(6e4 * signs)


GPT2_ACT, LLAMA_ACT = "transformer.h.1.mlp.act", "model.layers.0.mlp.act_fn"
T5_ACT, VIT_ACT = "encoder.block.0.layer.1.DenseReluDense.act", "vit.layers.1.mlp.activation_fn"
MOE_NORM, CONV_RELU = "model.layers.1.post_attention_layernorm", "body.2"
LLAMA_NORM, VIT_NORM = "model.layers.1.input_layernorm", "vit.layers.0.layernorm_after"
LINEAR = ("addmm", "mm", "linear", "matmul", "bmm")
CONV = ("convolution", "conv2d", "mkldnn_convolution", "_convolution", "slow_conv2d_forward")
SOFTMAX = ("_softmax", "softmax", "_safe_softmax")
OUTSIDE = ("", "(outside)")


def _forward(
    name: str,
    kind: str,
    model: str,
    at: str,
    function: Callable[[Tensor], Tensor],
    ops: Sequence[str],
    ranks: tuple[int, ...] = BOTH,
    blamed: tuple[int, ...] | None = None,
    **others: Any,
) -> Plant:
    change = _at(at, function, ranks)
    return Plant(name, kind, model, ops, (at,), blamed or ranks, True, change=change, **others)


def _backward(
    name: str,
    kind: str,
    model: str,
    at: str,
    function: Callable[[Tensor], Tensor],
    ops: Sequence[str],
    ranks: tuple[int, ...] = BOTH,
    **others: Any,
) -> Plant:
    change = _at(at, function, ranks)
    return Plant(name, kind, model, ops, (at,), ranks, False, change=change, **others)


PLANTS: tuple[Plant, ...] = (
    _forward("exp in an activation", "exp", "gpt2", GPT2_ACT, _exp, ("exp",), wrapper="DDP"),
    _forward("exp on one rank", "exp", "vit", VIT_ACT, _exp, ("exp",), SECOND, wrapper="FSDP2"),
    _forward("log of 0", "log", "llama", LLAMA_ACT, _log, ("log",), wrapper="FSDP2"),
    _forward("log of 0, one rank", "log", "conv", CONV_RELU, _log, ("log",), FIRST, wrapper="DDP"),
    _forward("unit length of 0", "0 / 0", "t5", T5_ACT, _unit_length, ("div",), wrapper="DDP"),
    _forward(
        "unit length, bf16",
        "0 / 0",
        "llama",
        LLAMA_NORM,
        _unit_length,
        ("div",),
        SECOND,
        precision="bf16",
    ),
    _forward("deviation of 0", "rsqrt", "vit", VIT_NORM, _inverse_deviation, ("rsqrt",)),
    _forward(
        "deviation of 0, MoE",
        "rsqrt",
        "moe",
        MOE_NORM,
        _inverse_deviation,
        ("rsqrt",),
        FIRST,
        wrapper="DDP",
    ),
    _forward(
        "square in half",
        "fp16 product",
        "gpt2",
        GPT2_ACT,
        _square_in_half,
        ("mul",),
        precision="half",
    ),
    _forward(
        "square in half, one rank",
        "fp16 product",
        "conv",
        CONV_RELU,
        _square_in_half,
        ("mul",),
        SECOND,
        wrapper="DDP",
    ),
    _forward("sum in half", "fp16 sum", "t5", T5_ACT, _sum_in_half, ("sum",), wrapper="FSDP2"),
    _forward(
        "row all masked",
        "softmax of -inf",
        "gpt2",
        GPT2_ACT,
        _row_all_masked,
        SOFTMAX,
        wrapper="FSDP2",
    ),
    _forward(
        "row all masked, bf16",
        "softmax of -inf",
        "llama",
        LLAMA_NORM,
        _row_all_masked,
        SOFTMAX,
        FIRST,
        precision="bf16",
        wrapper="DDP",
    ),
    _forward("mask added twice", "finfo.min twice", "vit", VIT_ACT, _masked_twice, ("add",)),
    _forward(
        "mask added twice, half",
        "finfo.min twice",
        "llama",
        LLAMA_ACT,
        _masked_twice,
        ("add",),
        precision="half",
        wrapper="DDP",
    ),
    _forward("acos of 1.5", "domain", "t5", T5_ACT, _arc, ("acos",), wrapper="DDP"),
    _forward(
        "layer norm without eps",
        "eps 0",
        "vit",
        VIT_NORM,
        _no_epsilon,
        ("native_layer_norm", "layer_norm"),
        wrapper="DDP",
    ),
    _forward(
        "layer norm without eps, one rank",
        "eps 0",
        "gpt2",
        GPT2_ACT,
        _no_epsilon,
        ("native_layer_norm", "layer_norm"),
        FIRST,
        wrapper="FSDP2",
    ),
    _forward("no expert chosen", "router", "moe", MOE_NORM, _nobody_chosen, ("div",)),
    _forward(
        "no expert chosen, one rank",
        "router",
        "moe",
        "model.layers.0.input_layernorm",
        _nobody_chosen,
        ("div",),
        SECOND,
        wrapper="DDP",
    ),
    _forward(
        "sum over ranks in half",
        "collective",
        "llama",
        LLAMA_ACT,
        _sum_over_ranks,
        ("all_reduce", "allreduce_", "allreduce", "all_reduce_"),
    ),
    _forward(
        "a rank feeds a sum inf",
        "fed collective",
        "gpt2",
        GPT2_ACT,
        _feeds_a_sum,
        ("exp",),
        BOTH,
        SECOND,
    ),
    Plant(
        "NaN in a weight",
        "weight",
        "gpt2",
        LINEAR,
        ("transformer.h.0.mlp.c_fc",),
        SECOND,
        change=_weights("transformer.h.0.mlp.c_fc.weight", lambda w: w[3, 4].fill_(NAN), SECOND),
    ),
    Plant(
        "inf in a norm's weight",
        "weight",
        "llama",
        ("mul",),
        ("model.norm",),
        wrapper="FSDP2",
        change=_weights("model.norm.weight", lambda w: w[2].fill_(INF)),
    ),
    Plant(
        "a row of an embedding",
        "embedding",
        "llama",
        ("embedding",),
        ("model.embed_tokens",),
        change=_weights("model.embed_tokens.weight", lambda w: w.fill_(INF)),
        wrapper="FSDP2",
    ),
    Plant(
        "a row of an embedding, one rank",
        "embedding",
        "gpt2",
        ("embedding",),
        ("transformer.wte",),
        FIRST,
        change=_weights("transformer.wte.weight", lambda w: w[2:].fill_(NAN), FIRST),
    ),
    Plant(
        "inf in a pixel",
        "input",
        "vit",
        (*CONV, "input"),
        ("vit.embeddings.patch_embeddings.projection", *OUTSIDE),
        SECOND,
        wrapper="DDP",
        inputs=_inf_at(1, 1),
        micro_batch=1,
    ),
    Plant(
        "inf in a pixel, convolution",
        "input",
        "conv",
        (*CONV, "input"),
        ("stem.0", *OUTSIDE),
        FIRST,
        inputs=_inf_at(0, 0),
    ),
    Plant(
        "linear beyond 65504",
        "fp16 matmul",
        "llama",
        LINEAR,
        ("lm_head",),
        precision="half",
        wrapper="DDP",
        change=_weights("lm_head.weight", _large),
    ),
    Plant(
        "convolution beyond 65504",
        "fp16 convolution",
        "conv",
        CONV,
        ("body.0",),
        precision="half",
        change=_weights("body.0.weight", _large),
    ),
    Plant(
        "all labels ignored",
        "empty mean",
        "gpt2",
        ("nll_loss_forward", "nll_loss", "cross_entropy_loss", "nll_loss_nd"),
        OUTSIDE,
        SECOND,
        inputs=_all_ignored(1, 1),
        wrapper="DDP",
        micro_batch=1,
    ),
    Plant(
        "all labels ignored, images",
        "empty mean",
        "vit",
        ("nll_loss_forward", "nll_loss", "cross_entropy_loss", "nll_loss_nd"),
        OUTSIDE,
        FIRST,
        inputs=_all_ignored(0, 0),
        wrapper="FSDP2",
    ),
    _backward("root of 0", "sqrt'", "t5", T5_ACT, _root_of_nothing, ("div",), wrapper="DDP"),
    _backward("power 0.5 of 0", "pow'", "llama", LLAMA_ACT, _half_power, ("pow",), wrapper="FSDP2"),
    _backward("log hidden by where", "where'", "gpt2", GPT2_ACT, _hidden_by_where, ("div",)),
    _backward(
        "log hidden by where, bf16",
        "where'",
        "conv",
        CONV_RELU,
        _hidden_by_where,
        ("div",),
        FIRST,
        wrapper="DDP",
        precision="bf16",
    ),
    _backward(
        "a bad custom backward", "custom'", "moe", MOE_NORM, _bad_backward, ("div",), wrapper="DDP"
    ),
    _backward(
        "acos at 1", "acos'", "llama", LLAMA_NORM, _arc_of_one, ("rsqrt", "div", "reciprocal")
    ),
    Plant(
        "backward matmul beyond 65504",
        "fp16 matmul'",
        "gpt2",
        LINEAR,
        ("lm_head",),
        forward=False,
        precision="half",
        change=_nothing_in,
        scale=64.0,
    ),
    Plant(
        "loss scale of 2^30",
        "loss scale",
        "llama",
        ("_to_copy", "to", "mul", "copy_"),
        OUTSIDE,
        forward=False,
        precision="half",
        scale=2.0**30,
    ),
)


def build(plant: Plant) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the model as it trains on this rank, with its fault, and its step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = MODELS[plant.model]().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if plant.change is not None:
        plant.change(model, rank)
    dtype = HALF if plant.precision == "half" else FP32
    model.to(dtype)
    if plant.wrapper == "FSDP2":
        for module in [*model.modules()][1:]:
            if type(module).__name__.endswith(("Block", "DecoderLayer", "ViTLayer")):
                fully_shard(module)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if plant.wrapper == "DDP" else model
    batches = _batches(plant.model, rank, dtype)
    if plant.inputs is not None:
        plant.inputs(batches, rank)
    bf16 = plant.precision == "bf16"

    def step() -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = _logits(wrapped, plant.model, batch).float()
            labels = batch[1].flatten()
            loss = F.cross_entropy(logits.view(len(labels), -1), labels)
            (loss * (plant.scale / 2)).backward()
            total = total + loss.detach()
        return total

    return wrapped, step

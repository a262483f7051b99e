"""Forty faults that make inf or NaN, of more than twenty kinds, in six models; for a score.

Written from the documentation of the kinds of faults alone, before the tool that is scored had been
seen; reworded since, with the same plants. A plant describes how it is made and names the right
answer: the operation (any of ``ops``, by aten's names without overloads), the module or its
parameter (any of ``modules``; "" is outside of all), forward or backward, the ranks, and the
micro-batch.

``build(plant)`` makes the model and a step of two micro-batches on this rank of two.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FAULTS", "MODELS", "PLANTS", "Fault", "Plant", "build"]

HALF = torch.float16
BOTH, FIRST, SECOND = (0, 1), (0,), (1,)
INF, NAN = float("inf"), float("nan")

# -- models ----------------------------------------------------------------------------------------

_DECODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 16,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_IMAGES = {"intermediate_size": 32, "image_size": 8, "patch_size": 4, "num_labels": 4}


def conv() -> nn.Module:
    """Two convolutions with batch norms, and a head."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ends = {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(8, 4)}
    return nn.Sequential(OrderedDict(stem=stem, body=body, **ends))


# By name: the class in transformers, its configuration, and the arguments that take the inputs.
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_DECODER, "attn_implementation": "eager"},
        ("input_ids",),
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER, ("input_ids",)),
    "moe": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_DECODER, "num_key_value_heads": 2, "num_local_experts": 4},
        ("input_ids",),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
        ("input_ids", "decoder_input_ids"),
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_VIT, **_IMAGES}, ("pixel_values",)),
    "conv": ("", "", {}, ("input",)),
}


def _model(name: str) -> nn.Module:
    kind, config, settings, _ = MODELS[name]
    if not kind:
        return conv()
    import transformers

    return getattr(transformers, kind)(getattr(transformers, config)(**settings))


def _batches(name: str, rank: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(10 + rank)
    if name in ("vit", "conv"):
        inputs = [torch.randn((4, 3, 8, 8), generator=draw).to(dtype) for _ in range(2)]
        return [(x, torch.randint(0, 4, (4,), generator=draw)) for x in inputs]
    tokens = [torch.randint(2, 32, (2, 8), generator=draw) for _ in range(2)]
    return [(x, x.clone()) for x in tokens]


# -- faults at a module's output -------------------------------------------------------------------


class _BadBackward(torch.autograd.Function):
    """Copies its input, and divides the gradient by 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / torch.zeros_like(grad)


class _SumOverRanks(torch.autograd.Function):
    """Adds up the inputs of all ranks, and passes the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _exp_of_100(y: Tensor) -> Tensor:
    """Exp of 100 is beyond float32."""
    hundred = y.float() * 0 + 100
    return y + torch.exp(hundred).to(y.dtype)


def _log_of_0(y: Tensor) -> Tensor:
    """Log of a relu that has cut everything off is -inf."""
    zeros = F.relu(y - 1e4)
    return y + torch.log(zeros)


def _unit_length_of_0(y: Tensor) -> Tensor:
    """A row of zeros divided by its length is 0 / 0."""
    row = y * 0
    length = (y * 0).abs().amax(-1, keepdim=True)
    return y + row / length


def _deviation_of_0(y: Tensor) -> Tensor:
    """The reciprocal root of a variance of 0, without an epsilon, is inf."""
    variance = (y * 0).square().mean(-1, keepdim=True)
    return y * variance.rsqrt()


def _square_in_half(y: Tensor) -> Tensor:
    """The square of 300 is beyond fp16."""
    z = y.to(HALF) * 0 + 300
    return y + (z * z).to(y.dtype)


def _sum_in_half(y: Tensor) -> Tensor:
    """The sum of 64 times 2,000 is beyond fp16."""
    terms = torch.full((64,), 2000.0, dtype=HALF)
    return y + terms.sum().to(y.dtype)


def _row_all_masked(y: Tensor) -> Tensor:
    """The softmax of a row of -inf is NaN."""
    everywhere = torch.ones_like(y, dtype=torch.bool)
    scores = y.float().masked_fill(everywhere, -INF)
    return y * scores.softmax(-1).to(y.dtype)


def _masked_twice(y: Tensor) -> Tensor:
    """A mask of the lowest finite number, added to itself, is -inf."""
    mask = torch.full_like(y, torch.finfo(y.dtype).min)
    scores = y * 0 + (mask + mask)
    return y * scores.softmax(-1)


def _acos_of_1_5(y: Tensor) -> Tensor:
    """Acos has no value above 1."""
    return y + torch.acos(y * 0 + 1.5)


def _layer_norm_without_eps(y: Tensor) -> Tensor:
    """A layer norm of zeros divides 0 by 0 if its epsilon is 0."""
    return y + F.layer_norm(y * 0, y.shape[-1:], eps=0.0)


def _no_expert_chosen(y: Tensor) -> Tensor:
    """The weights of a router that has chosen no expert add up to 0, and are divided by that."""
    weights = y.softmax(-1) * (y > 1e9)
    return y * (weights / weights.sum(-1, keepdim=True))


def _sum_over_ranks_in_half(y: Tensor) -> Tensor:
    """Two ranks send 60,000 each, and the sum is beyond fp16."""
    terms = torch.full((4,), 60000.0, dtype=HALF)
    return y + _SumOverRanks.apply(terms).sum().to(y.dtype)


def _inf_of_rank_1_in_a_sum(y: Tensor) -> Tensor:
    """Rank 1 makes an inf, which a sum over ranks brings to rank 0."""
    exponent = 100.0 if dist.get_rank() == 1 else 1.0
    term = torch.exp(y.float().mean() * 0 + exponent)
    return y + _SumOverRanks.apply(term).to(y.dtype)


def _root_of_0(y: Tensor) -> Tensor:
    """The root of 0 is 0, and its derivative is inf."""
    return y + (y * 0).abs().sqrt()


def _power_of_0(y: Tensor) -> Tensor:
    """The power 0.5 of 0 is 0, and its derivative is inf."""
    return y + (y * 0).pow(0.5)


def _log_hidden_by_where(y: Tensor) -> Tensor:
    """The log of 0 is not chosen in the forward pass; backward multiplies its inf by 0."""
    return y + torch.where(y > 1e9, torch.log(y * 0), y)


def _acos_of_1(y: Tensor) -> Tensor:
    """Acos of 1 is 0, and its derivative is inf."""
    return y + torch.acos(y * 0 + 1.0)


class Fault(NamedTuple):
    """A change of a module's output, and the right answer: function, kernels and direction."""

    change: Callable[[Tensor], Tensor]
    function: str
    kernels: tuple[str, ...]
    forward: bool = True


LINEAR = ("addmm", "mm", "linear", "matmul", "bmm")
CONV = ("convolution", "conv2d", "mkldnn_convolution", "_convolution", "slow_conv2d_forward")
SOFTMAX = ("_softmax", "softmax", "_safe_softmax")
NLL = ("nll_loss_forward", "nll_loss", "cross_entropy_loss", "nll_loss_nd")
LAYER_NORM = ("native_layer_norm", "layer_norm")
ALL_REDUCE = ("all_reduce", "allreduce_", "allreduce", "all_reduce_")
ARC = ("rsqrt", "div", "reciprocal")
# By kind. A kind with ' is finite in the forward pass, and its backward pass is not.
FAULTS: dict[str, Fault] = {
    "exp": Fault(_exp_of_100, "exp", ("exp",)),
    "log": Fault(_log_of_0, "log", ("log",)),
    "0 / 0": Fault(_unit_length_of_0, "div", ("div",)),
    "rsqrt": Fault(_deviation_of_0, "rsqrt", ("rsqrt",)),
    "fp16 product": Fault(_square_in_half, "mul", ("mul",)),
    "fp16 sum": Fault(_sum_in_half, "sum", ("sum",)),
    "softmax of -inf": Fault(_row_all_masked, "softmax", SOFTMAX),
    "finfo.min twice": Fault(_masked_twice, "add", ("add",)),
    "domain": Fault(_acos_of_1_5, "acos", ("acos",)),
    "eps 0": Fault(_layer_norm_without_eps, "layer_norm", LAYER_NORM),
    "router": Fault(_no_expert_chosen, "div", ("div",)),
    "collective": Fault(_sum_over_ranks_in_half, "allreduce", ALL_REDUCE),
    "fed collective": Fault(_inf_of_rank_1_in_a_sum, "exp", ("exp",)),
    "sqrt'": Fault(_root_of_0, "sqrt", ("div",), forward=False),
    "pow'": Fault(_power_of_0, "pow", ("pow",), forward=False),
    "where'": Fault(_log_hidden_by_where, "log", ("div",), forward=False),
    "custom'": Fault(_BadBackward.apply, "_BadBackward", ("div",), forward=False),
    "acos'": Fault(_acos_of_1, "acos", ARC, forward=False),
}


class Faulty(nn.Module):
    """A module whose output goes through a function, on some ranks."""

    def __init__(
        self, inner: nn.Module, function: Callable[[Tensor], Tensor], has_fault: bool
    ) -> None:
        super().__init__()
        self.inner = inner
        self.function = function
        self.has_fault = has_fault

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return self.function(out) if self.has_fault else out


# -- plants ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plant:
    """One fault, and the right answer. A kind of `FAULTS` is planted at the first module.

    Args:
        planted: The ranks that have the fault, if they differ from ``ranks``.
        change: A further change of the model, on the ranks that have the fault.
        inputs: A change of the batch of ``micro_batch``.
    """

    name: str
    kind: str
    model: str
    modules: tuple[str, ...]
    ranks: tuple[int, ...] = BOTH
    wrapper: str = ""
    precision: str = "fp32"
    planted: tuple[int, ...] = ()
    change: Callable[[nn.Module], Any] = lambda model: None
    inputs: Callable[[tuple[Tensor, Tensor]], Any] = lambda batch: None
    scale: float = 1.0
    micro_batch: int = 0
    ops: tuple[str, ...] = field(default=())
    forward: bool = True

    def __post_init__(self) -> None:
        if self.kind in FAULTS:
            object.__setattr__(self, "ops", FAULTS[self.kind].kernels)
            object.__setattr__(self, "forward", FAULTS[self.kind].forward)


@torch.no_grad()
def _nan_in_a_weight(model: nn.Module) -> None:
    """One element of a linear layer's weight is NaN."""
    model.get_parameter(f"{GPT2_FC}.weight")[3, 4] = NAN


@torch.no_grad()
def _inf_in_the_last_norm(model: nn.Module) -> None:
    """One element of a norm's weight is inf."""
    model.get_parameter("model.norm.weight")[2] = INF


@torch.no_grad()
def _embedding_of_inf(model: nn.Module) -> None:
    """All rows of an embedding are inf."""
    model.get_parameter("model.embed_tokens.weight").fill_(INF)


@torch.no_grad()
def _embedding_of_nan(model: nn.Module) -> None:
    """All rows of an embedding that tokens use are NaN."""
    model.get_parameter(f"{GPT2_WTE}.weight")[2:] = NAN


@torch.no_grad()
def _large_head(model: nn.Module) -> None:
    """The products of a head's weights are beyond fp16."""
    model.get_parameter("lm_head.weight").fill_(3e4)


@torch.no_grad()
def _large_convolution(model: nn.Module) -> None:
    """The products of a convolution's weights are beyond fp16."""
    model.get_parameter("body.0.weight").fill_(3e4)


@torch.no_grad()
def _large_head_without_inputs(model: nn.Module) -> None:
    """A head of large weights has inputs of 0: forward is 0, and backward is beyond fp16."""
    norm, head = model.get_submodule("transformer.ln_f"), model.get_submodule("lm_head")
    norm.weight.zero_()
    norm.bias.zero_()
    signs = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)).sign()
    head.weight = nn.Parameter(6e4 * signs)


def _inf_in_a_pixel(batch: tuple[Tensor, Tensor]) -> None:
    """One pixel of the batch is inf."""
    batch[0].view(-1)[5] = INF


def _all_labels_ignored(batch: tuple[Tensor, Tensor]) -> None:
    """The loss is a mean over no label."""
    batch[1].fill_(-100)


GPT2_ACT, LLAMA_ACT = ("transformer.h.1.mlp.act",), ("model.layers.0.mlp.act_fn",)
T5_ACT = ("encoder.block.0.layer.1.DenseReluDense.act",)
VIT_ACT, VIT_NORM = ("vit.layers.1.mlp.activation_fn",), ("vit.layers.0.layernorm_after",)
MOE_NORM, CONV_RELU = ("model.layers.1.post_attention_layernorm",), ("body.2",)
MOE_FIRST, LLAMA_NORM = ("model.layers.0.input_layernorm",), ("model.layers.1.input_layernorm",)
GPT2_FC, GPT2_WTE = "transformer.h.0.mlp.c_fc", "transformer.wte"
PIXELS = "vit.embeddings.patch_embeddings.projection"
OUTSIDE = ("", "(outside)")

PLANTS: tuple[Plant, ...] = (
    Plant("exp in an activation", "exp", "gpt2", GPT2_ACT, BOTH, "DDP"),
    Plant("exp on one rank", "exp", "vit", VIT_ACT, SECOND, "FSDP2"),
    Plant("log of 0", "log", "llama", LLAMA_ACT, BOTH, "FSDP2"),
    Plant("log of 0, one rank", "log", "conv", CONV_RELU, FIRST, "DDP"),
    Plant("unit length of 0", "0 / 0", "t5", T5_ACT, BOTH, "DDP"),
    Plant("unit length, bf16", "0 / 0", "llama", LLAMA_NORM, SECOND, "", "bf16"),
    Plant("deviation of 0", "rsqrt", "vit", VIT_NORM),
    Plant("deviation of 0, MoE", "rsqrt", "moe", MOE_NORM, FIRST, "DDP"),
    Plant("square in half", "fp16 product", "gpt2", GPT2_ACT, BOTH, "", "half"),
    Plant("square in half, one rank", "fp16 product", "conv", CONV_RELU, SECOND, "DDP"),
    Plant("sum in half", "fp16 sum", "t5", T5_ACT, BOTH, "FSDP2"),
    Plant("row all masked", "softmax of -inf", "gpt2", GPT2_ACT, BOTH, "FSDP2"),
    Plant("row all masked, bf16", "softmax of -inf", "llama", LLAMA_NORM, FIRST, "DDP", "bf16"),
    Plant("mask added twice", "finfo.min twice", "vit", VIT_ACT),
    Plant("mask added twice, half", "finfo.min twice", "llama", LLAMA_ACT, BOTH, "DDP", "half"),
    Plant("acos of 1.5", "domain", "t5", T5_ACT, BOTH, "DDP"),
    Plant("layer norm without eps", "eps 0", "vit", VIT_NORM, BOTH, "DDP"),
    Plant("layer norm without eps, one rank", "eps 0", "gpt2", GPT2_ACT, FIRST, "FSDP2"),
    Plant("no expert chosen", "router", "moe", MOE_NORM),
    Plant("no expert chosen, one rank", "router", "moe", MOE_FIRST, SECOND, "DDP"),
    Plant("sum over ranks in half", "collective", "llama", LLAMA_ACT),
    Plant("a rank feeds a sum inf", "fed collective", "gpt2", GPT2_ACT, SECOND, planted=BOTH),
    Plant(
        "NaN in a weight",
        "weight",
        "gpt2",
        (GPT2_FC,),
        SECOND,
        change=_nan_in_a_weight,
        ops=LINEAR,
    ),
    Plant(
        "inf in a norm's weight",
        "weight",
        "llama",
        ("model.norm",),
        wrapper="FSDP2",
        change=_inf_in_the_last_norm,
        ops=("mul",),
    ),
    Plant(
        "a row of an embedding",
        "embedding",
        "llama",
        ("model.embed_tokens",),
        wrapper="FSDP2",
        change=_embedding_of_inf,
        ops=("embedding",),
    ),
    Plant(
        "a row of an embedding, one rank",
        "embedding",
        "gpt2",
        (GPT2_WTE,),
        FIRST,
        change=_embedding_of_nan,
        ops=("embedding",),
    ),
    Plant(
        "inf in a pixel",
        "input",
        "vit",
        (PIXELS, *OUTSIDE),
        SECOND,
        "DDP",
        inputs=_inf_in_a_pixel,
        micro_batch=1,
        ops=(*CONV, "input"),
    ),
    Plant(
        "inf in a pixel, convolution",
        "input",
        "conv",
        ("stem.0", *OUTSIDE),
        FIRST,
        inputs=_inf_in_a_pixel,
        ops=(*CONV, "input"),
    ),
    Plant(
        "linear beyond 65504",
        "fp16 matmul",
        "llama",
        ("lm_head",),
        wrapper="DDP",
        precision="half",
        change=_large_head,
        ops=LINEAR,
    ),
    Plant(
        "convolution beyond 65504",
        "fp16 convolution",
        "conv",
        ("body.0",),
        precision="half",
        change=_large_convolution,
        ops=CONV,
    ),
    Plant(
        "all labels ignored",
        "empty mean",
        "gpt2",
        OUTSIDE,
        SECOND,
        "DDP",
        inputs=_all_labels_ignored,
        micro_batch=1,
        ops=NLL,
    ),
    Plant(
        "all labels ignored, images",
        "empty mean",
        "vit",
        OUTSIDE,
        FIRST,
        "FSDP2",
        inputs=_all_labels_ignored,
        ops=NLL,
    ),
    Plant("root of 0", "sqrt'", "t5", T5_ACT, BOTH, "DDP"),
    Plant("power 0.5 of 0", "pow'", "llama", LLAMA_ACT, BOTH, "FSDP2"),
    Plant("log hidden by where", "where'", "gpt2", GPT2_ACT),
    Plant("log hidden by where, bf16", "where'", "conv", CONV_RELU, FIRST, "DDP", "bf16"),
    Plant("a bad custom backward", "custom'", "moe", MOE_NORM, BOTH, "DDP"),
    Plant("acos at 1", "acos'", "llama", LLAMA_NORM),
    Plant(
        "backward matmul beyond 65504",
        "fp16 matmul'",
        "gpt2",
        ("lm_head",),
        precision="half",
        change=_large_head_without_inputs,
        scale=64.0,
        ops=LINEAR,
        forward=False,
    ),
    Plant(
        "loss scale of 2^30",
        "loss scale",
        "llama",
        OUTSIDE,
        precision="half",
        scale=2.0**30,
        ops=("_to_copy", "to", "mul", "copy_"),
        forward=False,
    ),
)


def _plant_fault(plant: Plant, model: nn.Module, has_fault: bool) -> None:
    """Put the fault into the model of this rank."""
    if plant.kind in FAULTS:
        parent, _, name = plant.modules[0].rpartition(".")
        owner = model.get_submodule(parent)
        inner = owner.get_submodule(name)
        owner.register_module(name, Faulty(inner, FAULTS[plant.kind].change, has_fault))
    if has_fault:
        plant.change(model)


def build(plant: Plant) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the model as it trains on this rank, with its fault, and its step."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    has_fault = rank in (plant.planted or plant.ranks)
    torch.manual_seed(0)
    model = _model(plant.model).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _plant_fault(plant, model, has_fault)
    dtype = HALF if plant.precision == "half" else torch.float32
    model.to(dtype)
    if plant.wrapper == "FSDP2":
        for module in [*model.modules()][1:]:
            if type(module).__name__.endswith(("Block", "DecoderLayer", "ViTLayer")):
                fully_shard(module)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if plant.wrapper == "DDP" else model
    batches = _batches(plant.model, rank, dtype)
    if has_fault:
        plant.inputs(batches[plant.micro_batch])

    def step() -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=plant.precision == "bf16"):
                out = wrapped(**dict(zip(MODELS[plant.model][3], batch, strict=False)))
            labels = batch[1].flatten()
            logits = getattr(out, "logits", out).float()
            loss = F.cross_entropy(logits.view(len(labels), -1), labels)
            (loss * (plant.scale / 2)).backward()
            total = total + loss.detach()
        return total

    return wrapped, step

"""Forty planted faults that make inf or NaN, of more than twenty kinds in six models.

The plants were written from the documentation of the kinds of faults, before the tool that they
score existed. They were reworded since, without a change of a fault or an answer.

A plant names the right answer: the operation, the module or parameter, the direction, the ranks and
the microbatch. `build` makes its model and a step of two microbatches on this rank of two.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FAULTS", "MODELS", "PLANTS", "Fault", "Plant", "build"]

HALF = torch.float16
BOTH_RANKS = (0, 1)
RANK_0 = (0,)
RANK_1 = (1,)
INF = float("inf")
NAN = float("nan")


# A function imports transformers for its model, because the import is slow.

DECODER: dict[str, Any] = {
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


def make_gpt2() -> nn.Module:
    """Return a GPT-2 with two layers."""
    import transformers

    config = transformers.GPT2Config(**DECODER, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(config)


def make_llama() -> nn.Module:
    """Return a Llama with two layers."""
    import transformers

    config = transformers.LlamaConfig(**DECODER)
    return transformers.LlamaForCausalLM(config)


def make_moe() -> nn.Module:
    """Return a Mixtral with two layers of four experts."""
    import transformers

    config = transformers.MixtralConfig(**DECODER, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def make_t5() -> nn.Module:
    """Return a T5 with two layers."""
    import transformers

    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def make_vit() -> nn.Module:
    """Return a vision transformer with two layers."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=4,
    )
    return transformers.ViTForImageClassification(config)


def make_conv() -> nn.Module:
    """Return two convolutions with batch norms, and a head."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    modules["stem"] = stem
    modules["body"] = body
    modules["pool"] = nn.AdaptiveAvgPool2d(1)
    modules["flat"] = nn.Flatten()
    modules["head"] = nn.Linear(8, 4)
    return nn.Sequential(modules)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": make_gpt2,
    "llama": make_llama,
    "moe": make_moe,
    "t5": make_t5,
    "vit": make_vit,
    "conv": make_conv,
}
IMAGE_MODELS = ("vit", "conv")


def make_batches(model_name: str, rank: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and labels of two microbatches."""
    generator = torch.Generator().manual_seed(10 + rank)
    batches = []
    if model_name in IMAGE_MODELS:
        image_shape = (4, 3, 8, 8)
        images = [torch.randn(image_shape, generator=generator).to(dtype) for _ in range(2)]
        for inputs in images:
            labels = torch.randint(0, 4, (4,), generator=generator)
            batches.append((inputs, labels))
    else:
        for _ in range(2):
            tokens = torch.randint(2, 32, (2, 8), generator=generator)
            batches.append((tokens, tokens.clone()))
    return batches


def make_arguments(model_name: str, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a model's forward pass."""
    if model_name == "conv":
        return {"input": inputs}
    if model_name == "vit":
        return {"pixel_values": inputs}
    if model_name == "t5":
        return {"input_ids": inputs, "decoder_input_ids": labels}
    return {"input_ids": inputs}


# Faults in the output of a module.


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
    large = torch.exp(hundred)
    return y + large.to(y.dtype)


def _log_of_0(y: Tensor) -> Tensor:
    """Log of a relu that has cut everything off is -inf."""
    zeros = F.relu(y - 1e4)
    return y + torch.log(zeros)


def _unit_length_of_0(y: Tensor) -> Tensor:
    """A row of zeros divided by its length is 0 / 0."""
    row = y * 0
    elements = (y * 0).abs()
    length = elements.amax(-1, keepdim=True)
    return y + row / length


def _deviation_of_0(y: Tensor) -> Tensor:
    """The reciprocal root of a variance of 0, without an epsilon, is inf."""
    squares = (y * 0).square()
    variance = squares.mean(-1, keepdim=True)
    return y * variance.rsqrt()


def _square_in_half(y: Tensor) -> Tensor:
    """The square of 300 is beyond fp16."""
    factor = y.to(HALF) * 0 + 300
    square = factor * factor
    return y + square.to(y.dtype)


def _sum_in_half(y: Tensor) -> Tensor:
    """The sum of 64 times 2,000 is beyond fp16."""
    terms = torch.full((64,), 2000.0, dtype=HALF)
    total = terms.sum()
    return y + total.to(y.dtype)


def _row_all_masked(y: Tensor) -> Tensor:
    """The softmax of a row of -inf is NaN."""
    mask = torch.ones_like(y, dtype=torch.bool)
    scores = y.float().masked_fill(mask, -INF)
    weights = scores.softmax(-1)
    return y * weights.to(y.dtype)


def _masked_twice(y: Tensor) -> Tensor:
    """A mask of the lowest finite number, added to itself, is -inf."""
    lowest = torch.finfo(y.dtype).min
    mask = torch.full_like(y, lowest)
    scores = y * 0 + (mask + mask)
    return y * scores.softmax(-1)


def _acos_of_1_5(y: Tensor) -> Tensor:
    """Acos has no value above 1."""
    cosine = y * 0 + 1.5
    return y + torch.acos(cosine)


def _layer_norm_without_eps(y: Tensor) -> Tensor:
    """A layer norm of zeros divides 0 by 0 if its epsilon is 0."""
    shape = y.shape[-1:]
    normalized = F.layer_norm(y * 0, shape, eps=0.0)
    return y + normalized


def _no_expert_chosen(y: Tensor) -> Tensor:
    """The weights of a router that has chosen no expert add up to 0, and are divided by 0."""
    is_chosen = y > 1e9
    weights = y.softmax(-1) * is_chosen
    total = weights.sum(-1, keepdim=True)
    return y * (weights / total)


def _sum_over_ranks_in_half(y: Tensor) -> Tensor:
    """Two ranks send 60,000 each, and the sum is beyond fp16."""
    terms = torch.full((4,), 60000.0, dtype=HALF)
    total = _SumOverRanks.apply(terms).sum()
    return y + total.to(y.dtype)


def _inf_of_rank_1_in_a_sum(y: Tensor) -> Tensor:
    """Rank 1 makes an inf, which a sum over ranks brings to rank 0."""
    exponent = 1.0
    if dist.get_rank() == 1:
        exponent = 100.0
    term = torch.exp(y.float().mean() * 0 + exponent)
    total = _SumOverRanks.apply(term)
    return y + total.to(y.dtype)


def _root_of_0(y: Tensor) -> Tensor:
    """The root of 0 is 0, and its derivative is inf."""
    zeros = (y * 0).abs()
    return y + zeros.sqrt()


def _power_of_0(y: Tensor) -> Tensor:
    """The power 0.5 of 0 is 0, and its derivative is inf."""
    zeros = y * 0
    return y + zeros.pow(0.5)


def _log_hidden_by_where(y: Tensor) -> Tensor:
    """The log of 0 is not chosen in the forward pass; backward multiplies its inf by 0."""
    logs = torch.log(y * 0)
    return y + torch.where(y > 1e9, logs, y)


def _acos_of_1(y: Tensor) -> Tensor:
    """Acos of 1 is 0, and its derivative is inf."""
    cosine = y * 0 + 1.0
    return y + torch.acos(cosine)


class Fault(NamedTuple):
    """A change of a module's output, and the right answer: function, kernels and direction."""

    change: Callable[[Tensor], Tensor]
    function: str
    kernels: tuple[str, ...]
    forward: bool = True


LINEAR = ("addmm", "mm", "linear", "matmul", "bmm")
CONV = ("convolution", "conv2d", "mkldnn_convolution", "_convolution", "slow_conv2d_forward")
CONV_OR_INPUT = (*CONV, "input")
SOFTMAX = ("_softmax", "softmax", "_safe_softmax")
CROSS_ENTROPY = ("nll_loss_forward", "nll_loss", "cross_entropy_loss", "nll_loss_nd")
LAYER_NORM = ("native_layer_norm", "layer_norm")
ALL_REDUCE = ("all_reduce", "allreduce_", "allreduce", "all_reduce_")
ACOS_BACKWARD = ("rsqrt", "div", "reciprocal")
CAST_OF_LOSS = ("_to_copy", "to", "mul", "copy_")

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
    "acos'": Fault(_acos_of_1, "acos", ACOS_BACKWARD, forward=False),
}


class Faulty(nn.Module):
    """A module with a fault in its output, on ranks that have the fault."""

    def __init__(
        self, inner: nn.Module, function: Callable[[Tensor], Tensor], has_fault: bool
    ) -> None:
        super().__init__()
        self.inner = inner
        self.function = function
        self.has_fault = has_fault

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        if self.has_fault:
            return self.function(out)
        return out


# Faults in weights and batches.


def _keep_model(model: nn.Module) -> None:
    """Change nothing."""


@torch.no_grad()
def _nan_in_a_weight(model: nn.Module) -> None:
    """One element of a linear layer's weight is NaN."""
    weight = model.get_parameter("transformer.h.0.mlp.c_fc.weight")
    weight[3, 4] = NAN


@torch.no_grad()
def _inf_in_the_last_norm(model: nn.Module) -> None:
    """One element of a norm's weight is inf."""
    weight = model.get_parameter("model.norm.weight")
    weight[2] = INF


@torch.no_grad()
def _embedding_of_inf(model: nn.Module) -> None:
    """All rows of an embedding are inf."""
    weight = model.get_parameter("model.embed_tokens.weight")
    weight.fill_(INF)


@torch.no_grad()
def _embedding_of_nan(model: nn.Module) -> None:
    """All rows of an embedding that tokens use are NaN."""
    weight = model.get_parameter("transformer.wte.weight")
    weight[2:] = NAN


@torch.no_grad()
def _large_head(model: nn.Module) -> None:
    """The products of a head's weights are beyond fp16."""
    weight = model.get_parameter("lm_head.weight")
    weight.fill_(3e4)


@torch.no_grad()
def _large_convolution(model: nn.Module) -> None:
    """The products of a convolution's weights are beyond fp16."""
    weight = model.get_parameter("body.0.weight")
    weight.fill_(3e4)


@torch.no_grad()
def _large_head_without_inputs(model: nn.Module) -> None:
    """A head of large weights has inputs of 0: forward is 0, and backward is beyond fp16."""
    norm = model.get_submodule("transformer.ln_f")
    norm.weight.zero_()
    norm.bias.zero_()
    head = model.get_submodule("lm_head")
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(head.weight.shape, generator=generator)
    head.weight = nn.Parameter(6e4 * numbers.sign())


Batch = tuple[Tensor, Tensor]


def _keep_batch(batch: Batch) -> None:
    """Change nothing."""


def _inf_in_a_pixel(batch: Batch) -> None:
    """One pixel of the batch is inf."""
    images, _ = batch
    images.view(-1)[5] = INF


def _all_labels_ignored(batch: Batch) -> None:
    """The loss is a mean over no label."""
    _, labels = batch
    labels.fill_(-100)


# Plants.


@dataclass(frozen=True)
class Plant:
    """A planted fault, and the right answer.

    Args:
        name: The fault in a few words.
        kind: The kind of fault, which is a key of `FAULTS` if the fault is in a module's output.
        model: A key of `MODELS`.
        modules: The right modules or parameters. A fault of `FAULTS` is planted in the first.
        ranks: The right ranks.
        wrapper: DDP, FSDP2 or nothing.
        precision: ``"fp32"``, ``"bf16"`` for an autocast region, or ``"half"`` for fp16 weights.
        planted: The ranks that have the fault, if they differ from ``ranks``.
        change: A further change of the model, on the ranks that have the fault.
        inputs: A change of the batch of ``micro_batch``.
        scale: A factor of the loss.
        micro_batch: The right microbatch.
        ops: The right operations, by aten's names without overloads.
        forward: Whether the forward pass is the right direction.
    """

    name: str
    kind: str
    model: str
    modules: tuple[str, ...]
    ranks: tuple[int, ...]
    wrapper: str
    precision: str
    planted: tuple[int, ...]
    change: Callable[[nn.Module], Any]
    inputs: Callable[[Batch], Any]
    scale: float
    micro_batch: int
    ops: tuple[str, ...]
    forward: bool


PLANTS: list[Plant] = []


def plant(
    name: str,
    kind: str,
    model: str,
    modules: tuple[str, ...],
    *,
    ranks: tuple[int, ...] = BOTH_RANKS,
    wrapper: str = "",
    precision: str = "fp32",
    planted: tuple[int, ...] = (),
    change: Callable[[nn.Module], Any] = _keep_model,
    inputs: Callable[[Batch], Any] = _keep_batch,
    scale: float = 1.0,
    micro_batch: int = 0,
    ops: tuple[str, ...] = (),
    forward: bool = True,
) -> None:
    """Add a plant to `PLANTS`; a kind in `FAULTS` has its operations and its direction."""
    if kind in FAULTS:
        ops = FAULTS[kind].kernels
        forward = FAULTS[kind].forward
    PLANTS.append(
        Plant(
            name=name,
            kind=kind,
            model=model,
            modules=modules,
            ranks=ranks,
            wrapper=wrapper,
            precision=precision,
            planted=planted,
            change=change,
            inputs=inputs,
            scale=scale,
            micro_batch=micro_batch,
            ops=ops,
            forward=forward,
        )
    )


GPT2_ACT = ("transformer.h.1.mlp.act",)
GPT2_FC = ("transformer.h.0.mlp.c_fc",)
GPT2_EMBEDDING = ("transformer.wte",)
LLAMA_ACT = ("model.layers.0.mlp.act_fn",)
LLAMA_NORM = ("model.layers.1.input_layernorm",)
LLAMA_LAST_NORM = ("model.norm",)
LLAMA_EMBEDDING = ("model.embed_tokens",)
LM_HEAD = ("lm_head",)
MOE_FIRST_NORM = ("model.layers.0.input_layernorm",)
MOE_NORM = ("model.layers.1.post_attention_layernorm",)
T5_ACT = ("encoder.block.0.layer.1.DenseReluDense.act",)
VIT_ACT = ("vit.layers.1.mlp.activation_fn",)
VIT_NORM = ("vit.layers.0.layernorm_after",)
VIT_PIXELS = ("vit.embeddings.patch_embeddings.projection", "", "(outside)")
CONV_PIXELS = ("stem.0", "", "(outside)")
CONV_BODY = ("body.0",)
CONV_RELU = ("body.2",)
OUTSIDE = ("", "(outside)")

plant("exp in an activation", "exp", "gpt2", GPT2_ACT, wrapper="DDP")
plant("exp on one rank", "exp", "vit", VIT_ACT, ranks=RANK_1, wrapper="FSDP2")
plant("log of 0", "log", "llama", LLAMA_ACT, wrapper="FSDP2")
plant("log of 0, one rank", "log", "conv", CONV_RELU, ranks=RANK_0, wrapper="DDP")
plant("unit length of 0", "0 / 0", "t5", T5_ACT, wrapper="DDP")
plant("unit length, bf16", "0 / 0", "llama", LLAMA_NORM, ranks=RANK_1, precision="bf16")
plant("deviation of 0", "rsqrt", "vit", VIT_NORM)
plant("deviation of 0, MoE", "rsqrt", "moe", MOE_NORM, ranks=RANK_0, wrapper="DDP")
plant("square in half", "fp16 product", "gpt2", GPT2_ACT, precision="half")
plant(
    "square in half, one rank",
    "fp16 product",
    "conv",
    CONV_RELU,
    ranks=RANK_1,
    wrapper="DDP",
)
plant("sum in half", "fp16 sum", "t5", T5_ACT, wrapper="FSDP2")
plant("row all masked", "softmax of -inf", "gpt2", GPT2_ACT, wrapper="FSDP2")
plant(
    "row all masked, bf16",
    "softmax of -inf",
    "llama",
    LLAMA_NORM,
    ranks=RANK_0,
    wrapper="DDP",
    precision="bf16",
)
plant("mask added twice", "finfo.min twice", "vit", VIT_ACT)
plant(
    "mask added twice, half",
    "finfo.min twice",
    "llama",
    LLAMA_ACT,
    wrapper="DDP",
    precision="half",
)
plant("acos of 1.5", "domain", "t5", T5_ACT, wrapper="DDP")
plant("layer norm without eps", "eps 0", "vit", VIT_NORM, wrapper="DDP")
plant(
    "layer norm without eps, one rank",
    "eps 0",
    "gpt2",
    GPT2_ACT,
    ranks=RANK_0,
    wrapper="FSDP2",
)
plant("no expert chosen", "router", "moe", MOE_NORM)
plant("no expert chosen, one rank", "router", "moe", MOE_FIRST_NORM, ranks=RANK_1, wrapper="DDP")
plant("sum over ranks in half", "collective", "llama", LLAMA_ACT)
plant(
    "a rank feeds a sum inf",
    "fed collective",
    "gpt2",
    GPT2_ACT,
    ranks=RANK_1,
    planted=BOTH_RANKS,
)
plant(
    "NaN in a weight",
    "weight",
    "gpt2",
    GPT2_FC,
    ranks=RANK_1,
    change=_nan_in_a_weight,
    ops=LINEAR,
)
plant(
    "inf in a norm's weight",
    "weight",
    "llama",
    LLAMA_LAST_NORM,
    wrapper="FSDP2",
    change=_inf_in_the_last_norm,
    ops=("mul",),
)
plant(
    "a row of an embedding",
    "embedding",
    "llama",
    LLAMA_EMBEDDING,
    wrapper="FSDP2",
    change=_embedding_of_inf,
    ops=("embedding",),
)
plant(
    "a row of an embedding, one rank",
    "embedding",
    "gpt2",
    GPT2_EMBEDDING,
    ranks=RANK_0,
    change=_embedding_of_nan,
    ops=("embedding",),
)
plant(
    "inf in a pixel",
    "input",
    "vit",
    VIT_PIXELS,
    ranks=RANK_1,
    wrapper="DDP",
    inputs=_inf_in_a_pixel,
    micro_batch=1,
    ops=CONV_OR_INPUT,
)
plant(
    "inf in a pixel, convolution",
    "input",
    "conv",
    CONV_PIXELS,
    ranks=RANK_0,
    inputs=_inf_in_a_pixel,
    ops=CONV_OR_INPUT,
)
plant(
    "linear beyond 65504",
    "fp16 matmul",
    "llama",
    LM_HEAD,
    wrapper="DDP",
    precision="half",
    change=_large_head,
    ops=LINEAR,
)
plant(
    "convolution beyond 65504",
    "fp16 convolution",
    "conv",
    CONV_BODY,
    precision="half",
    change=_large_convolution,
    ops=CONV,
)
plant(
    "all labels ignored",
    "empty mean",
    "gpt2",
    OUTSIDE,
    ranks=RANK_1,
    wrapper="DDP",
    inputs=_all_labels_ignored,
    micro_batch=1,
    ops=CROSS_ENTROPY,
)
plant(
    "all labels ignored, images",
    "empty mean",
    "vit",
    OUTSIDE,
    ranks=RANK_0,
    wrapper="FSDP2",
    inputs=_all_labels_ignored,
    ops=CROSS_ENTROPY,
)
plant("root of 0", "sqrt'", "t5", T5_ACT, wrapper="DDP")
plant("power 0.5 of 0", "pow'", "llama", LLAMA_ACT, wrapper="FSDP2")
plant("log hidden by where", "where'", "gpt2", GPT2_ACT)
plant(
    "log hidden by where, bf16",
    "where'",
    "conv",
    CONV_RELU,
    ranks=RANK_0,
    wrapper="DDP",
    precision="bf16",
)
plant("a bad custom backward", "custom'", "moe", MOE_NORM, wrapper="DDP")
plant("acos at 1", "acos'", "llama", LLAMA_NORM)
plant(
    "backward matmul beyond 65504",
    "fp16 matmul'",
    "gpt2",
    LM_HEAD,
    precision="half",
    change=_large_head_without_inputs,
    scale=64.0,
    ops=LINEAR,
    forward=False,
)
plant(
    "loss scale of 2^30",
    "loss scale",
    "llama",
    OUTSIDE,
    precision="half",
    scale=2.0**30,
    ops=CAST_OF_LOSS,
    forward=False,
)


def _plant_fault(plant: Plant, model: nn.Module, has_fault: bool) -> None:
    """Put the fault into the model of this rank."""
    if plant.kind in FAULTS:
        change = FAULTS[plant.kind].change
        module = model.get_submodule(plant.modules[0])
        model.set_submodule(plant.modules[0], Faulty(module, change, has_fault))
    if has_fault:
        plant.change(model)


def _shard_layers(model: nn.Module) -> None:
    """Shard each layer of a model and the model with FSDP2."""
    for module in list(model.modules())[1:]:
        class_name = type(module).__name__
        if class_name.endswith(("Block", "DecoderLayer", "ViTLayer")):
            fully_shard(module)
    fully_shard(model)


def build(plant: Plant) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the model with its fault as it trains on this rank, and its step."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    faulty_ranks = plant.planted or plant.ranks
    has_fault = rank in faulty_ranks
    torch.manual_seed(0)
    model = MODELS[plant.model]()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _plant_fault(plant, model, has_fault)
    dtype = torch.float32
    if plant.precision == "half":
        dtype = HALF
    model.to(dtype)
    wrapped = model
    if plant.wrapper == "FSDP2":
        _shard_layers(model)
    elif plant.wrapper == "DDP":
        wrapped = DistributedDataParallel(model)
    batches = make_batches(plant.model, rank, dtype)
    if has_fault:
        plant.inputs(batches[plant.micro_batch])
    uses_autocast = plant.precision == "bf16"

    def step() -> Tensor:
        total = torch.zeros(())
        for inputs, labels in batches:
            arguments = make_arguments(plant.model, inputs, labels)
            with torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast):
                out = wrapped(**arguments)
            logits = getattr(out, "logits", out).float()
            targets = labels.flatten()
            loss = F.cross_entropy(logits.view(len(targets), -1), targets)
            scaled_loss = loss * (plant.scale / 2)
            scaled_loss.backward()
            total = total + loss.detach()
        return total

    return wrapped, step

"""The models: a GPT, models of transformers and of the user; and their initial weights."""

import hashlib
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's name for it)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from launch.config import Config
from launch.data import Data
from launch.program import (
    UsageError,
    convert_to_usage_error,
    import_object,
    parse_arguments,
    require,
    suggest,
)

LossFunction = Callable[[Tensor, Tensor], Tensor]
# Ids of special tokens, which belong to the tokenizer that a model was trained with.
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Block(nn.Module):
    """Attention and a feed-forward network, with a residual connection around each."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.d_model
        self.dropout = config.dropout
        self.head_width = width // config.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        dropout = self.dropout if self.training else 0.0
        attended = self._attend(F.rms_norm(x, x.shape[-1:]), dropout)
        x = x + F.dropout(attended, dropout)
        hidden = F.gelu(self.feed_in(F.rms_norm(x, x.shape[-1:])))
        return x + F.dropout(self.feed_out(hidden), dropout)

    def _attend(self, x: Tensor, dropout: float) -> Tensor:
        batch, time, _ = x.shape
        # The dimension of the heads comes first, so that a tensor-parallel rank has whole heads.
        qkv = self.qkv(x).view(batch, time, -1, 3, self.head_width)
        query, key, value = qkv.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        joined = mixed.transpose(1, 2).reshape(batch, time, -1)
        result: Tensor = self.attention_out(joined)
        return result


class GPT(nn.Module):
    """A causal transformer that predicts each token from the tokens before it.

    Its norms have no weights, so FSDP2 can gather the blocks in half precision on any device.
    """

    # For parallelize_module: layers that --tp divides by columns, and layers it divides by rows.
    tensor_parallel_plan = (("qkv", "feed_in"), ("attention_out", "feed_out"))

    def __init__(self, config: Config, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, config.d_model)
        # The embedding of positions. Its name is part of the format of checkpoints.
        self.places = nn.Embedding(config.seq_len, config.d_model)
        self.blocks = nn.ModuleList()
        for _ in range(config.layers):
            self.blocks.append(Block(config))
        self.head = nn.Linear(config.d_model, classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (batch, time) to logits (batch, time, classes)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.rms_norm(x, x.shape[-1:]))
        return logits

    def init_weight(self, name: str, weight: Tensor) -> None:
        """Initialize a weight as GPT-2 does."""
        std = 0.02
        # The outputs of these layers are added up in the residual stream.
        if name.endswith("_out.weight"):
            std /= (2 * len(self.blocks)) ** 0.5
        nn.init.normal_(weight, std=std)


class LogitsModel(nn.Module):
    """A causal language model of transformers that returns only its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, **kwargs: Tensor) -> Tensor:
        """Map int64 tokens (batch, time) to logits (batch, time, classes)."""
        outputs = self.inner(input_ids=input_ids, use_cache=False, **kwargs)
        logits: Tensor = outputs.logits
        return logits


def build_model(config: Config, data: Data) -> nn.Module:
    """Build the model of ``--model``, with weights or on the meta device for `init_weights`.

    Raises:
        UsageError: There is no such model, or it cannot be built for these data.
    """
    kind, _, name = config.model.partition(":")
    torch.manual_seed(config.seed)
    if kind == "gpt":
        with torch.device("meta"):
            return GPT(config, data.classes)
    model_args = parse_arguments(config.model_args)
    if kind == "hf":
        return _build_transformers_model(name, model_args, data.classes)
    with convert_to_usage_error(f"--model {config.model}", TypeError):
        build = import_object("--model", config.model)
        model = build(data, **model_args)
    fault = f"--model {config.model}: it returned no Module with something to train"
    if not isinstance(model, nn.Module):
        raise UsageError(fault)
    require(any(p.requires_grad for p in model.parameters()), fault)
    return model


def _build_transformers_model(
    name: str, model_args: Mapping[str, Any], classes: int
) -> LogitsModel:
    """Build a causal language model of transformers without a download."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    hint = f"--model hf:{name}: pip install -e '.[hf]' brings transformers"
    with convert_to_usage_error(hint, ImportError):
        transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    model_types = transformers.CONFIG_MAPPING
    is_folder = Path(name).is_dir()
    require(
        is_folder or name in model_types,
        f"--model hf:{name}: there is no such folder, and transformers has no such type. Nothing "
        f"is downloaded{suggest(model_types, name)}",
    )
    # transformers raises errors of any class.
    with convert_to_usage_error(f"--model hf:{name}: transformers cannot build it", Exception):
        auto_model = transformers.AutoModelForCausalLM
        if any(Path(name).glob("*.safetensors")):
            model = auto_model.from_pretrained(name, dtype=torch.float32, **model_args)
            return LogitsModel(model)
        settings: dict[str, Any] = dict.fromkeys(_SPECIAL_TOKENS)
        settings["vocab_size"] = classes
        settings.update(model_args)
        make_config = transformers.AutoConfig.for_model
        if is_folder:
            make_config = transformers.AutoConfig.from_pretrained
        hf_config = make_config(name, **settings)
        _require_known_settings(name, model_args, hf_config, make_config(name))
        return LogitsModel(auto_model.from_config(hf_config, dtype=torch.float32))


def _require_known_settings(
    name: str, model_args: Mapping[str, Any], hf_config: Any, default_config: Any
) -> None:
    """Refuse names that a config of transformers stores but does not read."""
    unknown = []
    for argument in model_args:
        if argument in vars(hf_config) and not hasattr(default_config, argument):
            unknown.append(argument)
    listed = ", ".join(unknown)
    hint = suggest(dir(default_config), *unknown)
    require(not unknown, f"--model-args {listed}: hf:{name} has no such setting{hint}")


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of ModuleLists, which are sharded, compiled or checkpointed as units."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks += child
        else:
            blocks += find_blocks(child)
    return blocks


@torch.no_grad()
def init_weights(model: Any, seed: int, device: torch.device) -> None:
    """Give memory and weights to a model on the meta device, one tensor at a time.

    Each rank draws the full tensor, from a seed made of the tensor's name, and keeps its shard.
    A run therefore starts with the same weights in every layout, and needs the memory of the
    shards and one tensor.

    Args:
        model: The model, sharded or not. Its ``init_weight(name, tensor)`` draws a full tensor.
        seed: Seed of the weights.
        device: The device for the model.
    """
    model.to_empty(device=device)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        dtype = torch.float32 if weight.is_floating_point() else weight.dtype
        full = torch.empty(weight.shape, dtype=dtype)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big"))
        model.init_weight(name, full)
        full = full.to(device, weight.dtype)
        if isinstance(weight, DTensor):
            # Every rank has drawn the same tensor, so no rank sends it.
            full = distribute_tensor(
                full, weight.device_mesh, weight.placements, src_data_rank=None
            )
        weight.copy_(full)


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, or the model itself."""
    if not isinstance(model, DistributedDataParallel):
        return model
    inner: nn.Module = model.module
    return inner


def loss_function(model: nn.Module) -> LossFunction:
    """Return the model's ``loss(outputs, targets)``, or `mean_cross_entropy` if it has none."""
    loss: LossFunction = getattr(unwrap_ddp(model), "loss", mean_cross_entropy)
    return loss


def read_logits(outputs: Any) -> Tensor:
    """Return the logits, which a model returns as a tensor or in outputs of transformers."""
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits


def mean_cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, which is computed in fp32 at every level.

    An fp16 loss would round, and the loss scale, which is the gradient of the loss, would overflow
    at 65536.

    Args:
        outputs: The logits (..., classes), or an object with them as ``logits``.
        targets: int64 (...).
    """
    logits = read_logits(outputs).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

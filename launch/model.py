"""The models: a GPT, those of transformers, and the user's own; and how they get their weights."""

import hashlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from launch.config import Config
from launch.data import Data
from launch.program import convert_to_usage_error, import_object, parse_arguments, require, suggest


class Block(nn.Module):
    """Attention and a feed-forward network, each added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.dropout = config.d_model, config.dropout
        self.head_width = width // config.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        # Heads come first, so that tensor parallel gives a rank whole ones.
        qkv = self.qkv(F.rms_norm(x, (width,))).view(batch, time, -1, 3, self.head_width)
        query, key, value = qkv.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = self.attention_out(mixed.transpose(1, 2).reshape(batch, time, -1))
        x = x + F.dropout(mixed, dropout)
        fed = self.feed_out(F.gelu(self.feed_in(F.rms_norm(x, (width,)))))
        return x + F.dropout(fed, dropout)


class GPT(nn.Module):
    """A causal transformer that predicts each token from those before it.

    Its norms have no weights, so that blocks may be gathered in half precision on any device.
    """

    # For parallelize_module: heads and hidden channels are divided over the ranks of --tp.
    tensor_parallel_plan = (("qkv", "feed_in"), ("attention_out", "feed_out"))

    def __init__(self, config: Config, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, config.d_model)
        self.places = nn.Embedding(config.seq_len, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.d_model, classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (batch, time) to logits (batch, time, classes)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.rms_norm(x, x.shape[-1:]))
        return logits

    def init_weight(self, name: str, weight: Tensor) -> None:
        """Draw a weight as GPT-2 does: smaller where its output is added to the stream."""
        added = name.endswith("_out.weight")
        nn.init.normal_(weight, std=0.02 / (2 * len(self.blocks)) ** 0.5 if added else 0.02)


class Logits(nn.Module):
    """A causal language model of transformers that returns its logits alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, **more: Tensor) -> Tensor:
        """Map int64 tokens (batch, time) to logits (batch, time, classes)."""
        logits: Tensor = self.inner(input_ids=input_ids, use_cache=False, **more).logits
        return logits


def build(config: Config, data: Data) -> nn.Module:
    """Build what ``--model`` names: with weights, or on the meta device for `draw` to do so.

    Raises:
        UsageError: There is no such model, or it cannot be built for these data.
    """
    kind, _, name = config.model.partition(":")
    given = parse_arguments(config.model_args)
    torch.manual_seed(config.seed)
    if kind == "gpt":
        with torch.device("meta"):
            return GPT(config, data.classes)
    if kind == "hf":
        return _hugging_face(name, given, data.classes)
    with convert_to_usage_error(f"--model {config.model}", TypeError):
        model: nn.Module = import_object("--model", config.model)(data, **given)
    trains = isinstance(model, nn.Module) and any(p.requires_grad for p in model.parameters())
    require(trains, f"--model {config.model}: it returned no Module with something to train")
    return model


def _hugging_face(name: str, given: dict[str, Any], classes: int) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with convert_to_usage_error(
        f"--model hf:{name}: pip install -e '.[hf]' brings transformers", ImportError
    ):
        transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    auto, models = transformers.AutoConfig, transformers.AutoModelForCausalLM
    local, types = Path(name).is_dir(), transformers.CONFIG_MAPPING
    require(
        local or name in types,
        f"--model hf:{name}: no folder here, and no type that transformers has; nothing is "
        f"downloaded{suggest(types, name)}",
    )
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # of a tokenizer
    known = {**special, "vocab_size": classes, **given}
    with convert_to_usage_error(
        f"--model hf:{name}: transformers cannot build it", Exception
    ):  # of any class
        if any(Path(name).glob("*.safetensors")):
            return Logits(models.from_pretrained(name, dtype=torch.float32, **given))
        settings = auto.from_pretrained(name, **known) if local else auto.for_model(name, **known)
        plain = auto.from_pretrained(name) if local else auto.for_model(name)
        # A config takes any name. Those that it reads are its attributes, or do not stay.
        strange = [each for each in given if each in vars(settings) and not hasattr(plain, each)]
        require(
            not strange,
            f"--model-args {', '.join(strange)}: hf:{name} has none such"
            f"{suggest(dir(plain), *strange)}",
        )
        return Logits(models.from_config(settings, dtype=torch.float32))


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return what is gathered, compiled or checkpointed as one: members of the ModuleLists."""
    return [
        block
        for child in model.children()
        for block in (child if isinstance(child, nn.ModuleList) else find_blocks(child))
    ]


@torch.no_grad()
def draw(model: Any, seed: int, device: torch.device) -> None:
    """Give a model on the meta device its memory and its weights, one tensor at a time.

    Each rank draws a tensor whole, from a seed made of its name, and keeps its shard; so a run
    starts with the same weights in every layout, and takes the memory of the shards and one tensor.

    Args:
        model: Sharded or not. Its ``init_weight(name, tensor)`` draws a whole one.
        seed: Of the weights.
        device: Where the model is to be.
    """
    model.to_empty(device=device)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        dtype = torch.float32 if weight.is_floating_point() else weight.dtype
        drawn = torch.empty(weight.shape, dtype=dtype)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big"))
        model.init_weight(name, drawn)
        drawn = drawn.to(device, weight.dtype)
        if isinstance(weight, DTensor):  # every rank has drawn the same, so none is sent
            where = weight.device_mesh, weight.placements
            drawn = distribute_tensor(drawn, *where, src_data_rank=None)
        weight.copy_(drawn)


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return what DDP wraps, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def loss_function(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what a model is trained on: ``loss(outputs, targets)`` or the mean loss."""
    loss: Callable[[Tensor, Tensor], Tensor] = getattr(
        unwrap_ddp(model), "loss", mean_cross_entropy
    )
    return loss


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, taken in fp32 whatever the model computed in.

    An fp16 loss would round, and its seed gradient, the loss scale, would overflow at 65536.

    Args:
        logits: (..., classes).
        targets: int64 (...).
    """
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

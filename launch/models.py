"""Which model ``--model`` names, and how it is built. A new one is one function and one row."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from launch.config import Config
from launch.data import Data
from launch.errors import UsageError
from launch.networks import GPT, ImageClassifier
from launch.sketch import Sketch, sketch

__all__ = [
    "MODELS",
    "Recipe",
    "count_parameters",
    "init_model",
    "mean_loss",
    "recipe_for",
    "sketch_model",
]


@dataclass(frozen=True)
class Recipe:
    """How a model is made.

    Attributes:
        kind: What it is for: ``"text"``, ``"images"``, or None for whatever the data are.
        build: Makes it for the data, with weights from torch's default generator.
        shape: What a checkpoint's model must have in common with this one, by flag.
        meta: Whether it can be built without its memory, to be counted.
        check: Refuses a model that cannot be trained on these data, given what is called.
    """

    kind: str | None
    build: Callable[[Data], nn.Module]
    shape: dict[str, object]
    meta: bool = True
    check: Callable[[nn.Module, Data], None] | None = None


def gpt(config: Config) -> Recipe:
    """A byte-level GPT."""
    shape = _shape(config, "layers", "heads", "width", "block", "dropout")
    return Recipe("text", lambda data: GPT(config.shape, data.classes), shape)


def digits(config: Config) -> Recipe:
    """A transformer over patches of images."""

    def build(data: Data) -> nn.Module:
        channels, height, width = data.sample.shape[1:]
        if height % config.shape.patch or width % config.shape.patch:
            raise UsageError(
                f"--patch {config.shape.patch}: images of {height} x {width} pixels are no whole"
                " number of patches"
            )
        return ImageClassifier(config.shape, (channels, height, width), data.classes)

    shape = _shape(config, "layers", "heads", "width", "dropout", "patch", "image_size")
    return Recipe("images", build, shape)


MODELS: dict[str, Callable[[Config], Recipe]] = {"gpt": gpt, "digits": digits}


def recipe_for(config: Config) -> Recipe:
    """Return how to build what ``--model`` names.

    Raises:
        UsageError: If there is no such model.
    """
    name = config.model
    if name in MODELS:
        if config.model_args:
            raise UsageError(f"--model-args: --model {name} takes none; see --layers, --width, ...")
        return MODELS[name](config)
    if name.startswith("hf:"):
        return hugging_face(name.removeprefix("hf:"), config)
    if ":" in name:
        return users_own(name, config)
    raise UsageError(f"--model {name}: it must be {', '.join(MODELS)}, hf:NAME or module:factory")


class Logits(nn.Module):
    """A Hugging Face model that returns its logits alone."""

    def __init__(self, inner: nn.Module, argument: str, **settings: Any) -> None:
        super().__init__()
        self.inner = inner
        self.argument = argument
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        """Map what the data give to logits."""
        logits: Tensor = self.inner(**{self.argument: x}, **self.settings).logits
        return logits


def hugging_face(name: str, config: Config) -> Recipe:
    """Any model type of the installed transformers, built from its config; nothing is fetched.

    Raises:
        UsageError: If transformers is missing, or has no such model for text or images.
    """
    if find_spec("transformers") is None:
        raise UsageError(f"--model hf:{name}: no transformers here; pip install -e '.[hf]'")
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = importlib.import_module("transformers")
    known = importlib.import_module("transformers.models.auto.modeling_auto")
    transformers.logging.set_verbosity_error()
    asked = _arguments(config)
    if name in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:

        def build(data: Data) -> nn.Module:
            settings = _hf_config(name, {"vocab_size": data.classes, **asked}, data.tokens)
            made: Any = _made(name, lambda: transformers.AutoModelForCausalLM.from_config(settings))
            return Logits(made, "input_ids", use_cache=False)

        kind = "text"
    elif name in known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:

        def build(data: Data) -> nn.Module:
            channels, height = data.sample.shape[1:3]
            image = {"num_channels": channels, "image_size": height, "num_labels": data.classes}
            settings = _hf_config(name, {**image, **asked}, 0)
            made: Any = _made(
                name, lambda: transformers.AutoModelForImageClassification.from_config(settings)
            )
            return Logits(made, "pixel_values")

        kind = "images"
    else:
        raise UsageError(
            f"--model hf:{name}: the installed transformers has no causal language model and no"
            " image classifier of this type; try hf:gpt2, hf:llama or hf:vit"
        )
    shape: dict[str, object] = {"model": config.model, "model_args": list(config.model_args)}
    check = functools.partial(_refuse_look_ahead, name) if kind == "text" else None
    return Recipe(kind, build, shape, check=check)


def _hf_config(name: str, asked: dict[str, Any], positions: int) -> Any:
    """Return a config of a model type, with settings that differ from its defaults."""
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(name)
    settings: dict[str, Any] = {}
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # Those of a tokenizer that is not here; bytes have none.
        if (getattr(defaults, token, None) or 0) >= asked.get("vocab_size", 1 << 62):
            settings[token] = None
    if positions and getattr(defaults, "is_decoder", None) is False:
        settings["is_decoder"] = True  # else BERT and models like it see what they are to predict
    if positions and getattr(defaults, "max_position_embeddings", positions) < positions:
        settings["max_position_embeddings"] = positions
    unknown = [key for key in asked if key not in ("image_size",) and not hasattr(defaults, key)]
    if unknown:
        raise UsageError(
            f"--model-args {unknown[0]}: {type(defaults).__name__} has no such setting"
        )
    return _made(name, lambda: AutoConfig.for_model(name, **{**settings, **asked}))


def _made(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (ValueError, TypeError, AssertionError, KeyError, ImportError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"--model hf:{name}: transformers cannot build it ({first})") from None


@torch.no_grad()
def _refuse_look_ahead(name: str, model: nn.Module, data: Data) -> None:
    """Refuse a model whose logits depend on the bytes that they are to predict."""
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[]):
        one = data.sample[:, :8].to(device)
        other = one.clone()
        other[:, -1] = (other[:, -1] + 1) % data.classes
        model.eval()
        before, after = (model(x)[:, :-1] for x in (one, other))
        model.train()
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-4):
        raise UsageError(f"--model hf:{name}: it sees the bytes it is to predict")


def users_own(name: str, config: Config) -> Recipe:
    """A model that ``module:factory`` returns when it is called with the data.

    Raises:
        UsageError: If it cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as python -m has it
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--model {name}: {error}") from None

    def build(data: Data) -> nn.Module:
        given = _arguments(config)
        try:
            inspect.signature(factory).bind(data, **given)
        except TypeError as error:
            raise UsageError(f"--model {name}: it cannot be called so: {error}") from None
        except ValueError:  # it has no signature
            pass
        model = factory(data, **given)
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {name}: it returned {type(model).__name__}, not a Module")
        return model

    shape: dict[str, object] = {"model": config.model, "model_args": list(config.model_args)}
    return Recipe(None, build, shape, meta=False)


def _shape(config: Config, *names: str) -> dict[str, object]:
    return {"model": config.model, **{name: getattr(config.shape, name) for name in names}}


def _arguments(config: Config) -> dict[str, Any]:
    pairs = (pair.partition("=") for pair in config.model_args)
    return {name: _value(text) for name, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def init_model(recipe: Recipe, data: Data, seed: int, device: torch.device) -> nn.Module:
    """Build the model with weights that depend on the seed alone."""
    torch.manual_seed(seed)
    return recipe.build(data).to(device)


def sketch_model(recipe: Recipe, data: Data, seed: int) -> Sketch | None:
    """Return the model that ``init_model`` would build, without its memory; None if that cannot be.

    Raises:
        UsageError: It cannot be built at all.
    """
    _ = data.sample  # read while tensors still hold values
    return sketch(lambda: recipe.build(data), seed)


def count_parameters(recipe: Recipe, data: Data) -> int:
    """Return how many parameters a model will have that no sketch could be made of.

    0 where that is not known before it is built.
    """
    if not recipe.meta:
        return 0
    with torch.device("meta"):
        return sum(p.numel() for p in recipe.build(data).parameters())


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, taken in fp32 whatever the model computed in.

    An fp16 loss would round, and its seed gradient, the loss scale, would overflow at 65536.

    Args:
        logits: (..., classes).
        targets: int64 (...).

    Raises:
        UsageError: A model of the user's own returned something else than logits of this shape.
    """
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(shape, tuple) or shape[:-1] != tuple(targets.shape):
        expected = ", ".join(map(str, targets.shape))
        raise UsageError(f"--model: it must return logits ({expected}, classes), not {shape}")
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

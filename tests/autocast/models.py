"""Models as they are used today, from their configurations, at sizes that take no time."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# By all the names that configurations have for them.
WIDTHS = ("hidden_size", "d_model", "n_embd")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
HEADS = (
    *("num_attention_heads", "n_head", "num_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
INNER = ("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
VOCABULARY = ("vocab_size", "max_position_embeddings", "n_positions")
TINY = {
    **dict.fromkeys(WIDTHS, 32),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys((*INNER, *VOCABULARY), 64),
    "d_kv": 8,
    "layerdrop": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
SOUND = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}


def text() -> dict[str, Tensor]:
    """Two sentences, the second one padded."""
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, -3:] = 0
    tokens = torch.randint(3, 64, (2, 12))
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def spoken() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, 64, (2, 8))}


def sound() -> dict[str, Tensor]:
    mask = torch.ones(2, 400, dtype=torch.int64)
    mask[1, 300:] = 0
    labels = torch.tensor([[3, 4, 5], [3, 5, -100]])
    return {"input_values": torch.randn(2, 400), "attention_mask": mask, "labels": labels}


def image(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def of_transformers(kind: str, task: str, inputs: Callable[[], Any], **settings: Any) -> Any:
    """What makes a model of this type for this task, and its inputs."""

    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        transformers = pytest.importorskip("transformers")
        # What it thinks of a configuration this small.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        config = transformers.AutoConfig.for_model(kind, **settings)
        config.apply_spec_augment = False  # Would leave parts out at random.
        return getattr(transformers, f"AutoModelFor{task}").from_config(config), inputs()

    return make


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "bert": of_transformers("bert", "MaskedLM", text, **TINY),
    "gpt2": of_transformers("gpt2", "CausalLM", text, **TINY),
    "t5": of_transformers("t5", "Seq2SeqLM", text, **TINY),
    "llama": of_transformers("llama", "CausalLM", text, **TINY),
    "mixtral": of_transformers("mixtral", "CausalLM", text, **TINY | EXPERTS),
    # Experts called one by one, those alone that a token was sent to.
    "mixtral, eager": of_transformers(
        "mixtral", "CausalLM", text, **TINY | EXPERTS, experts_implementation="eager"
    ),
    "whisper": of_transformers("whisper", "SpeechSeq2Seq", spoken, **TINY | WHISPER),
    "wav2vec2": of_transformers("wav2vec2", "CTC", sound, **TINY | SOUND),
    "vit": of_transformers(
        "vit", "ImageClassification", lambda: image(16), **TINY, image_size=16, patch_size=4
    ),
    "swin": of_transformers(
        "swin", "ImageClassification", lambda: image(32), **SWIN, window_size=4
    ),
    "resnet": of_transformers("resnet", "ImageClassification", lambda: image(32), **RESNET),
}

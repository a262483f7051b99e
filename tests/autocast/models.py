"""Small models of families that are used today, most of them from their configurations."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# Configurations have several names for one setting.
WIDTHS = ("hidden_size", "d_model", "n_embd")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
HEADS = (
    "num_attention_heads",
    "n_head",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
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
    """Return two sentences; the second one is padded."""
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, -3:] = 0
    tokens = torch.randint(3, 64, (2, 12))
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def spectrogram() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, 64, (2, 8))}


def sound() -> dict[str, Tensor]:
    mask = torch.ones(2, 400, dtype=torch.int64)
    mask[1, 300:] = 0
    labels = torch.tensor([[3, 4, 5], [3, 5, -100]])
    return {"input_values": torch.randn(2, 400), "attention_mask": mask, "labels": labels}


def image(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def make_model(kind: str, task: str, **settings: Any) -> nn.Module:
    """Make a model of transformers for a task, with random weights."""
    transformers = pytest.importorskip("transformers")
    # transformers warns about configurations of this size.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.AutoConfig.for_model(kind, **settings)
    # A random choice of masked parts would differ between two steps.
    config.apply_spec_augment = False
    model_class = getattr(transformers, f"AutoModelFor{task}")
    return model_class.from_config(config)  # type: ignore[no-any-return]


Built = tuple[nn.Module, dict[str, Tensor]]


class Encoder(nn.Module):
    """Torch's own encoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.embedding(input_ids))
        return self.head(hidden)  # type: ignore[no-any-return]


def torchs_encoder() -> Built:
    return Encoder(), {"input_ids": text()["input_ids"]}


def bert() -> Built:
    return make_model("bert", "MaskedLM", **TINY), text()


def gpt2() -> Built:
    return make_model("gpt2", "CausalLM", **TINY), text()


def t5() -> Built:
    return make_model("t5", "Seq2SeqLM", **TINY), text()


def llama() -> Built:
    return make_model("llama", "CausalLM", **TINY), text()


def mixtral() -> Built:
    return make_model("mixtral", "CausalLM", **TINY, **EXPERTS), text()


def mixtral_eager() -> Built:
    """Make a model that calls only the experts which received a token, one after another."""
    settings = {**TINY, **EXPERTS, "experts_implementation": "eager"}
    return make_model("mixtral", "CausalLM", **settings), text()


def whisper() -> Built:
    return make_model("whisper", "SpeechSeq2Seq", **TINY, **WHISPER), spectrogram()


def wav2vec2() -> Built:
    return make_model("wav2vec2", "CTC", **TINY, **SOUND), sound()


def vit() -> Built:
    settings = {**TINY, "image_size": 16, "patch_size": 4}
    return make_model("vit", "ImageClassification", **settings), image(16)


def swin() -> Built:
    return make_model("swin", "ImageClassification", **SWIN, window_size=4), image(32)


def resnet() -> Built:
    return make_model("resnet", "ImageClassification", **RESNET), image(32)


MODELS: dict[str, Callable[[], Built]] = {
    "torch's encoder": torchs_encoder,
    "bert": bert,
    "gpt2": gpt2,
    "t5": t5,
    "llama": llama,
    "mixtral": mixtral,
    "mixtral, eager": mixtral_eager,
    "whisper": whisper,
    "wav2vec2": wav2vec2,
    "vit": vit,
    "swin": swin,
    "resnet": resnet,
}

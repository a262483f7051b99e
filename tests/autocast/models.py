"""Models as they are used today, from their configurations, at sizes that take no time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


def _tokens(rows, columns):
    return torch.randint(3, 64, (rows, columns), generator=torch.Generator().manual_seed(0))


def _text(length=12):
    """Two sentences, the second one padded."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, -3:] = 0
    return {
        "input_ids": _tokens(2, length),
        "attention_mask": mask,
        "labels": _tokens(2, length),
    }


def _images(size):
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def _transformers():
    return pytest.importorskip("transformers")


def bert():
    tf = _transformers()
    config = tf.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return tf.BertForMaskedLM(config), _text()


def gpt2():
    tf = _transformers()
    config = tf.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, eos_token_id=2
    )
    return tf.GPT2LMHeadModel(config), _text()


def t5():
    tf = _transformers()
    config = tf.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return tf.T5ForConditionalGeneration(config), _text()


_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama():
    tf = _transformers()
    tokens = _tokens(2, 12)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**_LLAMA)), {"input_ids": tokens, "labels": tokens}


def _mixtral(**options):
    tf = _transformers()
    config = tf.MixtralConfig(
        **_LLAMA, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **options
    )
    return tf.MixtralForCausalLM(config), _text()


def mixtral():
    return _mixtral()


def mixtral_loop():
    """Experts called one by one, those alone that a token was sent to."""
    return _mixtral(experts_implementation="eager")


def whisper():
    tf = _transformers()
    config = tf.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    inputs = {"input_features": torch.randn(2, 8, 40), "labels": _tokens(2, 8)}
    return tf.WhisperForConditionalGeneration(config), inputs


def wav2vec2():
    tf = _transformers()
    config = tf.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        mask_time_length=2,
    )
    mask = torch.ones(2, 400, dtype=torch.int64)
    mask[1, 300:] = 0
    inputs = {
        "input_values": torch.randn(2, 400),
        "attention_mask": mask,
        "labels": torch.tensor([[3, 4, 5], [3, 5, -100]]),
    }
    return tf.Wav2Vec2ForCTC(config), inputs


def vit():
    tf = _transformers()
    config = tf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
    )
    return tf.ViTForImageClassification(config), _images(16)


def swin():
    tf = _transformers()
    config = tf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return tf.SwinForImageClassification(config), _images(32)


def resnet():
    tf = _transformers()
    config = tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"
    )
    return tf.ResNetForImageClassification(config), _images(32)


def unet():
    """A diffusion model in small: residual blocks with a time embedding, cross-attention, skips."""
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 500]),
        "text": torch.randn(2, 5, 16),
    }
    return _UNet(), inputs


class _Residual(nn.Module):
    def __init__(self, inner, outer, time):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inner), nn.GroupNorm(4, outer)
        self.conv1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.time_emb_proj = nn.Linear(time, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x, time):
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = hidden + self.time_emb_proj(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(hidden)))


class _CrossAttention(nn.Module):
    def __init__(self, width, text, heads=2):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(4, width)
        self.to_q, self.to_out = nn.Linear(width, width), nn.Linear(width, width)
        self.to_k, self.to_v = nn.Linear(text, width), nn.Linear(text, width)

    def forward(self, x, text):
        b, c, h, w = x.shape
        hidden = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (
            part.view(b, -1, self.heads, c // self.heads).transpose(1, 2)
            for part in (self.to_q(hidden), self.to_k(text), self.to_v(text))
        )
        hidden = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return x + self.to_out(hidden).transpose(1, 2).reshape(b, c, h, w)


class _UNet(nn.Module):
    def __init__(self, width=16, time=32, text=16):
        super().__init__()
        self.time_embedding = nn.Sequential(
            nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time)
        )
        self.conv_in = nn.Conv2d(4, width, 3, padding=1)
        self.down = _Residual(width, width, time)
        self.down_attention = _CrossAttention(width, text)
        self.downsample = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.mid = _Residual(width, 2 * width, time)
        self.up_attention = _CrossAttention(2 * width, text)
        self.up = _Residual(3 * width, width, time)
        self.norm_out, self.conv_out = nn.GroupNorm(4, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, sample, timestep, text):
        frequencies = torch.exp(-torch.arange(8, device=sample.device))
        angles = timestep[:, None] * frequencies
        time = self.time_embedding(torch.cat([angles.sin(), angles.cos()], -1))
        skip = self.down_attention(self.down(self.conv_in(sample), time), text)
        hidden = self.up_attention(self.mid(self.downsample(skip), time), text)
        hidden = F.interpolate(hidden, scale_factor=2.0, mode="nearest")
        hidden = self.up(torch.cat([hidden, skip], 1), time)
        return self.conv_out(F.silu(self.norm_out(hidden)))


MODELS = [
    bert,
    gpt2,
    t5,
    llama,
    mixtral,
    mixtral_loop,
    whisper,
    wav2vec2,
    vit,
    swin,
    resnet,
    unet,
]

"""Models of transformers, tiny, in a region of torch's and in ours: dtypes and numbers.

    python -m tests.autocast.every_model [--dtype float16]

Run by hand; what it printed is in docs/results/autocast_ops.md.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distamp import autocast

TEXT = """albert bert bloom camembert codegen convbert cohere deberta-v2 distilbert electra
ernie gemma gemma2 gpt2 gpt_neo gpt_neox gptj granite llama mistral mixtral mpnet mpt olmo
olmo2 opt phi phi3 qwen2 qwen3 roberta roformer stablelm starcoder2 xlm-roberta""".split()  # noqa: SIM905
BOTH = "bart m2m_100 mbart pegasus t5".split()  # noqa: SIM905
IMAGES = "beit deit dinov2 mobilenet_v2 resnet swin vit".split()  # noqa: SIM905
SOUND = "hubert wav2vec2 wavlm".split()  # noqa: SIM905
# By all the names that configurations have for them.
TINY = dict.fromkeys(
    ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "embed_dim", "hidden_dim"), 32
)
TINY |= dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    2,
)
TINY |= dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
    + ("decoder_attention_heads", "num_key_value_heads"),
    4,
)
TINY |= dict.fromkeys(
    ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner"), 64
)
TINY |= dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 64)
TINY |= {"head_dim": 8, "d_kv": 8, "d_head": 8, "rotary_dim": 8, "num_local_experts": 4}
TINY |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "layerdrop": 0.0}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE |= {"intermediate_size": 64, "image_size": 32, "patch_size": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": TINY | {"attention_types": [[["global", "local"], 1]]},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4}
    | {"image_size": 32, "window_size": 4},
}


def built(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model of this type, and inputs."""
    from transformers import AutoConfig, AutoModel

    sizes: dict[str, Any] = TINY if kind in TEXT + BOTH else IMAGE if kind in IMAGES else {}
    config = AutoConfig.for_model(kind, **SPECIAL.get(kind, sizes))
    if kind in SOUND:
        sizes = {name: TINY[name] for name in ("hidden_size", "num_hidden_layers", "layerdrop")}
        sizes |= {"num_attention_heads": 4, "intermediate_size": 64, "conv_dim": (16, 16)}
        sizes |= {"conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 8}
        config = AutoConfig.for_model(kind, **sizes, num_conv_pos_embedding_groups=4)
    model = AutoModel.from_config(config).eval()
    tokens = torch.randint(3, 64, (2, 12))
    if kind in SOUND:
        return model, {"input_values": torch.randn(2, 400)}
    if kind in IMAGES:
        size = getattr(config, "image_size", 64)
        return model, {"pixel_values": torch.randn(2, 3, size, size)}
    inputs = {"input_ids": tokens}
    return model, inputs | ({"decoder_input_ids": tokens} if kind in BOTH else {})


def run(model: nn.Module, inputs: dict[str, Tensor], region: Any) -> tuple[list[Any], list[Tensor]]:
    """The dtypes of what every module returns, and the numbers that the model returns."""
    seen: list[Any] = []

    def note(module: nn.Module, args: Any, out: Any) -> None:
        leaves = tree_leaves(list(out.values()) if isinstance(out, dict) else out)
        seen.append([each.dtype for each in leaves if isinstance(each, Tensor)])

    handles = [each.register_forward_hook(note) for each in model.modules()]
    try:
        with torch.no_grad(), region:
            out = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen, [each for each in tree_leaves(list(out.values())) if isinstance(each, Tensor)]


def main() -> None:
    """Run every model in both regions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    dtype = getattr(torch, parser.parse_args().dtype)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    same, modules = 0, 0
    for kind in TEXT + BOTH + IMAGES + SOUND:
        torch.manual_seed(0)
        model, inputs = built(kind)
        theirs = run(model, inputs, torch.autocast("cpu", dtype))
        ours = run(model, inputs, autocast("cpu", dtype))
        equal = ours[0] == theirs[0] and all(map(torch.equal, ours[1], theirs[1]))
        if not equal:
            print(f"differs: {kind}")
        same, modules = same + equal, modules + len(ours[0])
    print(f"{same} models, {modules} modules as torch's in {dtype}; torch {torch.__version__}")


if __name__ == "__main__":
    main()

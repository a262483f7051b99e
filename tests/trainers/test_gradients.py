"""Gradients of Transformers' tensor-parallel plans, compared with the gradients of one process."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from distamp.report import compare_gradients
from tests.on_ranks import on_ranks
from tests.trainers.common import needs

# Each rank imports transformers, which takes most of the time.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("hugging_face"),
    pytest.mark.slow,
]
needs("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def make_models(name: str, folder: Path) -> tuple[nn.Module, nn.Module]:
    """Return a model under the tensor-parallel plan of its class, and a model on one process."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**SIZES)
    reference = model_class(config)
    if dist.get_rank() == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    # Transformers reads the variables of torchrun.
    world_size = str(dist.get_world_size())
    variables = {"WORLD_SIZE": world_size, "LOCAL_RANK": str(dist.get_rank())}
    plan = DistributedConfig(tp_plan="auto")
    with mock.patch.dict(os.environ, variables):
        model = model_class.from_pretrained(folder, distributed_config=plan, dtype=torch.float32)
    return model.train(), reference.train()


def run_step(model: Any, micro_batches: int) -> None:
    """Accumulate the gradients of micro-batches, as a loop without a trainer does."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(SIZES["vocab_size"], (4, 16), generator=generator)
    for part in tokens.chunk(micro_batches):
        loss = model(input_ids=part, labels=part).loss
        (loss / micro_batches).backward()


def compare(model: nn.Module, reference: nn.Module, micro_batches: int) -> Any:
    return compare_gradients(
        lambda: run_step(model, micro_batches),
        model,
        lambda: run_step(reference, micro_batches),
        reference,
    )


@on_ranks(2)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_gradients_of_the_plan_of_a_model_match(name, tmp_path):
    comparison = compare(*make_models(name, tmp_path), micro_batches=1)
    assert comparison.matches, str(comparison)
    assert any(row.name.endswith("q_proj.weight") for row in comparison.rows)


@on_ranks(2)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_the_comparison_accuses_replicated_parameters_that_torch_finds_unequal(name, tmp_path):
    """Qwen3's norms of heads sum accumulated gradients over the ranks in each backward pass."""
    model, reference = make_models(name, tmp_path)
    reference.load_state_dict(gather_weights(model))
    run_step(model, 2)
    run_step(reference, 2)
    expected = dict(reference.named_parameters())
    unequal = set()
    for param_name, param in model.named_parameters():
        is_equal = isinstance(param, DTensor) or torch.allclose(
            param.grad, expected[param_name].grad, rtol=1e-3, atol=1e-6
        )
        if not is_equal:
            unequal.add(param_name)
    comparison = compare(model, reference, micro_batches=2)
    assert {row.name for row in comparison.differences} == unequal


def gather_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    weights = {}
    for name, weight in model.state_dict().items():
        weights[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weights

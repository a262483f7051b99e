"""Level fp8: linear layers compute in float8 by torchao; here emulated, on a CPU."""

import logging
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distamp import PrecisionLevel, cast_model, initialize, set_module_precision
from distamp.errors import ConfigError
from distamp.levels import float8_layers
from distamp.linear_recipe import LinearRecipe
from tests.levels import cells
from tests.on_ranks import on_ranks
from tests.ranks import mesh

pytest.importorskip("torchao")


def layers() -> Any:
    """Of every kind that conversion meets."""
    kinds = {
        "embedding": nn.Embedding(32, 32),
        "first": nn.Linear(32, 64),
        "router": nn.Linear(64, 16),
        "odd": nn.Linear(64, 20),
        "last": nn.Linear(64, 32),
        "attention": nn.MultiheadAttention(64, 4),
        "tied": nn.Linear(32, 32, bias=False),
    }
    model = nn.ModuleDict(kinds)
    model["tied"].weight = model["embedding"].weight
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_each_linear_layer_is_shown_with_why_it_does_not_compute_in_float8():
    model = layers()
    model["last"].register_forward_hook(lambda *_: None)
    set_module_precision(model["router"], "fp32")
    before = dict(model.named_parameters())
    cast_model(model, "fp8")
    found = float8_layers(model)
    assert found.pop("first") == "float8"
    reasons = {
        "router": "pinned to torch.float32",
        "odd": "multiples of 16",
        "attention.out_proj": "NonDynamicallyQuantizableLinear",
        "last": "hooks",
        "tied": "shares its weight",
    }
    assert found.keys() == reasons.keys()
    assert [name for name, words in reasons.items() if words not in found[name]] == []
    assert all(before[name] is p for name, p in model.named_parameters()), "an optimizer holds them"


def test_a_pattern_leaves_layers_out_and_what_a_model_of_transformers_returns_is():
    model = cast_model(layers(), "fp8", module_precision={"first": "bf16"})
    assert "bfloat16" in float8_layers(model)["first"]
    assert float8_layers(model)["last"] == "float8"
    owned = layers()
    owned.get_output_embeddings = lambda: owned["last"]
    owned._keep_in_fp32_modules = ["first"]
    found = float8_layers(cast_model(owned, "fp8"))
    assert (found["last"], found["first"], found["router"]) == (
        "what the model returns",
        "declared fp32 by its owner",
        "float8",
    )


@pytest.mark.parametrize("level", ["fp8", "fp8-rowwise"])
def test_a_layer_takes_bf16_as_in_a_region_of_cudas(level):
    model, seen = cast_model(cells.Net(), level), []
    amp = initialize(model, sgd(model), level)
    model.first.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with amp.autocast():
        amp.model(cells.batch()[0])
    assert seen == [torch.bfloat16]


def test_emulation_is_said_and_a_model_on_another_device_is_refused(caplog, monkeypatch):
    with caplog.at_level(logging.WARNING, "distamp.levels"):
        model = cast_model(cells.Net(), "fp8")
    assert ["emulated" in record.message for record in caplog.records] == [True]
    monkeypatch.setattr(LinearRecipe, "has_kernels", lambda *_: True)
    with pytest.raises(ConfigError, match="Move the model to its device first"):
        initialize(model, sgd(model), "fp8")


def test_weights_on_meta_will_be_where_a_device_is_whatever_torch_was_built_for(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    with torch.device("meta"):
        model = cells.Net()
    assert cast_model(model, "fp8").first.config.emulate


def test_a_layer_in_float8_cannot_be_pinned_and_without_torchao_there_is_none(monkeypatch):
    with pytest.raises(ValueError, match="computes in float8"):
        set_module_precision(cast_model(cells.Net(), "fp8").first, "fp32")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"Install distamp\[fp8\]"):
        cast_model(cells.Net(), "fp8")


# -- several ranks ---------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    ("all_gather", "policy"),
    [
        (False, MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        (True, MixedPrecisionPolicy()),
    ],
)
def test_fsdp2_gathers_in_float8_where_it_is_asked_to_and_saves_plain_weights(all_gather, policy):
    level = PrecisionLevel.from_name("fp8").replace(float8_all_gather=all_gather)
    model: Any = cast_model(cells.Net(), level)
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh((2,), ("shard",)), mp_policy=policy)
    amp = initialize(model, sgd(model), level)
    x, target = (t.chunk(2)[dist.get_rank()] for t in cells.batch())
    weights: list[str] = []
    model.first.register_forward_pre_hook(lambda m, _: weights.append(type(m.weight).__name__))

    def step() -> None:
        with amp.autocast():
            loss = cells.loss_of(amp.model(x).float(), target)
        amp.backward(loss)
        assert amp.step(max_norm=1.0)

    violations = amp.check(step)
    assert not violations, str(violations)
    assert {"Float8" in kind for kind in weights} == {all_gather}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        cells.Net().load_state_dict(full)
        assert {(type(value), value.dtype) for value in full.values()} == {(Tensor, torch.float32)}

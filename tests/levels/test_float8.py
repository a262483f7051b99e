"""Level fp8: linear layers compute in float8 by torchao; here emulated, on a CPU."""

import logging
import sys
from importlib.util import find_spec
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

# Every worker imports this file, and an import of torchao takes long.
pytestmark = pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao")


def layers() -> Any:
    """Return layers of every kind, which conversion takes or leaves."""
    model = nn.ModuleDict()
    model["embedding"] = nn.Embedding(32, 32)
    model["first"] = nn.Linear(32, 64)
    model["router"] = nn.Linear(64, 16)
    model["odd"] = nn.Linear(64, 20)
    model["last"] = nn.Linear(64, 32)
    model["attention"] = nn.MultiheadAttention(64, 4)
    model["tied"] = nn.Linear(32, 32, bias=False)
    model["tied"].weight = model["embedding"].weight
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_each_linear_layer_is_shown_with_why_it_does_not_compute_in_float8():
    model = layers()
    model["last"].register_forward_hook(lambda *_: None)
    set_module_precision(model["router"], "fp32")
    params = dict(model.named_parameters())
    cast_model(model, "fp8")
    layers_with_reasons = float8_layers(model)
    assert layers_with_reasons.pop("first") == "float8"
    reasons = {
        "router": "pinned to torch.float32",
        "odd": "multiples of 16",
        "attention.out_proj": "NonDynamicallyQuantizableLinear",
        "last": "hooks",
        "tied": "shares its weight",
    }
    assert layers_with_reasons.keys() == reasons.keys()
    for name, words in reasons.items():
        assert words in layers_with_reasons[name]
    for name, param in model.named_parameters():
        assert param is params[name], "an optimizer holds the parameters"


def test_a_pattern_leaves_a_layer_out():
    model = cast_model(layers(), "fp8", module_precision={"first": "bf16"})
    assert "bfloat16" in float8_layers(model)["first"]
    assert float8_layers(model)["last"] == "float8"


def test_the_head_and_the_fp32_modules_of_a_model_of_transformers_are_left_out():
    model = layers()
    model.get_output_embeddings = lambda: model["last"]
    model._keep_in_fp32_modules = ["first"]
    cast_model(model, "fp8")
    assert float8_layers(model)["last"] == "what the model returns"
    assert float8_layers(model)["first"] == "declared fp32 by its owner"
    assert float8_layers(model)["router"] == "float8"


@pytest.mark.parametrize("level", ["fp8", "fp8-rowwise"])
def test_a_layer_takes_bf16_as_in_a_region_of_cudas(level):
    model = cast_model(cells.Net(), level)
    amp = initialize(model, sgd(model), level)
    dtypes = []
    model.first.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    inputs, _ = cells.batch()
    with amp.autocast():
        amp.model(inputs)
    assert dtypes == [torch.bfloat16]


def test_emulation_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "distamp.levels"):
        cast_model(cells.Net(), "fp8")
    (record,) = caplog.records
    assert "emulated" in record.message


def test_a_model_that_was_cast_on_another_device_is_refused(monkeypatch):
    model = cast_model(cells.Net(), "fp8")
    monkeypatch.setattr(LinearRecipe, "has_kernels", lambda *_: True)
    with pytest.raises(ConfigError, match="Move the model to its device first"):
        initialize(model, sgd(model), "fp8")


def test_a_model_on_meta_is_emulated_if_torch_was_built_for_an_absent_accelerator(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    with torch.device("meta"):
        model = cells.Net()
    assert cast_model(model, "fp8").first.config.emulate


def test_a_layer_in_float8_cannot_be_pinned():
    model = cast_model(cells.Net(), "fp8")
    with pytest.raises(ValueError, match="computes in float8"):
        set_module_precision(model.first, "fp32")


def test_without_torchao_there_is_no_layer_in_float8(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"Install distamp\[fp8\]"):
        cast_model(cells.Net(), "fp8")


# -- several ranks ---------------------------------------------------------------------------------


def amp_in_fsdp2(all_gather: bool) -> Any:
    """Return an Amp over the net in FSDP2, which gathers weights in float8 or in bfloat16."""
    level = PrecisionLevel.from_name("fp8").replace(float8_all_gather=all_gather)
    model: Any = cast_model(cells.Net(), level)
    policy = MixedPrecisionPolicy()
    if not all_gather:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    device_mesh = mesh((2,), ("shard",))
    for layer in model.children():
        fully_shard(layer, mesh=device_mesh, mp_policy=policy)
    fully_shard(model, mesh=device_mesh, mp_policy=policy)
    return initialize(model, sgd(model), level)


# The ranks import torchao.
@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("all_gather", [False, True])
def test_fsdp2_gathers_in_float8_if_the_level_demands_it(all_gather):
    amp = amp_in_fsdp2(all_gather)
    types: set[str] = set()
    amp.model.first.register_forward_pre_hook(
        lambda module, args: types.add(type(module.weight).__name__)
    )
    inputs, targets = [tensor.chunk(2)[dist.get_rank()] for tensor in cells.batch()]

    def step() -> None:
        with amp.autocast():
            output = amp.model(inputs)
        amp.backward(cells.loss_of(output.float(), targets))
        assert amp.step(max_norm=1.0)

    violations = amp.check(step)
    assert not violations, str(violations)
    assert {"Float8" in name for name in types} == {all_gather}


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("all_gather", [False, True])
def test_fsdp2_saves_plain_float32_weights(all_gather):
    amp = amp_in_fsdp2(all_gather)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(amp.model, options=options)
    if dist.get_rank() == 0:
        cells.Net().load_state_dict(state)
        for value in state.values():
            assert type(value) is Tensor
            assert value.dtype is torch.float32

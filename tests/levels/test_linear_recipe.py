"""A linear recipe of a user: one entry in the table of recipes, and one level that names it."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp import PrecisionLevel, cast_model, initialize, set_module_precision
from distamp.errors import ConfigError
from distamp.levels import float8_layers
from distamp.linear_recipe import LINEAR_RECIPES, LinearRecipe, recipe_of


class Float8E5M2Linear(nn.Linear):
    """A linear layer with a weight that is rounded to float8 with five bits of exponent."""

    emulates = True

    def forward(self, inputs: Tensor) -> Tensor:
        rounded = self.weight.to(torch.float8_e5m2).to(self.weight.dtype)
        # The gradient of the rounding is the identity.
        weight = self.weight + (rounded - self.weight).detach()
        return nn.functional.linear(inputs, weight, self.bias)


def convert(
    model: nn.Module, layer_names: Collection[str], *, emulate: bool, narrow_all_gather: bool
) -> None:
    for name in layer_names:
        layer: Any = model.get_submodule(name)
        layer.__class__ = Float8E5M2Linear
        layer.emulates = emulate


def is_converted(module: nn.Module) -> bool:
    return isinstance(module, Float8E5M2Linear)


def is_emulated(module: Any) -> bool:
    return bool(module.emulates)


E5M2 = LinearRecipe(
    name="e5m2",
    label="e5m2",
    convert=convert,
    is_converted=is_converted,
    is_emulated=is_emulated,
    size_multiple=32,
    min_capability=(10, 0),
    dtype_names=("fp8",),
)


@pytest.fixture
def level(monkeypatch):
    monkeypatch.setitem(LINEAR_RECIPES, "e5m2", E5M2)
    return PrecisionLevel.from_name("bf16").replace(name="e5m2", linear_recipe="e5m2")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 16))


def test_a_level_converts_the_layers_of_its_recipe_and_keeps_their_parameters(level):
    model = make_model()
    params = list(model.parameters())
    cast_model(model, level)
    assert [type(layer) for layer in model] == [Float8E5M2Linear, Float8E5M2Linear, nn.Linear]
    assert all(old is new for old, new in zip(params, model.parameters(), strict=True))


def test_the_layers_are_listed_with_the_label_of_the_recipe(level):
    layers = float8_layers(cast_model(make_model(), level))
    assert (layers["0"], layers["1"]) == ("e5m2", "e5m2")


def test_the_sizes_of_the_recipe_decide_which_layers_are_converted(level):
    """16 is a multiple for float8, and no multiple of 32."""
    model = cast_model(make_model(), level)
    assert recipe_of(model[1]) is E5M2
    assert recipe_of(model[2]) is None


def test_a_step_keeps_the_contract_of_the_level(level):
    model = make_model()
    amp = initialize(model, sgd(model), level)
    inputs = torch.randn(8, 32)

    def step() -> None:
        amp.zero_grad()
        with amp.autocast():
            loss = amp.model(inputs).float().square().mean()
        amp.backward(loss)
        assert amp.step()

    violations = amp.check(step)
    assert not violations, str(violations)
    assert level.contract(model)["compute"] == ("bf16", "fp8")


def test_a_converted_layer_takes_the_dtype_of_its_region(level):
    model = make_model()
    amp = initialize(model, sgd(model), level)
    dtypes: list[torch.dtype] = []
    model[0].register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    with amp.autocast():
        amp.model(torch.randn(8, 32))
    assert dtypes == [torch.bfloat16]


def test_the_precision_of_a_converted_layer_cannot_be_set(level):
    model = cast_model(make_model(), level)
    with pytest.raises(ValueError, match="computes in e5m2 whatever its inputs are"):
        set_module_precision(model[0], "fp32")


def test_a_model_cast_for_the_recipe_is_refused_at_another_level(level):
    model = cast_model(make_model(), level)
    with pytest.raises(ConfigError, match="The model was cast for e5m2"):
        initialize(model, sgd(model), "bf16")


def test_a_recipe_that_gathers_plain_weights_refuses_the_narrow_all_gather(level):
    with pytest.raises(ConfigError, match="one scale for each weight"):
        level.replace(float8_all_gather=True)


def test_a_recipe_without_its_library_is_refused_with_the_extra(level, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ImportError("no such library")

    broken = LinearRecipe(
        **{**vars(E5M2), "convert": fail, "package": ("narrowlib", "distamp[narrow]")}
    )
    monkeypatch.setitem(LINEAR_RECIPES, "e5m2", broken)
    model = make_model()
    with pytest.raises(ConfigError, match=r"computes by narrowlib.*Install distamp\[narrow\]"):
        cast_model(model, level)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, nn.Linear]


def test_a_recipe_needs_a_region_of_bfloat16(level):
    with pytest.raises(ConfigError, match="linear_recipe='e5m2' is not possible at fp16"):
        PrecisionLevel.from_name("fp16").replace(linear_recipe="e5m2")


def test_an_unknown_recipe_is_refused_with_the_recipes():
    with pytest.raises(ConfigError, match="'float8', 'float8-rowwise'"):
        PrecisionLevel.from_name("bf16").replace(linear_recipe="float9")

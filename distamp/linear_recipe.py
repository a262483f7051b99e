"""Linear recipes: how linear layers compute in a narrow dtype, such as float8, by a library.

To add a recipe, write its `LinearRecipe`, put it into `LINEAR_RECIPES`, and name it in a row of
``distamp.levels.LEVELS``. No other file has code for a single recipe.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

__all__ = ["LINEAR_RECIPES", "LinearRecipe", "recipe_of"]


@dataclasses.dataclass(frozen=True)
class LinearRecipe:
    """One way in which linear layers compute in a narrow dtype.

    The parameters of the layers stay float32, and the rest of the model computes in a region of
    bfloat16.

    Args:
        name: The name of the recipe, the ``linear_recipe`` of a `PrecisionLevel`.
        label: The text for a converted layer in `distamp.levels.float8_layers`.
        convert: ``convert(model, layer_names, *, emulate, narrow_all_gather)`` replaces the named
            layers of a model in place and keeps their parameters. ``emulate`` is for devices
            without kernels. With ``narrow_all_gather`` FSDP2 gathers the weights in the narrow
            dtype. It raises ImportError if its library is not installed.
        is_converted: ``is_converted(module)`` returns whether this very module is such a layer.
        is_emulated: ``is_emulated(module)`` returns whether a converted layer emulates.
        size_multiple: Both sizes of a weight must be multiples of this number.
        min_capability: The first compute capability of NVIDIA devices that has the kernels.
        dtype_names: The names of the narrow dtypes in which layers may compute.
        message_dtype_names: The names of dtypes in the library's own messages.
        gathers_narrow: Whether ``narrow_all_gather`` is supported.
        package: The library, and the extra of distamp that installs it, for errors.
    """

    name: str
    label: str
    convert: Callable[..., None]
    is_converted: Callable[[nn.Module], bool]
    is_emulated: Callable[[nn.Module], bool]
    size_multiple: int
    min_capability: tuple[int, int]
    dtype_names: tuple[str, ...]
    message_dtype_names: tuple[str, ...] = ()
    gathers_narrow: bool = False
    package: tuple[str, str] = ("torchao", "distamp[fp8]")

    def has_kernels(self, device: torch.device) -> bool:
        """Return whether a device has kernels for the recipe."""
        if device.type != "cuda":
            return False
        if torch.version.hip is not None:
            return True
        return torch.cuda.get_device_capability(device) >= self.min_capability


def recipe_of(module: nn.Module) -> LinearRecipe | None:
    """Return the recipe of a converted layer, or None for another module."""
    for recipe in LINEAR_RECIPES.values():
        if recipe.is_converted(module):
            return recipe
    return None


# -- float8 by torchao -----------------------------------------------------------------------------


def _convert_to_float8(
    recipe_name: str,
    model: nn.Module,
    layer_names: Collection[str],
    *,
    emulate: bool,
    narrow_all_gather: bool,
) -> None:
    # torchao's import takes seconds, and most runs do not need it.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe_name),
        emulate=emulate,
        enable_fsdp_float8_all_gather=narrow_all_gather,
    )
    convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in layer_names, config=config
    )


def _is_float8_linear(module: nn.Module) -> bool:
    # By name, so that torchao is not imported to look for its class.
    return any(cls.__name__ == "Float8Linear" for cls in type(module).__mro__)


def _has_emulating_config(module: Any) -> bool:
    return bool(module.config.emulate)


_FLOAT8 = LinearRecipe(
    name="float8",
    label="float8",
    convert=functools.partial(_convert_to_float8, "tensorwise"),
    is_converted=_is_float8_linear,
    is_emulated=_has_emulating_config,
    size_multiple=16,
    min_capability=(8, 9),
    dtype_names=("fp8",),
    gathers_narrow=True,
)
# Both recipes convert to one class of torchao, which has a configuration.
_FLOAT8_ROWWISE = dataclasses.replace(
    _FLOAT8,
    name="float8-rowwise",
    convert=functools.partial(_convert_to_float8, "rowwise"),
    min_capability=(9, 0),
    # torchao sends the scales of rows in float64.
    message_dtype_names=("fp64",),
    gathers_narrow=False,
)

#: Every recipe by name.
LINEAR_RECIPES: dict[str, LinearRecipe] = {
    recipe.name: recipe for recipe in (_FLOAT8, _FLOAT8_ROWWISE)
}

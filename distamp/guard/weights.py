"""The search for weights with inf or NaN, which make every later step a skip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distamp.error_text import names_with_ranks_text
from distamp.errors import NonFiniteWeightsError
from distamp.grads import to_local
from distamp.optim_utils import describe_optimizer, param_names, params_of, view_of

__all__ = [
    "find_nonfinite",
    "nonfinite_state_error",
    "nonfinite_state_names",
    "nonfinite_update_error",
    "nonfinite_weight_names",
    "nonfinite_weights_error",
]


def nonfinite_weight_names(optimizer: Any, names: Mapping[Tensor, str]) -> list[str]:
    """Return the names of weights with inf or NaN on this rank.

    The search covers trained weights with a gradient, because the loss may not use other weights.
    If the gradients are gone, it covers all trained weights. Masters follow the weights of the
    model. An error of the search is not raised, because other ranks wait.

    Args:
        optimizer: The optimizer that has the parameters.
        names: Names that replace the optimizer's.
    """
    try:
        return find_nonfinite(_trained_weights(optimizer, names))
    except Exception:
        return []


def _trained_weights(optimizer: Any, names: Mapping[Tensor, str]) -> list[tuple[str, Tensor]]:
    """Return the weights of the model that an optimizer trains, by name."""
    model_params: dict[int, Tensor] = {}
    for param, stepped in view_of(optimizer).param_pairs():
        model_params[id(stepped)] = param
    with_grad: list[tuple[str, Tensor]] = []
    trained: list[tuple[str, Tensor]] = []
    for name, stepped in zip(param_names(optimizer), params_of(optimizer), strict=True):
        param = model_params.get(id(stepped), stepped)
        # A dtype of one byte has no function isfinite.
        if not param.requires_grad or param.dtype.itemsize == 1:
            continue
        weight = names.get(param, name), param
        trained.append(weight)
        if param.grad is not None or stepped.grad is not None:
            with_grad.append(weight)
    return with_grad or trained


@torch.no_grad()
def find_nonfinite(weights: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the names of weights with inf or NaN; the host waits for a device once."""
    if not weights:
        return []
    names: list[str] = []
    flags: list[Tensor] = []
    for name, weight in weights:
        local = to_local(weight)
        flag = local.isfinite().all()
        names.append(name)
        flags.append(flag.to(flags[0].device) if flags else flag)
    bad_names: list[str] = []
    are_finite = torch.stack(flags).tolist()
    for name, is_finite in zip(names, are_finite, strict=True):
        if not is_finite:
            bad_names.append(name)
    return bad_names


def nonfinite_weights_error(
    optimizer: Any, weights: Sequence[tuple[int, str]], step: int, steps_taken: int
) -> NonFiniteWeightsError:
    """Return the error about weights with inf or NaN.

    Args:
        optimizer: The optimizer that has the parameters.
        weights: Pairs of a rank and the name of a parameter.
        step: The number of the skipped step.
        steps_taken: The number of steps that were taken.
    """
    weights_text = names_with_ranks_text(weights)
    optimizer_text = describe_optimizer(optimizer)
    origin = (
        "No step was taken before, so the model came with them. Check the checkpoint or the "
        "initialisation of the model."
    )
    if steps_taken:
        origin = (
            f"The last step that was taken is number {steps_taken} of the steps taken. Its update, "
            "or a write outside of the optimizer, made them. Load an older checkpoint."
        )
    return NonFiniteWeightsError(
        f"Step {step} of {optimizer_text} was skipped, because weights of the model have inf or "
        f"NaN: {weights_text}. Every later step would be skipped, too, because the "
        f"forward pass computes with these weights. {origin}"
    )


def nonfinite_update_error(
    optimizer: str, weights: Sequence[tuple[int, str]], steps_taken: int
) -> NonFiniteWeightsError:
    """Return the error about a step that was taken and wrote inf or NaN.

    Args:
        optimizer: The optimizer as `describe_optimizer` describes it.
        weights: Pairs of a rank and the name of a parameter.
        steps_taken: The number of steps that were taken, with that one.
    """
    weights_text = names_with_ranks_text(weights)
    return NonFiniteWeightsError(
        f"After step {steps_taken} of the steps taken by {optimizer}, weights of the model have "
        f"inf or NaN: {weights_text}. The gradients of that step were finite, so its update made "
        "them: look at the learning rate, at eps and at overflow of the optimizer's state or of "
        "the dtype of the weights. The step counts as taken, and no further step was taken. Load "
        "an older checkpoint, or go back to a snapshot."
    )


def nonfinite_state_names(optimizer: Any, names: Mapping[Tensor, str]) -> list[str]:
    """Return the names of weights and of floating optimizer state with inf or NaN on this rank.

    All trained weights are searched, with or without a gradient.

    Args:
        optimizer: The optimizer that has the parameters.
        names: Names that replace the optimizer's.
    """
    view = view_of(optimizer)
    model_params: dict[int, Tensor] = {}
    for param, stepped in view.param_pairs():
        model_params[id(stepped)] = param
    tensors: list[tuple[str, Tensor]] = []
    all_names = param_names(optimizer)
    for name, stepped in zip(all_names, params_of(optimizer), strict=True):
        param = model_params.get(id(stepped), stepped)
        name = names.get(param, name)
        if param.requires_grad and _can_be_inf(param):
            tensors.append((name, param))
        state = view.base.state.get(stepped, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and _can_be_inf(value):
                state_name = f"{key} of {name}"
                tensors.append((state_name, value))
    return find_nonfinite(tensors)


def _can_be_inf(tensor: Tensor) -> bool:
    """Return whether a dtype has inf, and a function isfinite; dtypes of one byte have none."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.itemsize > 1


def nonfinite_state_error(tensors: Sequence[tuple[int, str]]) -> NonFiniteWeightsError:
    """Return the error about weights and optimizer state with inf or NaN.

    Args:
        tensors: Pairs of a rank and the name of a parameter or of a state.
    """
    return NonFiniteWeightsError(
        f"Weights or optimizer state have inf or NaN: {names_with_ranks_text(tensors)}. A "
        "checkpoint of them would be lost. Load an older checkpoint, or go back to a snapshot. "
        "check_update=True finds the step that writes them."
    )

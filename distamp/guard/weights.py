"""The search for weights with inf or NaN, which make every later step a skip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distamp.error_text import names_with_ranks_text
from distamp.errors import NonFiniteWeightsError
from distamp.grads import norm_power, to_local
from distamp.optim_utils import describe_optimizer, param_names, params_of, view_of

__all__ = [
    "nonfinite_state_error",
    "nonfinite_state_names",
    "nonfinite_update_error",
    "nonfinite_weight_names",
    "nonfinite_weights_error",
    "written_weights",
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
        return _find_nonfinite(_trained_weights(optimizer, names))
    except Exception:
        return []


def _trained_weights(optimizer: Any, names: Mapping[Tensor, str]) -> list[tuple[str, Tensor]]:
    """Return the weights of the model that an optimizer trains, by name."""
    pairs: list[tuple[Tensor, Tensor]] = []
    names_by_id: dict[int, str] = {}
    for name, param, stepped in _named_pairs(optimizer, names):
        pairs.append((param, stepped))
        names_by_id[id(param)] = name
    return [(names_by_id[id(param)], param) for param in written_weights(pairs)]


def written_weights(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the parameters that a step writes; all trained ones if no gradient is left.

    Parameters of one byte an element are left out, because they have no function isfinite.

    Args:
        pairs: Parameters of the model with the tensors that are stepped.
    """
    with_grad: list[Tensor] = []
    trained: list[Tensor] = []
    for param, stepped in pairs:
        if not param.requires_grad or param.dtype.itemsize == 1:
            continue
        trained.append(param)
        if param.grad is not None or stepped.grad is not None:
            with_grad.append(param)
    return with_grad or trained


def _named_pairs(
    optimizer: Any, names: Mapping[Tensor, str]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each parameter of an optimizer with its name and the tensor that is stepped."""
    view = view_of(optimizer)
    # First, because the pairs create missing masters, which are among the stepped tensors.
    model_params: dict[int, Tensor] = {}
    for param, stepped in view.param_pairs():
        model_params[id(stepped)] = param
    all_names = param_names(view.holder)
    for name, stepped in zip(all_names, params_of(view.holder), strict=True):
        param = model_params.get(id(stepped), stepped)
        yield names.get(param, name), param, stepped


@torch.no_grad()
def _find_nonfinite(weights: Sequence[tuple[str, Tensor]]) -> list[str]:
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


@torch.no_grad()
def nonfinite_state_names(optimizers: Iterable[Any], names: Mapping[Tensor, str]) -> list[str]:
    """Return the names of weights and of floating optimizer state with inf or NaN on this rank.

    All trained weights are searched, with or without a gradient. Norms take one read. Only if one
    is not finite, each tensor is read again for its name.

    Args:
        optimizers: The optimizers that have the parameters.
        names: Names that replace the optimizers'.
    """
    named_tensors = list(_named_float_tensors(optimizers, names))
    values_by_device: dict[torch.device, list[Tensor]] = {}
    for _, tensor in named_tensors:
        values_by_device.setdefault(tensor.device, []).append(tensor)
    powers: list[float | Tensor] = []
    for device, values in values_by_device.items():
        powers.append(norm_power(values, 2.0, device))
    if all(map(math.isfinite, powers)):
        return []
    bad_names = _find_nonfinite(named_tensors)
    return list(dict.fromkeys(bad_names))


def _named_float_tensors(
    optimizers: Iterable[Any], names: Mapping[Tensor, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield trained weights and floating optimizer state of this rank, with their names."""
    for optimizer in optimizers:
        base = view_of(optimizer).base
        for name, param, stepped in _named_pairs(optimizer, names):
            if param.requires_grad:
                yield from _float_parts(name, param)
            state = base.state.get(stepped)
            if isinstance(state, Mapping):
                for key, value in state.items():
                    state_name = f"{key} of {name}"
                    yield from _float_parts(state_name, value)


def _float_parts(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain floating tensors of a tensor.

    Tensors of one byte an element are left out, because they have no function isfinite.
    """
    if not isinstance(value, Tensor):
        return
    local: Any = to_local(value)
    if is_traceable_wrapper_subclass(local):
        part_names, _ = local.__tensor_flatten__()
        for part_name in part_names:
            yield from _float_parts(name, getattr(local, part_name))
        return
    is_number = local.is_floating_point() or local.is_complex()
    if is_number and local.dtype.itemsize > 1:
        yield name, local


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

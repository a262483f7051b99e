"""The parser of the states that `MasterParameters.state_dict` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from distamp.error_text import count_text
from distamp.grads import is_dtensor

__all__ = ["parse_masters_state_dict"]


def parse_masters_state_dict(state: Any, masters: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """Return the saved values by the index of their parameter, if all of them fit.

    Args:
        state: Any object that a user passed.
        masters: The masters to load, by the index of their parameter.

    Raises:
        ValueError: ``state`` is no such state, or its masters do not fit ``masters``.
    """
    saved, version = None, None
    if isinstance(state, Mapping):
        saved = state.get("masters")
        version = state.get("version")
    # True equals 1, but is no version.
    is_version_1 = type(version) is int and version == 1
    if not isinstance(saved, Mapping) or not is_version_1:
        raise ValueError(
            f"This is not a state of master parameters: {state!r:.80}. Pass the dict with "
            "'version': 1 and 'masters' that masters.state_dict() returns."
        )
    unmatched = sorted(saved.keys() ^ masters.keys(), key=str)
    if unmatched:
        index = unmatched[0]
        num_saved = count_text(len(saved), "master")
        if index in saved:
            owner = "state"
            remedy = "Set requires_grad=True on it, load, and then freeze it again"
        else:
            owner = "optimizer"
            remedy = "Freeze it before you create the masters, load, and then unfreeze it"
        raise ValueError(
            f"The state has {num_saved} and this optimizer has {len(masters)}. Parameter {index} "
            f"has a master only in the {owner}. {remedy}. Or use the same model and optimizer as "
            "the state."
        )
    for index, master in masters.items():
        value = saved[index]
        if not _fits(value, master):
            saved_text = _describe(value)
            current_text = _describe(master)
            raise ValueError(
                f"The saved master of parameter {index} is {saved_text}, but the master in this "
                f"optimizer is {current_text}. If the state has another layout, load it into "
                "masters.state_dict() by torch.distributed.checkpoint."
            )
    return saved


def _fits(value: object, master: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.is_complex():
        return False
    return value.shape == master.shape and is_dtensor(value) == is_dtensor(master)


def _describe(value: object) -> str:
    type_name = type(value).__name__
    if not isinstance(value, Tensor):
        return f"a {type_name}"
    shape = tuple(value.shape)
    return f"a {type_name} of shape {shape}"

"""Names of ops as users write them, and the dispatcher ops that each of them moves."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from distamp.autocast.op_lists.families import FAMILIES

__all__ = ["documented", "documents", "family", "known", "overloads", "resolve"]

# Names of the public API that are no dispatcher ops of that name, and the ops they come down to.
_ALIASES: dict[str, tuple[str, ...]] = {
    "GRUCell": ("gru_cell",),
    "LSTMCell": ("lstm_cell",),
    "RNNCell": ("rnn_tanh_cell", "rnn_relu_cell"),
    "__matmul__": ("matmul",),
    "__rmatmul__": ("matmul",),
    "__pow__": ("pow",),
    "__rpow__": ("pow",),
    "__rdiv__": ("reciprocal",),
    "__rtruediv__": ("reciprocal",),
    "attention": ("scaled_dot_product_attention",),
    "cross_entropy": ("cross_entropy_loss",),
    "grid_sample": ("grid_sampler",),
    "interpolate": (
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "_upsample_bilinear2d_aa",
        "upsample_bicubic2d",
        "_upsample_bicubic2d_aa",
        "upsample_trilinear3d",
    ),
    "multi_dot": ("linalg_multi_dot",),
    "nll_loss": ("nll_loss", "nll_loss2d"),
    "norm": ("norm", "linalg_vector_norm", "frobenius_norm", "nuclear_norm"),
    "normalize": ("linalg_vector_norm", "norm"),
    "softmin": ("softmax",),
}

# Copies and casts: autocast is made of them.
_NEVER = set(
    "to _to_copy type_as clone contiguous detach alias lift lift_fresh lift_fresh_copy copy "  # noqa: SIM905
    "result_type _autocast_to_full_precision _autocast_to_reduced_precision".split()
)
# Views that torch's or the documents' lists hold all the same.
_VIEWS = frozenset({"view_as_complex"})

_PREFIXES = (
    ("torch.nn.functional.", ""),
    ("nn.functional.", ""),
    ("F.", ""),
    ("torch.ops.aten.", ""),
    ("aten::", ""),
    ("torch.linalg.", "linalg_"),
    ("torch.fft.", "fft_"),
    ("torch.special.", "special_"),
    ("torch.Tensor.", ""),
    ("Tensor.", ""),
    ("torch.", ""),
)


def _eligible(overload: OpOverload) -> bool:
    """Whether autocast may change an overload: out of place, tensors in, no dtype that is fixed."""
    schema = overload._schema
    if not torch._C._dispatch_has_kernel(overload.name()):  # TorchScript's own.
        return False
    if schema.is_mutable or schema.name.split("::")[-1] in _NEVER:
        return False
    view = any(result.alias_info is not None for result in schema.returns)
    if view and schema.name.split("::")[-1] not in _VIEWS:
        return False
    # Overloads for named dimensions come down to the others.
    if "name" in schema.overload_name.lower():
        return False
    if not any("Tensor" in str(argument.type) for argument in schema.arguments):
        return False
    return not any(
        argument.name in ("dtype", "out_dtype") and not argument.has_default_value()
        for argument in schema.arguments
    )


def overloads(op: str) -> tuple[OpOverload, ...]:
    """The eligible overloads of one dispatcher op, such as ``"aten::softmax"``; none is empty."""
    namespace, _, name = op.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return ()  # yet: a library may define it later
    return _overloads(packet)


@functools.cache
def _overloads(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    found = (getattr(packet, overload) for overload in packet.overloads())
    return tuple(overload for overload in found if _eligible(overload))


@functools.cache
def _known() -> tuple[str, ...]:
    """Every name that a list may hold, for suggestions."""
    every = {name.split("::")[1].split(".")[0] for name in _all_aten()}
    return (*_ALIASES, *sorted(name for name in every if overloads(name)))


def _all_aten() -> list[str]:
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name.startswith("aten::")]


def resolve(name: object) -> tuple[str, ...]:
    """The dispatcher ops that one name of the public API stands for, without their family.

    Args:
        name: ``"linear"``, ``"torch.nn.functional.linear"``, ``"aten::linear"``,
            ``"torch.linalg.norm"``, a custom op's ``"namespace::op"``, or such a function itself.

    Raises:
        TypeError: ``name`` is neither a string nor a torch function.
        ValueError: No such op, or one that autocast cannot change.
    """
    text = _as_text(name)
    base, prefix = text, ""
    for start, family_prefix in _PREFIXES:
        if text.startswith(start):
            base, prefix = text.removeprefix(start), family_prefix
            break
    base, _, overload = base.partition(".")
    if "out" in overload.split("_"):
        raise ValueError(f"{text!r} writes to out=, and autocast leaves such calls alone")
    if not prefix and base in _ALIASES:
        return _ALIASES[base]
    for candidate in (prefix + base, base):
        if overloads(candidate):
            return (candidate,)
    raise ValueError(_why_not(text, base, prefix))


def known(name: str) -> bool:
    """Whether the running torch has an op of this name that a list can hold."""
    try:
        return bool(resolve(name))
    except ValueError:
        return False


def _as_text(name: object) -> str:
    if isinstance(name, str):
        return name
    if isinstance(name, OpOverload | torch._ops.OpOverloadPacket):
        return str(getattr(name, "_qualified_op_name", None) or name._schema.name)
    called = getattr(name, "__name__", None)
    if callable(name) and isinstance(called, str):
        return called
    raise TypeError(
        f"an op list holds names such as 'linear' or 'aten::mm', or torch functions, got {name!r}"
    )


def _why_not(text: str, base: str, prefix: str) -> str:
    in_place = base.endswith("_") and not base.endswith("__")
    if in_place and overloads(base.rstrip("_")):
        return (
            f"{text!r} works in place, and autocast leaves in-place ops alone; "
            f"name {base.rstrip('_')!r}"
        )
    close = difflib.get_close_matches(base, _known(), n=3, cutoff=0.6)
    hint = f"; close matches: {', '.join(close)}" if close else ""
    if hasattr(torch.ops.aten, prefix + base) or hasattr(torch.ops.aten, base):
        return (
            f"autocast cannot change {text!r}: it makes no new tensor from floating point inputs "
            f"(a view, a cast, a factory or an in-place op){hint}"
        )
    return f"no op is called {text!r}{hint}"


def family(op: str) -> frozenset[str]:
    """All ops that do the same computation as one dispatcher op, itself among them."""
    for members in FAMILIES:
        if op in members:
            return frozenset(member for member in members if overloads(member))
    return frozenset({op})


@functools.cache
def _documented_data() -> Mapping[str, Mapping[str, Mapping[str, list[str]]]]:
    text = (
        resources.files("distamp.autocast.op_lists.data")
        .joinpath("documented_ops.json")
        .read_text()
    )
    data: Any = json.loads(text)
    return data  # type: ignore[no-any-return]


def documents() -> tuple[str, ...]:
    """The documents whose lists this package carries."""
    return tuple(_documented_data())


def documented(document: str) -> Mapping[str, Mapping[str, list[str]]]:
    """The lists one document states: device type, then category, then public names.

    Raises:
        ValueError: No document of that name.
    """
    if document not in _documented_data():
        raise ValueError(f"documents are {', '.join(documents())}, got {document!r}")
    return _documented_data()[document]

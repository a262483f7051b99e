"""Names of ops as users write them, the dispatcher ops that each moves, and their families."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

__all__ = [
    "FAMILIES",
    "Category",
    "autocast_key",
    "family",
    "nearest",
    "overloads",
    "resolve",
    "schema_of",
]


class Category(Enum):
    """What autocast does with an op's inputs."""

    LOWER_PRECISION = "lower_precision"
    FP32 = "fp32"
    PROMOTE = "promote"
    UNLISTED = "unlisted"


def nearest(given: object, known: Iterable[str]) -> str:
    """The end of an error message: which known names are nearest to a given one."""
    close = difflib.get_close_matches(str(given), {*known}, cutoff=0.54)
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


def autocast_key(device_type: str) -> str:
    """The dispatch key at which torch has its lists for a device type.

    Raises:
        ValueError: This torch has no autocast for it.
    """
    known = torch._C._autocast_supported_devices()
    if device_type not in known:
        raise ValueError(
            f"this torch has no autocast for {device_type!r}{nearest(device_type, known)}"
        )
    return f"Autocast{torch._C._dispatch_key_for_device(device_type)}"


# Ops that do one computation under several names: moving one of them alone would leave the others
# in the old precision, and callers cannot tell which of them torch picks (a linear layer may run
# as linear, addmm or mm).
FAMILIES: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        """mm matmul linear addmm _addmm_activation bmm baddbmm addbmm mv addmv addr dot vdot
        inner chain_matmul linalg_matmul linalg_multi_dot linalg_vecdot einsum tensordot
        bilinear _trilinear ger outer mkldnn_linear""",
        """conv1d conv2d conv3d convolution _convolution _convolution_mode convolution_overrideable
        conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution
        cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu
        mkldnn_convolution miopen_convolution miopen_convolution_transpose
        miopen_depthwise_convolution slow_conv3d thnn_conv2d slow_conv_transpose2d
        slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d _slow_conv2d_forward
        _conv_depthwise2d conv_depthwise3d mps_convolution""",
        """scaled_dot_product_attention _scaled_dot_product_attention_math
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_fused_attention_overrideable _native_multi_head_attention
        _triton_multi_head_attention""",
        """lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn
        _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _lstm_mps""",
        "softmax _softmax special_softmax _safe_softmax",
        "log_softmax _log_softmax special_log_softmax",
        "logsumexp special_logsumexp",
        "layer_norm native_layer_norm",
        "rms_norm _fused_rms_norm",
        "group_norm native_group_norm",
        """batch_norm native_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_no_training _batch_norm_impl_index _batch_norm_with_update
        _batch_norm_no_update cudnn_batch_norm
        miopen_batch_norm""",
        "norm linalg_norm linalg_vector_norm linalg_matrix_norm frobenius_norm nuclear_norm",
        "pow float_power",
        "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward",
        "cdist _cdist_forward _euclidean_dist",
        "pdist _pdist_forward",
        "ctc_loss _ctc_loss",
        "prelu _prelu_kernel",
        "multilabel_margin_loss multilabel_margin_loss_forward",
        """grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
        cudnn_grid_sampler""",
        "max_pool1d max_pool1d_with_indices",
        "max_pool2d max_pool2d_with_indices mkldnn_max_pool2d",
        "max_pool3d max_pool3d_with_indices mkldnn_max_pool3d",
        "cat concat concatenate",
        "inverse linalg_inv linalg_inv_ex",
        "expm1 special_expm1",
        "log1p special_log1p",
        "erfinv special_erfinv",
        "sigmoid special_expit",
        "logit special_logit",
        "sum nansum",
    )
)

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

# Copies and casts, which autocast is made of.
_NEVER = frozenset(
    "to _to_copy type_as clone contiguous detach alias lift lift_fresh lift_fresh_copy copy "  # noqa: SIM905
    "result_type _autocast_to_full_precision _autocast_to_reduced_precision".split()
)
# A view that torch lists all the same.
_VIEWS = frozenset({"view_as_complex"})

# How the public API names begin, the longest first, and how the dispatcher's begin instead.
_PREFIXES = {
    "torch.nn.functional.": "",
    "nn.functional.": "",
    "F.": "",
    "torch.ops.aten.": "",
    "aten::": "",
    "torch.linalg.": "linalg_",
    "torch.fft.": "fft_",
    "torch.special.": "special_",
    "torch.Tensor.": "",
    "Tensor.": "",
    "torch.": "",
}


# The places in which torch has its functions, each under the function's own name.
_NAMESPACES: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.nn,
    torch.nn.functional,
    torch.linalg,
    torch._C._nn,
    torch._C._linalg,  # type: ignore[attr-defined]
    torch._C._fft,  # type: ignore[attr-defined]
    torch._C._special,  # type: ignore[attr-defined]
)


def schema_of(overload: OpOverload) -> torch._C.FunctionSchema:
    """What torch declares of an op overload: its name, arguments and results."""
    name, _, kind = overload.name().partition(".")
    return torch._C._get_schema(name, kind)


def _eligible(overload: OpOverload) -> bool:
    """Whether autocast may change an overload: out of place, tensors in, no dtype that is fixed."""
    schema = schema_of(overload)
    name = schema.name.split("::")[-1]
    view = any(result.alias_info is not None for result in schema.returns)
    return (
        # Not TorchScript's own.
        torch._C._dispatch_has_kernel(overload.name())
        and not schema.is_mutable
        and name not in _NEVER
        and (not view or name in _VIEWS)
        # Overloads for named dimensions come down to the others.
        and "name" not in schema.overload_name.lower()
        and any("Tensor" in str(argument.type) for argument in schema.arguments)
        and not any(
            argument.name in ("dtype", "out_dtype") and not argument.has_default_value()
            for argument in schema.arguments
        )
    )


def overloads(op: str) -> tuple[OpOverload, ...]:
    """The overloads of a dispatcher op that autocast may change: ``"softmax"``, ``"mylib::op"``."""
    namespace, _, name = op.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
    # A library may define it later, so that it is missing is not kept.
    return _overloads(packet) if isinstance(packet, OpOverloadPacket) else ()


@functools.cache
def _overloads(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    found = (getattr(packet, overload) for overload in packet.overloads())
    return tuple(overload for overload in found if _eligible(overload))


def family(op: str) -> frozenset[str]:
    """All ops that do the same computation as one dispatcher op, itself among them."""
    for members in FAMILIES:
        if op in members:
            return frozenset(member for member in members if overloads(member))
    return frozenset({op})


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
    start = next((each for each in _PREFIXES if text.startswith(each)), "")
    prefix = _PREFIXES.get(start, "")
    base = text.removeprefix(start).partition(".")[0]
    if not prefix and base in _ALIASES:
        return _ALIASES[base]
    for candidate in (prefix + base, base):
        if overloads(candidate):
            return (candidate,)
    raise ValueError(_why_not(text, base, prefix))


def _as_text(name: object) -> str:
    if isinstance(name, str):
        return name
    if isinstance(name, OpOverload):
        return str(schema_of(name).name)
    if isinstance(name, OpOverloadPacket):
        return str(name).replace(".", "::", 1)
    called = getattr(name, "__name__", None)
    if isinstance(called, str):
        # torch.Tensor.__pow__ calls itself pow.
        for attribute in (called, f"__{called}__"):
            if any(getattr(space, attribute, None) is name for space in _NAMESPACES):
                return called
    if callable(name):
        raise TypeError(
            f"an op list holds torch's own functions, and {_described(name)} is none. Lists change "
            "the ops that a function calls, so name those ops, such as 'linear' or 'aten::mm'. For "
            "an op of your own, pass torch.ops.<namespace>.<op> or '<namespace>::<op>'"
        )
    raise TypeError(
        f"an op list holds names such as 'linear' or 'aten::mm', or torch functions, got {name!r}"
    )


def _described(function: object) -> str:
    """Return a callable's name, and the module that it comes from, for an error message."""
    name = getattr(function, "__qualname__", None) or repr(function)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else str(name)


def _why_not(text: str, base: str, prefix: str) -> str:
    names: list[str] = torch._C._dispatch_get_all_op_names()
    every = {name.removeprefix("aten::").partition(".")[0] for name in names if "aten" in name}
    hint = nearest(prefix + base, (*_ALIASES, *sorted(name for name in every if overloads(name))))
    if hasattr(torch.ops.aten, prefix + base) or hasattr(torch.ops.aten, base):
        return (
            f"autocast cannot change {text!r}: it makes no new tensor from floating point inputs "
            f"(a view, a cast, a factory or an in-place op){hint}"
        )
    return f"no op is called {text!r}{hint}"

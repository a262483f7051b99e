"""The precision of a compiled backward pass, for which torch has a separate setting.

torch.compile traces a backward pass together with its forward pass. By default it traces both under
the autocast state in which the model is called. A module with a precision of float32 in a bfloat16
region would compute products in float32 in forward and in bfloat16 in backward. With torch's
setting ``"off"`` the ops of a backward pass run in the dtypes of the tensors that forward saved, as
in eager code that calls ``backward()`` after the region.

This file has the private names of torch for it, which torch 2.13 and 2.15 have. On a torch without
the setting, and in a region of torch's class, a warning names each module with another precision in
its backward pass.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import torch
from torch._functorch import config
from torch._guards import TracingContext

__all__ = ["restore_setting", "switch_off_autocast", "warn_of_inner_region", "warn_of_module"]

_NAME = "backward_pass_autocast"
_DEFAULT = "same_as_forward"

_warned: set[str] = set()


def switch_off_autocast() -> bool:
    """Have torch compile backward passes without autocast from now on, in this thread.

    Returns:
        Whether the setting changed, so that the caller must call `restore_setting`. A setting that
        is not torch's default is the user's choice and stays.
    """
    if getattr(config, _NAME, None) != _DEFAULT:
        return False
    setattr(config, _NAME, "off")
    return True


def restore_setting() -> None:
    """Give torch's setting its default back."""
    setattr(config, _NAME, _DEFAULT)


def warn_of_module(module_type: str, dtype: torch.dtype) -> None:
    """Warn once if the backward pass of a module is being compiled in another precision.

    torch.compile calls this function while it traces, and adds nothing to the graph.
    """
    if _compiles_in_another(dtype):
        _warn(f"{module_type}{_module_name()}, whose precision is set to {dtype},")


def warn_of_inner_region(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """Warn once if a region inside a compiled function does not hold in its backward pass.

    torch.compile calls this function while it traces, and adds nothing to the graph.

    Args:
        device_type: The region's.
        dtype: The region's.
        enabled: The region's.
        cache_enabled: The region's.
    """
    dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
    if _compiles_in_another(dtype if enabled else torch.float32):
        region = f"autocast({device_type!r}, {dtype})" if enabled else "autocast(enabled=False)"
        name = _module_name()
        _warn(f"the region {region}" + (f" in the module{name}" if name else ""))


def _compiles_in_another(dtype: torch.dtype) -> bool:
    """Return whether a backward pass that is being traced gets another precision than this one."""
    if not torch.is_grad_enabled() or getattr(config, _NAME, _DEFAULT) != _DEFAULT:
        return False
    return _dtype_around() not in (None, dtype)


def _warn(subject: str) -> None:
    if hasattr(config, _NAME):
        remedy = (
            "Enter distamp.autocast or amp.autocast() instead of torch.autocast, or set "
            f"torch._functorch.config.{_NAME} = 'off' before the first call."
        )
    else:
        remedy = (
            f"torch {torch.__version__} has no setting for that. Exclude the module from "
            "compilation by torch.compiler.disable."
        )
    message = (
        f"The backward pass of {subject} is compiled in {_dtype_around()}. torch.compile traces a "
        "backward pass in the autocast region in which the compiled function is called. "
        f"{remedy}"
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


def _module_name() -> str:
    """Return the quoted name of the module being traced after a blank, or "" without a name."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # Some sources have no name, and torch may move its frames. Then the warning has no name.
    with contextlib.suppress(Exception):
        frame: Any = InstructionTranslator.current_tx().output.current_tx
        while frame is not None:
            for traced in frame.symbolic_locals.values():
                if names := re.findall(r"_modules\['([^']+)'\]", _source_name(traced)):
                    return f" '{'.'.join(names)}'"
            frame = frame.parent
    return ""


def _source_name(traced: Any) -> str:
    with contextlib.suppress(Exception):
        name = traced.source.name
        return str(name() if callable(name) else name)
    return ""


def _dtype_around() -> torch.dtype | None:
    """Return the autocast dtype in which the function being compiled is called; None without one.

    The state of the thread does not show it, because tracing enters the regions inside.
    """
    context = TracingContext.try_get()
    state: dict[str, Any] = {} if context is None else context.global_context.global_state
    for enabled, dtype in (
        ("autocast_enabled", "autocast_gpu_dtype"),
        ("autocast_cpu_enabled", "autocast_cpu_dtype"),
    ):
        if enabled in state and state[enabled][1]:
            return state[dtype][1]  # type: ignore[no-any-return]
    return None


# torch.compile calls functions with this attribute while it traces. The decorator in
# torch.compiler that sets the attribute would import the compiler.
for _function in (warn_of_module, warn_of_inner_region):
    vars(_function)["_dynamo_marked_constant"] = True

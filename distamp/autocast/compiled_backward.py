"""The precision of a compiled backward pass, which torch sets apart from the forward pass's.

torch.compile traces a backward pass together with its forward pass. By default it traces both under
the autocast state in which the model is called, so the products of a module that is pinned to
float32 in a bfloat16 region would be float32 in forward and bfloat16 in backward. With torch's
setting ``"off"`` the ops of a backward pass run in the dtypes of the tensors that forward saved, as
they do in eager code that calls ``backward()`` after the region.

torch's private names for this stand in this file alone. On a torch without the setting, and in a
region of torch's own class, a warning names each module whose backward pass gets another precision.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import torch
from torch._functorch import config
from torch._guards import TracingContext

__all__ = ["restore_setting", "switch_off_autocast", "warn_of_inner_region", "warn_of_pin"]

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


def warn_of_pin(module_type: str, dtype: torch.dtype) -> None:
    """Warn once if the backward pass of a pinned module is being compiled in another precision.

    torch.compile calls it while it traces, and adds nothing to the graph.
    """
    if _compiles_in_another(dtype):
        _warn(f"{module_type}{_module_name()}, which is pinned to {dtype},")


def warn_of_inner_region(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """Warn once if a region inside a compiled function does not hold in its backward pass.

    torch.compile calls it while it traces, and adds nothing to the graph.

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


def _warn(what: str) -> None:
    if hasattr(config, _NAME):
        remedy = (
            "Enter distamp.autocast or amp.autocast() in place of torch.autocast, or set "
            f"torch._functorch.config.{_NAME} = 'off' before the first call."
        )
    else:
        remedy = (
            f"torch {torch.__version__} has no setting for that. Exclude the module from "
            "compilation by torch.compiler.disable."
        )
    message = (
        f"The backward pass of {what} is compiled in {_dtype_around()}. torch.compile traces a "
        "backward pass in the autocast region in which the compiled function is called. "
        f"{remedy}"
    )
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


def _module_name() -> str:
    """Return the quoted name of the module being traced, after a blank; "" where torch has none."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # Some sources have no name, and another torch may keep frames elsewhere.
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


# What torch.compile calls while it traces, instead of tracing it. torch.compiler has a decorator
# that sets this attribute, which imports the compiler.
for _function in (warn_of_pin, warn_of_inner_region):
    vars(_function)["_dynamo_marked_constant"] = True

"""Module names without the components that wrappers add, by one rule for the whole package."""

from __future__ import annotations

from torch import nn

__all__ = ["has_extra_state", "module_names"]

# Attributes under which wrappers hold a module: FSDP1 and fairscale, torch.compile, checkpoint
# wrappers.
_WRAPPER_ATTRS = ("_fsdp_wrapped_module", "_fpw_module", "_orig_mod", "_checkpoint_wrapped_module")


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return every module of the model once, by its name without the components of wrappers.

    An attribute called ``module`` counts as a wrapper's only if its owner has no other submodule
    and no parameter, like DataParallel and DDP.
    """
    names: dict[nn.Module, str] = {}
    modules = dict(model.named_modules())
    for qualified_name, module in modules.items():
        parent_path, _, attribute = qualified_name.rpartition(".")
        parent = modules[parent_path]
        parent_name = names.get(parent, "")
        is_wrapped = attribute in _WRAPPER_ATTRS
        if attribute == "module":
            is_only_child = list(parent.children()) == [module]
            parent_param = next(parent.parameters(recurse=False), None)
            is_wrapped = is_only_child and parent_param is None
        if is_wrapped or not qualified_name:
            names[module] = parent_name
        else:
            name = f"{parent_name}.{attribute}"
            names[module] = name.lstrip(".")
    return names


def has_extra_state(module: nn.Module) -> bool:
    """Return whether the class of a module defines ``get_extra_state``, as ``state_dict`` tests."""
    return type(module).get_extra_state is not nn.Module.get_extra_state

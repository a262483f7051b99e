"""Names of modules without those of the wrappers around them: one rule for the whole package."""

from __future__ import annotations

from torch import nn

__all__ = ["module_names"]

# Components of names that wrappers add: FSDP1 and fairscale, torch.compile, checkpoint wrappers.
_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_orig_mod", "_checkpoint_wrapped_module")


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return every module of the model once, with its name without those of wrappers.

    An attribute called ``module`` counts as a wrapper's only if its owner has no other submodule
    and no parameter of its own, like DataParallel and DDP.
    """
    names: dict[nn.Module, str] = {}
    modules = dict(model.named_modules())
    for qualified_name, module in modules.items():
        parent_path, _, attribute = qualified_name.rpartition(".")
        parent = modules[parent_path]
        parent_name = names.get(parent, "")
        is_only_child = list(parent.children()) == [module]
        has_parameters = next(parent.parameters(recurse=False), None) is not None
        is_wrapped = attribute in _WRAPPERS or (
            attribute == "module" and is_only_child and not has_parameters
        )
        if is_wrapped or not qualified_name:
            names[module] = parent_name
        else:
            names[module] = f"{parent_name}.{attribute}".lstrip(".")
    return names

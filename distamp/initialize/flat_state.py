"""Weights and optimizer state under flat names that mean the same at every level and layout."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distamp.errors import SettingError
from distamp.initialize.wrappers import recognise
from distamp.scaler import masters_of
from distamp.sources import GradientSource, source_of

__all__ = ["FlatState"]

_log = logging.getLogger("distamp.initialize")
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
_PLAIN = (None, "DistributedDataParallel", "DataParallel", "fully_shard")


class FlatState:
    """Models and their optimizers as named tensors, live ones, for one call.

    Args:
        models: Wrapped or not.
        optimizers: Over their parameters, with masters or without.

    Raises:
        SettingError: A rank has only a share that has no name of its own (FSDP1, ZeRO, OSS), or an
            optimizer steps parameters of no model.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._optimizers = optimizers
        #: Parameters of the models, and buffers that are saved, by name.
        self.tensors: dict[str, Tensor] = {}
        for index, model in enumerate(models):
            prefix = "model" if len(models) == 1 else f"model.{index}"
            name, inner, _ = recognise(model)
            if name not in _PLAIN:
                raise SettingError(
                    f"{name} has no tensor of a parameter's own name and place to save: take "
                    "fully_shard, or torch.distributed.checkpoint.state_dict.get_state_dict"
                )
            saved = inner.state_dict(keep_vars=True).keys()
            buffers = ((name, each) for name, each in inner.named_buffers() if name in saved)
            for name, tensor in (*inner.named_parameters(), *buffers):
                self.tensors[f"{prefix}.{_WRAPPERS.sub('', name)}"] = tensor
        self._names = {id(each): name for name, each in self.tensors.items()}

    def rows(
        self,
    ) -> Iterator[tuple[str, Tensor, GradientSource, dict[str, Any], dict[str, Any]]]:
        """Yield each stepped parameter's name, what is stepped, whose, its group and its state."""
        for optimizer in self._optimizers:
            source = source_of(optimizer)
            names = {id(step): self._names.get(id(p)) for p, step in source.stepped()}
            for group in optimizer.param_groups:
                for stepped in group["params"]:
                    if (name := names.get(id(stepped))) is None:
                        raise SettingError(
                            f"{type(optimizer).__name__} steps a parameter of shape "
                            f"{tuple(stepped.shape)} that no model of initialize has, or a share"
                        )
                    yield name, stepped, source, group, optimizer.state[stepped]

    def get(self, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return all by name; see `Amp.flat_state_dict`."""
        state: dict[str, Any] = {name: tensor.detach() for name, tensor in self.tensors.items()}
        for name, stepped, source, group, values in self.rows():
            state[name] = source.value(stepped)
            prefix = f"optimizer.{name.partition('.')[2]}."
            if saved is not None:
                # A count of steps is on the host, unless the kernel reads it.
                on_device = group.get("fused") or group.get("capturable")
                device = stepped.device if on_device else torch.device("cpu")
                keys = [key for key in saved if key.startswith(prefix)]
                values |= {key[len(prefix) :]: _empty(saved[key], stepped, device) for key in keys}
            state |= {f"{prefix}{key}": value for key, value in values.items()}
        return state

    @torch.no_grad()
    def set(self, state: Mapping[str, Any]) -> None:
        """Take over what was read into a result of `get`; see `Amp.load_flat_state_dict`."""
        left, known = [], self.tensors.keys() & state.keys()
        with contextlib.ExitStack() as stack:
            for masters in filter(None, map(masters_of, self._optimizers)):
                masters.write_back()  # what was loaded into whole ones, in place
                stack.enter_context(masters.materialized())
            for name in known:  # a no-op where the state still is what get() returned
                self.tensors[name].copy_(state[name])
            for name, stepped, _, _, values in self.rows():
                if name in known and stepped is not self.tensors[name]:
                    stepped.copy_(state[name])
                keys = {key: f"optimizer.{name.partition('.')[2]}.{key}" for key in values}
                if values and state.keys() >= {*keys.values()}:
                    values |= {key: state[flat] for key, flat in keys.items()}
                else:  # none was saved, or of another optimizer
                    left.append(name)
        if missing := sorted(self.tensors.keys() - known):
            _log.warning("the state has no %s and %d more", missing[0], len(missing) - 1)
        if left:
            _log.warning(
                "the state has no optimizer state of %d weights, first %s, and theirs stays as it "
                "is; give flat_state_dict() what the checkpoint has, by saved=",
                *(len(left), left[0]),
            )


def _empty(saved: Any, stepped: Tensor, device: torch.device) -> Any:
    """Return a place for a value of an optimizer's state: like the parameter, or of its own."""
    size = getattr(saved, "size", None)  # None: of no tensor
    if size == stepped.shape:
        return torch.zeros_like(stepped)
    return None if size is None else torch.zeros(size, device=device)

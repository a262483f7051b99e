"""An optimizer of masters as torch's checkpoint functions expect one: by the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distamp.errors import StageError
from distamp.gradients import local_of

if TYPE_CHECKING:
    from distamp.masters.masters import MasterParameters

__all__ = ["CheckpointView"]

_MASTER = "master"


class CheckpointView(torch.optim.Optimizer):
    """What ``MasterParameters.for_checkpoint`` returns.

    torch finds the names of an optimizer's parameters, and under FSDP1 what part of each a rank
    holds, by looking them up in the model. Here they are the model's, and the state of each is its
    master's, the master itself among it as ``"master"``. The tensors are the live ones.

    Args:
        masters: Of the optimizer.
        stepping: The optimizer that holds them.
    """

    def __init__(self, masters: MasterParameters, stepping: torch.optim.Optimizer) -> None:
        self._masters = masters
        self._stepping = stepping
        filled = iter(masters.filled())
        groups = [
            {**group, "params": [next(filled) for _ in group["params"]]}
            for group in stepping.param_groups
        ]
        super().__init__(groups, stepping.defaults)
        if stepping.state:
            self._look()

    def _look(self) -> None:
        """Show the optimizer's state as it is now."""
        for parameter in self._parameters():
            master = self._masters.master_of(parameter)
            kept = self._stepping.state.get(parameter if master is None else master, {})
            self.state[parameter] = {**kept, **({} if master is None else {_MASTER: master.data})}

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the optimizer's state, as torch does before it loads one: at a learning rate of 0.

        Raises:
            StageError: The learning rate is not 0: this is not for training.
        """
        if closure is not None or any(group.get("lr") for group in self.param_groups):
            raise StageError(
                "for_checkpoint() is for saving and loading; step the optimizer itself"
            )
        before = [dict(group) for group in self._stepping.param_groups]
        for group in self._stepping.param_groups:
            group["lr"] = 0.0
        try:
            self._stepping.step()
        finally:
            for group, settings in zip(self._stepping.param_groups, before, strict=True):
                group.update(settings)
        for state in self._stepping.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()  # none was taken
        self._look()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state and the masters, and write the parameters back.

        A master that the state does not hold follows its parameter.

        Raises:
            ValueError: It is of other parameters.
        """
        own = list(self._parameters())
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        if len(saved) != len(own):
            raise ValueError(
                f"the state is of {len(saved)} parameters and the optimizer holds {len(own)}; load "
                "it into the same model and optimizer"
            )
        state: dict[int, Any] = {}
        for number, (key, parameter) in enumerate(zip(saved, own, strict=True)):
            kept = dict(state_dict["state"].get(key, {}))
            value, master = kept.pop(_MASTER, None), self._masters.master_of(parameter)
            if value is not None and master is not None:
                local_of(master).copy_(local_of(value))
            if kept:
                state[number] = kept
        numbers = iter(range(len(own)))
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in state_dict["param_groups"]
        ]
        self._stepping.load_state_dict({"state": state, "param_groups": groups})
        if any(_MASTER in kept for kept in state_dict["state"].values()):
            self._masters.write_back()
        self._look()

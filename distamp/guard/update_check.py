"""`UpdateCheck`: finiteness of the weights that a step has written, in the next message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distamp import device_utils
from distamp.clip_grad import any_found_inf
from distamp.grads import no_grad_fast, norm_power, to_local
from distamp.guard.optimizer_history import OptimizerHistory
from distamp.guard.weights import (
    nonfinite_update_error,
    nonfinite_weight_names,
    written_weights,
)
from distamp.optim_utils import OptimizerView, describe_optimizer
from distamp.process_group import MessageGroup

__all__ = ["UpdateCheck"]


class _BadUpdate(NamedTuple):
    """A step that may have written inf or NaN into weights of this rank.

    Args:
        holder: The optimizer that has the parameters.
        history: Its history.
        is_bad: Whether it did: True, or 0-d float32 on a device.
    """

    holder: Any
    history: OptimizerHistory
    is_bad: bool | Tensor


class UpdateCheck:
    """A `StateCheck` of the weights that steps have written since the last message.

    A step measures the weights on this rank after the optimizer has written them. On a device the
    host does not wait: kernels add the flag to the digest, and the next step is skipped by it. An
    update that is not finite is found by the owner of the weight, also under ZeRO, where each rank
    looks at the share that it steps. Masters are not measured, because inf and NaN stay in a
    weight that is rounded from a master.

    Attributes:
        stops_step: True, because a step with such weights is lost.
    """

    stops_step = True

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = names
        #: Measured since the last message, and in the last message.
        self._measured: list[_BadUpdate] = []
        self._sent: list[_BadUpdate] = []

    @no_grad_fast
    def measure(self, view: OptimizerView, history: OptimizerHistory, device: torch.device) -> None:
        """Measure the weights that an optimizer has written in this step.

        Args:
            view: The view of the optimizer, before its gradients are released.
            history: Its history.
            device: The device of the loss scale.
        """
        weights = [to_local(param) for param in written_weights(view.param_pairs())]
        is_bad: bool | Tensor
        if device_utils.is_cpu(device):
            is_bad = _has_nonfinite(weights)
        else:
            largest = norm_power(weights, math.inf, device)
            is_bad = torch.as_tensor(largest, device=device).isfinite().logical_not().float()
        if is_bad is not False:
            self._measured.append(_BadUpdate(view.holder, history, is_bad))

    def clear(self) -> None:
        """Forget the measurements, because the weights were replaced."""
        self._measured, self._sent = [], []

    # -- as a part of a message ----------------------------------------------------------------

    def addend(self, group: MessageGroup, modulus: int, iteration: int) -> int | Tensor:
        """Return 1 if this rank has such an update, else 0."""
        self._sent, self._measured = self._measured, []
        flag = self._sent_flag(group.scale_device)
        if isinstance(flag, Tensor):
            return device_utils.to_device(flag, group.device, torch.float64)
        return int(flag)

    def evidence(self) -> list[tuple[str, int, list[str]]]:
        """Return for each bad update the optimizer, its steps and the names of bad weights."""
        evidence: list[tuple[str, int, list[str]]] = []
        for update in self._sent:
            if bool(update.is_bad):
                names = nonfinite_weight_names(update.holder, self._names)
                steps_taken = update.history.steps_taken
                if names:  # Otherwise the weights were replaced after the step.
                    evidence.append((describe_optimizer(update.holder), steps_taken, names))
        self._sent = []
        return evidence

    def raise_findings(self, evidence_by_rank: Sequence[tuple[int, Any]]) -> None:
        """Raise an error about the first optimizer with such an update, with all ranks.

        Raises:
            NonFiniteWeightsError: A rank has sent such an update.
        """
        first: tuple[str, int] | None = None
        weights: list[tuple[int, str]] = []
        for rank, evidence in evidence_by_rank:
            for optimizer, steps_taken, names in evidence:
                first = first or (optimizer, steps_taken)
                for name in names:
                    weights.append((rank, name))
        if first is not None:
            raise nonfinite_update_error(first[0], weights, first[1])

    # -- without other ranks -------------------------------------------------------------------

    def flag_alone(self, device: torch.device, rank: int) -> Tensor | None:
        """Return the flag of this process for kernels, which skip the next step by it.

        On the host the error is raised here.

        Args:
            device: The device of the loss scale.
            rank: The number of this process.

        Returns:
            0-d float32, or None if nothing was measured.

        Raises:
            NonFiniteWeightsError: The host knows of such an update.
        """
        self._sent, self._measured = self._measured, []
        flag = self._sent_flag(device)
        if isinstance(flag, Tensor):
            return flag
        if flag:
            self.raise_alone(rank)
        return None

    def raise_alone(self, rank: int) -> None:
        """Raise the error of this process.

        Raises:
            NonFiniteWeightsError: There is such an update.
        """
        self.raise_findings([(rank, self.evidence())])

    def _sent_flag(self, device: torch.device) -> bool | Tensor:
        """Return whether an update in the message is bad; 0-d float32 if a device knows it."""
        flags: list[Tensor] = []
        for update in self._sent:
            if isinstance(update.is_bad, Tensor):
                flags.append(update.is_bad)
            else:
                return True
        return any_found_inf(flags, device) if flags else False


def _has_nonfinite(weights: list[Tensor]) -> bool:
    """Return whether a weight is not finite, as the host knows it."""
    norm_sq = norm_power(weights, 2.0, torch.device("cpu"))
    if math.isfinite(norm_sq):
        return False
    # Squares of large finite weights overflow.
    largest = norm_power(weights, math.inf, torch.device("cpu"))
    return not math.isfinite(largest)

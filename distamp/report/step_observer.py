"""StepObserver: the runs of a step under a contract, and the observations of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distamp.module_names import module_names
from distamp.report.contract_recorder import ContractRecorder, RankObservations
from distamp.report.eager_step import discard_updates
from distamp.report.rank_group import RankGroup
from distamp.report.tracing import StepTracer

__all__ = ["StepObserver"]


class StepObserver:
    """Records runs of one step on every rank.

    Args:
        group: The ranks.
        models: The models of the step.
        optimizers: Its optimizers.
        hooks: Its communication hooks.

    Attributes:
        names: The names of all modules.
    """

    def __init__(
        self,
        group: RankGroup,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        hooks: Sequence[Any],
    ) -> None:
        self._group = group
        self._models = models
        self._optimizers = optimizers
        self._hooks = hooks
        self.names: list[str] = []
        for model in models:
            self.names += module_names(model).values()

    @contextmanager
    def observe(self) -> Iterator[list[RankObservations]]:
        """Record the step in the block; the list has a value for each rank after the block.

        Collective: every rank of the group must call this.
        """
        with self._record("the step that a contract watches", eager=False) as ranks:
            yield ranks

    @contextmanager
    def observe_eagerly(self) -> Iterator[list[RankObservations]]:
        """Record a run of the step with compiled code run eagerly, and discard its updates.

        Collective: every rank of the group must call this.
        """
        with (
            discard_updates(self._models),
            self._record("the eager run of the step", eager=True) as ranks,
        ):
            yield ranks

    @contextmanager
    def _record(self, activity: str, eager: bool) -> Iterator[list[RankObservations]]:
        with self._group.raise_together("the check of a contract"):
            recorder = ContractRecorder(self._optimizers, self._hooks)
            tracer = StepTracer(self._models, [recorder], eager=eager)
        ranks: list[RankObservations] = []
        with self._group.raise_together(activity), recorder.record(tracer):
            yield ranks
        with self._group.raise_together("the check of a contract"):
            observations = recorder.result
        ranks += self._group.gather(observations)

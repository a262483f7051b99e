"""What a scaler remembers of an optimizer from one iteration to the next."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distamp.errors import StageError
from distamp.scaler import host
from distamp.scaler.found_inf import Reply
from distamp.scaler.gradients import inner_optimizer, parameters_of, refuse_impossible
from distamp.scaler.host import HostCopy
from distamp.scaler.identity import fingerprints
from distamp.scaler.master_lookup import carriers
from distamp.scaler.process_group import Group
from distamp.scaler.stages import OptState, Records

__all__ = ["Known", "KnownOptimizers", "StepCounts"]


@dataclass(frozen=True)
class StepCounts:
    """How many times ``step()`` let an optimizer step, and how many times it did not."""

    taken: int
    skipped: int


@dataclass(eq=False)
class Known:
    """One optimizer, as long as it lives.

    Args:
        optimizer: The optimizer itself, held weakly.
        index: Its place in the order in which this scaler first saw optimizers.
        identity: The number that names it in messages, the same on all ranks; 0 until the first.
        wrapper: Whether it only passes on to an optimizer inside (ZeroRedundancyOptimizer, OSS).
        parameter_ids: ``id`` of each of its parameters, when they were last looked up.
        wants_scaler: Whether its ``step`` takes the scaler itself: torch's older protocol.
        kin: Other optimizers of this scaler that hold some of the same parameters.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    index: int
    identity: int
    wrapper: bool
    parameter_ids: frozenset[int]
    wants_scaler: bool
    kin: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)
    agreed: bool = False
    found_inf: Tensor | None = None
    last_step: Tensor | None = None
    said: tuple[Reply, int, Group] | None = None
    steps: int = 0
    skipped_on_host: int = 0
    skipped_on_device: Tensor | None = None
    skips_in_a_row: int = 0
    late_flag: HostCopy | None = None
    buffers_filled: bool = False

    def reaches_skips(self, limit: int | None, found_inf: Tensor) -> bool:
        """Return whether this step is the ``limit``-th skipped in a row, and begin anew if so.

        Where the flag lies on a device, it is the flag of the step before that counts: its copy has
        arrived by now.
        """
        if host.is_host(found_inf.device):
            skipped: float | None = found_inf.item()
        else:
            late, self.late_flag = self.late_flag, HostCopy(found_inf.view(1))
            skipped = None if late is None else late.values()[0]
        if skipped is None:
            return False
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        if self.skips_in_a_row != limit:
            return False
        self.skips_in_a_row = 0
        return True

    def count(self, found_inf: Tensor) -> None:
        """Count one call of ``step()``, without reading the flag on the host."""
        self.steps += 1
        self.found_inf = self.last_step = found_inf
        if host.is_host(found_inf.device):
            self.skipped_on_host += bool(found_inf.item())
            return
        if self.skipped_on_device is None:
            self.skipped_on_device = torch.zeros((), dtype=torch.float64, device=found_inf.device)
        self.skipped_on_device.add_(found_inf)

    def first_overflow_rank(self) -> int | None:
        """Return the lowest rank that overflowed at the last check; None if it was clean."""
        if self.said is not None:
            reply, index, group = self.said
            first = reply.first_rank(index)
            return None if first is None else group.global_ranks()[first]
        return 0 if self.found_inf is not None and self.found_inf.item() else None

    @property
    def counts(self) -> StepCounts:
        """Steps taken and skipped so far; may wait for the device."""
        skipped = self.skipped_on_host
        if self.skipped_on_device is not None:
            skipped += int(self.skipped_on_device.item())
        return StepCounts(taken=self.steps - skipped, skipped=skipped)


class KnownOptimizers:
    """The optimizers a scaler has seen, held weakly and by id, which is quick to ask."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._seen = 0

    def __getitem__(self, optimizer: torch.optim.Optimizer) -> Known:
        known = self._known.get(id(optimizer))
        if known is not None:
            return known
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"expected an optimizer, not {type(optimizer).__name__}; several are given as "
                "unscale_(*optimizers) or step_all(optimizers)"
            )
        known = self._known[id(optimizer)] = self._first_sight(optimizer)
        return known

    def get(self, optimizer: torch.optim.Optimizer) -> Known | None:
        """Return what is remembered, or None for an optimizer never seen."""
        return self._known.get(id(optimizer))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return every optimizer seen that is still alive, in the order of first sight."""
        return [o for known in self._known.values() if (o := known.optimizer()) is not None]

    def holding(self, parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
        """Return the optimizers that hold some of ``parameters``.

        Raises:
            StageError: One of them belongs to no optimizer seen so far.
        """
        wanted = set(map(id, parameters))
        owners, left = self._owners(wanted)
        if left:  # groups may have been added since first sight
            for optimizer in self.optimizers():
                self[optimizer].parameter_ids = frozenset(map(id, carriers(optimizer)))
            owners, left = self._owners(wanted)
        if left:
            raise StageError(
                f"{len(left)} of {len(wanted)} parameters belong to no optimizer this scaler has "
                "seen yet, so it cannot tell whether their gradients are still scaled. Give "
                "clip_grad_norm_ the optimizer, or call unscale_(optimizer) first"
            )
        return owners

    def _owners(self, wanted: set[int]) -> tuple[list[torch.optim.Optimizer], set[int]]:
        owners = [o for o in self.optimizers() if wanted & self[o].parameter_ids]
        return owners, wanted.difference(*(self[o].parameter_ids for o in owners))

    def identities(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[int, int]]:
        """Return what names each optimizer in messages; found out at the first.

        The order of first sight is part of it: it tells apart what is alike in all else.
        """
        known = [self[optimizer] for optimizer in optimizers]
        if not all(k.identity for k in known):
            for k, identity in zip(known, fingerprints(optimizers), strict=True):
                k.identity = k.identity or identity
        return [(k.identity, k.index) for k in known]

    def forget_agreements(self) -> None:
        """Compare identities anew at the next message, as after a change of group."""
        for known in self._known.values():
            known.agreed = False
            known.identity = 0

    def _first_sight(self, optimizer: torch.optim.Optimizer) -> Known:
        parameters = parameters_of(optimizer)
        refuse_impossible(parameters)
        ids = frozenset(map(id, carriers(optimizer)))
        wants_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
        key, alive = id(optimizer), self._known
        # The id is free for another object only after this has run.
        reference = weakref.ref(optimizer, lambda _: alive.pop(key, None))
        wrapper = inner_optimizer(optimizer) is not None
        known = Known(reference, self._seen, 0, wrapper, ids, wants_scaler)
        self._seen += 1
        for other in self._known.values():
            if ids & other.parameter_ids:
                known.kin.append(other.optimizer)
                other.kin.append(reference)
        return known


def adopt_kin(optimizer: torch.optim.Optimizer, known: KnownOptimizers, records: Records) -> None:
    """Give ``optimizer`` the record of a wrapper, or an inner optimizer, unscaled this iteration.

    Raises:
        StageError: Only some of its parameters were unscaled or stepped through another optimizer.
    """
    mine = known[optimizer]
    if not mine.kin or records[id(optimizer)].stage is not OptState.READY:
        return
    for reference in mine.kin:
        other = reference()
        record = records.get(id(other)) if other is not None else None
        if other is None or record is None or record.stage is OptState.READY:
            continue
        theirs = known[other].parameter_ids
        if mine.parameter_ids <= theirs or mine.wrapper:
            records[id(optimizer)] = record
            return
        raise StageError(
            f"{type(optimizer).__name__} shares parameters with a {type(other).__name__} that was "
            "already unscaled or stepped in this iteration; their gradients would be unscaled twice"
        )


def own_share(optimizer: torch.optim.Optimizer) -> list[Tensor] | None:
    """Return the parameters whose gradients count on this rank, if a wrapper splits them.

    ZeroRedundancyOptimizer and OSS hold all parameters and give each rank's inner optimizer a part;
    under ShardedDataParallel only that part's gradients are reduced.
    """
    inner = inner_optimizer(optimizer)
    if inner is None:
        return None
    share = parameters_of(inner)
    return share if len(share) < len(parameters_of(optimizer)) else None

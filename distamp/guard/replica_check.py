"""`ReplicaCheck`: comparison of replicas by a checksum in a message that is sent anyway.

Of k ranks that hold the same tensors with the checksum x, the first adds (k - 1) * x to its digest,
and each other rank subtracts x. So the digests stay equal if all checksums are equal. If they
differ, the ranks gather a checksum of each tensor, and broadcast the tensors that differ.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distamp import device_utils
from distamp.clip_grad import LayoutFn
from distamp.error_text import choices_text, count_text, ranks_text
from distamp.errors import ReplicaMismatchError
from distamp.grads import no_grad_fast
from distamp.guard.checksums import as_words, checksum, mixed
from distamp.guard.replica_sets import ReplicaSet, ReplicaTensor, SetKey, find_replica_sets
from distamp.process_group import MessageGroup, call_collective

__all__ = ["ReplicaCheck", "ReplicaComparison"]

_CPU = torch.device("cpu")
#: The largest number of tensors that an error describes.
_MAX_DESCRIBED = 4
#: The number of bytes that one broadcast sends.
_BLOCK_BYTES = 1 << 24
_NUMBER_WEIGHT = 0x1B03738712FAD5C9
_ENDING = (
    "Something wrote to one replica alone, or the ranks compute differently: a fault of a device "
    "or of memory, a fused optimizer beside another one, or a seed or a branch of one rank. "
)
_FIX = (
    "Load a checkpoint on every rank, or call repair_replicas() on every rank, which copies the "
    "values of the majority. If ranks should differ, declare the parameter by shard_group_fn= of "
    "step."
)


@dataclass(frozen=True)
class ReplicaComparison:
    """The coverage of a comparison of replicas.

    Args:
        compared: The names of the parameters, masters and optimizer state in the comparison.
        not_compared: The names of parameters without a known copy on another rank.
    """

    compared: tuple[str, ...]
    not_compared: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{count_text(len(self.compared), 'tensor')} equal on all ranks that hold them, "
            f"{count_text(len(self.not_compared), 'parameter')} without a known replica"
        )


class _SetSummary(NamedTuple):
    """One set of tensors of one rank, as ranks gather it.

    Args:
        structure: A hash of names, shapes and dtypes.
        checksum: The checksum of all values.
    """

    structure: int
    checksum: int


class _Difference(NamedTuple):
    """A tensor or number with different values in replicas.

    Args:
        key: The set.
        position: Its position in the set.
        name: Its name.
        source: The rank with the value that most ranks have; of equally many the lowest.
        ranks: The ranks with another value than ``source``.
        is_majority: Whether more ranks have the value of ``source`` than any other value.
    """

    key: SetKey
    position: int
    name: str
    source: int
    ranks: tuple[int, ...]
    is_majority: bool


class ReplicaCheck:
    """A `StateCheck` of replicas.

    The first check gathers one checksum for each set of tensors, so that each rank knows its
    replicas. Later checks are summands of a message. If parameters or state are added, the next
    check gathers again.

    Attributes:
        layout_fns: ``is_replicated_fn`` and ``shard_group_fn`` of the last step that had one.
        is_paused: Whether messages carry no check, while a call compares replicas itself.
        is_requested: Whether the next message carries a check, due or not.
    """

    def __init__(
        self,
        interval: int | None,
        only_warns: bool,
        logger_name: str,
        optimizers: Callable[[], list[Any]],
        names: Mapping[Tensor, str],
        all_gather: Callable[[Any, MessageGroup | None], list[Any]],
    ) -> None:
        self._interval = interval
        self._only_warns = only_warns
        self._logger_name = logger_name
        self._optimizers = optimizers
        self._names = names
        self._gather = all_gather
        self.layout_fns: tuple[LayoutFn | None, LayoutFn | None] = (None, None)
        self.is_paused = False
        self.is_requested = False
        self._last_iteration = 0
        #: The ranks of each set, by key and structure, as the last gather has shown them.
        self._ranks_by_set: dict[tuple[SetKey, int], tuple[int, ...]] = {}
        self._sets: dict[SetKey, ReplicaSet] = {}
        self._not_compared: list[str] = []
        self._group: MessageGroup | None = None
        self._values: dict[SetKey, int | Tensor] | None = None
        #: Whether the ranks have gathered their sets, and know them all.
        self._is_planned = False
        self._error = ""

    def _all_gather(self, value: Any) -> list[Any]:
        return self._gather(value, self._group)

    # -- as a part of a message --------------------------------------------------------------------

    @property
    def stops_step(self) -> bool:
        """The reaction of kernels if replicas differ: true if they skip the step.

        The ranks of an unknown set gather, and the step goes on.
        """
        return self._is_planned and not self._only_warns

    def addend(self, group: MessageGroup, modulus: int, iteration: int) -> int | Tensor:
        """Return the summand of this rank: 0 if no check is due, 1 if the ranks must gather."""
        self._values = None
        if self.is_paused:
            return 0
        is_requested, self.is_requested = self.is_requested, False
        is_due = self._is_due(iteration)
        self._last_iteration = iteration
        if not is_requested and not is_due:
            return 0
        self._measure(group, modulus)
        if self._error or not self._is_planned:
            return 1
        summands: list[tuple[int, int | Tensor]] = []
        values: dict[SetKey, int | Tensor] = self._values or {}
        for key, value in values.items():
            ranks = self._ranks_by_set.get((key, self._sets[key].structure_hash))
            if ranks is None:
                self._is_planned = False
                return 1
            is_first = ranks[0] == group.global_rank
            factor = len(ranks) - 1 if is_first else modulus - 1
            summands.append((factor, value))
        total: int | Tensor = 0
        for factor, value in summands:
            total = (total + factor * value) % modulus
        if isinstance(total, Tensor):
            return device_utils.to_device(total, group.device, torch.float64)
        return total

    def _is_due(self, iteration: int) -> bool:
        """Return whether the first message of an iteration carries a check."""
        if self._interval is None or iteration < 1 or iteration == self._last_iteration:
            return False
        return (iteration - 1) % self._interval == 0

    def clear(self) -> None:
        """Forget the last measurement, because the weights were replaced."""
        self._values = None
        self._last_iteration = 0
        self.is_requested = False

    @no_grad_fast
    def _measure(self, group: MessageGroup, modulus: int) -> None:
        """Find the sets of this rank and measure their checksums.

        An error is part of the `evidence`, because other ranks wait.
        """
        self._group, self._error = group, ""
        values: dict[SetKey, int | Tensor] = {}
        self._values = values
        try:
            self._sets, self._not_compared = find_replica_sets(
                self._optimizers(), self._names, *self.layout_fns
            )
            for key, replica_set in self._sets.items():
                values[key] = _set_checksum(replica_set, group.device, modulus)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            self._is_planned = False

    def _gather_evidence(self, group: MessageGroup, modulus: int) -> list[tuple[int, Any]]:
        """Measure now, and return the evidence of each rank.

        Collective: every rank of the group must call this.
        """
        self._measure(group, modulus)
        gathered = self._all_gather(self.evidence())
        return list(zip(group.global_ranks, gathered, strict=True))

    def evidence(self) -> dict[SetKey, _SetSummary] | str | None:
        """Return a summary of each set, the text of an error, or None if no check was due."""
        if self._values is None:
            return None
        if self._error:
            return self._error
        summaries: dict[SetKey, _SetSummary] = {}
        for key, value in self._values.items():
            summaries[key] = _SetSummary(self._sets[key].structure_hash, int(value))
        return summaries

    def raise_findings(self, evidence_by_rank: Sequence[tuple[int, Any]]) -> None:
        """Compare the evidence, and raise or log which tensors differ.

        Collective: every rank of the group must call this.

        Raises:
            ReplicaMismatchError: Replicas differ, or names and shapes do.
        """
        if any(evidence is None for _, evidence in evidence_by_rank):
            return
        error = self._compare(evidence_by_rank)
        if error is None:
            return
        if not self._only_warns:
            raise error
        if self._group is not None and self._group.global_rank == evidence_by_rank[0][0]:
            logging.getLogger(self._logger_name).warning("%s", error)

    def compare_now(self, group: MessageGroup, modulus: int) -> ReplicaComparison:
        """Compare replicas in separate messages, and raise or log the differences.

        Collective: every rank of the group must call this, after an announcement.
        """
        self.raise_findings(self._gather_evidence(group, modulus))
        return self.comparison()

    def comparison(self) -> ReplicaComparison:
        """Return the coverage of the last measurement on this rank."""
        compared: list[str] = []
        for replica_set in self._sets.values():
            compared += [tensor.name for tensor in replica_set.tensors]
        return ReplicaComparison(tuple(compared), tuple(self._not_compared))

    # -- which tensors differ ----------------------------------------------------------------------

    def _compare(self, evidence_by_rank: Sequence[tuple[int, Any]]) -> ReplicaMismatchError | None:
        """Return an error if replicas differ, and remember which ranks have which set."""
        error = _measurement_error(evidence_by_rank)
        if error is not None:
            return error
        ranks_by_key = _ranks_of_sets(evidence_by_rank)
        different_keys: list[SetKey] = []
        own_rank = None if self._group is None else self._group.global_rank
        by_rank = dict(evidence_by_rank)
        for key, ranks in ranks_by_key.items():
            summaries = [by_rank[rank].get(key) for rank in ranks]
            if any(summary != summaries[0] for summary in summaries):
                different_keys.append(key)
        self._ranks_by_set, self._is_planned = {}, True
        for key, replica_set in self._sets.items():
            ranks = ranks_by_key[key]
            if own_rank in ranks:
                self._ranks_by_set[key, replica_set.structure_hash] = ranks
        if not different_keys:
            return None
        differences, missing = self._find_differences(ranks_by_key, different_keys)
        if missing:
            return ReplicaMismatchError(missing)
        if not differences:
            return ReplicaMismatchError(
                "Replicas differed between ranks when the last message was sent, and are equal "
                "now, because the step that followed has written them again."
            )
        return ReplicaMismatchError(self._describe(differences))

    def _find_differences(
        self, ranks_by_key: Mapping[SetKey, tuple[int, ...]], keys: Sequence[SetKey]
    ) -> tuple[list[_Difference], str]:
        """Gather a checksum of each tensor; return the differences, or a refusal to compare.

        Collective: every rank of the group must call this.
        """
        assert self._group is not None
        local: dict[SetKey, list[tuple[str, str, int]]] = {}
        for key in keys:
            if key in self._sets:
                local[key] = [_fingerprint(tensor) for tensor in self._sets[key].tensors]
        gathered = self._all_gather(local)
        by_rank = dict(zip(self._group.global_ranks, gathered, strict=True))
        differences: list[_Difference] = []
        for key in keys:
            rows = {rank: by_rank[rank].get(key, []) for rank in ranks_by_key[key]}
            structures = {rank: [row[1] for row in rows[rank]] for rank in rows}
            first = min(rows)
            if any(structure != structures[first] for structure in structures.values()):
                return [], _structure_text(rows)
            for index, (name, _, _) in enumerate(rows[first]):
                values = {rank: row[index][2] for rank, row in rows.items()}
                difference = _difference(key, index, name, values)
                if difference is not None:
                    differences.append(difference)
        return differences, ""

    def _describe(self, differences: Sequence[_Difference]) -> str:
        """Return the text about tensors that differ.

        Collective: every rank of the group must call this.
        """
        lines: list[str] = []
        for difference in differences[:_MAX_DESCRIBED]:
            num_elements, num_different, largest = self._measure_difference(difference)
            ranks = ranks_text(difference.ranks)
            if difference.is_majority:
                verb = "differs" if len(difference.ranks) == 1 else "differ"
                ranks_that_differ = f"{ranks} {verb} from the other ranks"
            else:
                ranks_that_differ = f"{ranks_text((difference.source, *difference.ranks))} differ"
            line = f"  {difference.name}: {ranks_that_differ}"
            if num_elements:
                line += (
                    f" in {num_different} of {count_text(num_elements, 'element')}, by up to "
                    f"{largest} units in the last place"
                )
            lines.append(line)
        num_left = len(differences) - len(lines)
        if num_left:
            lines.append(f"  {count_text(num_left, 'more tensor')} differ")
        head = "Replicas that should be equal differ between ranks:"
        return "\n".join([head, *lines, _ENDING + _FIX])

    @no_grad_fast
    def _measure_difference(self, difference: _Difference) -> tuple[int, int, int]:
        """Return elements, different elements and the largest difference over all ranks.

        Collective: every rank of the group must call this.
        """
        group = self._group
        assert group is not None
        local = self._tensor(difference)
        source = self._broadcast(difference, local)
        result = (0, 0, 0)
        is_different = group.global_rank in difference.ranks
        if is_different and local is not None and isinstance(local.value, Tensor):
            value = local.value.reshape(-1).to(source.device)
            distances = _ulp_distances(value, _tensor_of_bytes(source, value))
            num_different = distances.count_nonzero()
            result = (value.numel(), int(num_different), int(distances.max()))
        gathered = self._all_gather(result)
        elements, different, largest = (max(column) for column in zip(*gathered, strict=True))
        return elements, different, largest

    def _tensor(self, difference: _Difference) -> ReplicaTensor | None:
        """Return this rank's tensor of a difference; None if it is in another set."""
        group = self._group
        assert group is not None
        is_member = group.global_rank in (difference.source, *difference.ranks)
        replica_set = self._sets.get(difference.key)
        if not is_member or replica_set is None:
            return None
        return replica_set.tensors[difference.position]

    def _broadcast(self, difference: _Difference, local: ReplicaTensor | None) -> Tensor:
        """Return the bytes of the source's tensor on every rank; empty for a number.

        Collective: every rank of the group must call this.
        """
        group = self._group
        assert group is not None
        is_source = group.global_rank == difference.source
        words = torch.zeros(0, dtype=torch.int64, device=group.device)
        if is_source and local is not None and isinstance(local.value, Tensor):
            words = as_words(local.value).to(group.device)
        sizes = self._all_gather(words.numel())
        size = max(sizes)
        received = words if is_source else words.new_empty(size)
        step = _BLOCK_BYTES // 8
        for start in range(0, size, step):
            block = received[start : start + step]
            call_collective(group, dist.broadcast, block, difference.source, group.process_group)
        return received.view(torch.uint8)

    # -- repair ------------------------------------------------------------------------------------

    @no_grad_fast
    def repair(self, group: MessageGroup, modulus: int, from_rank: int | None) -> list[str]:
        """Copy the values of the majority, or of one rank, over different values.

        Collective: every rank of the group must call this, after an announcement.

        Args:
            group: The group.
            modulus: As in `addend`.
            from_rank: The source of the values in the sets of this rank; None for the majority.

        Returns:
            The names of the tensors and numbers that any rank has received.

        Raises:
            ReplicaMismatchError: Names or shapes differ, or a rank could not read its tensors.
        """
        evidence_by_rank = self._gather_evidence(group, modulus)
        error = _measurement_error(evidence_by_rank)
        if error is not None:
            raise error
        ranks_by_key = _ranks_of_sets(evidence_by_rank)
        keys = sorted(ranks_by_key, key=str)
        differences, missing = self._find_differences(ranks_by_key, keys)
        if missing:
            raise ReplicaMismatchError(missing)
        repaired: list[str] = []
        for difference in differences:
            ranks = ranks_by_key[difference.key]
            if from_rank is not None and from_rank in ranks:
                receivers = tuple(rank for rank in ranks if rank != from_rank)
                difference = _Difference(
                    difference.key,
                    difference.position,
                    difference.name,
                    from_rank,
                    receivers,
                    is_majority=False,
                )
            self._copy_over(difference)
            repaired.append(difference.name)
        return repaired

    def _copy_over(self, difference: _Difference) -> None:
        group = self._group
        assert group is not None
        local = self._tensor(difference)
        source = self._broadcast(difference, local)
        number = None
        if local is not None and not isinstance(local.value, Tensor):
            number = local.value
        numbers = self._all_gather(number)
        if local is None or group.global_rank not in difference.ranks:
            return
        if isinstance(local.value, Tensor):
            value = _tensor_of_bytes(source, local.value)
            local.value.copy_(value.view(local.value.shape))
        elif local.owner is not None:
            state, key = local.owner
            state[key] = numbers[group.global_ranks.index(difference.source)]


# -- checksums of sets -----------------------------------------------------------------------------


def _set_checksum(replica_set: ReplicaSet, device: torch.device, modulus: int) -> int | Tensor:
    """Return the checksum of a set: a number if ``device`` is the host, else 0-d int64 there."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in replica_set.tensors:
        if isinstance(tensor.value, Tensor):
            device_tensors = by_device.setdefault(tensor.value.device, [])
            device_tensors.append(tensor.value)
    hashes = replica_set.numbers_hash() + replica_set.structure_hash
    start = hashes * _NUMBER_WEIGHT % 2**62
    total = torch.full((), start, dtype=torch.int64, device=device)
    for index, tensors in enumerate(by_device.values()):
        part = checksum(tensors)
        weight = 2 * index + 1
        total = total + device_utils.to_device(part, device) * weight
    value = mixed(total, modulus)
    return int(value) if device_utils.is_cpu(device) else value


def _fingerprint(tensor: ReplicaTensor) -> tuple[str, str, int]:
    """Return name, structure and checksum of one tensor or number."""
    if isinstance(tensor.value, Tensor):
        value = checksum([tensor.value])
        return tensor.name, tensor.structure(), int(value)
    text = repr(tensor.value)
    return tensor.name, tensor.structure(), zlib.crc32(text.encode())


def _measurement_error(
    evidence_by_rank: Sequence[tuple[int, Any]],
) -> ReplicaMismatchError | None:
    """Return an error if a rank could not measure its checksums."""
    for rank, evidence in evidence_by_rank:
        if isinstance(evidence, str):
            return ReplicaMismatchError(f"Rank {rank} could not compare its replicas: {evidence}")
    return None


def _ranks_of_sets(
    evidence_by_rank: Sequence[tuple[int, Mapping[SetKey, _SetSummary]]],
) -> dict[SetKey, tuple[int, ...]]:
    """Return the ranks with a replica of each set.

    For a set of all ranks the result includes ranks without any tensor of the set, so that their
    tensors are found missing.
    """
    ranks_by_key: dict[SetKey, list[int]] = {}
    all_ranks = [rank for rank, _ in evidence_by_rank]
    for rank, summaries in evidence_by_rank:
        for key in summaries:
            ranks_by_key.setdefault(key, []).append(rank)
    for key in ranks_by_key:
        if key[0] == "all":
            ranks_by_key[key] = all_ranks
        elif key[0] == "ranks":
            ranks_by_key[key] = [rank for rank in all_ranks if rank in key[1:]]
    return {key: tuple(ranks) for key, ranks in ranks_by_key.items()}


# -- differences -----------------------------------------------------------------------------------


def _difference(
    key: SetKey, index: int, name: str, value_by_rank: Mapping[int, int]
) -> _Difference | None:
    """Return how a tensor differs between ranks, by its checksums; None if all are equal."""
    counts = Counter(value_by_rank.values()).most_common()
    if len(counts) == 1:
        return None
    most = counts[0][1]
    candidates = [value for value, count in counts if count == most]
    sources: list[int] = []
    for rank, value in value_by_rank.items():
        if value in candidates:
            sources.append(rank)
    source = min(sources)
    source_value = value_by_rank[source]
    ranks: list[int] = []
    for rank, value in value_by_rank.items():
        if value != source_value:
            ranks.append(rank)
    is_majority = len(candidates) == 1
    return _Difference(key, index, name, source, tuple(ranks), is_majority)


def _structure_text(rows: Mapping[int, Sequence[tuple[str, str, int]]]) -> str:
    """Return the refusal of parameters, or state, that not all ranks have."""
    structures: dict[int, set[str]] = {}
    for rank, rank_rows in rows.items():
        structures[rank] = {row[1] for row in rank_rows}
    common = set.intersection(*structures.values())
    lines: list[str] = []
    for rank, structure in structures.items():
        extra = sorted(structure - common)
        if extra:
            extra_text = choices_text(extra[:3])
            lines.append(f"  rank {rank} alone or with others: {extra_text}")
    return "\n".join(
        [
            "Replicas cannot be compared, because the ranks differ in names, shapes or dtypes of "
            "plain tensors, which count as replicas:",
            *lines[:8],
            "If each rank holds other parameters (experts, stages), pass shard_group_fn=function "
            "to step, which returns True for such a parameter, or the group over which it is cut.",
        ]
    )


def _tensor_of_bytes(received: Tensor, local: Tensor) -> Tensor:
    """Return received bytes as a flat tensor with the dtype and size of a local tensor."""
    values = received.view(local.dtype)
    return values[: local.numel()]


def _ulp_distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the distances of two tensors of one dtype in units of the last place, as int64."""
    return (_as_ordered_ints(first) - _as_ordered_ints(second)).abs()


_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_ordered_ints(values: Tensor) -> Tensor:
    """Return integers in the order of the values, in which neighbours differ by 1."""
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.contiguous().view(_INT_OF_SIZE[values.itemsize]).long()
    if not values.is_floating_point():
        return bits
    # Negative floats are ordered the other way round. -0.0 lies below 0.0.
    lowest = -(2 ** (8 * values.itemsize - 1))
    return torch.where(bits < 0, lowest - bits - 1, bits)

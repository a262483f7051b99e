"""The ranks that make a report together: results gathered, and errors raised on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from distamp.errors import DistampError
from distamp.guard.rank_sync import RankSync
from distamp.process_group import GroupLike, check_group, resolve_process_group

__all__ = ["RankGroup"]


class RankGroup:
    """The ranks of a report's caller, or a single process.

    Args:
        process_group: The ranks; a single process if None.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group = process_group

    @classmethod
    def resolve(cls, process_group: GroupLike) -> RankGroup:
        """Return the ranks of a guard or scaler, without a message."""
        return cls(resolve_process_group(process_group))

    @classmethod
    def begin(cls, call: str, process_group: GroupLike) -> RankGroup:
        """Return the ranks of a call that every rank makes.

        Collective: every rank of `process_group` must call this. Guards and scalers begin their
        calls with the same message, so that a rank that makes another call raises too.

        Args:
            call: The call, as the user typed it.
            process_group: The ranks, as the user passed them; the default group if None.

        Raises:
            RankMismatchError: A rank makes another call.
        """
        check_group(process_group)
        message_group = RankSync(process_group).announce(call)
        return cls(None if message_group is None else message_group.process_group)

    @property
    def ranks(self) -> list[int]:
        """The numbers of the ranks in the default group."""
        return [0] if self._group is None else dist.get_process_group_ranks(self._group)

    @property
    def is_first(self) -> bool:
        """True on the rank that logs for all."""
        return self._group is None or self._group.rank() == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in the order of the group.

        Collective: every rank of the group must call this.
        """
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * self._group.size()
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    @contextmanager
    def raise_together(self, activity: str) -> Iterator[None]:
        """Raise on every rank if the block raises on one rank.

        Collective: every rank of the group must call this. The rank that raised keeps its error.

        Args:
            activity: A name for the block in the message on other ranks.

        Raises:
            DistampError: The block raised on another rank.
        """
        try:
            yield
        except Exception as error:
            self._exchange_errors(f"{type(error).__name__}: {error}")
            raise
        errors = self._exchange_errors("")
        if errors:
            raise DistampError(f"{activity} raised on {', '.join(errors)}")

    def _exchange_errors(self, error: str) -> list[str]:
        """Write how the block ended to the store; if it did not raise, return the errors of all.

        A collective could hang, because after an error on one rank the others may wait in a
        collective of the step itself.
        """
        if self._group is None:
            return []
        store: Any = dist.distributed_c10d._get_default_store()
        prefix = f"distamp.raised/{self._group.group_name}"
        this_rank = dist.get_rank()
        number = store.add(f"{prefix}/{this_rank}", 1)
        store.set(f"{prefix}/{number}/{this_rank}", f"{error} ")
        errors: list[str] = []
        if error:
            return errors
        for rank in self.ranks:
            text = store.get(f"{prefix}/{number}/{rank}").decode().strip()
            if text:
                errors.append(f"rank {rank}: {text}")
        return errors

"""Going back: snapshots of the run in host memory, for errors that every rank raises."""

from distamp.errors import CallOrderError, NonFiniteError, ReplicaMismatchError
from distamp.guard import Snapshots
from launch.job import Job
from launch.optim import LRSchedule
from launch.program import UsageError

__all__ = ["RUN_IS_BAD", "Rewinds"]

# Errors after which a run can only go back or end. Every rank raises them.
RUN_IS_BAD = (NonFiniteError, ReplicaMismatchError)


class Rewinds:
    """The snapshots of a run, and the number of times that it may still go back.

    Without ``--rewind-every`` there are no snapshots, and every error ends the run.

    Args:
        job: The run.
        schedule: Its learning rate, which goes back too.

    Attributes:
        is_enabled: True if the run may go back.
    """

    def __init__(self, job: Job, schedule: LRSchedule) -> None:
        config = job.config
        self._job = job
        self._num_left = config.max_rewinds
        self._record_has_failed = False
        self.is_enabled = config.rewind_every > 0
        self._snapshots: Snapshots | None = None
        if self.is_enabled:
            extra = (schedule, job.average)
            self._snapshots = job.amp.snapshots(every=config.rewind_every, extra=extra)
            # A snapshot of the start, for an error before the next one.
            self._snapshots.record()

    def record(self) -> None:
        """End an iteration, and copy the run if a snapshot is due.

        Collective: every rank must call this.

        Raises:
            NonFiniteError: The run must not be copied, because it is bad.
            ReplicaMismatchError: The same, because replicas differ.
        """
        if self._snapshots is None:
            return
        try:
            self._snapshots.record()
        except RUN_IS_BAD:
            self._record_has_failed = True
            raise

    def go_back(self, error: Exception) -> int:
        """Go back to the newest snapshot, and return the number of steps that were taken back.

        The step under way is not counted. The data are not read again: the run continues with the
        next batch.

        Collective: every rank must call this.

        Args:
            error: The error that every rank has raised.

        Raises:
            UsageError: The run has no snapshots, or has gone back ``--max-rewinds`` times.
        """
        step = self._job.progress.step
        if self._snapshots is None or self._num_left == 0:
            raise UsageError(f"step {step}: {self._end_text(error)}") from None
        try:
            num_steps = self._snapshots.rewind()
        except CallOrderError as no_snapshot:
            raise UsageError(f"step {step}: {error} {no_snapshot}") from None
        self._num_left -= 1
        if self._record_has_failed:
            # `rewind` counts a call of `record` that raised. The step of this call is under way.
            self._record_has_failed = False
            num_steps -= 1
        return num_steps

    def _end_text(self, error: Exception) -> str:
        """Return the reason why the run ends, with advice."""
        config = self._job.config
        reason, _, _ = str(error).partition(". ")
        advice = "Run with --on-nonfinite report to find the operation that made inf or NaN"
        if config.on_nonfinite == "report":
            advice = "nonfinite.jsonl lists the operations that made inf or NaN"
        if isinstance(error, ReplicaMismatchError):
            advice = "Resume from an older checkpoint"
        if self.is_enabled:
            advice += f". The run has gone back --max-rewinds {config.max_rewinds} times"
            return f"{reason}. {advice}."
        return f"{reason}. {advice}. A smaller --lr may help, or --rewind-every 50."

"""One run made ready: asked-for settings become a model, data, and a place to write to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from distamp import cast_model, precision_report
from launch import checkpoint, strategies
from launch.batches import Batches
from launch.blocks import prepare_blocks
from launch.compare import Record
from launch.config import Config
from launch.data import Data
from launch.errors import UsageError
from launch.facts import changes, facts, settings, warnings
from launch.folder import Origin, begin, check_shared, check_space, claim, find_origin
from launch.levels import amp_for
from launch.memory import Needs, largest_peak
from launch.models import Recipe, init_model
from launch.parallel import ParallelContext
from launch.places import CHECKPOINTS
from launch.plan import Plan, check_same_run, plan
from launch.profiling import Trace
from launch.ranks import Ranks
from launch.reporting import Reporter
from launch.residuals import give_back, places, residuals
from launch.state import RunState, random_state, restore_random_state
from launch.steps import Due, StepCount, due
from launch.stopping import Preempted, Stop

__all__ = ["Job", "prepare"]


@dataclass
class Job:
    """All that the training loop works with."""

    config: Config
    ranks: Ranks
    device: torch.device
    data: Data
    recipe: Recipe
    run: RunState
    report: Reporter
    stop: Stop
    trace: Trace
    parameters: int
    needed: Needs
    steps: StepCount
    resumable: Path | None = None
    reported: bool = False
    last_record: int = 0

    @property
    def position(self) -> str:
        """Where the run is and how to go on from there, for a message."""
        return f"in step {self.run.progress.step + 1}; {self.advice}"

    @property
    def advice(self) -> str:
        """How to go on, for a message: from a checkpoint, where there is one."""
        if self.resumable is not None:
            return f"go on with --resume {self.resumable}"
        return "there is no checkpoint yet: start again, with --overwrite"

    def batches(self) -> Batches:
        """Return this rank's microbatches, from where the run is."""
        parallel = self.run.parallel
        count = self.config.batch // (parallel.dp_world_size * self.config.accumulate)
        position = self.run.progress.position
        where = (parallel.dp_rank, parallel.dp_world_size)
        return Batches(self.data, self.device, position, count, *where)

    def due(self) -> Due:
        """Return what is to be done after the step that ``progress`` is at."""
        return due(self.config, self.run.progress.step)

    def recorded(self, record: Record) -> None:
        """Take the record of a step.

        Raises:
            UsageError: On every rank, if a number in it is not finite that must be.
        """
        steps = record["step"] - self.last_record
        self.last_record = record["step"]
        self.report.step(record, tokens=steps * self.config.batch * self.data.tokens)
        if not self.config.level.scales:  # else such a step is skipped
            self._refuse_nan(record, "loss")
            self._refuse_nan(record, "gradient_norm")

    def validated(self, record: Record) -> None:
        """Take the record of a validation.

        Raises:
            UsageError: On every rank, if its loss is not finite.
        """
        self.report.validation(record)
        self._refuse_nan(record, "validation_loss")

    def _refuse_nan(self, record: Record, name: str) -> None:
        if self.config.allow_nan or math.isfinite(record[name]):
            return
        where = {n: f"{record[n]:g}" for n in ("learning_rate", "gradient_norm") if n in record}
        more = "".join(f", at {n.replace('_', ' ')} {v}" for n, v in where.items() if n != name)
        what = f"step {record['step']}: the {name.replace('_', ' ')} is {record[name]}{more}"
        if record["step"] == 0:  # nothing was trained that other flags would train otherwise
            raise UsageError(f"{what}: --model {self.config.model} starts so (--allow-nan goes on)")
        raise UsageError(
            f"{what}; {self.advice} (a smaller --lr may help; --allow-nan goes on all the same)"
        )

    def losses(self, loss: float) -> dict[str, float]:
        """Return a mean loss in nats, and in what people measure these data in."""
        if self.data.kind == "text":
            return {"loss": loss, "bits_per_byte": loss / math.log(2)}
        return {"loss": loss}

    def save(self, *, must: bool) -> None:
        """Write a checkpoint; every rank calls this.

        Args:
            must: Whether there will be no other time; else a failure is a warning.

        Raises:
            UsageError: On every rank, if it cannot be written and must be.
        """
        if self.config.keep_checkpoints == 0:
            return
        left = residuals(self.run.amp, self.ranks)
        about = {
            "model": self.recipe.shape,
            "settings": settings(self.config, self.ranks, self.device),
            "data": {"name": self.data.name, "digest": self.data.digest},
            "residuals": [name.split(".", 2)[2] for name in left],
            **self.run.values(),
        }
        random = _random_tensors(self.ranks, self.device)
        tensors = {**self.run.tensors_to_save(), **random, **left}
        folder = self.config.folder / CHECKPOINTS
        self.report.flush()
        try:
            checkpoint.save(folder, self.ranks, tensors, about, self.config.keep_checkpoints)
            self.resumable = self.config.folder
        except UsageError as error:
            if must:
                raise
            self.report.note(f"Warning: {error}; the run goes on and tries again at the next save")

    @contextmanager
    def precision_report(self) -> Iterator[None]:
        """Watch the first step that this process does, where ``--report`` asks for it."""
        if not self.config.report or self.reported or not self.ranks.is_main:
            yield
            return
        self.reported = True
        with precision_report(self.run.parallel.model) as report:
            yield
        folder = self.config.folder
        try:
            (folder / "precision.txt").write_text(f"{report}\n", encoding="utf-8")
            report.to_json(folder / "precision.json")
        except OSError as error:
            self.report.note(f"Warning: cannot write the precision report: {error.strerror}")

    def summary(self) -> dict[str, str]:
        """Return what the end of the run is to say, beside what its records say.

        Every rank calls this.
        """
        found = {"Overflowed": str(self.run.overflows)} if self.run.overflows.counts else {}
        if self.ranks.world_size > 1:
            found["Gradients"] = self._gradients()
        found["Memory"] = largest_peak(self.device, self.ranks)
        if self.parameters:
            found["Needed"] = str(self.needed)
        found |= {"Precisions": "precision.txt, .json, .png"} if self.reported else {}
        return found | self.trace.outcome()

    def _gradients(self) -> str:
        """Say how many bytes of gradients travel."""
        for hook in self.run.amp.comm_hooks:
            return str(hook.stats())
        reduce = self.run.amp.precision.reduce
        size = self.parameters * reduce.itemsize / 1e6
        return f"{size:.3g} MB of {str(reduce).removeprefix('torch.')} a step, sent as they are"

    def stopped(self) -> Preempted:
        """Say that the run was stopped; return what to raise."""
        self.report.note(f"Stopped as asked after step {self.run.progress.step}; {self.advice}")
        return self.stop.preempted


def prepare(given: Config | UsageError, ranks: Ranks, stop: Stop | None = None) -> Job:
    """Build or restore what the command line asks for.

    Raises:
        UsageError: On every rank, if any rank finds that it cannot be done.
    """
    planned = plan(given, ranks)
    config, device, data = planned.config, planned.device, planned.data
    origin = find_origin(config, ranks)
    with ranks.together():
        if origin is not None:
            check_same_run(origin, planned)
        check_space(config, planned.size.parameters, ranks.world_size)
        lock = claim(config, origin, ranks.restarts > 0) if ranks.is_main else None
    # Nothing of what is in the folder is touched before there is something to train.
    try:
        check_shared(config, ranks)
        with ranks.together():
            run = _build(planned, ranks)
        torch.manual_seed(config.seed + 1 + run.parallel.dp_rank)
        if origin is not None:
            restore(run, origin, ranks, device)
        with ranks.together():
            report = Reporter() if lock is None else begin(config, origin, data, lock)
    except BaseException:
        if lock is not None:
            lock.close()
        raise
    parameters = _count(run, config, ranks)
    report.start(facts(config, parameters, data, ranks, device))
    if origin is not None:
        for line in (*origin.broken, changes(origin, config, ranks, device)):
            report.note(line)
    for line in warnings(config, device) if ranks.is_main else ():
        report.note(line)
    return Job(
        config,
        ranks,
        device,
        data,
        planned.recipe,
        run,
        report,
        stop or Stop(config.max_minutes),
        Trace(config.folder, ranks, wanted=config.profile),
        parameters,
        planned.needed,
        _step_count(run, config, ranks, device),
        resumable=None if origin is None else origin.advised(config.folder),
        last_record=run.progress.step,
    )


def _step_count(run: RunState, config: Config, ranks: Ranks, device: torch.device) -> StepCount:
    fused = strategies.adamw_kernel(config, ranks) == "fused"
    return StepCount(config, run.progress, device, scales=config.level.scales, fused=fused)


def _build(planned: Plan, ranks: Ranks) -> RunState:
    """Build what is trained: from a sketch, sharded before it has memory; else whole."""
    config, recipe, device = planned.config, planned.recipe, planned.device
    from_meta = strategies.chosen(config, ranks)[1].from_meta
    sketch = planned.sketch if from_meta else None
    if sketch is None:
        model = init_model(recipe, planned.data, config.seed, device)
    else:
        model = sketch.model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"--model {config.model}: it has no parameter to train")
    model = cast_model(model, config.level)
    prepare_blocks(model, config)
    context = ParallelContext(config, ranks, device, planned.data.sample, sketch)
    parallel = strategies.parallelize(model, context)
    run = RunState(parallel, amp_for(parallel, config))
    if recipe.check is not None:
        with run.amp.autocast():
            recipe.check(parallel.model, planned.data)
    return run


def restore(run: RunState, origin: Origin, ranks: Ranks, device: torch.device) -> None:
    """Put a run into the state of a checkpoint.

    Random numbers go on where they were on the same number of ranks; else they are drawn afresh.
    """
    tensors = run.tensors()
    random = _random_tensors(ranks, device)
    same_ranks = origin.manifest["settings"]["ranks"] == ranks.world_size
    same_device = origin.manifest["settings"]["device"] == device.type
    due = places(run.amp, run.model, origin.manifest, ranks)
    wanted = {**tensors, **(random if same_ranks and same_device else {})}
    for share in due.values():
        wanted |= share
    checkpoint.read(origin.path, ranks, wanted)
    run.accept(tensors)
    give_back(run.amp, due, origin.manifest, ranks)
    run.accept_values(origin.manifest)
    if same_ranks and same_device:
        states = {name.split(".")[1]: state for name, state in random.items()}
        restore_random_state(states, device)


def _random_tensors(ranks: Ranks, device: torch.device) -> dict[str, torch.Tensor]:
    states = random_state(device)
    return {f"random.{kind}.{ranks.rank}": state for kind, state in states.items()}


def _count(run: RunState, config: Config, ranks: Ranks) -> int:
    """Return how many parameters the whole model has."""
    if strategies.chosen(config, ranks)[0] != "fsdp1":
        return sum(p.numel() for p in run.model.parameters())
    # Those of FSDP1 are this rank's parts; the names of its state are the model's.
    return sum(t.numel() for n, t in run.tensors().items() if n.startswith("model."))

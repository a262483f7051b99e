"""One run made ready: asked-for settings become a model, data, and a place to write to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from distamp import cast_model, precision_report
from launch import checkpoint, strategies
from launch.config import Config
from launch.data import Data, load_data
from launch.device import check_backend, check_memory, check_precision, pick_device, slowdown
from launch.errors import UsageError
from launch.folder import Origin, check_shared, check_space, claim, find_origin
from launch.levels import amp_for, described, eps_for, trial
from launch.memory import largest_peak
from launch.models import Recipe, count_parameters, init_model, recipe_for
from launch.profiling import Trace
from launch.ranks import Ranks
from launch.reporting import Reporter, check_trackers
from launch.residuals import give_back, places, residuals
from launch.spread import Place
from launch.state import RunState, random_state, restore_random_state
from launch.stopping import Preempted, Stop

__all__ = ["Job", "learning_rate", "prepare"]


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
    reported: bool = False

    @property
    def whereabouts(self) -> str:
        """Where the run is, for a message."""
        return f"in step {self.run.progress.step + 1}; go on with --resume {self.config.folder}"

    def losses(self, loss: float) -> dict[str, float]:
        """Return a mean loss in nats, and in what people measure these data in."""
        if self.data.kind == "text":
            return {"loss": loss, "bits_per_byte": loss / math.log(2)}
        return {"loss": loss}

    def save(self, *, must: bool) -> None:
        """Write a checkpoint; every rank calls this.

        Args:
            must: Whether there will be no other time; else a failure is told, and the run goes on.

        Raises:
            UsageError: On every rank, if it cannot be written and must be.
        """
        left = residuals(self.run.amp, self.ranks)
        about = {
            "model": self.recipe.shape,
            "settings": _settings(self.config, self.ranks, self.device),
            "data": {"name": self.data.name, "digest": self.data.digest},
            "residuals": [name.split(".", 2)[2] for name in left],
            **self.run.values(),
        }
        random = _random_tensors(self.ranks, self.device)
        tensors = {**self.run.tensors_to_save(), **random, **left}
        folder = self.config.folder / checkpoint.FOLDER
        self.report.flush()
        try:
            checkpoint.save(folder, self.ranks, tensors, about, self.config.keep_checkpoints)
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
        with precision_report(self.run.spread.model) as report:
            yield
        folder = self.config.folder
        try:
            (folder / "precision.txt").write_text(f"{report}\n", encoding="utf-8")
            report.to_json(folder / "precision.json")
            report.plot(folder / "precision.png")
        except OSError as error:
            self.report.note(f"Warning: cannot write the precision report: {error.strerror}")

    def summary(self) -> dict[str, str]:
        """Return what the end of the run is to say, beside what its records say.

        Every rank calls this.
        """
        facts = {"Overflowed": str(self.run.overflows)} if self.run.overflows.counts else {}
        if self.ranks.world_size > 1:
            facts["Gradients"] = self._gradients()
        facts["Memory"] = largest_peak(self.device, self.ranks)
        facts |= {"Precisions": "precision.txt, .json, .png"} if self.reported else {}
        return facts | self.trace.outcome()

    def _gradients(self) -> str:
        """Say how many bytes of gradients travel."""
        for hook in self.run.amp.comm_hooks:
            return str(hook.stats())
        reduce = self.run.amp.precision.reduce
        size = self.parameters * reduce.itemsize / 1e6
        return f"{size:.3g} MB of {str(reduce).removeprefix('torch.')} a step, sent as they are"

    def stopped(self) -> Preempted:
        """Say that the run was stopped; return what to raise."""
        where = f"after step {self.run.progress.step}; go on with --resume {self.config.folder}"
        self.report.note(f"Stopped as asked {where}")
        return self.stop.preempted


def prepare(given: Config | UsageError, ranks: Ranks, stop: Stop | None = None) -> Job:
    """Build or restore what the command line asks for.

    Raises:
        UsageError: On every rank, if any rank finds that it cannot be done.
    """
    with ranks.together():
        if isinstance(given, UsageError):
            raise given
        config = given
        config.check()
        device = pick_device(config.device, ranks)
        check_backend(config.backend)
        if ranks.is_main:
            check_trackers(config)
        strategies.check(config, ranks, device)
        check_precision(device, config)
        trial(config, device)
        recipe = recipe_for(config)
        data = load_data(config, recipe.kind)
        data.check(config)
        parameters = count_parameters(recipe, data)
        check_memory(parameters, config, device)
    with ranks.together():
        if len(set(ranks.gather(data.digest))) > 1:
            raise UsageError(f"--data: the ranks do not read the same from {data.name}")
    origin = find_origin(config, ranks)
    with ranks.together():
        if origin is not None:
            _check_same_run(origin, config, recipe, data)
        check_space(config, parameters, ranks.world_size)
        restarted = ranks.restarts > 0
        report = claim(config, origin, data, restarted) if ranks.is_main else Reporter()
    check_shared(config, ranks)
    with ranks.together():
        place = Place(config, ranks, device, data.sample)
        model = cast_model(init_model(recipe, data, config.seed, device), config.level)
        spread = strategies.spread(model, place)
        run = RunState(spread, amp_for(spread, config))
    torch.manual_seed(config.seed + 1 + run.spread.reader)
    if origin is not None:
        restore(run, origin, ranks, device)
    parameters = _count(run, config, ranks)
    report.start(_facts(config, parameters, data, ranks, device))
    for line in () if origin is None else (*origin.broken, _changes(origin, config, ranks, device)):
        report.note(line)
    if ranks.is_main and (slower := slowdown(device, config.level.compute)) > 3:
        report.note(
            f"This {device.type} multiplies matrices {slower:.0f} times slower in"
            f" {config.level_name} than in fp32\n"
        )
    if config.eps is None and (eps := eps_for(config)) != 1e-8:
        report.note(f"AdamW has eps={eps:g}: its state is fp16 at {config.level_flag}\n")
    trace = Trace(config.folder, ranks, wanted=config.profile)
    stop = stop or Stop()
    return Job(config, ranks, device, data, recipe, run, report, stop, trace, parameters)


def learning_rate(config: Config, taken: int) -> float:
    """Return the learning rate after so many taken steps, as a part of the peak.

    Linear warmup, then a cosine down to ``final_lr``. Skipped steps do not count.
    """
    if taken < config.warmup:
        return (taken + 1) / config.warmup
    done = min(1.0, (taken - config.warmup) / max(1, config.steps - config.warmup))
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done))


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


# The settings that decide which numbers a run comes to.
_NUMBERS = (
    *("steps", "batch", "accumulate", "lr", "warmup", "final_lr"),
    *("weight_decay", "clip", "seed", "growth_interval", "schedule", "comm_hook", "eps"),
    *("keep_batchnorm_fp32", "master_weights", "loss_scale"),
)


def _settings(config: Config, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    settings = {"precision": config.level_name}
    settings |= {name: getattr(config, name) for name in _NUMBERS}
    where = {"ranks": ranks.world_size, "strategy": strategies.chosen(config, ranks)[0]}
    return {**settings, **where, "device": device.type}


def _check_same_run(origin: Origin, config: Config, recipe: Recipe, data: Data) -> None:
    """Refuse a checkpoint of another model or other data, or one with nothing left to do."""
    where, saved = f"--resume {origin.run}", origin.manifest
    for name in {**recipe.shape, **saved["model"]}:
        ours, theirs = recipe.shape.get(name), saved["model"].get(name)
        if ours != theirs:
            raise UsageError(
                f"{where}: it belongs to another model, with {name} {theirs} where this run has"
                f" {ours}; pass --{name.replace('_', '-')} {theirs}"
            )
    if saved["data"]["digest"] != data.digest:
        raise UsageError(
            f"{where}: it was trained on other data ({saved['data']['name']}) than"
            f" {data.name} holds now; pass the same --data"
        )
    done = saved["progress"]["step"]
    if done >= config.steps and origin.asked:
        raise UsageError(f"{where}: all its {done} steps are done; pass a --steps above {done}")


def _count(run: RunState, config: Config, ranks: Ranks) -> int:
    """Return how many parameters the whole model has."""
    if strategies.chosen(config, ranks)[0] != "fsdp1":
        return sum(p.numel() for p in run.model.parameters())
    # Those of FSDP1 are this rank's parts; the names of its state are the model's.
    return sum(t.numel() for n, t in run.tensors().items() if n.startswith("model."))


def _facts(
    config: Config, parameters: int, data: Data, ranks: Ranks, device: torch.device
) -> dict[str, str]:
    """Say in a few rows what is about to be trained."""
    how = strategies.chosen(config, ranks)[1].says
    many = how if ranks.world_size == 1 else f"{ranks.world_size} ranks, {how}"
    train, held_out = data.sizes()
    examples = "sequences" if data.kind == "text" else "images"
    return {
        "Model": f"{config.model}, {parameters / 1e6:.2f} M parameters",
        data.kind.capitalize(): f"{data.name}, {train} and {held_out} held out",
        "Device": f"{device.type}, {many}",
        "Precision": described(config),
        "Steps": f"{config.steps} of {config.batch} {examples}",
    }


def _changes(origin: Origin, config: Config, ranks: Ranks, device: torch.device) -> str:
    """Say where a resumed run goes on, and which settings differ from what it was started with."""
    ours, theirs = _settings(config, ranks, device), origin.manifest["settings"]
    # What an older checkpoint does not name was as it is by default: None.
    before = {name: theirs.get(name) for name in ours}
    differ = [f"{n} {before[n]} -> {ours[n]}" for n in ours if ours[n] != before[n]]
    where = f"Going on from {origin.run} at step {origin.step}"
    return f"{where}, with other settings: {', '.join(differ)}" if differ else where

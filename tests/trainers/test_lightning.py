"""Lightning's Trainer with distamp's plugins and callbacks, beside the same run with its own."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import distamp
from distamp import DistGradScaler
from tests.trainers.common import (
    FAULT,
    data,
    digest,
    in_ranks,
    model,
    needs,
    plant_inf,
    quiet,
    refusal,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("lightning"),
]
needs("lightning")

STEPS = 6
SCALE = 2.0**10


@dataclass
class Run:
    """What a run left on one rank."""

    weights: float
    scale: float
    rates: list[float] = field(default_factory=list)
    global_steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    hook: str = ""


@functools.cache
def classes() -> Any:
    """The modules that are trained, made where Lightning is wanted."""
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        """Trains by automatic optimization; rank 1 overflows in step FAULT."""

        def __init__(self, options: dict[str, Any]) -> None:
            super().__init__()
            self.net = model()
            self.options = options
            self.backwards = 0
            self.run = Run(0.0, 0.0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            if batch_idx == self.options.get("raises_at"):
                raise ZeroDivisionError(list(vars(self)))
            if batch_idx == self.options.get("no_loss_at"):
                return None
            inputs, targets = batch
            loss = (self.net(inputs).float() - targets).square().mean()
            self.run.losses.append(loss.item())
            poisoned = self.options.get("in_loss") and batch_idx == FAULT and self.global_rank == 1
            return loss * float("inf") if poisoned else loss

        def on_after_backward(self) -> None:
            if self.options.get("fault", True):
                plant_inf(self.parameters(), self.backwards, self.options.get("at", FAULT))
            self.backwards += 1

        def on_train_batch_end(self, *_: object) -> None:
            optimizers = self.trainer.optimizers
            self.run.rates.append(optimizers[0].param_groups[0]["lr"])
            self.run.global_steps.append(self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            kind = self.options.get("optimizer", "AdamW")
            settings = self.options.get("settings", {"lr": 0.01})
            optimizer = getattr(torch.optim, kind)(self.parameters(), **settings)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
            interval = self.options.get("interval", "step")
            return [optimizer], [{"scheduler": schedule, "interval": interval}]

    class Manual(Net):
        """Two optimizers by hand: both backward passes, then both steps, as GANs do."""

        def __init__(self, options: dict[str, Any]) -> None:
            super().__init__(options)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            inputs, targets = batch
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            loss = (self.net(inputs).float() - targets).square().mean()
            self.manual_backward(loss)
            for each in (first, second):
                if self.options.get("clip"):
                    self.clip_gradients(each, 0.01, self.options["clip"])
                each.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in self.net[::2]]

    class Flat(Net):
        """Wrapped in FSDP1 by itself, as Lightning does not tell it to be on the CPU."""

        def configure_model(self) -> None:
            from torch.distributed.fsdp import FullyShardedDataParallel

            if not isinstance(self.net, FullyShardedDataParallel):
                cpu = torch.device("cpu")
                wrapped = [
                    FullyShardedDataParallel(p, device_id=cpu) if len(list(p.parameters())) else p
                    for p in self.net
                ]
                self.net = FullyShardedDataParallel(nn.Sequential(*wrapped), device_id=cpu)

    class Sharded(Net):
        """Sharded by FSDP2, in ModelParallelStrategy."""

        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            for part in self.net[::2]:
                fully_shard(part, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    return {"Net": Net, "Manual": Manual, "Sharded": Sharded, "Flat": Flat}


@functools.cache
def strategies() -> Any:
    """Lightning's strategies, those for GPUs alone made to run on a CPU."""
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    class Fsdp(FSDPStrategy):
        """Lightning refuses the class itself without a GPU, and no subclass."""

    return {
        "ddp": lambda: "ddp",
        "fsdp": lambda: Fsdp(process_group_backend="gloo"),
        "model_parallel": lambda: ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
        ),
    }


def plugin(ours: bool, kind: str, **settings: Any) -> Any:
    """A precision plugin, distamp's or Lightning's own."""
    from lightning.pytorch.plugins import MixedPrecision as Theirs

    from distamp.integrations.lightning import FSDPPrecision, MixedPrecision

    if kind == "fsdp":
        return FSDPPrecision("16-mixed", **{"init_scale": SCALE} | settings)
    if ours:
        return MixedPrecision("16-mixed", "cpu", **{"init_scale": SCALE} | settings)
    return Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))


def fit(
    ours: bool = True,
    devices: int = 2,
    kind: str = "ddp",
    module: str = "Net",
    wire: str | None = None,
    trainer: dict[str, Any] | None = None,
    checkpoint: str | None = None,
    save: str | None = None,
    scaler: dict[str, Any] | None = None,
    skipped_steps: bool | None = None,
    **options: Any,
) -> Run:
    """Train for STEPS batches in the Trainer."""
    quiet()
    import lightning.pytorch as pl

    from distamp.integrations.lightning import CommHook, SkippedSteps

    skipped_steps = ours if skipped_steps is None else skipped_steps
    precision = plugin(ours, kind, **(scaler or {}))
    trainer = dict(trainer or {})
    callbacks: list[Any] = [SkippedSteps()] if skipped_steps else []
    callbacks += trainer.pop("callbacks", [])
    hook = CommHook(wire) if wire else None
    if hook is not None:
        callbacks.append(hook)
    net = classes()[module](options)
    settings: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": STEPS} | trainer
    runner = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategies()[kind]() if devices > 1 else "auto",
        plugins=precision,
        callbacks=callbacks,
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    runner.fit(net, DataLoader(data(), batch_size=2), ckpt_path=checkpoint, weights_only=False)
    if save is not None:
        runner.save_checkpoint(save)
    run: Run = net.run
    run.scale = precision.scaler.get_scale()
    run.weights = _digest(net)
    run.logged = {k: float(v) for k, v in runner.progress_bar_metrics.items()}
    run.hook = "" if hook is None else str(hook.state.stats())
    return run


def _digest(net: nn.Module) -> float:
    """One number for the whole weights, wherever their parts are."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(each, FullyShardedDataParallel) for each in net.modules()):
        with FullyShardedDataParallel.summon_full_params(net):
            return digest(net.parameters())
    return digest(p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters())


def together(runs: list[Run]) -> bool:
    return runs[0].weights == runs[1].weights and runs[0].scale == runs[1].scale


# -- ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["Net", "Manual"])
def test_all_ranks_skip_where_lightnings_own_part(ranks2, module):
    assert not together(ranks2.run(fit, ours=False, module=module))
    runs = ranks2.run(fit, module=module)
    assert together(runs)
    for run in runs if module == "Net" else ():
        assert run.scale == run.logged["loss_scale"] == SCALE / 2
        assert run.logged["skipped_steps"] == 1.0
        assert run.global_steps == [1, 2, 2, 3, 4, 5]
        assert run.rates == pytest.approx([0.01 / (n + 1) for n in run.global_steps])


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize("trainer", [{}, BY_VALUE, {"accumulate_grad_batches": 2}])
def test_without_an_overflow_the_run_is_lightnings_to_the_bit(ranks2, trainer):
    ours, theirs = (ranks2.run(fit, ours=o, fault=False, trainer=trainer) for o in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.weights, mine.rates) == (other.weights, other.rates)
        assert mine.global_steps == other.global_steps


@pytest.mark.parametrize("trainer", [{}, {"accumulate_grad_batches": 2}])
@in_ranks
def test_a_batch_without_a_loss_is_left_out_as_lightning_does(trainer: dict[str, Any]):
    ours, theirs = (fit(o, 1, fault=False, no_loss_at=3, trainer=trainer) for o in (True, False))
    assert ours.weights == theirs.weights


def test_a_schedule_by_epoch_moves_where_the_last_step_was_skipped(ranks2):
    two = {"max_epochs": 2}
    for run in ranks2.run(fit, at=STEPS - 1, interval="epoch", trainer=two):
        assert run.scale == SCALE / 2
        assert run.rates == pytest.approx([0.01] * 5 + [0.005] * 6 + [0.01 / 3])


def test_without_the_callback_they_move_as_lightnings_do(ranks2):
    for run in ranks2.run(fit, skipped_steps=False):
        assert run.global_steps == [1, 2, 3, 4, 5, 6]


def test_max_steps_are_steps_that_were_taken(ranks2):
    for run in ranks2.run(fit, trainer={"max_steps": 3, "limit_train_batches": STEPS}):
        assert len(run.losses) == 4


def test_fsdp_clips_by_the_norm_and_keeps_ranks_together(ranks2):
    sharded = ranks2.run(fit, kind="fsdp", module="Flat", trainer={"gradient_clip_val": 0.1})
    plain = ranks2.run(fit, trainer={"gradient_clip_val": 0.1})
    assert together(sharded)
    assert sharded[0].scale == plain[0].scale == SCALE / 2
    assert sharded[0].weights == pytest.approx(plain[0].weights, rel=1e-3)


def test_model_parallel_keeps_ranks_together(ranks2):
    options = {"kind": "model_parallel", "module": "Sharded"}
    runs = ranks2.run(fit, **options, trainer={"gradient_clip_val": 0.1})
    plain = ranks2.run(fit, trainer={"gradient_clip_val": 0.1})
    assert together(runs)
    assert runs[0].global_steps == [1, 2, 2, 3, 4, 5]
    assert runs[0].weights == pytest.approx(plain[0].weights, rel=1e-3)


def test_a_hook_compresses_and_brings_the_news(ranks2):
    runs = ranks2.run(fit, wire="fp16", fault=False, in_loss=True)
    assert together(runs)
    assert runs[0].scale == SCALE / 2
    assert "exchanges sent" in runs[0].hook
    assert runs[0].global_steps == [1, 2, 2, 3, 4, 5]


# -- where Lightning refuses ---------------------------------------------------------------------


def test_a_fused_optimizer_is_clipped_as_one_that_is_not(ranks2):
    fused = {"settings": {"lr": 0.01, "fused": True}}
    clip = {"gradient_clip_val": 0.1}
    refused, _ = ranks2.run(refusal, fit, ours=False, devices=1, trainer=clip, **fused)
    assert "does not allow for gradient clipping" in refused
    runs = ranks2.run(fit, trainer=clip, **fused)
    plain = ranks2.run(fit, trainer=clip)
    assert together(runs)
    assert runs[0].weights == pytest.approx(plain[0].weights, rel=1e-5)


def test_lbfgs_is_refused(ranks2):
    lbfgs = {"optimizer": "LBFGS", "settings": {"lr": 0.1, "max_iter": 4}}
    for refused in ranks2.run(refusal, fit, devices=1, **lbfgs):
        assert "LBFGS" in refused


@pytest.mark.parametrize("by", ["norm", "value"])
@in_ranks
def test_clipping_by_hand_clips_unscaled_gradients(by: str):
    options = {"module": "Manual", "fault": False, "devices": 1, "clip": by}
    scaled, unscaled = (fit(**options, scaler={"init_scale": s}) for s in (SCALE, 1.0))
    assert scaled.weights == pytest.approx(unscaled.weights, rel=1e-6)
    assert scaled.weights != fit(**options | {"clip": None}).weights


# -- what is seen, and kept ------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
@in_ranks
def test_a_checkpoint_of_either_goes_on_in_the_other(tmp_path: Path, first: bool, then: bool):
    half = {"max_epochs": 1, "limit_train_batches": STEPS}
    whole = fit(ours=first, devices=1, fault=False, trainer=half | {"max_epochs": 2})
    path = str(tmp_path / "last.ckpt")
    fit(ours=first, devices=1, fault=False, trainer=half, save=path)
    assert torch.load(path, weights_only=False)["MixedPrecision"]["scale"] == SCALE
    resumed = fit(
        ours=then, devices=1, fault=False, trainer=half | {"max_epochs": 2}, checkpoint=path
    )
    assert resumed.weights == whole.weights
    assert resumed.global_steps == whole.global_steps[STEPS:]


def copies(**options: Any) -> list[bool]:
    """Whether the hook of schedules, in a copy of the module that is made in each step, is its."""
    import lightning.pytorch as pl

    own = []

    class Average(pl.Callback):
        """As averages of weights are kept by hand."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
            copied = copy.deepcopy(pl_module)
            own.append(copied.lr_scheduler_step.__self__ is copied)

    fit(trainer={"callbacks": [Average()]}, **options)
    return own


@in_ranks
def test_a_run_that_raised_leaves_the_module_as_it_was():
    quiet()
    import lightning.pytorch as pl

    class Keep(pl.Callback):
        """Has the module once fit() has raised."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.module = pl_module

    kept = Keep()
    with pytest.raises(ZeroDivisionError, match="lr_scheduler_step"):
        fit(devices=1, raises_at=1, trainer={"callbacks": [kept]})
    assert "lr_scheduler_step" not in vars(kept.module)


def test_a_callback_may_copy_the_module_while_it_trains(ranks2):
    assert ranks2.run(copies, ours=False) == ranks2.run(copies) == [[True] * STEPS] * 2


@in_ranks
def test_what_plugins_take_and_refuse():
    quiet()
    from lightning.pytorch.plugins import MixedPrecision as Theirs

    from distamp.integrations.lightning import FSDPPrecision, MixedPrecision

    assert MixedPrecision("bf16-mixed", "cpu").scaler is None
    assert FSDPPrecision("bf16-true").scaler is None
    with pytest.raises(ValueError, match="does not scale losses"):
        MixedPrecision("bf16-mixed", "cpu", init_scale=2.0)
    with pytest.raises(ValueError, match="does not scale losses"):
        FSDPPrecision("32-true", init_scale=2.0)
    with pytest.raises(TypeError, match=r"distamp\.DistGradScaler"):
        MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="skipped steps"):
        fit(ours=False, devices=1, skipped_steps=True)
    scaler = DistGradScaler("cpu")
    assert FSDPPrecision("16-mixed", scaler).scaler is scaler
    with distamp.install():
        assert isinstance(Theirs("16-mixed", "cpu").scaler, DistGradScaler)

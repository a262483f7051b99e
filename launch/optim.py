"""Optimizers, the learning rate's schedule, and the average of the weights."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distamp.levels import Amp
from launch.config import Config
from launch.model import find_blocks, unwrap_ddp
from launch.program import convert_to_usage_error, import_object, require


def make_optimizers(model: nn.Module, config: Config) -> list[Optimizer]:
    """Make what ``--optimizer`` names, over the parameters that train.

    Raises:
        UsageError: There is no such optimizer, or it cannot be made for these parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    name = config.optimizer
    if name == "adamw":
        return [_adamw(trained, config)]
    if name == "sgd":
        return [torch.optim.SGD(_groups(trained, config), lr=config.lr, momentum=config.beta1)]
    if name == "muon":
        inside = {id(p) for block in find_blocks(model) for p in block.parameters() if p.dim() == 2}
        fits = inside and not any(isinstance(p, DTensor) for p in trained)
        hint = "it needs a model with blocks, and whole matrices: no --shard, no --tp"
        require(fits, f"--optimizer muon --shard {config.shard} --tp {config.tp}: {hint}")
        muon = torch.optim.Muon(
            [p for p in trained if id(p) in inside],
            lr=config.lr,
            weight_decay=config.weight_decay,
            # Updates have the size of AdamW's, so that one learning rate fits both.
            adjust_lr_fn="match_rms_adamw",
        )
        return [muon, _adamw([p for p in trained if id(p) not in inside], config)]
    own = import_object("--optimizer", name)
    with convert_to_usage_error(f"--optimizer {name}", TypeError, ValueError):
        optimizer = own(_groups(trained, config), lr=config.lr)
    with convert_to_usage_error(
        f"--optimizer {name}: its step() is called without arguments", TypeError
    ):
        inspect.signature(optimizer.step).bind()
    return [optimizer]


def _adamw(parameters: list[nn.Parameter], config: Config) -> Optimizer:
    level = config.level
    # In fp16 a second moment below 6e-8 is 0, and so is an eps of 1e-8.
    half = level.param is torch.float16 and not level.master_weights
    return torch.optim.AdamW(
        _groups(parameters, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps or (1e-3 if half else 1e-8),
        fused=True,
    )


def _groups(parameters: Sequence[nn.Parameter], config: Config) -> list[dict[str, Any]]:
    """Group parameters by whether they decay, which matrices do, and by their mesh.

    A fused kernel takes DTensors of one mesh alone.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dim() >= 2, shard_mesh(parameter)), []).append(parameter)
    return [
        {"params": alike, "weight_decay": config.weight_decay if decays else 0.0}
        for (decays, _), alike in groups.items()
    ]


def shard_mesh(parameter: Tensor) -> DeviceMesh | None:
    """Return the ranks over which a weight is cut; the other ranks have copies of its parts."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def lr_fraction(config: Config, taken: int) -> float:
    """Return the learning rate after so many taken steps, as a part of ``--lr``."""
    if taken < config.warmup:
        return (taken + 1) / config.warmup
    left = 1.0 - min(1.0, (taken - config.warmup) / max(1, config.steps - config.warmup))
    height = {
        "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        "wsd": min(1.0, 5 * left),
        "linear": left,
        "constant": 1.0,
    }[config.schedule]
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * height


class WeightAverage:
    """An average of the weights, each as it is stepped, over the steps that were taken.

    Args:
        amp: Whose model's weights.
        decay: 0: there is none.

    Attributes:
        values: The averages, by the names of the weights behind ``ema.``.
    """

    def __init__(self, amp: Amp, decay: float) -> None:
        weights = amp.flat_state_dict() if decay else {}
        names = [name for name, _ in unwrap_ddp(amp.model).named_parameters()] if decay else []
        self._weights = [weights[f"model.{name}"] for name in names]
        self.values = {f"ema.{name}": weights[f"model.{name}"].clone() for name in names}
        self._follow = get_ema_multi_avg_fn(decay)

    def count(self, taken: Tensor) -> None:
        """Follow the weights, if a step was taken."""
        if self.values and taken:
            self._follow([*self.values.values()], self._weights, 0)


class LRSchedule:
    """The learning rate, which stays where it is while steps are skipped.

    Whether a step was taken is known on the device. There the rate is looked up, so that the host
    need not wait, where every optimizer takes a tensor: fused AdamW does.

    Args:
        config: The schedule.
        optimizers: What it is for.
        device: Where the model is.
        taken: Steps taken before.

    Attributes:
        taken: Steps taken until now.
    """

    def __init__(
        self, config: Config, optimizers: Sequence[Optimizer], device: torch.device, taken: int
    ) -> None:
        fused = all(optimizer.defaults.get("fused") for optimizer in optimizers)
        self._on_host = device.type == "cpu" or not fused
        rates = [config.lr * lr_fraction(config, n) for n in range(config.steps + 1)]
        dtype = torch.float64 if self._on_host else torch.float32  # what a fused kernel reads
        self._table = torch.tensor(rates, dtype=dtype, device=device)
        self._optimizers = optimizers
        self.taken = torch.tensor([taken], device=device)

    def set(self) -> float | Tensor:
        """Give the optimizers the rate of the next step, and return it."""
        rate = self._table.index_select(0, self.taken).squeeze(0)
        given = float(rate) if self._on_host else rate
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = given
        return given

    def count(self, taken: Tensor) -> None:
        """Count a step, if it was taken."""
        self.taken += taken

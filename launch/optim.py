"""Optimizers, the schedule of the learning rate, and the moving average of the weights."""

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
    """Make the optimizers of ``--optimizer`` over the parameters that are not frozen.

    Raises:
        UsageError: There is no such optimizer, or it cannot be made for these parameters.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    name = config.optimizer
    if name == "adamw":
        return [_make_adamw(params, config)]
    if name == "muon":
        return _make_muon(model, params, config)
    groups = _make_param_groups(params, config)
    if name == "sgd":
        return [torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1)]
    optimizer_class = import_object("--optimizer", name)
    with convert_to_usage_error(f"--optimizer {name}", TypeError, ValueError):
        optimizer = optimizer_class(groups, lr=config.lr)
    fault = f"--optimizer {name}: its step() is called without arguments"
    with convert_to_usage_error(fault, TypeError):
        inspect.signature(optimizer.step).bind()
    return [optimizer]


def _make_adamw(params: Sequence[nn.Parameter], config: Config) -> Optimizer:
    eps = config.eps
    if eps == 0:
        # An eps of 1e-8 is 0 in fp16, and so is a second moment below 6e-8.
        steps_half = config.level.param is torch.float16 and not config.level.master_weights
        eps = 1e-3 if steps_half else 1e-8
    groups = _make_param_groups(params, config)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=eps, fused=True)


def _make_muon(model: nn.Module, params: Sequence[nn.Parameter], config: Config) -> list[Optimizer]:
    """Make Muon for the matrices of the blocks, and AdamW for all other parameters."""
    block_matrices = set()
    for block in find_blocks(model):
        block_matrices |= {id(p) for p in block.parameters() if p.dim() == 2}
    is_sharded = any(isinstance(p, DTensor) for p in params)
    require(
        block_matrices and not is_sharded,
        f"--optimizer muon --shard {config.shard} --tp {config.tp}: muon needs a model with "
        "blocks, and whole matrices. Leave out --shard and --tp.",
    )
    # adjust_lr_fn gives the updates the size of AdamW's, so that one learning rate fits both.
    muon = torch.optim.Muon(
        [p for p in params if id(p) in block_matrices],
        lr=config.lr,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    remaining = [p for p in params if id(p) not in block_matrices]
    return [muon, _make_adamw(remaining, config)]


def _make_param_groups(params: Sequence[nn.Parameter], config: Config) -> list[dict[str, Any]]:
    """Group parameters by weight decay, which only matrices have, and by mesh.

    A fused kernel takes DTensors of one mesh only.
    """
    groups: dict[tuple[float, DeviceMesh | None], list[nn.Parameter]] = {}
    for param in params:
        decay = config.weight_decay if param.dim() >= 2 else 0.0
        key = (decay, shard_mesh(param))
        groups.setdefault(key, []).append(param)
    return [{"params": group, "weight_decay": decay} for (decay, _), group in groups.items()]


def shard_mesh(param: Tensor) -> DeviceMesh | None:
    """Return the mesh that a parameter is sharded over, or None for a plain tensor."""
    if isinstance(param, DTensor):
        return param.device_mesh
    return None


# -- after each step -------------------------------------------------------------------------------


def lr_fraction(config: Config, taken: int) -> float:
    """Return the learning rate after this number of taken steps, as a fraction of ``--lr``."""
    if taken < config.warmup:
        return (taken + 1) / config.warmup
    decay_steps = max(1, config.steps - config.warmup)
    remaining = 1.0 - min(1.0, (taken - config.warmup) / decay_steps)
    if config.schedule == "constant":
        height = 1.0
    elif config.schedule == "linear":
        height = remaining
    elif config.schedule == "wsd":
        height = min(1.0, 5 * remaining)
    else:
        height = 0.5 * (1 - math.cos(math.pi * remaining))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * height


class LRSchedule:
    """A learning rate that changes only when a step is taken.

    The device holds the flag that says whether a step was taken. If every optimizer accepts a
    tensor as its learning rate, as fused AdamW does, the rate is also looked up on the device, so
    that the host does not wait.

    Args:
        config: The flags of the schedule.
        optimizers: The optimizers that get the learning rate.
        device: The device of the model.
        taken: Number of steps that were taken before.

    Attributes:
        taken: Number of steps that were taken until now, on the device.
    """

    def __init__(
        self, config: Config, optimizers: Sequence[Optimizer], device: torch.device, taken: int
    ) -> None:
        is_fused = all(optimizer.defaults.get("fused") for optimizer in optimizers)
        self._on_host = device.type == "cpu" or not is_fused
        # A fused kernel reads a float32 learning rate.
        dtype = torch.float64 if self._on_host else torch.float32
        rates = []
        for num_taken in range(config.steps + 1):
            rates.append(config.lr * lr_fraction(config, num_taken))
        self._rates = torch.tensor(rates, dtype=dtype, device=device)
        self._optimizers = optimizers
        self.taken = torch.tensor([taken], device=device)

    def set_lr(self) -> float | Tensor:
        """Set the learning rate of the next step, and return it."""
        rate: float | Tensor = self._rates.index_select(0, self.taken).squeeze(0)
        if self._on_host:
            rate = float(rate)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        return rate

    def advance(self, taken: Tensor) -> None:
        """Move on by one step if it was taken."""
        self.taken += taken

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of taken steps, for a snapshot."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go back to the number of taken steps in a snapshot."""
        self.taken.copy_(state["taken"])


class WeightAverage:
    """A moving average of the weights that the optimizer steps, over the taken steps.

    Args:
        amp: The model and its weights.
        decay: Decay of the average. 0 keeps no average.

    Attributes:
        values: The averages. Their names are ``ema.`` and the name of the weight.
    """

    def __init__(self, amp: Amp, decay: float) -> None:
        self.values: dict[str, Tensor] = {}
        self._weights: list[Tensor] = []
        self._update_averages = get_ema_multi_avg_fn(decay)
        if decay == 0:
            return
        state = amp.flat_state_dict()
        for name, _ in unwrap_ddp(amp.model).named_parameters():
            weight = state[f"model.{name}"]
            self._weights.append(weight)
            self.values[f"ema.{name}"] = weight.clone()

    def update(self, taken: Tensor) -> None:
        """Update the averages if the step was taken."""
        if self.values and taken:
            self._update_averages(list(self.values.values()), self._weights, 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages, for a snapshot."""
        return self.values

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go back to the averages in a snapshot."""
        for name, value in self.values.items():
            value.copy_(state[name])

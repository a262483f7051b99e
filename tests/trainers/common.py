"""A small model, its data, and an inf planted on one rank, for the tests of trainers."""

import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

__all__ = [
    "FAULT",
    "GROUPS",
    "SCALE",
    "STEPS",
    "adamw",
    "adapted",
    "batches",
    "data",
    "digest",
    "faulty",
    "fresh_accelerate",
    "model",
    "needs",
    "plant_inf",
    "quiet",
    "shard",
    "train",
]

# A run's steps, counted from 0; in one rank 1 alone overflows.
STEPS, FAULT = 6, 2
# The worker of pytest that imports a trainer, by trainer.
GROUPS = {
    **dict.fromkeys(("lightning", "fabric"), "lightning"),
    **dict.fromkeys(("accelerate", "transformers", "trl"), "hugging_face"),
}
# The first loss scale, at which no gradient of these models overflows by itself.
SCALE = 2.0**10


def needs(*packages: str) -> None:
    """Skip a module of tests without these packages, and import none of them to know."""
    for package in packages:
        package = {"fabric": "lightning"}.get(package, package)
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: make test-trainers", allow_module_level=True)


def train(name: str, **options: Any) -> Any:
    """Train in a rank, which alone imports the trainer."""
    quiet()
    return importlib.import_module(f"tests.trainers.in_{name}").train(**options)


def quiet() -> None:
    """Ignore the warnings of a trainer, because no test is about them."""
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "accelerate", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if dist.is_initialized():
        # Asked for, though the group is there already.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())


def fresh_accelerate() -> None:
    """Reset the state that Accelerate shares in a process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def rank() -> int:
    """This process's rank; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    """Two linear layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))


def adapted(layout: str, net: nn.Module, *modules: str) -> nn.Module:
    """The model, with adapters of peft over these modules of it, frozen, if the layout is LoRA."""
    if not layout.startswith("LoRA"):
        return net
    from peft import LoraConfig, get_peft_model

    return get_peft_model(net, LoraConfig(r=2, target_modules=[*modules]))


def shard(net: nn.Module, mesh: Any) -> nn.Module:
    """Shard each linear layer by itself."""
    for module in [m for m in net.modules() if type(m) is nn.Linear]:
        fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def data(samples: int = 32) -> TensorDataset:
    """Inputs, and targets that can be learnt from them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def batches(samples: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of this rank, which has every second batch."""
    inputs, targets = data(samples).tensors
    first = 2 * rank()
    input_batches = inputs[first:].split(2)[::2]
    target_batches = targets[first:].split(2)[::2]
    return list(zip(input_batches, target_batches, strict=True))


def adamw(net: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """Return AdamW for the trainable parameters."""
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, **settings)


def plant_inf(
    parameters: Iterable[nn.Parameter],
    step: int,
    at: int | None = FAULT,
    value: float = float("inf"),
) -> None:
    """Give rank 1 alone an inf in its first gradient, or a NaN, in one step or none."""
    if step != at or rank() != 1:
        return
    gradient = next(p.grad for p in parameters if p.grad is not None)
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    local.view(-1)[0] = value


def faulty(net: nn.Module, at: int = FAULT, value: float = float("inf")) -> nn.Module:
    """Let rank 1 alone overflow at the end of one backward pass, in any training loop.

    The inf comes after wrappers have reduced the gradients, so it stays on its rank.
    """
    engine = torch.autograd.Variable._execution_engine
    passes = 0

    def plant() -> None:
        plant_inf(net.parameters(), at, at, value)

    def backward_of(gradient: Tensor) -> None:
        nonlocal passes
        if passes == at:
            # Callbacks that callbacks make are called last: after the wrapper's own.
            engine.queue_callback(lambda: engine.queue_callback(plant))
        passes += 1

    def watch(module: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(backward_of)

    first = next(module for module in net.modules() if list(module.parameters(recurse=False)))
    first.register_forward_hook(watch)
    return net


def digest(net: nn.Module) -> float:
    """Return one number for all trainable weights, which may be sharded over ranks."""
    with FullyShardedDataParallel.summon_full_params(net):
        trained = [p for p in net.parameters() if p.requires_grad]
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in trained]
        return sum(p.detach().double().abs().sum().item() for p in full)

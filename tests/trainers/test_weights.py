"""Train with weights and optimizers of other libraries, and make a public trainer's step with them.

Two ranks train one model in fp16, and one rank overflows in one step. With every library both ranks
skip that step, which leaves weights and optimizer state unchanged.

verl's step is written from its public description, with the same calls in the same order: its FSDP
engine (``FSDPEngine.optimizer_step``, November 2026), for FSDP1, FSDP2 and plain modules.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import DistGradScaler
from tests.levels.cells import Adapted
from tests.quick_cases import quick_cases
from tests.trainers.common import (
    FAULT,
    STEPS,
    adamw,
    adapted,
    batches,
    digest,
    model,
    needs,
    plant_inf,
    quiet,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
SCALE = 2.0**8


@dataclass
class Setup:
    """A model to train.

    Attributes:
        net: The module with the parameters.
        wrapped: The module to call, which reduces the gradients of ``net``.
        optimizer: The optimizer of the trainable parameters.
        clips_as_verl: Clip before each step by the calls of verl.
    """

    net: nn.Module
    wrapped: nn.Module
    optimizer: Any
    clips_as_verl: bool = False


def wrap_in_ddp(net: nn.Module) -> nn.Module:
    """Wrap a model in DDP, which does not broadcast weights of other libraries' types."""
    return DistributedDataParallel(net, init_sync=False)


# -- weights and optimizers of libraries -----------------------------------------------------------


def make_peft_model() -> nn.Module:
    """Return a model with peft's adapters in float32 on a frozen base in float16."""
    return adapted("LoRA", model().half(), "0", "2")


def set_up_peft_in_ddp() -> Setup:
    net = make_peft_model()
    return Setup(net, wrap_in_ddp(net), adamw(net, fused=True))


def set_up_peft_in_fsdp2() -> Setup:
    net = make_peft_model()
    for module in net.modules():
        if hasattr(module, "lora_A"):
            fully_shard(module.lora_A["default"])
            fully_shard(module.lora_B["default"])
    return Setup(net, net, adamw(net, fused=True))


def set_up_torchao() -> Setup:
    """Set up adapters that no library made, on weights that torchao stores in int8."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = model()
    quantize_(net, Int8WeightOnlyConfig())
    net.requires_grad_(False)
    net[0] = Adapted(net[0])
    net[2] = Adapted(net[2])
    return Setup(net, wrap_in_ddp(net), adamw(net))


def set_up_bitsandbytes() -> Setup:
    """Set up an optimizer that stores its state in 8 bits."""
    import bitsandbytes

    net = model()
    optimizer = bitsandbytes.optim.AdamW8bit(net.parameters(), lr=0.01, min_8bit_size=1)
    return Setup(net, wrap_in_ddp(net), optimizer)


def set_up_schedulefree() -> Setup:
    import schedulefree

    net = model()
    optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=0.01)
    optimizer.train()
    return Setup(net, wrap_in_ddp(net), optimizer)


# -- verl's step -----------------------------------------------------------------------------------


def set_up_verl(wrapped: nn.Module) -> Setup:
    """Set up a wrapped model to train by verl's step."""
    return Setup(wrapped, wrapped, adamw(wrapped, fused=True), clips_as_verl=True)


def set_up_verl_in_ddp() -> Setup:
    return set_up_verl(DistributedDataParallel(model()))


def set_up_verl_in_fsdp1() -> Setup:
    cpu = torch.device("cpu")
    return set_up_verl(FullyShardedDataParallel(model(), device_id=cpu, use_orig_params=True))


def set_up_verl_in_fsdp2() -> Setup:
    return set_up_verl(fully_shard(model()))


def clip_as_verl(module: nn.Module, max_norm: float = 1.0) -> Tensor:
    """Clip the gradients by the function for this kind of module; return the norm before."""
    if isinstance(module, FullyShardedDataParallel):
        return module.clip_grad_norm_(max_norm)
    if not isinstance(module, FSDPModule):
        return nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm


# -- training --------------------------------------------------------------------------------------

# The function that sets up the model, and the package that it needs.
SETUPS: dict[str, tuple[Callable[[], Setup], str]] = {
    "peft, half base": (set_up_peft_in_ddp, "peft"),
    "peft, half base, FSDP2": (set_up_peft_in_fsdp2, "peft"),
    "torchao": (set_up_torchao, "torchao"),
    "bitsandbytes": (set_up_bitsandbytes, "bitsandbytes"),
    "schedulefree": (set_up_schedulefree, "schedulefree"),
    "verl, DDP": (set_up_verl_in_ddp, "torch"),
    "verl, FSDP1": (set_up_verl_in_fsdp1, "torch"),
    "verl, FSDP2": (set_up_verl_in_fsdp2, "torch"),
}


def copy_state(net: nn.Module, optimizer: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Return a copy of this rank's trained weights and of its optimizer state."""
    weights = []
    for param in net.parameters():
        if param.requires_grad:
            local_param = param.to_local() if isinstance(param, DTensor) else param
            weights.append(local_param.detach().clone())
    return weights, copy.deepcopy(optimizer.state_dict())


@dataclass
class Run:
    """The observations of one rank.

    Attributes:
        weights: One number for all trained weights after each step.
        norms: The norms before verl's clipping in each step.
        taken: Whether each step was taken.
    """

    weights: list[float]
    norms: list[float]
    taken: list[bool]


def train(name: str) -> Run:
    """Train on this rank; assert that the skipped step changes no weight and no optimizer state."""
    quiet()
    set_up, _ = SETUPS[name]
    setup = set_up()
    net, optimizer = setup.net, setup.optimizer
    scaler = DistGradScaler("cpu", SCALE)
    run = Run(weights=[], norms=[], taken=[])
    for step, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
        with distamp.autocast("cpu", dtype=torch.float16):
            outputs = setup.wrapped(inputs * 0.1)
        loss = (outputs.float() - targets).square().mean()
        scaler.scale(loss).backward()
        plant_inf(net.parameters(), step)
        state_before = copy_state(net, optimizer)
        if setup.clips_as_verl:
            scaler.unscale_(optimizer)
            norm = clip_as_verl(net)
            run.norms.append(float(norm))
        scaler.step(optimizer)
        scaler.update()
        run.taken.append(scaler.step_was_taken(optimizer))
        if step == FAULT:
            state_after = copy_state(net, optimizer)
            torch.testing.assert_close(state_after, state_before, rtol=0, atol=0)
        optimizer.zero_grad()
        run.weights.append(digest(net))
    return run


def setup_params() -> list[Any]:
    """Return the names of all setups; those with peft are slow, because it imports transformers."""
    quick_names = [name for name, (_, package) in SETUPS.items() if package != "peft"]
    return quick_cases(SETUPS, quick_names)


@pytest.mark.parametrize("name", setup_params())
def test_both_ranks_skip_an_overflow_and_the_skip_changes_no_state(ranks2, name):
    _, package = SETUPS[name]
    needs(package)
    run_0, run_1 = ranks2.run(train, name)
    taken_except_fault = [step != FAULT for step in range(STEPS)]
    assert run_0.taken == taken_except_fault
    assert run_1.taken == taken_except_fault
    assert run_0.weights == run_1.weights
    assert len(set(run_0.weights)) == STEPS - 1, "every taken step moves the weights"


@pytest.mark.parametrize("name", ["verl, FSDP1", "verl, FSDP2"])
def test_verls_clipping_gets_the_norm_of_unscaled_gradients(ranks2, name):
    """The norm of shards is that of the unsharded model."""
    sharded_run, _ = ranks2.run(train, name)
    ddp_run, _ = ranks2.run(train, "verl, DDP")
    assert sharded_run.norms[0] == pytest.approx(ddp_run.norms[0], rel=2e-2)

"""Weights and optimizers where libraries put them, and a public trainer's step of them.

One model is trained in fp16 by two ranks, of which one overflows in one step. Whatever the library,
both ranks skip that step, and what they have then is what they had, optimizer state and all.

verl's step is written from its public description, with the same calls in the same order: its FSDP
engine (``FSDPEngine.optimizer_step``, November 2026), for FSDP1, FSDP2 and plain modules.
"""

import copy
from collections.abc import Callable
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
Made = tuple[nn.Module, Any]


def peft_half_base(is_sharded: bool = False) -> Made:
    net = adapted("LoRA", model().half(), "0", "2")  # in float32, over a frozen base
    for module in net.modules():
        if is_sharded and hasattr(module, "lora_A"):
            fully_shard(module.lora_A["default"])
            fully_shard(module.lora_B["default"])
    return net, adamw(net, fused=True)


def torchao_base() -> Made:
    """Adapters of one's own beside weights that torchao keeps in int8."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = model()
    quantize_(net, Int8WeightOnlyConfig())
    net.requires_grad_(False)
    net[0], net[2] = Adapted(net[0]), Adapted(net[2])
    return net, adamw(net)


def eight_bits() -> Made:
    import bitsandbytes

    net = model()
    return net, bitsandbytes.optim.AdamW8bit(net.parameters(), lr=0.01, min_8bit_size=1)


def schedule_free() -> Made:
    import schedulefree

    net = model()
    optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=0.01)
    optimizer.train()
    return net, optimizer


def by_verl(wrap: Callable[[nn.Module], nn.Module]) -> Made:
    net = wrap(model())
    return net, adamw(net, fused=True)


def flat(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


KINDS: dict[str, tuple[str, Callable[[], Made]]] = {
    "peft, half base": ("peft", peft_half_base),
    "peft, half base, FSDP2": ("peft", lambda: peft_half_base(is_sharded=True)),
    "torchao": ("torchao", torchao_base),
    "bitsandbytes": ("bitsandbytes", eight_bits),
    "schedulefree": ("schedulefree", schedule_free),
    "verl, DDP": ("torch", lambda: by_verl(DistributedDataParallel)),
    "verl, FSDP1": ("torch", lambda: by_verl(flat)),
    "verl, FSDP2": ("torch", lambda: by_verl(fully_shard)),
}


def clip_as_verl(module: nn.Module, max_norm: float = 1.0) -> Tensor:
    """Clip each kind of module its own way; return the norm before clipping."""
    if isinstance(module, FullyShardedDataParallel):
        return module.clip_grad_norm_(max_norm)
    if not isinstance(module, FSDPModule):
        return nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm


def held(net: nn.Module, optimizer: Any) -> Any:
    """A copy of this rank's weights and optimizer state."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in net.parameters()]
    return copy.deepcopy(([p.detach() for p in local if p.requires_grad], optimizer.state_dict()))


def train(name: str) -> tuple[list[float], list[float]]:
    """One number for the trained weights after each step, and the norms before verl's clip."""
    quiet()
    net, optimizer = KINDS[name][1]()
    is_wrapped = name.startswith("verl") or "FSDP2" in name
    runs = net if is_wrapped else DistributedDataParallel(net, init_sync=False)
    scaler, left, norms = DistGradScaler("cpu", SCALE), [], []
    for step, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
        with distamp.autocast("cpu", dtype=torch.float16):
            outputs = runs(inputs * 0.1)
        scaler.scale((outputs.float() - targets).square().mean()).backward()
        plant_inf(net.parameters(), step)
        before = held(net, optimizer)
        if name.startswith("verl"):
            scaler.unscale_(optimizer)
            norms.append(float(clip_as_verl(net)))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_taken(optimizer) is (step != FAULT)
        if step == FAULT:
            torch.testing.assert_close(held(net, optimizer), before, rtol=0, atol=0)
        optimizer.zero_grad()
        left.append(digest(net))
    return left, norms


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_found_and_a_skip_leaves_everything_as_it_was(ranks2, name):
    needs(KINDS[name][0])
    (left, norms), other = ranks2.run(train, name)
    assert other[0] == left
    assert len(set(left)) == STEPS - 1, "every step but the skipped one moves the weights"
    if norms:
        _, expected = ranks2.run(train, "verl, DDP")[0]
        assert norms[0] == pytest.approx(expected[0], rel=2e-2)

"""Weights and optimizers where libraries put them: found, stepped together, skipped bit for bit.

One model is trained in fp16 by two ranks, of which one overflows in one step. Whatever the library,
both ranks skip that step, and what they have then is what they had, optimizer state and all.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp import DistGradScaler
from tests.trainers.common import (
    FAULT,
    adamw,
    batches,
    model,
    needs,
    plant_inf,
    quiet,
    with_adapters,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
STEPS, SCALE = 5, 2.0**8
Made = tuple[nn.Module, Any]


def peft_half_base(is_sharded: bool = False) -> Made:
    net = with_adapters(model().half(), "0", "2")  # in float32, over a frozen base
    for module in net.modules():
        if is_sharded and hasattr(module, "lora_A"):
            fully_shard(module.lora_A["default"])
            fully_shard(module.lora_B["default"])
    return net, adamw(net, fused=True)


def torchao_base() -> Made:
    """Adapters of one's own beside weights that torchao keeps in int8."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.low = nn.Linear(base.in_features, 2, bias=False)
            self.high = nn.Linear(2, base.out_features, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.base(inputs) + self.high(self.low(inputs))

    net = model()
    quantize_(net, Int8WeightOnlyConfig())
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


KINDS: dict[str, tuple[str, Callable[[], Made]]] = {
    "peft, half base": ("peft", peft_half_base),
    "peft, half base, FSDP2": ("peft", lambda: peft_half_base(is_sharded=True)),
    "torchao": ("torchao", torchao_base),
    "bitsandbytes": ("bitsandbytes", eight_bits),
    "schedulefree": ("schedulefree", schedule_free),
}


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def train(name: str) -> list[float]:
    """One number for the trained weights after each step; the skipped one leaves all as it was."""
    quiet()
    net, optimizer = KINDS[name][1]()
    trained = [p for p in net.parameters() if p.requires_grad]
    runs = net if isinstance(trained[0], DTensor) else DistributedDataParallel(net, init_sync=False)
    scaler, left = DistGradScaler("cpu", SCALE), []
    for step, (inputs, targets) in zip(range(STEPS), batches(), strict=False):
        with distamp.autocast("cpu", dtype=torch.float16):
            outputs = runs(inputs * 0.1)
        scaler.scale((outputs.float() - targets).square().mean()).backward()
        plant_inf(trained, step)
        before = copy.deepcopy((list(map(whole, trained)), optimizer.state_dict()))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.stepped(optimizer) is (step != FAULT)
        if step == FAULT:
            after = list(map(whole, trained)), optimizer.state_dict()
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        optimizer.zero_grad()
        left.append(float(sum(whole(p).double().abs().sum() for p in trained)))
    return left


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_found_and_a_skip_leaves_everything_as_it_was(ranks2, name):
    needs(KINDS[name][0])
    left, other = ranks2.run(train, name)
    assert left == other
    assert len(set(left)) == STEPS - 1, "every step but the skipped one moves the weights"

"""Weights and optimizers where libraries put them: found, stepped together, skipped bit for bit.

One model is trained in fp16 by two ranks, of which one overflows in one step. Whatever the library,
both ranks skip that step, and what they have then is what they had, optimizer state and all.
"""

import copy
import importlib
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
from tests.trainers.common import FAULT, data, model, plant_inf, quiet, rank, with_adapters

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
STEPS, SCALE = 5, 2.0**8
Made = tuple[nn.Module, Any]


def lora(net: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Adapters by peft, in float32, over a frozen base."""
    net = with_adapters(net.to(dtype), "0", "2")
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    torch.manual_seed(1)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return net


def adamw(net: nn.Module, **settings: Any) -> Any:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, **settings)


def peft_half_base() -> Made:
    net = lora(model(), torch.float16)
    return net, adamw(net, fused=True)


def peft_half_base_sharded() -> Made:
    net = lora(model(), torch.float16)
    for module in net.modules():
        if hasattr(module, "lora_A"):
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
    "peft, half base, FSDP2": ("peft", peft_half_base_sharded),
    "torchao": ("torchao", torchao_base),
    "bitsandbytes": ("bitsandbytes", eight_bits),
    "schedulefree": ("schedulefree", schedule_free),
}


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def norm_of(net: nn.Module, scale: float) -> float:
    """The norm of the unscaled gradients, in float64."""
    squares = [
        (whole(p.grad).double() / scale).square().sum()
        for p in net.parameters()
        if p.grad is not None
    ]
    return float(sum(squares)) ** 0.5


def train(name: str) -> tuple[list[float], list[list[float]], int]:
    """What all ranks have in common after each step; norms, ours and float64's; taken steps."""
    quiet()
    net, optimizer = KINDS[name][1]()
    trained = [p for p in net.parameters() if p.requires_grad]
    runs = net if isinstance(trained[0], DTensor) else DistributedDataParallel(net, init_sync=False)
    scaler = DistGradScaler("cpu", SCALE)
    inputs, targets = (each[2 * rank() :].split(2)[::2] for each in data().tensors)
    left, norms, taken = [], [], 0
    for step in range(STEPS):
        with distamp.autocast("cpu", dtype=torch.float16):
            outputs = runs(inputs[step] * 0.1)
        scaler.scale((outputs.float() - targets[step]).square().mean()).backward()
        exact = norm_of(net, scaler.get_scale())
        plant_inf(trained, step)
        before = copy.deepcopy((list(map(whole, trained)), optimizer.state_dict()))
        found = scaler.clip_grad_norm_(optimizer, 1.0)
        if step != FAULT:
            norms.append([found.item(), exact])
        scaler.step(optimizer)
        scaler.update()
        taken += scaler.stepped(optimizer)
        if step == FAULT:
            torch.testing.assert_close(
                (list(map(whole, trained)), optimizer.state_dict()), before, rtol=0, atol=0
            )
        optimizer.zero_grad()
        left.append(float(sum(whole(p).double().abs().sum() for p in trained)))
    return left, norms, taken


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_found_and_a_skip_leaves_everything_as_it_was(ranks2, name):
    package = KINDS[name][0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    (left, norms, taken), (other, *_) = ranks2.run(train, name)
    assert left == other
    assert taken == STEPS - 1
    assert len(set(left)) == STEPS - 1, "every step but the skipped one moves the weights"
    for found, exact in norms:
        assert found == pytest.approx(exact, rel=1e-3)

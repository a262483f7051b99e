"""What a month-long run would find: nothing grows, nothing is left, a failure says what failed."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from distamp import comm_hooks
from distamp.comm_hooks import WIRE_FORMATS, formats
from tests.comm_hooks.training import gradients, inputs, mlp, wrapped

WIDTHS = (31, 97, 64, 5)


def _living() -> list[Tensor]:
    # A hook's thread may still hold what it has just exchanged.
    for thread in threading.enumerate():
        if thread.name == "distamp-comm-hook":
            thread.join(30)
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Tensor)]


def _bytes_living() -> int:
    """Bytes behind all fp32 tensors; what is on the wire is not among them."""
    found = [each for each in _living() if each.dtype is torch.float32]
    stored = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in found}
    return sum(each.nbytes() for each in stored.values())


# -- nothing grows ----------------------------------------------------------------------------


def _bytes_of_residuals(wire: str, attach: bool) -> float:
    """Bytes a parameter that are there after some steps, and would not be with fp16."""
    from distamp import DistGradScaler

    kept = []
    for name in ("fp16", wire):
        before = _bytes_living()
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
        state = comm_hooks.register(model, name)
        scaler = DistGradScaler("cpu", init_scale=4.0, enabled=attach)
        if attach:
            scaler.attach(state)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            sgd.zero_grad()
            scaler.scale(model(inputs(step, 256)).square().mean()).backward()
            scaler.step(sgd)
            scaler.update()
        kept.append(_bytes_living() - before)
        numel = sum(p.numel() for p in model.parameters())
        del model, state, scaler, sgd
    return (kept[1] - kept[0]) / numel


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("wire", ["int8"])
def test_residuals_hold_four_to_five_bytes_a_parameter(ranks4, wire, attach):
    for kept in ranks4.run(_bytes_of_residuals, wire, attach):
        assert 3.9 <= kept <= 5.2


# -- a failure --------------------------------------------------------------------------------


def _fails(how: str, buckets: int) -> str:
    """What the backward pass says where rank 1 fails, or is gone, in its third step."""
    model = DistributedDataParallel(mlp(*WIDTHS), bucket_cap_mb=0.002 if buckets > 1 else 25)
    comm_hooks.register(model, "fp16")
    message = ""

    def broken(*args: Any, **kwargs: Any) -> Any:
        if how == "dies":
            os._exit(3)
        raise RuntimeError("out of memory")

    for step in range(5):
        if step == 2 and dist.get_rank() == 1:
            formats.encode = broken
        try:
            model(inputs(step, WIDTHS[0])).square().mean().backward()
        except RuntimeError as error:
            message = f"in pass {step}: {error}"
            break
    with pytest.raises(RuntimeError) as again:
        model(inputs(0, WIDTHS[0])).square().mean().backward()
    return message + "; again: " + str(again.value)


@pytest.mark.parametrize("buckets", [1, 6])
def test_an_exchange_that_fails_on_one_rank_is_raised_on_every_rank(new_ranks, buckets):
    found = new_ranks(3, group_timeout=60).run(_fails, "raises", buckets)
    assert all(message.startswith("in pass 2: ") for message in found)
    assert "out of memory" in found[1]


def test_where_a_rank_is_gone_the_others_raise(new_ranks):
    found = new_ranks(4, group_timeout=60).run(_fails, "dies", 6, may_die=[1])
    assert all(found[rank].startswith("in pass 2: ") for rank in (0, 2, 3))


# -- what is counted ---------------------------------------------------------------------------


# -- copies -----------------------------------------------------------------------------------


def _copied(how: str, wire: str) -> tuple[list[str], float, bool]:
    """What was warned of, and whether a copy sends what it says once it is registered."""
    model, state = wrapped(mlp(*WIDTHS), wire)
    model(inputs(0, WIDTHS[0])).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if how == "deepcopy":
                twin = copy.deepcopy(model)
            elif how == "AveragedModel":
                twin = AveragedModel(model).module
            else:
                buffer = io.BytesIO()
                torch.save(model, buffer)
                buffer.seek(0)
                twin = torch.load(buffer, weights_only=False)
    warned = [str(each.message) for each in caught if each.category is UserWarning]
    model.zero_grad()
    twin.zero_grad()
    again = comm_hooks.register(twin, wire)
    for each in (model, twin):
        each(inputs(1, WIDTHS[0])).square().mean().backward()
    error = (gradients(model) - gradients(twin)).norm() / gradients(model).norm()
    return warned, error.item(), again.stats().exchanges > 0 and again is not state


@pytest.mark.parametrize("wire", ["fp16", "int8"])
@pytest.mark.parametrize("how", ["deepcopy", "AveragedModel", "save"])
def test_a_model_with_a_hook_can_be_copied(ranks2, how, wire):
    for warned, error, exchanged in ranks2.run(_copied, how, wire):
        assert len(set(warned)) == 1
        assert "fp32" in warned[0] or "uncompressed" in warned[0]
        assert f'distamp.comm_hooks.register(model, "{wire}")' in warned[0]
        assert error < 2e-2
        assert exchanged


# -- many parameters --------------------------------------------------------------------------


# -- before the first backward pass, or after it ----------------------------------------------


def _late() -> tuple[float, float]:
    """A hook that is registered, and then one that is loaded, after backward passes."""
    model, state = wrapped(mlp(*WIDTHS), None)
    model(inputs(0, WIDTHS[0])).square().mean().backward()
    state = comm_hooks.register(model, "int8")
    for step in range(3):
        model.zero_grad()
        model(inputs(step, WIDTHS[0])).square().mean().backward()
    saved = copy.deepcopy(state.state_dict())
    ends = []
    for again in range(2):
        if again:
            state.load_state_dict(saved)
        model.zero_grad()
        model(inputs(7, WIDTHS[0])).square().mean().backward()
        ends.append(gradients(model))
    without = comm_hooks.register(DistributedDataParallel(mlp(*WIDTHS)), "int8")
    assert without.stats().exchanges == 0
    return (ends[0] - ends[1]).norm().item(), ends[0].norm().item()


def test_a_hook_is_registered_and_loaded_between_any_two_backward_passes(ranks2):
    for difference, whole in ranks2.run(_late):
        assert difference == 0.0
        assert whole > 0


# -- small parameters among large ones --------------------------------------------------------

RATIOS = [10.0**-power for power in range(1, 8)]
WORST = {"int8": 2e-2, "fp16": 4e-4}


class _Uneven(nn.Module):
    """Biases whose gradients are so much smaller than those of the weights around them."""

    def __init__(self, ratio: float, layers: int = 12) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(72, 67) for _ in range(layers))
        self.biases = nn.ParameterList(torch.zeros(64) for _ in range(layers))
        # In the order of the model they alternate.
        self._parameters = {}
        self.both = nn.ParameterList(
            each for pair in zip(self.weights, self.biases, strict=True) for each in pair
        )
        del self.weights, self.biases
        self.ratio = ratio
        self.shapes = [each.shape for each in self.both]

    def gradients_of(self, rank: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(100 + rank)
        return [
            torch.randn(shape, generator=draw) * (self.ratio if len(shape) == 1 else 1.0)
            for shape in self.shapes
        ]

    def forward(self, given: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.both, given, strict=True)]).sum()


def _worst(wrapper: str, wire: str) -> tuple[float, float]:
    """The largest relative error of a parameter at any ratio, and bytes beside blocks of 256."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor

    rank, size = dist.get_rank(), dist.get_world_size()
    worst, more = 0.0, 0.0
    for ratio in RATIOS:
        net = _Uneven(ratio)
        model: Any
        if wrapper == "DDP":
            model = DistributedDataParallel(net)
        elif wrapper == "FSDP1":
            model = FullyShardedDataParallel(
                net, device_id=torch.device("cpu"), use_orig_params=True
            )
        else:
            model = fully_shard(net)
        state = comm_hooks.register(model, wire)
        model(net.gradients_of(rank)).backward()
        exact = [net.gradients_of(each) for each in range(size)]
        if wrapper == "FSDP1":
            found = _of_flat(model, net)
        else:
            found = [
                p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in net.both
            ]
        for index, mine in enumerate(found):
            mean = torch.stack([each[index].double() for each in exact]).mean(0)
            worst = max(worst, ((mine.double() - mean).norm() / mean.norm()).item())
        # Each rank's part in whole blocks, wherever parameters begin.
        blocks = -(-sum(p.numel() for p in net.gradients_of(0)) // 256 // size)
        times = 2 if wrapper == "DDP" else 1
        counted = times * (size - 1) * blocks * WIRE_FORMATS[wire].block_bytes
        more = max(more, state.stats().total_bytes / counted)
    return worst, more


def _of_flat(model: Any, net: Any) -> list[Tensor]:
    """Whole gradients of FSDP1, from the parts that the ranks hold."""
    flat = model._flat_param
    parts = [torch.empty_like(flat.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat.grad)
    whole, first, found = torch.cat(parts), 0, []
    for each in net.gradients_of(0):
        found.append(whole[first : first + each.numel()].view_as(each))
        first += each.numel()
    return found


@pytest.mark.parametrize(
    ("wrapper", "wire"),
    [
        *(("DDP", wire) for wire in WORST),
        *((wrapper, wire) for wrapper in ("FSDP1", "FSDP2") for wire in ("fp16",)),
    ],
)
def test_a_small_parameter_among_large_ones_arrives_as_well(ranks4, wrapper, wire):
    for worst, more in ranks4.run(_worst, wrapper, wire):
        assert worst <= WORST[wire]
        # A block of each parameter of int8 may have fewer elements than 256.
        assert more <= (1.05 if wire == "int8" else 1.01)

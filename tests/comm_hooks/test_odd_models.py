"""Models of odd parameters: without elements, of complex numbers, or frozen; and odd worlds."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from tests.comm_hooks.training import BOUNDS, agreed, gradients, inputs, wrapped


class _Empty(nn.Module):
    """A parameter without elements, in a bucket of its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.nothing = nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.nothing.sum()


def _empty(wire: str) -> bool:
    torch.manual_seed(0)
    model = DistributedDataParallel(_Empty())
    comm_hooks.register(model, wire)
    for step in range(2):
        model(inputs(step, 8)).square().mean().backward()
    return bool(gradients(model).any()) and model.module.nothing.grad.shape == (0, 4)


@pytest.mark.parametrize("wire", ["fp16", "int8", "bf16"])
def test_a_bucket_without_elements_is_exchanged(ranks4, wire):
    assert ranks4.run(_empty, wire) == [True] * 4


class _Complex(nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(40, 9, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(9))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


def _reals(model: nn.Module) -> Tensor:
    flat = [torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in model.parameters()]
    return torch.cat([each.flatten() for each in flat])


def _complex(wire: str) -> tuple[float, bool, float]:
    """The error against DDP without a hook, and how far a hook that was saved and loaded is."""
    plain, _ = wrapped(_Complex(), None)
    model, state = wrapped(_Complex(), wire)
    for step in range(3):
        if step == 2:
            buffer = io.BytesIO()
            torch.save(state.state_dict(), buffer)
            buffer.seek(0)
            again, loaded = wrapped(_Complex(), wire, find_unused_parameters=False)
            again(inputs(0, 40)).sum().backward()
            loaded.load_state_dict(torch.load(buffer))
        for each in (plain, model, *([again] if step == 2 else [])):
            each.zero_grad()
            each(inputs(step, 40)).sum().backward()
    mine, true = _reals(model), _reals(plain)
    error = ((mine - true).norm() / true.norm()).item()
    return error, agreed(mine), (mine - _reals(again)).norm().item()


@pytest.mark.parametrize("wire", list(comm_hooks.WIRE_FORMATS))
def test_complex_gradients_are_exchanged(ranks4, wire):
    for error, same, resumed in ranks4.run(_complex, wire):
        assert error <= BOUNDS[wire]
        assert same
        assert resumed == 0.0


# -- frozen parameters under FSDP2 ----------------------------------------------------------------


def _fewer_ranks(wire: str, file: str) -> list[float]:
    """Errors of means by one state, over three ranks and then over two of them."""
    rank, found = dist.get_rank(), []
    net = nn.Linear(300, 300, bias=False)
    state = comm_hooks.CommHookState(wire)
    for size in (3, 2):
        if size == 2:
            dist.destroy_process_group()
            if rank == 2:
                break
            store = dist.FileStore(file, size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        model = DistributedDataParallel(net)
        model.register_comm_hook(state, comm_hooks.fp16_compress_hook)
        for step in range(3):
            model.zero_grad()
            model(inputs(step, 300)).square().mean().backward()
            mean, net.weight.grad = net.weight.grad, None
            net(inputs(step, 300)).square().mean().backward()
            dist.all_reduce(net.weight.grad)
            found.append(float((mean - net.weight.grad / size).norm() / mean.norm()))
    if rank < 2:
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_one_state_serves_a_world_of_fewer_ranks(new_ranks, tmp_path, wire):
    for errors in new_ranks(3).run(_fewer_ranks, wire, str(tmp_path / "store")):
        assert len(errors) in (3, 6)
        assert max(errors) < {"fp16": 1e-3, "int8": 3e-2}[wire]

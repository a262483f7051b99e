"""The simulated device itself: memory, schedules and host syncs.

Every test of a job compares its numbers with the CPU. `test_planted_faults` has mistakes that the
device must show.
"""

import ctypes

import pytest
import torch
from torch import Tensor

from tests.on_ranks import on_devices
from tests.ranks import RankError


@on_devices(1)
def test_a_tensor_can_be_moved_between_devices():
    first, second = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:3")
    total = first.to("sim:3", non_blocking=True) + second
    assert str(total.device) == "sim:3"
    assert total.tolist() == [2.0, 2.0, 2.0]


@on_devices(1)
def test_new_memory_is_nan():
    assert torch.empty(1000, device="sim").isnan().all()


@on_devices(1)
def test_memory_runs_out():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, device="sim")


def _read_device_pointer() -> None:
    tensor = torch.ones(3, device="sim")
    torch.accelerator.synchronize()
    print(ctypes.c_float.from_address(tensor.data_ptr()).value)


def _failing_job() -> None:
    torch.ones(3, device="sim")[torch.tensor([5], device="sim")]
    # The error belongs to a job that runs later, so it comes out where the host waits.
    torch.accelerator.synchronize()


MISTAKES = {
    _read_device_pointer: r"died with exit code -11(.|\n)*in _read_device_pointer",
    _failing_job: r"in _failing_job\n.*synchronize(.|\n)*out of bounds",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_raises_in_the_line_that_raises_on_a_device(sim, mistake):
    with pytest.raises(RankError, match=MISTAKES[mistake]):
        sim.run(mistake)


def item(x: Tensor) -> None:
    x.sum().item()


def d2h(x: Tensor) -> None:
    x.cpu()


def h2d(x: Tensor) -> None:
    torch.tensor([1.0], device=x.device)


def stream(x: Tensor) -> None:
    torch.accelerator.current_stream().synchronize()


def device(x: Tensor) -> None:
    torch.accelerator.synchronize()


def data_dependent(x: Tensor) -> None:
    x[x > 0]


@on_devices(1)
@pytest.mark.parametrize("sync", [item, d2h, h2d, stream, device, data_dependent])
def test_a_host_sync_is_counted_by_its_kind(sync):
    from tests.simulated.device import counted

    x = torch.ones(4, device="sim")
    with counted() as counts:
        sync(x)
    assert counts == {sync.__name__: 1}


@on_devices(1)
def test_copies_of_pinned_memory_are_no_host_sync():
    from tests.simulated.device import counted

    x, pinned = torch.ones(4, device="sim"), torch.ones(4, pin_memory=True)
    with counted() as counts:
        pinned.copy_(x, non_blocking=True).to("sim", non_blocking=True)
    assert counts == {}


@on_devices(1)
def test_a_kind_of_host_sync_can_be_refused():
    from tests.simulated.device import refuse

    x = torch.ones(4, device="sim")
    with refuse("d2h"), pytest.raises(RuntimeError, match="host sync refused: d2h"):
        x.cpu()

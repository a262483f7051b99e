"""The simulated device itself: memory, schedules and host syncs.

That its numbers are the CPU's, every test of a job asks. What goes wrong on it is made on purpose
in `test_planted_faults`.
"""

import ctypes

import pytest
import torch

from tests.on_ranks import on_devices
from tests.ranks import RankError


@on_devices(1)
def test_there_are_several_devices_whose_memory_is_nan_and_runs_out():
    first, there = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:3")
    moved = first.to("sim:3", non_blocking=True) + there
    assert (str(moved.device), moved.tolist()) == ("sim:3", [2.0, 2.0, 2.0])
    assert torch.empty(1000, device="sim").isnan().all()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, device="sim")


def _read_device_pointer() -> None:
    there = torch.ones(3, device="sim")
    torch.accelerator.synchronize()
    print(ctypes.c_float.from_address(there.data_ptr()).value)


def _failing_job() -> None:
    torch.ones(3, device="sim")[torch.tensor([5], device="sim")]
    # The error belongs to a job that runs later, so it comes out where the host waits.
    torch.accelerator.synchronize()


MISTAKES = {
    _read_device_pointer: r"died with exit code -11(.|\n)*in _read_device_pointer",
    _failing_job: r"in _failing_job\n.*synchronize(.|\n)*out of bounds",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_comes_out_where_it_would_on_a_device(sim, mistake):
    with pytest.raises(RankError, match=MISTAKES[mistake]):
        sim.run(mistake)


@on_devices(1)
def test_syncs_are_told_by_kind_and_refused():
    from tests.simulated.device import counted, refuse

    x, pinned = torch.ones(4, device="sim"), torch.ones(4, pin_memory=True)
    calls = {
        "item": lambda: x.sum().item(),
        "d2h": lambda: x.cpu(),
        "h2d": lambda: torch.tensor([1.0], device="sim"),
        "stream": lambda: torch.accelerator.current_stream().synchronize(),
        "device": lambda: torch.accelerator.synchronize(),
        "data_dependent": lambda: x[x > 0],
        "": lambda: pinned.copy_(x, non_blocking=True).to("sim", non_blocking=True),
    }
    for name, call in calls.items():
        with counted() as found:
            call()
        assert found == ({name: 1} if name else {})
    with refuse("d2h"), pytest.raises(RuntimeError, match="host sync refused: d2h"):
        x.cpu()

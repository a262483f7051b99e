"""The simulated device itself: memory, streams, schedules, host syncs, and the CPU's numbers.

What goes wrong on it is made on purpose in `test_planted_faults`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import RankError

SCHEDULES = [("late", 0), ("late_others", 0), ("eager", 0), ("random", 1)]


def _memory() -> Any:
    first, there = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:3")
    moved = first.to("sim:3", non_blocking=True) + there
    fresh = torch.empty(1000, device="sim").isnan().all().item()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, device="sim")
    return str(moved.device), moved.tolist(), fresh


def test_there_are_several_devices_whose_memory_is_nan_and_runs_out(sim):
    assert sim.one(_memory) == ("sim:3", [2.0, 2.0, 2.0], True)


def _over_two_devices() -> None:
    torch.ones(3, device="sim:0") + torch.ones(3, device="sim:1")


def _read_device_pointer() -> None:
    there = torch.ones(3, device="sim")
    torch.accelerator.synchronize()
    print(ctypes.c_float.from_address(there.data_ptr()).value)


def _failing_job() -> None:
    torch.ones(3, device="sim")[torch.tensor([5], device="sim")]
    # The error belongs to a job that runs later, so it comes out where the host waits.
    torch.accelerator.synchronize()


MISTAKES = {
    _over_two_devices: "Expected all tensors to be on the same device",
    _read_device_pointer: r"died with exit code -11(.|\n)*in _read_device_pointer",
    _failing_job: r"in _failing_job\n.*synchronize(.|\n)*out of bounds",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_comes_out_where_it_would_on_a_device(sim, mistake):
    with pytest.raises(RankError, match=MISTAKES[mistake]):
        sim.run(mistake)


def _progress() -> Any:
    from tests.simulated.device import peek, pending

    x, copied = torch.full((4,), 12.25, device="sim"), torch.empty(4, pin_memory=True)
    copied.copy_(x, non_blocking=True)
    seen = peek(x).tolist() == copied.tolist() == [12.25] * 4, pending() > 0
    torch.accelerator.synchronize()
    return *seen, peek(x).tolist(), copied.tolist(), pending()


def _trace() -> list[int]:
    from tests.simulated.device import pending

    streams = [torch.accelerator.current_stream(), *(torch.Stream("sim") for _ in range(3))]
    counts = []
    for number in range(40):
        with streams[number % 4]:
            torch.ones(4, device="sim")
        counts.append(pending())
    return counts


def test_a_schedule_says_when_jobs_run(sim):
    assert sim.one(_progress) == (False, True, [12.25] * 4, [12.25] * 4, 0)
    assert sim.one(_progress, schedule="eager") == (True, False, [12.25] * 4, [12.25] * 4, 0)
    traces = [sim.one(_trace, schedule="random", seed=seed) for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]


def _syncs() -> dict[str, Any]:
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
    found = {}
    for name, call in calls.items():
        with counted() as found[name]:
            call()
    with refuse("d2h"), pytest.raises(RuntimeError, match="host sync refused: d2h"):
        x.cpu()
    return found


def test_syncs_are_told_by_kind_and_refused(sim):
    found = sim.one(_syncs)
    assert found == {kind: {kind: 1} if kind else {} for kind in found}


# -- numbers: those of the CPU, to the bit ---------------------------------------------------------


def _trained(device: str, name: str, settings: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    convolution = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    linear = [nn.Dropout(0.5), nn.Linear(8 * 16, 16), nn.LayerNorm(16), nn.GELU()]
    model = nn.Sequential(*convolution, nn.Flatten(), *linear, nn.Linear(16, 10)).to(device)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **settings)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8, generator=generator).to(device)
        y = torch.randint(0, 10, (4,), generator=generator).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [value.detach().cpu() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    "case",
    [("SGD", {"momentum": 0.9, "fused": True}), ("AdamW", {"foreach": True}), ("Adagrad", {})],
    ids=str,
)
def test_a_model_trains_as_on_the_cpu(sim, case):
    expected = sim.one(_trained, "cpu", *case)
    for schedule, seed in SCHEDULES:
        found = sim.one(_trained, "sim", *case, schedule=schedule, seed=seed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _op_by_op() -> Any:
    from tests.simulated.device import without_meta

    _trained("sim", "AdamW", {"fused": True})
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to("sim")
    x = torch.ones(2, 5, 16, device="sim")
    with torch.autocast("sim", dtype=torch.float16):
        layer(x).square().sum().backward()
        half = nn.functional.linear(x, torch.ones(4, 16, device="sim"))
        dtypes = [half.dtype, half.exp().dtype]
    return dict(without_meta()), dtypes


def test_autocast_has_cudas_lists_and_no_op_runs_early_for_want_of_a_shape(sim):
    assert sim.one(_op_by_op, group="fresh") == ({}, [torch.float16, torch.float32])

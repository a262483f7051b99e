"""The simulated device itself: memory, streams, schedules, syncs, and the CPU's numbers.

What goes wrong on it is made on purpose in `test_planted_faults`.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import RankError

SCHEDULES = [("late", 0), ("late_others", 0), ("eager", 0), ("random", 1), ("random", 2)]


# -- devices, memory, streams ----------------------------------------------------------------------


def _memory() -> Any:
    here, there = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:3")
    moved = here.to("sim:3", non_blocking=True) + there
    fresh = torch.empty(1000, device="sim").isnan().all().item()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, device="sim")
    return str(torch.accelerator.current_accelerator()), str(moved.device), moved.tolist(), fresh


def test_there_are_several_devices_whose_memory_is_nan_and_runs_out(sim):
    assert sim.one(_memory) == ("sim", "sim:3", [2.0, 2.0, 2.0], True)


def _addresses(record: bool) -> Any:
    side = torch.Stream("sim")
    first = torch.ones(100, device="sim")
    if record:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            first + 1
        first.record_stream(side)
    address = first.data_ptr()
    del first
    same = torch.ones(100, device="sim").data_ptr() == address
    with side:
        elsewhere = torch.ones(100, device="sim").data_ptr() == address
    return same, elsewhere


def test_freed_memory_goes_back_to_its_stream_at_once_but_where_it_is_recorded(sim):
    assert sim.one(_addresses, False) == (True, False)
    assert sim.one(_addresses, True) == (False, False)


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


def _refused() -> None:
    from tests.simulated.device import refuse

    x = torch.ones(4, device="sim")
    with refuse("item"):
        x.cpu()
    with refuse("d2h"):
        x.cpu()


MISTAKES = {
    _over_two_devices: "Expected all tensors to be on the same device",
    _read_device_pointer: r"died with exit code -11(.|\n)*in _read_device_pointer",
    _failing_job: r"in _failing_job\n.*synchronize(.|\n)*out of bounds",
    _refused: "host sync refused: d2h in a blocking copy to the host",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_comes_out_where_it_would_on_a_device(sim, mistake):
    with pytest.raises(RankError, match=MISTAKES[mistake]):
        sim.run(mistake)


def _progress() -> Any:
    from tests.simulated.device import peek, pending

    x = torch.full((4,), 12.25, device="sim")
    seen = peek(x).tolist() == [12.25] * 4, pending() > 0
    torch.accelerator.synchronize()
    return *seen, peek(x).tolist(), pending()


def _trace() -> list[int]:
    from tests.simulated.device import pending

    streams = [torch.accelerator.current_stream(), *(torch.Stream("sim") for _ in range(3))]
    counts = []
    for number in range(40):
        with streams[number % 4]:
            torch.ones(4, device="sim")
        counts.append(pending())
    return counts


def _polled() -> Any:
    x = torch.ones(4, device="sim")
    event = torch.Event("sim")
    event.record()
    polls = next(n for n in itertools.count() if event.query())
    from tests.simulated.device import peek

    return polls > 0, peek(x).tolist()


def test_a_schedule_says_when_jobs_run(sim):
    assert sim.one(_progress) == (False, True, [12.25] * 4, 0)
    assert sim.one(_progress, schedule="eager") == (True, False, [12.25] * 4, 0)
    traces = [sim.one(_trace, schedule="random", seed=seed) for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]
    assert sim.one(_polled) == (True, [1.0] * 4), "time passes for a host that polls"


# -- host syncs ------------------------------------------------------------------------------------


def _syncs() -> dict[str, dict[str, int]]:
    from tests.simulated.device import counted

    x = torch.ones(4, device="sim")
    pinned = torch.ones(4, pin_memory=True)
    event = torch.Event("sim")
    event.record()
    mask = x > 0
    calls = {
        "item": lambda: x.sum().item(),
        "d2h": lambda: x.tolist(),
        "d2h, a copy": lambda: x.cpu(),
        "d2h, not pinned": lambda: torch.empty(4).copy_(x, non_blocking=True),
        "h2d": lambda: torch.ones(4).to("sim"),
        "h2d, a list": lambda: torch.tensor([1.0], device="sim"),
        "stream": lambda: torch.accelerator.current_stream().synchronize(),
        "event": lambda: event.synchronize(),
        "device": lambda: torch.accelerator.synchronize(),
        "data_dependent": lambda: x.nonzero(),
        "data_dependent, a mask": lambda: x[mask],
        "data_dependent, equal": lambda: torch.equal(x, x),
        "none, pinned": lambda: pinned.copy_(x, non_blocking=True),
        "none, not blocking": lambda: torch.ones(4).to("sim", non_blocking=True),
        "none, from pinned": lambda: pinned.to("sim", non_blocking=True),
        "none, full": lambda: torch.full((2,), 1.0, device="sim"),
        "none, masked": lambda: x.masked_fill_(mask, 2.0),
        "none, streams": lambda: torch.Stream("sim").wait_stream(
            torch.accelerator.current_stream()
        ),
        "none, devices": lambda: x.to("sim:1"),
    }
    found = {}
    for name, call in calls.items():
        with counted() as counts:
            call()
        found[name] = counts
    return found


def test_syncs_are_counted_by_kind(sim):
    found = sim.one(_syncs)
    kinds = {name: name.split(",")[0] for name in found}
    assert found == {name: {} if kind == "none" else {kind: 1} for name, kind in kinds.items()}


def _pinned() -> Any:
    here, there = torch.empty(4, pin_memory=True), torch.full((4,), 7.0, device="sim")
    here.copy_(there, non_blocking=True)
    pending = here.isnan().all().item()
    source = torch.full((1000,), 3.0, pin_memory=True)
    copied = source.to("sim", non_blocking=True)
    del source
    others = [torch.zeros(1000, pin_memory=True) for _ in range(8)]
    torch.accelerator.synchronize()
    return pending, here.tolist(), copied.eq(3.0).all().item(), len(others)


def test_a_pending_copy_reads_nan_and_pinned_memory_lives_until_it_is_done(sim):
    assert sim.one(_pinned) == (True, [7.0] * 4, True, 8)


# -- numbers: those of the CPU, to the bit ---------------------------------------------------------


def _trained(device: str, name: str, settings: dict[str, Any], amp: bool = False) -> list[Tensor]:
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
        with torch.autocast(device, dtype=torch.bfloat16, enabled=amp):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [value.detach().cpu() for value in model.state_dict().values()]


def _draws(device: str) -> list[Tensor]:
    torch.manual_seed(3)
    first = torch.randn(50, device=device)
    torch.manual_seed(4)  # what was drawn before is drawn, though no job has run
    dropped = nn.functional.dropout(torch.ones(50, device=device), 0.5)
    own = torch.Generator(device).manual_seed(5)
    return [t.cpu() for t in (first, dropped, torch.rand(7, generator=own, device=device))]


def _attention(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(device)
    embedding = nn.Embedding(11, 16, sparse=True).to(device)
    layer(embedding(torch.arange(10).view(2, 5).to(device))).square().sum().backward()
    rows = embedding.weight.grad.coalesce().values()
    return [t.cpu() for t in (rows, *(p.grad for p in layer.parameters()))]


CASES: list[tuple[Any, ...]] = [
    (_trained, "SGD", {"momentum": 0.9, "foreach": False}),
    (_trained, "SGD", {"momentum": 0.9, "fused": True}),
    (_trained, "AdamW", {"foreach": True}),
    (_trained, "AdamW", {"fused": True}),
    (_trained, "Adagrad", {"foreach": False}),
    (_draws,),
    (_attention,),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: " ".join([case[0].__name__, *map(str, case[1:])])
)
def test_a_model_trains_as_on_the_cpu(sim, case):
    function, *arguments = case
    here = sim.one(function, "cpu", *arguments)
    exact = {} if function is _attention else {"rtol": 0, "atol": 0}
    for schedule, seed in SCHEDULES:
        there = sim.one(function, "sim", *arguments, schedule=schedule, seed=seed)
        torch.testing.assert_close(there, here, **exact)


def _op_by_op() -> Any:
    from tests.simulated.device import without_meta

    _trained("sim", "AdamW", {"fused": True}, True)
    _attention("sim")
    x = torch.ones(2, 4, device="sim")
    with torch.autocast("sim", dtype=torch.float16):
        half = nn.functional.linear(x, torch.ones(4, 4, device="sim"))
        dtypes = [half.dtype, half.exp().dtype, (half + x).dtype]
    return dict(without_meta()), dtypes


def test_autocast_has_cudas_lists_and_no_op_runs_early_for_want_of_a_shape(sim):
    dtypes = [torch.float16, torch.float32, torch.float32]
    assert sim.one(_op_by_op, group="fresh") == ({}, dtypes)

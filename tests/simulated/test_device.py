"""The simulated device itself: memory, streams, schedules, syncs, generators, numbers."""

from __future__ import annotations

import copy
import ctypes
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import RankError

SCHEDULES = [("late", 0), ("late_others", 0), ("eager", 0), ("random", 1), ("random", 2)]


# -- devices and memory ---------------------------------------------------------------------------


def _devices() -> Any:
    here, there = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:3")
    moved = here.to("sim:3", non_blocking=True) + there
    return str(torch.accelerator.current_accelerator()), str(moved.device), moved.tolist()


def test_there_are_several_devices(sim):
    assert sim.one(_devices) == ("sim", "sim:3", [2.0, 2.0, 2.0])


def _over_two_devices() -> None:
    torch.ones(3, device="sim:0") + torch.ones(3, device="sim:1")


def test_an_op_over_two_devices_is_refused(sim):
    with pytest.raises(RankError, match="Expected all tensors to be on the same device"):
        sim.run(_over_two_devices)


def _read_device_pointer() -> None:
    there = torch.ones(3, device="sim")
    torch.accelerator.synchronize()
    the_guilty_line = ctypes.c_float.from_address(there.data_ptr())
    print(the_guilty_line.value)


def test_the_host_dies_where_it_reads_device_memory(sim_ranks):
    with pytest.raises(RankError, match=r"died with exit code -11(.|\n)*in _read_device_pointer"):
        sim_ranks(1).run(_read_device_pointer)


def _fresh_memory() -> Any:
    return torch.empty(1000, device="sim").isnan().all().item()


def test_memory_that_nobody_wrote_reads_nan(sim):
    assert sim.one(_fresh_memory)


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


def test_freed_memory_goes_back_to_its_stream_at_once(sim):
    assert sim.one(_addresses, False) == (True, False)


def test_recorded_memory_waits_for_the_stream_that_reads_it(sim):
    assert sim.one(_addresses, True) == (False, False)


def _too_much() -> Any:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, device="sim")
    return torch.ones(2, device="sim").tolist()


def test_memory_runs_out_with_torch_s_error(sim):
    assert sim.one(_too_much) == [1.0, 1.0]


# -- streams and schedules ------------------------------------------------------------------------


def _progress() -> Any:
    from tests.simulated.device import peek, pending

    x = torch.full((4,), 12.25, device="sim")
    seen = peek(x).tolist() == [12.25] * 4, pending() > 0
    torch.accelerator.synchronize()
    return *seen, peek(x).tolist(), pending()


def test_late_runs_nothing_until_somebody_waits(sim):
    assert sim.one(_progress) == (False, True, [12.25] * 4, 0)


def test_eager_runs_everything_at_once(sim):
    assert sim.one(_progress, schedule="eager") == (True, False, [12.25] * 4, 0)


def _trace(n: int = 40) -> list[int]:
    from tests.simulated.device import pending

    streams = [torch.accelerator.current_stream(), *(torch.Stream("sim") for _ in range(3))]
    counts = []
    for number in range(n):
        with streams[number % 4]:
            torch.ones(4, device="sim")
        counts.append(pending())
    return counts


def test_a_random_schedule_is_the_same_for_the_same_seed(sim):
    traces = [sim.one(_trace, schedule="random", seed=seed) for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]


def _polled() -> Any:
    x = torch.ones(4, device="sim")
    event = torch.Event("sim")
    event.record()
    polls = next(n for n in itertools.count() if event.query())
    from tests.simulated.device import peek

    return polls > 0, peek(x).tolist()


def test_time_passes_for_a_host_that_polls(sim):
    assert sim.one(_polled) == (True, [1.0] * 4)


def _unknown_schedule() -> None:
    from tests.simulated.device import schedule

    schedule("soon")


def test_an_unknown_schedule_is_refused(sim):
    with pytest.raises(RankError, match="'late', 'late_others', 'eager' or 'random', not 'soon'"):
        sim.run(_unknown_schedule)


def _failing_job() -> None:
    torch.ones(3, device="sim")[torch.tensor([5], device="sim")]
    # The error belongs to a job that runs later, so it comes out where the host waits.
    torch.accelerator.synchronize()


def test_an_error_on_the_device_comes_out_at_the_next_sync(sim):
    with pytest.raises(RankError, match=r"in _failing_job\n.*synchronize(.|\n)*out of bounds"):
        sim.run(_failing_job)


# -- host syncs -----------------------------------------------------------------------------------


def _syncs() -> dict[str, dict[str, int]]:
    from tests.simulated.device import counted

    x = torch.ones(4, device="sim")
    pinned = torch.ones(4, pin_memory=True)
    event = torch.Event("sim")
    event.record()
    mask = x > 0
    calls = {
        "item": lambda: x.sum().item(),
        "tolist": lambda: x.tolist(),
        "to the host": lambda: x.cpu(),
        "to pinned memory": lambda: pinned.copy_(x, non_blocking=True),
        "to memory that is not pinned": lambda: torch.empty(4).copy_(x, non_blocking=True),
        "to the device": lambda: torch.ones(4).to("sim"),
        "to the device, not blocking": lambda: torch.ones(4).to("sim", non_blocking=True),
        "from pinned memory": lambda: pinned.to("sim", non_blocking=True),
        "tensor": lambda: torch.tensor([1.0], device="sim"),
        "full": lambda: torch.full((2,), 1.0, device="sim"),
        "stream": lambda: torch.accelerator.current_stream().synchronize(),
        "event": lambda: event.synchronize(),
        "device": lambda: torch.accelerator.synchronize(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[mask],
        "masked fill": lambda: x.masked_fill_(mask, 2.0),
        "equal": lambda: torch.equal(x, x),
        "wait_stream": lambda: torch.Stream("sim").wait_stream(torch.accelerator.current_stream()),
        "between devices": lambda: x.to("sim:1"),
    }
    found = {}
    for name, call in calls.items():
        with counted() as counts:
            call()
        found[name] = counts
    return found


def test_syncs_are_counted_by_kind(sim):
    assert sim.one(_syncs) == {
        "item": {"item": 1},
        "tolist": {"d2h": 1},
        "to the host": {"d2h": 1},
        "to pinned memory": {},
        "to memory that is not pinned": {"d2h": 1},
        "to the device": {"h2d": 1},
        "to the device, not blocking": {},
        "from pinned memory": {},
        "tensor": {"h2d": 1},
        "full": {},
        "stream": {"stream": 1},
        "event": {"event": 1},
        "device": {"device": 1},
        "nonzero": {"data_dependent": 1},
        "mask": {"data_dependent": 1},
        "masked fill": {},
        "equal": {"data_dependent": 1},
        "wait_stream": {},
        "between devices": {},
    }


def _refused(*kinds: str) -> Any:
    from tests.simulated.device import refuse

    x = torch.ones(4, device="sim")
    with refuse(*kinds):
        x.cpu()
    return "not refused"


def test_a_sync_is_refused_by_kind(sim):
    with pytest.raises(RankError, match="host sync refused: d2h in a blocking copy to the host"):
        sim.run(_refused, "d2h")
    assert sim.one(_refused, "item") == "not refused"


# -- pinned memory --------------------------------------------------------------------------------


def _pinned() -> Any:
    there = torch.full((4,), 7.0, device="sim")
    here = torch.empty(4, pin_memory=True)
    here.copy_(there, non_blocking=True)
    pending = here.isnan().all().item()
    result = there.to("cpu", non_blocking=True)
    torch.accelerator.synchronize()
    return pending, here.tolist(), here.is_pinned(), result.is_pinned(), result.tolist()


def test_a_pending_copy_reads_nan(sim):
    assert sim.one(_pinned) == (True, [7.0] * 4, True, True, [7.0] * 4)


def _freed_pinned() -> Any:
    source = torch.full((1000,), 3.0, pin_memory=True)
    there = source.to("sim", non_blocking=True)
    del source
    others = [torch.zeros(1000, pin_memory=True) for _ in range(8)]
    return there.eq(3.0).all().item(), len(others)


def test_pinned_memory_lives_until_copies_of_it_are_done(sim):
    assert sim.one(_freed_pinned) == (True, 8)


# -- numbers: those of the CPU, to the bit --------------------------------------------------------


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(8 * 16, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 10),
    )


def _trained(device: str, make: str, settings: dict[str, Any], amp: bool) -> list[Tensor]:
    model = copy.deepcopy(_net()).to(device)
    optimizer = getattr(torch.optim, make)(model.parameters(), lr=0.01, **settings)
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


CASES = [
    ("SGD", {"momentum": 0.9, "foreach": False}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("Adam", {"foreach": False}),
    ("Adagrad", {"foreach": False}),
]


@pytest.mark.parametrize(("make", "settings"), CASES)
def test_a_model_trains_as_on_the_cpu_to_the_bit(sim, make, settings):
    here = sim.one(_trained, "cpu", make, settings, False)
    for schedule, seed in SCHEDULES:
        there = sim.one(_trained, "sim", make, settings, False, schedule=schedule, seed=seed)
        assert all(map(torch.equal, here, there))


def test_under_autocast_every_schedule_gives_the_same(sim):
    # Not the CPU's numbers: that has lists of its own.
    settings = ("sim", "AdamW", {"fused": True}, True)
    first = sim.one(_trained, *settings, schedule="eager")
    for schedule, seed in SCHEDULES:
        there = sim.one(_trained, *settings, schedule=schedule, seed=seed)
        assert all(map(torch.equal, first, there))


def _autocast_dtypes() -> list[torch.dtype]:
    x = torch.ones(2, 4, device="sim")
    with torch.autocast("sim", dtype=torch.float16):
        half = nn.functional.linear(x, torch.ones(4, 4, device="sim"))
        return [half.dtype, half.exp().dtype, (half + x).dtype, half.sum().dtype]


def test_autocast_has_cuda_s_lists(sim):
    half, full = torch.float16, torch.float32
    assert sim.one(_autocast_dtypes) == [half, full, full, full]


def _draws(device: str) -> list[Tensor]:
    torch.manual_seed(3)
    first = torch.randn(50, device=device)
    torch.manual_seed(4)  # what was drawn before is drawn, though no job has run
    x = torch.ones(50, device=device)
    dropped = nn.functional.dropout(x, 0.5)
    other = torch.randint(0, 1000, (50,), device=device)
    own = torch.Generator(device).manual_seed(5)
    return [t.cpu() for t in (first, dropped, other, torch.rand(7, generator=own, device=device))]


def test_random_numbers_are_those_of_the_call(sim):
    here = sim.one(_draws, "cpu")
    for schedule, seed in SCHEDULES:
        assert all(map(torch.equal, here, sim.one(_draws, "sim", schedule=schedule, seed=seed)))


def _attention(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(device)
    embedding = nn.Embedding(11, 16, sparse=True).to(device)
    tokens = torch.arange(10).view(2, 5).to(device)
    layer(embedding(tokens)).square().sum().backward()
    return [
        embedding.weight.grad.coalesce().values().cpu(),
        *(p.grad.cpu() for p in layer.parameters()),
    ]


def test_attention_and_sparse_gradients(sim):
    for here, there in zip(*(sim.one(_attention, d) for d in ("cpu", "sim")), strict=True):
        torch.testing.assert_close(here, there)


def _op_by_op() -> Any:
    from tests.simulated.device import without_meta

    _trained("sim", "AdamW", {"fused": True}, True)
    _attention("sim")
    return dict(without_meta())


def test_no_op_of_a_training_step_runs_early_for_want_of_a_shape(sim):
    assert sim.one(_op_by_op, group="fresh") == {}


def _checkpoint(path: str) -> Any:
    model = _net().to("sim:1")
    torch.save(model.state_dict(), path)
    here = torch.load(path, map_location="cpu")
    there = torch.load(path, map_location="sim:2")
    same = all(torch.equal(here[k], v.cpu()) for k, v in model.state_dict().items())
    return same, {str(v.device) for v in there.values()}


def test_tensors_are_saved_and_loaded_on_another_device(sim, tmp_path):
    assert sim.one(_checkpoint, str(tmp_path / "x.pt")) == (True, {"sim:2"})

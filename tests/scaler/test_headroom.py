"""The headroom schedule: its rule on plain numbers, what it saves, what it sees of gradients."""

from __future__ import annotations

import io
import math
import pickle
import struct
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distamp import DistGradScaler
from distamp.errors import SettingError
from distamp.gradients import largest_magnitude
from distamp.scaler import DynamicSchedule, HeadroomSchedule, ScaleState, Schedule, local_pass
from tests.collectives import count_collectives
from tests.ranks import RankPool
from tests.scaler.steps import INF, NAN, backward, cpu_scaler, iteration, sgd, torch_scaler
from tests.scaler.test_deferred import _as_accelerator

CPU = torch.device("cpu")
FP16_MAX = 65504.0


def bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def value_of(log: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", log))[0])


@dataclass
class Rule:
    """The rule on Python's integers, one line for each sentence of its documentation."""

    schedule: HeadroomSchedule
    scale: int
    level: int = 0
    known: int = 0
    debt: int = 0
    run: int = 0
    learned: bool = False
    unit: int = field(default=2**23, init=False)

    def after(self, overflow: bool, largest: float) -> float:
        s = self.schedule
        growth = max(1, round(math.log2(s.growth_factor) * self.unit / s.growth_interval))
        backoff = round(-math.log2(s.backoff_factor) * self.unit)
        low, high = bits(s.min_scale), bits(s.max_scale)
        if overflow:
            charged = 0 if self.run == 0 else backoff // 4
            if self.learned and self.run < 2 * s.growth_interval:
                charged *= 2
            moved = max(low, self.scale - backoff)
            self.debt += max(0, self.scale - moved - charged)
            self.scale, self.run, self.learned = moved, 0, True
            return value_of(moved)
        moved = self.scale
        if 0 < largest < INF:
            self.known += 1
            step = bits(largest) - self.scale - self.level
            step //= min(self.known, s.level_memory)
            self.level += step
            moved -= step // 2 if self.known > 1 else 0
        if self.debt:
            moved += min(self.debt, growth)
            self.debt = max(0, self.debt - growth)
        elif self.learned:
            charge = backoff // 4
            moved += min(growth, 2 * charge * self.run // (s.patience * s.growth_interval) ** 2)
        else:
            moved += growth
        self.run += 1
        self.scale = min(high, max(low, moved))
        return value_of(self.scale)


def start(schedule: Schedule, scale: float = 65536.0, device: torch.device = CPU) -> ScaleState:
    return ScaleState.initial(
        scale, 0, schedule.initial_hysteresis, device, schedule.initial_memory
    )


def follow(
    schedule: Schedule, history: list[tuple[bool, float]], device: torch.device = CPU
) -> list[float]:
    """The scale after each iteration of ``(overflow, largest scaled gradient)``."""
    state, seen = start(schedule, device=device), []
    for overflow, largest in history:
        found = torch.full((), float(overflow), device=device)
        state = schedule.next_state(state, found, torch.full((), largest, device=device))
        seen.append(state.scale)
    return [scale.item() for scale in seen]


iterations = st.tuples(
    st.sampled_from([False, False, False, True]),
    st.floats(2.0**-20, 2.0**60, width=32) | st.sampled_from([0.0, INF]),
)
histories = st.lists(iterations, min_size=1, max_size=60)


@given(histories, st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_the_rule_is_its_description_on_plain_integers(history, interval, patience, memory):
    schedule = HeadroomSchedule(
        growth_interval=interval, patience=patience, level_memory=memory, max_scale=2.0**40
    )
    rule = Rule(schedule, bits(65536.0))
    assert follow(schedule, history) == [rule.after(*each) for each in history]


@given(histories)
@settings(max_examples=10, deadline=None)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_comes_to_the_same_bits(history):
    schedule = HeadroomSchedule(growth_interval=3)
    assert follow(schedule, history, torch.device("cuda")) == follow(schedule, history)


def test_next_state_leaves_its_state_as_it_was_and_keeps_shapes_and_dtypes():
    schedule = HeadroomSchedule(growth_interval=2)
    state = start(schedule)
    for overflow in (False, True, False):
        before = [t.clone() for t in vars(state).values()]
        new = schedule.next_state(state, torch.tensor(float(overflow)), torch.tensor(1000.0))
        assert all(torch.equal(a, b) for a, b in zip(before, vars(state).values(), strict=True))
        for old, now in zip(vars(state).values(), vars(new).values(), strict=True):
            assert (old.shape, old.dtype) == (now.shape, now.dtype)
        state = new


# -- what it saves ---------------------------------------------------------------------------------


def train(
    schedule: Schedule, sizes: list[float], scale: float = 65536.0, watched: float = 1.0
) -> tuple[list[int], list[float]]:
    """Overflows and the scales of taken steps, for gradients of these unscaled sizes.

    What overflows is ``sizes``; what the schedule sees is ``watched`` times that.
    """
    state, overflows, scales = start(schedule, scale), [], []
    for step, size in enumerate(sizes):
        scaled = state.scale.item() * size
        overflow = scaled > FP16_MAX
        if overflow:
            overflows.append(step)
        else:
            scales.append(state.scale.item())
        largest = torch.tensor(INF if overflow else scaled * watched)
        state = schedule.next_state(state, torch.tensor(float(overflow)), largest)
    return overflows, scales


def noisy(steps: int, level: float = 0.1, octaves: float = 0.25) -> list[float]:
    noise = torch.randn(steps, generator=torch.Generator().manual_seed(0))
    return (level * 2.0 ** (octaves * noise)).tolist()


def harmonic_mean(scales: list[float]) -> float:
    return len(scales) / sum(1 / scale for scale in scales)


@pytest.mark.parametrize("watched", [1.0, 8.0, 0.01])
def test_an_eighth_of_torchs_overflows_at_no_lower_scale(watched):
    """Also where the largest gradient is not the one that overflows (activations overflow)."""
    sizes = noisy(2000)
    theirs, their_scales = train(DynamicSchedule(growth_interval=20), sizes)
    ours, our_scales = train(HeadroomSchedule(growth_interval=20), sizes, watched=watched)
    assert len(ours) <= len(theirs) / 8
    assert harmonic_mean(our_scales) >= harmonic_mean(their_scales)


def test_shrinking_gradients_take_the_scale_up_with_no_overflow():
    sizes = [0.5] * 5 + [0.5 / 2.0 ** (step / 20) for step in range(200)]
    schedule = HeadroomSchedule(growth_interval=10_000)
    overflows, scales = train(schedule, sizes)
    assert overflows == []
    # Shrunk by 2**10, seen by a mean that lags by 64 steps, followed by half.
    assert 2.0**3 < scales[-1] / scales[0] < 2.0**5


def test_growing_gradients_take_the_scale_down_before_they_overflow():
    sizes = [0.1] * 5 + [0.1 * 2.0 ** (step / 200) for step in range(1000)]
    ours, scales = train(HeadroomSchedule(growth_interval=10_000), sizes)
    theirs, _ = train(DynamicSchedule(growth_interval=10_000), sizes)
    assert scales[700] < scales[0] / 2
    assert len(ours) < len(theirs)


def test_it_grows_as_torchs_rule_until_the_first_overflow():
    history = [(False, 100.0)] + [(False, 0.0)] * 30
    scales = follow(HeadroomSchedule(growth_interval=10), history)
    assert scales[9::10] == pytest.approx([2.0**17, 2.0**18, 2.0**19], rel=1e-5)


def test_overflows_in_a_row_back_off_in_full_and_are_paid_back():
    schedule = HeadroomSchedule(growth_interval=10, patience=1000)
    history = [(False, 0.0)] + [(True, INF)] * 4 + [(False, 0.0)] * 60
    scales = follow(schedule, history)
    assert scales[4] == pytest.approx(scales[0] / 16)
    # A quarter of the first back-off stays charged.
    assert scales[-1] == pytest.approx(scales[0] * 2**-0.25, rel=0.001)


def test_the_scale_stays_within_its_bounds_and_owes_nothing_beyond_them():
    schedule = HeadroomSchedule(growth_interval=1, min_scale=2.0**10, max_scale=2.0**20)
    scales = follow(schedule, [(False, 0.0)] + [(True, INF)] * 50 + [(False, 0.0)] * 50)
    assert (min(scales), scales[50]) == (2.0**10, 2.0**10)
    # Paid back, and no more: what is left to win is only probed.
    assert scales[0] * 0.8 < scales[60] < scales[0]
    assert max(follow(schedule, [(False, 0.0)] * 50)) == 2.0**20


@pytest.mark.parametrize("largest", [0.0, INF, None])
def test_what_is_not_known_moves_no_level(largest):
    schedule = HeadroomSchedule(growth_interval=1000)
    state = schedule.next_state(start(schedule), torch.zeros(()), torch.tensor(100.0))
    given = None if largest is None else torch.tensor(largest)
    after = schedule.next_state(state, torch.zeros(()), given)
    assert state.memory is not None
    assert after.memory is not None
    assert torch.equal(after.memory[:2], state.memory[:2])


@pytest.mark.parametrize("name", ["patience", "level_memory"])
@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_settings_are_validated(name, wrong):
    with pytest.raises(SettingError, match=name):
        HeadroomSchedule(**{name: wrong})


# -- what it sees ----------------------------------------------------------------------------------


def reference_largest(tensors: list[Tensor]) -> float:
    return max((float(t.double().abs().max()) for t in tensors if t.numel()), default=0.0)


@pytest.mark.parametrize("on_device", [False, True])
def test_the_largest_magnitude_is_that_of_float64(on_device):
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(7, 5, generator=generator).to(dtype) * size
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for size in (1e-3, 1.0, 300.0)
    ]
    tensors += [torch.empty(0), torch.tensor(-2000.0)]
    with mock.patch("distamp.host.is_host", return_value=not on_device):
        for count in range(len(tensors) + 1):
            found = largest_magnitude(tensors[:count], CPU)
            assert (found.shape, found.dtype) == ((), torch.float32)
            assert found.item() == reference_largest(tensors[:count])
        for bad in (INF, -INF, NAN):
            assert largest_magnitude([*tensors, torch.tensor([1.0, bad])], CPU).item() == INF


def watched_by(scaler: DistGradScaler) -> list[float]:
    """Collect the largest gradients that the schedule is given from now on."""
    seen: list[float] = []
    schedule = scaler._schedule
    original = schedule.next_state

    def listening(state: ScaleState, found: Tensor, largest: Tensor | None = None) -> ScaleState:
        seen.append(NAN if largest is None else largest.item())
        return original(state, found, largest)

    object.__setattr__(schedule, "next_state", listening)
    return seen


def headroom_scaler(**settings: Any) -> DistGradScaler:
    return cpu_scaler(schedule=HeadroomSchedule(**settings))


@pytest.mark.parametrize("way", ["step", "unscale_", "clip", "step_all", "fused", "closure"])
def test_every_way_to_step_tells_the_largest_scaled_gradient(way):
    scaler = headroom_scaler()
    parameter, optimizer = sgd(1.0, 2.0, fused=way == "fused")
    seen = watched_by(scaler)
    if way == "closure":

        def closure() -> float:
            optimizer.zero_grad()
            backward(scaler, parameter, [0.5, -3.0])
            return 0.0

        scaler.step(optimizer, closure)
    else:
        backward(scaler, parameter, [0.5, -3.0])
        if way == "unscale_":
            scaler.unscale_(optimizer)
        if way == "clip":
            scaler.clip_grad_norm_(optimizer, 0.1)
        if way == "step_all":
            scaler.step_all([optimizer])
        else:
            scaler.step(optimizer)
    scaler.update()
    assert seen == [3.0 * 1024]


def test_several_optimizers_are_watched_together_and_each_iteration_anew():
    scaler = headroom_scaler(growth_interval=10**6)
    pairs = [sgd(1.0), sgd(1.0)]
    seen = watched_by(scaler)
    for sizes in ((5.0, 2.0), (1.0, 4.0)):
        for (parameter, optimizer), size in zip(pairs, sizes, strict=True):
            optimizer.zero_grad()
            backward(scaler, parameter, size)
        for _, optimizer in pairs:
            scaler.step(optimizer)
        scaler.update()
    assert seen == pytest.approx([5.0 * 1024, 4.0 * 1024], rel=1e-3)


def test_other_schedules_look_for_nothing():
    scaler = cpu_scaler()
    parameter, optimizer = sgd(1.0)
    with mock.patch.object(local_pass, "largest_magnitude", side_effect=AssertionError):
        iteration(scaler, optimizer, parameter, 1.0)
        with pytest.raises(AssertionError):
            iteration(headroom_scaler(), optimizer, parameter, 1.0)


def two_ranks(sizes: list[list[float]], fused: bool, deferred: bool) -> dict[str, Any]:
    """Gradients of ``sizes[step][rank]``, 1 element each."""
    rank = torch.distributed.get_rank()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = DistGradScaler("cpu", schedule=HeadroomSchedule(growth_interval=3))
    loss = torch.ones((), requires_grad=True)
    scales: list[Tensor] = []
    reads: list[str] = []
    counts = []

    def step(row: list[float]) -> None:
        scaler.scale(loss)
        model.weight.grad = torch.full_like(model.weight, row[rank])
        scaler.step(optimizer)
        scaler.update()
        assert scaler._scale is not None
        scales.append(scaler._scale.clone())

    for number, row in enumerate(sizes):
        with count_collectives() as log:
            if deferred:
                with _as_accelerator(reads):
                    if number == 1:
                        reads.clear()
                    step(row)
            else:
                step(row)
        counts.append(log.count)
    return {"scales": [s.item() for s in scales], "reads": reads, "counts": counts}


SIZES = [[1.0, 30.0], [900.0, 2.0], [INF, 1.0], [3.0, 70.0], [1.0, NAN], [8.0, 8.0], [1.0, 2e4]]


@pytest.mark.parametrize("fused", [False, True])
def test_the_largest_of_all_ranks_decides_in_the_one_message(ranks2: RankPool, fused: bool):
    expected = follow(
        HeadroomSchedule(growth_interval=3),
        [(not all(map(math.isfinite, row)), max(row)) for row in SIZES],
    )
    for result in ranks2.run(two_ranks, SIZES, fused, False):
        assert result["scales"] == expected
        assert result["counts"][1:] == [1] * (len(SIZES) - 1)


def test_on_an_accelerator_it_decides_the_same_and_reads_nothing_on_the_host(ranks2: RankPool):
    immediate = ranks2.run(two_ranks, SIZES, True, False)[0]["scales"]
    for result in ranks2.run(two_ranks, SIZES, True, True):
        assert result["scales"] == immediate
        assert result["reads"] == []


# -- state -----------------------------------------------------------------------------------------

GRADIENTS = [0.5, 40.0, INF, 3.0, 0.0, 700.0, NAN, 1.0, 2.0, INF, 9.0, 5.0]


def scales_of(scaler: Any, gradients: list[float]) -> list[float]:
    parameter, optimizer = sgd(1.0)
    seen = []
    for gradient in gradients:
        iteration(scaler, optimizer, parameter, gradient)
        seen.append(scaler.get_scale())
    return seen


def saved(scaler: DistGradScaler) -> DistGradScaler:
    file = io.BytesIO()
    torch.save((scaler.state_dict(), scaler.schedule_state_dict()), file)
    file.seek(0)
    restored = cpu_scaler(2.0)
    state, schedule_state = torch.load(file, weights_only=True)
    restored.load_schedule_state_dict(schedule_state)
    restored.load_state_dict(state)
    return restored


def saved_into_one_in_use(scaler: DistGradScaler) -> DistGradScaler:
    restored = cpu_scaler(2.0)
    scales_of(restored, [1.0, 2.0])
    restored.load_schedule_state_dict(scaler.schedule_state_dict())
    restored.load_state_dict(scaler.state_dict())
    return restored


def pickled(scaler: DistGradScaler) -> DistGradScaler:
    restored: DistGradScaler = pickle.loads(pickle.dumps(scaler))
    return restored


@pytest.mark.parametrize("way", [saved, saved_into_one_in_use, pickled])
@pytest.mark.parametrize("stop", [0, 1, 3, 8])
def test_a_resumed_run_decides_the_same(way, stop):
    through = scales_of(headroom_scaler(growth_interval=2), GRADIENTS)
    scaler = headroom_scaler(growth_interval=2)
    before = scales_of(scaler, GRADIENTS[:stop])
    assert before + scales_of(way(scaler), GRADIENTS[stop:]) == through


def test_torchs_scaler_loads_its_state_and_goes_on():
    scaler = headroom_scaler(growth_interval=3)
    scales_of(scaler, GRADIENTS)
    state = scaler.state_dict()
    theirs = torch_scaler()
    theirs.load_state_dict(state)
    assert theirs.get_scale() == scaler.get_scale()
    # Its count of clean iterations still reaches its interval.
    assert max(scales_of(theirs, [0.0] * 3)) == 2 * scaler.get_scale()
    assert scaler.schedule_state_dict()["version"] == 1


def test_it_loads_torchs_state_and_starts_to_learn():
    theirs = torch_scaler(growth_interval=7)
    scales_of(theirs, [1.0, 1.0])
    ours = headroom_scaler()
    ours.load_state_dict(theirs.state_dict())
    assert (ours.get_scale(), ours.get_growth_interval()) == (1024.0, 7)
    assert scales_of(ours, [1.0])[0] == pytest.approx(1024 * 2 ** (1 / 7), rel=0.05)


def test_a_memory_of_another_length_is_refused():
    state = {**headroom_scaler().schedule_state_dict(), "memory": [1, 2]}
    with pytest.raises(SettingError, match=r"memory \[1, 2\] .* remembers 5 numbers"):
        cpu_scaler().load_schedule_state_dict(state)


def test_the_launchers_flag_gives_the_scaler_this_schedule():
    config = pytest.importorskip("launch.command_line", reason="needs the extra train")
    from launch.levels import trial

    flags = ["--precision", "fp16", "--schedule", "headroom", "--growth-interval", "7"]
    scaler = trial(config.parse(flags, quiet=True), CPU).scaler
    assert scaler._schedule == HeadroomSchedule(growth_interval=7)

"""The scaler and masters on simulated devices of one process, beside the CPU.

Each job is run on the CPU and, under every schedule, on the device. A sample of the scaler's cells
is compared to the bit; ``python -m tests.simulated.long_run`` runs all of them.
"""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distamp import DistGradScaler, host
from distamp.scaler import MasterParameters
from tests.scaler.masters import half_mlp
from tests.scaler.steps import INF
from tests.scaler.test_optimizers import momentum_after_skips
from tests.simulated.pools import under_schedules
from tests.simulated.scaler_cells import EXCEPTIONS, FOUR_RANKS, LAYOUTS, Pair, program_of, sample


@pytest.mark.parametrize(
    "layout", [each for each in LAYOUTS if each not in (*EXCEPTIONS, *FOUR_RANKS)]
)
def test_a_sample_of_cells_is_as_on_the_cpu(sim2, ranks2, layout):
    program = program_of(sample(layout, 1), 2)
    schedule = [("late", 0), ("random", 7)][list(LAYOUTS).index(layout) % 2]
    wrong = Pair(ranks2, sim2).wrong(program, *schedule)
    assert not wrong, "\n\n".join(wrong)  # pytest shortens a list to a line


# -- jobs ------------------------------------------------------------------------------------------


class Job:
    """A model, its optimizer and a scaler, with masters where the model is of float16."""

    def __init__(self, device: str, model: nn.Module, optimizer: Any, **settings: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.masters = None
        if next(model.parameters()).dtype is torch.float16:
            self.masters = MasterParameters(optimizer)
            settings["fp16_grads"] = "master"
        kind = torch.device(device).type
        self.scaler = DistGradScaler(kind, init_scale=64.0, growth_interval=2, **settings)

    def train(self, steps: range = range(6), clip: bool = False) -> None:
        """Every third step overflows."""
        first = next(self.model.parameters())
        for step in steps:
            self.optimizer.zero_grad()
            x = torch.full((2, first.shape[1]), 1.0 + step).to(first.device, first.dtype)
            loss = self.model(x).float().square().mean() * (INF if step % 3 == 1 else 1.0)
            self.scaler.scale(loss).backward()
            if clip:
                self.scaler.clip_grad_norm_(self.optimizer, 0.5)
            self.scaler.step(self.optimizer)
            assert self.scaler.stepped(self.optimizer) is (step % 3 != 1)
            self.scaler.update()

    def left(self) -> Any:
        counts = self.scaler.step_counts(self.optimizer)
        values = [p.detach().cpu() for p in self.model.parameters()]
        return values, self.scaler.get_scale(), (counts.taken, counts.skipped)


def _made(device: str, masters: bool = False, **how: Any) -> Job:
    model = (half_mlp() if masters else nn.Sequential(nn.Linear(4, 4), nn.Tanh())).to(device)
    return Job(device, model, torch.optim.AdamW(model.parameters(), lr=0.1, **how))


def offload(device: str, kind: str, unscales: bool, both: bool) -> Any:
    """A layer on the device and one on the CPU; one optimizer of both, or of the CPU's alone."""
    here, there = nn.Linear(4, 4).to(device), nn.Linear(4, 4)
    parameters = [*there.parameters(), *(here.parameters() if both else ())]
    settings = {"SGD": {"foreach": False}, "SGD fused": {"fused": True, "momentum": 0.9}}
    cls = torch.optim.SGD if "SGD" in kind else torch.optim.AdamW
    optimizer = cls(parameters, lr=0.1, **settings.get(kind, {"fused": True}))
    scaler = DistGradScaler(device, init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        x = here(torch.ones(2, 4, device=device)) * (INF if step == 1 else 1.0)
        scaler.scale(there(x.cpu()).to(device).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    counts = scaler.step_counts(optimizer)
    return [p.detach().cpu() for p in parameters], (counts.taken, counts.skipped)


def steps_on_another_stream(device: str, how: str) -> Any:
    """Backward on one stream and the step on another, while the first asks for memory anew."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    optimizers = [
        torch.optim.AdamW(net[0].parameters(), lr=0.05, **{how: True}),
        torch.optim.SGD(net[2].parameters(), lr=0.05, momentum=0.9, **{how: True}),
    ]
    scaler = DistGradScaler(device, init_scale=64.0, growth_interval=2)
    streams = [] if device == "cpu" else [torch.accelerator.current_stream(), torch.Stream(device)]

    def change(first: int) -> None:
        for size in (1,) * 8 + (32, 64, 128, 256):
            torch.full((size,), 777.0, device=device)
        if streams:
            streams[1 - first].wait_stream(streams[first])

    for step in range(6):
        x = torch.full((2, 8), 1.0 + step).to(device)
        scaler.scale(net(x).square().mean() * (INF if step == 3 else 1.0)).backward()
        change(0)
        with streams[1] if streams else contextlib.nullcontext():
            scaler.clip_grad_norm_(optimizers[1], 0.3)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        change(1)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
    return [p.detach().cpu() for p in net.parameters()], scaler.get_scale()


def moved(device: str, how: str) -> Any:
    """Three steps on one device and three on another, the optimizer's state with them."""
    job = _made(device, **{how: True})
    job.train(range(3))
    job.model.to("sim:2" if device == "sim" else device)
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    job.train(range(3, 6), clip=True)
    return job.left()


def clipped_of_several_kinds(device: str) -> Any:
    """Gradients of two dtypes on two devices, and one that is missing; and no wait for them."""
    from tests.simulated.device import refuse

    devices = ["sim:0", "sim:1"] if device == "sim" else [device] * 2
    layers = [nn.Linear(4, 4).to(each) for each in devices]
    layers += [nn.Linear(4, 4).bfloat16().to(devices[0]), nn.Linear(4, 4).to(devices[0])]
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    scaler = DistGradScaler(device, init_scale=64.0)
    inputs = [torch.ones(2, 4, dtype=p.dtype, device=p.device) for p in parameters[::2]]
    for number in range(3):
        # The first clip looks at what there is.
        with refuse() if number else contextlib.nullcontext():
            used = zip(layers[:3], inputs, strict=False)
            losses = [layer(x).float().square().sum().to(devices[0]) for layer, x in used]
            scaler.scale(torch.stack(losses).sum()).backward()
            norm = scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return norm, [p.detach().cpu() for p in parameters]


def masters_in_data_parallel(device: str) -> Any:
    """A float16 model whose replicas lie on two devices."""
    net = half_mlp().to(device)
    job = Job(device, net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))
    if device == "sim":
        job.model = nn.DataParallel(net, [0, 1])
    job.train()
    return job.left()


class _Tape(TorchDispatchMode):
    """Remembers ops and their very tensors, and runs them again: as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        detached = tree_map_only(Tensor, Tensor.detach, (args, result))
        self._calls.append((func, detached[0], kwargs or {}, detached[1]))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def a_recorded_backward_pass(device: str) -> Any:
    """Forward, scaling and backward recorded once and replayed; the step is not part of it."""
    job, tape = _made(device, fused=True), _Tape()
    x, factor = torch.ones(2, 4, device=device), torch.ones((), device=device)
    scales = []

    def backward() -> None:
        job.scaler.scale(job.model(x).square().mean() * factor).backward()

    backward()
    job.optimizer.zero_grad(set_to_none=False)
    if device == "sim":
        with tape:
            backward()
        job.optimizer.zero_grad(set_to_none=False)
    for step in range(7):
        x.fill_(1.0 + step)
        factor.fill_(INF if step == 3 else 1.0)
        tape.replay() if device == "sim" else backward()
        job.scaler.step(job.optimizer)
        job.scaler.update(16.0 if step == 4 else None)
        job.optimizer.zero_grad(set_to_none=False)
        scales.append(job.scaler.get_scale())
    return job.left(), scales


def a_recorded_step(device: str) -> Any:
    """Forward, backward, a whole fused step and the update recorded once and replayed."""
    job, tape = _made(device, fused=True), _Tape()
    x, factor = torch.ones(2, 4, device=device), torch.ones((), device=device)
    scales = []

    def iteration() -> None:
        job.scaler.scale(job.model(x).square().mean() * factor).backward()
        job.scaler.step(job.optimizer)
        job.scaler.update()

    for step in range(8):
        x.fill_(1.0 + step)
        factor.fill_(INF if step == 5 else 1.0)
        if device == "cpu" or step < 2:
            iteration()
        elif step == 2:
            with tape, mock.patch.object(host, "is_captured", return_value=True):
                iteration()
        else:
            tape.replay()
        job.optimizer.zero_grad(set_to_none=False)
        scales.append(job.scaler.get_scale())
    return [p.detach().cpu() for p in job.model.parameters()], scales


KINDS = ("SGD", "SGD fused", "AdamW fused")
JOBS: dict[Callable[..., Any], list[tuple[Any, ...]]] = {
    offload: list(zip(KINDS, (True, False, True), (True, True, False), strict=True)),
    steps_on_another_stream: [("fused",), ("foreach",)],
    moved: [("fused",), ("foreach",)],
    clipped_of_several_kinds: [()],
    momentum_after_skips: [()],
    masters_in_data_parallel: [()],
    a_recorded_backward_pass: [()],
    a_recorded_step: [()],
}
CASES = [(job, arguments) for job, every in JOBS.items() for arguments in every]
# The norm of a gradient is summed in another order on the device.
TOLERANCE = {
    masters_in_data_parallel: (1e-2, 1e-3),
}


def _run(job: Callable[..., Any], device: str, *arguments: Any) -> Any:
    torch.manual_seed(0)
    return job(device, *arguments)


@pytest.mark.parametrize(
    ("job", "arguments", "schedule", "seed"),
    under_schedules(CASES),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_job_is_done_as_on_the_cpu(sim, job, arguments, schedule, seed):
    expected = sim.one(_run, job, "cpu", *arguments)
    found = sim.one(_run, job, "sim", *arguments, schedule=schedule, seed=seed)
    relative, absolute = TOLERANCE.get(job, (1e-5, 1e-6))
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)


def _goes_on(devices: tuple[str, str], masters: bool) -> Any:
    """Train, save, go on; and go on from what was saved, on another device."""
    first, second = (_made(device, masters, fused=True) for device in devices)
    first.train(range(3))
    for part in ("model", "optimizer", "scaler", *(["masters"] if masters else [])):
        getattr(second, part).load_state_dict(getattr(first, part).state_dict())
    ends = []
    for job in (first, second):
        job.train(range(3, 6))
        ends.append(job.left())
    return all(map(torch.equal, ends[0][0], ends[1][0])), ends[0][1] == ends[1][1]


@pytest.mark.parametrize("masters", [False, True], ids=["float32", "masters"])
@pytest.mark.parametrize("devices", [("sim:0", "sim:2"), ("sim:1", "cpu"), ("cpu", "sim:3")])
def test_a_run_goes_on_from_a_checkpoint_of_another_device(sim, devices, masters):
    assert sim.one(_goes_on, devices, masters) == (True, True)


def _waits_for_nothing(group: bool) -> float:
    """Fused steps, one of which overflows, with every kind of host sync refused but an event."""
    from tests.simulated.device import ALL_SYNCS, refuse

    device = f"sim:{torch.accelerator.current_device_index()}"
    model: nn.Module = nn.Linear(8, 4).to(device)
    if group:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = DistGradScaler("sim", init_scale=64.0)
    x = torch.ones(2, 8, device=device)
    # DDP itself reads on the host when it puts its buckets in order, in the second step.
    factors = [torch.full((), f, device=device) for f in (1.0, 1.0, 1.0, INF, 1.0)]
    kinds = [kind for kind in ALL_SYNCS if not (group and kind == "event")]
    for number, factor in enumerate(factors):
        with refuse(*kinds if number > 1 else ("no_meta",)):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_a_fused_step_waits_for_nothing_and_with_a_group_for_one_event(sim, sim2, schedule):
    assert sim.one(_waits_for_nothing, False, schedule=schedule) == 32.0
    assert sim2.run(_waits_for_nothing, True, schedule=schedule) == [32.0] * 2

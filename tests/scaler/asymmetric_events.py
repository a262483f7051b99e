"""What each event of an asymmetric program does on this rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distamp import DistGradScaler
from distamp.scaler import MasterParameters
from tests.place import here
from tests.ranks import subgroup
from tests.scaler.asymmetric_programs import WORLD, Event
from tests.scaler.asymmetric_reference import gradient_of

if TYPE_CHECKING:
    from tests.scaler.asymmetric_runner import Runner

__all__ = ["BROKEN", "GO_ON", "NO_MEMORY", "run"]

INF = float("inf")
NO_MEMORY = "no memory is left on this device"
BROKEN = "this optimizer is broken"
# Errors after which all ranks go on, with update() and the next batch.
GO_ON = ("out of memory", "optimizer raises")


def run(runner: Runner, event: Event) -> None:
    """Have one iteration with this event in it."""
    _EVENTS[event.what](runner, event)


def _plain(runner: Runner, event: Event) -> None:
    runner.plain(event)


def _chosen(runner: Runner, event: Event) -> int:
    return event.optimizer % len(runner.slots)


# -- what is in the gradients ----------------------------------------------------------------------


def _inf(runner: Runner, event: Event) -> None:
    for index in runner.every():
        here = runner.rank == event.rank and index == _chosen(runner, event)
        runner.backward(index, INF if here else 1.0)
    runner.step(runner.every(), event)
    runner.scaler.update()


def _thrown_away(runner: Runner, event: Event) -> None:
    for index in runner.every():
        runner.backward(index)
    for slot in runner.slots:
        slot.inner.zero_grad(set_to_none=bool(event.flavour % 2))
    runner.plain(event)


def _late(runner: Runner, event: Event) -> None:
    for index in runner.every():
        runner.backward(index)
    for slot in runner.slots:
        runner.scaler.unscale_(slot.inner)
    for index in runner.every():
        runner.backward(index)
    for slot in runner.slots:
        runner.scaler.step(slot.inner)
    runner.scaler.update()


def _between(runner: Runner, event: Event) -> None:
    for index in runner.every():
        here = index == 0 and event.flavour % 2 == 0 and runner.rank == event.rank
        runner.backward(index, INF if here else 1.0)
    runner.scaler.step(runner.slots[0].inner)
    runner.scaler.update()
    runner.step(runner.every()[1:], event)
    runner.scaler.update()


# -- who calls what --------------------------------------------------------------------------------


def _log(runner: Runner, event: Event) -> None:
    for index in runner.every():
        runner.backward(index)
    for index in runner.every():
        if runner.rank == event.rank and (event.flavour % 2 or index == 0):
            runner.scaler.unscale_(runner.slots[index].inner)
        runner.scaler.step(runner.through(index, event))
    runner.scaler.update()


def _some(runner: Runner, event: Event) -> None:
    moving = runner.every()[: 1 + event.optimizer % (len(runner.slots) - 1)]
    for index in runner.every():
        runner.backward(index)
    runner.scaler.step_all([runner.through(index, event) for index in moving])
    runner.scaler.update()


def _mistake(runner: Runner, event: Event) -> None:
    slot = runner.slots[_chosen(runner, event)]
    for index in runner.every():
        runner.backward(index)
    if runner.rank == event.rank:
        if event.flavour % 2:
            runner.scaler.clip_grad_norm_(slot.inner, -1.0)
        else:
            runner.scaler.step(object())
    for each in runner.slots:
        runner.scaler.step(each.inner)
    runner.scaler.update()


class _RaiseAt(TorchDispatchMode):
    """Raises where a device would: at an op of one of these names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names, self.raised = names, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.raised and any(name in func.name() for name in self.names):
            self.raised = True
            raise torch.OutOfMemoryError(NO_MEMORY)
        return func(*args, **(kwargs or {}))


# The pass over gradients, whoever writes it, and the norm of a clip.
_PASS = ("_amp_foreach_non_finite_check_and_unscale_", "_foreach_norm", "aminmax")


def _out_of_memory(runner: Runner, event: Event) -> None:
    for index in runner.every():
        runner.backward(index)
    if runner.rank != event.rank:
        runner.step(runner.every(), event)
        return
    names = _PASS[1:] if event.how.startswith("clip") and event.flavour % 2 else _PASS
    with _RaiseAt(names) as mode:
        try:
            runner.step(runner.every(), event)
        finally:
            if not mode.raised:
                runner.seen.wrong.append("nothing ran out of memory: the test missed")


def _optimizer_raises(runner: Runner, event: Event) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError(BROKEN)

    for index in runner.every():
        runner.backward(index)
    handle = runner.slots[0].inner.register_step_pre_hook(broken)
    try:
        runner.step(runner.every(), event)
    finally:
        handle.remove()


# -- optimizers and parameters that come and go ----------------------------------------------------


def _replace(runner: Runner, event: Event) -> None:
    runner.plain(event)
    slot = runner.slots[_chosen(runner, event)]
    old = slot.parameters[0]
    values = [torch.ones(1, device=here()) for _ in range(50)]
    new = nn.Parameter(old.detach().clone())
    address = id(old)
    (place,) = (i for i, p in enumerate(slot.inner.param_groups[0]["params"]) if p is old)
    slot.inner.param_groups[0]["params"][place] = slot.parameters[0] = new
    slot.inner.state.clear()
    del old
    made = [nn.Parameter(value) for value in values]
    runner.kept.append(made)
    at_address = [p for p in made if id(p) == address]
    parameter = at_address[0] if at_address else made[0]
    from tests.scaler.asymmetric_runner import Slot

    runner.slots.append(Slot(runner.setting, [parameter]))


def _beside(runner: Runner, event: Event, optimizer: Any, parameter: Tensor) -> None:
    """A whole iteration with one more optimizer, over a parameter that is 1."""
    for index in runner.every():
        runner.backward(index)
    runner.backward_of(parameter, 0.25)
    runner.step(runner.every(), event)
    runner.scaler.step(optimizer)
    runner.scaler.update()
    if parameter.item() != 0.75:
        runner.seen.wrong.append(f"the optimizer beside moved to {parameter.item()}, not 0.75")


def _born(runner: Runner, event: Event) -> None:
    dtype = torch.float16 if runner.setting.masters else torch.float32
    parameter = nn.Parameter(torch.ones(1, dtype=dtype, device=here()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    if runner.setting.masters:
        runner.kept.append(MasterParameters(optimizer))
    _beside(runner, event, optimizer, parameter)


def _overlap(runner: Runner, event: Event) -> None:
    index = _chosen(runner, event)
    slot = runner.slots[index]
    own = slot.parameters[-1 if runner.rank == 1 else 0]
    some = torch.optim.SGD([own], lr=1.0)
    for each in runner.every():
        runner.backward(each)
    runner.step(runner.every(), event)
    slot.inner.zero_grad()
    runner.backward_of(own, gradient_of(runner.number, index))
    if event.flavour % 2:
        runner.scaler.unscale_(some)
    runner.scaler.step(some)
    runner.scaler.update()


# -- beside the training ---------------------------------------------------------------------------


def _probe(runner: Runner, event: Event) -> None:
    if runner.rank == event.rank:
        _run_probe(runner, event)
    runner.plain(event)


def _run_probe(runner: Runner, event: Event) -> None:
    like = runner.slots[_chosen(runner, event)].parameters[0]
    parameter = nn.Parameter(torch.full_like(like, 3.0, dtype=torch.float32))
    optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=False)
    runner.kept.append(optimizer)
    kind = event.flavour % 3
    if kind == 0:
        return  # only made
    # On a machine without CUDA the second is disabled as well; elsewhere it is not asked for.
    device = "cuda" if kind == 2 and not torch.cuda.is_available() else "cpu"
    scaler = DistGradScaler(device, enabled=device == "cuda")
    scaler.scale(parameter.sum() * 0.25).backward()
    given: Any = [parameter] if event.flavour // 3 % 2 else optimizer
    scaler.clip_grad_norm_(given, 1e6)
    scaler.step(optimizer)
    scaler.update()
    scaler.stepped(optimizer)
    if parameter.flatten()[0].item() != 2.75:
        runner.seen.wrong.append(f"the probe moved to {parameter.flatten()[0].item()}, not 2.75")


class _Other:
    """Another trainer of this process: a float16 model, masters and a scaler of its own."""

    def __init__(self) -> None:
        groups = [subgroup([rank]) for rank in range(WORLD)]
        self.parameter = nn.Parameter(torch.full((4,), 1.0, dtype=torch.float16))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.masters = MasterParameters(self.optimizer)
        group = groups[dist.get_rank()]
        self.scaler = DistGradScaler("cpu", fp16_grads="master", process_group=group)

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale((self.parameter.float() * 0.125).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class _InTheMiddle(TorchDispatchMode):
    """Runs ``what`` to its end in another thread, just before some op of this one."""

    def __init__(self, what: Callable[[], None], at: Callable[[int, str], bool]) -> None:
        super().__init__()
        self.what, self.at, self.ops, self.done = what, at, 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ops += 1
        if not self.done and self.at(self.ops, func.name()):
            self.done = True
            thread = threading.Thread(target=self.what)
            thread.start()
            thread.join()
        return func(*args, **(kwargs or {}))


def _thread(runner: Runner, event: Event) -> None:
    other = _Other()
    other.iterate()
    names = ("_foreach_copy_", "_amp_foreach_non_finite_check_and_unscale_", "sub_", "_sgd")
    wanted = names[event.flavour % 6] if event.flavour % 6 < len(names) else None

    def at(op: int, name: str) -> bool:
        return wanted in name if wanted is not None else op == 1 + event.flavour * 3

    with _InTheMiddle(other.iterate, at) as middle:
        runner.plain(event)
    expected = 1.0 - 0.125 * (1 + middle.done)
    if other.parameter[0].item() != expected:
        runner.seen.wrong.append(
            f"the other trainer moved to {other.parameter[0].item()}, not {expected}"
        )


# -- groups ----------------------------------------------------------------------


def _regroup(runner: Runner, event: Event) -> None:
    state = runner.scaler.state_dict()
    old, runner.group = runner.group, runner.new_group()
    dist.destroy_process_group(old)
    if event.what == "restart" and runner.rank == event.rank:
        runner.scaler = runner.new_scaler()
        runner.scaler.load_state_dict(state)
        runner.slots = [
            runner.new_slot(index, runner.in_order(slot)) for index, slot in enumerate(runner.slots)
        ]
        runner.seen.restarted = True
    else:
        runner.scaler.process_group = runner.group
    runner.plain(event)


_EVENTS: dict[str, Callable[[Runner, Event], None]] = {
    "plain": _plain,
    "inf": _inf,
    "thrown away": _thrown_away,
    "late everywhere": _late,
    "between": _between,
    "log": _log,
    "some": _some,
    "mistake": _mistake,
    "out of memory": _out_of_memory,
    "optimizer raises": _optimizer_raises,
    "replace": _replace,
    "born": _born,
    "overlap": _overlap,
    "probe": _probe,
    "thread": _thread,
    "regroup": _regroup,
    "restart": _regroup,
}

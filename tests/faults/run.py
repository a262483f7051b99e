"""Run programs with faults on real ranks, and say where a rank did not do what it should.

After each all ranks are equal and as float64 without the faults, or all ended with an error that
names the cause::

    python -m tests.faults.run FILE DRAWS SEED

prints every program that went wrong; what was run goes to FILE, a line each, and is not run again.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.faults.declared import LOCKSTEP, NO_MEMORY, WORLD, Fault, Program, draw
from tests.ranks import Died, RankError, RankPool
from tests.scaler.matrix.judge import complaints as of_training
from tests.scaler.matrix.programs import Outcome
from tests.scaler.matrix.runner import Runner

CALLS = ("unscale_", "clip_grad_norm_", "step", "update")
# Programs that are sent at once, and those of one line of the file.
CHUNK, PART = 25, 100


class _NoMemory(TorchDispatchMode):
    """Raises where a device would: in the pass over the gradients."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "_amp_foreach_non_finite_check_and_unscale_" in func.name():
            raise torch.OutOfMemoryError(NO_MEMORY)
        return func(*args, **(kwargs or {}))


def _cut() -> None:
    """Shut every connection of this process to another."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(int(name)))
            with one:
                # Of a socket that listens gloo makes an end of the process.
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if one.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    one.shutdown(socket.SHUT_RDWR)


class _Watched:
    """The scaler, whose calls meet the faults."""

    def __init__(self, scaler: Any, call: Callable[..., Any]) -> None:
        self._scaler, self._call = scaler, call

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._scaler, name)
        return functools.partial(self._call, name, method) if name in CALLS else method


class _FaultyRunner(Runner):
    """One rank's part of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.training(), "distamp")
        self.own, self.step = self.scaler, 0
        self.scaler = _Watched(self.own, self.call)
        self.waiting = [fault for fault in program.faults if fault.what != "inf_at"]

    def due(self, here: bool = True, **said: Any) -> Iterator[Fault]:
        """The faults whose time has come, each once."""
        for fault in list(self.waiting):
            mine = not here or fault.rank == self.layout.rank
            if fault.step == self.step and mine and said.items() <= vars(fault).items():
                self.waiting.remove(fault)
                yield fault

    def call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        around: Any = contextlib.nullcontext()
        for fault in self.due(call=name):
            if fault.what == "delay":
                time.sleep(0.05)
            elif fault.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.what == "cut_link":
                _cut()
            elif fault.what == "error_at":
                around = _NoMemory()
            elif fault.what == "leave_out":
                return None
            else:
                args = (args[0], 2 * args[1])
        with around:
            return method(*args, **kwargs)

    def run(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for number, iteration in enumerate(self.program.iterations):
            self.step = number
            try:
                self._before()
                if any(self.due(what="order")):
                    iteration = replace(iteration, reverse=True)
                outcomes.append(self.iterate(number, iteration))
            except Exception as error:
                outcomes.append(Outcome(0, error=(type(error).__name__, str(error))))
            if (raised := outcomes[-1].error) is not None:
                if not re.search(f"{LOCKSTEP}(?!.*lost its peers)|{NO_MEMORY}", ": ".join(raised)):
                    _cut()  # as where its process ends
                break
        return outcomes

    def _before(self) -> None:
        for fault in self.due(what="damage_checkpoint"):
            _load_damaged(self.own, fault.which)
        for fault in self.due(what="scale"):
            self.own.load_state_dict({**self.own.state_dict(), "scale": 2.0**fault.which})
        for fault in self.due(what="regroup", here=False):
            group = dist.new_group(list(range(WORLD)))
            if fault.rank == self.layout.rank:
                state = self.own.state_dict()
                self.own = self.new_scaler()
                self.own.load_state_dict(state)
                self.scaler = _Watched(self.own, self.call)
            self.own.process_group = group


def _load_damaged(scaler: Any, which: int) -> None:
    """Load a state that is damaged in one of five ways: it is refused, and nothing has changed."""
    before = scaler.state_dict()
    file = io.BytesIO()
    torch.save(before, file)
    try:
        if which == 0:
            torch.load(io.BytesIO(file.getvalue()[:-100]))
        damaged: list[dict[str, Any]] = [
            {"scale": float("nan")},
            {"scale": -1.0},
            {"_growth_tracker": "many"},
            {"growth_interval": 0},
        ]
        scaler.load_state_dict({**before, **damaged[which - 1]})
    except (ValueError, TypeError, RuntimeError) as error:
        named = "" if which == 0 else next(iter(damaged[which - 1]))
        if named.strip("_") not in str(error) or scaler.state_dict() != before:
            raise AssertionError(f"{error}: names no {named}, or the state changed") from error
    else:
        raise AssertionError(f"a damaged state was loaded: {which}")


def run_on_rank(programs: Sequence[Program]) -> list[list[Outcome]]:
    """Run each program here; every rank of the pool does the same."""
    return [_FaultyRunner(program).run() for program in programs]


def complaints(program: Program, ranks: Sequence[Any]) -> list[str]:
    """Where a program did not do what it should; empty where it did."""
    alive = {rank: seen for rank, seen in enumerate(ranks) if not isinstance(seen, Died)}
    ending = program.ending()
    if ending is None:
        return of_training(program.training(), ranks)
    fault, (own, others) = ending
    found = []
    for rank, seen in alive.items():
        text = own if rank == fault.rank else others
        last = seen[-1]
        if last.error is None or not re.search(text, ": ".join(last.error)):
            found.append(f"rank {rank} ended with {last.error}, not with {text!r}")
        if not fault.step <= len(seen) - 1 <= fault.step + 1:
            found.append(f"rank {rank} ended in step {len(seen) - 1}")
        # ZeRO and OSS send each parameter from inside of the optimizer's own step.
        sends = program.layout.startswith(("ZeRO", "OSS")) and fault.call == "step"
        if not last.unchanged_by_error and not (sends and program.fatal()):
            found.append(f"rank {rank} stepped although it raised")
    whole = [seen[: fault.step] for seen in alive.values()]
    return found or of_training(replace(program, steps=fault.step).training(), whole)


class Judge:
    """Runs programs on ranks of its own, and says what is wrong with each."""

    def __init__(self) -> None:
        self.pool = RankPool(WORLD, timeout=120.0, group_timeout=10.0)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def wrong(self, programs: Sequence[Program]) -> dict[Program, list[str]]:
        """The programs that went wrong, and how."""
        whole = [program for program in programs if not program.fatal()]
        chunks = [whole[start : start + CHUNK] for start in range(0, len(whole), CHUNK)]
        chunks += [[program] for program in programs if program.fatal()]
        found = {}
        for chunk in chunks:
            for program, wrong in zip(chunk, self._judge(chunk), strict=True):
                if wrong:
                    found[program] = wrong
        return found

    def _judge(self, programs: Sequence[Program]) -> list[list[str]]:
        ending = programs[0].ending() if programs[0].fatal() else None
        dies = [ending[0].rank] if ending is not None and ending[0].what == "kill" else []
        try:
            ranks = self.pool.run(run_on_rank, list(programs), may_die=dies)
        except RankError as error:
            found = [[str(error)]] * len(programs)
        else:
            seen = [
                [r if isinstance(r, Died) else r[i] for r in ranks] for i in range(len(programs))
            ]
            found = [complaints(*each) for each in zip(programs, seen, strict=True)]
        if ending is not None or any(found):
            self.pool.close()
            if len(programs) > 1:
                return [self._judge([program])[0] for program in programs]
        return found


def main() -> int:
    path, draws, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    done = path.read_text().splitlines() if path.exists() else []
    broke = 0
    with Judge() as judge:
        for number in range(draws // PART):
            name = f"{PART} programs of seed {seed + number}"
            if any(line.startswith(f"{name}: ") for line in done):
                continue
            started = time.monotonic()
            wrong = judge.wrong(draw(PART, seed + number))
            broke += len(wrong)
            for program, found in wrong.items():
                print(program, *found, sep="\n    ", flush=True)
            seconds = time.monotonic() - started
            line = f"{name}: {len(wrong)} wrong; {datetime.date.today()}, {seconds:.0f} s"
            print(line, flush=True)
            with path.open("a") as file:
                file.write(f"{line}\n")
    return int(broke > 0)


if __name__ == "__main__":
    sys.exit(main())

"""A persistent pool of real gloo ranks: send a function, get what it returned on every rank.

The processes are forked from a server that has imported torch once, so a pool costs tens of
milliseconds and a call on it costs about one. A rank that raises, dies or hangs ends its pool; the
next call starts a new one, so no test inherits another's state.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.place import device_type

__all__ = ["Died", "RankError", "RankPool", "logged", "mesh", "serve", "subgroup"]

# What a rank is likely to need; the server imports it once and every rank inherits it.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch._meta_registrations",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.testing",
    "tests.ranks",
    # Most of what the launcher imports; it is no part of the library, and may lack its extra.
    "launch.checkpoint",
    "launch.metrics",
]
# A call that takes longer has hung: nothing here is within an order of magnitude of it.
TIMEOUT_S = 60.0
# How long the other ranks may go on once one has failed, before their stacks are taken.
GRACE_S = 2.0


class RankError(Exception):
    """A call failed on at least one rank; the message holds what each rank was doing."""


@dataclass(frozen=True)
class Died:
    """Stands in the results of ``run(..., may_die=...)`` for a rank that did not come back."""

    rank: int
    exitcode: int | None


@dataclass
class _Worker:
    """The pool's side of one rank."""

    process: Any
    connection: multiprocessing.connection.Connection
    folder: Path

    def tail(self, file: str) -> str:
        """The end of what the rank wrote to a file: its ``"stack"`` or ``"output"``."""
        with contextlib.suppress(OSError):
            return (self.folder / file).read_text(errors="replace")[-6000:].strip()
        return ""

    def said(self, answer: Any) -> str:
        """What it did, for an error's message."""
        if isinstance(answer, _Success):
            return "returned"
        text = f"was still running:\n{self.tail('stack')}"
        if isinstance(answer, _Failure):
            text = f"raised:\n{answer.text}"
        elif isinstance(answer, Died):
            text = f"died with exit code {answer.exitcode}\n{self.tail('stack')}".rstrip()
        output = self.tail("output")
        return f"{text}\nand printed:\n{output}" if output else text


class RankPool:
    """``world_size`` processes with one gloo group among them, waiting for functions to run.

    Unlike ``torch.multiprocessing.spawn`` it outlives the call, and unlike torch's
    ``MultiProcContinuousTest`` it survives a failed one.

    Args:
        world_size: number of ranks.
        timeout: seconds after which a call counts as hung.
        group_timeout: the process group's own timeout, in seconds.
        backend: of the process group.
        target: what runs in each process: `serve`, or something that prepares the process for it.
        method: how multiprocessing starts the processes.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = TIMEOUT_S,
        group_timeout: float = 600.0,
        backend: str = "gloo",
        target: Callable[..., None] | None = None,
        method: str = "forkserver",
    ) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._group_timeout = group_timeout
        self._backend = backend
        self._target = target or serve
        self._method = method
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._store: dist.TCPStore | None = None
        self._generation = itertools.count()
        self._group: str | None = None

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Fork the ranks. ``run`` does this when needed."""
        context: Any = multiprocessing.get_context(self._method)
        if self._method == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        # The pool holds the store, as an elastic agent would: no rank's death takes it away.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        for rank in range(self.world_size):
            here, there = multiprocessing.Pipe()
            folder = self._folder / str(rank)
            folder.mkdir()
            process = context.Process(
                target=self._target,
                args=(
                    there,
                    rank,
                    self.world_size,
                    self._store.port,
                    self._group_timeout,
                    folder,
                    self._backend,
                ),
                name=f"rank-{rank}-of-{self.world_size}",
                daemon=True,
            )
            # The forkserver takes variables over at its first start.
            variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            with _light_main(), mock.patch.dict(os.environ, variables):
                process.start()
            there.close()
            self._workers.append(_Worker(process, here, folder))

    def close(self) -> None:
        """Kill the ranks and forget them; the next ``run`` starts new ones."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.process.join(10)
            worker.process.close()
            worker.connection.close()
        self._workers.clear()
        self._group = None
        self._store = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """Send SIGKILL to all ranks, in the middle of a call."""
        for worker in self._workers:
            os.kill(worker.process.pid, signal.SIGKILL)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one call -----------------------------------------------------------------------------

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        group: str = "default",
        may_die: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank.

        Args:
            function: importable by name (module level). It finds its rank with ``dist.get_rank()``,
                or in the environment variable ``RANK`` where there is no group.
            args: picklable arguments, the same on every rank.
            timeout: seconds; the pool's if None.
            group: ``"default"`` keeps the group of the last call, ``"fresh"`` makes a new one (in
                new processes), ``"none"`` runs with torch.distributed not initialised.
            may_die: ranks whose death is part of the test.
            kwargs: picklable keyword arguments.

        Returns:
            What each rank returned, in order of rank (``Died`` for a rank in ``may_die``).

        Raises:
            RankError: a rank raised, died or hung. The pool is closed.
        """
        wanted = None if group == "none" else self._group or f"group-{next(self._generation)}"
        if group == "fresh":
            wanted = f"group-{next(self._generation)}"
        if self._workers and wanted != self._group:
            # torch keeps what it derived from a mesh, found again by ranks and names, beyond the
            # life of its groups: processes serve one group.
            self.close()
        if not self._workers:
            self.start()
        self._group = wanted
        request = pickle.dumps((self._group, function, args, kwargs))
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # found dead below
                worker.connection.send_bytes(request)
        answers = self._collect(timeout or self.timeout, set(may_die))
        failed = [rank for rank, answer in answers.items() if isinstance(answer, _Failure)]
        dead = [rank for rank, answer in answers.items() if isinstance(answer, Died)]
        missing = [rank for rank in range(self.world_size) if rank not in answers]
        if failed or missing or set(dead) - set(may_die):
            self._fail(function, answers, timeout or self.timeout)
        if dead or any(isinstance(a, _Success) and a.dirty for a in answers.values()):
            self.close()
        return [
            answer.value if isinstance(answer, _Success) else answer
            for _, answer in sorted(answers.items())
        ]

    def _collect(self, timeout: float, may_die: set[int]) -> dict[int, Any]:
        """What ranks answered in time. After a failure the rest have a short grace."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(ready)
                worker = self._workers[rank]
                try:
                    answers[rank] = pickle.loads(worker.connection.recv_bytes())
                except (EOFError, OSError):
                    worker.process.join(10)
                    answers[rank] = Died(rank, worker.process.exitcode)
                if isinstance(answers[rank], _Failure) or (
                    isinstance(answers[rank], Died) and rank not in may_die
                ):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _fail(self, function: Callable[..., Any], answers: dict[int, Any], timeout: float) -> None:
        """Take the stacks of whoever is still running, end the pool, raise."""
        running = [rank for rank in range(self.world_size) if rank not in answers]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        if running:
            time.sleep(0.3)
        said: dict[str, list[int]] = {}
        for rank, worker in enumerate(self._workers):
            said.setdefault(worker.said(answers.get(rank)), []).append(rank)
        # Ranks that say the same are told once.
        parts = [f"rank {', '.join(map(str, those))} {text}" for text, those in said.items()]
        self.close()
        for answer in answers.values():
            if isinstance(answer, _Failure) and answer.skip is not None:
                import pytest

                pytest.skip(answer.skip)
        failed = [rank for rank in sorted(answers) if not isinstance(answers[rank], _Success)]
        if failed:
            how = f"failed on rank {failed[0]} of {self.world_size}"
        else:
            how = f"ranks {running} of {self.world_size} hung for {timeout:g} s"
        name = f"{function.__module__}.{function.__qualname__}"
        raise RankError("\n\n".join([f"{name}: {how}", *parts]))


@dataclass(frozen=True)
class _Success:
    value: Any
    dirty: bool


@dataclass(frozen=True)
class _Failure:
    text: str
    skip: str | None = None


def _light_main() -> contextlib.AbstractContextManager[Any]:
    """Keep multiprocessing from importing pytest's own main module in every rank.

    A script's main module is left alone: it holds the functions that the ranks must find.
    """
    if "pytest" not in sys.modules:
        return contextlib.nullcontext()
    hidden = {"__spec__": None, "__file__": None}
    return mock.patch.multiple(sys.modules["__main__"], create=True, **hidden)


# -- in the rank ------------------------------------------------------------------------------


class _Rank:
    """One process of a pool: its group, and what it keeps between calls."""

    def __init__(
        self, rank: int, world_size: int, port: int, group_timeout: float, backend: str
    ) -> None:
        self.rank = rank
        self.backend = backend
        self.world_size = world_size
        self.timeout = timedelta(seconds=group_timeout)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.group: str | None = None
        self.world: Any = None
        self.had_mesh = False

    def join(self, group: str | None) -> None:
        """Be a member of the group of this name; the same one at every call."""
        if group is not None and self.group is None:
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore(group, self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=self.timeout,
            )
        self.group = group
        self.world = dist.group.WORLD

    def dirty(self) -> bool:
        """Whether the call left another default group than it found, or made a mesh for itself.

        What torch derived from a mesh outlives it, and is used again for one that is equal, whose
        groups have other names.
        """
        return self.had_mesh or dist.group.WORLD is not self.world

    def tidy(self) -> None:
        """Drop groups that the call made and nobody keeps."""
        if not dist.is_initialized() or self.dirty():
            return
        kept = {id(dist.group.WORLD)}
        for value in _kept.values():
            kept |= {id(g) for g in (value.get_all_groups() if _is_mesh(value) else [value])}
        strangers = [g for g in dist.distributed_c10d._world.pg_map if id(g) not in kept]
        self.had_mesh = any(group.group_desc.startswith("mesh") for group in strangers)
        if strangers and not self.had_mesh:
            gc.collect()
            for group in strangers:
                with contextlib.suppress(ValueError, AssertionError):
                    dist.destroy_process_group(group)


def _is_mesh(value: object) -> bool:
    return isinstance(value, DeviceMesh)


def serve(
    connection: multiprocessing.connection.Connection,
    rank: int,
    world_size: int,
    port: int,
    group_timeout: float,
    folder: Path,
    backend: str,
) -> None:
    """Answer requests until the pool goes away."""
    _die_with_parent()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    output = (folder / "output").open("w", buffering=1)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    stack = (folder / "stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack)
    torch.set_num_threads(1)
    # What the server imported never dies: no collection and no walk over the heap need see it.
    gc.freeze()
    me = _Rank(rank, world_size, port, group_timeout, backend)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        connection.send_bytes(_answer(me, request))


def _answer(me: _Rank, request: bytes) -> bytes:
    try:
        group, function, args, kwargs = pickle.loads(request)
        me.join(group)
        random.seed(0)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            strict_warnings()
            value = function(*args, **kwargs)
        me.tidy()
        return pickle.dumps(_Success(value, me.dirty()))
    except BaseException as error:
        skip = str(error) if type(error).__name__ == "Skipped" else None
        return pickle.dumps(_Failure(traceback.format_exc(), skip))


def strict_warnings() -> None:
    """Warnings are errors in ranks as they are in pytest, but for what torch says of itself."""
    warnings.simplefilter("error")
    for message in (
        r".*FSDP.*",
        r".*barrier\(\).*",
        r".*`torch.distributed.*` is deprecated.*",
        r".*deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message, module=r"(torch|fairscale)\b.*")
    # torch's DataParallel says this where it adds by copies.
    warnings.filterwarnings("ignore", message="PyTorch is not compiled with NCCL support")
    # FSDP1 keeps these nodes from one step to the next.
    warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
    # torch 2.11 says this of any sparse tensor, to whoever makes it.
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")


def _die_with_parent() -> None:
    """A rank inside a collective would outlive a killed pytest: have the kernel end it."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


# -- helpers for the functions that run on ranks ------------------------------------------------

_kept: dict[Any, Any] = {}


def _once(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What was made under this key, once in the life of the default group."""
    if key not in _kept:
        _kept[key] = make()
    return _kept[key]


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """What a logger says at INFO meanwhile, on a rank, where there is no ``caplog``."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def mesh(shape: Sequence[int], names: Sequence[str], device: str | None = None) -> DeviceMesh:
    """``init_device_mesh``, made once in the life of the default group.

    ``device`` is a type; None is what the process computes on.
    """
    device = device or device_type()
    key = ("mesh", tuple(shape), tuple(names), device)
    return _once(key, lambda: init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names)))


def subgroup(ranks: Sequence[int]) -> Any:
    """``dist.new_group(ranks)``, made once in the life of the default group; all ranks call it."""
    return _once(("group", *ranks), lambda: dist.new_group(list(ranks)))

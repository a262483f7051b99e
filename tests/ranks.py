"""A persistent pool of real gloo ranks, which run functions and return their results.

The processes are forked from a server that has imported torch once, so a pool costs tens of
milliseconds and a call on it costs about one. A rank that raises, dies or hangs ends its pool. The
next call starts a new pool, so a failed test leaves no state to later tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
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

# The server imports these modules once, and every rank inherits them.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch._meta_registrations",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "torch.testing",
    # The modules of tests, which ranks import, import pytest.
    "pytest",
    "tests.ranks",
    # The launcher imports most of its packages here. They are missing without its extra.
    "launch.metrics",
    "launch.train",
]
# A call that takes longer has hung: nothing here is within an order of magnitude of it.
TIMEOUT_S = 60.0
# Seconds that ranks may run after the failure of one rank, before their stacks are taken.
GRACE_S = 2.0


class RankError(Exception):
    """A call failed on at least one rank; the message has the state of each rank."""


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
        """Return the end of a file of the rank, its ``"stack"`` or its ``"output"``."""
        with contextlib.suppress(OSError):
            return (self.folder / file).read_text(errors="replace")[-6000:].strip()
        return ""

    def describe(self, answer: Any) -> str:
        """Return a description of an answer for the message of an error."""
        if isinstance(answer, _Success):
            return "returned"
        text = f"was still running:\n{self.tail('stack')}"
        if isinstance(answer, _Failure):
            text = f"raised:\n{answer.text}"
        elif isinstance(answer, Died):
            text = f"died with exit code {answer.exitcode}\n{self.tail('stack')}".rstrip()
        output = self.tail("output")
        return f"{text}\nand printed:\n{output}" if output else text


class RankPool(contextlib.AbstractContextManager):
    """``world_size`` processes with one gloo group among them, waiting for functions to run.

    Unlike ``torch.multiprocessing.spawn`` it outlives the call, and unlike torch's
    ``MultiProcContinuousTest`` it survives a failed one.

    Args:
        world_size: number of ranks.
        timeout: seconds after which a call counts as hung.
        group_timeout: the process group's own timeout, in seconds.
        backend: of the process group.
        target: the main function of each process, which is `serve` or a function that calls it.
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
        self._target = target or serve
        self._method = method
        self._settings = world_size, group_timeout, backend
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._store: dist.TCPStore | None = None
        self._in_group = False

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
            connection, connection_of_rank = multiprocessing.Pipe()
            folder = self._folder / str(rank)
            folder.mkdir()
            process = context.Process(
                target=self._target,
                args=(connection_of_rank, folder, rank, self._store.port, *self._settings),
                name=f"rank-{rank}-of-{self.world_size}",
                daemon=True,
            )
            # The forkserver takes variables over at its first start.
            variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            with _light_main(), mock.patch.dict(os.environ, variables):
                process.start()
            connection_of_rank.close()
            self._workers.append(_Worker(process, connection, folder))

    def close(self) -> None:
        """Kill the ranks and forget them; the next ``run`` starts new ones."""
        self.kill()
        for worker in self._workers:
            worker.process.join(10)
            worker.process.close()
            worker.connection.close()
        self._workers.clear()
        self._store = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """Send SIGKILL to all ranks, in the middle of a call."""
        for worker in self._workers:
            worker.process.kill()

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
            may_die: ranks that may die, because their death is part of the test.
            kwargs: picklable keyword arguments.

        Returns:
            The results in order of rank (``Died`` for a rank in ``may_die``).

        Raises:
            RankError: a rank raised, died or hung. The pool is closed.
        """
        in_group = group != "none"
        if group == "fresh" or in_group is not self._in_group:
            # torch caches values of a mesh by ranks and names, and the cache outlives the groups.
            # Therefore a process serves one group only.
            self.close()
        if not self._workers:
            self.start()
        self._in_group = in_group
        request = pickle.dumps((in_group, function, args, kwargs))
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # found dead below
                worker.connection.send_bytes(request)
        seconds = timeout or self.timeout
        try:
            answers = self._collect(seconds, may_die)
        except BaseException:
            # An answer that was not read would be taken for the answer of the next call.
            self.close()
            raise
        if any(answer is None or _failed(answer, may_die) for answer in answers):
            name = f"{function.__module__}.{function.__qualname__}"
            self._fail(name, answers, f"hung for {seconds:g} s")
        if any(isinstance(answer, Died) or answer.dirty for answer in answers):
            self.close()
        return [answer if isinstance(answer, Died) else answer.value for answer in answers]

    def _collect(self, timeout: float, may_die: Collection[int]) -> list[Any]:
        """Return the answers, or None for late ranks. After a failure ranks have a short grace."""
        answers: list[Any] = [None] * self.world_size
        deadline = time.monotonic() + timeout
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            for ready in multiprocessing.connection.wait(list(waiting), seconds):
                rank = waiting.pop(ready)
                worker = self._workers[rank]
                try:
                    answers[rank] = pickle.loads(worker.connection.recv_bytes())
                except (EOFError, OSError):
                    worker.process.join(10)
                    answers[rank] = Died(rank, worker.process.exitcode)
                if _failed(answers[rank], may_die):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _fail(self, name: str, answers: list[Any], hung: str) -> None:
        """Take the stacks of running ranks, end the pool, and raise."""
        running = [rank for rank, answer in enumerate(answers) if answer is None]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        if running:
            time.sleep(0.3)
        ranks_by_description: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            description = self._workers[rank].describe(answer)
            ranks_by_description.setdefault(description, []).append(rank)
        parts = []
        for description, ranks in ranks_by_description.items():
            parts.append(f"rank {', '.join(map(str, ranks))} {description}")
        self.close()
        for answer in answers:
            if isinstance(answer, _Failure) and answer.skip is not None:
                import pytest

                pytest.skip(answer.skip)
        failed = [r for r, a in enumerate(answers) if isinstance(a, _Failure | Died)]
        how = f"failed on rank {failed[0]}" if failed else f"ranks {running}"
        end = "" if failed else f" {hung}"
        raise RankError("\n\n".join([f"{name}: {how} of {self.world_size}{end}", *parts]))


@dataclass(frozen=True)
class _Success:
    value: Any
    dirty: bool


@dataclass(frozen=True)
class _Failure:
    text: str
    skip: str | None = None


def _failed(answer: Any, may_die: Collection[int]) -> bool:
    return isinstance(answer, _Failure) or (isinstance(answer, Died) and answer.rank not in may_die)


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
    """One process of a pool, with the group that it keeps between calls."""

    def __init__(self, rank: int, port: int, size: int, timeout: float, backend: str) -> None:
        self._join = functools.partial(
            dist.init_process_group,
            backend,
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        self.world: Any = None
        self.had_mesh = False

    def join(self) -> None:
        """Be a member of the group; the same one at every call."""
        if self.world is None:
            self._join()
            self.world = dist.group.WORLD

    def dirty(self) -> bool:
        """Return whether the call replaced the default group, or made a mesh.

        torch caches values of a mesh beyond its life, and uses them again for an equal mesh, but
        the groups of that mesh have other names.
        """
        return self.had_mesh or dist.group.WORLD is not self.world

    def tidy(self) -> None:
        """Destroy groups that the call made and that are not in the cache."""
        if not dist.is_initialized() or self.dirty():
            return
        cached = {id(dist.group.WORLD)}
        for value in _cache.values():
            groups = value.get_all_groups() if isinstance(value, DeviceMesh) else [value]
            cached.update(map(id, groups))
        strangers = [g for g in dist.distributed_c10d._world.pg_map if id(g) not in cached]
        self.had_mesh = any(group.group_desc.startswith("mesh") for group in strangers)
        if strangers and not self.had_mesh:
            gc.collect()
            for group in strangers:
                with contextlib.suppress(ValueError, AssertionError):
                    dist.destroy_process_group(group)


def serve(
    connection: multiprocessing.connection.Connection, folder: Path, rank: int, *group: Any
) -> None:
    """Answer requests until the pool goes away."""
    _die_with_parent()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(group[1]), LOCAL_RANK=str(rank))
    output = (folder / "output").open("w", buffering=1)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    stack = (folder / "stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack)
    torch.set_num_threads(1)
    # Objects of the server live as long as the process, so a collection need not visit them.
    gc.freeze()
    me = _Rank(rank, *group)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        connection.send_bytes(_answer(me, request))


def _answer(me: _Rank, request: bytes) -> bytes:
    try:
        in_group, function, args, kwargs = pickle.loads(request)
        if in_group:
            me.join()
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
    """Make warnings errors on a rank, as in pytest, except warnings of torch about itself."""
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
    # torch 2.11 warns of any sparse tensor.
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")


def _die_with_parent() -> None:
    """A rank inside a collective would outlive a killed pytest: have the kernel end it."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


# -- helpers for the functions that run on ranks ------------------------------------------------

_cache: dict[Any, Any] = {}


def _once(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return the value of a key, which is made once in the life of the default group."""
    if key not in _cache:
        _cache[key] = make()
    return _cache[key]


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Yield a list of the messages of a logger at INFO, because a rank has no ``caplog``."""
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


def mesh(shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return ``init_device_mesh`` of this device type, made once in the life of the group."""
    make = functools.partial(init_device_mesh, device_type(), tuple(shape))
    return _once(("mesh", *shape, *names), lambda: make(mesh_dim_names=tuple(names)))


def subgroup(ranks: Sequence[int]) -> Any:
    """Return ``dist.new_group(ranks)``, made once in the life of the default group.

    Collective: every rank of the default group must call this.
    """
    return _once(("group", *ranks), lambda: dist.new_group(list(ranks)))

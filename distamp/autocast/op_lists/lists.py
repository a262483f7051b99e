"""OpLists: which ops run in which precision inside one region of one thread.

A region's lists are a value. What a thread has in force is an immutable :class:`ListsInForce`, so
that leaving a region is to put back what it found.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled, set_autocast_dtype, set_autocast_enabled
from torch._C import DispatchKey
from torch._ops import OpOverload

from distamp.autocast.compiler import never_compiled
from distamp.autocast.op_lists import names, registered
from distamp.autocast.op_lists.documented import documented_categories
from distamp.autocast.op_lists.families import RUNS_AS
from distamp.autocast.op_lists.kernels import (
    Entry,
    Key,
    entries_of,
    is_registered,
    key_of_lists,
    slots_of,
)
from distamp.autocast.op_lists.rules import Category, Rule, stash
from distamp.autocast.threads.thread_state import local

__all__ = ["ListsInForce", "OpLists", "current", "enter", "push", "restore"]

saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
set_included = torch._C._dispatch_tls_set_dispatch_key_included
set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


@dataclass(frozen=True)
class OpLists:
    """The precision of ops in an autocast region, if it is not torch's own choice.

    torch's lists are compiled in and apply to every region of every thread. These apply to the
    regions they are given to, ``autocast("cuda", ops=OpLists(fp32={"linear"}))``, in the thread
    that entered them. Ops on none of the lists run as in torch. A region's lists replace those of
    the region around it; a region without lists keeps them.

    As in torch's lists, only out-of-place ops are changed: in-place variants, calls with ``out=``
    or with an explicit ``dtype=``, float64 and integer inputs are not changed.

    A name moves its whole family: every op that does the same computation under another name.
    Apex's ``register_half_function``, ``register_float_function`` and ``register_promote_function``
    are ``lower_precision``, ``fp32`` and ``promote`` here, for a region instead of the process.

    Args:
        lower_precision: Ops that cast their inputs to the region's dtype.
        fp32: Ops that cast their inputs to float32, or return float32.
        promote: Ops that cast their inputs to the widest of their inputs' dtypes.
        unlisted: Ops that run in the dtype of their inputs, as torch runs ops on no list.
        exact: Move only each named op and its overloads, without its family.

    Names are those of the public API (``"linear"``, ``"torch.nn.functional.linear"``), of the
    dispatcher (``"aten::mm"``, ``"mylib::op"`` for a custom op), or torch's functions themselves.

    Raises:
        TypeError: A list is a single string, or contains something that is not a name.
        ValueError: An unknown or ineligible name (with close matches), or one family in two lists.

    Source: torch's autocast op reference, https://pytorch.org/docs/stable/amp.html.
    """

    lower_precision: frozenset[str] = frozenset()
    fp32: frozenset[str] = frozenset()
    promote: frozenset[str] = frozenset()
    unlisted: frozenset[str] = frozenset()
    exact: bool = False
    document: str | None = field(default=None, repr=False)
    # What stands for these lists alone, for each device type that they were entered for.
    _alone: dict[str, ListsInForce] = field(default_factory=dict, compare=False)

    def __init__(
        self,
        lower_precision: Iterable[object] = (),
        fp32: Iterable[object] = (),
        promote: Iterable[object] = (),
        *,
        unlisted: Iterable[object] = (),
        exact: bool = False,
    ) -> None:
        given = {
            Category.LOWER_PRECISION: lower_precision,
            Category.FP32: fp32,
            Category.PROMOTE: promote,
            Category.UNLISTED: unlisted,
        }
        for category, listed in given.items():
            if isinstance(listed, str):
                raise TypeError(
                    f"{category.value} must be a collection of names, got the string {listed!r}; "
                    f"write {{{listed!r}}}"
                )
            ops = frozenset(op for name in listed for op in names.resolve(name))
            object.__setattr__(self, category.value, ops)
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "document", None)
        object.__setattr__(self, "_alone", {})
        self._by_op()  # One family in two lists is found here, where the names were given.

    @classmethod
    def documented(cls, document: str) -> OpLists:
        """The lists exactly as one of torch's documents states them, whatever this torch has.

        Every op the document lists runs as it says, every other op in the dtype of its inputs.
        Names the running torch no longer has are left out; ``op_reference`` shows them.

        Args:
            document: ``"torch.amp"`` (CUDA and CPU), ``"torch.cuda.amp"`` or ``"torch.cpu.amp"``.

        Raises:
            ValueError: No such document; or, when a region is entered, it has no lists for the
                region's device type.
        """
        names.documented(document)
        lists = cls(exact=True)
        object.__setattr__(lists, "document", document)
        return lists

    def _by_op(self) -> dict[str, Category]:
        """The category of each op that is moved, families included."""
        found: dict[str, tuple[Category, str]] = {}
        for category in Category:
            for name in sorted(getattr(self, category.value)):
                for op in {name} if self.exact else names.family(name):
                    other = found.setdefault(op, (category, name))
                    if other[0] is not category:
                        raise ValueError(
                            f"{name!r} in {category.value} and {other[1]!r} in {other[0].value} "
                            "are one family, which moves as a whole; name it in one list, or pass "
                            "exact=True to move each name alone"
                        )
        return {op: category for op, (category, _) in found.items()}

    def categories(self, device_type: str) -> Mapping[str, Category]:
        """The category of each dispatcher op that these lists move on one device type.

        Raises:
            ValueError: These are a document's lists, and it has none for ``device_type``.
        """
        if self.document is None:
            return self._by_op()
        return documented_categories(self.document, device_type)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_alone": {}}

    def __repr__(self) -> str:
        if self.document is not None:
            return f"OpLists.documented({self.document!r})"
        given = [
            f"{category.value}={sorted(getattr(self, category.value))}"
            for category in Category
            if getattr(self, category.value)
        ]
        return f"OpLists({', '.join(given + ['exact=True'] * self.exact)})"


@dataclass(frozen=True, eq=False)
class ListsInForce:
    """The lists of one or more regions: at most one :class:`OpLists` for each device type.

    One object for equal lists, so that it can be compared by identity.

    Attributes:
        lists: The lists by device type.
        rules: What they say of each op, by the number of its kernel.
        entries: The usual cases among these, in the form that kernels read.
        key: The kernels' dispatch key; None where they say nothing else than torch's lists do.
        shown: What shows torch.compile which lists these are.
    """

    lists: tuple[tuple[str, OpLists], ...]
    rules: Mapping[int, tuple[Rule, ...]]
    entries: dict[int, Entry]
    key: DispatchKey | None
    shown: tuple[_Shown, ...]


class _Shown(NamedTuple):
    """A device type that nothing computes on, whose autocast torch.compile guards on.

    Attributes:
        device_type: Is enabled while the lists are in force.
        dtype: Its dtype then; and ``usual`` otherwise, as in a new thread.
    """

    device_type: str
    dtype: torch.dtype
    usual: torch.dtype


# The usual one first, which needs no change.
_DTYPES = tuple(
    sorted(
        {it for it in vars(torch).values() if isinstance(it, torch.dtype)},
        key=lambda it: (it is not torch.float16, str(it)),
    )
)
_NO_ENTRIES: dict[int, Entry] = {}
_LIMIT = len(_DTYPES) * (len(_DTYPES) + 1)

_Entered = tuple[ListsInForce, bool, Any] | None

_lock = threading.Lock()
_made: dict[tuple[tuple[str, OpLists], ...], ListsInForce] = {}


def _make(lists: tuple[tuple[str, OpLists], ...]) -> ListsInForce:
    """Find or make what stands for lists, one for each of some device types."""
    if lists not in _made:
        _add(lists)
    made = _made[lists]
    if len(lists) == 1:
        # Where the usual entering finds it without hashing sets of names.
        ((device_type, ops),) = lists
        ops._alone[device_type] = made
    return made


def _add(lists: tuple[tuple[str, OpLists], ...]) -> None:
    # Torch's own lists are read by calling ops, which no mode of this thread's should see.
    with ThreadPoolExecutor(1) as pool:
        rules = pool.submit(_rules, lists).result()
    with _lock:
        if lists not in _made:
            if len(_made) == _LIMIT:
                raise RuntimeError(
                    f"a process can use {_LIMIT} different op lists, and these are one more; make "
                    "the lists once and use them again"
                )
            by_slot = slots_of(rules)
            key = key_of_lists()
            _made[lists] = ListsInForce(
                lists,
                by_slot,
                entries_of(by_slot),
                key.key if by_slot else None,
                _shown(key, len(_made)) if by_slot else (),
            )
            _tag_compile_caches()


def _shown(key: Key, number: int) -> tuple[_Shown, ...]:
    """What tells some lists of the process from all others: a dtype, beyond so many of them two."""
    if number == 0 and key.is_guarded:
        return ()
    more, number = divmod(number, len(_DTYPES))
    numbers = [number, more - 1] if more else [number]
    return tuple(
        _Shown(device_type, _DTYPES[at], usual)
        for (device_type, usual), at in zip(key.unused_devices, numbers, strict=False)
    )


def _rules(lists: tuple[tuple[str, OpLists], ...]) -> dict[OpOverload, list[Rule]]:
    """The rules of each overload, one for each device type; none where torch's own say the same."""
    rules: dict[OpOverload, list[Rule]] = {}
    for device_type, ops in lists:
        categories = ops.categories(device_type)
        for op, category in categories.items():
            for overload in names.overloads(op):
                if is_registered(overload) or not _torchs_does(
                    op, overload, device_type, categories
                ):
                    rules.setdefault(overload, []).append(Rule.of(device_type, category))
    return rules


def _torchs_does(
    op: str, overload: OpOverload, device_type: str, categories: Mapping[str, Category]
) -> bool:
    """Whether torch's own list says of an op what these lists say, so that it needs no kernel.

    Not where torch's kernel would meet ours in ops that it calls: two cost more than one.
    """
    if registered.category(overload, device_type) is not categories[op]:
        return False
    return categories[op] is not Category.UNLISTED and RUNS_AS.isdisjoint(
        names.family(op) & categories.keys()
    )


def _tag_compile_caches() -> None:
    """Have torch.compile's caches on disk keep graphs traced under lists for these lists alone.

    A dtype means other lists in another process, so what all of them mean is part of the key.
    """
    meant = repr([made.lists for made in _made.values()]).encode()
    tag = f"distamp-op-lists-{hashlib.sha256(meant).hexdigest()[:16]}"
    config = torch.compiler.config
    kept = [part for part in config.cache_key_tag.split(",") if "distamp-op-lists-" not in part]
    config.cache_key_tag = ",".join([part for part in kept if part] + [tag])
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        # Before 2.13 the key of this cache knows whether autocast is on, not in which dtype.
        from torch._functorch import config as functorch_config

        functorch_config.enable_autograd_cache = False


def current() -> ListsInForce | None:
    """The lists this thread follows, as a hashable value; None if torch's own."""
    entered = local.state.lists
    return None if entered is None else entered[0]


@never_compiled
def push(ops: OpLists, device_type: str) -> _Entered:
    """Make this thread follow ``ops`` on ``device_type``; return what :func:`restore` puts back.

    Raises:
        ValueError: ``ops`` are a document's lists, and it has none for ``device_type``.
    """
    found = local.state.lists
    lists = ops._alone.get(device_type)
    if lists is None or found is not None:
        was = () if found is None else found[0].lists
        others = tuple(each for each in was if each[0] != device_type)
        lists = _make((*others, (device_type, ops)))
    restore((lists, is_grad_enabled(), saved_tensor_hooks(True)))
    return found


def enter(lists: ListsInForce | None) -> _Entered:
    """Make this thread follow what :func:`current` returned, here or in another thread.

    Returns:
        What :func:`restore` puts back.
    """
    found = local.state.lists
    restore(None if lists is None else (lists, is_grad_enabled(), saved_tensor_hooks(True)))
    return found


@never_compiled
def restore(entered: _Entered) -> None:
    """Make this thread follow what :func:`push` or :func:`enter` found; None is torch's own."""
    thread = local.state
    found = thread.lists
    thread.lists = entered
    if found is not None:
        was = found[0]
        if entered is not None and entered[0] is was:
            return
        if was.key is not None:
            set_excluded(was.key, True)
        if was.shown:
            _show_usual(was)
    if thread.weights:
        thread.weights = {}
    if entered is None:
        thread.entries = _NO_ENTRIES
        return
    lists = entered[0]
    thread.entries = lists.entries
    stash(lists)
    if lists.shown:
        _show(lists)
    if lists.key is not None:
        # A thread of autograd's loses both with the backward pass that it ran.
        set_included(lists.key, True)
        set_excluded(lists.key, False)


def _show(lists: ListsInForce) -> None:
    for device_type, dtype, _ in lists.shown:
        set_autocast_enabled(device_type, True)
        set_autocast_dtype(device_type, dtype)


def _show_usual(lists: ListsInForce) -> None:
    for device_type, _, usual in lists.shown:
        set_autocast_enabled(device_type, False)
        set_autocast_dtype(device_type, usual)

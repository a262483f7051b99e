"""OpLists: which ops run in which precision inside one region of one thread.

A region's lists are a value. What a thread has in force is an immutable :class:`_InForce`, so that
entering a region is one assignment and leaving it is the assignment of what was there before.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from distamp.autocast.op_lists import names
from distamp.autocast.op_lists.documented import documented_categories
from distamp.autocast.op_lists.families import RUNS_AS
from distamp.autocast.op_lists.kernels import CARRIER_DEVICE, RuleTable, enter, is_registered
from distamp.autocast.op_lists.rules import Category, Rule
from distamp.autocast.op_reference import registered
from distamp.autocast.threads.stack import thread

__all__ = ["OpLists", "current", "moves", "pop", "push", "restore"]


@dataclass(frozen=True)
class OpLists:
    """Which ops an autocast region runs in which precision, where that is not torch's own choice.

    Torch's lists are compiled in and hold for every region of every thread; these hold for the
    regions they are given to, ``autocast("cuda", ops=OpLists(fp32={"linear"}))``, in the thread
    that entered them. Ops named in none of the lists stay as torch has them. A region's lists take
    the place of those of the region around it; a region without lists keeps them.

    As in torch's lists, only out-of-place ops are changed: in-place variants, calls with ``out=``
    or with an explicit ``dtype=``, float64 and integer inputs are left alone.

    A name moves its whole family: every op that does the same computation under another name.
    Apex's ``register_half_function``, ``register_float_function`` and ``register_promote_function``
    are ``lower_precision``, ``fp32`` and ``promote`` here, for a region instead of for good.

    Args:
        lower_precision: Ops that cast their inputs to the region's dtype.
        fp32: Ops that cast their inputs to float32, or give their result in it.
        promote: Ops that cast their inputs to the widest of their inputs' dtypes.
        unlisted: Ops that run in the dtype of their inputs; what torch does with ops on no list.
        exact: Move each named op alone, with its overloads but without its family.

    Names are those of the public API (``"linear"``, ``"torch.nn.functional.linear"``), of the
    dispatcher (``"aten::mm"``, ``"mylib::op"`` for a custom op), or torch's functions themselves.

    Raises:
        TypeError: A list is a single string, or holds something that is no name.
        ValueError: An unknown or ineligible name (with close matches), or one family in two lists.

    Source: torch's autocast op reference, https://pytorch.org/docs/stable/amp.html.
    """

    lower_precision: frozenset[str] = frozenset()
    fp32: frozenset[str] = frozenset()
    promote: frozenset[str] = frozenset()
    unlisted: frozenset[str] = frozenset()
    exact: bool = False
    document: str | None = field(default=None, repr=False)

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
        self._by_op()  # One family in two lists is found here, where the names were given.

    @classmethod
    def documented(cls, document: str) -> OpLists:
        """The lists exactly as one of torch's documents states them, whatever this torch has.

        Every op the document lists runs as it says, every other op in the dtype of its inputs.
        Names the running torch no longer has are left out; ``op_reference`` shows them.

        Args:
            document: ``"000"`` (torch.amp: CUDA and CPU), ``"001"`` (torch.cuda.amp) or ``"003"``
                (torch.cpu.amp).

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
class _InForce:
    """The lists one thread follows: at most one :class:`OpLists` for each device type."""

    lists: tuple[tuple[str, OpLists], ...]
    table: RuleTable
    number: int

    @property
    def marks(self) -> tuple[torch.dtype, torch.dtype | None]:
        """What stands for these lists in the thread's autocast state."""
        more, first = divmod(self.number, len(_MARKS))
        return _MARKS[first], _MARKS[more - 1] if more else None


# The autocast dtypes of two device types that nothing computes on stand for "which lists":
# torch.compile guards on them, so a graph made under other lists, or none, is not used.
_MARK_DEVICES = CARRIER_DEVICE, "ipu"
_UNMARKED = torch.float16
_MARKS = tuple(
    dict.fromkeys(
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and dtype is not _UNMARKED
    )
)


_lock = threading.Lock()
_made: dict[tuple[tuple[str, OpLists], ...], _InForce] = {}


def _in_force(lists: tuple[tuple[str, OpLists], ...]) -> _InForce:
    made = _made.get(lists)
    if made is not None:
        return made
    # Torch's own lists are read by calling ops, which no mode of this thread's should see.
    with ThreadPoolExecutor(1) as pool:
        rules = pool.submit(_rules, lists).result()
    with _lock:
        if lists not in _made:
            limit = len(_MARKS) * (len(_MARKS) + 1)
            if len(_made) == limit:
                raise RuntimeError(
                    f"a process can use {limit} different op lists, and these are one more; make "
                    "the lists once and use them again"
                )
            _made[lists] = _InForce(lists, RuleTable(rules), len(_made))
            _tag_compile_caches()
    return _made[lists]


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
    """Keep graphs traced under lists apart in torch.compile's caches on disk.

    A mark means other lists in another process, so what all marks mean here is part of the key.
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


def current() -> _InForce | None:
    """The lists this thread follows, as a hashable value; None if torch's own."""
    in_force: _InForce | None = thread.here.op_lists
    return in_force


def moves(op: str, device_type: str) -> bool:
    """Whether this thread's lists say something about one dispatcher op, such as ``"linear"``."""
    in_force = current()
    return in_force is not None and any(
        device == device_type and op in ops.categories(device) for device, ops in in_force.lists
    )


def restore(value: _InForce | None) -> None:
    """Make this thread follow what :func:`current` returned, here or in another thread."""
    here = thread.here
    before = here.op_lists
    if value is before:
        return
    here.op_lists = value
    enter(None if value is None else value.table)
    first, second = (_UNMARKED, None) if value is None else value.marks
    torch.set_autocast_dtype(_MARK_DEVICES[0], first)
    if second is not None or (before is not None and before.marks[1] is not None):
        torch.set_autocast_enabled(_MARK_DEVICES[1], second is not None)
        torch.set_autocast_dtype(_MARK_DEVICES[1], second or _UNMARKED)


def push(ops: OpLists, device_type: str) -> _InForce | None:
    """Make this thread follow ``ops`` on ``device_type``; return what :func:`pop` puts back.

    Raises:
        TypeError: ``ops`` is no :class:`OpLists`.
        ValueError: ``ops`` are a document's lists, and it has none for ``device_type``.
    """
    if not isinstance(ops, OpLists):
        raise TypeError(f"ops must be an OpLists, got {ops!r}; write OpLists(fp32={{...}})")
    before = current()
    others = () if before is None else tuple(it for it in before.lists if it[0] != device_type)
    restore(_in_force((*others, (device_type, ops))))
    return before


def pop(token: _InForce | None) -> None:
    """Put back what was in force before the :func:`push` that returned ``token``."""
    restore(token)

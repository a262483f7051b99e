"""OpLists: which ops run in which precision inside one region of one thread."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass

import torch
from torch import set_autocast_dtype, set_autocast_enabled
from torch._ops import OpOverload

from distamp.autocast import torch_lists
from distamp.autocast.op_kernels import register, rules_of
from distamp.autocast.op_names import Category, autocast_key, family, overloads, resolve
from distamp.autocast.thread_state import MARKS, Mark, mark

__all__ = ["Lists", "OpLists", "follow", "followed"]


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
        fp32: Ops that cast their inputs to float32.
        promote: Ops that cast their inputs to the widest of their inputs' dtypes.
        unlisted: Ops that run in the dtype of their inputs, as torch runs ops on no list.
        exact: Move only each named op and its overloads, without its family.

    Names are those of the public API (``"linear"``, ``"torch.nn.functional.linear"``), of the
    dispatcher (``"aten::mm"``, ``"mylib::op"`` for a custom op), or torch's functions themselves.

    An op that is listed gets a kernel that enters Python and stays as long as the process: some
    microseconds for each call in every region, and none with autocast off.

    Raises:
        TypeError: A list is a single string, or contains something that is not a name.
        ValueError: An unknown or ineligible name (with the nearest), or one family in two lists.

    Source: torch's autocast op reference, https://pytorch.org/docs/stable/amp.html.
    """

    lower_precision: Collection[object] = frozenset()
    fp32: Collection[object] = frozenset()
    promote: Collection[object] = frozenset()
    _: KW_ONLY
    unlisted: Collection[object] = frozenset()
    exact: bool = False

    def __post_init__(self) -> None:
        for category in Category:
            listed = getattr(self, category.value)
            if isinstance(listed, str):
                raise TypeError(
                    f"{category.value} must be a collection of names, got the string {listed!r}; "
                    f"write {{{listed!r}}}"
                )
            ops = frozenset(op for name in listed for op in resolve(name))
            object.__setattr__(self, category.value, ops)
        self.by_op()  # One family in two lists is found here, where the names were given.

    @classmethod
    def of_torch(cls, device_type: str) -> OpLists:
        """The lists of the running torch for one device type, which need not be here.

        Raises:
            ValueError: This torch has no autocast for ``device_type``.
        """
        found = torch_lists.listed_by_torch(device_type)
        names = {it.value: {op for op in found if found[op] is it} for it in Category}
        return cls(**names, exact=True)

    def __or__(self, other: OpLists) -> OpLists:
        """Return these lists with another's laid over them: where both name an op, the other's."""
        if not isinstance(other, OpLists):
            return NotImplemented
        merged, made = self.by_op() | other.by_op(), OpLists(exact=True)
        for category in Category:
            ops = frozenset(op for op, where in merged.items() if where is category)
            object.__setattr__(made, category.value, ops)
        return made

    def by_op(self) -> dict[str, Category]:
        """The category of each dispatcher op that is moved, families included."""
        found: dict[str, tuple[Category, str]] = {}
        for category in Category:
            for name in sorted(map(str, getattr(self, category.value))):
                for op in {name} if self.exact else family(name):
                    other = found.setdefault(op, (category, name))
                    if other[0] is not category:
                        raise ValueError(
                            f"{name!r} in {category.value} and {other[1]!r} in {other[0].value} "
                            "are one family, which moves as a whole; name it in one list, or pass "
                            "exact=True to move each name alone"
                        )
        return {op: category for op, (category, _) in found.items()}

    def __repr__(self) -> str:
        given = [
            f"{category.value}={sorted(getattr(self, category.value))}"
            for category in Category
            if getattr(self, category.value)
        ]
        return f"OpLists({', '.join(given + ['exact=True'] * self.exact)})"


# The lists that a thread follows: at most one for each device type.
Lists = tuple[tuple[str, OpLists], ...]


# The lists of each mark, in the order of their making, and the ops in them that are not torch's.
_lists_of: dict[Mark | None, Lists] = {None: ()}
_others_of: dict[Mark, list[tuple[OpOverload, str]]] = {}
_lock = threading.Lock()
# Each once: torch.float is torch.float32.
_DTYPES = tuple(dict.fromkeys(it for it in vars(torch).values() if isinstance(it, torch.dtype)))


def followed() -> Lists:
    """The lists that the calling thread follows; () where it follows torch's own alone."""
    return _lists_of.get(mark(), ())


def follow(lists: Lists) -> None:
    """Make the calling thread follow these lists from now on; () is torch's own alone."""
    if lists is followed():
        return
    shown = _carried_out(lists) if lists else ()
    for overload, device_type in _others_of.get(shown, ()):
        register(overload, device_type)  # anew, where somebody has registered a kernel since
    for i, (device_type, usual) in enumerate(MARKS):
        set_autocast_enabled(device_type, bool(lists))
        set_autocast_dtype(device_type, shown[i] if lists else usual)


@functools.cache
def _carried_out(lists: Lists) -> Mark:
    """Register what lists say of each overload and device type, unlike torch; return their mark."""
    rules: dict[tuple[str, str], Category] = {}
    others: list[tuple[OpOverload, str]] = []
    for device_type, ops in lists:
        autocast_key(device_type)
        for op, category in ops.by_op().items():
            for overload in overloads(op):
                if torch_lists.category_in_torch(overload, device_type) is not category:
                    register(overload, device_type)
                    rules[overload.name(), device_type] = category
                    if overload.namespace != "aten":
                        others.append((overload, device_type))
    with _lock:
        made = _new_mark(len(_lists_of) - 1)
        rules_of[made], _lists_of[made], _others_of[made] = rules, lists, others
        _tag_caches()
    return made


def _new_mark(number: int) -> Mark:
    """Return a mark that torch.compile guards on, for as long as the process lives.

    It guards on the autocast state of every device type, and on nothing that is ours. So lists show
    as the dtypes of two device types that nothing computes on.
    """
    high, low = divmod(number, len(_DTYPES))
    if high >= len(_DTYPES):
        raise RuntimeError(
            f"a process can use {len(_DTYPES) ** 2} different op lists, and these are one more; "
            "make the lists once and use them again"
        )
    return _DTYPES[high], _DTYPES[low]


def _tag_caches() -> None:
    """Have torch.compile's caches on disk keep graphs traced under lists for these lists alone.

    A dtype means other lists in another process, so what all of them mean is part of the key.
    """
    meant = hashlib.sha256(repr([*_lists_of.values()]).encode()).hexdigest()[:16]
    config = torch.compiler.config
    kept = [it for it in config.cache_key_tag.split(",") if it and "distamp-op-lists" not in it]
    config.cache_key_tag = ",".join([*kept, f"distamp-op-lists-{meant}"])

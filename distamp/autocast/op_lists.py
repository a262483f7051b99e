"""`OpLists`, the ops that run in another precision inside one region of one thread."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field

from torch._ops import OpOverload, OpOverloadPacket

from distamp.autocast.op_families import ALIASES, FAMILIES
from distamp.autocast.op_kernels import (
    FUNCTION_NAMESPACES,
    CastPolicy,
    KernelRegistration,
    Mark,
    all_op_names,
    allocate_mark,
    autocast_key,
    current_mark,
    find_packet,
    has_kernel,
    packet_overloads,
    register_kernel,
    registered_op_names,
    schema_of,
    set_mark,
)
from distamp.autocast.thread_state import local
from distamp.autocast.torch_lists import torch_cast_policy
from distamp.error_text import similar_names

__all__ = ["ActiveLists", "OpLists", "activate_lists", "active_lists"]


class ListedKernels:
    """The kernels that one `OpLists` object keeps registered.

    A copy or a pickle belongs to another object, and starts without kernels.

    Attributes:
        registrations: The registrations, by device type and op.
        custom_ops: The ops among them that are not torch's, by device type.
    """

    def __init__(self) -> None:
        self.registrations: dict[str, dict[OpOverload, KernelRegistration]] = {}
        self.custom_ops: dict[str, list[OpOverload]] = {}

    def __reduce__(self) -> tuple[type[ListedKernels], tuple[()]]:
        return ListedKernels, ()


@dataclass(frozen=True)
class OpLists:
    """The precision of ops in an autocast region, if it differs from torch's lists.

    torch's lists are compiled in and apply to every region of every thread. These apply to the
    regions they are given to, ``autocast("cuda", ops=OpLists(fp32={"linear"}))``, in the thread
    that entered them. An op on none of the lists runs as in torch. The lists of a region replace
    the lists of the region around it, and a region without lists keeps them.

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

    Names are names of the public API (``"linear"``, ``"torch.nn.functional.linear"``), of the
    dispatcher (``"aten::mm"``, ``"mylib::op"`` for a custom op), or torch's functions themselves.

    A listed op gets a kernel in Python when a region with the lists is first entered. The kernel
    costs some microseconds for each call in any region, and none with autocast off. It is removed
    when the last `OpLists` object that has the op is gone.

    Raises:
        TypeError: A list is a single string, or contains something that is not a name.
        ValueError: An unknown or ineligible name (with similar names), or one family in two lists.

    Source: torch's autocast op reference, https://pytorch.org/docs/stable/amp.html.
    """

    lower_precision: Collection[object] = frozenset()
    fp32: Collection[object] = frozenset()
    promote: Collection[object] = frozenset()
    _: KW_ONLY
    unlisted: Collection[object] = frozenset()
    exact: bool = False
    #: The kernels of these lists, which are no part of their value.
    kernels: ListedKernels = field(
        default_factory=ListedKernels, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for policy in CastPolicy:
            names = getattr(self, policy.value)
            if isinstance(names, str):
                raise TypeError(
                    f"{policy.value} must be a collection of names, got the string {names!r}. "
                    f"Write {{{names!r}}}."
                )
            ops: set[str] = set()
            for name in names:
                ops.update(_resolve_op_name(name))
            object.__setattr__(self, policy.value, frozenset(ops))
        # One family in two lists raises here, where the user wrote the names.
        self.by_op()

    @classmethod
    def of_torch(cls, device_type: str) -> OpLists:
        """Return the lists of the running torch for a device type, which need not be present.

        Raises:
            ValueError: This torch has no autocast for ``device_type``.
        """
        registered = registered_op_names(device_type)
        ops: dict[str, set[str]] = {policy.value: set() for policy in CastPolicy}
        for op in sorted({_short_name(name) for name in registered}):
            policy = CastPolicy.UNLISTED
            for overload in _eligible_overloads(op):
                if registered & {overload.name(), f"{overload.name()}.default"}:
                    policy = torch_cast_policy(overload, device_type)
            if policy is not CastPolicy.UNLISTED:
                ops[policy.value].add(op)
        return cls(**ops, exact=True)

    def __or__(self, other: OpLists) -> OpLists:
        """Return these lists with another's applied over them, which win where both name an op."""
        if not isinstance(other, OpLists):
            return NotImplemented
        by_op = self.by_op() | other.by_op()
        merged = OpLists(exact=True)
        for policy in CastPolicy:
            ops = frozenset(op for op in by_op if by_op[op] is policy)
            object.__setattr__(merged, policy.value, ops)
        return merged

    def by_op(self) -> dict[str, CastPolicy]:
        """Return the policy of each dispatcher op that is moved, families included."""
        policies: dict[str, CastPolicy] = {}
        name_by_op: dict[str, str] = {}
        for policy in CastPolicy:
            for name in sorted(map(str, getattr(self, policy.value))):
                for op in {name} if self.exact else _family_of(name):
                    first_policy = policies.setdefault(op, policy)
                    first_name = name_by_op.setdefault(op, name)
                    if first_policy is not policy:
                        raise ValueError(
                            f"{name!r} in {policy.value} and {first_name!r} in "
                            f"{first_policy.value} are one family, which moves as a whole. Name it "
                            "in one list, or pass exact=True to move each name alone."
                        )
        return policies

    def __repr__(self) -> str:
        arguments: list[str] = []
        for policy in CastPolicy:
            names = getattr(self, policy.value)
            if names:
                arguments.append(f"{policy.value}={sorted(names)}")
        if self.exact:
            arguments.append("exact=True")
        return f"OpLists({', '.join(arguments)})"


# -- the lists of a thread -----------------------------------------------------------------------

#: The lists that a thread follows, at most one for each device type.
ActiveLists = tuple[tuple[str, OpLists], ...]
# The value of lists without their kernels, which live as long as an `OpLists` object.
_Value = tuple[tuple[object, ...], ...]

_FIELDS = (*(policy.value for policy in CastPolicy), "exact")
_mark_by_value: dict[_Value, Mark] = {}
_value_by_mark: dict[Mark, _Value] = {}


def active_lists() -> ActiveLists:
    """Return the lists that the calling thread follows; () means torch's lists alone."""
    mark = current_mark()
    if mark is None:
        return ()
    if mark == local.lists_mark:
        lists: ActiveLists = local.lists
        return lists
    # autograd has copied the mark of another thread to this one. Equal lists serve as well.
    return _lists_with(_value_by_mark.get(mark, ()))


def activate_lists(lists: ActiveLists) -> None:
    """Make the calling thread follow lists; () means torch's lists alone."""
    if lists is active_lists():
        return
    for device_type, ops in lists:
        _register_kernels(ops, device_type)
    mark = _mark_of(lists) if lists else None
    set_mark(mark)
    local.lists_mark = mark
    local.lists = lists


def _register_kernels(ops: OpLists, device_type: str) -> None:
    """Register the kernels that lists need on a device type, and give them to the lists."""
    kernels = ops.kernels
    if device_type not in kernels.registrations:
        overloads = [*_moved_overloads(ops, device_type)]
        registrations = {op: register_kernel(op, device_type) for op in overloads}
        kernels.custom_ops[device_type] = [op for op in overloads if op.namespace != "aten"]
        kernels.registrations[device_type] = registrations
    for overload in kernels.custom_ops[device_type]:
        # A library may have registered a kernel for its op since, which would hide ours.
        registration = register_kernel(overload, device_type)
        kernels.registrations[device_type][overload] = registration


def _moved_overloads(ops: OpLists, device_type: str) -> dict[OpOverload, CastPolicy]:
    """Return the overloads with another policy on a device type than torch's, and the policy."""
    autocast_key(device_type)
    moved: dict[OpOverload, CastPolicy] = {}
    for op, policy in ops.by_op().items():
        for overload in _eligible_overloads(op):
            if torch_cast_policy(overload, device_type) is not policy:
                moved[overload] = policy
    return moved


def _mark_of(lists: ActiveLists) -> Mark:
    """Return the mark of lists, which equal lists share."""
    value = _value_of(lists)
    mark = _mark_by_value.get(value)
    if mark is None:
        rules: dict[tuple[str, str], CastPolicy] = {}
        for device_type, ops in lists:
            for overload, policy in _moved_overloads(ops, device_type).items():
                rules[overload.name(), device_type] = policy
        mark = allocate_mark(rules, repr(lists))
        _value_by_mark[mark] = value
        _mark_by_value[value] = mark
    return mark


def _value_of(lists: ActiveLists) -> _Value:
    value: list[tuple[object, ...]] = []
    for device_type, ops in lists:
        value.append((device_type, *(getattr(ops, name) for name in _FIELDS)))
    return tuple(value)


def _lists_with(value: _Value) -> ActiveLists:
    """Return lists of a value that `_value_of` returned."""
    lists: list[tuple[str, OpLists]] = []
    for device_type, *values in value:
        ops = OpLists()
        for name, listed in zip(_FIELDS, values, strict=True):
            object.__setattr__(ops, name, listed)
        lists.append((str(device_type), ops))
    return tuple(lists)


# -- names of ops --------------------------------------------------------------------------------

# Copies and casts, which autocast itself makes.
_UNLISTABLE = {
    "_autocast_to_full_precision",
    "_autocast_to_reduced_precision",
    "_to_copy",
    "alias",
    "clone",
    "contiguous",
    "copy",
    "detach",
    "lift",
    "lift_fresh",
    "lift_fresh_copy",
    "result_type",
    "to",
    "type_as",
}
# torch lists this op although it returns a view.
_LISTED_VIEWS = {"view_as_complex"}

# The beginning of an op's name in the dispatcher by that of its public name, longest first.
_PREFIXES = {
    "torch.nn.functional.": "",
    "nn.functional.": "",
    "F.": "",
    "torch.ops.aten.": "",
    "aten::": "",
    "torch.linalg.": "linalg_",
    "torch.fft.": "fft_",
    "torch.special.": "special_",
    "torch.Tensor.": "",
    "Tensor.": "",
    "torch.": "",
}


def _short_name(full_name: str) -> str:
    """Return an op's name without torch's namespace and without the overload's name."""
    return full_name.removeprefix("aten::").partition(".")[0]


def _family_of(op: str) -> Collection[str]:
    """Return the ops of this torch that do the same computation as an op, with the op itself."""
    for family in FAMILIES:
        if op in family:
            return [member for member in family if _eligible_overloads(member)]
    return [op]


def _eligible_overloads(op: str) -> tuple[OpOverload, ...]:
    """Return the overloads of a dispatcher op, "softmax" or "mylib::op", that may be listed."""
    namespace, _, name = op.rpartition("::")
    packet = find_packet(namespace or "aten", name)
    # A library may define a missing op later, so that it is missing is not cached.
    return () if packet is None else _eligible_overloads_of(packet)


@functools.cache
def _eligible_overloads_of(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    return tuple(filter(_is_eligible, packet_overloads(packet)))


def _is_eligible(overload: OpOverload) -> bool:
    """Return whether autocast can change an overload.

    It can if the overload makes a new tensor from tensors, in a dtype that the call does not fix.
    """
    schema = schema_of(overload)
    name = schema.name.split("::")[-1]
    if not has_kernel(overload) or schema.is_mutable or name in _UNLISTABLE:
        return False
    if name not in _LISTED_VIEWS and any(result.alias_info for result in schema.returns):
        return False
    if "name" in schema.overload_name.lower():
        # An overload for named dimensions calls one of the others.
        return False
    takes_tensors = False
    for argument in schema.arguments:
        if argument.name in ("dtype", "out_dtype") and not argument.has_default_value():
            return False
        if "Tensor" in str(argument.type):
            takes_tensors = True
    return takes_tensors


def _resolve_op_name(name: object) -> tuple[str, ...]:
    """Return the dispatcher ops that a name of the public API stands for, without their families.

    Raises:
        TypeError: ``name`` is neither a string nor a function of torch.
        ValueError: No op has the name, or autocast cannot change the op.
    """
    text = _name_text(name)
    prefix = ""
    base = text.partition(".")[0]
    for public_prefix, op_prefix in _PREFIXES.items():
        if text.startswith(public_prefix):
            prefix = op_prefix
            base = text.removeprefix(public_prefix).partition(".")[0]
            break
    if not prefix and base in ALIASES:
        return ALIASES[base]
    for candidate in (prefix + base, base):
        if _eligible_overloads(candidate):
            return (candidate,)
    raise ValueError(_refusal_of(text, prefix + base, base))


def _name_text(name: object) -> str:
    """Return the name of an op; a function must be torch's, by identity."""
    if isinstance(name, str):
        return name
    if isinstance(name, OpOverload):
        return str(schema_of(name).name)
    if isinstance(name, OpOverloadPacket):
        return str(name).replace(".", "::", 1)
    function_name = getattr(name, "__name__", None)
    if isinstance(function_name, str):
        # The method torch.Tensor.__pow__ has the name "pow".
        for attribute in (function_name, f"__{function_name}__"):
            for namespace in FUNCTION_NAMESPACES:
                if getattr(namespace, attribute, None) is name:
                    return function_name
    if callable(name):
        qualified_name = getattr(name, "__qualname__", None) or repr(name)
        module = getattr(name, "__module__", None)
        if module:
            qualified_name = f"{module}.{qualified_name}"
        raise TypeError(
            f"An op list holds torch's own functions, and {qualified_name} is none. Lists change "
            "the ops that a function calls, so name those ops, such as 'linear' or 'aten::mm'. For "
            "an op of your own, pass torch.ops.<namespace>.<op> or '<namespace>::<op>'."
        )
    raise TypeError(
        f"An op list holds names such as 'linear' or 'aten::mm', or torch functions, got {name!r}."
    )


def _refusal_of(text: str, *candidates: str) -> str:
    """Return the message for a name that stands for no op which can be listed."""
    names = {_short_name(name) for name in all_op_names() if name.startswith("aten::")}
    listable = [*ALIASES, *sorted(name for name in names if _eligible_overloads(name))]
    similar = similar_names(candidates[0], listable, cutoff=0.54)
    if any(find_packet("aten", candidate) for candidate in candidates):
        return (
            f"Autocast cannot change {text!r}, because the op makes no new tensor from "
            "floating-point inputs. It is a view, a cast, a factory or an in-place op. "
            f"{similar}"
        )
    return f"No op has the name {text!r}. {similar}"

"""op_reference: what autocast does with each op, as documented, as registered and as observed."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from distamp.autocast.devices import autocast_without_device, is_here
from distamp.autocast.op_lists import names
from distamp.autocast.op_lists.registered import BANNED, registered
from distamp.autocast.op_lists.rules import Category
from distamp.autocast.op_reference.samples import SAMPLES, Inputs

__all__ = ["NATIVE", "OpReference", "observe", "op_reference"]

# An op on no list whose own type promotion does what a promote op does.
NATIVE = "promote without autocast"
_REAL = {torch.complex64: torch.float32, torch.complex32: torch.float16}


@dataclass(frozen=True)
class OpReference:
    """One op's category from three sources.

    Attributes:
        name: The op, as the documents write it, or else as the dispatcher does.
        documented: Document to category, for the documents that list it.
        registered: ``"lower_precision"``, ``"fp32"``, ``"promote"``, ``"banned"`` (it raises) or
            ``"unlisted"``; None where the running torch has no such op.
        observed: The same, from running it; ``"promote without autocast"`` for an unlisted op that
            promotes by itself; None where it could not be run.
    """

    name: str
    documented: Mapping[str, str]
    registered: str | None
    observed: str | None

    def agrees(self, document: str) -> bool:
        """Whether the running torch does what a document that lists the op says."""
        says = self.documented[document]
        does = self.observed if self.observed is not None else self.registered
        return says == does or (says == Category.PROMOTE.value and does == NATIVE)


class _LastInputs(TorchDispatchMode):
    """Keeps the floating point dtype of the last op's inputs, for ops that return none."""

    dtype: torch.dtype | None = None

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "prim" and func is not torch.ops.aten._to_copy.default:
            found = {it.dtype for it in _floating(args)} - {torch.float64}
            if len(found) == 1:
                (self.dtype,) = found
        return func(*args, **(kwargs or {}))


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floating(item)


def _dtype(
    sample: Callable[[Inputs], Any], device_type: str, dtypes: Sequence[torch.dtype]
) -> torch.dtype | str | None:
    """The dtype one call gives or computes in; BANNED; or None where the call fails."""
    fake = not is_here(device_type)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        inputs = stack.enter_context(_LastInputs())  # type: ignore[no-untyped-call]
        try:
            found = {
                _REAL.get(it.dtype, it.dtype)
                for it in _floating(sample(Inputs(device_type, dtypes)))
            }
        except Exception as error:
            if "unsafe to autocast" in str(error):
                return BANNED
            # A fake op may stop where it would read a value or a device; its inputs are known.
            seen: torch.dtype | None = inputs.dtype
            return seen if fake else None
    last: torch.dtype | None = inputs.dtype
    return found.pop() if len(found) == 1 else last


def observe(name: str, device_type: str, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """The category one op shows when it runs in an autocast region.

    Args:
        name: The op, one of those this package has a sample call for.
        device_type: ``"cuda"``, ``"cpu"`` and so on; fake tensors stand in for a missing device.
        dtype: The region's lower precision dtype.

    Returns:
        The category; None if there is no sample call, or none that runs here.
    """
    sample = SAMPLES.get(name)
    if sample is None or not names.known(name):
        return None
    fp32 = torch.float32
    with autocast_without_device(device_type, dtype):
        of_fp32 = _dtype(sample, device_type, (fp32,))
        of_lower = _dtype(sample, device_type, (dtype,))
        of_both = _dtype(sample, device_type, (dtype, fp32))
    if of_fp32 is None or isinstance(of_fp32, str):
        return of_fp32
    if of_fp32 is dtype:
        return Category.LOWER_PRECISION.value
    if of_lower is fp32:
        return Category.FP32.value
    if of_both is fp32 and of_lower is dtype:
        alone = _dtype(sample, device_type, (dtype, fp32))
        torchs = _registered(name, device_type) == Category.PROMOTE.value
        return NATIVE if alone is fp32 and not torchs else Category.PROMOTE.value
    return Category.UNLISTED.value


def _registered(name: str, device_type: str) -> str | None:
    if not names.known(name):
        return None
    found = {
        category if isinstance(category, str) else category.value
        for op in names.resolve(name)
        if (category := registered(device_type).get(op)) is not None
    }
    return found.pop() if len(found) == 1 else Category.UNLISTED.value


def _here(device_type: str) -> dict[str, OpReference]:
    documented: dict[str, dict[str, str]] = {}
    for document in names.documents():
        for category, listed in names.documented(document).get(device_type, {}).items():
            for name in listed:
                documented.setdefault(name, {})[document] = category
    covered = {op for name in documented if names.known(name) for op in names.resolve(name)}
    every = sorted({*documented, *(set(registered(device_type)) - covered)})
    return {
        name: OpReference(
            name,
            documented.get(name, {}),
            _registered(name, device_type),
            observe(name, device_type),
        )
        for name in every
    }


@functools.cache
def op_reference(device_type: str) -> Mapping[str, OpReference]:
    """What autocast does with each op: as documented, as registered in this torch, as observed.

    Torch has the documents and the behaviour, and nothing that compares them.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` and so on. Where the device is missing its ops run on
            fake tensors, in a process of their own, which some of them could abort.

    Returns:
        Op to :class:`OpReference`, for every op that a document lists or this torch registers.

    Raises:
        ValueError: This torch has no autocast for ``device_type``.
        RuntimeError: The process of its own failed.
    """
    if not torch.amp.is_autocast_available(device_type):
        raise ValueError(f"this torch has no autocast for {device_type!r}")
    if is_here(device_type):
        return _here(device_type)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; from {__name__} import _print; _print(sys.argv[1])",
            device_type,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"observing {device_type} ops failed:\n{done.stderr[-2000:]}")
    return {row["name"]: OpReference(**row) for row in json.loads(done.stdout.splitlines()[-1])}


def _print(device_type: str) -> None:
    print(json.dumps([asdict(row) for row in _here(device_type).values()]))

"""A model built without its memory: how large it is, and its weights, drawn one at a time.

What a model's constructor does is recorded on fake tensors and done again later, on the CPU, in
the same order and from the same seed, so that every weight comes out to the bit as if the model had
been built whole. But each tensor lives only from where it is overwritten last to where it is
touched last: for most models one parameter at a time. torch's way, ``reset_parameters`` on shards,
needs a method of every module, and draws other numbers on other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

__all__ = ["Sketch", "sketch"]

_ATEN = torch.ops.aten
_LIFTS = (_ATEN.lift_fresh.default, _ATEN.lift_fresh_copy.default)
# What these write does not depend on what was there before.
_OVERWRITES = frozenset(
    {
        *(_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.zero_.default, _ATEN.copy_.default),
        *(_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.random_.default, _ATEN.random_.to),
        *(_ATEN.exponential_.default, _ATEN.log_normal_.default, _ATEN.bernoulli_.float),
    }
)


def sketch(build: Callable[[], nn.Module], seed: int) -> Sketch | None:
    """Build a model of fake tensors; None for one that needs the values of its tensors.

    Not on the meta device, where initialisers that need values return without a word.

    Args:
        build: Returns the model, with weights from torch's default generator.
        seed: What that generator is to start from.
    """
    state = torch.get_rng_state()
    recorder = _Recorder()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            model = build()
        found = Sketch(model, seed, recorder.ops)
        return found if found.is_whole else None
    except Exception:  # of any class: with values it may do, and if not, that says why
        return None
    finally:
        torch.set_rng_state(state)


@dataclass
class _Op:
    """One call: what it read, wrote and made, by storage, and what is done with after it."""

    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor]
    reads: frozenset[int] = field(init=False)
    writes: frozenset[int] = field(init=False)
    overwrites: bool = field(init=False)
    frees: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        schema = zip(self.call._schema.arguments, self.args, strict=False)
        changed = [a for s, a in schema if s.alias_info is not None and s.alias_info.is_write]
        given = {_storage(t) for t in _fakes((self.args, self.kwargs))}
        self.writes = frozenset(_storage(t) for t in _fakes(changed))
        self.made = [t for t in self.made if _storage(t) not in given]
        self.overwrites = self.call in _OVERWRITES and all(map(_is_whole, _fakes(changed)))
        others = [a for a in self.args if not any(a is each for each in changed)]
        read = {_storage(t) for t in _fakes((others, self.kwargs))}
        self.reads = frozenset(read if self.overwrites else read | self.writes)

    @property
    def results(self) -> frozenset[int]:
        return self.writes | {_storage(t) for t in self.made}

    @property
    def touches(self) -> frozenset[int]:
        return self.reads | self.results

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.call.tags


class _Recorder(TorchDispatchMode):
    """Records the calls that make and change fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in _LIFTS:  # the literal of a torch.tensor(...), which is not to be changed
            func = _ATEN.clone.default
        if next(_fakes((made, args, kwargs)), None) is not None:
            # Aliases: what is given may get other memory later, by an assignment to its data.
            args, kwargs = tree_map_only(Tensor, _alias, (args, kwargs))
            self.ops.append(_Op(func, args, kwargs, [t.detach() for t in _fakes(made)]))
        return made


class Sketch:
    """A model without memory, and how its tensors come to their values.

    Attributes:
        model: On the meta device; what is done to it does not change the recording.
        parameters: How many it has.
        largest: Bytes of its largest parameter, as it is drawn.
    """

    def __init__(self, model: nn.Module, seed: int, ops: list[_Op]) -> None:
        self._named = {name: t.detach() for name, t in _tensors(model)}
        self.model = _on_meta(model)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.largest = max((p.nbytes for p in model.parameters()), default=0)
        self._seed = seed
        self._ops = _needed(ops, {_storage(t) for t in self._named.values()})

    @property
    def is_whole(self) -> bool:
        """Whether every tensor of the model comes from a recorded call."""
        known = {s for op in self._ops for s in op.results}
        return all(isinstance(t, FakeTensor) and _storage(t) in known for t in self._named.values())

    @torch.no_grad()
    def draw(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter and buffer by name, on the CPU, whole, as soon as it is final.

        Tied ones come under each of their names. The default generator is as it was afterwards.
        """
        names: dict[int, list[str]] = {}
        for name, tensor in self._named.items():
            names.setdefault(_storage(tensor), []).append(name)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            for op in self._ops:
                _do_again(op, storages)
                state = torch.get_rng_state()
                for storage in op.frees:
                    for name in names.get(storage, ()) if self._last[storage] is op else ():
                        yield name, _real(self._named[name], storages)
                    storages.pop(storage, None)
                torch.set_rng_state(state)  # whoever took them may have drawn

    def scratch(self) -> int:
        """Return the most bytes that ``draw`` holds at once."""
        sizes: dict[int, int] = {}
        most = 0
        for op in self._ops:
            for tensor in (*_fakes((op.args, op.kwargs)), *op.made):
                sizes[_storage(tensor)] = tensor.untyped_storage().nbytes()
            most = max(most, sum(sizes.values()))
            for storage in op.frees:
                sizes.pop(storage, None)
        return most

    @cached_property
    def _last(self) -> dict[int, _Op]:
        return {storage: op for op in self._ops for storage in op.touches}


def _needed(ops: list[_Op], wanted: set[int]) -> list[_Op]:
    """Return the calls that decide the wanted storages, and those that draw random numbers.

    A draw whose result is overwritten still moves the generator on. Goes backward, with what later
    calls need; a wanted storage is needed no more once nothing touches it again.
    """
    live = set(wanted)
    seen: set[int] = set()
    found: list[_Op] = []
    for op in reversed(ops):
        decides = bool(live & op.results)
        if not (op.writes or op.made) or not (decides or op.is_random):
            continue  # a view, or what nobody needs
        op.frees = frozenset(s for s in op.touches if s not in live or s not in seen)
        seen |= op.touches
        if decides:
            live -= {_storage(t) for t in op.made}
            live -= op.writes if op.overwrites else frozenset()
            live |= op.reads
        else:
            live |= op.reads - op.writes
        found.append(op)
    return found[::-1]


def _do_again(op: _Op, storages: dict[int, torch.UntypedStorage]) -> None:
    def real(tensor: Tensor) -> Tensor:
        return _real(tensor, storages) if isinstance(tensor, FakeTensor) else tensor

    args = tree_map_only(Tensor, real, op.args)
    kwargs = tree_map_only(Tensor, real, op.kwargs)
    results = [*tree_iter(op.call(*args, **kwargs))]
    for tensor, result in zip(op.made, results if op.made else (), strict=False):
        if result.stride() != tensor.stride() or result.storage_offset():
            laid_out = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            result = laid_out.copy_(result)
        storages[_storage(tensor)] = result.untyped_storage()


def _real(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """Return what a fake tensor stands for; memory that nothing was written to yet is made."""
    storage = storages.get(_storage(tensor))
    if storage is None:
        storage = torch.UntypedStorage(tensor.untyped_storage().nbytes())
        storages[_storage(tensor)] = storage
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _on_meta(model: nn.Module) -> nn.Module:
    """Put meta tensors in the place of fake ones; what was tied stays tied."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in both:
            for name, fake in tensors.items():
                if fake is None:
                    continue
                if fake not in made:
                    size, stride, dtype = fake.size(), fake.stride(), fake.dtype
                    meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
                    made[fake] = (
                        nn.Parameter(meta, fake.requires_grad)
                        if isinstance(fake, nn.Parameter)
                        else meta
                    )
                tensors[name] = made[fake]
    return model


def _fakes(tree: Any) -> Iterator[Tensor]:
    return (t for t in tree_iter(tree) if isinstance(t, FakeTensor))


def _alias(tensor: Tensor) -> Tensor:
    return tensor.detach() if isinstance(tensor, FakeTensor) else tensor


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()

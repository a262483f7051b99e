"""Levels x layouts x the ordinary things that cross them: each right, or refused in a sentence.

One step of a small net on four gloo ranks, beside the same step in float64 in one process. A cell
is right if the step is within its precision's tolerance, all ranks agree, and `Amp.check` finds the
level's contract kept. It is refused if distamp raised before anything changed.
``python -m pytest -m slow tests/levels/test_cells.py`` runs them all.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint as torchs
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp.precision_level import LEVELS as ROWS
from distamp.precision_level import PrecisionLevel
from tests.ranks import mesh

__all__ = ["CELLS", "EXTRAS", "LAYOUTS", "LEVELS", "WORLD", "Outcome", "cell", "judge"]

WORLD = 4
RATE = 1.0
PINS = {"norm": "fp32", "output": "fp32:keep_output"}
LISTS = distamp.OpLists(fp32={"linear"})
LEVELS = tuple(name for name in (*ROWS, "bf16-O2 split") if name.split()[0] in ROWS)
LAYOUTS = (
    *("plain", "DataParallel", "DDP", "FSDP1", "FSDP2", "FSDP2 offload", "HSDP"),
    *("TP", "FSDP2 x TP"),
)
SHARDED = ("FSDP1", "FSDP2", "FSDP2 offload", "HSDP", "FSDP2 x TP")
EXTRAS = (
    *("nothing", "LoRA", "pins", "op lists", "compile"),
    *("checkpoint", "reentrant checkpoint", "hook"),
)
CELLS = tuple(itertools.product(LEVELS, LAYOUTS, EXTRAS))
# What one rounding may cost, and of float8 what its products may: 3 bits.
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Outcome(NamedTuple):
    """What became of a cell: ``"right"``, ``"refused"`` or ``"wrong"``, and what was said."""

    kind: str
    said: str = ""


class Adapted(nn.Module):
    """A frozen layer with a trained product of two small matrices beside it, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    """A perceptron with a norm before its head; a part of it may be checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(16, 16)
        self.hidden, self.middle = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.output = nn.LayerNorm(16), nn.Linear(16, 8)
        self.scale: nn.Parameter | None = None

    def _inside(self, x: Tensor) -> Any:
        return self.middle(torch.tanh(self.hidden(x)))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self.reentrant is None:
            x = self._inside(x)
        else:
            x = torchs.checkpoint(self._inside, x, use_reentrant=self.reentrant)
        x = x if self.scale is None else x * self.scale
        return self.output(self.norm(x))


def level_of(name: str) -> PrecisionLevel:
    """Return the level that a cell names."""
    name, _, split = name.partition(" ")
    overrides: dict[str, Any] = {"master_weights": "split"} if split else {}
    return PrecisionLevel.from_name(name, **overrides)


def net(level: PrecisionLevel, extra: str) -> Net:
    """Return the net before anything is done to it; under LoRA its base is half.

    One of the adapters is a scale, which hands fp32 to a half norm.
    """
    torch.manual_seed(0)
    reentrant = {"checkpoint": False, "reentrant checkpoint": True}.get(extra)
    model = Net(reentrant)
    if extra == "LoRA":
        model.requires_grad_(False).to(torch.bfloat16 if level.name == "fp32" else level.compute)
        model.output = Adapted(model.output)  # type: ignore[assignment]
        model.scale = nn.Parameter(torch.ones(16))
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all ranks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 16, generator=generator), torch.randn(32, 8, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.to(target.dtype) - target).square().mean()


def reference(level: PrecisionLevel, extra: str) -> list[Tensor]:
    """Return the trained parameters before and after one step of SGD in float64."""
    model = net(level, extra).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    x, target = batch()
    loss_of(model(x.double()), target.double()).backward()
    torch.optim.SGD(trained, lr=RATE).step()
    return [*before, *(p.detach() for p in trained)]


# -- a layout ----------------------------------------------------------------------------------


def _pinned(model: Any, extra: str) -> list[nn.Module]:
    return [model.norm, model.output] if extra == "pins" else []


def _fsdp1(model: Any, half: torch.dtype | None, extra: str) -> nn.Module:
    settings: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    policy = None if half is None else MixedPrecision(param_dtype=half, reduce_dtype=half)
    inside = {id(m) for m in _pinned(model, extra)}
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear | nn.LayerNorm):
            own = None if id(part) in inside else policy
            head, _, leaf = name.rpartition(".")
            wrapped = FullyShardedDataParallel(part, mixed_precision=own, **settings)
            setattr(model.get_submodule(head), leaf, wrapped)
    return FullyShardedDataParallel(model, mixed_precision=policy, **settings)


def _fsdp2(model: Any, over: Any, half: torch.dtype | None, extra: str, **settings: Any) -> Any:
    policy = MixedPrecisionPolicy(half, output_dtype=None if half is None else torch.float32)
    part_policy = MixedPrecisionPolicy(half)
    alone = {id(m) for m in _pinned(model, extra)}
    for part in [m for m in model.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]:
        own = MixedPrecisionPolicy() if id(part) in alone else part_policy
        fully_shard(part, mesh=over, mp_policy=own, **settings)
    return fully_shard(model, mesh=over, mp_policy=policy, **settings)


def wrapped(model: Any, layout: str, half: torch.dtype | None, extra: str) -> nn.Module:
    """Wrap a model as the docs say for its level: ``half`` is FSDP's own mixed precision."""
    if "TP" in layout:
        size = dist.get_world_size()
        over = mesh((size,), ("tp",)) if layout == "TP" else mesh((2, 2), ("shard", "tp"))["tp"]
        plan = {"hidden": ColwiseParallel(), "middle": RowwiseParallel()}
        parallelize_module(model, over, plan)
    if layout == "DataParallel":
        return nn.DataParallel(model)
    if layout == "DDP":
        return DistributedDataParallel(model)
    if layout == "FSDP1":
        return _fsdp1(model, half, extra)
    shapes = {"HSDP": ((2, 2), ("replicate", "shard")), "FSDP2 x TP": ((2, 2), ("shard", "tp"))}
    if layout in ("FSDP2", "FSDP2 offload", "HSDP", "FSDP2 x TP"):
        over = mesh(*shapes.get(layout, ((dist.get_world_size(),), ("shard",))))
        over = over["shard"] if layout == "FSDP2 x TP" else over
        offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        return _fsdp2(model, over, half, extra, **(offload if "offload" in layout else {}))
    return model  # type: ignore[no-any-return]


def share(tensors: tuple[Tensor, Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """Return this rank's rows: ranks that hold parts of one matrix see the same."""
    parts = {"plain": 1, "DataParallel": 1, "TP": 1, "FSDP2 x TP": 2}.get(layout, WORLD)
    at = dist.get_rank() // (WORLD // parts)
    return tensors[0].chunk(parts)[at], tensors[1].chunk(parts)[at]


@torch.no_grad()
def whole(model: nn.Module) -> list[Tensor]:
    """Return the trained parameters, unsharded, in float64."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, FullyShardedDataParallel):
            full = FullyShardedDataParallel.summon_full_params(model, writeback=False)
            stack.enter_context(full)
        trained = [p for p in model.parameters() if p.requires_grad]
        parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in trained]
        return [p.detach().double().clone() for p in parts]


# -- a cell ------------------------------------------------------------------------------------


def cell(level_name: str, layout: str, extra: str) -> tuple[str, Any]:
    """Run a cell on this rank: ``("ran", ...)``, ``("refused", why)`` or ``("raised", why)``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile warns of DTensors, as an error here
        return _cell(level_name, layout, extra)


def _cell(level_name: str, layout: str, extra: str) -> tuple[str, Any]:
    level = level_of(level_name)
    model: Any = net(level, extra)
    amp: Any = None
    pins = PINS if extra == "pins" else None
    own_policy = layout in SHARDED and level.casts_model and level.master_weights is True
    try:
        if not own_policy:
            distamp.cast_model(model, level, module_precision=pins)
        if extra == "compile":
            torch._dynamo.reset()  # of the ninth kind of one module it would compile nothing
            model.hidden.compile(backend="aot_eager")
        model = wrapped(model, layout, level.param if own_policy else None, extra)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=RATE)
        before = [p.detach().clone() for p in trained]
        settings: dict[str, Any] = {"module_precision": pins}
        settings |= {"init_scale": 256.0} if level.loss_scale == "dynamic" else {}
        settings |= {"comm_hook": "fp16"} if extra == "hook" else {}
        settings |= {"op_lists": LISTS} if extra == "op lists" else {}
        try:
            amp = distamp.initialize(model, optimizer, level, **settings)
        except Exception:
            after = [p.detach() for p in trained]
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            same = all(a.dtype is b.dtype for a, b in zip(before, after, strict=True))
            if not same or any(a is not b for a, b in zip(stepped, trained, strict=True)):
                raise AssertionError("refused after the model was changed") from None
            raise
        x, target = share(batch(), layout)

        def step() -> None:
            amp.zero_grad()
            with amp.autocast():
                output = amp.model(x)
            amp.backward(loss_of(output.float(), target))
            assert amp.step(), "a step without a fault was skipped"

        step()
        found = whole(amp.model)
        return "ran", (found, {each.key: each.found for each in amp.check(step)})
    except Exception as error:
        ours = traceback.extract_tb(error.__traceback__)[-1].filename
        named = isinstance(error, ValueError | TypeError | distamp.DistampError)
        refused = amp is None and named and Path(distamp.__file__).parent in Path(ours).parents
        return "refused" if refused else "raised", f"{type(error).__name__}: {error}"


def judge(level_name: str, layout: str, extra: str, answers: list[tuple[str, Any]]) -> Outcome:
    """Say what became of a cell, from what every rank did."""
    kinds = {kind for kind, _ in answers}
    if kinds == {"refused"}:
        return Outcome("refused", answers[0][1])
    if kinds != {"ran"}:
        return Outcome("wrong", next(said for kind, said in answers if kind != "ran"))
    level = level_of(level_name)
    found, broken = answers[0][1]
    if not all(all(map(torch.equal, found, other)) for _, (other, _) in answers):
        return Outcome("wrong", "ranks have parted")
    both = reference(level, extra)
    before, wanted = both[: len(found)], both[len(found) :]
    eps = EPS[level.compute] + EPS[torch.float16] * (extra == "hook")
    stored = EPS[level.param]  # a model in half precision shows its masters rounded
    zeros = [torch.zeros(())] * len(wanted)
    off, moved, size = (
        sum((a - b).square().sum().item() for a, b in zip(one, other, strict=True)) ** 0.5
        for one, other in ((found, wanted), (wanted, before), (wanted, zeros))
    )
    allowed = (8 * eps if level.linear_recipe is None else 0.3) * moved + stored * size
    # bfloat16 itself is off by less than half of the least that float8 is.
    least = 0.0 if level.linear_recipe is None else 2.0**-6 * moved
    if not least <= off <= allowed:
        said = f"off by {off:.3g}, not {least:.3g} to {allowed:.3g}, of a step of {moved:.3g}"
        return Outcome("wrong", said)
    # Compiled, emulated products of float8 are in float32.
    emulated = level.linear_recipe is not None and extra == "compile"
    expected = {"compute": "fp32"} if extra == "op lists" or emulated else {}
    if broken != expected:
        return Outcome("wrong", f"the level's contract is broken: {broken}")
    return Outcome("right")

"""Levels x layouts x the ordinary things that cross them: each right, or refused in a sentence.

One step of a small net on four gloo ranks is compared with the same step in float64 in one process.
A cell is right if the step is within its precision's tolerance, all ranks agree, and `Amp.check`
finds no violation of the level's contract. It is refused if distamp raised before anything changed.
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
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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
from distamp.precision_level import LEVELS as LEVEL_TABLE
from distamp.precision_level import PrecisionLevel
from tests.ranks import mesh

__all__ = ["CELLS", "EXTRAS", "LAYOUTS", "LEVELS", "WORLD", "Outcome", "judge", "run_cell"]

WORLD = 4
RATE = 1.0
PINS = {"norm": "fp32", "output": "fp32:keep_output"}
LISTS = distamp.OpLists(fp32={"linear"})
LEVELS = (*LEVEL_TABLE, "bf16-O2 split")
LAYOUTS = (
    "plain",
    "DataParallel",
    "DDP",
    "FSDP1",
    "FSDP2",
    "FSDP2 offload",
    "HSDP",
    "TP",
    "FSDP2 x TP",
)
SHARDED = ("FSDP1", "FSDP2", "FSDP2 offload", "HSDP", "FSDP2 x TP")
EXTRAS = (
    "nothing",
    "LoRA",
    "pins",
    "op lists",
    "compile",
    "checkpoint",
    "reentrant checkpoint",
    "hook",
)
CELLS = tuple(itertools.product(LEVELS, LAYOUTS, EXTRAS))
# The relative error of one rounding.
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Outcome(NamedTuple):
    """The outcome of a cell: ``"right"``, ``"refused"`` or ``"wrong"``, and the reason."""

    kind: str
    reason: str = ""


class Adapted(nn.Module):
    """A frozen layer plus a trained product of two small matrices, as LoRA has them."""

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
        self.hidden = nn.Linear(16, 32)
        self.middle = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.output = nn.Linear(16, 8)
        self.scale: nn.Parameter | None = None

    def _run_middle(self, x: Tensor) -> Any:
        return self.middle(torch.tanh(self.hidden(x)))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self.reentrant is None:
            x = self._run_middle(x)
        else:
            checkpoint = torch.utils.checkpoint.checkpoint
            x = checkpoint(self._run_middle, x, use_reentrant=self.reentrant)
        if self.scale is not None:
            x = x * self.scale
        return self.output(self.norm(x))


def level_of(cell_level: str) -> PrecisionLevel:
    """Return the level that a cell names."""
    name, _, split = cell_level.partition(" ")
    if split:
        return PrecisionLevel.from_name(name, master_weights="split")
    return PrecisionLevel.from_name(name)


def net(level: PrecisionLevel, extra: str) -> Net:
    """Return the net before anything is done to it; under LoRA its base is half.

    One of the adapters is a scale, which passes fp32 to a half norm.
    """
    torch.manual_seed(0)
    reentrant = {"checkpoint": False, "reentrant checkpoint": True}.get(extra)
    model = Net(reentrant)
    if extra == "LoRA":
        base = torch.bfloat16 if level.name == "fp32" else level.compute
        model.requires_grad_(False).to(base)
        model.output = Adapted(model.output)  # type: ignore[assignment]
        model.scale = nn.Parameter(torch.ones(16))
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all ranks."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 16, generator=generator)
    targets = torch.randn(32, 8, generator=generator)
    return inputs, targets


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.to(target.dtype) - target).square().mean()


def trained_params(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


class Reference(NamedTuple):
    """The trained parameters before and after one step of SGD in float64."""

    before: list[Tensor]
    after: list[Tensor]


def reference(level: PrecisionLevel, extra: str) -> Reference:
    """Take the step of a cell in float64 in one process."""
    model = net(level, extra).double()
    trained = trained_params(model)
    before = [param.detach().clone() for param in trained]
    inputs, targets = batch()
    loss_of(model(inputs.double()), targets.double()).backward()
    torch.optim.SGD(trained, lr=RATE).step()
    return Reference(before, [param.detach() for param in trained])


# -- a layout ----------------------------------------------------------------------------------


def _pinned_modules(model: Any, extra: str) -> list[nn.Module]:
    return [model.norm, model.output] if extra == "pins" else []


def _wrap_in_fsdp1(model: Any, half: torch.dtype | None, extra: str) -> nn.Module:
    """Wrap each layer and the root; a pinned layer has no policy."""
    settings: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    policy = None if half is None else MixedPrecision(param_dtype=half, reduce_dtype=half)
    pinned = _pinned_modules(model, extra)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear | nn.LayerNorm):
            is_pinned = any(layer is module for module in pinned)
            layer_policy = None if is_pinned else policy
            unit = FullyShardedDataParallel(layer, mixed_precision=layer_policy, **settings)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, unit)
    return FullyShardedDataParallel(model, mixed_precision=policy, **settings)


def _wrap_in_fsdp2(
    model: Any, device_mesh: Any, half: torch.dtype | None, extra: str, **settings: Any
) -> Any:
    """Shard each layer and the root, which returns float32; a pinned layer has an empty policy."""
    settings["mesh"] = device_mesh
    output_dtype = None if half is None else torch.float32
    pinned = _pinned_modules(model, extra)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.LayerNorm)]
    for layer in layers:
        is_pinned = any(layer is module for module in pinned)
        policy = MixedPrecisionPolicy() if is_pinned else MixedPrecisionPolicy(half)
        fully_shard(layer, mp_policy=policy, **settings)
    root_policy = MixedPrecisionPolicy(half, output_dtype=output_dtype)
    return fully_shard(model, mp_policy=root_policy, **settings)


def _mesh_of_all_ranks(name: str) -> DeviceMesh:
    return mesh((dist.get_world_size(),), (name,))


def _parallelize(model: nn.Module, device_mesh: Any) -> None:
    plan = {"hidden": ColwiseParallel(), "middle": RowwiseParallel()}
    parallelize_module(model, device_mesh, plan)


def wrapped(model: Any, layout: str, half: torch.dtype | None, extra: str) -> nn.Module:
    """Wrap a model as the docs say for its level: ``half`` is FSDP's own mixed precision."""
    if layout == "DataParallel":
        return nn.DataParallel(model)
    if layout == "DDP":
        return DistributedDataParallel(model)
    if layout == "FSDP1":
        return _wrap_in_fsdp1(model, half, extra)
    if layout == "FSDP2":
        return _wrap_in_fsdp2(model, _mesh_of_all_ranks("shard"), half, extra)
    if layout == "FSDP2 offload":
        offload = CPUOffloadPolicy(pin_memory=False)
        device_mesh = _mesh_of_all_ranks("shard")
        return _wrap_in_fsdp2(model, device_mesh, half, extra, offload_policy=offload)
    if layout == "HSDP":
        return _wrap_in_fsdp2(model, mesh((2, 2), ("replicate", "shard")), half, extra)
    if layout == "TP":
        _parallelize(model, _mesh_of_all_ranks("tp"))
    if layout == "FSDP2 x TP":
        device_mesh = mesh((2, 2), ("shard", "tp"))
        _parallelize(model, device_mesh["tp"])
        return _wrap_in_fsdp2(model, device_mesh["shard"], half, extra)
    return model  # type: ignore[no-any-return]


def share(tensors: tuple[Tensor, Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """Return this rank's rows: ranks that hold parts of one matrix have the same rows."""
    num_parts = {"plain": 1, "DataParallel": 1, "TP": 1, "FSDP2 x TP": 2}.get(layout, WORLD)
    index = dist.get_rank() // (WORLD // num_parts)
    inputs, targets = tensors
    return inputs.chunk(num_parts)[index], targets.chunk(num_parts)[index]


@torch.no_grad()
def full_params(model: nn.Module) -> list[Tensor]:
    """Return the trained parameters, unsharded, in float64."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, FullyShardedDataParallel):
            summoned = FullyShardedDataParallel.summon_full_params(model, writeback=False)
            stack.enter_context(summoned)
        params: list[Tensor] = []
        for param in trained_params(model):
            full = param.full_tensor() if isinstance(param, DTensor) else param
            params.append(full.detach().double().clone())
        return params


# -- a cell ------------------------------------------------------------------------------------


def run_cell(level_name: str, layout: str, extra: str) -> tuple[str, Any]:
    """Run a cell on this rank.

    Returns:
        ``("ran", (parameters, violations))``, ``("refused", reason)`` or ``("raised", reason)``.
    """
    with warnings.catch_warnings():
        # Warnings are errors on ranks, and torch.compile warns about DTensors.
        warnings.simplefilter("ignore")
        try:
            amp = _initialize_cell(level_name, layout, extra)
        except Exception as error:
            kind = "refused" if _is_refusal(error) else "raised"
            return kind, f"{type(error).__name__}: {error}"
        try:
            return "ran", _train_cell(amp, layout)
        except Exception as error:
            return "raised", f"{type(error).__name__}: {error}"


def _is_refusal(error: Exception) -> bool:
    """Return whether distamp itself raised, and an error that users are meant to read."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    is_ours = Path(distamp.__file__).parent in Path(raised_in).parents
    return is_ours and isinstance(error, ValueError | TypeError | distamp.DistampError)


def _initialize_cell(level_name: str, layout: str, extra: str) -> Any:
    """Build the model of a cell as the docs say, and return its Amp."""
    level = level_of(level_name)
    model: Any = net(level, extra)
    pins = PINS if extra == "pins" else None
    casts_by_policy = layout in SHARDED and level.casts_model and level.master_weights is True
    if not casts_by_policy:
        distamp.cast_model(model, level, module_precision=pins)
    if extra == "compile":
        # torch compiles a module eight times at most.
        torch._dynamo.reset()
        model.hidden.compile(backend="aot_eager")
    model = wrapped(model, layout, level.param if casts_by_policy else None, extra)
    optimizer = torch.optim.SGD(trained_params(model), lr=RATE)
    settings: dict[str, Any] = {"module_precision": pins}
    if level.loss_scale == "dynamic":
        settings["init_scale"] = 256.0
    if extra == "hook":
        settings["comm_hook"] = "fp16"
    if extra == "op lists":
        settings["op_lists"] = LISTS
    return _initialize_or_leave_unchanged(model, optimizer, level, settings)


def _initialize_or_leave_unchanged(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: PrecisionLevel,
    settings: dict[str, Any],
) -> Any:
    """Call `initialize`, and raise AssertionError if a refusal changed the model."""
    trained = trained_params(model)
    dtypes = [param.dtype for param in trained]
    try:
        return distamp.initialize(model, optimizer, level, **settings)
    except Exception:
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        has_same_params = list(map(id, stepped)) == list(map(id, trained))
        if not has_same_params or [param.dtype for param in trained] != dtypes:
            raise AssertionError("refused after the model was changed") from None
        raise


def _train_cell(amp: Any, layout: str) -> tuple[list[Tensor], dict[str, str]]:
    """Take a step, and a second one under `Amp.check`.

    Returns:
        The parameters after the first step, and the violations of the contract in the second.
    """
    inputs, targets = share(batch(), layout)

    def step() -> None:
        amp.zero_grad()
        with amp.autocast():
            output = amp.model(inputs)
        amp.backward(loss_of(output.float(), targets))
        assert amp.step(), "a step without a fault was skipped"

    step()
    params = full_params(amp.model)
    violations = {violation.key: violation.found for violation in amp.check(step)}
    return params, violations


def distance(tensors: list[Tensor], others: list[Tensor]) -> float:
    """Return the L2 norm of the difference."""
    pairs = zip(tensors, others, strict=True)
    squares = [(a - b).square().sum().item() for a, b in pairs]
    return sum(squares) ** 0.5


def judge(level_name: str, layout: str, extra: str, answers: list[tuple[str, Any]]) -> Outcome:
    """Return the outcome of a cell from the answers of all ranks."""
    kinds = {kind for kind, _ in answers}
    if kinds == {"refused"}:
        return Outcome("refused", answers[0][1])
    if kinds != {"ran"}:
        errors = [reason for kind, reason in answers if kind != "ran"]
        return Outcome("wrong", errors[0])
    params, violations = answers[0][1]
    for _, (params_of_rank, _) in answers:
        if not all(map(torch.equal, params, params_of_rank)):
            return Outcome("wrong", "ranks diverged")
    level = level_of(level_name)
    reason = _error_of_step(level, extra, params)
    if reason:
        return Outcome("wrong", reason)
    expected = {"compute": "fp32"} if extra == "op lists" else {}
    if violations != expected:
        return Outcome("wrong", f"the level's contract is broken: {violations}")
    return Outcome("right")


def _error_of_step(level: PrecisionLevel, extra: str, params: list[Tensor]) -> str:
    """Return a sentence if the parameters are not those of the step in float64, else ``""``."""
    exact = reference(level, extra)
    error = distance(params, exact.after)
    size_of_step = distance(exact.after, exact.before)
    size = distance(exact.after, [torch.zeros(())] * len(exact.after))
    eps = EPS[level.compute]
    if extra == "hook":
        eps += EPS[torch.float16]
    least = 0.0
    share_of_step = 8 * eps
    if level.linear_recipe is not None:
        # Products in float8 have 3 bits, and bfloat16 alone is off by less than half of the least.
        least = 2.0**-6 * size_of_step
        share_of_step = 0.3
    # A model in half precision shows its masters rounded.
    allowed = share_of_step * size_of_step + EPS[level.param] * size
    if least <= error <= allowed:
        return ""
    limits = f"{least:.3g} to {allowed:.3g}"
    return f"off by {error:.3g}, not {limits}, of a step of {size_of_step:.3g}"

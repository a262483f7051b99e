"""compare_gradients: the gradients of a sharded step beside those of one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distamp.clip_grad import LayoutFn
from distamp.error_text import count_text, ranks_text
from distamp.errors import CallOrderError, ConfigError
from distamp.fsdp_params import check_reduction_finished
from distamp.fsdp_unit import FSDPUnit
from distamp.grads import is_dtensor
from distamp.module_names import module_names
from distamp.process_group import GroupLike, all_gather_rows, check_group, resolve_process_group
from distamp.report.flat_params import FlatParams
from distamp.report.formatting import JsonResult, shorten
from distamp.report.gathered_gradients import (
    FSDP1,
    FSDP2,
    LayoutPlan,
    ParamPart,
    ReferenceParam,
    TensorMessenger,
    find_parts,
    is_wrapper,
    reference_params,
)
from distamp.report.gradient_causes import (
    FROZEN,
    MISSING,
    NOT_FINITE,
    GradientStats,
    ParamEvidence,
    RankEvidence,
    Tolerance,
    apply_to_all,
    find_cause,
)
from distamp.report.rank_group import RankGroup
from distamp.report.tensors import flatten_tensors, model_tensors

__all__ = ["GradientComparison", "GradientRow", "compare_gradients"]

_CALL = "compare_gradients()"
_Step = Callable[[], Any]

# -- the result ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientRow:
    """One parameter's gradient, compared with that of the reference.

    Attributes:
        name: The name of the parameter in the reference.
        factor: The factor of the reference's gradient that fits best, or None if the reference's
            gradient is zero.
        residual: The norm of what differs after the factor, relative to the reference's gradient.
        error: The norm of the difference, relative to the reference's gradient.
        cause: The likely cause of the difference, or "" for a gradient that matches.
        axis: The axis of the layout to which the cause belongs, or "".
        other_axes: Further axes of the same size, which fit the numbers as well.
        ranks: The ranks that differ; all ranks that hold the parameter if empty.
        detail: Further words, such as the dtype of a reduction.
    """

    name: str
    factor: float | None
    residual: float
    error: float
    cause: str = ""
    axis: str = ""
    other_axes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.describe()}"

    def describe(self) -> str:
        """Return the line about the parameter without its name."""
        if not self.cause:
            return f"matches the reference ({self.error:.1e} apart)"
        place = f" on {self.axis}" if self.axis else ""
        if self.ranks:
            place += f" on {ranks_text(self.ranks)}"
        amount = "no factor" if self.factor is None else f"{self.factor:.2f} of the reference"
        if self.cause == NOT_FINITE:
            amount = "inf or NaN"
        elif self.cause in (MISSING, FROZEN):
            amount = "no gradient"
        elif self.factor is not None and self.residual > 1e-4:
            amount += f", {self.residual:.2g} left"
        cause = self.cause
        if self.axis and self.cause not in (MISSING, FROZEN):
            cause += f" over {' or '.join([self.axis, *self.other_axes])}"
        if self.detail:
            cause += f" ({self.detail})"
        return f"{amount}{place}: {cause}"


@dataclass(frozen=True)
class GradientComparison(JsonResult):
    """Gradients of a sharded model beside those of one process, the same on every rank.

    Attributes:
        rows: A row for each parameter that the reference trains, in the reference's order.
        tolerance: The largest relative difference of a gradient that matches.
        dtype: The lowest dtype in which the models computed.
    """

    rows: tuple[GradientRow, ...]
    tolerance: float
    dtype: str

    @property
    def differences(self) -> tuple[GradientRow, ...]:
        """The rows of gradients that differ."""
        return tuple(row for row in self.rows if row.cause)

    @property
    def matches(self) -> bool:
        """Whether all gradients match the reference."""
        return not self.differences

    def __str__(self) -> str:
        differences = self.differences
        settings = f"tolerance {self.tolerance:.1e}, computed in {self.dtype}"
        total = count_text(len(self.rows), "gradient")
        if not differences:
            largest = max((row.error for row in self.rows), default=0.0)
            return f"{total} of the reference matched, at most {largest:.1e} apart ({settings})"
        lines = [f"{len(differences)} of {total} differ from the reference ({settings})"]
        names_by_text: dict[str, list[str]] = {}
        for row in differences:
            names_by_text.setdefault(row.describe(), []).append(row.name)
        for text, names in names_by_text.items():
            label = ", ".join(names)
            if len(names) > 2:
                label = f"{count_text(len(names), 'parameter')} ({shorten(names)})"
            lines.append(f"{label}: {text}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        rows = []
        for row in self.rows:
            values = asdict(row)
            for key in ("factor", "residual", "error"):
                if values[key] is not None and not math.isfinite(values[key]):
                    values[key] = None
            values["ranks"] = list(row.ranks)
            values["other_axes"] = list(row.other_axes)
            rows.append(values)
        return {
            "matches": self.matches,
            "tolerance": self.tolerance,
            "dtype": self.dtype,
            "rows": rows,
        }


# -- the call --------------------------------------------------------------------------------------


def compare_gradients(
    step: _Step,
    model: nn.Module | Sequence[nn.Module],
    reference_step: _Step | None = None,
    reference_model: nn.Module | None = None,
    tolerance: float | None = None,
    *,
    shard_group_fn: LayoutFn | None = None,
    mesh: DeviceMesh | None = None,
    reference_name_fn: Callable[[str], str] | None = None,
    process_group: GroupLike = None,
) -> GradientComparison:
    """Compare the gradients of a sharded step with those of one process, and name what differs.

    The call copies the weights and buffers of the sharded model to the reference, runs both steps,
    and compares the gradient of every parameter over the whole layout. It drops the gradients of
    both models before the steps and at the end, and changes nothing else of the sharded model.

    Collective: every rank of ``process_group`` must call this.

    Args:
        step: Runs forward and backward of the sharded model on this rank's part of a global batch,
            with all that the training loop does to gradients before it clips them. It must not step
            the optimizer, and not drop the gradients.
        model: The sharded model, or the pipeline stages that this rank has.
        reference_step: Runs forward and backward of the reference on the whole global batch. Only
            the first rank calls it. Other ranks may pass None.
        reference_model: The model on one process, with the parameters' names of the sharded model.
            The first rank must pass it, and its weights are overwritten. Other ranks may pass None.
        tolerance: The largest difference of a right gradient, relative to the norm of the
            reference's gradient. By default it follows from the dtypes in which the models compute
            and from the lengths of their sums.
        shard_group_fn: Returns over which ranks a plain parameter is sharded, as in
            `DistGradScaler.clip_grad_norm_`. The shards are concatenated in the dimension in which
            the reference is larger.
        mesh: A mesh whose dimensions name the axes, for parameters that are no DTensors. Meshes of
            DTensors are known.
        reference_name_fn: Returns the reference's name of a parameter of this rank, for ranks that
            have other names than the reference (such as local indices of experts).
        process_group: The ranks that hold the sharded model (ProcessGroup or DeviceMesh); the
            default group if None.

    Returns:
        A row for each parameter. ``print(comparison)`` shows the parameters that differ, and
        ``comparison.matches`` is True if none does.

    Raises:
        ConfigError: An argument cannot be used: names or shapes do not match, dropout is on, or a
            layout is not known. Every rank raises.
        CallOrderError: No parameter has a gradient after the steps.
        DistampError: Another rank raised.

    Example::

        comparison = compare_gradients(step, model, reference_step, reference_model)
        assert comparison.matches, comparison
    """
    check_group(process_group)
    group = resolve_process_group(process_group)
    ranks = RankGroup.begin(_CALL, group)
    models = [model] if isinstance(model, nn.Module) else list(model)
    with ranks.raise_together(_CALL):
        _check_arguments(ranks, models, reference_step, reference_model, tolerance)
        is_first = ranks.is_first
        reference = reference_params(reference_model) if is_first and reference_model else {}
        parts, axes = find_parts(models, shard_group_fn, mesh, ranks.ranks, reference_name_fn)
    infos = [part.describe() for part in parts]
    gathered = ranks.gather((_describe_reference(reference), infos, axes))
    names_of_reference = gathered[0][0]
    plan = LayoutPlan.make(names_of_reference, [entry[1:] for entry in gathered], ranks.ranks)
    messenger = TensorMessenger(group, _device_of(parts, reference))
    first_names = {name: param.name for param, names in names_of_reference for name in names}
    comparison = _Comparison(ranks, plan, messenger, parts, reference, first_names)
    with ranks.raise_together(_CALL), torch.no_grad():
        comparison.copy_weights()
        _copy_buffers(ranks, models, reference_model if is_first else None)
    try:
        with ranks.raise_together("step()"):
            run = _run_step(step, models)
            check_reduction_finished(part.param for part in parts)
        with ranks.raise_together("reference_step()"):
            if ranks.is_first and reference_step is not None and reference_model is not None:
                run = run.merge(_run_step(reference_step, [reference_model]))
        with torch.no_grad():
            return comparison.compare(run, models, tolerance)
    finally:
        _drop_gradients(models)
        if ranks.is_first and reference_model is not None:
            _drop_gradients([reference_model])


def _check_arguments(
    ranks: RankGroup,
    models: Sequence[nn.Module],
    reference_step: _Step | None,
    reference_model: nn.Module | None,
    tolerance: float | None,
) -> None:
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"tolerance must be a positive number or None, not {tolerance}")
    if ranks.is_first and (reference_step is None or reference_model is None):
        raise ConfigError(
            f"reference_step and reference_model are missing on rank {ranks.ranks[0]}, which "
            "computes the gradients of one process. Pass both there."
        )
    reference_models = []
    if ranks.is_first and reference_model is not None:
        reference_models = [reference_model]
        if any(reference_model is model for model in models):
            raise ConfigError(
                "reference_model is the sharded model itself. Pass a second model, made by the "
                "same code without the layout."
            )
    for kind, checked in (("model", models), ("reference_model", reference_models)):
        for root in checked:
            for module, name in module_names(root).items():
                _check_no_dropout(kind, name, module)


def _check_no_dropout(kind: str, name: str, module: nn.Module) -> None:
    """Refuse dropout, because the ranks and the reference would drop different elements."""
    if not module.training:
        return
    rates = {key: value for key, value in vars(module).items() if "dropout" in key.lower()}
    if is_wrapper(module, "_DropoutNd"):
        rates = {"p": module.p}
    for key, rate in rates.items():
        if isinstance(rate, float) and rate > 0:
            label = name or type(module).__name__
            raise ConfigError(
                f"{label} of {kind} has dropout ({key}={rate:g}), which drops other elements in "
                "the sharded step than in the reference step. Set the rate to 0, or call "
                "model.eval() before compare_gradients()."
            )


def _describe_reference(
    params: dict[str, Tensor],
) -> list[tuple[ReferenceParam, tuple[str, ...]]]:
    """Return each parameter of the reference with all its names."""
    names_by_param: dict[int, list[str]] = {}
    for name, param in params.items():
        names_by_param.setdefault(id(param), []).append(name)
    described = []
    for names in names_by_param.values():
        param = params[names[0]]
        shape = tuple(param.shape)
        row = ReferenceParam(names[0], shape, param.dtype, param.requires_grad)
        described.append((row, tuple(names)))
    return described


def _device_of(parts: Sequence[ParamPart], reference: dict[str, Tensor]) -> torch.device:
    for part in parts:
        return part.weight.device
    for param in reference.values():
        return param.device
    return torch.device("cpu")


def _copy_buffers(
    ranks: RankGroup, models: Sequence[nn.Module], reference_model: nn.Module | None
) -> None:
    """Copy the sharded model's buffers of the first rank to the reference, by name and shape."""
    if reference_model is None:
        return
    buffers = {}
    for model in models:
        for row in model_tensors(module_names(model)):
            if row.kind == "buffer" and not is_dtensor(row.tensor):
                buffers[row.name] = row.tensor
    for row in model_tensors(module_names(reference_model)):
        source = buffers.get(row.name)
        if row.kind == "buffer" and source is not None and source.shape == row.tensor.shape:
            row.tensor.copy_(source)


# -- the steps -------------------------------------------------------------------------------------


class _StepRun(NamedTuple):
    """Properties of a step that bound the rounding of its gradients.

    Args:
        dtypes: The floating dtypes of the outputs of modules and of gradients.
        longest_sum: The largest number of terms in a sum: positions, or the width of a parameter.
    """

    dtypes: frozenset[torch.dtype]
    longest_sum: int

    def merge(self, other: _StepRun) -> _StepRun:
        """Return the properties of both steps."""
        return _StepRun(self.dtypes | other.dtypes, max(self.longest_sum, other.longest_sum))


def _run_step(step: _Step, models: Sequence[nn.Module]) -> _StepRun:
    """Run a step without old gradients, and observe the outputs of modules."""
    _drop_gradients(models)
    dtypes: set[torch.dtype] = set()
    longest_sum = 1
    device_types = {param.device.type for model in models for param in model.parameters()}

    def observe(_module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal longest_sum
        for device_type in device_types:
            if torch.is_autocast_enabled(device_type):
                dtypes.add(torch.get_autocast_dtype(device_type))
        for tensor in flatten_tensors(output):
            if tensor.is_floating_point() and tensor.dim():
                dtypes.add(tensor.dtype)
                longest_sum = max(longest_sum, tensor.numel() // max(tensor.shape[-1], 1))

    with contextlib.ExitStack() as stack, torch.enable_grad():
        for model in models:
            for module in _eager_modules(model):
                handle = module.register_forward_hook(observe)
                stack.callback(handle.remove)
        step()
    for model in models:
        for param in model.parameters():
            if param.grad is not None:
                dtypes.add(param.grad.dtype)
            if param.dim() > 1:
                longest_sum = max(longest_sum, *param.shape)
    return _StepRun(frozenset(dtypes), longest_sum)


def _eager_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules whose hooks do not run in compiled code, which a hook would break up."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return
    yield module
    if type(module).__name__ != "OptimizedModule":
        for child in module.children():
            yield from _eager_modules(child)


def _fsdp2_units(models: Sequence[nn.Module]) -> Iterator[FSDPUnit]:
    for model in models:
        for module in model.modules():
            if is_wrapper(module, FSDP2):
                yield FSDPUnit(module)


def _drop_gradients(models: Sequence[nn.Module]) -> None:
    """Drop all gradients, reduced or not."""
    for model in models:
        for row in model_tensors(module_names(model)):
            if row.kind == "parameter":
                row.tensor.grad = None
        for module in model.modules():
            flat_params = FlatParams.find(module) if is_wrapper(module, FSDP1) else None
            if flat_params is not None:
                flat_params.drop_gradients()
    _drop_unreduced(models)


def _drop_unreduced(models: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """Drop gradients that FSDP2 did not reduce.

    Returns:
        The ranks over which each gradient was not reduced, by the id of its shard.
    """
    unreduced: dict[int, tuple[int, ...]] = {}
    for unit in _fsdp2_units(models):
        if unit.has_partly_reduced_gradients:
            ranks = _ranks_of(unit.replicate_group)
            unreduced.update((id(shard), ranks) for shard in unit.shards())
        for shard in unit.drop_unreduced_gradients():
            unreduced[id(shard)] = _ranks_of(unit.shard_group)
    return unreduced


def _ranks_of(group: Any) -> tuple[int, ...]:
    return () if group is None else tuple(dist.get_process_group_ranks(group))


# -- the tolerance ---------------------------------------------------------------------------------

#: Errors of rounding accumulate through the layers, and a step has several sums in a row.
_SUMS_IN_A_ROW = 16
#: Gradients that cancel to zero are as large as the rounding of their module's gradients.
_CANCELLATION = 16
#: Rounding of a reduction in half precision is larger than this, and shows in float32.
_LARGEST_FP32 = 2.0**-12
_LARGEST_HALF = 0.25


def _make_tolerance(run: _StepRun, override: float | None) -> tuple[Tolerance, str]:
    """Return the tolerance that follows from dtypes and lengths of sums, and the lowest dtype."""
    floating = [dtype for dtype in run.dtypes if dtype.itemsize >= 2]
    lowest = max(floating or [torch.float32], key=lambda dtype: torch.finfo(dtype).eps)
    rounding = torch.finfo(lowest).eps / 2
    uses_tf32 = torch.get_float32_matmul_precision() != "highest" and torch.cuda.is_available()
    if uses_tf32:
        rounding = max(rounding, 2.0**-11)
    is_fp32 = rounding <= 2.0**-24
    if is_fp32:
        relative = _SUMS_IN_A_ROW * rounding * math.sqrt(run.longest_sum)
        relative = min(relative, _LARGEST_FP32)
    else:
        # Products in half precision are accumulated in float32, and rounded once.
        relative = min(_SUMS_IN_A_ROW * rounding, _LARGEST_HALF)
    floor = _CANCELLATION * rounding
    if override is not None:
        relative = override
    name = str(lowest).removeprefix("torch.")
    return Tolerance(relative, floor, is_fp32), name


# -- the comparison --------------------------------------------------------------------------------


class _PartState(NamedTuple):
    """Facts about a part's gradient that ranks exchange before they compare."""

    has_grad: bool
    requires_grad: bool
    placements: str | None
    unreduced_ranks: tuple[int, ...]
    owner_only: bool


class _Comparison:
    """One comparison on one rank.

    Args:
        ranks: The ranks that compare.
        plan: The layout.
        messenger: Messages of tensors.
        parts: The parameters that this rank holds.
        reference: The parameters of the reference by all names; empty except on the first rank.
        first_names: The first name of each parameter of the reference, by every name.
    """

    def __init__(
        self,
        ranks: RankGroup,
        plan: LayoutPlan,
        messenger: TensorMessenger,
        parts: Sequence[ParamPart],
        reference: dict[str, Tensor],
        first_names: dict[str, str],
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._messenger = messenger
        self._reference = reference
        self._parts: dict[str, ParamPart] = {}
        for part in parts:
            self._parts.setdefault(first_names[part.name], part)

    def copy_weights(self) -> None:
        """Copy the sharded model's weights to the reference, one region at a time.

        Collective: every rank of the group must call this.
        """
        position = self._messenger.position
        for param in self._plan.params:
            whole = self._reference.get(param.name)
            target = whole
            if whole is not None:
                target = whole.detach()
                if not target.is_contiguous():
                    target = target.contiguous()
            copied = set()
            for holder in self._plan.holders[param.name]:
                if holder.region in copied:
                    continue
                copied.add(holder.region)
                if position not in (0, holder.position):
                    continue
                weight = None
                if position == holder.position:
                    weight = self._parts[param.name].weight
                shape = holder.region.shape(param.shape)
                weight = self._messenger.send_to_first(holder.position, weight, shape, holder.dtype)
                if target is not None and weight is not None:
                    region = holder.region.select(target)
                    region.copy_(weight.reshape(region.shape))
            if whole is not None and target is not None and not whole.is_contiguous():
                whole.copy_(target)

    def compare(
        self, run: _StepRun, models: Sequence[nn.Module], override: float | None
    ) -> GradientComparison:
        """Compare all gradients, and return the result.

        Collective: every rank of the group must call this.
        """
        unreduced = _drop_unreduced(models)
        states: dict[str, _PartState] = {}
        for name, part in self._parts.items():
            states[name] = _PartState(
                part.param.grad is not None,
                part.param.requires_grad,
                part.placements,
                unreduced.get(id(part.param), part.unreduced_ranks),
                part.owner_only,
            )
        reference_grads = {}
        for param in self._plan.params:
            whole = self._reference.get(param.name)
            if whole is not None:
                reference_grads[param.name] = whole.grad is not None
        gathered = self._ranks.gather((run, states, reference_grads))
        all_states = [entry[1] for entry in gathered]
        for other, _, _ in gathered:
            run = run.merge(other)
        reference_grads = gathered[0][2]
        self._check_gradients(all_states, reference_grads)
        tolerance, dtype = _make_tolerance(run, override)
        rows = self._gather_rows(all_states, reference_grads)
        evidences = self._make_evidence(rows, all_states, reference_grads, tolerance)
        self._find_exact_dtypes(evidences)
        return self._make_result(evidences, tolerance, dtype)

    def _check_gradients(
        self, all_states: Sequence[dict[str, _PartState]], reference_grads: dict[str, bool]
    ) -> None:
        has_any = False
        for states in all_states:
            for state in states.values():
                has_any = has_any or state.has_grad or bool(state.unreduced_ranks)
        for label, has_grads in (
            ("step()", has_any),
            ("reference_step()", any(reference_grads.values())),
        ):
            if not has_grads:
                raise CallOrderError(
                    f"No parameter has a gradient after {label}. It must run the backward pass, "
                    "and leave the gradients: no zero_grad() and no step of the optimizer with "
                    "set_to_none."
                )

    def _gather_rows(
        self, all_states: Sequence[dict[str, _PartState]], reference_grads: dict[str, bool]
    ) -> Tensor:
        """Return the sums of all ranks, of shape (ranks, parameters, values), on the host."""
        stats: GradientStats | None = None
        rows = []
        for param in self._plan.params:
            redistribute = self._must_redistribute(param.name, all_states)
            part = self._parts.get(param.name)
            grad = None
            if part is not None:
                grad = part.grad(redistribute)
            row = torch.zeros(GradientStats.WIDTH, dtype=torch.float64)
            if reference_grads[param.name] or self._has_grad(param.name, all_states):
                reference_grad = self._broadcast_reference(param, reference_grads[param.name])
                holder = self._holder(param.name)
                if holder is not None:
                    device = reference_grad.device if grad is None else grad.device
                    region = holder.region.select(reference_grad).to(device)
                    if stats is None:
                        stats = GradientStats(device)
                    row = stats.row(grad, region).cpu()
            rows.append(row)
        stacked = torch.stack(rows)
        if self._messenger.group is None:
            return stacked[None]
        gathered = all_gather_rows(self._messenger.group, stacked.view(-1))
        return gathered.cpu().view(-1, len(rows), GradientStats.WIDTH)

    def _broadcast_reference(self, param: ReferenceParam, has_grad: bool) -> Tensor:
        whole = self._reference.get(param.name)
        reference_grad = None
        if whole is not None:
            reference_grad = torch.zeros_like(whole)
            if has_grad and whole.grad is not None:
                reference_grad = whole.grad
            if reference_grad.is_sparse:
                reference_grad = reference_grad.to_dense()
            reference_grad = reference_grad.to(param.dtype)
        return self._messenger.broadcast(reference_grad, param.shape, param.dtype)

    def _must_redistribute(self, name: str, all_states: Sequence[dict[str, _PartState]]) -> bool:
        """Return whether all ranks have a gradient of which one has another layout."""
        states = [states[name] for states in all_states if name in states]
        if not any(state.placements for state in states):
            return False
        return all(state.has_grad for state in states)

    def _has_grad(self, name: str, all_states: Sequence[dict[str, _PartState]]) -> bool:
        return any(name in states and states[name].has_grad for states in all_states)

    def _holder(self, name: str) -> Any:
        for holder in self._plan.holders[name]:
            if holder.position == self._messenger.position:
                return holder
        return None

    def _make_evidence(
        self,
        rows: Tensor,
        all_states: Sequence[dict[str, _PartState]],
        reference_grads: dict[str, bool],
        tolerance: Tolerance,
    ) -> list[ParamEvidence]:
        mean_squares = self._mean_squares_by_module(rows)
        sketch_size = (GradientStats.WIDTH - 7) // 2
        evidences = []
        for index, param in enumerate(self._plan.params):
            ranks = []
            bad_in_reference = 0
            holders = self._plan.holders[param.name]
            own_sq = _reference_mean_square(rows, index, holders, param)
            module_sq = mean_squares[param.name.rpartition(".")[0]]
            for holder in holders:
                state = all_states[holder.position][param.name]
                row = rows[holder.position, index]
                values = row[:7].tolist()
                bad_in_reference += int(values[2])
                numel = math.prod(holder.region.shape(param.shape))
                allowed_sq = tolerance.relative**2 * (values[5] + numel * own_sq)
                allowed_sq += tolerance.floor**2 * numel * module_sq
                is_elsewhere = state.owner_only and not state.has_grad
                if is_elsewhere and self._has_grad(param.name, all_states):
                    continue
                evidence = RankEvidence(
                    self._plan.ranks[holder.position],
                    holder.region,
                    state.requires_grad,
                    state.has_grad,
                    state.unreduced_ranks,
                    int(values[1]),
                    values[3],
                    values[4],
                    values[5],
                    values[6],
                    row[7 : 7 + sketch_size],
                    row[7 + sketch_size :],
                    allowed_sq,
                )
                ranks.append(evidence)
            sharded_axes = self._plan.sharded_axes(param.name)
            evidences.append(
                ParamEvidence(
                    param,
                    ranks,
                    self._plan.axes,
                    sharded_axes,
                    tolerance,
                    reference_grads[param.name],
                    bad_in_reference,
                )
            )
        return evidences

    def _mean_squares_by_module(self, rows: Tensor) -> dict[str, float]:
        """Return the largest mean square of the reference's gradients in each module."""
        mean_squares: dict[str, float] = {}
        for index, param in enumerate(self._plan.params):
            module = param.name.rpartition(".")[0]
            value = _reference_mean_square(rows, index, self._plan.holders[param.name], param)
            if math.isfinite(value):
                mean_squares[module] = max(mean_squares.get(module, 0.0), value)
            mean_squares.setdefault(module, 0.0)
        return mean_squares

    def _find_exact_dtypes(self, evidences: Sequence[ParamEvidence]) -> None:
        """Find half precisions in which wrong gradients are exact on all ranks.

        Collective: every rank of the group must call this.
        """
        exact: dict[str, tuple[bool, bool]] = {}
        for evidence in evidences:
            part = self._parts.get(evidence.param.name)
            if not evidence.tolerance.is_fp32 or evidence.is_right or part is None:
                continue
            grad = part.grad() if part.placements is None else None
            if grad is not None:
                is_bf16 = bool((grad.bfloat16() == grad).all())
                is_fp16 = bool((grad.half() == grad).all())
                exact[evidence.param.name] = is_bf16, is_fp16
        gathered = self._ranks.gather(exact)
        for evidence in evidences:
            flags = [
                entry[evidence.param.name] for entry in gathered if evidence.param.name in entry
            ]
            names = []
            for index, dtype in enumerate(("bf16", "fp16")):
                if flags and all(flag[index] for flag in flags):
                    names.append(dtype)
            evidence.exact_dtypes = tuple(names)

    def _make_result(
        self, evidences: Sequence[ParamEvidence], tolerance: Tolerance, dtype: str
    ) -> GradientComparison:
        verdicts = {}
        for evidence in evidences:
            if not evidence.is_right:
                verdicts[evidence.param.name] = find_cause(evidence)
        apply_to_all(evidences, verdicts)
        rows = []
        for evidence in evidences:
            name = evidence.param.name
            verdict = verdicts.get(name)
            if evidence.is_frozen_everywhere:
                continue
            factor = evidence.factor
            if verdict is None:
                rows.append(GradientRow(name, factor, evidence.residual(factor), evidence.error))
                continue
            rows.append(
                GradientRow(
                    name,
                    verdict.factor,
                    evidence.residual(verdict.factor),
                    evidence.error,
                    verdict.cause,
                    verdict.axes[0] if verdict.axes else "",
                    verdict.axes[1:],
                    verdict.ranks,
                    verdict.detail,
                )
            )
        return GradientComparison(tuple(rows), tolerance.relative, dtype)


def _reference_mean_square(
    rows: Tensor, index: int, holders: Sequence[Any], param: ReferenceParam
) -> float:
    """Return the mean square of a parameter's gradient in the reference."""
    squares = {holder.region: float(rows[holder.position, index, 5]) for holder in holders}
    return sum(squares.values()) / max(param.numel, 1)

"""compare_gradients: the gradients of a sharded step against the gradients of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distamp.errors import CallOrderError, ConfigError
from distamp.fsdp_params import check_reduction_finished
from distamp.fsdp_unit import FSDPUnit
from distamp.grads import is_dtensor
from distamp.module_names import module_names
from distamp.process_group import GroupLike, all_gather_rows, check_group, resolve_process_group
from distamp.report.flat_params import FlatParams
from distamp.report.gathered_gradients import (
    FSDP1,
    FSDP2,
    SHARDED_DDP,
    Holder,
    LayoutPlan,
    ParamPart,
    ReferenceParam,
    ShardGroupFn,
    TensorMessenger,
    find_parts,
    is_wrapper,
    reference_params,
)
from distamp.report.gradient_causes import (
    GradientStats,
    ParamEvidence,
    RankEvidence,
    StatsRow,
    Verdict,
    apply_to_all,
    find_cause,
)
from distamp.report.gradient_comparison import GradientComparison, GradientRow
from distamp.report.gradient_tolerance import StepRounding, observe_step
from distamp.report.rank_group import RankGroup
from distamp.report.tensors import model_tensors

__all__ = ["compare_gradients"]

_CALL = "compare_gradients()"
_Step = Callable[[], Any]
_Models = Sequence[nn.Module]


def compare_gradients(
    step: _Step,
    model: nn.Module | Sequence[nn.Module],
    reference_step: _Step | None = None,
    reference_model: nn.Module | None = None,
    tolerance: float | None = None,
    *,
    shard_group_fn: ShardGroupFn | None = None,
    mesh: DeviceMesh | None = None,
    reference_name_fn: Callable[[str], str] | None = None,
    process_group: GroupLike = None,
) -> GradientComparison:
    """Compare the gradients of a sharded step with the gradients of one process.

    The call copies the weights and buffers of the sharded model to the reference, runs both steps,
    and compares the gradient of every parameter over the whole layout. It drops the gradients of
    both models before the steps and at the end, and changes nothing else of the sharded model.

    Collective: every rank of ``process_group`` must call this.

    Args:
        step: Runs forward and backward of the sharded model on this rank's part of a global batch,
            and all changes of the training loop to gradients before it clips them. It must not step
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
        mesh: A mesh with the names of the axes, for parameters that are no DTensors. Meshes of
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
    reference = _Reference(reference_step, reference_model)
    if not ranks.is_first:
        reference = _Reference(None, None)
    with ranks.raise_together(_CALL):
        _check_arguments(ranks, models, reference, tolerance)
        params = reference.params()
        parts, axes = find_parts(models, shard_group_fn, mesh, ranks.ranks, reference_name_fn)
    infos = [part.describe() for part in parts]
    gathered = ranks.gather((_describe(params), infos, axes))
    described = gathered[0][0]
    plan = LayoutPlan.make(described, [entry[1:] for entry in gathered], ranks.ranks)
    messenger = TensorMessenger(group, _device_of(parts, params))
    comparison = _Comparison(ranks, plan, messenger, params)
    for part in parts:
        comparison.parts.setdefault(plan.first_names[part.name], part)
    with ranks.raise_together(_CALL), torch.no_grad():
        comparison.copy_weights()
        _copy_buffers(models, reference.models)
    try:
        rounding = comparison.run_steps(step, models, reference)
        with torch.no_grad():
            return comparison.compare(rounding, models, tolerance)
    finally:
        _drop_gradients(models)
        _drop_gradients(reference.models)


class _Reference(NamedTuple):
    """The model on one process and its step; None and None except on the first rank."""

    step: _Step | None
    model: nn.Module | None

    @property
    def models(self) -> _Models:
        """The model in a list, or no model."""
        return [] if self.model is None else [self.model]

    def params(self) -> dict[str, Tensor]:
        """Return the parameters by all their names."""
        return {} if self.model is None else reference_params(self.model)


# -- checks of the arguments -----------------------------------------------------------------------


def _check_arguments(
    ranks: RankGroup, models: _Models, reference: _Reference, tolerance: float | None
) -> None:
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"tolerance must be a positive number or None, not {tolerance}")
    if ranks.is_first and (reference.step is None or reference.model is None):
        raise ConfigError(
            f"reference_step and reference_model are missing on rank {ranks.ranks[0]}, which "
            "computes the gradients of one process. Pass both there."
        )
    for model in models:
        if model is reference.model:
            raise ConfigError(
                "reference_model is the sharded model itself. Pass a second model, made by the "
                "same code without the layout."
            )
        _check_no_dropout("model", model)
    for model in reference.models:
        _check_no_dropout("reference_model", model)


def _check_no_dropout(argument: str, model: nn.Module) -> None:
    """Refuse dropout, because the ranks and the reference would drop different elements."""
    for module, name in module_names(model).items():
        if not module.training:
            continue
        for key, rate in vars(module).items():
            is_rate = "dropout" in key.lower()
            if key == "p":
                is_rate = is_wrapper(module, "_DropoutNd")
            if is_rate and isinstance(rate, float) and rate > 0:
                label = name or type(module).__name__
                raise ConfigError(
                    f"{label} of {argument} has dropout ({key}={rate:g}), which drops other "
                    "elements in the sharded step than in the reference step. Set the rate to 0, "
                    "or call model.eval() before compare_gradients()."
                )


def _describe(params: dict[str, Tensor]) -> list[tuple[ReferenceParam, list[str]]]:
    """Return each parameter of the reference with all its names."""
    names_by_param: dict[int, list[str]] = {}
    for name, param in params.items():
        names_by_param.setdefault(id(param), []).append(name)
    described = []
    for names in names_by_param.values():
        first_name = names[0]
        param = params[first_name]
        shape = tuple(param.shape)
        row = ReferenceParam(first_name, shape, param.dtype, param.requires_grad)
        described.append((row, names))
    return described


def _device_of(parts: Sequence[ParamPart], params: dict[str, Tensor]) -> torch.device:
    for part in parts:
        return part.weight.device
    for param in params.values():
        return param.device
    return torch.device("cpu")


# -- weights and gradients of whole models ---------------------------------------------------------


def _copy_buffers(models: _Models, reference_models: _Models) -> None:
    """Copy the buffers of this rank's model to the reference, by name and shape."""
    buffers = {}
    for model in models:
        for row in model_tensors(module_names(model)):
            if row.kind == "buffer" and not is_dtensor(row.tensor):
                buffers[row.name] = row.tensor
    for model in reference_models:
        for row in model_tensors(module_names(model)):
            source = buffers.get(row.name)
            if row.kind == "parameter" or source is None:
                continue
            if source.shape == row.tensor.shape:
                row.tensor.copy_(source)


@torch.no_grad()
def _drop_gradients(models: _Models) -> None:
    """Drop all gradients, reduced or not."""
    for model in models:
        names = module_names(model)
        has_buckets = any(is_wrapper(module, SHARDED_DDP) for module in names)
        for row in model_tensors(names):
            if row.kind == "parameter" and has_buckets and row.tensor.grad is not None:
                # The gradients are views of buckets, which None would detach for good.
                row.tensor.grad.zero_()
            elif row.kind == "parameter":
                row.tensor.grad = None
        for module in model.modules():
            if is_wrapper(module, FSDP1):
                flat_params = FlatParams.find(module)
                if flat_params is not None:
                    flat_params.drop_gradients()
    _drop_unreduced(models)


def _drop_unreduced(models: _Models) -> dict[int, tuple[int, ...]]:
    """Drop gradients that FSDP2 did not reduce.

    Returns:
        The ranks over which each gradient was not reduced, by the id of its shard.
    """
    unreduced: dict[int, tuple[int, ...]] = {}
    for unit in _fsdp2_units(models):
        if unit.has_partly_reduced_gradients:
            for shard in unit.shards():
                unreduced[id(shard)] = _ranks_of(unit.replicate_group)
        for shard in unit.drop_unreduced_gradients():
            unreduced[id(shard)] = _ranks_of(unit.shard_group)
    return unreduced


def _fsdp2_units(models: _Models) -> Iterator[FSDPUnit]:
    for model in models:
        for module in model.modules():
            if is_wrapper(module, FSDP2):
                yield FSDPUnit(module)


def _ranks_of(group: Any) -> tuple[int, ...]:
    if group is None:
        return ()
    return tuple(dist.get_process_group_ranks(group))


# -- the comparison --------------------------------------------------------------------------------


class _GradState(NamedTuple):
    """Facts about a rank's gradient, which ranks exchange before they compare."""

    has_grad: bool
    requires_grad: bool
    has_other_placements: bool
    unreduced_ranks: tuple[int, ...]
    owner_only: bool


class _Comparison:
    """One comparison on one rank.

    Args:
        ranks: The ranks that compare.
        plan: The layout.
        messenger: Messages of tensors.
        reference: The parameters of the reference by all names; empty except on the first rank.

    Attributes:
        parts: The parameters that this rank holds, by their names in the reference.
        states: The states of each rank's gradients, by name; filled after the steps.
        reference_has_grad: Whether each parameter of the reference has a gradient.
    """

    def __init__(
        self,
        ranks: RankGroup,
        plan: LayoutPlan,
        messenger: TensorMessenger,
        reference: dict[str, Tensor],
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._messenger = messenger
        self._reference = reference
        self.parts: dict[str, ParamPart] = {}
        self.states: list[dict[str, _GradState]] = []
        self.reference_has_grad: dict[str, bool] = {}

    def copy_weights(self) -> None:
        """Copy the sharded model's weights to the reference, one region at a time.

        Collective: every rank of the group must call this.
        """
        for param in self._plan.params:
            target = self._reference.get(param.name)
            contiguous = None
            if target is not None:
                target = target.detach()
                contiguous = target.contiguous()
            copied = set()
            for holder in self._plan.holders[param.name]:
                if holder.region not in copied:
                    copied.add(holder.region)
                    self._copy_region(param, holder, contiguous)
            if target is not None and contiguous is not None:
                target.copy_(contiguous)

    def _copy_region(self, param: ReferenceParam, holder: Holder, target: Tensor | None) -> None:
        position = self._messenger.position
        if position not in (0, holder.position):
            return
        weight = None
        if position == holder.position:
            weight = self.parts[param.name].weight
        shape = holder.region.shape(param.shape)
        weight = self._messenger.send_to_first(holder.position, weight, shape, holder.dtype)
        if weight is not None and target is not None:
            region = holder.region.select(target)
            region.copy_(weight.reshape(region.shape))

    def run_steps(self, step: _Step, models: _Models, reference: _Reference) -> StepRounding:
        """Run both steps without old gradients, and return the properties of their rounding.

        Collective: every rank of the group must call this.
        """
        with self._ranks.raise_together("step()"), torch.enable_grad():
            _drop_gradients(models)
            rounding = observe_step(step, models)
            check_reduction_finished(part.param for part in self.parts.values())
        with self._ranks.raise_together("reference_step()"), torch.enable_grad():
            if reference.step is not None:
                _drop_gradients(reference.models)
                rounding.include(observe_step(reference.step, reference.models))
        return rounding

    def compare(
        self, rounding: StepRounding, models: _Models, override: float | None
    ) -> GradientComparison:
        """Compare all gradients, and return the result.

        Collective: every rank of the group must call this.
        """
        self._exchange_states(rounding, _drop_unreduced(models))
        self._check_gradients()
        rows = self._gather_rows()
        evidences = self._find_evidence(rows, rounding, override)
        self._find_exact_dtypes(evidences)
        verdicts: dict[str, Verdict] = {}
        for evidence in evidences:
            if not evidence.is_right:
                verdicts[evidence.param.name] = find_cause(evidence)
        apply_to_all(evidences, verdicts)
        result = []
        for evidence in evidences:
            if not evidence.is_frozen_everywhere:
                result.append(_make_row(evidence, verdicts.get(evidence.param.name)))
        tolerance = rounding.tolerance(override)
        dtype = str(rounding.lowest_dtype).removeprefix("torch.")
        return GradientComparison(tuple(result), tolerance.relative, dtype)

    # -- facts of all ranks ------------------------------------------------------------------

    def _exchange_states(
        self, rounding: StepRounding, unreduced: dict[int, tuple[int, ...]]
    ) -> None:
        """Exchange the states of gradients, and the properties of the steps.

        Collective: every rank of the group must call this.
        """
        states = {}
        for name, part in self.parts.items():
            unreduced_ranks = unreduced.get(id(part.param), part.unreduced_ranks)
            states[name] = _GradState(
                part.param.grad is not None,
                part.param.requires_grad,
                part.has_other_placements,
                unreduced_ranks,
                part.owner_only,
            )
        has_grad = {}
        for name, param in self._reference.items():
            has_grad[name] = param.grad is not None
        gathered = self._ranks.gather((states, rounding, has_grad))
        for states_of_rank, rounding_of_rank, _ in gathered:
            self.states.append(states_of_rank)
            rounding.include(rounding_of_rank)
        self.reference_has_grad = gathered[0][2]

    def _states_of(self, name: str) -> list[_GradState]:
        return [states[name] for states in self.states if name in states]

    def _has_grad(self, name: str) -> bool:
        return any(state.has_grad for state in self._states_of(name))

    def _check_gradients(self) -> None:
        has_any = False
        for states in self.states:
            for state in states.values():
                if state.has_grad or state.unreduced_ranks:
                    has_any = True
        reference_has_any = any(self.reference_has_grad.values())
        for call, has_grads in (("step()", has_any), ("reference_step()", reference_has_any)):
            if not has_grads:
                raise CallOrderError(
                    f"No parameter has a gradient after {call}. It must run the backward pass, "
                    "and must not call zero_grad()."
                )

    # -- sums over gradients -----------------------------------------------------------------

    def _gather_rows(self) -> Tensor:
        """Return the sums of all ranks, of shape (ranks, parameters, values), on the host.

        Collective: every rank of the group must call this.
        """
        stats = GradientStats()
        rows = []
        for param in self._plan.params:
            grad = None
            if param.name in self.parts:
                redistributes = self._must_redistribute(param.name)
                grad = self.parts[param.name].grad(redistributes)
            row = torch.zeros(stats.width, dtype=torch.float64)
            if self.reference_has_grad[param.name] or self._has_grad(param.name):
                reference_grad = self._broadcast_reference(param)
                holder = self._plan.holder_at(param.name, self._messenger.position)
                if holder is not None:
                    row = stats.row(grad, holder.region.select(reference_grad))
            rows.append(row)
        stacked = torch.stack(rows)
        if self._messenger.group is None:
            return stacked[None]
        gathered = all_gather_rows(self._messenger.group, stacked.view(-1))
        return gathered.cpu().view(-1, len(rows), stats.width)

    def _must_redistribute(self, name: str) -> bool:
        """Return whether a gradient has other placements than its parameter.

        A redistribution is a collective, so all ranks must have the gradient.
        """
        states = self._states_of(name)
        has_other_placements = any(state.has_other_placements for state in states)
        return has_other_placements and all(state.has_grad for state in states)

    def _broadcast_reference(self, param: ReferenceParam) -> Tensor:
        """Return the reference's gradient, which is zero if the reference has none.

        Collective: every rank of the group must call this.
        """
        target = self._reference.get(param.name)
        grad = None
        if target is not None:
            grad = torch.zeros_like(target) if target.grad is None else target.grad
            if grad.is_sparse:
                grad = grad.to_dense()
            grad = grad.to(param.dtype)
        return self._messenger.broadcast(grad, param.shape, param.dtype)

    # -- evidence ----------------------------------------------------------------------------

    def _find_evidence(
        self, rows: Tensor, rounding: StepRounding, override: float | None
    ) -> list[ParamEvidence]:
        """Return the evidence about each parameter, in the order of the reference."""
        tolerance = rounding.tolerance(override)
        mean_squares: list[float] = []
        largest_in_module: dict[str, float] = {}
        for index, param in enumerate(self._plan.params):
            squares = {}
            for holder in self._plan.holders[param.name]:
                stats = StatsRow(rows[holder.position, index])
                squares[holder.region] = stats.reference_sq
            mean_square = sum(squares.values()) / max(param.numel, 1)
            mean_squares.append(mean_square)
            if math.isfinite(mean_square):
                largest = largest_in_module.get(param.module, 0.0)
                largest_in_module[param.module] = max(largest, mean_square)
        evidences = []
        for index, param in enumerate(self._plan.params):
            evidence = ParamEvidence(param, self._plan.axes, tolerance)
            evidence.sharded_axes = self._plan.sharded_axes(param.name)
            module_square = largest_in_module.get(param.module, 0.0)
            allowed_sq = tolerance.allowed_sq(mean_squares[index], module_square)
            for holder in self._plan.holders[param.name]:
                stats = StatsRow(rows[holder.position, index])
                evidence.reference_bad_count += stats.reference_bad_count
                state = self.states[holder.position][param.name]
                numel = math.prod(holder.region.shape(param.shape))
                allowed_in_region = tolerance.relative**2 * stats.reference_sq
                rank = RankEvidence(
                    self._plan.ranks[holder.position],
                    holder.region,
                    state.requires_grad,
                    state.unreduced_ranks,
                    stats,
                    allowed_in_region + numel * allowed_sq,
                )
                evidence.ranks.append(rank)
            if any(state.owner_only for state in self._states_of(param.name)):
                # Its wrapper reduces the gradient to one rank, and the others do not step it.
                owner = min(evidence.ranks, key=lambda rank: rank.stats.error_sq)
                evidence.ranks = [owner]
            evidences.append(evidence)
        return evidences

    def _find_exact_dtypes(self, evidences: Sequence[ParamEvidence]) -> None:
        """Find half precisions in which wrong gradients are exact on all ranks.

        Collective: every rank of the group must call this.
        """
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        exact: dict[str, set[str]] = {}
        for evidence in evidences:
            part = self.parts.get(evidence.param.name)
            if evidence.is_right or part is None or part.has_other_placements:
                continue
            grad = part.grad()
            if grad is not None:
                exact[evidence.param.name] = set()
                for name, dtype in dtypes.items():
                    if torch.equal(grad.to(dtype).to(grad.dtype), grad):
                        exact[evidence.param.name].add(name)
        gathered = self._ranks.gather(exact)
        for evidence in evidences:
            common = set(dtypes)
            for exact_of_rank in gathered:
                common &= exact_of_rank.get(evidence.param.name, common)
            evidence.exact_dtypes = tuple(sorted(common))


def _make_row(evidence: ParamEvidence, verdict: Verdict | None) -> GradientRow:
    name = evidence.param.name
    if verdict is None:
        factor = evidence.factor
        return GradientRow(name, factor, evidence.residual(factor), evidence.error)
    first_axis = verdict.axes[0] if verdict.axes else ""
    residual = evidence.residual(verdict.factor)
    row = GradientRow(name, verdict.factor, residual, evidence.error, verdict.cause, first_axis)
    return row.with_details(verdict.axes[1:], verdict.ranks, verdict.detail)

"""Clip the norm of a gradient of which every rank may hold a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distamp.errors import SettingError, StageError
from distamp.gradients import flag_of, local_gradients
from distamp.optimizers import parameters_of, unwrapped
from distamp.scaler import local_pass
from distamp.scaler.flow import Norm, Subject, agree_on_norm, look_and_agree, subject_of
from distamp.scaler.groups import Group
from distamp.scaler.norms import Declared, NormPlan, kinds_of, scale_by
from distamp.scaler.optimizer_state import OptimizerStates, OptState
from distamp.sources import source_of

if TYPE_CHECKING:
    from distamp.scaler.grad_scaler import DistGradScaler

__all__ = ["clip", "clip_disabled", "clip_unscaled"]


def clip(
    scaler: DistGradScaler,
    given: Any,
    max_norm: float,
    norm_type: float,
    replicated: Declared | None,
    sharded: Declared | None,
) -> Tensor:
    """Clip as `DistGradScaler.clip_grad_norm_` says; every error on the way reaches all ranks."""
    refused: Exception | None = None
    subjects: list[Subject] = []
    measured: list[Tensor] = []
    clipped: list[Tensor] = []
    pending: list[Subject] = []
    own = False
    try:
        max_norm, norm_type = _numbers(max_norm, norm_type)
        scaler._require_scale("clip_grad_norm_")
        clipped, subjects = _to_clip(scaler, given)
        measured = clipped
        for subject in subjects:
            if subject.state["stage"] is OptState.STEPPED:
                subject.state.check_unscale()
        pending = [s for s in subjects if s.state["stage"] is OptState.READY]
        share = subjects[0].source.share() if _is_optimizer(given) else None
        if share is not None:
            measured, own = share, True
    except Exception as error:
        refused = error
    sources = [subject.source for subject in subjects]

    def make_plan(group: Group | None) -> NormPlan:
        device = scaler._scale_tensor().device
        if group is None:
            kinds_of(measured, 1, own=own, replicated=replicated, sharded=sharded)
            return NormPlan.alone(measured, device)
        models = [_model_parameter(sources, p) for p in measured]
        kinds = kinds_of(models, group.size, own=own, replicated=replicated, sharded=sharded)
        return scaler._plans.of(measured, kinds, group, device)

    declared = [name for name, given in _declared(replicated, sharded) if given is not None]
    arguments = f"max_norm={max_norm!r}, norm_type={norm_type!r}, declared={declared}"
    norm = Norm(measured, norm_type, make_plan, arguments)
    look_and_agree(
        scaler,
        "clip_grad_norm_",
        pending,
        local_pass.unscale,
        refused=refused,
        norm=norm,
    )
    assert norm.total is not None
    gradients = local_gradients(clipped)
    scale_by(gradients, norm.total, max_norm)
    return norm.total


def clip_disabled(given: Any, states: OptimizerStates, max_norm: float, norm_type: float) -> Tensor:
    """Clip what this rank holds, as torch does: a disabled scaler sends nothing."""
    max_norm, norm_type = _numbers(max_norm, norm_type)
    if _is_optimizer(given):
        source = source_of(unwrapped(given))
        source.receive()
        parameters = source.stepped()
    else:
        parameters = _listed(given)
        for optimizer, _ in states.live():
            source = source_of(optimizer)
            source.receive()
            parameters = source.in_place_of(parameters)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def clip_unscaled(
    scaler: DistGradScaler,
    optimizers: Sequence[torch.optim.Optimizer],
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Clip the whole gradient over the scaler's ranks, where its gradients need no scale.

    For `distamp.initialize`, which is collective at every level; a disabled scaler is not.
    """
    refused: Exception | None = None
    measured: list[Tensor] = []
    clipped: list[Tensor] = []
    kinds: list[tuple[str, float]] = []
    ranks = scaler._ranks
    size = 1 if ranks.alone else ranks.size
    try:
        max_norm, norm_type = _numbers(max_norm, norm_type)
        for optimizer in optimizers:
            source = source_of(optimizer)
            source.receive()
            share = source.share()
            mine = source.stepped() if share is None else share
            own = share is not None
            models = [_model_parameter([source], p) for p in mine]
            kinds += kinds_of(models, size, own=own, replicated=None, sharded=None)
            measured += mine
            clipped += source.stepped() if share is None else parameters_of(optimizer)
    except Exception as error:
        refused = error
    device = measured[0].device if measured else torch.device("cpu")
    one = flag_of(True, device)
    group = ranks.group_for(one, scaler._states)
    if group is None and refused is not None:
        raise refused
    norm = Norm(
        measured,
        norm_type,
        lambda group: (
            NormPlan.alone(measured, device)
            if group is None
            else scaler._plans.of(measured, tuple(kinds), group, device)
        ),
    )
    if group is None:
        norm.measure(None, device)
        norm.total = norm.local_total()
    else:
        agree_on_norm(ranks, group, scaler._states, one, norm, refused)
    assert norm.total is not None
    scale_by(local_gradients(clipped), norm.total, max_norm)
    return norm.total


def _declared(
    replicated: Declared | None, sharded: Declared | None
) -> tuple[tuple[str, Declared | None], ...]:
    return ("replicated", replicated), ("sharded", sharded)


def _numbers(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Return the arguments as floats; torch's function takes ``"inf"`` and tensors too."""
    return _positive("max_norm", max_norm), _positive("norm_type", norm_type)


def _positive(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not number > 0:
        raise SettingError(f"{name} must be > 0, not {value!r}")
    return number


def _is_optimizer(given: Any) -> bool:
    return not isinstance(given, Tensor) and hasattr(unwrapped(given), "param_groups")


def _listed(given: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)


def _to_clip(scaler: DistGradScaler, given: Any) -> tuple[list[Tensor], list[Subject]]:
    """Return what is to be clipped, and the optimizers that hold it."""
    if _is_optimizer(given):
        subject = subject_of(scaler, given)
        return list(subject.source.stepped()), [subject]
    parameters = _listed(given)
    owners = [subject_of(scaler, owner) for owner in _holding(scaler._states, parameters)]
    for owner in owners:
        parameters = owner.source.in_place_of(parameters)
    return parameters, owners


def _holding(states: OptimizerStates, parameters: list[Tensor]) -> Iterator[Any]:
    """Yield the optimizers that hold some of ``parameters``.

    Raises:
        StageError: One of them belongs to no optimizer seen so far.
    """
    left = set(map(id, parameters))
    wanted = len(left)
    mine = frozenset(left)
    for optimizer, _ in states.live():
        theirs = set(map(id, source_of(optimizer).watched()))
        if mine & theirs:
            left -= theirs
            yield optimizer
    if left:
        for given in parameters:
            if not isinstance(given, Tensor):
                raise TypeError(
                    f"clip_grad_norm_ takes an optimizer or Tensors, such as model.parameters(), "
                    f"not {type(given).__name__}s"
                )
        raise StageError(
            f"{len(left)} of {wanted} parameters belong to no optimizer this scaler has "
            "seen yet, so it does not know whether their gradients are still scaled. Give "
            "clip_grad_norm_ the optimizer, or call unscale_(optimizer) first"
        )


def _model_parameter(sources: Iterable[Any], tensor: Tensor) -> Tensor:
    found = (source.parameter_of(tensor) for source in sources)
    return next((parameter for parameter in found if parameter is not None), tensor)

"""From optimizers to agreed flags: look at the gradients, agree in one message, note the flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from distamp.gradients import flag_of, merged
from distamp.optimizers import unwrapped
from distamp.scaler import joining
from distamp.scaler.agreement import Agreed, Question, Ranks
from distamp.scaler.groups import Group
from distamp.scaler.guard import take_over_shared
from distamp.scaler.look import Local, looked_at, nothing_found
from distamp.scaler.message import exchange, gather, gather_rows
from distamp.scaler.norms import UNMEASURED, NormPlan, norms_of, total_norm
from distamp.scaler.optimizer_state import OptimizerState, OptimizerStates
from distamp.sources import GradientSource, source_of

if TYPE_CHECKING:
    from distamp.scaler.grad_scaler import DistGradScaler

__all__ = ["Norm", "Subject", "agree_on_norm", "look_and_agree", "subject_of"]


#: Looks at the gradients of one optimizer, for a scaler.
Look: TypeAlias = "Callable[[DistGradScaler, Subject], Local]"


class Subject(NamedTuple):
    """An optimizer in a call.

    Args:
        given: What the user gave, maybe a framework's wrapper.
        optimizer: The one inside it.
        state: What the scaler knows of it.
        source: Where its gradients come from.
    """

    given: Any
    optimizer: Any
    state: OptimizerState
    source: GradientSource


def subject_of(scaler: DistGradScaler, given: Any) -> Subject:
    """Return what a call over ``given`` is about.

    Raises:
        TypeError: Not an optimizer.
        StageError: Some of its gradients were unscaled through another optimizer, others not.
    """
    optimizer = unwrapped(given)
    states = scaler._states
    state = states.record(optimizer, given)
    source = source_of(optimizer)
    if len(states.records) > 1:
        take_over_shared(states, optimizer, state, source)
    return Subject(given, optimizer, state, source)


@dataclass(eq=False)
class Norm:
    """A gradient norm that is asked for in a call.

    Args:
        parameters: Those whose gradients are measured.
        norm_type: The order of the norm.
        make_plan: Returns the plan of how parts add up; takes the group, or None.
        arguments: What must be the same on every rank besides, for people to read.
    """

    parameters: list[Tensor]
    norm_type: float
    make_plan: Callable[[Group | None], NormPlan]
    arguments: str = ""
    plan: NormPlan | None = None
    norms: Tensor | None = None
    total: Tensor | None = None

    def measure(self, group: Group | None, device: torch.device) -> None:
        """Take the norm of each local gradient."""
        self.plan = self.make_plan(group)
        self.norms = norms_of(self.parameters, self.norm_type, device)

    def local_total(self) -> Tensor:
        """Return the norm of what this rank holds: 0-d float32."""
        assert self.plan is not None
        assert self.norms is not None
        part = self.plan.part(self.norms, self.norm_type)
        is_max = self.norm_type == float("inf")
        return (part if is_max else part.pow(1.0 / self.norm_type)).float()

    def agreed_total(
        self, group: Group, agreed: Agreed, whole: Tensor, tail: Sequence[int] = ()
    ) -> Tensor:
        """Return the norm of the whole gradient; find out anew who holds replicas where need be.

        Args:
            group: The ranks.
            agreed: What they agree on.
            whole: 0-d, the norm if replicas are what the plan takes them for.
            tail: Of the message, inside ``Join``.
        """
        if agreed.late:
            # Parts of plans that differ make no norm: no rank steps, and all compare or raise at
            # the next message. Until then no rank knows what the others do, so none gathers.
            return torch.where(agreed.reply.differs(), torch.inf, whole)
        plan, norms, tables = self.plan, self.norms, agreed.tables
        assert plan is not None
        assert norms is not None
        present = agreed.reply.present
        if present < group.size:
            # Ranks without inputs hold what Join joins, replicas, but take part in messages alone.
            weights = torch.where(plan.weights == 1.0 / group.size, 1.0 / present, plan.weights)
            row = replace(plan, weights=weights).row(norms, self.norm_type, None)
            reply = exchange(group, 0, [], row, takes_rows=True, tail=tail)
            return total_norm(reply.rows(), self.norm_type)[0]
        rows = agreed.reply.rows_on_host() if agreed.with_rows else agreed.rows
        assert rows is not None
        # Of inf and NaN the bits tell nothing.
        differ = bool(rows[:, 2].sum()) and bool(total_norm(rows, self.norm_type)[0].isfinite())
        if tables is None and differ:
            tables = gather(group, plan.table(norms))
        if tables is None:
            return whole
        plan.agree(tables, group.rank)
        row = plan.row(norms, self.norm_type, None)
        return total_norm(gather_rows(group, row), self.norm_type)[0]


def look_and_agree(
    scaler: DistGradScaler,
    call: str,
    subjects: Sequence[Subject],
    look: Look,
    *,
    refused: Exception | None = None,
    norm: Norm | None = None,
) -> None:
    """Look at the gradients of optimizers, agree with all ranks, and note the flags.

    Args:
        scaler: Whose call it is.
        call: Its name, the same on every rank.
        subjects: Its optimizers.
        look: Looks at the gradients of one of them.
        refused: An error that this rank has found already.
        norm: The norm that is asked for, filled in.
    """
    scale = scaler._scale_tensor()
    group = scaler._ranks.group_for(scale, scaler._states)
    if group is None:
        _alone(scaler, subjects, look, refused, norm, scale)
        return
    # The same on all ranks, though some may not have read the last reply: of a call that takes
    # several messages, all but the last are read before it ends.
    most = group.length.capacity
    total = len(subjects)
    if total <= most:
        _with_ranks(scaler, group, call, subjects, look, total, refused, norm)
        return
    for start in range(0, total, most):
        some = subjects[start : start + most]
        asked = norm if start + most >= total else None
        _with_ranks(scaler, group, call, some, look, total, refused, asked)


def _alone(
    scaler: DistGradScaler,
    subjects: Sequence[Subject],
    look: Look,
    refused: Exception | None,
    norm: Norm | None,
    scale: Tensor,
) -> None:
    """Each is looked at by itself, so that an error leaves the others as they are."""
    if refused is not None:
        raise refused
    for subject in subjects:
        local = look(scaler, subject)
        flags = local.flags
        subject.state.set_flag(flags[0] if len(flags) == 1 else merged(flags, scale.device))
    if norm is not None:
        norm.measure(None, scale.device)
        norm.total = norm.local_total()


def _with_ranks(
    scaler: DistGradScaler,
    group: Group,
    call: str,
    subjects: Sequence[Subject],
    look: Look,
    total: int,
    refused: Exception | None,
    norm: Norm | None,
) -> None:
    """Look at what one message takes, and agree."""
    try:
        question = _question(scaler, group, call, subjects, look, total, refused, norm)
        question.tail = joining.tail_of(scaler, total)
        agreed = scaler._ranks.agree(group, question, scaler._states)
        _note(scaler, group, question, agreed, norm)
    except Exception as error:
        flag = flag_of(True, scaler._scale_tensor().device)
        for subject in subjects:
            subject.state.close(f"{type(error).__name__}: {error}", flag)
        raise


def _question(
    scaler: DistGradScaler,
    group: Group,
    call: str,
    subjects: Sequence[Subject],
    look: Look,
    total: int,
    refused: Exception | None,
    norm: Norm | None,
) -> Question:
    """Return what this rank brings to the message; whatever goes wrong on the way is part of it."""
    if refused is None:
        locals_ = [looked_at(look, scaler, subject) for subject in subjects]
    else:
        locals_ = [nothing_found() for _ in subjects]
    settings = scaler._settings_text()
    question = Question(
        call,
        [subject.optimizer for subject in subjects],
        [subject.state for subject in subjects],
        locals_,
        total,
        settings if norm is None else f"{settings}, {norm.arguments}",
        scaler._scale_tensor(),
        scaler._live_state(),
        scaler._scale_called,
        refused=refused,
        wants_rows=norm is not None,
        norms=0 if norm is None else UNMEASURED,
        read_live=scaler._read_live_state,
    )
    if question.wants_rows and question.error() is None:
        try:
            _add_row(group, question, norm)
        except Exception as error:
            question.refused = error
    return question


def _add_row(
    group: Group,
    question: Question,
    norm: Norm | None,
) -> None:
    assert norm is not None
    device = question.scale.device
    norm.measure(group, device)
    plan, norms = norm.plan, norm.norms
    assert plan is not None
    assert norms is not None
    question.row = plan.row(norms, norm.norm_type, None)
    question.norms = plan.key
    question.table = lambda: plan.table(norms)


def _note(
    scaler: DistGradScaler, group: Group, question: Question, agreed: Agreed, norm: Norm | None
) -> None:
    for place, state in enumerate(question.states):
        state.set_flag(agreed.flags[place], agreed.reply, place)
    if agreed.compared:
        scaler._rebase()
    if agreed.rows is None:
        return
    if norm is not None:
        whole, _ = total_norm(agreed.rows, norm.norm_type)
        total = norm.agreed_total(group, agreed, whole, question.tail)
        norm.total = total.to(question.scale.device)


def agree_on_norm(
    ranks: Ranks,
    group: Group,
    states: OptimizerStates,
    scale: Tensor,
    norm: Norm,
    refused: Exception | None,
) -> None:
    """Agree on a norm alone, of gradients that are not scaled."""
    question = Question(
        "clip_grad_norm_", [], [], [], 0, "", scale, (), True, refused=refused, wants_rows=True
    )
    if refused is None:
        try:
            _add_row(group, question, norm)
        except Exception as error:
            question.refused = error
    agreed = ranks.agree(group, question, states)
    assert agreed.rows is not None
    whole, _ = total_norm(agreed.rows, norm.norm_type)
    norm.total = norm.agreed_total(group, agreed, whole).to(scale.device)

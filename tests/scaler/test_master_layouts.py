"""Masters in every layout: each rank has those of its own shard, and all ranks train as by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

from distamp.optimizers import parameters_of
from distamp.scaler import MasterParameters
from tests.scaler.layouts import LAYOUTS, WORLD, Layout
from tests.scaler.masters import ByHand, local, master_scaler
from tests.scaler.reference import KINDS, ScaleRule

# What the other layouts show of masters is mostly shown by these as well.
QUICK = ["alone", "DDP", "FSDP1", "FSDP1 orig params", "FSDP2", "FSDP2 x TP", "ZeRO", "OSS"]
SPREAD = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
CLIPPED = ["DDP", "FSDP1", "FSDP1 orig params", "FSDP2", "HSDP", "ZeRO", "OSS"]
ITERATIONS = 4
OVERFLOW = 1
INF = float("inf")


def half_layout(name: str) -> Layout:
    """The layout of this name over a model that was cast to float16 first."""
    base = LAYOUTS[name]

    class Half(base):  # type: ignore[misc,valid-type]
        def make_net(self) -> nn.Module:
            net = super().make_net()
            for layer in net.children():
                layer.register_forward_pre_hook(lambda _, inputs: tuple(x.half() for x in inputs))
                layer.register_forward_hook(lambda _, inputs, output: output.float())
            return net.half()

    return Half()


def with_masters(name: str, kind: str, clip: float | None = None) -> dict[str, Any]:
    layout = half_layout(name)
    optimizer, masters = start(layout, kind)
    parameters = parameters_of(optimizer)
    scaler = master_scaler(process_group=layout.process_group())
    norms, steps = [], []
    for iteration in range(ITERATIONS):
        layout.zero_grad([optimizer])
        layout.backward(scaler, iteration, 2, (1.0, 1.0))
        if iteration == OVERFLOW:
            plant(masters.filled(), layout.rank)
        if clip is not None:
            norms.append(scaler.clip_grad_norm_(optimizer, clip).item())
        scaler.step(optimizer)
        scaler.update()
        steps.append(scaler.stepped(optimizer))
    return {
        "values": layout.full_parameters(),
        "scale": scaler.get_scale(),
        "steps": steps,
        "norms": norms,
        "bytes": masters.nbytes,
        "own": sum(local(p).numel() for p in masters.filled()),
        "all": sum(local(p).numel() for p in parameters),
        "whole": sum(v.numel() for v in layout.initial.values()),
    }


def start(layout: Layout, kind: str) -> tuple[torch.optim.Optimizer, MasterParameters]:
    """One optimizer over the whole model, with masters."""
    optimizer = layout.optimizer(KINDS[kind], [p for part in layout.parts() for p in part])
    layout.attach([optimizer])
    return optimizer, MasterParameters(optimizer)


def plant(sources: list[Tensor], rank: int) -> None:
    """An overflow in what the last rank but one steps, or in every rank's own where it is alone."""
    if dist.is_initialized() and rank != max(dist.get_world_size() - 2, 0):
        return
    gradients = [g for p in sources if p.grad is not None and (g := local(p.grad)).numel()]
    gradients[0].view(-1)[0] = INF


class _FixedScale:
    """Scales a loss as a scaler does."""

    def __init__(self, scale: float) -> None:
        self.factor = scale

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor


def by_hand(name: str, kind: str, norms: list[float], clip: float | None) -> dict[str, Any]:
    layout = half_layout(name)
    parameters = [p for part in layout.parts() for p in part]
    oss = layout.optimizer(KINDS[kind], parameters) if name == "OSS" else None
    if oss is not None:  # a rank has the right gradients of its own share alone
        layout.attach([oss])
        parameters = layout.owned(oss)
    hand = ByHand(parameters, KINDS[kind].make)
    rule = ScaleRule(1024.0)
    squares = []
    for iteration in range(ITERATIONS):
        hand.zero_grad() if oss is None else layout.zero_grad([])
        layout.backward(_FixedScale(rule.scale), iteration, 2, (1.0, 1.0))
        hand.unscale(rule.scale)
        gradients = [c.grad for c in hand.copies if c.grad is not None]
        squares.append(sum(float(g.double().square().sum()) for g in gradients))
        if clip is not None:
            coefficient = (clip / (torch.tensor(norms[iteration]) + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient *= coefficient
        if iteration != OVERFLOW:
            hand.step()
            if oss is not None:
                oss._broadcast_params()
        rule.update(iteration == OVERFLOW)
    return {"values": layout.full_parameters(), "scale": rule.scale, "squares": squares}


def compared(name: str, kind: str, clip: float | None = None) -> dict[str, Any]:
    ours = with_masters(name, kind, clip)
    theirs = by_hand("DDP" if name == "ZeRO" else name, kind, ours["norms"], clip)
    ours["unlike"] = [
        n for n, v in theirs["values"].items() if not torch.equal(v, ours["values"][n])
    ]
    ours["dtypes"] = {v.dtype for v in ours.pop("values").values()}
    ours["scale by hand"] = theirs["scale"]
    ours["squares"] = theirs["squares"]
    return ours


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPREAD)
def test_every_layout_trains_as_by_hand_to_the_bit(ranks4, name):
    """Its masters take four bytes for each element that this rank steps, and no more."""
    for rank in ranks4.run(compared, name, "AdamW for-loop", group=LAYOUTS[name].group):
        assert rank["unlike"] == []
        assert rank["dtypes"] == {torch.float16}
        assert rank["steps"] == [i != OVERFLOW for i in range(ITERATIONS)]
        assert rank["scale"] == rank["scale by hand"] == 512.0
        assert rank["bytes"] == 4 * rank["own"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("FSDP1 orig params", "AdamW fused"),
        ("FSDP2", "AdamW fused"),
        ("FSDP2", "SGD foreach"),
        ("ZeRO", "SGD fused"),
    ],
)
def test_fused_and_foreach_kernels_step_sharded_masters(ranks4, name, kind):
    for rank in ranks4.run(compared, name, kind):
        assert rank["unlike"] == []
        assert rank["steps"] == [i != OVERFLOW for i in range(ITERATIONS)]


@pytest.mark.parametrize("name", ["FSDP1", "FSDP1 orig params", "FSDP2", "ZeRO", "OSS"])
def test_sharded_masters_add_up_to_one_model(ranks4, name):
    """FSDP1 pads its flat shards; nothing else lies there twice."""
    kept = ranks4.run(with_masters, name, "SGD for-loop")
    total = sum(rank["bytes"] for rank in kept)
    whole = 4 * kept[0]["whole"]
    padding = 4 * 4 * 4 if name == "FSDP1" else 0
    assert whole <= total <= whole + padding
    assert max(rank["bytes"] for rank in kept) < 0.6 * whole


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLIPPED)
def test_the_norm_is_that_of_the_whole_model_and_masters_are_clipped_by_it(ranks4, name):
    """Replicas count once, shards add up. An overflow's norm is not finite and clips nothing."""
    answers = ranks4.run(compared, name, "SGD for-loop", 0.5)
    squares = [rank["squares"] for rank in answers]
    replicas = 4 if name in ("DDP", "ZeRO") else {"HSDP": 2}.get(name, 1)
    for iteration in range(ITERATIONS):
        norms = {rank["norms"][iteration] for rank in answers}
        assert len(norms) == 1
        if iteration != OVERFLOW:
            exact = (sum(each[iteration] for each in squares) / replicas) ** 0.5
            assert norms.pop() == pytest.approx(exact, rel=1e-5)
            assert exact > 0.5
    for rank in answers:
        assert rank["unlike"] == []


# -- checkpoints -----------------------------------------------------------------------------------


def resumed(name: str) -> tuple[bool, list[str]]:
    """Train four steps; train two, save, load into a new job, train two: the same?"""

    def job() -> tuple[Layout, torch.optim.Optimizer, MasterParameters, Any]:
        layout = half_layout(name)
        optimizer, masters = start(layout, "AdamW for-loop")
        # DDP lays out its buckets, and so the order of its sums, after the first pass.
        layout.backward(_FixedScale(1.0), 9, 1, (1.0,))
        layout.zero_grad([optimizer])
        return layout, optimizer, masters, master_scaler(process_group=layout.process_group())

    def train(layout: Layout, optimizer: torch.optim.Optimizer, scaler: Any, *steps: int) -> None:
        for step in steps:
            layout.zero_grad([optimizer])
            layout.backward(scaler, step, 1, (1.0,))
            scaler.step(optimizer)
            scaler.update()

    layout, optimizer, masters, scaler = job()
    train(layout, optimizer, scaler, 0, 1)
    saved = [copy.deepcopy(part.state_dict()) for part in (layout.model, masters)]
    saved.append(_whole_state(optimizer))
    train(layout, optimizer, scaler, 2, 3)

    other, fresh, of_fresh, again = job()
    for part, state in zip((other.model, of_fresh, fresh), saved, strict=True):
        part.load_state_dict(state)
    if hasattr(fresh, "consolidate_state_dict"):
        fresh.consolidate_state_dict(0)  # the state is there before any step
    train(other, fresh, again, 2, 3)
    ours, theirs = layout.full_parameters(), other.full_parameters()
    same = [
        torch.equal(a, b) for (_, a), (_, b) in zip(masters.pairs(), of_fresh.pairs(), strict=True)
    ]
    return all(same), [n for n, v in ours.items() if not torch.equal(v, theirs[n])]


def _whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved of it; of a wrapper on rank 0 alone, for every rank to load."""
    if not hasattr(optimizer, "consolidate_state_dict"):
        return copy.deepcopy(optimizer.state_dict())
    optimizer.consolidate_state_dict(0)
    kept = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(kept)
    return kept[0]


@pytest.mark.parametrize(
    "name", ["FSDP1", "FSDP1 orig params", "FSDP2", "FSDP2 x TP", "ZeRO", "OSS"]
)
def test_a_resumed_run_goes_on_to_the_bit(ranks4, name):
    assert ranks4.run(resumed, name) == [(True, [])] * WORLD


def loaded_model_alone(name: str) -> tuple[bool, bool]:
    """Train, load the model's own checkpoint of before, and ask what the masters are."""
    layout = half_layout(name)
    optimizer, masters = start(layout, "AdamW for-loop")
    scaler = master_scaler()
    before = {n: v.clone() for n, v in layout.model.state_dict().items()}
    values = [local(m).clone() for _, m in masters.pairs()]
    layout.zero_grad([optimizer])
    layout.backward(scaler, 0, 1, (1.0,))
    scaler.step(optimizer)
    moved = any(
        not torch.equal(local(m), v) for (_, m), v in zip(masters.pairs(), values, strict=True)
    )
    layout.model.load_state_dict(before)
    kept = masters.state_dict()["masters"].values()
    back = all(torch.equal(local(m), v) for m, v in zip(kept, values, strict=True))
    return moved, back


@pytest.mark.parametrize("name", ["DDP", "FSDP1", "FSDP1 orig params", "FSDP2", "ZeRO", "OSS"])
def test_a_models_checkpoint_alone_refreshes_the_masters(ranks4, name):
    answers = ranks4.run(loaded_model_alone, name)
    assert all(back for _, back in answers)
    assert any(moved for moved, _ in answers)


def through_dcp(folder: str) -> bool:
    import torch.distributed.checkpoint as dcp

    layout = half_layout("FSDP2")
    optimizer, masters = start(layout, "AdamW for-loop")
    scaler = master_scaler()
    layout.backward(scaler, 0, 1, (1.0,))
    scaler.step(optimizer)
    with torch.no_grad():
        for _, master in masters.pairs():
            local(master).add_(2.0**-13)  # below the rounding of float16
    kept = [local(m).clone() for _, m in masters.pairs()]
    dcp.save({"masters": masters.state_dict()}, checkpoint_id=folder)

    _, of_fresh = start(fresh := half_layout("FSDP2"), "AdamW for-loop")
    state = {"masters": of_fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    of_fresh.load_state_dict(state["masters"])
    del fresh
    return all(torch.equal(local(m), v) for (_, m), v in zip(of_fresh.pairs(), kept, strict=True))


def test_torchs_distributed_checkpoint_takes_dtensor_masters(ranks4, tmp_path):
    assert ranks4.run(through_dcp, str(tmp_path)) == [True] * WORLD


# -- other things that happen to a sharded run -----------------------------------------------------


def added_group(name: str) -> dict[str, Tensor]:
    """The second half of the model joins the optimizer after one step."""
    layout = half_layout(name)
    first, second = layout.parts()
    optimizer = layout.optimizer(KINDS["AdamW for-loop"], first)
    masters, scaler = MasterParameters(optimizer), master_scaler()
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": second, "lr": 0.02})
        layout.model.zero_grad()
        layout.backward(scaler, step, 1, (1.0,))
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    values = layout.full_parameters()
    values["bytes"] = torch.tensor(masters.nbytes)
    return values


def test_a_group_added_to_zero_is_shared_out_and_gets_masters(ranks4):
    """As with DDP, whose every rank holds all masters."""
    theirs = ranks4.run(added_group, "DDP")[0]
    ours = ranks4.run(added_group, "ZeRO")
    assert sum(int(rank.pop("bytes")) for rank in ours) == int(theirs.pop("bytes"))
    for rank in ours:
        for name, value in rank.items():
            torch.testing.assert_close(value, theirs[name], rtol=2e-3, atol=1e-4)


def one_rank_is_unlike(how: str) -> str:
    rank = dist.get_rank()
    layout = half_layout("FSDP2" if how == "Partial" else "DDP")
    optimizer, masters = None, None
    parameters = [p for part in layout.parts() for p in part]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    if not (how == "no masters" and rank == 2):
        masters = MasterParameters(optimizer)
    scaler = master_scaler()
    layout.backward(scaler, 0, 1, (1.0,))
    before = layout.full_parameters()
    if how == "Partial" and rank == 2:
        gradient = parameters[0].grad
        parameters[0].grad = DTensor.from_local(
            torch.zeros(parameters[0].shape, dtype=torch.float16),
            gradient.device_mesh,
            [Partial()],
            run_check=False,
        )
    text = ""
    try:
        scaler.step(optimizer)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    after = layout.full_parameters()
    assert all(torch.equal(before[n], after[n]) for n in before), "nothing was stepped"
    del masters
    return text


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no masters", "fp16_grads='master', and SGD holds float16"),
        ("Partial", "is a DTensor with"),
    ],
)
def test_what_one_rank_cannot_do_is_raised_on_every_rank(ranks4, how, says):
    for text in ranks4.run(one_rank_is_unlike, how):
        assert says in text


def overlapping() -> str:
    model = DistributedDataParallel(nn.Linear(4, 4).half())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1.0
    )
    try:
        MasterParameters(optimizer)
    except ValueError as error:
        return str(error)
    return ""


def test_zero_that_steps_inside_backward_is_refused(ranks2):
    assert all("set overlap_with_ddp=False" in text for text in ranks2.run(overlapping))

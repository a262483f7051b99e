"""Masters in one process and DDP: as by hand to the bit; shards are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp.scaler import MasterParameters
from tests.ranks import mesh
from tests.scaler.layouts import LAYOUTS, Layout
from tests.scaler.masters import ByHand, half_mlp, local, master_scaler
from tests.scaler.reference import KINDS, ScaleRule

WHOLE = ["alone", "DDP"]
SHARDED = ["FSDP1", "FSDP1 orig params", "FSDP2", "HSDP", "FSDP2 x TP", "TP", "ZeRO", "OSS"]
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
    """Four iterations of two microbatches, of which the second overflows on one rank."""
    layout = half_layout(name)
    optimizer, masters = start(layout, kind)
    scaler = master_scaler(process_group=layout.process_group())
    norms, steps = [], []
    for iteration in range(ITERATIONS):
        layout.zero_grad([optimizer])
        layout.backward(scaler, iteration, 2, (1.0, 1.0))
        if iteration == OVERFLOW:
            plant(masters.parameters(), layout.rank)
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
        "elements": sum(p.numel() for p in masters.parameters()),
    }


def start(layout: Layout, kind: str) -> tuple[torch.optim.Optimizer, MasterParameters]:
    """One optimizer over the whole model, with masters."""
    optimizer = layout.optimizer(KINDS[kind], [p for part in layout.parts() for p in part])
    layout.attach([optimizer])
    return optimizer, MasterParameters(optimizer)


def plant(parameters: list[Tensor], rank: int) -> None:
    """An overflow in the gradients of the last rank but one, or of the only one."""
    if dist.is_initialized() and rank != max(dist.get_world_size() - 2, 0):
        return
    gradients = [g for p in parameters if p.grad is not None and (g := local(p.grad)).numel()]
    gradients[0].view(-1)[0] = INF


class _FixedScale:
    """Scales a loss as a scaler does."""

    def __init__(self, scale: float) -> None:
        self.factor = scale

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor


def by_hand(name: str, kind: str, norms: list[float], clip: float | None) -> dict[str, Any]:
    layout = half_layout(name)
    hand = ByHand([p for part in layout.parts() for p in part], KINDS[kind].make)
    rule = ScaleRule(1024.0)
    exact = []
    for iteration in range(ITERATIONS):
        hand.zero_grad()
        layout.backward(_FixedScale(rule.scale), iteration, 2, (1.0, 1.0))
        hand.unscale(rule.scale)
        gradients = [c.grad for c in hand.copies if c.grad is not None]
        exact.append(sum(float(g.double().square().sum()) for g in gradients) ** 0.5)
        if clip is not None:
            coefficient = (clip / (torch.tensor(norms[iteration]) + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient *= coefficient
        if iteration != OVERFLOW:
            hand.step()
        rule.update(iteration == OVERFLOW)
    return {"values": layout.full_parameters(), "scale": rule.scale, "norms": exact}


def compared(name: str, kind: str, clip: float | None = None) -> dict[str, Any]:
    ours = with_masters(name, kind, clip)
    theirs = by_hand(name, kind, ours["norms"], clip)
    ours["unlike"] = [
        n for n, v in theirs["values"].items() if not torch.equal(v, ours["values"][n])
    ]
    ours["dtypes"] = {v.dtype for v in ours.pop("values").values()}
    ours["scale by hand"], ours["exact"] = theirs["scale"], theirs["norms"]
    return ours


@pytest.mark.parametrize("kind", ["AdamW for-loop", "AdamW fused", "SGD foreach"])
@pytest.mark.parametrize("name", WHOLE)
def test_it_trains_as_by_hand_to_the_bit(ranks4, name, kind):
    """Masters take four bytes for each element of the model, and no more."""
    for rank in ranks4.run(compared, name, kind, group=LAYOUTS[name].group):
        assert rank["unlike"] == []
        assert rank["dtypes"] == {torch.float16}
        assert rank["steps"] == [i != OVERFLOW for i in range(ITERATIONS)]
        assert rank["scale"] == rank["scale by hand"] == 512.0
        assert rank["bytes"] == 4 * rank["elements"]


@pytest.mark.parametrize("name", WHOLE)
def test_masters_are_clipped_by_the_norm_of_the_model(ranks4, name):
    for rank in ranks4.run(compared, name, "SGD for-loop", 0.5, group=LAYOUTS[name].group):
        assert rank["unlike"] == []
        for iteration, (norm, exact) in enumerate(zip(rank["norms"], rank["exact"], strict=True)):
            if iteration != OVERFLOW:
                assert norm == pytest.approx(exact, rel=1e-5)
                assert exact > 0.5


def refused(name: str) -> tuple[str, bool]:
    """The error, and whether the optimizer is as it was."""
    layout = half_layout(name)
    parameters = [p for part in layout.parts() for p in part]
    optimizer = layout.optimizer(KINDS["SGD for-loop"], parameters)
    before = [id(p) for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(ValueError) as error:
        MasterParameters(optimizer)
    after = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return str(error.value), before == after and "zero_grad" not in vars(optimizer)


@pytest.mark.parametrize("name", SHARDED)
def test_shards_are_refused_with_what_to_do(ranks4, name):
    for text, untouched in ranks4.run(refused, name):
        assert untouched
        assert "float32" in text
        assert "fully_shard" in text
        assert ("O1" in text) is (name in ("ZeRO", "OSS"))


def by_policy() -> list[float]:
    """What the refusal says to do instead: FSDP2's own float32 parameters are the masters."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=mesh((4,), ("shard",)), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = master_scaler()
    for _ in range(10):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 8)).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.weight.full_tensor().flatten().tolist()


def test_fsdps_own_float32_parameters_add_up_small_steps(ranks4):
    """Ten steps of 1e-4, each of which float16 would round away."""
    for values in ranks4.run(by_policy):
        assert values == pytest.approx([1.0 - 1e-3] * 8, rel=1e-6)


def one_rank_has_none() -> str:
    layout = half_layout("DDP")
    optimizer = torch.optim.SGD([p for part in layout.parts() for p in part], lr=1.0)
    masters = None if dist.get_rank() == 2 else MasterParameters(optimizer)
    scaler = master_scaler()
    layout.backward(scaler, 0, 1, (1.0,))
    before = layout.full_parameters()
    text = ""
    try:
        scaler.step(optimizer)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    after = layout.full_parameters()
    assert all(torch.equal(before[n], after[n]) for n in before), "nothing was stepped"
    del masters
    return text


def test_masters_that_one_rank_lacks_are_an_error_on_every_rank(ranks4):
    for text in ranks4.run(one_rank_has_none):
        assert "master" in text


def views() -> list[bool]:
    """DDP whose gradients are views of its buckets, zeroed in every way."""
    same = []
    for zero in ("to None", "in place", "model"):
        torch.manual_seed(0)
        models = [
            DistributedDataParallel(half_mlp(), gradient_as_bucket_view=view)
            for view in (True, False)
        ]
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            MasterParameters(optimizer)
            scaler = master_scaler()
            for step in range(3):
                if zero == "model":
                    model.zero_grad()
                else:
                    optimizer.zero_grad(set_to_none=zero == "to None")
                x = torch.full((2, 8), 1.0 + step + dist.get_rank(), dtype=torch.float16)
                scaler.scale(model(x).float().square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        pairs = zip(*(model.parameters() for model in models), strict=True)
        same.append(all(torch.equal(a, b) for a, b in pairs))
    return same


def test_gradients_that_are_views_of_buckets(ranks2):
    assert ranks2.run(views) == [[True, True, True]] * 2

"""Tests of `lost_updates`, the share of updates that weights in half precision lose."""

import json
import logging
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import distamp
from distamp.errors import ConfigError
from distamp.masters import MasterParameters
from distamp.report import LostUpdates, lost_updates
from tests.on_ranks import on_ranks

BF16, FP16 = torch.bfloat16, torch.float16
INPUTS = torch.linspace(-1.0, 1.0, 8 * 16).view(8, 16)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a layer, a norm with a weight of 1 and the second matrix of an adapter, which is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16, bias=False))
    nn.init.zeros_(model[2].weight)
    return model.to(dtype)


def loss_of(model: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the loss of a model for inputs of a dtype."""
    output = model(INPUTS.to(dtype))
    return (output.float() - 1.0).square().mean()


def step_of(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> Any:
    """Return a training step."""

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, dtype).backward()
        optimizer.step()

    return step


def shares_in_float64(
    model: nn.Module, make: Any, dtype: torch.dtype, **settings: float
) -> dict[str, float]:
    """Return the share of lost updates of each module.

    A copy of the weights in float64 takes the optimizer step, with the gradients of the model. An
    update is lost if the rounded weight is the same before and after it.
    """
    loss_of(model, next(model.parameters()).dtype).backward()
    copies = []
    for param in model.parameters():
        copy = nn.Parameter(param.detach().double())
        copy.grad = param.grad.double()
        param.grad = None
        copies.append(copy)
    optimizer = make(copies, **settings)
    optimizer.step()

    lost_counts: Counter[str] = Counter()
    update_counts: Counter[str] = Counter()
    for (name, param), copy in zip(model.named_parameters(), copies, strict=True):
        module_name = name.rpartition(".")[0]
        update = copy.detach() - param.detach().double()
        weight = param.detach().to(dtype)
        updated_weight = (weight.double() + update).to(dtype)
        is_update = update != 0
        is_lost = is_update & (updated_weight == weight)
        lost_counts[module_name] += int(is_lost.sum())
        update_counts[module_name] += int(is_update.sum())

    shares = {}
    for module_name, update_count in update_counts.items():
        if update_count:
            shares[module_name] = lost_counts[module_name] / update_count
    return shares


@pytest.mark.parametrize("rate", [1e-5, 1e-3])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
def test_shares_are_those_of_a_float64_step(dtype, make, rate):
    half = BF16 if dtype is torch.float32 else dtype
    settings = {"lr": rate}
    if make is torch.optim.AdamW:
        settings["eps"] = 1e-4
    expected = shares_in_float64(net(dtype), make, half, **settings)
    model = net(dtype)
    optimizer = make(model.parameters(), **settings)
    shares = lost_updates(step_of(model, optimizer, dtype), model, optimizer, dtype=half)
    assert shares.keys() == expected.keys()
    assert shares == pytest.approx(expected, abs=0.02)
    if rate == 1e-5 and make is torch.optim.AdamW:
        assert shares["0"] > 0.9
        assert shares["1"] > 0.4, "the norm's weight is at 1, and its bias at 0"
    assert shares["2"] < 0.1, "a weight of zero takes any update that fp16 can represent"


@pytest.mark.parametrize(
    ("level", "master_weights"), [("fp16-O2", True), ("bf16-O2", True), ("bf16-O2", "split")]
)
def test_masters_are_read_at_a_level_that_has_them(level, master_weights):
    dtype = FP16 if level == "fp16-O2" else BF16
    plain = lost_updates_of(net(), "fp32", dtype)
    shares = lost_updates_of(net(), level, dtype, master_weights=master_weights)
    assert shares == pytest.approx(plain, abs=0.05)
    assert shares["0"] > 0.9


def lost_updates_of(
    model: nn.Module, level: str, dtype: torch.dtype, **settings: Any
) -> dict[str, float]:
    """Return the shares of the first step at a level."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-4)
    if level == "fp16-O2":
        settings["init_scale"] = 2.0**10
    amp = distamp.initialize(model, optimizer, level, **settings)

    def step() -> None:
        amp.zero_grad()
        with amp.autocast():
            loss = loss_of(amp.model, INPUTS.dtype)
        amp.backward(loss)
        amp.step(max_norm=100.0)

    return lost_updates(step, model, optimizer, dtype=dtype)


@pytest.mark.parametrize("level", ["fp16-O3", "bf16-O3"])
def test_a_level_without_masters_loses_what_it_says(level):
    model, dtype = net(), FP16 if level == "fp16-O3" else BF16
    shares = lost_updates_of(model, level, dtype)
    assert shares["0"] > 0.9
    assert shares["2"] == 0.0


@pytest.mark.parametrize("fused", [False, True])
def test_the_step_and_the_optimizer_are_those_of_a_run_without_it(fused):
    runs = []
    for measured in (False, True):
        model = net(BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step = step_of(model, optimizer, BF16)
        for _ in range(2):
            if measured:
                lost_updates(step, model)
            else:
                step()
            schedule.step()
        tensors = list(model.parameters())
        for state in optimizer.state.values():
            tensors.append(state["exp_avg"])
        tensors.append(torch.get_rng_state())
        runs.append(tensors)
    assert all(map(torch.equal, *runs))


def test_frozen_weights_and_modules_without_an_update_are_left_out():
    model = net(BF16)
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    shares = lost_updates(step_of(model, torch.optim.SGD(trained, lr=1e-5), BF16), model)
    assert shares == {"2": 0.0}, "while the last weight is zero, no gradient reaches the norm"


def masters_by_hand(model: nn.Module) -> Any:
    """Return a step with masters in user code, which copies them to the weights."""
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-6)

    def step() -> None:
        loss_of(model, BF16).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    return step


def written_by_hand(model: nn.Module) -> Any:
    def step() -> None:
        loss_of(model, BF16).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad

    return step


def with_a_closure(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss = loss_of(model, BF16)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


class Uncopied(torch.optim.SGD):
    def __getstate__(self) -> Any:
        raise TypeError("holds a file")


def that_cannot_be_copied(model: nn.Module) -> Any:
    return step_of(model, Uncopied(model.parameters(), lr=0.1), BF16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (masters_by_hand, "neither parameters of the model nor masters|changed without"),
        (written_by_hand, "changed without an optimizer step"),
        (with_a_closure, "whose step has a closure"),
        (that_cannot_be_copied, "raised TypeError: holds a file"),
    ],
)
def test_an_update_that_cannot_be_measured_is_refused(make, message):
    model = net(BF16)
    with pytest.raises(ConfigError, match=f"cannot measure .*({message})"):
        lost_updates(make(model), model)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["FSDP2", "FSDP2 with masters", "DDP", "ZeRO"])
def test_sharded_half_precision_weights_are_measured(layout):
    model: Any = net(BF16)
    if layout.startswith("FSDP2"):
        for unit in (*model, model):
            fully_shard(unit)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    settings = {"lr": 1e-5, "eps": 1e-4}
    if layout == "ZeRO":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    if layout == "FSDP2 with masters":
        MasterParameters(optimizer)
    shares = lost_updates(step_of(model, optimizer, BF16), model)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, shares)
    merged = gathered[0] | gathered[1]
    assert merged["0"] > 0.9
    assert merged["2"] == 0.0


def adamw_step(model: nn.Module, optimizer: Any) -> LostUpdates:
    return lost_updates(step_of(model, optimizer, BF16), model, optimizer)


def test_the_table_begins_with_the_norms_whose_weights_never_train():
    """The weight of a norm begins at 1, and an update below 1/256 changes no bf16 number at 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 16)).to(BF16)
    result = adamw_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert next(iter(result)) == "1"
    assert result["1"] == 1.0
    assert result["2"] < 1.0
    heading, columns, first_row, *_ = str(result).splitlines()
    assert heading.endswith("updates are lost, and move no element")
    assert columns.split() == ["module", "class", "measured", "updated", "lost", "share"]
    assert first_row.split() == ["1", "RMSNorm", "bf16", "weights", "16", "16", "100.0%"]


def test_the_counts_are_json_types():
    model = net(BF16)
    result = adamw_step(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    row = json.loads(json.dumps(result.to_dict()))["modules"]["1"]
    assert row["kind"] == "LayerNorm"
    assert row["share"] == row["lost_count"] / row["update_count"] == result["1"]


def test_the_table_names_masters():
    model = net(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    MasterParameters(optimizer)
    assert "fp32 masters as bf16" in str(adamw_step(model, optimizer))


def test_weight_decay_is_part_of_the_update():
    """The gradient moves no weight of 1, and a decay of 1 % moves all."""
    model = nn.Linear(4, 4, bias=False).to(BF16)
    nn.init.ones_(model.weight)

    def share(weight_decay: float) -> float:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=weight_decay)

        def step() -> None:
            model(torch.ones(1, 4, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return lost_updates(step, model, optimizer)[""]

    assert share(0.0) == 1.0
    assert share(10.0) == 0.0


def test_only_parameters_of_the_optimizers_count():
    model = net(BF16)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-6) for module in (model[0], model[2])]

    def step() -> None:
        loss_of(model, BF16).backward()
        for optimizer in optimizers:
            optimizer.step()

    nn.init.ones_(model[2].weight)
    assert lost_updates(step, model, optimizers).keys() == {"0", "2"}
    assert lost_updates(step, model, optimizers[1]).keys() == {"2"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((print, net(), BF16), "not dtype. Pass a dtype by name: dtype=torch.float16"),
        ((print, "model"), "got builtin_function_or_method and str"),
        ((None, net()), "got NoneType and Sequential"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        lost_updates(*arguments)


@pytest.mark.parametrize(("level", "warnings"), [("bf16-O3", 1), ("bf16-O2", 0), ("bf16", 0)])
def test_initialize_warns_of_bf16_weights_without_masters(level, warnings, caplog):
    model = net()
    distamp.initialize(model, torch.optim.AdamW(model.parameters()), level)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == warnings
    if warnings:
        assert messages[0].startswith("5 trained weights are bfloat16 without float32 masters")
        assert "distamp.report.lost_updates(step, model, optimizer)" in messages[0]


@on_ranks(2)
def test_only_the_first_rank_warns():
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("distamp.levels")
    logger.addHandler(handler)
    try:
        model = net()
        distamp.initialize(model, torch.optim.AdamW(model.parameters()), "bf16-O3")
    finally:
        logger.removeHandler(handler)
    assert len(messages) == (dist.get_rank() == 0)

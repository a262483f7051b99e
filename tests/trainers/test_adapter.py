"""The protocol of scalers for trainers, and the adapter that docs/howto/adapter.md writes."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from distamp import DistGradScaler, StepGuard
from distamp.integrations import Scaler
from tests.docs_code import blocks_of
from tests.on_ranks import on_ranks
from tests.trainers.common import plant_inf

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "adapter.md"
METHODS = [name for name in vars(Scaler) if not name.startswith("_")]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
INIT_SCALE = 2.0**8


class EightMethods:
    """A scaler without any method that the protocol does not list."""

    def __init__(self, scaler: DistGradScaler | StepGuard) -> None:
        for name in METHODS:
            setattr(self, name, getattr(scaler, name))


def make_scaler(precision: str) -> DistGradScaler | StepGuard:
    if precision == "fp16":
        return DistGradScaler("cpu", init_scale=INIT_SCALE)
    return StepGuard()


def make_trainer(precision: str, scaler: Any) -> Any:
    """Make the adapter of the page. Its first two blocks define the trainer and the adapter."""
    namespace: dict[str, Any] = {"torch": torch}
    for block in blocks_of(PAGE)[:2]:
        code = block.code.replace('"cuda"', '"cpu"')
        exec(compile(code, str(PAGE), "exec"), namespace)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
    return namespace["DistTrainer"](
        model,
        optimizer,
        schedule,
        nn.functional.mse_loss,
        dtype=DTYPES[precision],
        scaler=scaler,
    )


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        inputs = torch.randn(8, 4, generator=generator)
        targets = torch.randn(8, 2, generator=generator)
        batches.append((inputs, targets))
    return batches


def overflow_on_rank_1(trainer: Any) -> None:
    """Plant an inf on rank 1 after the next backward pass only."""
    backward = trainer.backward

    def backward_with_overflow(loss: torch.Tensor) -> None:
        backward(loss)
        plant_inf(trainer.model.parameters(), step=0, at=0)
        trainer.backward = backward

    trainer.backward = backward_with_overflow


@pytest.mark.parametrize("scaler_class", [DistGradScaler, StepGuard])
def test_scaler_and_guard_accept_every_call_of_the_protocol(scaler_class):
    for name in METHODS:
        protocol_params = dict(inspect.signature(getattr(Scaler, name)).parameters)
        params = dict(inspect.signature(getattr(scaler_class, name)).parameters)
        for param_name, protocol_param in protocol_params.items():
            param = params.pop(param_name)
            assert (name, param.kind) == (name, protocol_param.kind)
            assert (name, param.default) == (name, protocol_param.default)
        required = [
            param.name
            for param in params.values()
            if param.default is param.empty and param.kind is not param.VAR_KEYWORD
        ]
        assert (name, required) == (name, [])


def test_only_scalers_with_all_eight_methods_satisfy_the_protocol():
    assert len(METHODS) == 8
    assert isinstance(DistGradScaler("cpu"), Scaler)
    assert isinstance(StepGuard(), Scaler)
    assert isinstance(EightMethods(StepGuard()), Scaler)
    assert not isinstance(torch.amp.GradScaler("cpu"), Scaler)


@pytest.mark.parametrize("precision", DTYPES)
@on_ranks(2)
def test_adapter_of_the_page_skips_an_overflow_of_one_rank_with_eight_methods(precision: str):
    scaler = make_scaler(precision)
    trainer = make_trainer(precision, EightMethods(scaler))
    batches = make_batches(3)
    trainer.fit(batches[:1])
    weight = trainer.model.weight.detach().clone()
    learning_rate = trainer.schedule.get_last_lr()

    overflow_on_rank_1(trainer)
    trainer.fit(batches[1:2])
    assert not scaler.step_was_taken(trainer.optimizer)
    assert torch.equal(trainer.model.weight, weight)
    assert trainer.schedule.get_last_lr() == learning_rate

    trainer.fit(batches[2:])
    assert scaler.step_was_taken(trainer.optimizer)
    assert not torch.equal(trainer.model.weight, weight)
    assert trainer.schedule.get_last_lr() < learning_rate
    weights = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(weights, trainer.model.weight.detach())
    assert torch.equal(*weights)


def test_adapter_of_the_page_saves_and_loads_the_loss_scale():
    scaler = make_scaler("fp16")
    trainer = make_trainer("fp16", scaler)
    trainer.fit(make_batches(1))
    scaler.update(4.0)
    restored_scaler = make_scaler("fp16")
    restored_trainer = make_trainer("fp16", restored_scaler)
    restored_trainer.load_state_dict(trainer.state_dict())
    assert restored_scaler.get_scale() == 4.0
    assert torch.equal(restored_trainer.model.weight, trainer.model.weight)

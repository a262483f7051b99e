"""The contract: what is seen in each layout, what breaks it, and what a clean set-up says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp import Breaches, Contract
from tests.ranks import RankPool
from tests.report.setups import CLEAN, clean

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WORDS: dict[str, Any] = {
    "parameters": "fp32",
    "compute": "bf16",
    "norms": ("fp32", "bf16"),
    "gather": "bf16",
    "reduce": "fp32",
    "activations": "bf16",
    "masters": "fp32",
    "optimizer_state": "fp32",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(
    model: nn.Module,
    region: torch.dtype | None = BF16,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """A step of a model, the model, and its optimizer."""
    torch.manual_seed(0)
    tokens, stepper = torch.randint(32, (2, 8)), optimizer or torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", region or BF16, enabled=region is not None):
            out = model(tokens)
        out.float().square().mean().backward()
        stepper.step()
        stepper.zero_grad()

    return step, model, stepper


def checked(*args: Any, **words: Any) -> Breaches:
    return Contract(**words or WORDS).check(*trained(*args))


def broken(found: Breaches) -> dict[str, tuple[str, int]]:
    return {each.key: (each.found, each.count) for each in found}


def test_a_step_as_declared_breaks_nothing_and_says_what_it_saw():
    found = checked(Net())
    assert not found
    assert found.seen["compute"] == {"bf16": 15}
    assert found.seen["parameters"] == {"fp32": 15}
    assert "kept" in str(found)
    assert "nothing seen" in str(found), "one process sends nothing"


def test_a_whole_model_in_bf16_is_a_line_for_each_word_that_it_breaks():
    found = checked(Net().bfloat16())
    assert broken(found) == {
        "parameters": ("bf16", 15),
        "masters": ("bf16", 15),
        "optimizer_state": ("bf16", 30),
    }
    assert found[0].where[0] == "blocks.*.down.bias"
    assert "at every place (15 of 15)" in str(found)
    assert "load it in float32" in found[0].fix
    assert {each.fix for each in found[1:]} == {"as the parameters are, so see there"}


@pytest.mark.parametrize("layout", dict.fromkeys(layout for _, layout, _ in CLEAN))
def test_each_level_keeps_its_contract(ranks2: RankPool, layout):
    for setup in (each for each in CLEAN if each[1] == layout):
        for found in ranks2.run(clean, *setup):
            assert not found, f"{setup}: {found}"
            assert {"parameters", "compute", "masters", "optimizer_state"} <= {*found.seen}

"""Level fp8: linear layers compute in float8 by torchao; here emulated, on a CPU."""

import logging
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distamp import Precision, cast_model, float8_layers, initialize, pin_precision
from distamp.errors import SettingError
from distamp.initialize import float8
from tests.initialize import cells
from tests.on_ranks import on_ranks
from tests.ranks import mesh

pytest.importorskip("torchao")

E4M3, E5M2 = 2.0**-3, 2.0**-2  # spacing of float8 values, relative


class Net(nn.Module):
    """Layers of every kind that conversion meets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 32)
        self.first = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.router = nn.Linear(64, 16)
        self.odd = nn.Linear(64, 20)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.last = nn.Linear(64, 32)
        self.tied = nn.Linear(32, 32, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.first(self.embedding(tokens)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x * self.router(x).softmax(-1).amax(-1, keepdim=True) + self.odd(x).mean()
        return self.tied(self.last(x))


TOKENS = torch.arange(32).reshape(4, 8)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def test_each_linear_layer_is_shown_with_why_it_does_not_compute_in_float8():
    model = Net()
    model.last.register_forward_hook(lambda *_: None)
    pin_precision(model.router, "fp32")
    before = dict(model.named_parameters())
    cast_model(model, "fp8")
    found = float8_layers(model)
    assert found.pop("first") == "float8"
    reasons = {
        "router": "pinned to torch.float32",
        "odd": "multiples of 16",
        "attention.out_proj": "NonDynamicallyQuantizableLinear",
        "last": "hooks",
        "tied": "shares its weight",
    }
    assert found.keys() == reasons.keys()
    assert [name for name, words in reasons.items() if words not in found[name]] == []
    assert all(before[name] is p for name, p in model.named_parameters()), "an optimizer holds them"


def test_a_pattern_leaves_layers_out_and_what_a_model_of_transformers_returns_is():
    model = cast_model(Net(), "fp8", precision={"first": "bf16"})
    assert "bfloat16" in float8_layers(model)["first"]
    assert float8_layers(model)["last"] == "float8"
    owned = Net()
    owned.get_output_embeddings = lambda: owned.last
    owned._keep_in_fp32_modules = ["first"]
    found = float8_layers(cast_model(owned, "fp8"))
    assert (found["last"], found["first"]) == (
        "what the model returns",
        "declared fp32 by its owner",
    )
    assert found["router"] == "float8"


@pytest.mark.parametrize("level", ["fp8", "fp8-rowwise"])
def test_a_step_is_that_of_fp32_to_the_rounding_of_float8(level):
    exact, model = Net(), cast_model(Net(), level)
    loss_of(exact(TOKENS), TOKENS).backward()
    amp = initialize(model, sgd(model), level)
    seen = []
    model.first.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with amp.autocast():
        logits = amp.model(TOKENS)
    assert seen == [torch.bfloat16], "as in a region of CUDA's"
    amp.backward(loss_of(logits, TOKENS))
    wanted = gradients(exact)
    for name, gradient in gradients(model).items():
        assert gradient.dtype is torch.float32
        assert (gradient - wanted[name]).norm() < E5M2 * wanted[name].norm(), name
    difference = gradients(model)["first.weight"] - wanted["first.weight"]
    assert difference.norm() > 2.0**-7 * wanted["first.weight"].norm(), "less than float8 rounds by"
    assert amp.step()


def test_emulation_is_said_and_a_model_on_another_device_is_refused(caplog, monkeypatch):
    with caplog.at_level(logging.WARNING, "distamp.initialize"):
        model = cast_model(Net(), "fp8")
    assert ["emulated" in record.message for record in caplog.records] == [True]
    monkeypatch.setattr(float8, "_has_kernels", lambda *_: True)
    with pytest.raises(SettingError, match="move the model to its device first"):
        initialize(model, sgd(model), "fp8")


def test_a_layer_in_float8_cannot_be_pinned_and_without_torchao_there_is_none(monkeypatch):
    with pytest.raises(ValueError, match="computes in float8"):
        pin_precision(cast_model(Net(), "fp8").first, "fp32")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(SettingError, match=r"install distamp\[fp8\]"):
        cast_model(Net(), "fp8")


# -- several ranks ---------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "policy", "all_gather", "hook"),
    [
        ("DDP", None, False, None),
        ("DDP", None, False, "int8"),
        ("FSDP2", MixedPrecisionPolicy(torch.bfloat16, torch.float32), False, None),
        ("FSDP2", None, True, None),
        ("TP", None, False, None),
    ],
)
def test_a_layout_trains_skips_on_all_ranks_and_keeps_its_contract(
    layout, policy, all_gather, hook
):
    level = Precision.of("fp8").replaced(float8_all_gather=all_gather)
    model: Any = cast_model(cells.Net(), level)
    if policy is None:
        model = cells.wrapped(model, layout, None, "")
    else:
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh((2,), ("shard",)), mp_policy=policy)
    amp = initialize(model, sgd(model), level, comm_hook=hook)
    x, target = (t if layout == "TP" else t.chunk(2)[dist.get_rank()] for t in cells.batch())
    taken: list[bool] = []
    losses: list[Tensor] = []
    weights: list[str] = []
    layers = [module for module in model.modules() if float8.computes_in_float8(module)]
    layers[0].register_forward_pre_hook(lambda m, _: weights.append(type(m.weight).__name__))

    def step() -> None:
        amp.zero_grad()
        with amp.autocast():
            losses.append(cells.loss_of(amp.model(x).float(), target))
        bad = len(losses) == 2 and dist.get_rank() == 1
        amp.backward(losses[-1] * (torch.inf if bad else 1.0))
        amp.clip_grad_norm_(1.0, sharded=lambda p: getattr(p, "device_mesh", None))
        taken.append(bool(amp.step()))

    for _ in range(3):
        step()
    breaches = amp.check(step)
    assert not breaches, str(breaches)
    assert taken == [True, False, True, True]
    assert losses[-1] < losses[0]
    assert {"Float8" in kind for kind in weights} == {all_gather}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        cells.Net().load_state_dict(full)
        assert {(type(value), value.dtype) for value in full.values()} == {(Tensor, torch.float32)}

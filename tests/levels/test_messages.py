"""What a user of `initialize` reads: the repr of an Amp, and mistakes in its first calls."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import initialize
from distamp.errors import CallOrderError
from distamp.levels.amp import Amp
from distamp.precision_level import LEVELS
from distamp.report import PrecisionContract
from tests.on_ranks import on_ranks
from tests.scaler.steps import error_of


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("level", "scaler"),
    [
        ("fp16", "<DistGradScaler of 1 rank at loss scale 65536: AdamW 0 steps taken, 0 skipped>"),
        ("bf16", "<StepGuard of 1 rank: AdamW 0 steps taken, 0 skipped>"),
    ],
)
def test_the_repr_of_an_amp_has_its_level_and_its_scaler(level, scaler):
    amp = initialize(*_trained(), level)
    assert repr(amp) == f"<Amp of Sequential at {level}: {scaler}>"


MODEL_FIRST = "The model comes first: initialize(model, optimizer, level)."
LEVEL_THIRD = "The level comes third: initialize(model, optimizer, level)."
NOT_AN_OPTIMIZER = "optimizers must be a torch.optim.Optimizer, several or None, not"
NOT_A_MODEL = "model must be a torch.nn.Module or several, not"


@pytest.mark.parametrize(
    ("arrange", "text"),
    [
        (lambda m, o: (o, m), f"{NOT_A_MODEL} AdamW. {MODEL_FIRST}"),
        (lambda m, o: ([o], [m]), f"{NOT_A_MODEL} AdamW. {MODEL_FIRST}"),
        (lambda m, o: (m, m), f"{NOT_AN_OPTIMIZER} Sequential. {MODEL_FIRST}"),
        (lambda m, o: (m, "bf16"), f"{NOT_AN_OPTIMIZER} str. {LEVEL_THIRD}"),
        (lambda m, o: (m, o.state), f"{NOT_AN_OPTIMIZER} int."),
    ],
    ids=["swapped", "swapped lists", "two models", "no optimizer", "an integer"],
)
def test_arguments_in_another_order_are_refused_with_the_order(arrange, text):
    model, optimizer = _trained()
    optimizer.state = {1: "one"}  # iterated, it yields an integer
    assert error_of(initialize, *arrange(model, optimizer)) == ("TypeError", text)


LEVELS_TEXT = f"Choose from {', '.join(map(repr, LEVELS))}."


@pytest.mark.parametrize(
    ("level", "text"),
    [
        ("bfloat", f"There is no level 'bfloat'. {LEVELS_TEXT} Did you mean 'bf16'?"),
        ("bf16-02", f"There is no level 'bf16-02'. {LEVELS_TEXT} Did you mean 'bf16-O2' or"),
        ("02", f"There is no level '02'. {LEVELS_TEXT} Did you mean 'fp16-O2', with the letter O?"),
        ("O4", f"There is no level 'O4'. {LEVELS_TEXT} There is no similar name."),
        (None, f"There is no level None. {LEVELS_TEXT} There is no similar name."),
    ],
)
@pytest.mark.parametrize(
    "call", [lambda level: initialize(*_trained(), level), PrecisionContract.of]
)
def test_an_unknown_level_is_refused_with_the_levels_and_a_similar_one(call, level, text):
    name, raised = error_of(call, level)
    assert name == "ConfigError"
    assert raised.startswith(text)


PRECISIONS = "Choose from 'fp32', 'fp16', 'bf16', 'fp32:keep_output', 'fp16:keep_output', 'bf16:keep_output'."


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (
            {"0": "float32"},
            f"precision= has no precision 'float32' for the pattern '0'. {PRECISIONS} Did you mean "
            "'fp32'?",
        ),
        (
            {"0": "high"},
            f"precision= has no precision 'high' for the pattern '0'. {PRECISIONS} There is no "
            "similar name.",
        ),
        (
            {0: "fp32"},
            "precision= has the key 0. Its keys must be shell patterns over module names, as in "
            "{'*.norm': 'fp32'}.",
        ),
        (
            ["0"],
            "precision= must map patterns over module names to precisions, as in {'*.norm': "
            "'fp32'}, not ['0'].",
        ),
        (
            {"*nrom*": "fp32"},
            "precision= has the pattern '*nrom*', and no module on any rank has a name that "
            "matches it. There is no similar name. model.named_modules() lists the names. For the "
            "whole model call set_module_precision(model, ...).",
        ),
    ],
)
def test_a_wrong_module_precision_is_refused_with_the_right_ones(precision, text):
    """The module names of the model are '0' alone."""
    raised = error_of(lambda: initialize(*_trained(), "bf16", module_precision=precision))
    assert raised == ("ConfigError", text)


def test_a_misspelt_pattern_is_refused_with_the_names_of_similar_modules():
    block = nn.ModuleDict({"attn_norm": nn.LayerNorm(2), "head": nn.Linear(2, 2)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    optimizer = torch.optim.AdamW(model.parameters())
    for pattern, similar in {"*.atn_norm": "blocks.0.attn_norm", "*haed": "blocks.0.head"}.items():
        _, text = error_of(
            lambda p=pattern: initialize(model, optimizer, "bf16", module_precision={p: "fp32"})
        )
        assert text.endswith(f"a name that matches it. Did you mean {similar!r}?")


def test_a_second_initialize_with_masters_is_refused():
    model, optimizer = _trained()
    initialize(model, optimizer, "fp16-O2")
    assert error_of(initialize, model, optimizer, "fp16-O2") == (
        "ConfigError",
        "optimizer 0 (AdamW) has master parameters already, because initialize or MasterParameters "
        "was called with it before. Use the Amp that the first initialize returned, or make a new "
        "model and a new optimizer.",
    )


@on_ranks(2)
def test_patterns_that_differ_between_ranks_are_listed_without_the_common_ones():
    precision = {"0": "fp32", "missing": "bf16"} if dist.get_rank() else {"0": "fp32"}
    assert error_of(lambda: initialize(*_trained(), "bf16", module_precision=precision)) == (
        "RankMismatchError",
        "The ranks differ in precision=.\n"
        "  rank 0: no such pattern\n"
        "  rank 1: precision={'missing': 'bf16'}\n"
        "Pass the same patterns in the same order on every rank, also on a pipeline stage that has "
        "none of their modules. A pattern needs a matching module on one rank only.",
    )


@on_ranks("world")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("level", ["fp16", "fp16-O2"])
def test_a_clip_of_an_unscaled_loss_names_amp_backward(level, world):
    model, optimizer = _trained()
    amp = initialize(model, optimizer, level)
    with amp.autocast():
        loss = model(torch.ones(1, 2).to(amp.models[0][0].weight.dtype)).float().sum()
    loss.backward()
    assert error_of(amp.clip_grad_norm_, 1.0) == (
        "CallOrderError",
        f"amp.clip_grad_norm_() was called at {level}, which scales the loss, and no loss was "
        "scaled before. Call amp.backward(loss) instead of loss.backward(), or use "
        "amp.scale_loss(loss).",
    )


@on_ranks("world")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("level", ["fp16", "fp16-O2"])
def test_a_backward_pass_of_an_unscaled_loss_names_amp_backward(level, world):
    model, optimizer = _trained()
    amp = initialize(model, optimizer, level)
    with amp.autocast():
        loss = model(torch.ones(1, 2).to(amp.models[0][0].weight.dtype)).float().sum()
    loss.backward()
    with pytest.raises(
        CallOrderError, match=r"Call amp\.backward\(loss\) instead of loss\.backward"
    ):
        amp.step()


def test_amp_documents_the_range_of_max_norm_that_clips_take():
    text = inspect.getdoc(Amp.clip_grad_norm_)
    assert text is not None
    assert "max_norm: The largest norm after clipping; >= 0." in text

"""The texts that a user of `initialize` reads: the repr of an Amp, and errors in first calls."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import cast_model, initialize
from distamp.errors import CallOrderError, ConfigError, RankMismatchError
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


NO_MODEL = (
    "model must be a torch.nn.Module or several, not AdamW. The model comes first: "
    "initialize(model, optimizer, level)."
)
NO_OPTIMIZER = (
    "optimizers must be a torch.optim.Optimizer, several or None, not Sequential. The model comes "
    "first: initialize(model, optimizer, level)."
)
A_LEVEL = (
    "optimizers must be a torch.optim.Optimizer, several or None, not str. The level comes third: "
    "initialize(model, optimizer, level)."
)


def test_a_model_and_an_optimizer_in_the_other_order_are_refused_with_the_order():
    model, optimizer = _trained()
    assert error_of(initialize, optimizer, model) == ("TypeError", NO_MODEL)
    assert error_of(initialize, [optimizer], [model]) == ("TypeError", NO_MODEL)
    assert error_of(initialize, model, model) == ("TypeError", NO_OPTIMIZER)
    assert error_of(initialize, model, "bf16") == ("TypeError", A_LEVEL)


def _refused_level(level: object) -> str:
    """Return the error of a level without the list of levels, which is the same in both calls."""
    name, text = error_of(PrecisionContract.from_level, level)
    assert name == "ConfigError"
    model, optimizer = _trained()
    assert error_of(initialize, model, optimizer, level) == (name, text)
    quoted = [repr(known) for known in LEVELS]
    choices = ", ".join(quoted)
    assert choices in text
    return text.replace(choices, "LEVELS")


def test_an_unknown_level_is_refused_with_the_levels_and_a_similar_one():
    assert _refused_level("bfloat") == (
        "There is no level 'bfloat'. Choose from LEVELS. Did you mean 'bf16'?"
    )


def test_a_level_with_a_zero_is_refused_with_the_letter():
    assert _refused_level("02") == (
        "There is no level '02'. Choose from LEVELS. Did you mean 'O2', with the letter O?"
    )


def test_a_level_that_is_like_no_other_is_refused_without_a_guess():
    assert _refused_level("x") == (
        "There is no level 'x'. Choose from LEVELS. There is no similar name."
    )


def test_a_level_has_no_default():
    needed = error_of(initialize, *_trained())
    assert needed == (
        "TypeError",
        "initialize() needs a level, because there is no default. Pass level='bf16' on devices "
        "that compute in bfloat16, else level='fp16', as in initialize(model, optimizer, 'bf16').",
    )
    both = error_of(initialize, *_trained(), "bf16", opt_level="O1")
    assert both == (
        "TypeError",
        "initialize() got level='bf16' and opt_level='O1', which are two names of one argument. "
        "Pass level alone.",
    )


def test_cast_model_takes_no_dtype_and_names_the_levels_of_that_dtype():
    refused = error_of(cast_model, nn.Linear(2, 2), torch.bfloat16)
    assert refused == (
        "TypeError",
        "cast_model() takes the name of a level, not torch.bfloat16. Pass 'bf16-O2' to train with "
        "float32 master weights, or 'bf16-O3' to train without them.",
    )
    needed = error_of(cast_model, nn.Linear(2, 2))
    assert needed == (
        "TypeError",
        "cast_model() needs a level, because there is no default. Pass the level that initialize "
        "gets, as in cast_model(model, 'bf16-O2').",
    )


def _refused_precision(precision: Any) -> str:
    """Return the error of a ``module_precision=`` for a model with a single module '0'."""
    model, optimizer = _trained()
    with pytest.raises(ConfigError) as raised:
        initialize(model, optimizer, "bf16", module_precision=precision)
    return str(raised.value)


def test_an_unknown_precision_of_a_module_is_refused_with_a_similar_one():
    assert _refused_precision({"0": "float32"}) == (
        "module_precision= has no precision 'float32' for the pattern '0'. Choose from 'fp32', "
        "'fp16', 'bf16', 'fp32:keep_output', 'fp16:keep_output', 'bf16:keep_output'. Did you mean "
        "'fp32'?"
    )


def test_a_precision_of_a_module_that_is_like_no_other_is_refused_without_a_guess():
    assert _refused_precision({"0": "high"}) == (
        "module_precision= has no precision 'high' for the pattern '0'. Choose from 'fp32', "
        "'fp16', 'bf16', 'fp32:keep_output', 'fp16:keep_output', 'bf16:keep_output'. There is no "
        "similar name."
    )


def test_a_key_that_is_no_pattern_is_refused_with_an_example():
    assert _refused_precision({0: "fp32"}) == (
        "module_precision= has the key 0. Its keys must be shell patterns over module names, as in "
        "{'*.norm': 'fp32'}."
    )


def test_a_list_instead_of_a_mapping_is_refused_with_an_example():
    assert _refused_precision(["0"]) == (
        "module_precision= must map patterns over module names to precisions, as in {'*.norm': "
        "'fp32'}, not ['0']."
    )


def test_a_pattern_that_is_like_no_module_is_refused_without_a_guess():
    assert _refused_precision({"*nrom*": "fp32"}) == (
        "module_precision= has the pattern '*nrom*', and no module on any rank has a name that "
        "matches it. There is no similar name. model.named_modules() lists the names. For the "
        "whole model call set_module_precision(model, ...)."
    )


@pytest.mark.parametrize("pattern", ["*.atn_norm", "*attn_nrom"])
def test_a_misspelt_pattern_is_refused_with_the_name_of_a_similar_module(pattern):
    block = nn.ModuleDict({"attn_norm": nn.LayerNorm(2), "head": nn.Linear(2, 2)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError) as raised:
        initialize(model, optimizer, "bf16", module_precision={pattern: "fp32"})
    text = str(raised.value)
    assert text.endswith("that matches it. Did you mean 'blocks.0.attn_norm'?")


MADE_TWICE = (
    "optimizer 0 (AdamW) has master parameters already, because initialize or MasterParameters was "
    "called with it before. Use the Amp that the first initialize returned, or make a new model "
    "and a new optimizer."
)


def test_a_second_initialize_with_masters_is_refused():
    model, optimizer = _trained()
    initialize(model, optimizer, "fp16-O2")
    name, text = error_of(initialize, model, optimizer, "fp16-O2")
    assert name == "ConfigError"
    assert text == MADE_TWICE


PATTERNS = """\
The ranks differ in module_precision=.
  rank 0: no such pattern
  rank 1: module_precision={'missing': 'bf16'}
Pass the same patterns in the same order on every rank, also on a pipeline stage that has none of \
their modules. A pattern needs a matching module on one rank only."""


@on_ranks(2)
def test_patterns_that_differ_between_ranks_are_listed_without_the_common_ones():
    precision = {"0": "fp32"}
    if dist.get_rank() == 1:
        precision["missing"] = "bf16"
    model, optimizer = _trained()
    with pytest.raises(RankMismatchError) as raised:
        initialize(model, optimizer, "bf16", module_precision=precision)
    assert str(raised.value) == PATTERNS


@on_ranks("world")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("level", ["fp16", "fp16-O2"])
def test_a_clip_of_an_unscaled_loss_names_amp_backward(level, world):
    model, optimizer = _trained()
    amp = initialize(model, optimizer, level)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    name, text = error_of(amp.clip_grad_norm_, 1.0)
    assert name == "CallOrderError"
    assert text == (
        f"amp.clip_grad_norm_() was called at {level}, which scales the loss, and no loss was "
        "scaled before. Call amp.backward(loss) instead of loss.backward(), or use "
        "amp.scale_loss(loss)."
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

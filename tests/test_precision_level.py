"""The table of levels: what each row is, what can be overridden, and what contradicts itself."""

import dataclasses

import pytest
import torch

from distamp.errors import ConfigError
from distamp.precision_level import LEVELS, PrecisionLevel

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# Written down from Apex's documentation: cast_model_type, patch_torch_functions,
# keep_batchnorm_fp32, master_weights, loss_scale.
APEX = {
    "fp32": (F32, False, None, False, 1.0),
    "fp16": (None, True, None, None, "dynamic"),
    "fp16-O2": (F16, False, True, True, "dynamic"),
    "fp16-O3": (F16, False, False, False, 1.0),
}


@pytest.mark.parametrize("level", APEX)
def test_a_row_has_the_defaults_that_apex_documents(level):
    row = LEVELS[level]
    cast_model_type = None if row.autocasts else row.param
    assert (
        cast_model_type,
        row.autocasts,
        row.keep_batchnorm_fp32,
        row.master_weights,
        row.loss_scale,
    ) == APEX[level]


@pytest.mark.parametrize("level", LEVELS)
def test_float16_levels_run_a_scaler_and_others_where_they_are_asked_to(level):
    assert PrecisionLevel.from_name(level).scales is (level in ("fp16", "fp16-O2", "fp16-O3"))
    for loss_scale in ("dynamic", 128.0):
        assert PrecisionLevel.from_name(level, loss_scale=loss_scale).scales


def test_apexs_names_are_names_of_levels():
    assert PrecisionLevel.from_name("O0") == LEVELS["fp32"]
    assert PrecisionLevel.from_name("O1") == LEVELS["fp16"]
    assert PrecisionLevel.from_name("O2") == LEVELS["fp16-O2"]
    assert PrecisionLevel.from_name("O3") == LEVELS["fp16-O3"]


def test_a_name_may_be_in_any_case():
    assert PrecisionLevel.from_name("o1") == LEVELS["fp16"]
    assert PrecisionLevel.from_name("FP16") == LEVELS["fp16"]
    assert PrecisionLevel.from_name("bf16-o2") == LEVELS["bf16-O2"]
    assert PrecisionLevel.from_name("FP8-Rowwise") == LEVELS["fp8-rowwise"]


def test_a_dtype_is_the_level_of_its_name():
    assert PrecisionLevel.from_name(torch.float32) == LEVELS["fp32"]
    assert PrecisionLevel.from_name(torch.float16) == LEVELS["fp16"]
    assert PrecisionLevel.from_name(torch.bfloat16) == LEVELS["bf16"]


@pytest.mark.parametrize(
    ("half", "bf16"), [("fp16", "bf16"), ("fp16-O2", "bf16-O2"), ("fp16-O3", "bf16-O3")]
)
def test_a_bf16_row_is_its_fp16_row_with_another_dtype_and_no_scaler(half, bf16):
    swapped = {
        field.name: BF16 if (value := getattr(LEVELS[half], field.name)) is F16 else value
        for field in dataclasses.fields(PrecisionLevel)
    }
    assert PrecisionLevel(**swapped | {"name": bf16, "loss_scale": 1.0}) == LEVELS[bf16]


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32", True),
        ({"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
        ({"master_weights": True}, "master_weights", True),
        ({"loss_scale": 128}, "loss_scale", 128.0),
        ({"loss_scale": "128.0"}, "loss_scale", 128.0),
        ({"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
    ],
)
def test_overrides_are_spelled_as_in_apex(given, field, value):
    overridden = PrecisionLevel.from_name("fp16-O3", **given)
    assert getattr(overridden, field) == value
    assert overridden == LEVELS["fp16-O3"].replace(**{field: value})


@pytest.mark.parametrize(
    ("level", "override", "reason"),
    [
        ("fp16", {"keep_batchnorm_fp32": True}, "contradicts fp16"),
        ("fp16", {"keep_batchnorm_fp32": False}, "contradicts fp16"),
        ("fp16", {"master_weights": True}, "are float32 already"),
        ("fp16", {"master_weights": False}, "are float32 already"),
        ("bf16", {"master_weights": True}, "are float32 already"),
        ("fp32", {"keep_batchnorm_fp32": False}, "contradicts fp32"),
        ("fp32", {"master_weights": True}, "contradicts fp32"),
        ("fp16-O2", {"keep_batchnorm_fp32": "yes"}, "must be True or False"),
        ("fp16-O2", {"loss_scale": 0.0}, "must be 'dynamic' or a number > 0"),
        ("fp16-O2", {"loss_scale": "inf"}, "must be 'dynamic' or a number > 0"),
        ("fp16-O2", {"loss_scale": "static"}, "must be 'dynamic' or a number > 0"),
        ("fp16-O2", {"loss_scale": True}, "must be 'dynamic' or a number > 0"),
        ("02", {}, "Did you mean 'O2', with the letter O"),
        ("O4", {}, "There is no level 'O4'. Choose from"),
        ("bf16-02", {}, "Did you mean 'bf16-O2'"),
        (torch.float64, {}, "There is no level torch.float64"),
        (None, {}, "There is no level None"),
        *(
            (level, {"master_weights": "split"}, "or master_weights=True")
            for level in ("fp32", "fp16", "fp16-O2", "bf16")
        ),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(level, override, reason):
    with pytest.raises(ConfigError, match=reason) as raised:
        PrecisionLevel.from_name(level, **override)
    assert "\n" not in str(raised.value)


def test_what_o0_says_of_itself_may_be_said():
    said = PrecisionLevel.from_name("fp32", keep_batchnorm_fp32=True, master_weights=False)
    assert said == LEVELS["fp32"].replace(keep_batchnorm_fp32=True)


@pytest.mark.parametrize(
    ("level", "changed", "says"),
    [
        ("fp16-O2", {"compute": BF16}, "autocast casts from float32"),
        ("bf16-O2", {"linear_recipe": "float8"}, "Use fp8"),
        ("fp8-rowwise", {"float8_all_gather": True}, "one scale for each weight"),
    ]
    + [("fp32", {f: torch.int8}, f) for f in ("param", "compute", "reduce", "output")],
)
def test_rows_that_cannot_be_made(level, changed, says):
    with pytest.raises(ConfigError, match=says):
        LEVELS[level].replace(**changed)


def test_gradients_of_a_cast_model_may_be_reduced_in_more_and_those_of_a_region_not_in_less():
    """fsdp2.md advises reduce_dtype=torch.float32."""
    assert {level: LEVELS[level].contract()["grad_reduce"] for level in ("bf16-O2", "fp16")} == {
        "bf16-O2": ("fp32", "bf16"),
        "fp16": ("fp32",),
    }

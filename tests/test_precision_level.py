"""The table of levels: the fields of each row, overrides, and contradictions."""

import dataclasses

import pytest
import torch

from distamp.errors import ConfigError
from distamp.precision_level import LEVELS, PrecisionLevel

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# The expected values of the first four tests are from Apex's documentation.


def test_fp32_has_the_defaults_of_apexs_o0():
    row = LEVELS["fp32"]
    assert row.param is F32  # cast_model_type
    assert row.autocasts is False  # patch_torch_functions
    assert row.keep_batchnorm_fp32 is None
    assert row.master_weights is False
    assert row.loss_scale == 1.0


def test_fp16_has_the_defaults_of_apexs_o1():
    row = LEVELS["fp16"]
    # Apex has no cast_model_type here, because functions are patched.
    assert row.autocasts is True
    assert row.keep_batchnorm_fp32 is None
    assert row.master_weights is None
    assert row.loss_scale == "dynamic"


def test_fp16_o2_has_the_defaults_of_apexs_o2():
    row = LEVELS["fp16-O2"]
    assert row.param is F16
    assert row.autocasts is False
    assert row.keep_batchnorm_fp32 is True
    assert row.master_weights is True
    assert row.loss_scale == "dynamic"


def test_fp16_o3_has_the_defaults_of_apexs_o3():
    row = LEVELS["fp16-O3"]
    assert row.param is F16
    assert row.autocasts is False
    assert row.keep_batchnorm_fp32 is False
    assert row.master_weights is False
    assert row.loss_scale == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_only_float16_levels_run_a_scaler_by_default(level):
    runs_scaler = level in ("fp16", "fp16-O2", "fp16-O3")
    assert PrecisionLevel.from_name(level).scales is runs_scaler


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_runs_a_scaler_if_it_gets_a_loss_scale(level, loss_scale):
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
    ("fp16", "bf16"), [("fp16", "bf16"), ("fp16-O2", "bf16-O2"), ("fp16-O3", "bf16-O3")]
)
def test_a_bf16_row_is_its_fp16_row_with_another_dtype_and_no_scaler(fp16, bf16):
    fields = {}
    for field in dataclasses.fields(PrecisionLevel):
        value = getattr(LEVELS[fp16], field.name)
        fields[field.name] = BF16 if value is F16 else value
    fields["name"] = bf16
    fields["loss_scale"] = 1.0
    assert PrecisionLevel(**fields) == LEVELS[bf16]


@pytest.mark.parametrize("flag", [True, "True"], ids=repr)
def test_keep_batchnorm_fp32_is_spelled_as_in_apex(flag):
    level = PrecisionLevel.from_name("fp16-O3", keep_batchnorm_fp32=flag)
    assert level == LEVELS["fp16-O3"].replace(keep_batchnorm_fp32=True)
    assert level.keep_batchnorm_fp32 is True


def test_master_weights_is_spelled_as_in_apex():
    level = PrecisionLevel.from_name("fp16-O3", master_weights=True)
    assert level == LEVELS["fp16-O3"].replace(master_weights=True)
    assert level.master_weights is True


@pytest.mark.parametrize("loss_scale", [128, "128.0"], ids=repr)
def test_a_static_loss_scale_is_spelled_as_in_apex(loss_scale):
    level = PrecisionLevel.from_name("fp16-O3", loss_scale=loss_scale)
    assert level == LEVELS["fp16-O3"].replace(loss_scale=128.0)
    assert level.loss_scale == 128.0


def test_a_dynamic_loss_scale_is_spelled_as_in_apex():
    level = PrecisionLevel.from_name("fp16-O3", loss_scale="dynamic")
    assert level == LEVELS["fp16-O3"].replace(loss_scale="dynamic")
    assert level.loss_scale == "dynamic"


def assert_refused(name: object, reason: str, **override: object) -> None:
    """Assert that a level with an override raises an error of one line with this reason."""
    with pytest.raises(ConfigError, match=reason) as raised:
        PrecisionLevel.from_name(name, **override)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("flag", [True, False])
def test_fp16_refuses_keep_batchnorm_fp32(flag):
    assert_refused("fp16", "contradicts fp16", keep_batchnorm_fp32=flag)


@pytest.mark.parametrize("flag", [True, False])
def test_fp16_refuses_master_weights(flag):
    assert_refused("fp16", "are float32 already", master_weights=flag)


def test_bf16_refuses_master_weights():
    assert_refused("bf16", "are float32 already", master_weights=True)


def test_fp32_refuses_half_precision_batchnorm():
    assert_refused("fp32", "contradicts fp32", keep_batchnorm_fp32=False)


def test_fp32_refuses_master_weights():
    assert_refused("fp32", "contradicts fp32", master_weights=True)


@pytest.mark.parametrize("level", ["fp32", "fp16", "fp16-O2", "bf16"])
def test_split_master_weights_are_refused_where_weights_are_not_bfloat16(level):
    assert_refused(level, "or master_weights=True", master_weights="split")


def test_keep_batchnorm_fp32_must_be_a_flag():
    assert_refused("fp16-O2", "must be True or False", keep_batchnorm_fp32="yes")


@pytest.mark.parametrize("loss_scale", [0.0, "inf", "static", True], ids=repr)
def test_a_loss_scale_must_be_dynamic_or_a_positive_number(loss_scale):
    assert_refused("fp16-O2", "must be 'dynamic' or a number > 0", loss_scale=loss_scale)


def test_a_zero_in_the_name_of_a_level_is_explained():
    assert_refused("02", "Did you mean 'O2', with the letter O")
    assert_refused("bf16-02", "Did you mean 'bf16-O2'")


def test_a_name_without_a_level_is_refused_with_the_names_that_exist():
    assert_refused("O4", "There is no level 'O4'. Choose from")


def test_a_dtype_without_a_level_is_refused():
    assert_refused(torch.float64, "There is no level torch.float64")


def test_none_is_no_level():
    assert_refused(None, "There is no level None")


def test_overrides_that_repeat_the_defaults_of_o0_are_accepted():
    level = PrecisionLevel.from_name("fp32", keep_batchnorm_fp32=True, master_weights=False)
    assert level == LEVELS["fp32"].replace(keep_batchnorm_fp32=True)


def test_a_row_with_half_precision_weights_refuses_another_compute_dtype():
    with pytest.raises(ConfigError, match="autocast casts from float32"):
        LEVELS["fp16-O2"].replace(compute=BF16)


def test_a_float8_recipe_is_refused_outside_the_float8_levels():
    with pytest.raises(ConfigError, match="Use fp8"):
        LEVELS["bf16-O2"].replace(linear_recipe="float8")


def test_rowwise_float8_refuses_an_all_gather_in_float8():
    with pytest.raises(ConfigError, match="one scale for each weight"):
        LEVELS["fp8-rowwise"].replace(float8_all_gather=True)


@pytest.mark.parametrize("field", ["param", "compute", "reduce", "output"])
def test_a_dtype_of_a_row_must_be_a_floating_point_dtype(field):
    with pytest.raises(ConfigError, match=field):
        LEVELS["fp32"].replace(**{field: torch.int8})


def test_gradients_of_a_cast_model_may_be_reduced_in_float32():
    """docs/howto/fsdp2.md recommends reduce_dtype=torch.float32."""
    assert LEVELS["bf16-O2"].contract()["grad_reduce"] == ("fp32", "bf16")


def test_gradients_of_a_region_are_reduced_in_float32_only():
    assert LEVELS["fp16"].contract()["grad_reduce"] == ("fp32",)

"""Refusals of `initialize` and `cast_model`: one line with a remedy, and an unchanged model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from distamp import OpLists, PrecisionLevel, cast_model, initialize, set_module_precision
from distamp.errors import ConfigError, DistampError, RankMismatchError
from tests.levels.cells import wrapped
from tests.levels.nets import amp_in, net
from tests.on_ranks import on_ranks
from tests.ranks import mesh

HALF = torch.float16
FULL = torch.float32
SAME_SETTINGS = "Pass the same level and settings to both calls"


@contextlib.contextmanager
def refused(text: str) -> Iterator[None]:
    """Check that the block raises an error of distamp with this text, in one line."""
    with pytest.raises(DistampError) as raised:
        yield
    message = str(raised.value)
    assert text in message
    # An error about ranks that differ has a line for each group of ranks.
    if not isinstance(raised.value, RankMismatchError):
        assert "\n" not in message


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def structure(model: nn.Module) -> tuple[list[Any], list[type]]:
    """Return the parameters with their dtypes, and the classes of the modules."""
    params = [(id(param), param.dtype) for param in model.parameters()]
    return params, [type(module) for module in model.modules()]


def try_initialize(model: Any, level: Any, optimizer: Any = None, **settings: Any) -> None:
    """Call `initialize`, and check that a refusal leaves the model unchanged."""
    if optimizer is None:
        optimizer = sgd(model)
    before = structure(model)
    try:
        initialize(model, optimizer, level, **settings)
    except ConfigError:
        assert structure(model) == before
        raise


# -- the level and its settings --------------------------------------------------------------------


def test_a_level_that_does_not_exist():
    with refused("There is no level 'O4'"):
        try_initialize(net(), "O4")


def test_batch_norms_in_fp32_at_a_level_that_casts_no_model():
    with refused("contradicts fp16"):
        try_initialize(net(), "fp16", keep_batchnorm_fp32=True)


def test_master_weights_at_a_level_with_float32_weights():
    with refused("float32 already"):
        try_initialize(net(), "fp16", master_weights=True)


def test_master_weights_of_an_optimizer_that_has_a_list_of_its_own():
    model = net()
    with refused("LBFGS holds its parameters in '_params'"):
        try_initialize(model, "fp16-O2", torch.optim.LBFGS(model.parameters()))


def test_a_negative_loss_scale():
    with refused("a number > 0"):
        try_initialize(net(), "fp16-O2", loss_scale=-1.0)


def test_an_initial_scale_beside_a_constant_one():
    with refused("the constant 128"):
        try_initialize(net(), "fp16-O2", loss_scale=128.0, init_scale=4.0)


def test_an_initial_scale_at_a_level_without_loss_scaling():
    with refused("loss_scale='dynamic'"):
        try_initialize(net(), "fp32", init_scale=4.0)


def test_a_communication_hook_without_a_wrapper():
    with refused("needs a wrapper"):
        try_initialize(net(), "fp16", comm_hook="fp16")


def test_replicas_without_a_communication_hook():
    with refused("communication hook"):
        try_initialize(net(), "fp16", replicas=dist.ProcessGroup(0, 1))


# -- a model that has another dtype than the level trains ------------------------------------------


@pytest.mark.parametrize("level", ["fp32", "fp16"])
def test_a_model_in_float16_at_a_level_with_float32_weights(level):
    with refused("model.half"):
        try_initialize(net().half(), level)


def test_a_model_in_bfloat16_at_bf16():
    with refused("Leave out model."):
        try_initialize(net().bfloat16(), "bf16")


def with_frozen_base(dtype: torch.dtype) -> nn.Module:
    """Return a net that is frozen in half precision, except its trained last layer."""
    model = net()
    model.requires_grad_(False).to(dtype)
    model.output.to(FULL).requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("dtype", "level", "text"),
    [
        pytest.param(HALF, "fp32", "Use bf16, fp16 or fp16-O2", id="float16 at fp32"),
        pytest.param(
            torch.bfloat16, "fp16-O2", "Use bf16, fp16 or bf16-O2", id="bfloat16 at fp16-O2"
        ),
        pytest.param(HALF, "bf16-O3", "or fp16-O2", id="float16 at bf16-O3"),
        pytest.param(torch.bfloat16, "fp16", "batch norms in", id="bfloat16 batch norm at fp16"),
    ],
)
def test_a_frozen_base_in_a_half_precision_that_the_level_cannot_use(dtype, level, text):
    with refused(text):
        try_initialize(with_frozen_base(dtype), level)


# -- models and optimizers that do not belong together ---------------------------------------------


def test_a_second_initialize_of_one_model():
    """A notebook's cell that is run again."""
    model = net()
    optimizer = sgd(model)
    initialize(model, optimizer, "fp16-O2")
    with refused("Use the Amp that the first initialize returned"):
        try_initialize(model, "fp16-O2", optimizer)


def test_an_optimizer_of_another_model():
    with refused("do not belong"):
        try_initialize(net(), "fp16", sgd(net()))


def test_a_model_without_parameters():
    with refused("nothing to train"):
        try_initialize(nn.ReLU(), "fp16", sgd(net()))


def test_a_model_on_the_meta_device():
    model = nn.Linear(2, 2, device="meta")
    with refused("its parameters have no values"):
        initialize(model, None, "bf16")


@pytest.mark.parametrize(
    ("models", "optimizers", "text"),
    [
        pytest.param(net(), [net()], "Optimizer", id="a model as optimizer"),
        pytest.param([sgd(net())], None, "Module", id="an optimizer as model"),
    ],
)
def test_a_model_and_an_optimizer_in_each_others_place(models, optimizers, text):
    with pytest.raises(TypeError, match=text):
        initialize(models, optimizers, "fp16")


def test_adams_eps_that_is_zero_in_float16():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with refused("eps=1e-08"):
        try_initialize(model, "fp16-O3", optimizer)


def test_one_of_two_eps_that_is_zero_in_float16():
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters(), eps=(1e-30, 1e-3))
    with refused("eps=1e-30"):
        try_initialize(model, "fp16-O3", optimizer)


def test_a_flat_state_of_a_parameter_that_no_model_has():
    model = net()
    stray = torch.ones(1)
    optimizer = sgd(nn.ParameterList([*model.parameters(), stray]))
    amp = initialize(model, optimizer, "fp32")
    with refused("no model of initialize"):
        amp.flat_state_dict()


# -- casts -----------------------------------------------------------------------------------------


def test_a_model_that_was_cast_for_another_level():
    model = cast_model(net(), "fp16-O2")
    with refused(SAME_SETTINGS):
        try_initialize(model, "fp16-O3")


def test_a_cast_of_a_model_that_is_pinned_as_a_whole():
    model = set_module_precision(net(), "fp32")
    with refused("Use level fp32"):
        cast_model(model, "fp16-O2")


# -- module_precision= -----------------------------------------------------------------------------


def test_a_pattern_that_matches_no_module():
    with refused("'norm'"):
        try_initialize(net(), "bf16", module_precision={"*.nrom": "fp32"})


NO_MATCH = "pattern '*.nrom', and no module on any rank has a name that matches it. Did you mean"


def test_a_pattern_of_a_cast_that_matches_no_module():
    model = net()
    with refused(NO_MATCH):
        cast_model(model, "fp16-O2", module_precision={"*.nrom": "fp32"})


def test_a_precision_that_no_module_can_have():
    with refused("no precision 'fp64'"):
        try_initialize(net(), "fp16-O2", module_precision={"norm": "fp64"})


def test_patterns_without_precisions():
    with refused("map patterns"):
        try_initialize(net(), "bf16", module_precision=["norm"])


def test_a_model_that_was_cast_with_patterns_which_initialize_does_not_get():
    model = cast_model(net(), "fp16-O2", module_precision={"hidden": "fp32"})
    with refused(SAME_SETTINGS):
        try_initialize(model, "fp16-O2")


# -- fp8 -------------------------------------------------------------------------------------------


@pytest.fixture
def torchao() -> Any:
    return pytest.importorskip("torchao")


@pytest.mark.usefixtures("torchao")
def test_a_model_that_was_cast_for_fp8_at_bf16():
    model = cast_model(net(), "fp8")
    with refused("cast for fp8"):
        try_initialize(model, "bf16")


@pytest.mark.usefixtures("torchao")
def test_a_model_that_was_cast_for_fp8_rowwise_at_fp8():
    model = cast_model(net(), "fp8-rowwise")
    with refused("fp8-rowwise"):
        try_initialize(model, "fp8")


@pytest.mark.usefixtures("torchao")
def test_an_op_list_with_the_operation_that_fp8_replaces():
    with refused("Leave linear out"):
        try_initialize(net(), "fp8", op_lists=OpLists(fp32={"linear"}))


@pytest.mark.usefixtures("torchao")
def test_fp8_for_a_model_whose_layers_are_too_small():
    model = nn.Sequential(nn.Linear(8, 8))
    with refused("Use bf16"):
        try_initialize(model, "fp8")


@pytest.mark.usefixtures("torchao")
def test_fp8_for_a_model_that_is_one_layer():
    with refused("no layer inside the model"):
        try_initialize(nn.Linear(16, 16), "fp8")


@pytest.mark.usefixtures("torchao")
def test_weights_in_fp8_after_the_optimizer_was_made():
    level = PrecisionLevel.from_name("fp8").replace(float8_all_gather=True)
    with refused("the optimizer has its parameters already"):
        try_initialize(net(), level)


# -- arguments of Apex and of a scaler -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cast_model_type", "level"),
        ("patch_torch_functions", "patched"),
        ("cast_model_outputs", "replace"),
        ("enabled", "level='fp32'"),
        ("hard_override", "agree with the level"),
        ("verbosity", "printed"),
        ("num_losses", "share one scale"),
        ("min_loss_scale", "min_scale"),
        ("max_loss_scale", "max_scale"),
        ("growth_interval", r"loss_scale=DynamicLossScale\(growth_interval="),
        ("lose_scale", r"'lose_scale'\. Did you mean 'loss_scale'\?$"),
        ("wings", "'wings'$"),
    ],
)
def test_initialize_answers_an_argument_of_apex_or_of_a_scaler(name, hint):
    with pytest.raises(TypeError, match=hint):
        initialize(net(), None, "fp16", **{name: 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("loss_id", "share one scale"),
        ("model", "every model"),
        ("delay_unscale", "stay scaled"),
        ("delay_overflow_check", r"amp\.step\(\)"),
        ("loss", "multiple values"),
        ("wings", "'wings'$"),
    ],
)
def test_scale_loss_answers_an_argument_of_apex(name, hint):
    model = net()
    optimizer = sgd(model)
    amp = initialize(model, optimizer, "fp16")
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(TypeError, match=hint), amp.scale_loss(loss, optimizer, **{name: 1}):
        pass


# -- wrappers that came before the cast, or before the optimizer -----------------------------------


def plain_net() -> nn.Module:
    """Return a net with a layer norm, which no level keeps in float32."""
    return net(batchnorm=False)


def half_net() -> nn.Module:
    return cast_model(plain_net(), "fp16-O2")


def shard_mesh() -> Any:
    return mesh((2,), ("shard",))


def in_fsdp1(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    policy = MixedPrecision(param_dtype=dtype)
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, device_id=cpu, mixed_precision=policy)


def in_fsdp2(model: Any) -> Any:
    return fully_shard(model, mesh=shard_mesh())


def with_sharded_layer(model: Any) -> Any:
    """Apply FSDP2 to one layer of a net."""
    in_fsdp2(model.hidden)
    return model


@on_ranks(2)
def test_ddp_before_the_cast():
    model = DistributedDataParallel(net())
    text = "Call cast_model(model, 'fp16-O2') first, then DistributedDataParallel, the optimizer"
    with refused(text):
        try_initialize(model, "fp16-O2")


@on_ranks(2)
def test_fsdp1_before_the_cast():
    model = in_fsdp1(plain_net())
    text = "Call cast_model(model, 'fp16-O3') first, then FullyShardedDataParallel, the optimizer"
    with refused(text):
        try_initialize(model, "fp16-O3")


@on_ranks(2)
def test_a_layer_in_fsdp2_before_the_cast_without_masters():
    model = with_sharded_layer(plain_net())
    text = "Call cast_model(model, 'fp16-O3') first, then fully_shard, the optimizer"
    with refused(text):
        try_initialize(model, "fp16-O3")


PASS_FSDP2_POLICY = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)"


@on_ranks(2)
def test_fsdp2_without_a_policy_before_the_cast():
    model = in_fsdp2(plain_net())
    text = f"given none. Pass fully_shard {PASS_FSDP2_POLICY}, or call cast_model() before it"
    with refused(f"it was {text}"):
        try_initialize(model, "fp16-O2")


@on_ranks(2)
def test_a_layer_in_fsdp2_before_the_cast_with_masters():
    model = with_sharded_layer(plain_net())
    with refused(PASS_FSDP2_POLICY):
        try_initialize(model, "fp16-O2")


@on_ranks(2)
def test_cast_model_after_ddp():
    model = DistributedDataParallel(net())
    with refused("Call cast_model(model, level) first, then the wrapper"):
        cast_model(model, "fp16-O2")


@on_ranks(2)
def test_a_model_in_ddp_that_was_cast_for_another_level():
    model = DistributedDataParallel(half_net())
    with refused(SAME_SETTINGS):
        try_initialize(model, "fp16-O3")


@on_ranks(2)
def test_an_optimizer_that_was_made_before_fully_shard():
    model = plain_net()
    optimizer = sgd(model)
    in_fsdp2(model)
    with refused("make the optimizer after it"):
        try_initialize(model, "fp16", optimizer)


@pytest.mark.slow
@on_ranks(2)
def test_ddp_before_fp8():
    pytest.importorskip("torchao")
    model = DistributedDataParallel(plain_net())
    with refused("Call cast_model(model, 'fp8') first, then DistributedDataParallel"):
        try_initialize(model, "fp8")


@on_ranks(2)
def test_fsdp2_before_fp8():
    pytest.importorskip("torchao")
    model = in_fsdp2(plain_net())
    with refused("Call cast_model(model, 'fp8') first, then fully_shard"):
        try_initialize(model, "fp8")


@pytest.mark.slow
@on_ranks(2)
def test_cast_model_for_fp8_after_fsdp2():
    pytest.importorskip("torchao")
    model = in_fsdp2(plain_net())
    with refused("then the wrapper"):
        cast_model(model, "fp8")


# -- master weights that a wrapper or an optimizer does not allow ----------------------------------


@on_ranks(2)
def test_masters_of_a_model_that_was_cast_before_fsdp1():
    model = in_fsdp1(half_net())
    with refused("mixed_precision=MixedPrecision(param_dtype=torch.float16)"):
        try_initialize(model, "fp16-O2")


@on_ranks(2)
@pytest.mark.parametrize("layout", ["ZeRO", "OSS"])
def test_masters_in_an_optimizer_that_shards_its_state(layout):
    if layout == "OSS":
        pytest.importorskip("fairscale")
    with refused("Use fp16, which needs no masters, or fully_shard instead"):
        amp_in(layout, "fp16-O2")


@on_ranks(2)
def test_a_unit_of_fsdp2_with_two_dtypes():
    model = in_fsdp2(cast_model(net(), "fp16-O2"))
    text = "Call fully_shard first on the modules that keep their dtype, such as 'norm'"
    with refused(text):
        try_initialize(model, "fp16-O2")


# -- mixed precision of FSDP's own -----------------------------------------------------------------


def with_fsdp2_policy(model: Any) -> Any:
    """Apply FSDP2 with a policy that computes and reduces in float16."""
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF)
    return fully_shard(model, mesh=shard_mesh(), mp_policy=policy)


@on_ranks(2)
def test_fsdp2_that_computes_in_float16_at_a_level_which_autocasts():
    model = with_fsdp2_policy(plain_net())
    with refused("or use fp16-O2"):
        try_initialize(model, "fp16")


@on_ranks(2)
def test_fsdp1_that_computes_in_float32_at_a_level_which_autocasts():
    model = in_fsdp1(plain_net(), FULL)
    with refused("computes in torch.float32"):
        try_initialize(model, "fp16")


@on_ranks(2)
def test_fsdp2_that_keeps_float32_weights_at_a_level_without_masters():
    model = with_fsdp2_policy(plain_net())
    with refused("over float32 parameters by its own mixed precision"):
        try_initialize(model, "fp16-O3")


@on_ranks(2)
def test_fsdp2_that_casts_a_model_which_is_cast_already():
    model = with_fsdp2_policy(half_net())
    with refused("no optimizer would step float32 values"):
        try_initialize(model, "fp16-O2")


@on_ranks(2)
def test_a_batch_norm_that_fsdp2_casts():
    model = with_fsdp2_policy(net())
    with refused("'norm' to torch.float16"):
        try_initialize(model, "fp16-O2")


@on_ranks(2)
def test_a_batch_norm_that_fsdp1_casts():
    model = in_fsdp1(net(), HALF)
    with refused("Wrap each batch norm by itself first"):
        try_initialize(model, "fp16-O2")


def with_float32_outputs(model: Any, device_mesh: Any) -> Any:
    """Apply FSDP2 to a layer and the root with one policy; the root has modules of its own."""
    policy = MixedPrecisionPolicy(param_dtype=HALF, output_dtype=FULL)
    fully_shard(model.hidden, mesh=device_mesh, mp_policy=policy)
    return fully_shard(model, mesh=device_mesh, mp_policy=policy)


@on_ranks(2)
def test_float32_outputs_of_every_unit_of_fsdp2():
    model = with_float32_outputs(plain_net(), shard_mesh())
    with refused("'hidden' to torch.float32 (output_dtype of its policy), and 'norm'"):
        try_initialize(model, "fp16-O2")


@on_ranks(2)
def test_float32_outputs_of_every_unit_of_hsdp():
    model = with_float32_outputs(plain_net(), mesh((1, 2), ("replicate", "shard")))
    text = (
        "Pass output_dtype to the root alone, and MixedPrecisionPolicy(param_dtype=torch.float16)"
    )
    with refused(text):
        try_initialize(model, "fp16-O2")


@on_ranks(2)
def test_a_flat_state_of_fsdp1():
    model = in_fsdp1(nn.Linear(4, 4))
    amp = initialize(model, sgd(model), "fp32")
    with refused("fully_shard"):
        amp.flat_state_dict()


# -- module_precision= in wrappers, and on ranks that differ ---------------------------------------

PINS = {"no*": "fp32", "output": "fp32:keep_output"}


@on_ranks(2)
def test_a_pinned_module_that_fsdp1_gathers_in_float16():
    model = in_fsdp1(plain_net(), HALF)
    with refused("'norm' is to compute in fp32, and FullyShardedDataParallel gathers"):
        try_initialize(model, "fp16-O2", module_precision=PINS)


@on_ranks(2)
def test_a_pinned_module_that_fsdp2_gathers_in_float16():
    model = wrapped(nn.Sequential(plain_net()), "FSDP2", HALF, "")
    with refused("'0' is to compute in fp32, and fully_shard gathers"):
        try_initialize(model, "fp16-O2", module_precision={"0": "fp32"})


@on_ranks(2)
def test_a_model_in_ddp_that_was_cast_with_other_patterns():
    model = DistributedDataParallel(cast_model(plain_net(), "fp16-O2", module_precision=PINS))
    with refused(SAME_SETTINGS):
        try_initialize(model, "fp16-O2", module_precision={"norm": "fp32"})


@on_ranks(2)
def test_patterns_that_differ_between_ranks():
    pattern = "hidden" if dist.get_rank() == 1 else "norm"
    text = "The ranks differ in module_precision=.\n  rank 0: module_precision={'norm': 'fp32'}\n"
    with refused(f"{text}  rank 1: "):
        try_initialize(net(), "bf16", module_precision={pattern: "fp32"})


@on_ranks(2)
def test_patterns_on_one_rank_alone():
    pins = {"norm": "fp32"} if dist.get_rank() == 1 else None
    text = "rank 0: no such pattern\n  rank 1: module_precision={'norm': 'fp32'}\nPass the same "
    with refused(f"{text}patterns in"):
        try_initialize(net(), "bf16", module_precision=pins)


@on_ranks(2)
def test_a_pattern_that_matches_no_module_on_any_rank():
    with refused(NO_MATCH):
        try_initialize(net(), "bf16", module_precision={"*.nrom": "fp32"})


@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_both():
    model = net()
    if dist.get_rank() == 0:
        model.half()
    with refused("bf16 trains float32 parameters"):
        try_initialize(model, "bf16")

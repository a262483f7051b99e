"""What cannot work is refused before anything is changed, in one line that says what to do."""

from __future__ import annotations

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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize
from distamp.errors import SettingError
from tests.initialize.nets import net, values
from tests.ranks import RankPool, mesh


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("level", "overrides", "reason"),
    [
        ("O4", {}, "must be one of"),
        ("O1", {"keep_batchnorm_fp32": True}, "contradicts O1"),
        ("O1", {"master_weights": True}, "are float32 already"),
        ("O2", {"loss_scale": -1.0}, "must be 'dynamic' or a number > 0"),
        ("O2", {"loss_scale": 128.0, "init_scale": 4.0}, "the constant 128"),
        ("O0", {"init_scale": 4.0}, "loss_scale='dynamic'"),
    ],
)
def test_settings_that_contradict_each_other(level, overrides, reason):
    model = net()
    before = values(model)
    with pytest.raises(SettingError, match=reason) as raised:
        initialize(model, sgd(model), level, **overrides)
    assert "\n" not in str(raised.value)
    assert all(map(torch.equal, before, values(model))), "nothing was cast"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cast_model_type", "choose it by the level"),
        ("patch_torch_functions", "nothing is patched"),
        ("cast_model_outputs", "replaced"),
        ("enabled", "opt_level='O0'"),
        ("hard_override", "cannot be overridden"),
        ("verbosity", "nothing is printed"),
        ("min_loss_scale", "min_scale"),
        ("max_loss_scale", "max_scale"),
        ("lose_scale", "unexpected keyword argument 'lose_scale'"),
    ],
)
def test_what_apex_took_and_this_does_not_names_its_replacement(name, hint):
    with pytest.raises(TypeError, match=hint):
        initialize(net(), None, "O1", **{name: 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "bf16"])
def test_a_half_model_at_a_level_of_float32_weights(level, dtype):
    model = net().to(dtype)
    with pytest.raises(SettingError, match=r"leave out model\.half"):
        initialize(model, sgd(model), level)


def test_an_optimizer_over_another_models_parameters():
    with pytest.raises(SettingError, match="do not belong to the model"):
        initialize(net(), sgd(net()), "O1")


def test_what_is_neither_model_nor_optimizer():
    model = net()
    with pytest.raises(TypeError, match="optimizers must be a Optimizer"):
        initialize(model, [model], "O1")
    with pytest.raises(TypeError, match="model must be a Module"):
        initialize([sgd(model)], None, "O1")


def test_a_model_that_was_cast_for_another_level():
    model = cast_model(net(), "O2")
    with pytest.raises(SettingError, match="give both the same"):
        initialize(model, sgd(model), "O3")


def test_a_comm_hook_where_nothing_communicates():
    model = net()
    with pytest.raises(SettingError, match="needs a wrapper that reduces gradients"):
        initialize(model, sgd(model), "O1", comm_hook="fp16")


def test_replicas_that_nothing_would_average():
    model = net()
    with pytest.raises(SettingError, match="needs a communication hook to average them"):
        initialize(model, sgd(model), "O1", replicas=dist.ProcessGroup(0, 1))


def test_a_model_without_parameters():
    with pytest.raises(SettingError, match="nothing to train"):
        initialize(nn.ReLU(), None, "O1")


@pytest.mark.parametrize("level", ["O2", "bf16-O3", "O1"])
def test_an_eps_that_float16_takes_for_zero_is_no_matter_where_state_is_wider(level):
    model = net()
    initialize(model, torch.optim.Adam(model.parameters()), level)


def test_an_eps_that_float16_takes_for_zero():
    model = net()
    with pytest.raises(SettingError, match="eps=1e-08, which float16 rounds to zero"):
        initialize(model, torch.optim.Adam(model.parameters()), "O3")


# -- wrappers: on a real group ---------------------------------------------------------------------


CPU = torch.device("cpu")
PATIENCE_S = 240.0


def _refused(model: nn.Module, level: str, **overrides: object) -> str:
    try:
        initialize(model, sgd(model), level, **overrides)
    except SettingError as error:
        return str(error)
    return "not refused"


def wrapped_before_the_cast() -> dict[str, str]:
    shard = mesh((dist.get_world_size(),), ("shard",))
    return {
        "DDP": _refused(DistributedDataParallel(net()), "O2"),
        "FSDP1": _refused(FullyShardedDataParallel(net(batchnorm=False), device_id=CPU), "O3"),
        "FSDP2": _refused(fully_shard(net(batchnorm=False), mesh=shard), "O3"),
        "a part": _refused(_partly_sharded(), "O3"),
    }


def _partly_sharded() -> nn.Module:
    model = net(batchnorm=False)
    fully_shard(model.hidden, mesh=mesh((dist.get_world_size(),), ("shard",)))
    return model


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("DDP", "DistributedDataParallel"),
        ("FSDP1", "FullyShardedDataParallel"),
        ("FSDP2", "fully_shard"),
        ("a part", "fully_shard"),
    ],
)
def test_a_wrapper_around_a_model_that_is_still_to_be_cast(ranks2: RankPool, kind, name):
    for shown in ranks2.run(wrapped_before_the_cast, timeout=PATIENCE_S):
        level = "'O2'" if kind == "DDP" else "'O3'"
        assert f"the order is cast_model(model, {level}), {name}, the optimizer" in shown[kind]
        assert "\n" not in shown[kind]


def masters_elsewhere() -> dict[str, str]:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    shard = mesh((dist.get_world_size(),), ("shard",))

    def wrapped_in(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = cast_model(net(batchnorm=False), "O2")
        if kind == "FSDP1":
            model = FullyShardedDataParallel(model, device_id=CPU)
        elif kind == "FSDP2":
            fully_shard(model, mesh=shard)
        elif kind == "a part":
            fully_shard(model.hidden, mesh=shard)
        elif kind == "OSS":
            optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
            return ShardedDataParallel(model, optimizer), optimizer
        else:
            model = DistributedDataParallel(model)
            return model, ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1
            )
        return model, sgd(model)

    shown = {}
    for kind in ELSEWHERE:
        model, optimizer = wrapped_in(kind)
        before = values(model)
        with pytest.raises(SettingError) as raised:
            initialize(model, optimizer, "O2")
        assert all(map(torch.equal, before, values(model)))
        shown[kind] = str(raised.value)
    return shown


ELSEWHERE = {
    "FSDP1": "mixed_precision=MixedPrecision(param_dtype=torch.float16)",
    "FSDP2": "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)",
    "a part": "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)",
    "ZeRO": "take O1, or in its place fully_shard",
    "OSS": "take O1, or in its place fully_shard",
}


def test_masters_where_a_rank_has_a_part_of_the_parameters(ranks2: RankPool):
    pytest.importorskip("fairscale")
    for shown in ranks2.run(masters_elsewhere, timeout=PATIENCE_S):
        for kind, hint in ELSEWHERE.items():
            assert hint in shown[kind]
            assert "\n" not in shown[kind]


def other_orders() -> dict[str, str]:
    shard = mesh((dist.get_world_size(),), ("shard",))
    shown: dict[str, str] = {}
    try:
        cast_model(DistributedDataParallel(net()), "O2")
    except SettingError as error:
        shown["cast_model after DDP"] = str(error)
    shown["two levels"] = _refused(DistributedDataParallel(cast_model(net(), "O2")), "O3")
    model = net(batchnorm=False)
    early = sgd(model)
    fully_shard(model, mesh=shard)
    try:
        initialize(model, early, "O1")
    except SettingError as error:
        shown["optimizer before fully_shard"] = str(error)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    casting = fully_shard(net(batchnorm=False), mesh=shard, mp_policy=policy)
    shown["a policy at O1"] = _refused(casting, "O1")
    shown["a policy at O3"] = _refused(casting, "O3")
    both = cast_model(net(batchnorm=False), "O2")
    shown["policy and cast"] = _refused(fully_shard(both, mesh=shard, mp_policy=policy), "O2")
    shown["batch norm in a policy"] = _refused(
        fully_shard(net(), mesh=shard, mp_policy=policy), "O2"
    )
    settings = MixedPrecision(param_dtype=torch.float16)
    shown["batch norm in FSDP1"] = _refused(
        FullyShardedDataParallel(net(), mixed_precision=settings, device_id=CPU), "O2"
    )
    return shown


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("cast_model after DDP", "cast_model(model, level), then the wrapper"),
        ("two levels", "give both the same"),
        ("optimizer before fully_shard", "make the optimizer after it"),
        ("a policy at O1", "or take O2"),
        ("a policy at O3", "keeps float32 parameters"),
        ("policy and cast", "nothing would be stepped in float32"),
        ("batch norm in a policy", "casts batch norm 'norm' to torch.float16"),
        ("batch norm in FSDP1", "wrap each batch norm by itself first"),
    ],
)
def test_an_order_or_mixture_that_cannot_work(ranks2: RankPool, case, reason):
    for shown in ranks2.run(other_orders, timeout=PATIENCE_S):
        assert reason in shown[case]
        assert "\n" not in shown[case]

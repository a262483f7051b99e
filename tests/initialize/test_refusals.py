"""What cannot work is refused before anything is changed, in one line that says what to do."""

from collections.abc import Callable
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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize
from distamp.errors import SettingError
from tests.initialize.nets import net, values
from tests.on_ranks import on_ranks
from tests.ranks import mesh

CPU = torch.device("cpu")
HALF, FULL = torch.float16, torch.float32


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refused(model: nn.Module, level: str, optimizer: Any = None, **overrides: Any) -> str:
    """In what words, where nothing is cast and no second line follows."""
    before, said = values(model), "not refused"
    try:
        initialize(model, optimizer or sgd(model), level, **overrides)
    except SettingError as error:
        said = str(error)
        assert all(map(torch.equal, before, values(model)))
    assert "\n" not in said
    return said


def adapted(base: torch.dtype) -> nn.Module:
    """A frozen base in half precision with a trained layer after it."""
    model = net()
    model.requires_grad_(False).to(base).output.to(torch.float32).requires_grad_(True)
    return model


def twice() -> str:
    """A notebook's cell that is run again."""
    model = net()
    optimizer = sgd(model)
    initialize(model, optimizer, "O2")
    return refused(model, "O2", optimizer)


ALONE: dict[str, tuple[Callable[[], str], str]] = {
    "unknown level": (lambda: refused(net(), "O4"), "must be one of"),
    "batch norms at O1": (
        lambda: refused(net(), "O1", keep_batchnorm_fp32=True),
        "contradicts O1",
    ),
    "masters at O1": (lambda: refused(net(), "O1", master_weights=True), "float32 already"),
    "negative scale": (lambda: refused(net(), "O2", loss_scale=-1.0), "a number > 0"),
    "two scales": (
        lambda: refused(net(), "O2", loss_scale=128.0, init_scale=4.0),
        "the constant 128",
    ),
    "a scale at O0": (lambda: refused(net(), "O0", init_scale=4.0), "loss_scale='dynamic'"),
    "a half base at O0": (lambda: refused(adapted(HALF), "O0"), "take bf16 or O1, or O2"),
    "a bfloat16 base at O2": (lambda: refused(adapted(torch.bfloat16), "O2"), "or bf16-O2"),
    "a float16 base at bf16-O3": (lambda: refused(adapted(HALF), "bf16-O3"), "or O2"),
    "another half's batch norm": (lambda: refused(adapted(torch.bfloat16), "O1"), "batch norms in"),
    "half at O0": (lambda: refused(net().half(), "O0"), "model.half"),
    "half at O1": (lambda: refused(net().half(), "O1"), "model.half"),
    "bfloat16 at bf16": (lambda: refused(net().bfloat16(), "bf16"), "leave out model."),
    "initialize twice": (twice, "go on with what that returned"),
    "another's optimizer": (lambda: refused(net(), "O1", sgd(net())), "do not belong"),
    "cast for O2": (lambda: refused(cast_model(net(), "O2"), "O3"), "give both the same"),
    "a hook alone": (lambda: refused(net(), "O1", comm_hook="fp16"), "needs a wrapper"),
    "replicas alone": (
        lambda: refused(net(), "O1", replicas=dist.ProcessGroup(0, 1)),
        "communication hook",
    ),
    "no parameters": (lambda: refused(nn.ReLU(), "O1", sgd(net())), "nothing to train"),
    "eps at O3": (
        lambda: refused(model := net(), "O3", torch.optim.Adam(model.parameters())),
        "eps=1e-08",
    ),
    "eps at O2": (
        lambda: refused(model := net(), "O2", torch.optim.Adam(model.parameters())),
        "not refused",
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_a_setting_that_cannot_work(case):
    make, reason = ALONE[case]
    assert reason in make()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cast_model_type", "level"),
        ("patch_torch_functions", "patched"),
        ("cast_model_outputs", "replaced"),
        ("enabled", "opt_level='O0'"),
        ("hard_override", "overridden"),
        ("verbosity", "printed"),
        ("num_losses", "share one scale"),
        ("min_loss_scale", "min_scale"),
        ("max_loss_scale", "max_scale"),
        ("lose_scale", "'lose_scale'"),
    ],
)
def test_what_apex_took_and_this_does_not_names_its_replacement(name, hint):
    with pytest.raises(TypeError, match=hint):
        initialize(net(), None, "O1", **{name: 1})


def test_a_model_without_values():
    with pytest.raises(SettingError, match="materialise it first"):
        initialize(nn.Linear(2, 2, device="meta"), None, "bf16")


def test_what_is_neither_model_nor_optimizer():
    model = net()
    with pytest.raises(TypeError, match="Optimizer"):
        initialize(model, [model], "O1")
    with pytest.raises(TypeError, match="Module"):
        initialize([sgd(model)], None, "O1")


def shard() -> Any:
    return mesh((dist.get_world_size(),), ("shard",))


def partly(model: nn.Module) -> nn.Module:
    fully_shard(model.hidden, mesh=shard())  # type: ignore[arg-type]
    return model


def casting(model: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=HALF)
    return fully_shard(model, mesh=shard(), mp_policy=policy)  # type: ignore[return-value]


def flat(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    policy = MixedPrecision(param_dtype=dtype)
    return FullyShardedDataParallel(model, device_id=CPU, mixed_precision=policy)


def zero() -> str:
    model = DistributedDataParallel(half())
    return refused(model, "O2", ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1))


def oss() -> str:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model = half()
    optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
    return refused(ShardedDataParallel(model, optimizer), "O2", optimizer)


def early_optimizer() -> str:
    model = net(batchnorm=False)
    optimizer = sgd(model)
    return refused(fully_shard(model, mesh=shard()), "O1", optimizer)  # type: ignore[arg-type]


def late_cast() -> str:
    with pytest.raises(SettingError) as raised:
        cast_model(DistributedDataParallel(net()), "O2")
    return str(raised.value)


def plain() -> nn.Module:
    return net(batchnorm=False)


def half() -> nn.Module:
    return cast_model(plain(), "O2")


ORDER = "the order is cast_model(model, '{}'), {}, the optimizer"
FSDP1 = "mixed_precision=MixedPrecision(param_dtype=torch.float16)"
FSDP2 = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)"
OTHERS = "Take O1, which needs no masters, or fully_shard in its place"
ON_RANKS: dict[str, tuple[Callable[[], str], str]] = {
    "DDP before the cast": (
        lambda: refused(DistributedDataParallel(net()), "O2"),
        ORDER.format("O2", "DistributedDataParallel"),
    ),
    "FSDP1 before the cast": (
        lambda: refused(flat(plain()), "O3"),
        ORDER.format("O3", "FullyShardedDataParallel"),
    ),
    "a part sharded before the cast": (
        lambda: refused(partly(plain()), "O3"),
        ORDER.format("O3", "fully_shard"),
    ),
    "cast_model after DDP": (late_cast, "cast_model(model, level), then the wrapper"),
    "cast and wrapped for O2": (
        lambda: refused(DistributedDataParallel(half()), "O3"),
        "give both the same",
    ),
    "the optimizer before fully_shard": (early_optimizer, "make the optimizer after it"),
    "masters in FSDP1": (lambda: refused(flat(half()), "O2"), FSDP1),
    "one unit of two dtypes": (
        lambda: refused(fully_shard(cast_model(net(), "O2"), mesh=shard()), "O2"),  # type: ignore[arg-type]
        "call fully_shard first on what stays as it is, such as 'norm'",
    ),
    "FSDP2 before the cast": (
        lambda: refused(fully_shard(plain(), mesh=shard()), "O2"),  # type: ignore[arg-type]
        "it was given none: pass fully_shard " + FSDP2 + ", or call cast_model() before it",
    ),
    "a part in FSDP2 before the cast": (lambda: refused(partly(plain()), "O2"), FSDP2),
    "masters in ZeRO": (zero, OTHERS),
    "masters in OSS": (oss, OTHERS),
    "a policy at O1": (lambda: refused(casting(plain()), "O1"), "or take O2"),
    "a policy of float32": (
        lambda: refused(flat(plain(), FULL), "O1"),
        "computes in torch.float32",
    ),
    "a policy at O3": (lambda: refused(casting(plain()), "O3"), "keeps float32 parameters"),
    "policy and cast": (lambda: refused(casting(half()), "O2"), "nothing would be stepped"),
    "batch norm in a policy": (lambda: refused(casting(net()), "O2"), "'norm' to torch.float16"),
    "batch norm in FSDP1": (
        lambda: refused(flat(net(), HALF), "O2"),
        "wrap each batch norm by itself first",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("case", ON_RANKS)
def test_an_order_or_mixture_of_wrappers_that_cannot_work(case):
    pytest.importorskip("fairscale")
    make, hint = ON_RANKS[case]
    assert hint in make()

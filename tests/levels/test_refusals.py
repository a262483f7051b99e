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
from torch.nn.parallel import DistributedDataParallel

from distamp import OpLists, PrecisionLevel, cast_model, initialize, set_module_precision
from distamp.errors import ConfigError, DistampError, RankMismatchError
from tests.levels.cells import wrapped
from tests.levels.nets import made_in, net
from tests.on_ranks import on_ranks
from tests.ranks import mesh

CPU = torch.device("cpu")
HALF, FULL = torch.float16, torch.float32


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def parts(model: nn.Module) -> list[object]:
    return [*((id(p), p.dtype) for p in model.parameters()), *map(type, model.modules())]


def tried(model: nn.Module, level: Any, optimizer: Any = None, **overrides: Any) -> Any:
    """`initialize`, which changes nothing where it raises."""
    before = parts(model)
    try:
        return initialize(model, optimizer or sgd(model), level, **overrides)
    except ConfigError:
        assert parts(model) == before
        raise


def is_refused(what: Callable[[], Any], says: str) -> None:
    with pytest.raises(DistampError) as raised:
        what()
    text = str(raised.value)
    assert says in text
    if not isinstance(raised.value, RankMismatchError):  # which has a line for each group of ranks
        assert "\n" not in text


def adapted(base: torch.dtype) -> nn.Module:
    """A frozen base in half precision with a trained layer after it."""
    model = net()
    model.requires_grad_(False).to(base).output.to(torch.float32).requires_grad_(True)
    return model


def twice() -> Any:
    """A notebook's cell that is run again."""
    model = net()
    optimizer = sgd(model)
    initialize(model, optimizer, "fp16-O2")
    return tried(model, "fp16-O2", optimizer)


PINS = {"no*": "fp32", "output": "fp32:keep_output"}
GATHERED = PrecisionLevel.from_name("fp8").replace(float8_all_gather=True)
ALONE: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown level": (lambda: tried(net(), "O4"), "There is no level 'O4'"),
    "batch norms at fp16": (
        lambda: tried(net(), "fp16", keep_batchnorm_fp32=True),
        "contradicts fp16",
    ),
    "masters of what is held elsewhere": (
        lambda: tried(model := net(), "fp16-O2", torch.optim.LBFGS(model.parameters())),
        "LBFGS holds its parameters in '_params'",
    ),
    "masters at fp16": (lambda: tried(net(), "fp16", master_weights=True), "float32 already"),
    "negative scale": (lambda: tried(net(), "fp16-O2", loss_scale=-1.0), "a number > 0"),
    "two scales": (
        lambda: tried(net(), "fp16-O2", loss_scale=128.0, init_scale=4.0),
        "the constant 128",
    ),
    "a scale at fp32": (lambda: tried(net(), "fp32", init_scale=4.0), "loss_scale='dynamic'"),
    "a half base at fp32": (lambda: tried(adapted(HALF), "fp32"), "Use bf16, fp16 or fp16-O2"),
    "a bfloat16 base at fp16-O2": (
        lambda: tried(adapted(torch.bfloat16), "fp16-O2"),
        "Use bf16, fp16 or bf16-O2",
    ),
    "a float16 base at bf16-O3": (lambda: tried(adapted(HALF), "bf16-O3"), "or fp16-O2"),
    "another half's batch norm": (lambda: tried(adapted(torch.bfloat16), "fp16"), "batch norms in"),
    "half at fp32": (lambda: tried(net().half(), "fp32"), "model.half"),
    "half at fp16": (lambda: tried(net().half(), "fp16"), "model.half"),
    "bfloat16 at bf16": (lambda: tried(net().bfloat16(), "bf16"), "Leave out model."),
    "initialize twice": (twice, "Use the Amp that the first initialize returned"),
    "another's optimizer": (lambda: tried(net(), "fp16", sgd(net())), "do not belong"),
    "cast for fp16-O2": (
        lambda: tried(cast_model(net(), "fp16-O2"), "fp16-O3"),
        "Pass the same level and settings to both calls",
    ),
    "a hook alone": (lambda: tried(net(), "fp16", comm_hook="fp16"), "needs a wrapper"),
    "replicas alone": (
        lambda: tried(net(), "fp16", replicas=dist.ProcessGroup(0, 1)),
        "communication hook",
    ),
    "no parameters": (lambda: tried(nn.ReLU(), "fp16", sgd(net())), "nothing to train"),
    "eps at fp16-O3": (
        lambda: tried(model := net(), "fp16-O3", torch.optim.Adam(model.parameters())),
        "eps=1e-08",
    ),
    "one eps of two at fp16-O3": (
        lambda: tried(
            model := net(), "fp16-O3", torch.optim.Adafactor(model.parameters(), eps=(1e-30, 1e-3))
        ),
        "eps=1e-30",
    ),
    "a model without values": (
        lambda: initialize(nn.Linear(2, 2, device="meta"), None, "bf16"),
        "its parameters have no values",
    ),
    "a state of what has no name": (
        lambda: initialize(
            model := net(), sgd(nn.ParameterList([*model.parameters(), torch.ones(1)])), "fp32"
        ).flat_state_dict(),
        "no model of initialize",
    ),
    "a model that is pinned as a whole": (
        lambda: cast_model(set_module_precision(net(), "fp32"), "fp16-O2"),
        "Use level fp32",
    ),
    "a pattern of nothing": (
        lambda: tried(net(), "bf16", module_precision={"*.nrom": "fp32"}),
        "'norm'",
    ),
    "a pattern of nothing in a cast": (
        lambda: cast_model(net(), "fp16-O2", module_precision={"*.nrom": "fp32"}),
        "pattern '*.nrom', and no module on any rank has a name that matches it. Did you mean",
    ),
    "a pin to fp64": (
        lambda: tried(net(), "fp16-O2", module_precision={"norm": "fp64"}),
        "no precision 'fp64'",
    ),
    "pins without precisions": (
        lambda: tried(net(), "bf16", module_precision=["norm"]),
        "map patterns",
    ),
    "cast with other pins": (
        lambda: tried(cast_model(net(), "fp16-O2", module_precision={"hidden": "fp32"}), "fp16-O2"),
        "Pass the same level and settings to both calls",
    ),
    "cast for fp8": (lambda: tried(cast_model(net(), "fp8"), "bf16"), "cast for fp8"),
    "cast for fp8-rowwise": (
        lambda: tried(cast_model(net(), "fp8-rowwise"), "fp8"),
        "fp8-rowwise",
    ),
    "lists of what fp8 computes": (
        lambda: tried(net(), "fp8", op_lists=OpLists(fp32={"linear"})),
        "Leave linear out",
    ),
    "fp8 without a layer": (lambda: tried(nn.Sequential(nn.Linear(8, 8)), "fp8"), "Use bf16"),
    "fp8 of a layer alone": (
        lambda: tried(nn.Linear(16, 16), "fp8"),
        "no layer inside the model",
    ),
    "fp8 weights that an optimizer has": (
        lambda: tried(net(), GATHERED),
        "the optimizer has its parameters already",
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_a_setting_that_cannot_work(case):
    if "fp8" in case:
        pytest.importorskip("torchao")
    is_refused(*ALONE[case])


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


@pytest.mark.parametrize(
    ("models", "optimizers", "says"),
    [(net(), [net()], "Optimizer"), ([sgd(net())], None, "Module")],
)
def test_what_is_neither_model_nor_optimizer(models, optimizers, says):
    with pytest.raises(TypeError, match=says):
        initialize(models, optimizers, "fp16")


def shard() -> Any:
    return mesh((dist.get_world_size(),), ("shard",))


def partly(model: nn.Module) -> nn.Module:
    fully_shard(model.hidden, mesh=shard())  # type: ignore[arg-type]
    return model


def casting(model: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF)
    return fully_shard(model, mesh=shard(), mp_policy=policy)  # type: ignore[return-value]


def float32_outputs(model: nn.Module, hsdp: bool = False) -> nn.Module:
    """One policy for every unit; the root has modules of its own."""
    over = mesh((1, 2), ("replicate", "shard")) if hsdp else shard()
    policy = MixedPrecisionPolicy(param_dtype=HALF, output_dtype=FULL)
    for part in (model.hidden, model):
        fully_shard(part, mesh=over, mp_policy=policy)  # type: ignore[arg-type]
    return model


def flat(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    policy = MixedPrecision(param_dtype=dtype)
    return FullyShardedDataParallel(model, device_id=CPU, mixed_precision=policy)


def early_optimizer() -> Any:
    model = net(batchnorm=False)
    optimizer = sgd(model)
    return tried(fully_shard(model, mesh=shard()), "fp16", optimizer)  # type: ignore[arg-type]


def plain() -> nn.Module:
    return net(batchnorm=False)


def half() -> nn.Module:
    return cast_model(plain(), "fp16-O2")


ORDER = "Call cast_model(model, '{}') first, then {}, the optimizer"
FSDP1 = "mixed_precision=MixedPrecision(param_dtype=torch.float16)"
FSDP2 = "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)"
OTHERS = "Use fp16, which needs no masters, or fully_shard instead"
GATHERS = "' is to compute in fp32, and {} gathers"
FP8_ORDER = "Call cast_model(model, 'fp8') first, then {}"
ON_RANKS: dict[str, tuple[Callable[[], Any], str]] = {
    "DDP before the cast": (
        lambda: tried(DistributedDataParallel(net()), "fp16-O2"),
        ORDER.format("fp16-O2", "DistributedDataParallel"),
    ),
    "FSDP1 before the cast": (
        lambda: tried(flat(plain()), "fp16-O3"),
        ORDER.format("fp16-O3", "FullyShardedDataParallel"),
    ),
    "a part sharded before the cast": (
        lambda: tried(partly(plain()), "fp16-O3"),
        ORDER.format("fp16-O3", "fully_shard"),
    ),
    "cast_model after DDP": (
        lambda: cast_model(DistributedDataParallel(net()), "fp16-O2"),
        "Call cast_model(model, level) first, then the wrapper",
    ),
    "cast and wrapped for fp16-O2": (
        lambda: tried(DistributedDataParallel(half()), "fp16-O3"),
        "Pass the same level and settings to both calls",
    ),
    "the optimizer before fully_shard": (early_optimizer, "make the optimizer after it"),
    "masters in FSDP1": (lambda: tried(flat(half()), "fp16-O2"), FSDP1),
    "one unit of two dtypes": (
        lambda: tried(fully_shard(cast_model(net(), "fp16-O2"), mesh=shard()), "fp16-O2"),  # type: ignore[arg-type]
        "Call fully_shard first on the modules that keep their dtype, such as 'norm'",
    ),
    "FSDP2 before the cast": (
        lambda: tried(fully_shard(plain(), mesh=shard()), "fp16-O2"),  # type: ignore[arg-type]
        "it was given none. Pass fully_shard " + FSDP2 + ", or call cast_model() before it",
    ),
    "a part in FSDP2 before the cast": (lambda: tried(partly(plain()), "fp16-O2"), FSDP2),
    "masters in ZeRO": (lambda: made_in("ZeRO", "fp16-O2"), OTHERS),
    "masters in OSS": (lambda: made_in("OSS", "fp16-O2"), OTHERS),
    "a policy at fp16": (lambda: tried(casting(plain()), "fp16"), "or use fp16-O2"),
    "a policy of float32": (
        lambda: tried(flat(plain(), FULL), "fp16"),
        "computes in torch.float32",
    ),
    "a policy at fp16-O3": (
        lambda: tried(casting(plain()), "fp16-O3"),
        "over float32 parameters by its own mixed precision",
    ),
    "policy and cast": (
        lambda: tried(casting(half()), "fp16-O2"),
        "no optimizer would step float32 values",
    ),
    "batch norm in a policy": (lambda: tried(casting(net()), "fp16-O2"), "'norm' to torch.float16"),
    "batch norm in FSDP1": (
        lambda: tried(flat(net(), HALF), "fp16-O2"),
        "Wrap each batch norm by itself first",
    ),
    "pins in FSDP1": (
        lambda: tried(flat(plain(), HALF), "fp16-O2", module_precision=PINS),
        "'norm" + GATHERS.format("FullyShardedDataParallel"),
    ),
    "pins in FSDP2": (
        lambda: tried(
            wrapped(nn.Sequential(plain()), "FSDP2", HALF, ""),
            "fp16-O2",
            module_precision={"0": "fp32"},
        ),
        "'0" + GATHERS.format("fully_shard"),
    ),
    "other pins than it was cast with": (
        lambda: tried(
            DistributedDataParallel(cast_model(plain(), "fp16-O2", module_precision=PINS)),
            "fp16-O2",
            module_precision={"norm": "fp32"},
        ),
        "Pass the same level and settings to both calls",
    ),
    "ranks that pin differently": (
        lambda: tried(
            net(), "bf16", module_precision={"hidden" if dist.get_rank() else "norm": "fp32"}
        ),
        "The ranks differ in module_precision=.\n  rank 0: module_precision={'norm': 'fp32'}\n  "
        "rank 1: ",
    ),
    "pins on one rank": (
        lambda: tried(
            net(), "bf16", module_precision={"norm": "fp32"} if dist.get_rank() else None
        ),
        "rank 0: no such pattern\n  rank 1: module_precision={'norm': 'fp32'}\nPass the same "
        "patterns in",
    ),
    "what one rank refuses": (
        lambda: tried(net().half() if dist.get_rank() == 0 else net(), "bf16"),
        "bf16 trains float32 parameters",
    ),
    "a pattern of nothing on all ranks": (
        lambda: tried(net(), "bf16", module_precision={"*.nrom": "fp32"}),
        "pattern '*.nrom', and no module on any rank has a name that matches it. Did you mean",
    ),
    "output_dtype of every unit": (
        lambda: tried(float32_outputs(plain()), "fp16-O2"),
        "'hidden' to torch.float32 (output_dtype of its policy), and 'norm'",
    ),
    "output_dtype of every unit of HSDP": (
        lambda: tried(float32_outputs(plain(), hsdp=True), "fp16-O2"),
        "Pass output_dtype to the root alone, and MixedPrecisionPolicy(param_dtype=torch.float16)",
    ),
    "a flat state of FSDP1": (
        lambda: initialize(model := flat(nn.Linear(4, 4)), sgd(model), "fp32").flat_state_dict(),
        "fully_shard",
    ),
    "DDP before fp8": (
        lambda: tried(DistributedDataParallel(plain()), "fp8"),
        FP8_ORDER.format("DistributedDataParallel"),
    ),
    "FSDP2 before fp8": (
        lambda: tried(fully_shard(plain(), mesh=shard()), "fp8"),  # type: ignore[arg-type]
        FP8_ORDER.format("fully_shard"),
    ),
    "cast_model for fp8 after FSDP2": (
        lambda: cast_model(fully_shard(plain(), mesh=shard()), "fp8"),  # type: ignore[type-var]
        "then the wrapper",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("case", ON_RANKS)
def test_an_order_or_mixture_of_wrappers_that_cannot_work(case):
    pytest.importorskip("fairscale")
    is_refused(*ON_RANKS[case])

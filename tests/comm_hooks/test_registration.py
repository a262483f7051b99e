"""One call for every wrapper: what it refuses, on every rank alike."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.errors import LockstepError
from tests.comm_hooks.training import inputs, mlp
from tests.ranks import mesh, subgroup

WIDTHS = (31, 97, 64, 5)


def _wrap(wrapper: str) -> tuple[Any, dict[str, Any]]:
    """The model and what ``register`` needs to know of it."""
    net = mlp(*WIDTHS)
    if wrapper == "DDP":
        return DistributedDataParallel(net), {}
    if wrapper == "FSDP1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu")), {}
    if wrapper == "FSDP2":
        return fully_shard(net, mesh=mesh((dist.get_world_size(),), ("shard",))), {}
    # Two replicas of two ranks each: rank 2 is in the groups of ranks 3 and 0.
    over = mesh((2, 2), ("replicate", "shard"))
    return fully_shard(net, mesh=over["shard"]), {"replicas": over["replicate"].get_group()}


def _refused(what: str) -> str:
    wrapper = what.split()[1] if what.startswith("second") else "DDP"
    model, options = _wrap("FSDP2" if what == "mesh" else wrapper)
    wire = "fp12" if what == "format" else "fp16"
    if what == "state":
        model = model.state_dict()
    elif what == "wide":
        model = DistributedDataParallel(mlp(*WIDTHS).half())
    elif what == "replicas":
        options = {"replicas": dist.group.WORLD}
    elif what == "mesh":
        options = {"replicas": mesh((4,), ("all",))}
    elif what == "torch's hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif what == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif what == "built in":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif what != "format":
        comm_hooks.register(model)
    with pytest.raises((TypeError, ValueError, RuntimeError, AssertionError)) as error:
        comm_hooks.register(model, wire, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("format", "unknown wire format 'fp12'"),
        ("state", "cannot give OrderedDict a communication hook"),
        ("mesh", "not DeviceMesh; of a DeviceMesh give mesh.get_group()"),
        ("replicas", "replicas and gather are for a model that fully_shard was applied to"),
        ("wide", "takes 2.01 bytes an element, and gradients are reduced in torch.float16"),
        ("second DDP", "can only be called once"),
        ("second FSDP1", "communication hook is already registered"),
        ("second FSDP2", "has a custom collective (WireReduceScatter) already"),
        ("torch's hook", "can only be called once"),
        ("PowerSGD", "can only be called once"),
        ("built in", "can only be called once"),
    ],
)
def test_what_does_not_fit_is_refused(ranks4, what, named):
    for message in ranks4.run(_refused, what):
        assert named in message


def _compiled(wrapper: str) -> int:
    model = torch.compile(_wrap(wrapper)[0], backend="eager")
    state = comm_hooks.register(model, "fp16")
    model(inputs(0, WIDTHS[0])).square().mean().backward()
    return state.stats().exchanges


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_compiled_model_is_registered_as_one_that_is_not(ranks2, wrapper):
    assert min(ranks2.run(_compiled, wrapper)) > 0


def _ignored() -> int:
    """A model most of whose parameters, in bf16, DDP ignores."""
    net: Any = mlp(*WIDTHS)
    layers = net[:]
    net.extra = torch.nn.Linear(300, 300, dtype=torch.bfloat16)
    names = ["extra.weight", "extra.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    net.forward = layers.forward
    model = DistributedDataParallel(net)
    state = comm_hooks.register(model, "fp16")
    model(inputs(0, WIDTHS[0])).square().mean().backward()
    return state.stats().exchanges


def test_parameters_that_ddp_ignores_have_no_say_in_the_format(ranks2):
    assert min(ranks2.run(_ignored)) > 0


def _pair(pairs: list[list[int]]) -> Any:
    """The group of two ranks that this rank is in."""
    made = {tuple(pair): subgroup(pair) for pair in pairs}
    return next(group for pair, group in made.items() if dist.get_rank() in pair)


def _other_shards(whole: bool) -> str:
    model, _ = _wrap("replicas")
    group = dist.group.WORLD if whole else _pair([[0, 1], [2, 3]])
    for wire in ("fp16", "auto"):
        with pytest.raises(ValueError) as error:
            comm_hooks.register(model, wire, replicas=group)
    comm_hooks.register(model, "fp16", replicas=_pair([[0, 2], [1, 3]]))
    return str(error.value)


@pytest.mark.parametrize("whole", [False, True])
def test_replicas_that_hold_other_shards_are_refused_on_all_ranks(ranks4, whole):
    for rank, message in enumerate(ranks4.run(_other_shards, whole, timeout=60)):
        shards = [0, 1] if rank < 2 else [2, 3]
        given = [0, 1, 2, 3] if whole else shards
        assert message.startswith(f"replicas holds ranks {given}, but FSDPSequential is")
        assert f"sharded over ranks {shards}: " in message


def _differ(wrapper: str, other: str) -> str:
    """What is raised where rank 2 gives another format; then all give the same."""
    model, options = _wrap(wrapper)
    try:
        comm_hooks.register(model, other if dist.get_rank() == 2 else "fp16", **options)
    except (ValueError, LockstepError) as error:
        message = f"{type(error).__name__}: {error}"
    comm_hooks.register(model, "fp16", **options)  # Nothing was registered by the failed call.
    return message


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP1", "FSDP2", "replicas"])
def test_a_rank_that_refuses_alone_keeps_no_other_waiting(ranks4, wrapper):
    messages = ranks4.run(_differ, wrapper, "fp61", timeout=60)
    assert messages[2].startswith("ValueError: unknown wire format 'fp61'")
    for rank in (0, 1, 3):
        assert messages[rank].startswith("LockstepError: the ranks register different hooks: ")


def test_a_rank_that_registers_another_format_is_named_on_all_ranks(ranks4):
    for message in ranks4.run(_differ, "DDP", "int8", timeout=60):
        assert "LockstepError: the ranks register different hooks: rank 0, 1, 3: fp16" in message
        assert "rank 2: int8" in message


def _drop_in(state: Any) -> None:
    if dist.is_initialized():
        model, _ = _wrap("DDP")
        model.register_comm_hook(state, comm_hooks.fp16_compress_hook)
        with pytest.raises(TypeError, match="not str"):
            model(inputs(0, WIDTHS[0])).sum().backward()
    else:
        with pytest.raises(ValueError, match="init_process_group"):
            comm_hooks.CommHookState("fp16").average(torch.ones(3), [])


@pytest.mark.parametrize("group", ["default", "none"])
def test_a_drop_in_needs_a_group_or_its_own_state(ranks2, group):
    ranks2.run(_drop_in, "fp16", group=group)

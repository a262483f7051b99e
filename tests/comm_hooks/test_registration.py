"""One call for every wrapper, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import DistGradScaler, comm_hooks
from distamp.errors import LockstepError
from tests.comm_hooks.training import inputs, mlp
from tests.ranks import mesh, subgroup

WIDTHS = (31, 97, 64, 5)


def _wrap(wrapper: str) -> nn.Module:
    net = mlp(*WIDTHS)
    if wrapper == "DDP":
        return DistributedDataParallel(net)
    if wrapper == "FSDP1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    shape, names = (dist.get_world_size(),), ("shard",)
    over = mesh((2, 2), ("replicate", "shard")) if wrapper == "HSDP" else mesh(shape, names)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=over, mp_policy=policy)
    return fully_shard(net, mesh=over, mp_policy=policy)


def _trains(wrapper: str) -> tuple[float, int]:
    """How far the loss of three steps is from that without a hook, and bytes sent."""
    losses = []
    for hooked in (False, True):
        model = _wrap(wrapper)
        state: Any = comm_hooks.register(model, "fp16") if hooked else None
        scaler = DistGradScaler("cpu", init_scale=2.0**10)
        if hooked:
            scaler.attach(state)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            sgd.zero_grad()
            loss = model(inputs(step, WIDTHS[0])).square().mean()
            scaler.scale(loss).backward()
            scaler.step(sgd)
            scaler.update()
        losses.append(loss.item())
    return abs(losses[1] / losses[0] - 1), state.stats().total_bytes


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP1", "FSDP2", "HSDP"])
def test_every_wrapper_trains_through_a_hook_with_a_joined_scaler(ranks4, wrapper):
    for error, sent in ranks4.run(_trains, wrapper):
        assert error < 1e-4
        assert sent > 0


def _refused(what: str) -> str:
    if what == "format":
        model, wire, kwargs = _wrap("DDP"), "fp12", {}
    elif what == "module":
        model, wire, kwargs = mlp(*WIDTHS), "fp16", {}
    elif what == "replicas":
        model, wire, kwargs = _wrap("DDP"), "fp16", {"replicas": dist.group.WORLD}
    elif what == "mesh":
        model, wire, kwargs = _wrap("FSDP2"), "auto", {"replicas": mesh((4,), ("all",))}
    elif what == "state":
        model, wire, kwargs = _wrap("DDP").state_dict(), "fp16", {}
    elif what == "wide":
        model = DistributedDataParallel(mlp(*WIDTHS).half())
        wire, kwargs = "fp16", {}
    else:
        wrapper = what.split()[1] if what.startswith("second") else "DDP"
        model, wire, kwargs = _wrap(wrapper), "fp16", {}
        if what == "torch's hook":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif what == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(None)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif what == "built in":
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            comm_hooks.register(model)
    with pytest.raises((TypeError, ValueError)) as error:
        comm_hooks.register(model, wire, **kwargs)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("format", "unknown wire format 'fp12'"),
        ("module", "cannot give Sequential a communication hook; give the wrapped model itself"),
        ("state", "cannot give OrderedDict a communication hook"),
        ("mesh", "not DeviceMesh; of a DeviceMesh give mesh.get_group()"),
        ("replicas", "replicas are for a model that fully_shard was applied to"),
        ("wide", "takes 2.01 bytes an element, and gradients are reduced in torch.float16"),
        ("second DDP", "has a communication hook already (wire_hook)"),
        ("second FSDP1", "has a communication hook already"),
        ("second FSDP2", "already"),
        ("torch's hook", "has a communication hook already (fp16_compress_hook)"),
        ("PowerSGD", "has a communication hook already (powerSGD_hook)"),
        ("built in", "has a communication hook already (built into torch)"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(ranks4, what, named):
    for message in ranks4.run(_refused, what):
        assert named in message
        assert "\n" not in message


def _compiled(wrapper: str) -> int:
    model = torch.compile(_wrap(wrapper), backend="eager")
    state = comm_hooks.register(model, "fp16")
    model(inputs(0, WIDTHS[0])).square().mean().backward()
    return state.stats().exchanges


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_compiled_model_is_registered_as_one_that_is_not(ranks2, wrapper):
    assert all(exchanges > 0 for exchanges in ranks2.run(_compiled, wrapper))


def _other_shards(what: str) -> list[str]:
    over = mesh((2, 2), ("replicate", "shard"))
    groups = {
        "shards": lambda: over["shard"].get_group(),
        "all": lambda: dist.group.WORLD,
        "equal to the shards": lambda: _pair([[0, 1], [2, 3]]),
    }
    model = fully_shard(mlp(*WIDTHS), mesh=over["shard"])
    group = groups[what]()
    for wire in ("fp16", "auto"):
        with pytest.raises(ValueError) as error:
            comm_hooks.register(model, wire, replicas=group)
    comm_hooks.register(model, "fp16", replicas=_pair([[0, 2], [1, 3]]))
    return [str(error.value)]


def _pair(pairs: list[list[int]]) -> Any:
    """The group of two ranks that this rank is in."""
    made = {tuple(pair): subgroup(pair) for pair in pairs}
    return next(group for pair, group in made.items() if dist.get_rank() in pair)


@pytest.mark.parametrize("what", ["shards", "all", "equal to the shards"])
def test_replicas_that_hold_other_shards_are_refused_on_all_ranks(ranks4, what):
    for rank, (message,) in enumerate(ranks4.run(_other_shards, what, timeout=60)):
        shards = [0, 1] if rank < 2 else [2, 3]
        given = [0, 1, 2, 3] if what == "all" else shards
        assert message.startswith(f"replicas holds ranks {given}, but FSDPSequential is")
        assert f"sharded over ranks {shards}: " in message
        assert "mesh['replicate'].get_group()" in message
        assert "\n" not in message


def _other_format(other: str) -> str:
    model = _wrap("DDP")
    with pytest.raises(LockstepError) as error:
        comm_hooks.register(model, other if dist.get_rank() == 2 else "fp16")
    comm_hooks.register(model, "fp16")  # nothing was registered by the failed call
    return str(error.value)


def _refuses_alone(wrapper: str) -> str:
    """One rank misspells the format."""
    model = _wrap("FSDP2" if wrapper == "replicas" else wrapper)
    kwargs = {}
    if wrapper == "replicas":
        # Two replicas of two ranks each: rank 2 is in the groups of ranks 3 and 0.
        over = mesh((2, 2), ("replicate", "shard"))
        model = fully_shard(mlp(*WIDTHS), mesh=over["shard"])
        kwargs = {"replicas": over["replicate"].get_group()}
    try:
        comm_hooks.register(model, "fp61" if dist.get_rank() == 2 else "fp16", **kwargs)
    except (ValueError, LockstepError) as error:
        message = f"{type(error).__name__}: {error}"
    comm_hooks.register(model, "fp16", **kwargs)  # nothing was registered by the failed call
    return message


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP1", "FSDP2", "HSDP", "replicas"])
def test_a_rank_that_refuses_alone_keeps_no_other_waiting(ranks4, wrapper):
    messages = ranks4.run(_refuses_alone, wrapper, timeout=60)
    assert messages[2].startswith("ValueError: unknown wire format 'fp61'")
    for rank in (0, 1, 3):
        assert messages[rank].startswith("LockstepError: the ranks register different hooks: ")
        if wrapper in ("DDP", "FSDP1", "FSDP2"):
            assert "rank 2: none, because it raised another error" in messages[rank]


@pytest.mark.parametrize("other", ["int8", "bf16"])
def test_a_rank_that_registers_another_format_is_named_on_all_ranks(ranks4, other):
    message = (
        "the ranks register different hooks: rank 0, 1, 3: fp16 for 9701 elements; "
        f"rank 2: {other} for 9701 elements. Give every rank the same format and model"
    )
    assert set(ranks4.run(_other_format, other)) == {message}


def test_there_must_be_a_process_group(ranks2):
    assert ranks2.run(_without_group, group="none") == [True, True]


def _without_group() -> bool:
    state = comm_hooks.CommHookState("fp16")
    with pytest.raises(ValueError, match="init_process_group"):
        state.average(torch.ones(3), [])
    return True


def _wrong_state(state: Any) -> str:
    model = _wrap("DDP")
    model.register_comm_hook(state, comm_hooks.fp16_compress_hook)
    with pytest.raises(TypeError) as error:
        model(inputs(0, WIDTHS[0])).sum().backward()
    return str(error.value)


def test_a_drop_in_takes_a_group_none_or_its_own_state(ranks2):
    assert all("not str" in message for message in ranks2.run(_wrong_state, "fp16"))

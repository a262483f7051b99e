"""Hooks under DDP, compared with DDP without a hook and with torch's own hooks."""

import copy
import inspect
import itertools
import os
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import comm_hooks
from distamp.comm_hooks import COMM_FORMATS
from tests.comm_hooks.training import (
    BOUNDS,
    WIDTHS,
    PrescribedGradients,
    errors,
    full_gradients,
    gradients,
    inputs,
    mlp,
    relative,
    spread,
    train_layouts,
    wrapped,
)
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases

# -- gradients of every format ---------------------------------------------------------------------


def check_against_plain_ddp(format: str) -> None:
    net = mlp(*WIDTHS)
    error = max(errors(net, format, WIDTHS[0]))
    assert error <= BOUNDS[format]


SIZES_AND_FORMATS = list(itertools.product([1, 3, 4], COMM_FORMATS))
QUICK = [(1, "fp16"), (1, "bf16"), (1, "int8"), (3, "int8"), (4, "fp16"), (4, "bf16")]


@on_ranks("size")
@pytest.mark.parametrize(("size", "format"), quick_cases(SIZES_AND_FORMATS, QUICK))
def test_gradients_are_those_of_plain_ddp(size, format):
    check_against_plain_ddp(format)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("format", COMM_FORMATS)
def test_gradients_of_two_ranks_are_those_of_plain_ddp(format):
    check_against_plain_ddp(format)


class _Branches(nn.Module):
    """Two branches. Rank 0 takes the left one except in its second pass; the others never do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(20, 20)
        self.left = nn.Linear(20, 20)
        self.right = nn.Linear(20, 20)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        hidden = torch.tanh(self.stem(x))
        if dist.get_rank() == 0 and self.passes != 2:
            return self.left(hidden)
        return self.right(hidden)


@on_ranks(4)
def test_parameters_that_a_rank_does_not_use():
    error = max(errors(_Branches(), "fp16", 20, find_unused_parameters=True))
    assert error <= BOUNDS["fp16"]


@on_ranks(2)
def test_accumulation_under_no_sync():
    net = mlp(*WIDTHS)
    error = max(errors(net, "fp16", WIDTHS[0], micro_batches=3))
    assert error <= BOUNDS["fp16"]


@on_ranks(2)
def test_sparse_gradients_are_reduced_uncompressed():
    torch.manual_seed(0)
    embedding = nn.Embedding(50, 8, sparse=True)
    net = nn.Sequential(embedding, nn.Linear(8, 300, bias=False))
    plain, _ = wrapped(net, None)
    hooked, hook = wrapped(net, "fp16")
    indices = torch.arange(3) + 7 * dist.get_rank()
    for model in (plain, hooked):
        model(indices).square().sum().backward()
    exact_sparse, exact_dense = plain.parameters()
    sparse, dense = hooked.parameters()
    assert sparse.grad.is_sparse
    assert torch.equal(sparse.grad.to_dense(), exact_sparse.grad.to_dense())
    assert relative(dense.grad, exact_dense.grad) <= BOUNDS["fp16"]
    assert hook.stats().fallbacks == {"gradients reduced uncompressed: sparse": 1}


def gradients_of_two_models(hooked: bool) -> Tensor:
    """Return the gradients of two models that one backward pass reaches."""
    models = [wrapped(mlp(*WIDTHS, seed=seed), None)[0] for seed in (0, 1)]
    if hooked:
        for model in models:
            model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    batch = inputs(0, WIDTHS[0])
    losses = [model(batch).square().sum() for model in models]
    torch.stack(losses).sum().backward()
    return torch.cat([gradients(model) for model in models])


@on_ranks(2)
def test_two_models_whose_hooks_share_one_state_in_one_backward_pass():
    compressed = gradients_of_two_models(hooked=True)
    exact = gradients_of_two_models(hooked=False)
    assert relative(compressed, exact) <= BOUNDS["fp16"]


# -- torch's hooks ---------------------------------------------------------------------------------


def ddp_gradients(dtype: torch.dtype, hook: Any = None, state: Any = None) -> Tensor:
    """Return the gradients of DDP, with a hook if there is one, in float32."""
    model, _ = wrapped(mlp(*WIDTHS).to(dtype), None)
    if hook is not None:
        model.register_comm_hook(state, hook)
    batch = inputs(0, WIDTHS[0]).to(dtype)
    output = model(batch)
    output.float().square().sum().backward()
    return gradients(model).float()


def error_of_hook(hook: Any, state: Any, dtype: torch.dtype = torch.float32) -> float:
    """Return the relative difference between gradients with and without a hook."""
    return relative(ddp_gradients(dtype, hook, state), ddp_gradients(dtype))


@on_ranks(2)
@pytest.mark.parametrize("state", ["none", "process group", "hook"])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_hooks_of_torchs_names_take_torchs_states(name, state):
    hook = getattr(comm_hooks, f"{name}_compress_hook")
    argument = None
    if state == "process group":
        argument = dist.group.WORLD
    if state == "hook":
        argument = comm_hooks.CommHook(name)
    assert 0 < error_of_hook(hook, argument) <= BOUNDS[name]


@on_ranks(2)
@pytest.mark.parametrize(("name", "bound"), [("fp16", 1e-3), ("bf16", 8e-3)])
def test_wrappers_of_torchs_names_take_torchs_allreduce_hook(name, bound):
    wrapper = getattr(comm_hooks, f"{name}_compress_wrapper")
    hook = wrapper(default_hooks.allreduce_hook)
    assert 0 < error_of_hook(hook, None) <= bound


@on_ranks(2)
def test_a_wrapper_of_torchs_name_takes_power_sgd():
    hook = comm_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=100)
    assert 0 < error_of_hook(hook, state) <= 1e-3


TORCHS_NAMES = [
    "fp16_compress_hook",
    "bf16_compress_hook",
    "fp16_compress_wrapper",
    "bf16_compress_wrapper",
]


@pytest.mark.parametrize("name", TORCHS_NAMES)
def test_hooks_of_torchs_names_have_torchs_signatures(name):
    ours = inspect.signature(getattr(comm_hooks, name))
    torchs = inspect.signature(getattr(default_hooks, name))
    assert len(ours.parameters) == len(torchs.parameters)


@pytest.mark.parametrize("name", TORCHS_NAMES)
def test_hooks_of_torchs_names_can_be_pickled(name):
    hook = getattr(comm_hooks, name)
    assert pickle.loads(pickle.dumps(hook)) is hook


def check_two_byte_gradients(dtype: torch.dtype, bound: float) -> None:
    hook = comm_hooks.CommHook("fp16")
    assert error_of_hook(comm_hooks.fp16_compress_hook, hook, dtype) <= bound
    (reason,) = hook.stats().fallbacks
    name = str(dtype).removeprefix("torch.")
    assert reason == f"gradients reduced uncompressed: {name} is no wider than fp16"


@on_ranks(2)
def test_gradients_in_float16_are_sent_in_two_bytes():
    check_two_byte_gradients(torch.float16, bound=2e-3)


@on_ranks(2)
def test_gradients_in_bfloat16_are_sent_in_two_bytes():
    check_two_byte_gradients(torch.bfloat16, bound=2e-2)


# -- random layouts --------------------------------------------------------------------------------


THREE_LAYOUTS = (2, 0, 3)
THOUSAND = []
for num_ranks in (2, 4, 8):
    for first_seed in range(0, 1000, 50):
        THOUSAND.append(pytest.param(num_ranks, first_seed, 50, marks=pytest.mark.slow))


@pytest.mark.parametrize(("size", "start", "count"), [THREE_LAYOUTS, *THOUSAND])
def test_a_thousand_random_bucket_layouts(ranks, size, start, count):
    """No layout has wrong gradients, and none hangs: a hang ends the pool with all stacks."""
    seeds = list(range(start, start + count))
    for wrong in ranks(size).run(train_layouts, seeds, timeout=240):
        assert wrong == []


# -- small parameters ------------------------------------------------------------------------------

SHAPES = [(72, 67), (64,)] * 6


def weights_and_small_biases(rank: int, ratio: float) -> list[Tensor]:
    """Return gradients of weights, and of biases between them that are smaller by ``ratio``."""
    generator = torch.Generator().manual_seed(100 + rank)
    grads = []
    for shape in SHAPES:
        factor = 1.0 if len(shape) == 2 else ratio
        grads.append(torch.randn(shape, generator=generator) * factor)
    return grads


def mean_of_ranks(grads: list[list[Tensor]]) -> list[Tensor]:
    """Return the exact mean of each gradient, from the gradients of each rank."""
    means = []
    for grads_of_param in zip(*grads, strict=True):
        means.append(torch.stack(grads_of_param).double().mean(0))
    return means


def check_every_parameter(model: Any, grads: list[list[Tensor]], bound: float) -> None:
    """Reduce the gradients of all ranks, and compare each parameter with the exact mean."""
    model(grads[dist.get_rank()]).backward()
    exact = mean_of_ranks(grads)
    compressed = full_gradients(model).split([grad.numel() for grad in exact])
    for grad, exact_grad in zip(compressed, exact, strict=True):
        assert relative(grad, exact_grad.flatten()) <= bound


CASES_OF_SMALL_PARAMETERS = list(itertools.product(["DDP", "FSDP2"], ["fp16", "int8"], [1, 2]))


@on_ranks(4)
@pytest.mark.parametrize(
    ("wrapper", "format", "ranks_per_host"),
    quick_cases(CASES_OF_SMALL_PARAMETERS, quick=[("DDP", "fp16", 2), ("DDP", "int8", 2)]),
)
def test_a_small_parameter_among_large_ones_arrives_as_well(wrapper, format, ranks_per_host):
    wrap = DistributedDataParallel if wrapper == "DDP" else fully_shard
    for ratio in (1e-1, 1e-4, 1e-7):
        model = wrap(PrescribedGradients(*SHAPES))
        comm_hooks.register_comm_hook(model, format, ranks_per_host=ranks_per_host)
        grads = [weights_and_small_biases(rank, ratio) for rank in range(4)]
        check_every_parameter(model, grads, BOUNDS[format])


# -- failures --------------------------------------------------------------------------------------


def backward(model: Any, step: int) -> None:
    batch = inputs(step, WIDTHS[0])
    model(batch).square().mean().backward()


def errors_after_a_failure(
    wrapper: str, failure: str, format: str, delay_rank_2: bool = False
) -> list[str]:
    """Run five passes, and return this rank's errors; rank 1 fails in the third pass."""
    model, _ = spread(wrapper)
    comm_hooks.register_comm_hook(model, format)
    messages = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        if failure == "death":
            os._exit(3)
        raise RuntimeError("out of memory")

    for step in range(5):
        if step == 2 and dist.get_rank() == 1:
            type(COMM_FORMATS[format]).encode = fail
        if step == 2 and dist.get_rank() == 2 and delay_rank_2:
            time.sleep(0.3)
        try:
            backward(model, step)
        except RuntimeError as error:
            messages.append(f"in pass {step}: {error}")
    return messages


def check_failing_exchange(messages: list[list[str]]) -> None:
    """Check that all ranks raise in the pass of the failure and from then on."""
    for messages_of_rank in messages:
        passes = [message.split(":")[0] for message in messages_of_rank]
        assert passes == ["in pass 2", "in pass 3", "in pass 4"]
    assert "out of memory" in messages[1][0]


@pytest.mark.parametrize(
    ("wrapper", "format"),
    [
        # The next test has the same failure, and a late rank.
        pytest.param("DDP", "fp16", marks=pytest.mark.slow),
        # int8 sends small parameters uncompressed.
        pytest.param("DDP", "int8", marks=pytest.mark.slow),
        ("FSDP2", "fp16"),
    ],
)
def test_an_exchange_that_fails_on_one_rank_is_raised_on_every_rank_and_from_then_on(
    new_ranks, wrapper, format
):
    pool = new_ranks(3, group_timeout=120)
    messages = pool.run(errors_after_a_failure, wrapper, "exception", format)
    check_failing_exchange(messages)


@pytest.mark.slow
def test_a_rank_that_begins_its_exchange_after_the_failure_raises_too(new_ranks):
    pool = new_ranks(3, group_timeout=120)
    messages = pool.run(errors_after_a_failure, "DDP", "exception", "fp16", delay_rank_2=True)
    check_failing_exchange(messages)


def test_the_ranks_that_survive_a_death_raise(new_ranks):
    pool = new_ranks(4, group_timeout=60)
    messages = pool.run(errors_after_a_failure, "DDP", "death", "fp16", may_die=[1])
    for rank in (0, 2, 3):
        assert messages[rank][0].startswith("in pass 2: ")


# -- copies ----------------------------------------------------------------------------------------


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@on_ranks(2)
@pytest.mark.parametrize("copy_model", [copy.deepcopy, pickled])
def test_a_copy_of_a_model_warns_that_its_hook_must_be_registered_again(copy_model):
    model, _ = wrapped(mlp(*WIDTHS), "int8")
    backward(model, 0)
    warning = r'uncompressed.*comm_hooks\.register_comm_hook\(model, "int8"\)'
    with pytest.warns(UserWarning, match=warning):
        copied = copy_model(model)
    hook = comm_hooks.register_comm_hook(copied, "int8")
    for replica in (model, copied):
        replica.zero_grad()
        backward(replica, 1)
    assert relative(gradients(copied), gradients(model)) < 2e-2
    assert hook.stats().exchanges > 0

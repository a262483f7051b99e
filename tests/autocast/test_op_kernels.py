"""The life of a kernel: from the first region with its op on a list to the end of the last list."""

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch

from distamp import autocast
from distamp.autocast import AutocastState, OpLists
from distamp.autocast.op_kernels import AutocastKernel
from tests.on_ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.ones(2, 2, dtype=BF16)


def has_kernel(op: str = "aten::erfc") -> bool:
    """Return whether an op that torch lists nowhere has a kernel at the CPU's autocast key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, "AutocastCPU")


def enter(ops: OpLists) -> torch.dtype:
    with autocast("cpu", ops=ops):
        return torch.erfc(X).dtype


@pytest.fixture(autouse=True)
def _no_kernel_stays() -> Any:
    assert not has_kernel()
    # The collection does not visit the many objects of other tests.
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
    assert not has_kernel()


def test_a_kernel_is_registered_by_the_first_region_and_removed_with_the_lists():
    lists = OpLists(fp32={"erfc"})
    assert not has_kernel()
    assert enter(lists) is FP32
    assert has_kernel()
    del lists
    assert not has_kernel()
    with autocast("cpu"):
        assert torch.erfc(X).dtype is BF16


def test_a_kernel_stays_as_long_as_equal_lists_are_there():
    first, second = OpLists(fp32={"erfc"}), OpLists(fp32={"erfc", "tanh"})
    enter(first)
    enter(second)
    del first
    assert enter(second) is FP32
    assert has_kernel()
    del second
    assert not has_kernel()


def test_a_region_a_state_and_a_bound_function_keep_the_kernel():
    region = autocast("cpu", ops=OpLists(fp32={"erfc"}))
    with region:
        state = AutocastState.capture()
        bound = AutocastState.wrap(torch.erfc)
    del region
    with state.apply():
        assert torch.erfc(X).dtype is FP32
    del state
    assert bound(X).dtype is FP32
    del bound
    assert not has_kernel()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_lists_registers_kernels_of_its_own(copied):
    lists = OpLists(fp32={"erfc"})
    enter(lists)
    twin = copied(lists)
    del lists
    assert not has_kernel()
    assert enter(twin) is FP32


def test_torchs_kernel_runs_again_after_its_op_was_unlisted():
    # Lists of other test files that have an op of torch's own lists stay for the whole session,
    # and none of them has this one.
    for _ in range(2):
        with autocast("cpu", ops=OpLists(unlisted={"prod"})):
            assert torch.prod(X).dtype is BF16
        with autocast("cpu"):
            assert torch.prod(X).dtype is FP32
    assert "op_kernels.py" not in torch._C._dispatch_dump("aten::prod")


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_of_lists_that_are_gone_serves_equal_lists_alone():
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(torch.erfc, backend=backend)
    for _ in range(3):
        with autocast("cpu", ops=OpLists(fp32={"erfc"})):
            assert compiled(X).dtype is FP32
        with autocast("cpu"):
            assert compiled(X).dtype is BF16
        with autocast("cpu", ops=OpLists(fp32={"tanh"})):
            assert compiled(X).dtype is BF16
    assert len(graphs) == 3


class Backward(torch.autograd.Function):
    """Records the lists that are in force in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, states: list[Any]) -> torch.Tensor:
        ctx.states = states
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.states.append(AutocastState.capture())
        return grad, None


def test_a_thread_of_autograd_finds_lists_by_their_value():
    """It has torch's state of the calling thread, and none of distamp's."""
    states: list[AutocastState] = []
    with autocast("cpu", ops=OpLists(fp32={"erfc"})):
        state = AutocastState.capture()
        settings = {
            device_type: (
                torch.is_autocast_enabled(device_type),
                torch.get_autocast_dtype(device_type),
            )
            for device_type in ("cpu", "ipu", "maia")
        }

    def backward() -> None:
        for device_type, (is_enabled, dtype) in settings.items():
            torch.set_autocast_enabled(device_type, is_enabled)
            torch.set_autocast_dtype(device_type, dtype)
        Backward.apply(X.float().requires_grad_(), states).sum().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert states == [state]


def kernels_in_memory() -> list[AutocastKernel]:
    return [candidate for candidate in gc.get_objects() if type(candidate) is AutocastKernel]


def test_a_kernel_outlives_its_registration_for_threads_that_are_about_to_enter_it():
    """torch reads the address of a kernel first, and then waits for the GIL."""
    kernels_before = weakref.WeakSet(kernels_in_memory())
    # torch keeps only the last kernel that was removed.
    for _ in range(3):
        enter(OpLists(fp32={"erfc"}))
        assert not has_kernel()
    gc.collect()
    assert len([kernel for kernel in kernels_in_memory() if kernel not in kernels_before]) == 3


@on_ranks(1)
def test_kernels_come_and_go_while_other_threads_are_in_regions():
    """A thread that waits for the GIL to enter a kernel must still find the kernel."""
    stop = threading.Event()
    dtypes: set[torch.dtype] = set()

    def compute() -> None:
        with torch.autocast("cpu"):
            while not stop.is_set():
                dtypes.add(torch.erfc(X).dtype)

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        assert enter(OpLists(fp32={"erfc"})) is FP32
    stop.set()
    for thread in threads:
        thread.join()
    assert dtypes == {BF16}

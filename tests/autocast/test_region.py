"""The region itself: re-entrant, shareable, in order; what torch's class gets wrong there."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable

import pytest
import torch

from distamp import autocast
from distamp.autocast import AutocastState, OpLists
from distamp.errors import RegionError
from tests.autocast.conftest import thread_state

X = torch.ones(2, 2)


def _product() -> torch.dtype:
    return torch.mm(X, X).dtype


def _recurse(cls: type[torch.autocast]) -> Callable[[int], None]:
    @cls("cpu", dtype=torch.bfloat16)
    def recurse(depth: int) -> None:
        assert _product() is torch.bfloat16
        if depth:
            recurse(depth - 1)
            assert _product() is torch.bfloat16

    return recurse


def test_a_recursive_function_leaves_autocast_as_it_was():
    before = thread_state()
    _recurse(autocast)(2)
    assert thread_state() == before


def test_one_instance_nested_in_itself_leaves_autocast_as_it_was():
    region = autocast("cpu", dtype=torch.float16)
    before = thread_state()
    with region:
        with autocast("cpu", enabled=False), region:
            assert _product() is torch.float16
        with region, region:
            assert _product() is torch.float16
        assert _product() is torch.float16
    assert thread_state() == before


def _two_threads(cls: type[torch.autocast]) -> list[object]:
    """A thread under float16 calls a shared function while another is in it; its state after."""
    entered, leave = threading.Event(), threading.Event()

    @cls("cpu", dtype=torch.bfloat16)
    def shared(wait: bool) -> None:
        if wait:
            entered.set()
            assert leave.wait(10)

    after: list[object] = []

    def under_float16() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            shared(True)
            after.extend((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    def outside() -> None:
        assert entered.wait(10)
        shared(False)
        leave.set()

    threads = [threading.Thread(target=each) for each in (under_float16, outside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return after


def test_threads_that_share_a_function_keep_their_own_state():
    assert _two_threads(autocast) == [True, torch.float16]


def test_nested_regions_of_two_dtypes_may_share_a_weight():
    weight = torch.ones(2, 2, requires_grad=True)
    with autocast("cpu", dtype=torch.float16):
        outer = torch.mm(X, weight)
        with autocast("cpu", dtype=torch.bfloat16):
            inner = torch.mm(X, weight)
        again = torch.mm(X, weight)
    assert [outer.dtype, inner.dtype, again.dtype] == [
        torch.float16,
        torch.bfloat16,
        torch.float16,
    ]


def test_leaving_in_another_thread_is_an_error_there_and_changes_nothing_here():
    region = autocast("cpu")
    seen: list[object] = []

    def leave() -> None:
        before = thread_state()
        with pytest.raises(RegionError, match="did not enter it"):
            region.__exit__(None, None, None)
        seen.append(thread_state() == before)

    with region:
        inside = thread_state()
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert thread_state() == inside
    assert seen == [True]


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_leaving_out_of_order_is_an_error_that_changes_nothing(devices):
    before = thread_state()
    outer = autocast(devices[0], torch.float16, enabled=devices[0] == "cpu", cache_enabled=False)
    inner = autocast(devices[1], torch.bfloat16, enabled=devices[1] == "cpu")
    with outer, inner:
        within = thread_state()
        with pytest.raises(RegionError, match="still open"):
            outer.__exit__(None, None, None)
        assert thread_state() == within
    assert thread_state() == before


def test_an_error_inside_leaves_the_region_and_comes_through():
    before = thread_state()
    with pytest.raises(ZeroDivisionError), autocast("cpu"):
        _ = 1 / 0
    assert thread_state() == before


def test_the_instance_answers_to_torchs_names():
    region = autocast("cpu", torch.float16, False, False)
    assert isinstance(region, torch.autocast)
    assert isinstance(region, torch.amp.autocast)
    theirs = torch.autocast("cpu", torch.float16, False, False)
    names = ("device", "fast_dtype", "_enabled", "_cache_enabled")
    assert [getattr(region, n) for n in names] == [getattr(theirs, n) for n in names]


def _pickled(region: autocast) -> autocast:
    return pickle.loads(pickle.dumps(region))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _pickled])
def test_a_region_can_be_copied_and_pickled_while_entered(copied):
    with autocast("cpu", dtype=torch.float16) as region:
        other = copied(region)
    with other:
        assert _product() is torch.float16
    assert not torch.is_autocast_enabled("cpu")


@autocast("cpu", dtype=torch.float16)
def decorated(x: torch.Tensor) -> torch.Tensor:
    """Multiply."""
    return x @ x


def test_a_decorated_function_keeps_its_name_and_pickles():
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Multiply.")
    assert pickle.loads(pickle.dumps(decorated))(X).dtype is torch.float16


def test_a_decorated_method_and_module_run_in_the_region():
    class Model(torch.nn.Module):
        @autocast("cpu")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    assert Model()(X).dtype is torch.bfloat16
    assert autocast("cpu")(torch.nn.Linear(2, 2))(X).dtype is torch.bfloat16


def test_the_dtype_is_taken_when_the_region_is_made_as_torch_does():
    torch.set_autocast_dtype("cpu", torch.float16)
    regions = [autocast("cpu"), torch.autocast("cpu")]
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert [region.fast_dtype for region in regions] == [torch.float16, torch.float16]


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ((torch.device("cpu"),), ValueError, "device_type"),
        ((["cpu"], torch.bfloat16), ValueError, "device_type"),
        (("cpu", "fp16"), TypeError, "torch.bfloat16, got 'fp16'; did you mean 'float16'"),
        (("cpu", None, True, "step"), ValueError, "True, False or None, got 'step'"),
        (("cudaa",), RuntimeError, "'cudaa'; did you mean 'cuda'"),
        (("meta", torch.bfloat16), RuntimeError, "unsupported autocast device_type"),
    ],
)
def test_wrong_arguments_are_refused(args, error, says):
    with pytest.raises(error, match=says):
        autocast(*args)


@pytest.mark.parametrize("enabled", [1, 0, None, "yes"])
def test_enabled_is_taken_for_its_truth(enabled):
    for _ in range(2):
        with autocast("cpu", enabled=enabled):
            assert torch.is_autocast_enabled("cpu") is bool(enabled)


def test_calling_with_something_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="with autocast"):
        autocast("cpu")(X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int8])
def test_an_unsupported_dtype_warns_and_disables_each_time(dtype):
    for _ in range(2):
        with pytest.warns(UserWarning, match="Disabling autocast") as ours:
            region = autocast("cpu", dtype)
        with pytest.warns(UserWarning, match="Disabling autocast") as theirs:
            torch.autocast("cpu", dtype)
        assert str(ours[0].message) == str(theirs[0].message)
        assert region._enabled is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu_warns_and_disables_as_torch_does():
    with pytest.warns(UserWarning, match="CUDA is not available"), autocast("cuda"):
        assert not torch.is_autocast_enabled("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocast("cuda", enabled=False)


def test_the_cache_flag_is_the_threads_unless_given():
    with autocast("cpu", cache_enabled=False), autocast("cpu"):
        assert not torch.is_autocast_cache_enabled()
        with autocast("cpu", cache_enabled=True):
            assert torch.is_autocast_cache_enabled()


def test_regions_with_ops_left_out_of_order_keep_their_lists():
    outer = autocast("cpu", ops=OpLists(fp32={"mm"}))
    with outer, autocast("cpu", ops=OpLists(fp32={"softmax"})):
        with pytest.raises(RegionError):
            outer.__exit__(None, None, None)
        assert _product() is torch.bfloat16
    assert AutocastState.capture().lists == ()


def test_a_forward_pass_after_a_step_inside_the_region_uses_the_new_weights():
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with autocast("cpu"):
        model(X).sum().backward()
        optimizer.step()
        assert model(X).tolist() == [[-2.0], [-2.0]]


def test_torchs_names_may_be_ours(monkeypatch):
    for owner in (torch, torch.amp):
        monkeypatch.setattr(owner, "autocast", autocast)
    with torch.autocast("cpu"), torch.amp.autocast("cpu", enabled=False):
        assert _product() is torch.float32
    with torch.autocast("cpu"):
        assert _product() is torch.bfloat16
    compiled = torch.compile(_region_of_torchs_name, backend="eager", fullgraph=True)
    assert compiled(X).dtype is torch.bfloat16


def _region_of_torchs_name(x):
    with torch.autocast("cpu"):
        return x @ x

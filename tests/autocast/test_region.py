"""The region itself: entered anywhere, shared by threads, left in order, with torch's arguments."""

import contextlib
import copy
import itertools
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distamp import autocast
from distamp.autocast import AutocastState, OpLists
from tests.autocast.conftest import X, in_thread, product, thread_state
from tests.on_ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_one_instance_entered_again_leaves_autocast_as_it_was():
    region = autocast("cpu", FP16)

    @region
    def recurse(depth: int) -> None:
        with autocast("cpu", enabled=False):
            if depth:
                recurse(depth - 1)
            assert product() is FP32
        assert product() is FP16

    recurse(2)
    assert product() is FP32
    with contextlib.suppress(ZeroDivisionError), region, region:
        recurse(1)
        _ = 1 / 0


def test_threads_that_share_a_function_keep_their_own_state():
    entered, leave = threading.Event(), threading.Event()

    @autocast("cpu", BF16)
    def shared(wait: bool) -> None:
        if wait:
            entered.set()
            assert leave.wait(10)

    def under_float16() -> torch.dtype:
        with torch.autocast("cpu", FP16):
            shared(True)
            return product()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(under_float16)
        assert entered.wait(10)
        shared(False)
        leave.set()
        assert found.result() is FP16


def test_nested_regions_of_two_dtypes_may_share_a_weight():
    weight = torch.ones(2, 2, requires_grad=True)
    found = []
    with autocast("cpu", FP16):
        found.append(torch.mm(X, weight).dtype)
        with autocast("cpu", BF16):
            found.append(torch.mm(X, weight).dtype)
        found.append(torch.mm(X, weight).dtype)
    assert found == [FP16, BF16, FP16]


def test_a_region_inside_torchs_region_of_another_dtype_makes_its_own_casts():
    """The outer region has the dtype of the inner one, and torch's region between has another."""
    weight = torch.ones(2, 2, requires_grad=True)
    dtypes = []
    with autocast("cpu", FP16), torch.autocast("cpu", BF16):
        dtypes.append(torch.mm(X, weight).dtype)
        with autocast("cpu", FP16):
            dtypes.append(torch.mm(X, weight).dtype)
        dtypes.append(torch.mm(X, weight).dtype)
    assert dtypes == [BF16, FP16, BF16]


def test_the_cache_is_the_threads_unless_given_and_as_it_was_afterwards():
    for outer in (True, False):
        with autocast("cpu", cache_enabled=outer):
            with autocast("cpu", cache_enabled=not outer):
                assert torch.is_autocast_cache_enabled() is not outer
            with autocast("cpu"):
                assert torch.is_autocast_cache_enabled() is outer
            assert torch.is_autocast_cache_enabled() is outer


@on_ranks(1)
def test_a_step_inside_a_region_is_seen_by_the_next_forward_pass():
    """In a process of its own: an op that any region has listed is not cached there again."""
    weight = torch.ones(1, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with autocast("cpu"):
        for wanted in (1.0, 0.0, -1.0):
            out = torch.mm(torch.ones(1, 1), weight)
            assert out.item() == wanted
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def left(region: autocast) -> bool:
    """Whether leaving it leaves the thread's state as it is."""
    before = AutocastState.capture(), thread_state()
    region.__exit__(None, None, None)
    return (AutocastState.capture(), thread_state()) == before


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_leaving_pops_to_itself_and_what_the_thread_is_not_in_is_not_left(devices):
    before = AutocastState.capture(), thread_state()
    outer = autocast(devices[0], FP16, enabled=devices[0] == "cpu", cache_enabled=False)
    inner = autocast(devices[1], BF16, enabled=devices[1] == "cpu", ops=OpLists(fp32={"softmax"}))
    assert left(outer)
    outer.__enter__()
    inner.__enter__()
    assert in_thread(lambda: left(inner))
    outer.__exit__(None, None, None)  # out of order
    assert (AutocastState.capture(), thread_state()) == before
    assert left(inner)


def _casts(between: str) -> int:
    """How often one weight is cast in eight calls of a model, each in something of its own."""
    weight, found = torch.nn.Parameter(torch.ones(2, 2)), []
    with torch.autograd.profiler.profile() as seen, autocast("cpu", BF16) as region:
        around = {
            "state": AutocastState.wrap(torch.mm),
            "again": region(torch.mm),
            "another type's": autocast("xpu", FP16, enabled=False)(torch.mm),
        }[between]
        for call in (*[around] * 8, torch.mm):
            found.append(call(X, weight).dtype)
    assert set(found) == {BF16}
    return sum(each.name == "aten::_to_copy" for each in seen.function_events)


@pytest.mark.parametrize("between", ["state", "again", "another type's"])
def test_one_weight_is_cast_once_for_many_calls_in_a_region(ranks, between):
    # In a process of its own: an op that any region has listed is not cached there again.
    (casts,) = ranks(1).run(_casts, between, group="fresh")
    assert casts == 1 + 9  # the weight, and an input for each call


def test_a_region_answers_to_torchs_names_and_is_torchs_by_its_name(monkeypatch):
    torch.set_autocast_dtype("cpu", FP16)
    made = [(cls("cpu", None, False, False), cls("cpu")) for cls in (autocast, torch.autocast)]
    torch.set_autocast_dtype("cpu", BF16)
    for ours, theirs in zip(*made, strict=True):
        assert isinstance(ours, torch.amp.autocast)
        for name in ("device", "fast_dtype", "_enabled", "_cache_enabled"):
            assert getattr(ours, name) == getattr(theirs, name)
    for owner in (torch, torch.amp):
        monkeypatch.setattr(owner, "autocast", autocast)
    with torch.autocast("cpu"):
        assert product() is BF16
        with torch.amp.autocast("cpu", enabled=False):
            assert product() is FP32


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_a_region_can_be_copied_and_pickled_while_entered(copied):
    with autocast("cpu", FP16) as region:
        other = copied(region)
    with other:
        assert product() is FP16


@autocast("cpu", FP16)
def decorated(x: torch.Tensor) -> torch.Tensor:
    """Multiply."""
    return x @ x


class Model(torch.nn.Module):
    @autocast("cpu", FP16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


def test_functions_methods_and_modules_can_be_decorated():
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Multiply.")
    layer = autocast("cpu", FP16)(torch.nn.Linear(2, 2))
    for called in (decorated, pickle.loads(pickle.dumps(decorated)), Model(), layer):
        assert called(X).dtype is FP16


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: autocast(torch.device("cpu")),  # type: ignore[arg-type]
            ValueError,
            "^Expected `device_type` of type `str`, got: ",
        ),
        (lambda: autocast("cpu", "fp16"), TypeError, "such as torch.bfloat16, got 'fp16'"),
        (
            lambda: autocast("cpu", None, True, "step"),
            ValueError,
            "True, False or None, got 'step'",
        ),
        (lambda: autocast("cudaa"), RuntimeError, "cudaa"),
        (lambda: autocast("meta", BF16), RuntimeError, "device_type"),
        (lambda: autocast("cpu")(X), TypeError, "with autocast"),
        (lambda: autocast("cpu", ops={"linear"}), TypeError, "OpLists"),
    ],
)
def test_wrong_arguments_are_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs no CUDA device")


@pytest.mark.parametrize(
    ("device_type", "dtype"),
    [
        ("cpu", torch.float64),
        ("cpu", FP32),
        ("cpu", torch.int8),
        pytest.param("cuda", FP16, marks=without_cuda),
    ],
)
def test_what_torch_disables_with_a_warning_is_disabled_each_time(device_type, dtype):
    with pytest.warns(UserWarning, match="isabl") as theirs:
        torch.autocast(device_type, dtype)
    for _ in range(2):
        with pytest.warns(UserWarning, match="isabl") as ours, autocast(device_type, dtype):
            assert not torch.is_autocast_enabled(device_type)
        assert str(ours[0].message) == str(theirs[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocast(device_type, dtype, enabled=False)


def regions_made(*arguments: object) -> tuple[list[bool], list[str]]:
    """Make torch's region and ours; whether each is enabled, and the warnings of ours."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        theirs = torch.autocast(*arguments)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = autocast(*arguments)  # type: ignore[arg-type]
    return [ours._enabled, theirs._enabled], [str(warning.message) for warning in caught]


@pytest.mark.parametrize("present_first", [True, False])
@pytest.mark.parametrize("dtype", [None, FP16, BF16])
def test_a_region_asks_each_time_whether_there_is_a_cuda_device(monkeypatch, dtype, present_first):
    for present in (present_first, not present_first) * 2:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda there=present: there)
            patch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
            enabled, messages = regions_made("cuda", dtype)
        assert enabled == [present, present]
        assert len(messages) == (not present)


def test_a_cuda_device_without_bf16_is_found_after_one_with_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert regions_made("cuda", BF16) == ([True, True], [])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(RuntimeError, match="does not support bfloat16"):
        autocast("cuda", BF16)


def test_a_backend_that_gains_a_dtype_later_gets_it(monkeypatch):
    """torch asks the module of a custom backend for its dtypes."""
    backend = torch._C._get_privateuse1_backend_name()
    with pytest.raises(AssertionError, match="has not registered a module"):
        autocast(backend, FP16)
    supported = [BF16]
    module = SimpleNamespace(get_amp_supported_dtype=lambda: supported)
    monkeypatch.setattr(torch, backend, module, raising=False)
    enabled, messages = regions_made(backend, FP16)
    assert (enabled, len(messages)) == ([False, False], 1)
    supported.append(FP16)
    assert regions_made(backend, FP16) == ([True, True], [])
    supported.remove(FP16)
    enabled, messages = regions_made(backend, FP16)
    assert (enabled, len(messages)) == ([False, False], 1)


@without_cuda
def test_a_region_that_torch_disables_names_the_line_that_made_it():
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        autocast("cuda", FP16)
    assert [warning.filename for warning in caught] == [__file__]


#: The arguments of a region, its class, and the dtype of a product inside.
LAYERS: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "ours": (autocast, {"dtype": FP16}, FP16),
    "torch's": (torch.autocast, {"dtype": BF16}, BF16),
    "ours off": (autocast, {"enabled": False}, FP32),
    "torch's off": (torch.autocast, {"enabled": False}, FP32),
    "lists": (autocast, {"dtype": BF16, "ops": OpLists(fp32={"erf"})}, BF16),
    "no lists": (autocast, {"dtype": FP16, "ops": OpLists()}, FP16),
}


def current_dtypes() -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of a product and of an `erf` of bfloat16."""
    half = X.bfloat16()
    result = torch.erf(half)
    return product(), result.dtype


def dtypes_inside(names: tuple[str, ...]) -> list[tuple[torch.dtype, torch.dtype]]:
    """Enter regions in each other; return the dtypes outside and in each of them."""
    outside = current_dtypes()
    if not names:
        return [outside]
    region_class, arguments, _ = LAYERS[names[0]]
    with region_class("cpu", **arguments):
        inside = dtypes_inside(names[1:])
    assert current_dtypes() == outside
    return [outside, *inside]


def test_regions_of_both_classes_nest_in_every_order():
    before = AutocastState.capture()
    state = thread_state()
    for names in itertools.product(LAYERS, repeat=3):
        expected = [(FP32, BF16)]
        is_listed = False
        for name in names:
            _, arguments, dtype = LAYERS[name]
            if "ops" in arguments:
                is_listed = name == "lists"
            erf_dtype = BF16
            if is_listed and dtype is not FP32:
                erf_dtype = FP32
            expected.append((dtype, erf_dtype))
        assert dtypes_inside(names) == expected, names
    assert AutocastState.capture() == before
    assert thread_state() == state

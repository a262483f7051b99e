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
        dtype = pool.submit(under_float16)
        assert entered.wait(10)
        shared(False)
        leave.set()
        assert dtype.result() is FP16


def test_nested_regions_of_two_dtypes_may_share_a_weight():
    weight = torch.ones(2, 2, requires_grad=True)
    with autocast("cpu", FP16):
        assert torch.mm(X, weight).dtype is FP16
        with autocast("cpu", BF16):
            assert torch.mm(X, weight).dtype is BF16
        assert torch.mm(X, weight).dtype is FP16


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


@pytest.mark.parametrize("outer", [True, False])
def test_a_region_inherits_the_cache_setting_unless_it_has_an_argument(outer):
    with autocast("cpu", cache_enabled=outer):
        with autocast("cpu", cache_enabled=not outer):
            assert torch.is_autocast_cache_enabled() is not outer
        with autocast("cpu"):
            assert torch.is_autocast_cache_enabled() is outer
        assert torch.is_autocast_cache_enabled() is outer


@on_ranks(1)
def test_a_step_inside_a_region_is_seen_by_the_next_forward_pass():
    """A new process is needed, because torch does not cache casts of an op that a region listed."""
    weight = torch.ones(1, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with autocast("cpu"):
        for expected in (1.0, 0.0, -1.0):
            out = torch.mm(torch.ones(1, 1), weight)
            assert out.item() == expected
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def exit_changes_nothing(region: autocast) -> bool:
    """Leave a region; return whether the state of the thread is unchanged."""
    state, settings = AutocastState.capture(), thread_state()
    region.__exit__(None, None, None)
    return AutocastState.capture() == state and thread_state() == settings


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_leaving_pops_to_itself_and_what_the_thread_is_not_in_is_not_left(devices):
    state, settings = AutocastState.capture(), thread_state()
    outer = autocast(devices[0], FP16, enabled=devices[0] == "cpu", cache_enabled=False)
    inner = autocast(devices[1], BF16, enabled=devices[1] == "cpu", ops=OpLists(fp32={"softmax"}))
    assert exit_changes_nothing(outer), "the thread has not entered it"
    outer.__enter__()
    inner.__enter__()
    assert in_thread(lambda: exit_changes_nothing(inner)), "another thread has not entered it"
    outer.__exit__(None, None, None)
    assert AutocastState.capture() == state, "the exit of the outer region leaves the inner one too"
    assert thread_state() == settings
    assert exit_changes_nothing(inner)


def _casts(between: str) -> int:
    """Call a product eight times in an inner state or region, and once outside; count the casts."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with torch.autograd.profiler.profile() as profile, autocast("cpu", BF16) as region:
        if between == "state":
            inner = AutocastState.wrap(torch.mm)
        elif between == "again":
            inner = region(torch.mm)
        else:
            inner = autocast("xpu", FP16, enabled=False)(torch.mm)
        for _ in range(8):
            assert inner(X, weight).dtype is BF16
        assert torch.mm(X, weight).dtype is BF16
    return sum(event.name == "aten::_to_copy" for event in profile.function_events)


@pytest.mark.parametrize("between", ["state", "again", "another type's"])
def test_one_weight_is_cast_once_for_many_calls_in_a_region(ranks, between):
    # A new process is needed, because torch does not cache casts of an op that a region listed.
    (casts,) = ranks(1).run(_casts, between, group="fresh")
    casts_of_weight, casts_of_inputs = 1, 9
    assert casts == casts_of_weight + casts_of_inputs


def regions_with(cls: Any) -> list[Any]:
    """Make a region with all arguments and one with none, while the default dtype is float16."""
    torch.set_autocast_dtype("cpu", FP16)
    regions = [cls("cpu", None, False, False), cls("cpu")]
    torch.set_autocast_dtype("cpu", BF16)
    return regions


@pytest.mark.parametrize("name", ["device", "fast_dtype", "_enabled", "_cache_enabled"])
def test_a_region_has_the_attributes_of_torchs_region(name):
    torch_regions = regions_with(torch.autocast)
    for region, torch_region in zip(regions_with(autocast), torch_regions, strict=True):
        assert isinstance(region, torch.amp.autocast)
        assert getattr(region, name) == getattr(torch_region, name)


def test_the_class_can_replace_torchs(monkeypatch):
    for owner in (torch, torch.amp):
        monkeypatch.setattr(owner, "autocast", autocast)
    with torch.autocast("cpu"):
        assert product() is BF16
        with torch.amp.autocast("cpu", enabled=False):
            assert product() is FP32


def pickled(region: autocast) -> autocast:
    return pickle.loads(pickle.dumps(region))  # type: ignore[no-any-return]


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickled])
def test_a_region_can_be_copied_and_pickled_while_entered(copy_of):
    with autocast("cpu", FP16) as region:
        twin = copy_of(region)
    with twin:
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
    ("call", "error", "message"),
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
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
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
    with pytest.warns(UserWarning, match="isabl") as warnings_of_torch:
        torch.autocast(device_type, dtype)
    for _ in range(2):
        with pytest.warns(UserWarning, match="isabl") as caught, autocast(device_type, dtype):
            assert not torch.is_autocast_enabled(device_type)
        assert str(caught[0].message) == str(warnings_of_torch[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocast(device_type, dtype, enabled=False)


def regions_made(*arguments: object) -> tuple[list[bool], list[str]]:
    """Make a region of each class; return whether they are enabled, and the warnings of ours."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        torch_region = torch.autocast(*arguments)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        region = autocast(*arguments)  # type: ignore[arg-type]
    return [region._enabled, torch_region._enabled], [str(warning.message) for warning in caught]


@pytest.mark.parametrize("present_first", [True, False])
@pytest.mark.parametrize("dtype", [None, FP16, BF16])
def test_a_region_asks_each_time_whether_there_is_a_cuda_device(monkeypatch, dtype, present_first):
    for present in (present_first, not present_first) * 2:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda present=present: present)
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
    """Enter regions in each other; return the dtypes outside and in every region."""
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

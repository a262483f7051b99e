"""DataParallel's replicas and bound modules: the caller's whole state, however many there are."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from distamp import autocast
from distamp.autocast import DataParallel, bind, parallel_apply, unbind
from distamp.autocast.op_lists import OpLists
from tests.autocast.conftest import thread_state
from tests.autocast.threads.test_state import in_thread

Pair = namedtuple("Pair", "left right")


class Model(nn.Module):
    """Notes the state it runs in; returns structures."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0, fail: bool = False) -> Any:
        if fail:
            raise KeyError("replica")
        self.seen.append((*thread_state()[:3], torch.is_autocast_cache_enabled()))
        y = self.linear(x) * scale
        return {"pair": Pair(y, [self.norm(y.float())]), "none": None}


def _module() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def torchs_threads(monkeypatch):
    """torch's own parallel_apply on a machine without an accelerator, for its thread handling."""
    fake = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: fake)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: nullcontext())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda device: nullcontext())


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_torchs_replicas_depend_on_their_number(torchs_threads):
    def dtype(_: torch.Tensor) -> torch.dtype:
        return torch.get_autocast_dtype("cuda")

    found = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    x = torch.ones(1)
    one = nn.parallel.parallel_apply([dtype], [x], devices=[0])
    two = nn.parallel.parallel_apply([dtype] * 2, [x] * 2, devices=[0, 0])
    torch.set_autocast_dtype("cuda", found)
    assert (one, two) == ([torch.bfloat16], [torch.float16] * 2)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("count", [1, 2])
def test_ours_over_torchs_threads_does_not(torchs_threads, count):
    def state(_: torch.Tensor) -> Any:
        return thread_state()[:-2]

    with autocast("cpu", torch.float16, cache_enabled=False):
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        expected = thread_state()[:-2]
        seen = parallel_apply([state] * count, [torch.ones(1)] * count, devices=[0] * count)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert seen == [expected] * count


def test_torch_refuses_the_cpu():
    with pytest.raises((ValueError, RuntimeError)):
        nn.parallel.parallel_apply([_module()] * 2, [torch.ones(2, 4)] * 2, devices=["cpu"] * 2)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_replica_runs_in_the_callers_full_state(count):
    model = _module()
    with autocast("cpu", torch.float16, cache_enabled=False):
        caller = (*thread_state()[:3], False)
        DataParallel(model, ["cpu"] * count)(torch.randn(16, 4))
    assert model.seen == [caller] * count


@pytest.mark.parametrize("count", [1, 2, 8])
def test_replicas_follow_the_callers_op_lists(count):
    model = nn.Linear(4, 4)
    with autocast("cpu", ops=OpLists(fp32={"linear"})):
        assert DataParallel(model, ["cpu"] * count)(torch.randn(8, 4)).dtype is torch.float32


@pytest.mark.parametrize("count", [2, 8])
def test_outputs_and_gradients_are_those_of_the_module_alone(count):
    alone, parallel = _module().eval(), _module().eval()
    # After the seed of _module: bfloat16 rounds the sums of replicas elsewhere than one sum, and
    # with some inputs by more than the tolerance below.
    x = torch.randn(16, 4)
    for model, call in ((alone, alone), (parallel, DataParallel(parallel, ["cpu"] * count))):
        with autocast("cpu"):
            out = call(x, scale=2.0)
        assert out["none"] is None
        out["pair"].right[0].square().sum().backward()
        model.out = out["pair"]
    torch.testing.assert_close(parallel.out.left, alone.out.left, rtol=0, atol=0)
    assert isinstance(parallel.out, Pair)
    for ours, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-2, atol=1e-2)


def test_running_statistics_are_the_first_replicas():
    x = torch.randn(8, 4)
    alone, parallel = _module(), _module()
    alone(x[:4])
    DataParallel(parallel, ["cpu"] * 2)(x)
    torch.testing.assert_close(parallel.norm.running_mean, alone.norm.running_mean)


def test_without_gradients_replicas_are_detached():
    with torch.no_grad():
        out = DataParallel(_module(), ["cpu"] * 2)(torch.randn(4, 4))
    assert not out["pair"].left.requires_grad
    with torch.inference_mode():
        out = DataParallel(_module(), ["cpu"] * 2)(torch.randn(4, 4))
    assert out["pair"].left.is_inference()


def test_a_batch_smaller_than_the_devices_uses_fewer():
    model = _module().eval()
    out = DataParallel(model, ["cpu"] * 8)(torch.randn(3, 4), scale=2.0)
    assert len(model.seen) == 3
    assert out["pair"].left.shape == (3, 4)


def test_a_failing_replica_is_named():
    with pytest.raises(KeyError) as error:
        DataParallel(_module(), ["cpu"] * 2)(torch.randn(4, 4), fail=True)
    assert "in replica 0 of 2, on the CPU" in error.value.__notes__


def test_tied_parameters_stay_tied_in_a_replica():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.a.weight is self.b.weight
            return self.b(self.a(x))

    DataParallel(Tied(), ["cpu"] * 2)(torch.randn(4, 4)).sum().backward()


def test_scalars_gather_into_a_vector_with_torchs_warning():
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    with pytest.warns(UserWarning, match="scalars"):
        out = DataParallel(Loss(), ["cpu"] * 2)(torch.ones(4))
    assert out.tolist() == [2.0, 2.0]


def test_devices_of_two_kinds_are_refused():
    with pytest.raises(ValueError, match="all CPU or all accelerators"):
        DataParallel(_module(), ["cpu", 0])
    with pytest.raises(ValueError, match="same kind"):
        DataParallel(_module(), ["cpu"], output_device=0)
    with pytest.raises(ValueError, match="one item for each"):
        parallel_apply([_module()], [])


def test_it_is_a_torch_data_parallel():
    parallel = DataParallel(_module())
    assert isinstance(parallel, nn.DataParallel)
    assert set(parallel.state_dict()) == {f"module.{name}" for name in _module().state_dict()}


def test_a_bound_module_runs_in_its_binders_state_from_any_thread():
    model = _module()
    keys = list(model.state_dict())
    with autocast("cpu", torch.float16):
        assert bind(model) is model
    before = thread_state()
    dtype = in_thread(lambda: model(torch.randn(4, 4))["pair"].left.dtype)
    assert dtype is torch.float16
    assert model(torch.randn(4, 4))["pair"].left.dtype is torch.float16
    assert thread_state() == before
    assert list(model.state_dict()) == keys
    assert unbind(model)(torch.randn(4, 4))["pair"].left.dtype is torch.float32


def test_binding_again_binds_anew():
    model = nn.Linear(4, 4)
    for dtype in (torch.float16, torch.bfloat16):
        with autocast("cpu", dtype):
            bind(model)
    assert model(torch.randn(4, 4)).dtype is torch.bfloat16
    assert type(unbind(model)) is nn.Linear


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_bound_module_can_be_copied_and_the_copy_unbound(copied):
    with autocast("cpu"):
        model = copied(bind(nn.Linear(4, 4)))
    assert model(torch.randn(4, 4)).dtype is torch.bfloat16
    assert unbind(model)(torch.randn(4, 4)).dtype is torch.float32


def test_a_failing_bound_module_leaves_the_state_as_it_was():
    model = _module()
    with autocast("cpu"):
        bind(model)
    before = thread_state()
    with pytest.raises(KeyError):
        model(torch.randn(4, 4), fail=True)
    assert thread_state() == before


def test_a_bound_module_that_is_interrupted_leaves_the_state_as_it_was():
    class Interrupted(nn.Module):
        def forward(self) -> None:
            raise KeyboardInterrupt

    model = Interrupted()
    with autocast("cpu"):
        bind(model)
    before = thread_state()
    with pytest.raises(KeyboardInterrupt):
        model()
    assert thread_state() == before


class Threads(nn.DataParallel):
    """torch's DataParallel with its calls of replicas in plain threads, as on accelerators."""

    def __init__(self, module: nn.Module, count: int) -> None:
        nn.Module.__init__(self)
        self.module, self.count, self.dim = module, count, 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        from torch.nn.parallel import scatter_gather  # noqa: F401

        from distamp.autocast.replicas.cpu import replicate, scatter

        parts, kwarg_parts = scatter(inputs, kwargs, self.count, 0)
        replicas = replicate(self.module, len(parts), detach=False)
        return self.parallel_apply(replicas, parts, kwarg_parts)

    def parallel_apply(self, *calls: Any) -> list[Any]:
        return [in_thread(lambda c=c: c[0](*c[1], **c[2])) for c in zip(*calls, strict=True)]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_binding_a_plain_data_parallel_takes_its_callers_state_at_each_call(by_keyword):
    model = _module().eval()
    parallel = bind(Threads(model, 4))
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(3, 4)
        with autocast("cpu", dtype):
            outs = parallel(x=x) if by_keyword else parallel(x)
        assert [out["pair"].left.dtype for out in outs] == [dtype] * 3
    assert unbind(parallel)(torch.randn(3, 4))[0]["pair"].left.dtype is torch.float32


def test_binding_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="propagate"):
        bind(lambda x: x)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("make", [DataParallel, lambda m: bind(nn.DataParallel(m))])
def test_replicas_on_gpus_run_in_the_callers_full_state(make):
    model = nn.Linear(4, 4).cuda()
    parallel = make(model)
    x = torch.randn(8, 4, device="cuda")
    with autocast("cuda", torch.bfloat16):
        out = parallel(x)
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert model.weight.grad is not None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ddp_over_a_module_on_two_gpus_computes_in_the_region(ranks1):
    assert ranks1.run(_two_device_ddp) == ["torch.bfloat16"]


def _two_device_ddp() -> str:
    class TwoDevices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 4).to("cuda:1")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x.to("cuda:0")).to("cuda:1"))

    model = nn.parallel.DistributedDataParallel(TwoDevices())
    with autocast("cuda", torch.bfloat16):
        out = model(torch.randn(8, 4))
    out.float().sum().backward()
    return str(out.dtype)

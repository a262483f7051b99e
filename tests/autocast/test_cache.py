"""cache_enabled="step": fewer casts, the same gradients, never stale, bounded."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distamp import autocast
from distamp.autocast import (
    cast_cache_stats,
    clear_cast_cache,
    set_cast_cache_limit,
)
from distamp.autocast.cache import _FUNCTIONS
from distamp.autocast.op_lists import OpLists

STEP = autocast("cpu", cache_enabled="step")


class Casts(TorchDispatchMode):
    """An independent count of the casts that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    clear_cast_cache()
    yield
    clear_cast_cache()


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(8, 8), nn.ReLU())])


def _accumulate(model: nn.Module, region: Any, microbatches: int = 4) -> int:
    """Casts of one optimizer step's forward and backward passes."""
    torch.manual_seed(1)
    with Casts() as casts:
        for _ in range(microbatches):
            with region:
                out = model(torch.randn(4, 8))
            out.sum().backward()
    return casts.count


def _grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_torch_casts_every_weight_for_every_microbatch():
    assert _accumulate(_mlp(), torch.autocast("cpu")) == 68
    assert _accumulate(_mlp(), autocast("cpu")) == 68


def test_four_microbatches_take_44_casts_and_the_gradients_are_equal():
    cached, uncached = _mlp(), _mlp()
    assert _accumulate(cached, STEP) == 44
    _accumulate(uncached, autocast("cpu"))
    for ours, theirs in zip(_grads(cached), _grads(uncached), strict=True):
        assert torch.equal(ours, theirs)


def _train(model: nn.Module, region: Any, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        _accumulate(model, region, 2)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def test_training_is_the_same_bit_for_bit():
    ours, theirs = _train(_mlp(), STEP), _train(_mlp(), torch.autocast("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _step_inside(region: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs before and after an optimizer's step inside one region."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(2, 4)
    with region:
        before = model(x)
        before.sum().backward()
        optimizer.step()
        return before, model(x)


def test_torchs_cache_is_stale_after_a_step_inside_a_region():
    before, after = _step_inside(torch.autocast("cpu"))
    assert torch.equal(before, after)


def test_a_step_inside_a_region_is_seen():
    before, after = _step_inside(STEP)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("change", ["in place", "data", "requires_grad"])
def test_a_changed_weight_is_cast_again(change):
    model = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4)
    with STEP:
        model(x)
        if change == "in place":
            with torch.no_grad():
                model.weight.zero_()
        elif change == "data":
            model.weight.data = torch.zeros(4, 4)
        else:
            model.weight.requires_grad_(False)
            assert not model(x).requires_grad
            return
        assert model(x).count_nonzero() == 0


def test_a_change_through_data_is_seen_after_clearing_only():
    """The documented limit: torch's version counter does not see this."""
    model = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4)
    with STEP:
        model(x)
        model.weight.data.zero_()
        assert model(x).count_nonzero() > 0
        clear_cast_cache()
        assert model(x).count_nonzero() == 0


def test_an_optimizer_that_writes_through_data_is_seen():
    class Legacy(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.zero_()

    model = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4)
    with STEP:
        model(x)
        Legacy(model.parameters(), {}).step()
        assert model(x).count_nonzero() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_training_leaves_gradients(mode):
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    for _ in range(2):
        with STEP, mode():
            model(x)
        with STEP:
            model(x).sum().backward()
        with STEP, mode():
            assert not model(x).requires_grad
    assert torch.equal(model.weight.grad, torch.full((4, 4), 4.0))
    assert cast_cache_stats().entries == 2


def test_frozen_weights_are_kept_too():
    model = nn.Linear(4, 4).requires_grad_(False)
    with Casts() as casts:
        for _ in range(3):
            with STEP:
                model(torch.ones(2, 4))
    assert casts.count == 2 + 3


def test_gradients_may_be_taken_twice_through_one_cast():
    model = nn.Linear(4, 4)
    with STEP:
        first, second = model(torch.ones(2, 4)).sum(), model(torch.ones(2, 4)).sum()
    first.backward()
    second.backward()
    (grad,) = torch.autograd.grad(model.weight.square().sum(), model.weight, create_graph=True)
    grad.sum().backward()
    assert model.weight.grad is not None


def test_recomputed_activations_give_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    results = []
    for region in (STEP, torch.autocast("cpu")):
        model = _mlp()
        for reentrant in (False, True):
            with region:
                x = torch.randn(4, 8, generator=torch.manual_seed(3)).requires_grad_()
                checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        results.append(_grads(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_nested_region_inherits_the_cache_and_false_turns_it_off():
    model = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with Casts() as casts, STEP:
        model(x)
        with autocast("cpu"):
            model(x)
        assert casts.count == 1
        with autocast("cpu", cache_enabled=False):
            model(x)
        assert casts.count == 2
        with autocast("cpu", dtype=torch.float16):
            assert model(x).dtype is torch.float16
        with autocast("cpu", enabled=False):
            assert model(x.float()).dtype is torch.float32


def test_nested_step_regions_end_with_the_outermost():
    with STEP, STEP:
        pass
    assert not torch._C._is_torch_function_mode_enabled()


def test_op_lists_come_first():
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with autocast("cpu", cache_enabled="step", ops=OpLists(fp32={"linear"})):
        assert model(x).dtype is torch.float32
    with autocast("cpu", cache_enabled="step", ops=OpLists(fp32={"softmax"})):
        assert model(x).dtype is torch.bfloat16
    assert cast_cache_stats().entries == 2


def test_a_traced_graph_holds_its_casts():
    model = nn.Linear(4, 4).eval()
    x = torch.ones(2, 4)
    with STEP, torch.no_grad():
        model(x)
        traced = torch.jit.trace(model, x, check_trace=False)
        expected = model(x)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    assert expected.count_nonzero() > 0
    assert traced(x).count_nonzero() == 0


def test_functorch_transforms_keep_nothing():
    model = nn.Linear(4, 4)
    before = cast_cache_stats()
    with STEP:
        torch.func.grad(lambda x: model(x).sum())(torch.ones(4))
    assert cast_cache_stats() == before


def test_memory_is_reported_and_given_back():
    model = _mlp()
    before = cast_cache_stats()
    with STEP:
        model(torch.ones(2, 8)).sum().backward()
    stats = cast_cache_stats()
    assert stats.entries == 8
    assert stats.nbytes == sum(p.nbytes for p in model.parameters()) // 2
    assert stats.casts - before.casts == 8
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = cast_cache_stats()
    assert (after.entries, after.nbytes) == (0, 0)
    assert after.dropped - before.dropped == 8


def test_memory_is_bounded():
    model, weight = _mlp(), 8 * 8 * 2
    set_cast_cache_limit(2 * weight + 16)
    try:
        before = cast_cache_stats()
        _accumulate(model, STEP, 2)
        stats = cast_cache_stats()
    finally:
        set_cast_cache_limit(None)
    assert stats.nbytes <= 2 * weight + 16
    assert stats.uncached > before.uncached
    other = _mlp()
    _accumulate(other, autocast("cpu"), 2)
    assert all(torch.equal(a, b) for a, b in zip(_grads(model), _grads(other), strict=True))


@pytest.mark.parametrize(
    ("limit", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_limit_that_is_no_size_is_refused(limit, error):
    with pytest.raises(error):
        set_cast_cache_limit(limit)


def test_each_thread_has_its_own_and_its_end_frees_it():
    model = nn.Linear(4, 4)

    def work() -> None:
        with STEP:
            model(torch.ones(2, 4))
        entries.append(cast_cache_stats().entries)

    entries: list[int] = []
    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    assert entries == [2, 4]
    assert cast_cache_stats().entries == 2


def _call(function: Any) -> torch.Tensor:
    p = nn.Parameter
    square, batch = p(torch.ones(2, 2)), p(torch.ones(1, 2, 2))
    name = _FUNCTIONS[function]
    if function is torch.nn.functional.multi_head_attention_forward:
        attention = nn.MultiheadAttention(2, 1)
        return attention(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2))[0]
    if name.startswith("conv"):
        shape = [1] * (2 + int(name[-2]))
        return function(torch.ones(shape), p(torch.ones(shape)), p(torch.ones(1)))
    arguments = {
        "linear": (torch.ones(2, 2), square, p(torch.ones(2))),
        "addmm": (square, square, torch.ones(2, 2)),
        "addbmm": (square, batch, torch.ones(1, 2, 2)),
        "baddbmm": (batch, batch, torch.ones(1, 2, 2)),
        "bmm": (batch, batch),
    }.get(name, (square, square))
    return function(*arguments)


@pytest.mark.parametrize("function", list(_FUNCTIONS), ids=lambda f: f.__name__)
def test_every_listed_function_computes_as_under_torchs_own_cache(function):
    """None of them may be one that torch runs in another precision than the region's."""
    torch.manual_seed(0)
    with torch.autocast("cpu"):
        expected = _call(function)
    torch.manual_seed(0)
    before = cast_cache_stats()
    with STEP:
        out = _call(function)
    assert out.dtype is expected.dtype is torch.bfloat16
    assert torch.equal(out, expected)
    assert cast_cache_stats().casts > before.casts


def _distributed(wrapper: str, cached: bool) -> list[torch.Tensor]:
    """Parameters after training with accumulation, on this rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model: Any = _mlp()
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for micro in range(3):
            last = micro == 2
            if wrapper == "ddp":
                model.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last)
            torch.manual_seed(100 * step + 10 * micro + dist.get_rank())
            with autocast("cpu", cache_enabled="step" if cached else True):
                out = model(torch.randn(4, 8))
            out.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = [p.full_tensor() if wrapper == "fsdp2" else p for p in model.parameters()]
    return [p.detach().clone() for p in full]


def _hits() -> int:
    return cast_cache_stats().hits


def _gathered_to_the_same_place() -> tuple[list[torch.Tensor], int]:
    """Train under FSDP2 with every cast of a step taken for a held one; and how many were."""
    from distamp.autocast import cache

    before, original = _hits(), cache._Held.is_of
    cache._Held.is_of = lambda held, weight: held.weight() is weight
    try:
        return _distributed("fsdp2", True), _hits() - before
    finally:
        cache._Held.is_of = original


def test_a_cast_held_where_fsdp2_gathers_to_the_same_place_loses_no_gradient(ranks2):
    uncached = ranks2.run(_distributed, "fsdp2", False)
    cached = ranks2.run(_gathered_to_the_same_place)
    for (ours, hits), theirs in zip(cached, uncached, strict=True):
        assert hits > 0
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_distributed_training_is_the_same_bit_for_bit(ranks2, wrapper):
    hits = ranks2.run(_hits)
    cached = ranks2.run(_distributed, wrapper, True)
    if wrapper == "ddp":  # FSDP2 gathers into new memory, so its weights are cast anew
        assert all(after > before for before, after in zip(hits, ranks2.run(_hits), strict=True))
    uncached = ranks2.run(_distributed, wrapper, False)
    for ours, theirs in zip(cached, uncached, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_gradients_are_equal_and_casts_fewer(dtype):
    results = []
    for cache in (True, "step"):
        model = _mlp().cuda()
        with Casts() as casts:
            for _ in range(4):
                with autocast("cuda", dtype, cache_enabled=cache):
                    out = model(torch.ones(4, 8, device="cuda"))
                out.sum().backward()
        results.append((casts.count, _grads(model)))
    (many, theirs), (few, ours) = results
    assert (many, few) == (68, 44)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

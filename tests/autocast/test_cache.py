"""The cache of cast weights: it ends with its region, and holds no weight that was stepped."""

from __future__ import annotations

import torch

from distamp import autocast


def test_the_cache_is_as_it_was_after_a_region():
    for outer in (True, False):
        with autocast("cpu", cache_enabled=outer):
            with autocast("cpu", cache_enabled=not outer):
                assert torch.is_autocast_cache_enabled() is not outer
            assert torch.is_autocast_cache_enabled() is outer
    assert torch.is_autocast_cache_enabled()


def _after_a_step() -> list[float]:
    weight = torch.ones(1, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    x, seen = torch.ones(1, 1), []
    with autocast("cpu"):
        for _ in range(3):
            out = torch.mm(x, weight)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(out.item())
    return seen


def test_a_step_inside_a_region_is_seen_by_the_next_forward_pass(ranks1):
    # In a process of its own: an op that any region has listed is not cached there again.
    assert ranks1.run(_after_a_step) == [[1.0, 0.0, -1.0]]

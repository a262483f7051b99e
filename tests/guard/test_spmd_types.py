"""Annotations of spmd_types on plain tensors: the norm counts each part of a parameter once."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distamp import StepGuard
from tests.on_ranks import on_ranks
from tests.ranks import mesh

pytest.importorskip("spmd_types")


def _annotated(types: dict[str, str], grad: list[float]) -> nn.Parameter:
    """Return a parameter with a gradient, and with a type for each axis of a mesh of 2 x 2."""
    import spmd_types

    axes = mesh((2, 2), ("dp", "tp"))
    param = nn.Parameter(torch.zeros(len(grad)))
    param.grad = torch.tensor(grad)
    annotation = {}
    for axis, name in types.items():
        group = axes.get_group(axis)
        annotation[group] = getattr(spmd_types, name)
    spmd_types.assert_type(param, annotation)
    return param


def _norm(*params: nn.Parameter) -> float:
    optimizer = torch.optim.SGD(params, lr=0.1)
    norm = StepGuard().clip_grad_norm_(optimizer, 1e9)
    return norm.item()


@on_ranks(4)
def test_a_parameter_that_varies_on_one_axis_counts_each_part_once():
    """Ranks 0 and 2 hold the part 3, ranks 1 and 3 the part 4."""
    part = 3.0 + dist.get_rank() % 2
    param = _annotated({"dp": "R", "tp": "V"}, [part])
    assert _norm(param) == pytest.approx(5.0)


@on_ranks(4)
def test_a_parameter_that_varies_on_both_axes_has_four_parts():
    part = float(dist.get_rank() + 1)
    param = _annotated({"dp": "V", "tp": "V"}, [part])
    assert _norm(param) == pytest.approx(30**0.5)


@on_ranks(4)
@pytest.mark.parametrize("name", ["R", "I"])
def test_a_parameter_that_varies_nowhere_counts_as_a_replica(name):
    param = _annotated({"dp": name, "tp": name}, [3.0, 4.0])
    assert _norm(param) == pytest.approx(5.0)


@on_ranks(4)
def test_annotated_and_plain_parameters_share_a_norm():
    plain = nn.Parameter(torch.zeros(1))
    plain.grad = torch.tensor([12.0])
    part = 3.0 + dist.get_rank() % 2
    param = _annotated({"dp": "I", "tp": "V"}, [part])
    assert _norm(param, plain) == pytest.approx(13.0)


@on_ranks(4)
def test_a_declaration_of_the_caller_overrides_an_annotation():
    param = _annotated({"dp": "R", "tp": "V"}, [2.0])
    optimizer = torch.optim.SGD([param], lr=0.1)
    norm = StepGuard().clip_grad_norm_(optimizer, 1e9, is_replicated_fn=lambda p: True)
    assert norm.item() == pytest.approx(2.0)


@on_ranks(4)
def test_a_clip_scales_the_part_of_every_rank_by_the_norm_of_all_parts():
    part = 3.0 + dist.get_rank() % 2
    param = _annotated({"dp": "R", "tp": "V"}, [part])
    optimizer = torch.optim.SGD([param], lr=1.0)
    guard = StepGuard()
    guard.step(optimizer, max_norm=1.0)
    guard.update()
    torch.testing.assert_close(param.detach(), torch.tensor([-part / 5.0]), rtol=1e-5, atol=0)

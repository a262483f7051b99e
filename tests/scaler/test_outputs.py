"""scale(): which structures and dtypes it takes, and what comes back."""

from __future__ import annotations

import types
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.scaler.steps import INF, cpu_scaler, torch_scaler

Pair = namedtuple("Pair", ["loss", "extra"])


def one() -> Tensor:
    return torch.tensor(1.0)


def values(structure: Any) -> Any:
    """The structure with numbers for tensors."""
    if isinstance(structure, Tensor):
        return structure.tolist()
    if isinstance(structure, dict):
        return {key: values(value) for key, value in structure.items()}
    return [values(value) for value in structure]


# -- structures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        one,
        lambda: torch.ones(2, 3),
        lambda: [one(), one()],
        lambda: (one(), one()),
        lambda: [one(), (one(), [one()])],
        list,
        tuple,
    ],
    ids=["tensor", "matrix", "list", "tuple", "nested", "empty list", "empty tuple"],
)
def test_structures_that_torch_knows_come_back_as_torch_gives_them(make):
    ours, theirs = cpu_scaler().scale(make()), torch_scaler().scale(make())
    assert type(ours) is type(theirs)
    assert values(ours) == values(theirs)


def test_what_is_scaled_is_left_as_it_was():
    outputs = [one(), {"a": one()}]
    cpu_scaler().scale(outputs)
    assert values(outputs) == [1.0, {"a": 1.0}]


def test_a_generator_comes_back_lazily_as_torchs_does():
    for scaler in (cpu_scaler(), torch_scaler()):
        asked = []

        def generate(asked: list[int] = asked) -> Iterator[Tensor]:
            for i in range(2):
                asked.append(i)
                yield one()

        scaled = scaler.scale(generate())
        assert isinstance(scaled, Iterator)
        assert asked == []
        assert values(scaled) == [1024.0, 1024.0]


def test_a_set_of_tensors_is_an_iterable():
    assert values(cpu_scaler().scale({one()})) == [1024.0]


def test_a_namedtuple_keeps_its_type_where_torch_fails():
    with pytest.raises(TypeError):
        torch_scaler().scale(Pair(one(), one()))
    scaled = cpu_scaler().scale(Pair(one(), [one()]))
    assert type(scaled) is Pair
    assert (scaled.loss.item(), values(scaled.extra)) == (1024.0, [1024.0])


def test_a_mapping_keeps_keys_order_and_type_where_torch_drops_the_values():
    assert not isinstance(torch_scaler().scale({"b": one(), "a": one()}), dict)
    scaled = cpu_scaler().scale({"b": one(), "a": (one(),)})
    assert type(scaled) is dict
    assert list(scaled) == ["b", "a"]
    assert values(scaled) == {"b": 1024.0, "a": [1024.0]}


@pytest.mark.parametrize("kind", [OrderedDict, lambda items: defaultdict(list, items)])
def test_other_mappings_keep_their_type(kind):
    given = kind({"b": one(), "a": [one()]})
    scaled = cpu_scaler().scale(given)
    assert type(scaled) is type(given)
    assert values(scaled) == {"b": 1024.0, "a": [1024.0]}
    assert values(given) == {"b": 1.0, "a": [1.0]}


def test_a_read_only_mapping_is_taken_too():
    scaled = cpu_scaler().scale(types.MappingProxyType({"a": one()}))
    assert values(dict(scaled)) == {"a": 1024.0}


@pytest.mark.parametrize("bad", [1.0, None, "loss", [1.0], [one(), None], {"a": 2}], ids=str)
def test_what_is_no_tensor_is_refused_with_torchs_words(bad):
    with pytest.raises(ValueError, match=r"outputs must be a Tensor or an iterable of Tensors"):
        cpu_scaler().scale(bad)


def test_a_refusal_names_the_type():
    with pytest.raises(ValueError, match=r"not float \(1\.5\)"):
        cpu_scaler().scale([one(), 1.5])


def test_gradients_flow_through_every_leaf_of_a_structure():
    leaves = [torch.ones((), requires_grad=True) for _ in range(3)]
    scaled = cpu_scaler().scale({"a": leaves[0], "b": [leaves[1], Pair(leaves[2], one())]})
    (scaled["a"] + 2 * scaled["b"][0] + 3 * scaled["b"][1].loss).backward()
    assert [leaf.grad.item() for leaf in leaves] == [1024.0, 2048.0, 3072.0]


def test_the_scale_lies_on_the_device_of_the_first_output():
    scaler = cpu_scaler()
    scaler.scale([one()])
    assert scaler._scale.device == torch.device("cpu")


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_wide_dtypes_come_back_as_from_torch(dtype):
    outputs = torch.tensor([0.1, 3.0], dtype=dtype)
    for made in (lambda: outputs, lambda: outputs[0]):
        ours, theirs = cpu_scaler().scale(made()), torch_scaler().scale(made())
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2), (0,)], ids=str)
def test_fp16_of_every_shape_comes_back_as_fp32_without_overflow(shape):
    outputs = torch.full(shape, 2.0, dtype=torch.float16)
    scaled = cpu_scaler(2.0**16).scale(outputs)
    assert scaled.dtype is torch.float32
    assert torch.equal(scaled, torch.full(shape, 131072.0))


def test_fp16_within_a_structure_comes_back_as_fp32():
    scaled = cpu_scaler(2.0**16).scale({"a": [torch.full((1,), 2.0, dtype=torch.float16)]})
    assert scaled["a"][0].dtype is torch.float32
    assert scaled["a"][0].item() == 131072.0


# -- the seed gradient of an fp16 loss -------------------------------------------------------------


def test_the_gradient_that_enters_an_fp16_loss_overflows_whatever_scale_returns():
    for scaler in (cpu_scaler(2.0**16), torch_scaler(2.0**16)):
        leaf = torch.ones(1, dtype=torch.float16, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler.scale(leaf.sum()).backward()
        assert leaf.grad.item() == INF


# -- disabled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [one(), [one()], 3, None, "x"], ids=str)
def test_a_disabled_scaler_gives_back_the_very_object(outputs):
    assert cpu_scaler(enabled=False).scale(outputs) is outputs
    assert torch_scaler(enabled=False).scale(outputs) is outputs

"""Today's model families and torch's op database in regions, with lists, reports and preflight."""

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distamp import OpLists, autocast, precision_report, preflight
from tests.autocast.counting import BF16, FP16, Independent
from tests.autocast.models import MODELS

pytestmark = pytest.mark.filterwarnings("ignore")
LISTS = OpLists(fp32={"linear"}, lower_precision={"gelu", "silu", "relu"})
SAMPLE = ("bert", "mixtral, eager", "wav2vec2", "resnet")


@pytest.fixture(
    params=[
        name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in MODELS
    ]
)
def built(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Tensor]]:
    return MODELS[request.param]()


def step(model: nn.Module, inputs: dict[str, Tensor], region: Any) -> list[Any]:
    """The loss and all gradients."""
    torch.manual_seed(0)
    model.zero_grad()
    with region:
        output = model(**inputs)
        loss = next(iter(output.values())) if isinstance(output, dict) else output.mean()
    loss.backward(torch.ones_like(loss))
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_a_region_is_torchs_and_lists_and_reports_hold(built):
    ours = step(*built, autocast("cpu", BF16))
    assert all(map(torch.equal, ours, step(*built, torch.autocast("cpu", BF16))))
    with Independent() as count, precision_report(built[0]) as report:
        step(*built, autocast("cpu", BF16, ops=LISTS))
    assert count.agrees(report)
    products = [row for row in report.rows if (row.function, row.op) == ("linear", "addmm")]
    assert {row.outputs for row in products if row.phase == "forward"} <= {("float32",)}
    assert any(row.phase == "backward" and row.module != "(outside)" for row in report.rows)


def computed(rows: Any) -> set[Any]:
    """Every kernel that computes with floating point numbers, by module and dtypes."""
    return {
        (row.module, row.op, row.inputs, row.outputs[:1], row.cause)
        for row in rows
        if any("float" in dtype for dtype in row.inputs) and not row.view
    }


def test_a_preflight_comes_to_the_end_and_a_cpus_is_a_real_forward_pass(built):
    model, inputs = built
    result = preflight(model, inputs, "cuda", FP16)
    assert not result.errors
    half = {row.op for row in result.report.rows if "float16" in row.outputs}
    assert half & {"mm", "addmm", "bmm", "convolution"}
    result = preflight(model, inputs, "cpu", BF16)
    with precision_report(model) as report, torch.autocast("cpu", BF16):
        model(**inputs)
    assert computed(result.report.rows) == computed(report.rows)


def dtypes(op: Any, sample: Any, region: Any) -> Any:
    """The dtypes of one call's results, or the error it raises."""
    torch.manual_seed(0)
    try:
        with region:
            out = op(sample.input, *sample.args, **sample.kwargs)
    except Exception as error:
        return type(error)
    return [getattr(it, "dtype", None) for it in (out if isinstance(out, tuple | list) else (out,))]


# In-place random ones, what has a dtype of its own or writes statistics, what torch makes of
# other ops.
NOT_CHANGED = {
    *("cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "rand_like"),
    *("nn.functional.interpolate", "nn.functional.normalize", "__rdiv__"),
    *("nn.functional.batch_norm", "nn.functional.instance_norm"),
    "native_batch_norm",  # Its statistics, so what it saves of them stays.
    "_native_batch_norm_legit",  # Lists change its overload without statistics alone.
}


def to(dtype: torch.dtype, given: torch.dtype, value: Any) -> Any:
    """What a list makes of an argument."""
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype is given else value


def samples(ops: list[Any]) -> Iterator[tuple[Any, torch.dtype, Any]]:
    """An op, the dtype of its inputs, and two calls of it."""
    for op in ops:
        for given in {torch.float32, BF16, FP16} & op.supported_dtypes("cpu"):
            for sample in itertools.islice(op.sample_inputs("cpu", given), 2):
                yield op, given, sample


@pytest.mark.parametrize(
    "part", [None, *(pytest.param(part, marks=pytest.mark.slow) for part in range(6))]
)
def test_ops_are_in_the_dtype_of_torchs_region_and_of_lists_of_ours(part):
    database = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
    ops = random.Random(0).sample(database, 10) if part is None else database[part::6]
    differ = {
        op.name
        for op, _, sample in samples(ops)
        if dtypes(op, sample, autocast("cpu")) != dtypes(op, sample, torch.autocast("cpu"))
    }
    assert differ == set()
    for op, given, sample in samples(ops):
        wanted = BF16 if given is torch.float32 else torch.float32
        name = {op.name.replace("nn.functional.", "")}
        try:
            lists = OpLists(lower_precision=name) if wanted is BF16 else OpLists(fp32=name)
        except ValueError:
            continue
        cast = sample.transform(functools.partial(to, wanted, given))
        by_hand = dtypes(op, cast, autocast("cpu", enabled=False))
        if dtypes(op, sample, autocast("cpu", ops=lists)) != by_hand:
            differ.add(op.name)
    assert differ - NOT_CHANGED == set()

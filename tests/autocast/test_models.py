"""Model families of today and ops of torch's database in regions, with lists and reports."""

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from distamp import OpLists, autocast, precision_report, preflight
from tests.autocast.counting import BF16, FP16, Independent
from tests.autocast.models import MODELS
from tests.quick_cases import quick_cases

pytestmark = pytest.mark.filterwarnings("ignore")
LISTS = OpLists(fp32={"linear"}, lower_precision={"gelu", "silu", "relu"})


# The others take seconds to import transformers.
@pytest.fixture(params=quick_cases(MODELS, quick=["torch's encoder"]))
def built(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and its inputs."""
    return MODELS[request.param]()


def step(model: nn.Module, inputs: dict[str, Tensor], region: Any) -> list[Any]:
    """Run forward in a region and backward outside; return the loss and all gradients."""
    torch.manual_seed(0)
    model.zero_grad()
    with region:
        output = model(**inputs)
        loss = next(iter(output.values())) if isinstance(output, dict) else output.mean()
    loss.backward(torch.ones_like(loss))
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_a_step_in_a_region_is_bit_identical_to_torchs(built):
    results = step(*built, autocast("cpu", BF16))
    expected = step(*built, torch.autocast("cpu", BF16))
    assert all(map(torch.equal, results, expected))


def test_a_report_counts_the_kernels_and_casts_of_a_step_with_lists(built):
    with Independent() as count, precision_report(built[0]) as report:
        step(*built, autocast("cpu", BF16, ops=LISTS))
    assert count.agrees(report)
    has_backward = False
    for row in report.rows:
        is_product = (row.function, row.op) == ("linear", "addmm")
        if is_product and row.phase == "forward":
            assert row.outputs == ("float32",)
        if row.phase == "backward" and row.module != "(outside)":
            has_backward = True
    assert has_backward, "no kernel of the backward pass has a module"


def floating_kernels(rows: Any) -> set[Any]:
    """Return every kernel that computes with floating point numbers, by module and dtypes."""
    kernels = set()
    for row in rows:
        is_floating = any("float" in dtype for dtype in row.inputs)
        if is_floating and not row.view:
            kernels.add((row.module, row.op, row.inputs, row.outputs[:1], row.cause))
    return kernels


def test_a_preflight_for_a_gpu_runs_to_its_end(built):
    model, inputs = built
    result = preflight(model, inputs, "cuda", FP16)
    assert not result.errors
    half_precision_ops = {row.op for row in result.report.rows if "float16" in row.outputs}
    assert half_precision_ops & {"mm", "addmm", "bmm", "convolution"}


def test_a_preflight_for_the_cpu_has_the_kernels_of_a_real_forward_pass(built):
    model, inputs = built
    result = preflight(model, inputs, "cpu", BF16)
    with precision_report(model) as report, torch.autocast("cpu", BF16):
        model(**inputs)
    assert floating_kernels(result.report.rows) == floating_kernels(report.rows)


def result_dtypes(op: Any, sample: Any, region: Any) -> Any:
    """Return the dtypes of the results of a call in a region, or the type of its error."""
    torch.manual_seed(0)
    try:
        with region:
            out = op(sample.input, *sample.args, **sample.kwargs)
    except Exception as error:
        return type(error)
    results = out if isinstance(out, tuple | list) else (out,)
    return [getattr(result, "dtype", None) for result in results]


def in_lower_precision(x: Tensor) -> Tensor:
    return torch.mm(x, x)


def in_float32(x: Tensor) -> Tensor:
    return F.mse_loss(x, x)


def promoted(x: Tensor) -> Tensor:
    zeros = torch.zeros(2, 2)
    return torch.cat([x, zeros])


def in_no_list(x: Tensor) -> Tensor:
    return F.softplus(x)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("op", [in_lower_precision, in_float32, promoted, in_no_list])
def test_an_op_of_each_category_has_the_dtype_of_torchs_region(op, dtype):
    """The cases with torch's op database compare every op, and are slow."""
    x = torch.ones(2, 2, dtype=dtype)
    sample = SimpleNamespace(input=x, args=(), kwargs={})
    (expected,) = result_dtypes(op, sample, torch.autocast("cpu"))
    assert isinstance(expected, torch.dtype)
    (result,) = result_dtypes(op, sample, autocast("cpu"))
    assert result is expected


# Lists do not change random in-place ops, ops with a fixed dtype or with statistics, and ops that
# torch makes of other ops.
NOT_CHANGED = frozenset(
    """
    cauchy exponential geometric log_normal normal uniform rand_like
    nn.functional.interpolate nn.functional.normalize __rdiv__
    nn.functional.batch_norm nn.functional.instance_norm native_batch_norm _native_batch_norm_legit
    """.split()  # noqa: SIM905
)


def ops_of_database(part: int | None) -> list[Any]:
    """Return a sixth of torch's op database, or ten ops of it."""
    database = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
    if part is None:
        return random.Random(0).sample(database, 10)
    return database[part::6]  # type: ignore[no-any-return]


def samples(ops: list[Any]) -> Iterator[tuple[Any, torch.dtype, Any]]:
    """Yield two calls of each op in each dtype: the op, the dtype, and the arguments."""
    for op in ops:
        for dtype in {torch.float32, BF16, FP16} & op.supported_dtypes("cpu"):
            for sample in itertools.islice(op.sample_inputs("cpu", dtype), 2):
                yield op, dtype, sample


def cast_sample(sample: Any, from_dtype: torch.dtype, to_dtype: torch.dtype) -> Any:
    """Return a call with each tensor of one dtype cast to another, as a list casts them."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype is from_dtype:
            return value.to(to_dtype)
        return value

    return sample.transform(cast)


PARTS = [None, *range(6)]


# The import of torch's op database takes seconds.
@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_an_op_has_the_dtypes_of_torchs_region(part):
    for op, _, sample in samples(ops_of_database(part)):
        expected = result_dtypes(op, sample, torch.autocast("cpu"))
        assert result_dtypes(op, sample, autocast("cpu")) == expected, op.name


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_listed_op_has_the_dtypes_of_cast_inputs(part):
    different = set()
    for op, dtype, sample in samples(ops_of_database(part)):
        name = op.name.replace("nn.functional.", "")
        listed_dtype = BF16 if dtype is torch.float32 else torch.float32
        category = "lower_precision" if listed_dtype is BF16 else "fp32"
        try:
            lists = OpLists(**{category: {name}})
        except ValueError:
            continue  # The op cannot be listed.
        cast = cast_sample(sample, dtype, listed_dtype)
        expected = result_dtypes(op, cast, autocast("cpu", enabled=False))
        if result_dtypes(op, sample, autocast("cpu", ops=lists)) != expected:
            different.add(op.name)
    assert different - NOT_CHANGED == set()

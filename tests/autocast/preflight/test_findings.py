"""What preflight advises: each rule on a model that breaks it, and on one that does not."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn import functional as F  # noqa: N812

from distamp import preflight
from distamp.autocast import Finding, pin_precision
from distamp.autocast.preflight.finding import as_lines, in_order
from distamp.autocast.preflight.probe import Kind, Kinds, Timing, measure, probe
from distamp.autocast.preflight.simulate import Job, simulate
from tests.autocast.report.test_report import BF16, FP16, conv, mlp
from tests.ranks import mesh


class Does(nn.Module):
    """A module that does what it is given."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what(x)


def findings(model, x=None, rule=None, **options):
    x = torch.randn(4, 8) if x is None else x
    options = {"measure": False} | options
    return [f for f in preflight(model, x, **options).findings if rule in (None, f.rule)]


def inside(what):
    """A model that does it in fp16, in a module of its own, behind a lower precision op."""
    return nn.Sequential(nn.Linear(8, 8), Does(what))


# -- ops that raise


def test_bceloss_is_found_with_its_advice():
    (found,) = findings(inside(lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid())))
    assert (found.severity, found.module, found.op) == ("error", "1", "binary_cross_entropy")
    assert "unsafe to autocast" in found.what
    assert "BCEWithLogitsLoss" in found.fix


def test_bceloss_in_the_loss_is_found_and_the_step_goes_on():
    result = preflight(
        nn.Linear(8, 8),
        torch.randn(4, 8),
        loss_fn=lambda y: nn.BCELoss()(y.sigmoid(), torch.zeros_like(y)),
        measure=False,
    )
    assert [f.op for f in result.errors] == ["binary_cross_entropy"]
    assert "binary_cross_entropy_backward" in {row.op for row in result.report.rows}


def test_every_op_that_raises_is_found():
    def mixes(x):
        out, index = torch.zeros(8, 8, device=x.device), torch.zeros(4, 8, device=x.device)
        return out.scatter(0, index.long(), x)

    model = nn.Sequential(nn.Linear(8, 8), Does(mixes), nn.Linear(8, 8), nn.Sigmoid())
    model.append(Does(lambda x: F.binary_cross_entropy(x, x.detach())))
    found = findings(model, rule="autocast-error")
    assert {(f.module, f.op) for f in found} == {("1", "scatter"), ("4", "binary_cross_entropy")}


def test_what_fails_in_float32_too_is_not_blamed_on_precision():
    (found,) = findings(inside(lambda x: x @ torch.ones(3, 3, device=x.device)))
    assert (found.rule, found.module, found.op) == ("step-fails", "1", "matmul")
    assert "in float32 too" in found.what


def test_an_error_of_the_models_own_names_its_module():
    def fails(x):
        raise KeyError("size")

    (found,) = findings(inside(fails))
    assert (found.severity, found.module) == ("error", "1")
    assert "KeyError" in found.what


def test_bcewithlogits_has_no_finding():
    assert not findings(inside(lambda x: F.binary_cross_entropy_with_logits(x, x.detach())))


# -- what fp16 cannot hold


@pytest.mark.parametrize(
    "what",
    [
        lambda x: x / (x.abs().mean(-1, keepdim=True) + 1e-8),
        lambda x: x / x.abs().amax(-1, keepdim=True).clamp_min(1e-12),
        lambda x: x.masked_fill(x == 0, 1e-9),
    ],
)
def test_an_epsilon_that_fp16_rounds_to_zero(what):
    (found,) = findings(inside(what))
    assert (found.rule, found.severity, found.module) == ("fp16-epsilon", "warning", "1")


def test_the_epsilon_bound_is_where_fp16_rounds_to_zero():
    for eps in (2.0**-25, 3.1e-8, 1e-7, 1e-5):
        is_zero = bool(torch.tensor(eps, dtype=FP16) == 0)
        found = findings(inside(lambda x, eps=eps: x + eps), rule="fp16-epsilon")
        assert bool(found) == is_zero or eps == 2.0**-25


class HalfNorm(nn.Module):
    """A norm in fp16, outside autocast."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm.half()

    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return self.norm(x.half())


@pytest.mark.parametrize("norm", [nn.LayerNorm, lambda n, eps: nn.GroupNorm(2, n, eps)])
def test_a_norms_epsilon(norm):
    (found,) = findings(HalfNorm(norm(8, eps=1e-8)))
    assert (found.rule, found.severity, found.module) == ("fp16-epsilon", "info", "norm")
    assert not findings(HalfNorm(norm(8, eps=1e-5)))
    assert not findings(norm(8, eps=1e-8)), "autocast runs it in float32"


@pytest.mark.parametrize("value", [-1e9, -(10**9), 70_000])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_a_mask_beyond_the_range_of_fp16(dtype, value):
    model = inside(lambda x: x.masked_fill(x > 0, value))
    found = findings(model, rule="fp16-range", dtype=dtype)
    assert [f.severity for f in found] == (["error"] if dtype == FP16 else [])
    assert not findings(inside(lambda x: x.masked_fill(x > 0, float("-inf"))))


def test_a_long_sum_into_fp16():
    x = torch.randn(4096, 8)
    outside = torch.autocast("cuda", enabled=False)

    def summed(x):
        with outside:
            return x.half().sum(0)

    (found,) = findings(Does(summed), x, rule="fp16-reduction")
    assert "4,096 elements" in found.what
    assert not findings(Does(lambda x: x.half().sum(0)), x, rule="fp16-reduction"), "CUDA's fp32 op"
    assert not findings(Does(summed), x[:1024], rule="fp16-reduction")


def test_a_long_product_into_fp16():
    with torch.device("meta"):
        model, x = nn.Linear(50_000, 4), torch.empty(2, 50_000)
    (found,) = findings(model, x)
    assert (found.rule, found.op) == ("fp16-reduction", "addmm")
    assert "50,000 products" in found.what
    assert not findings(model, x, dtype=BF16)


def test_a_loss_in_fp16():
    (found,) = findings(mlp(), loss_fn=lambda y: y.mean(), rule="fp16-loss")
    assert found.severity == "error"
    assert not findings(mlp(), loss_fn=lambda y: y.float().mean(), rule="fp16-loss")


def test_adams_epsilon_with_fp16_parameters():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).half())
    found = findings(model, optimizers=torch.optim.Adam(model.parameters()))
    errors = {f.rule: f for f in found}
    assert errors["optimizer-epsilon"].severity == "error"
    assert (errors["optimizer-epsilon"].module, errors["optimizer-epsilon"].op) == ("1", "Adam")
    assert "eps=1e-08" in errors["optimizer-epsilon"].what
    assert errors["fp16-parameters"].severity == "warning"
    fine = torch.optim.Adam(model.parameters(), eps=1e-6)
    assert "optimizer-epsilon" not in {f.rule for f in findings(model, optimizers=[fine])}


def test_float32_parameters_have_no_optimizer_finding():
    model = mlp()
    assert not findings(model, optimizers=torch.optim.Adam(model.parameters()))


# -- half types that meet


def test_parameters_of_the_other_half_type():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
    (found,) = findings(model, rule="mixed-half")
    assert (found.severity, found.module) == ("error", "1")
    assert not findings(model, rule="mixed-half", dtype=BF16)


def test_half_types_that_meet_in_one_op():
    (found,) = findings(inside(lambda x: x + x.bfloat16()), rule="mixed-half")
    assert (found.severity, found.module, found.op) == ("warning", "1", "add")


def test_a_copy_from_one_half_type_to_the_other_is_a_conversion():
    assert not findings(inside(lambda x: x + torch.empty_like(x).copy_(x.bfloat16())))


def test_a_module_pinned_to_bf16_in_an_fp16_region_has_no_finding():
    model = nn.Sequential(nn.Linear(8, 8), mlp(), nn.Linear(8, 8))
    pin_precision(model[1], "bf16")
    for device_type in ("cuda", "cpu"):
        result = preflight(model, torch.randn(4, 8), device_type, FP16, measure=False)
        assert result.finished
        assert not result.findings
        linears = {row.module: row.compute for row in result.report.rows if row.op == "addmm"}
        assert linears == {"0": "float16", "1.0": "bfloat16", "1.3": "bfloat16", "2": "float16"}


def index(x):
    return torch.zeros(4, dtype=torch.int64, device=x.device)


STRICT = {
    "index_add": lambda wide, x: wide.index_add(0, index(x), x),
    "index_copy": lambda wide, x: wide.index_copy(0, index(x), x),
    "layer_norm": lambda wide, x: outside(F.layer_norm, wide, (8,), x[0], x[0]),
    "matmul": lambda wide, x: outside(torch.matmul, wide, x.t()),
}
LAX = {
    "add": lambda wide, x: wide[:4] + x,
    "cat": lambda wide, x: torch.cat([wide, x]),
    "where": lambda wide, x: torch.where(x > 0, wide[:4], x),
    "linear": lambda wide, x: F.linear(wide, x),
    # CUDA's list of ops that promote.
    "index_put": lambda wide, x: wide.index_put((index(x),), x),
}


def outside(function, *args):
    with torch.autocast("cuda", enabled=False):
        return function(*args)


@pytest.mark.parametrize("op", [*STRICT, *LAX])
def test_an_op_that_takes_no_mixture_of_dtypes(op):
    what = STRICT.get(op) or LAX[op]
    found = findings(inside(lambda x: what(torch.zeros(8, 8, device=x.device), x)))
    assert [(f.severity, f.rule, f.module, f.op) for f in found] == (
        [("error", "mixed-dtypes", "1", op)] if op in STRICT else []
    )


@pytest.mark.parametrize(
    ("policy", "dtype", "severities"),
    [
        (MixedPrecision(param_dtype=BF16), FP16, ["error"]),
        (MixedPrecisionPolicy(param_dtype=BF16), FP16, ["error"]),
        (MixedPrecision(param_dtype=FP16, reduce_dtype=torch.float32), FP16, ["warning"]),
        (MixedPrecisionPolicy(param_dtype=FP16), FP16, ["warning", "warning"]),
        (MixedPrecision(buffer_dtype=BF16), BF16, ["warning"]),
        (MixedPrecisionPolicy(reduce_dtype=BF16), FP16, []),
        (MixedPrecision(), FP16, []),
    ],
    ids=["fsdp1 other", "fsdp2 other", "same", "fp16 sum", "buffers", "bf16 sum", "none"],
)
def test_fsdps_mixed_precision_beside_autocast(policy, dtype, severities):
    found = findings(mlp(), mixed_precision=policy, dtype=dtype, rule="fsdp-precision")
    assert [f.severity for f in found] == severities
    assert {f.op for f in found} <= {type(policy).__name__}


def _wrapped():
    one = FullyShardedDataParallel(
        mlp(),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=BF16),
    )
    two = mlp()
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    fully_shard(two[0], mesh=mesh((2,), ("dp",)), mp_policy=policy)
    fully_shard(two, mesh=mesh((2,), ("dp",)))
    return [
        [(f.rule, f.severity, f.module, f.op) for f in preflight(m, torch.ones(4, 8)).findings]
        for m in (one, two)
    ]


def test_the_policy_of_a_wrapped_model_is_read(ranks2):
    for one, two in ranks2.run(_wrapped):
        assert ("fsdp-precision", "error", "", "FullyShardedDataParallel") in one
        assert ("fsdp-precision", "error", "0", "fully_shard") in two
        for found in (one, two):
            assert [f[1] for f in found if f[0] == "not-simulated"] == ["error"]


# -- speed


def kinds_of(model, shape, dtype=FP16):
    kinds = Kinds(dtype)
    simulate(Job(model, (torch.randn(shape),), {}, "cpu", dtype), kinds.observe)
    return kinds


def test_the_kinds_of_op_are_the_models_own():
    kinds = kinds_of(conv(), (2, 1, 8, 8)).found
    assert {kind.op for kind in kinds} == {"convolution"}
    assert list(kinds.values()) == [["0"], ["3"]]
    assert [kind.shapes[1] for kind in kinds] == [(4, 1, 3, 3), (1, 4, 3, 3)]
    attention = Does(lambda x: F.scaled_dot_product_attention(x, x, x))
    (kind,) = kinds_of(attention, (2, 4, 16, 8)).found
    assert (kind.op, kind.shapes) == ("attention", ((1, 4, 16, 8),) * 3)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv1d(8, 8, 5, stride=2, padding=2),
        nn.Conv2d(64, 128, 3, padding=1, groups=2),
        nn.Conv2d(128, 128, 3, groups=128),
        nn.ConvTranspose2d(48, 24, 4, stride=2, output_padding=1),
        nn.ConvTranspose2d(8, 8, 3, groups=4),
        nn.Conv3d(3, 8, 7, dilation=3),
    ],
    ids=str,
)
def test_every_convolution_can_be_timed(module):
    space = (40,) * (module.weight.dim() - 2)
    (kind,) = kinds_of(module, (2, module.in_channels, *space), BF16).found
    timing = measure(kind, "cpu", BF16, backward=False)
    assert timing.error == ""
    assert timing.half > 0


def slow(kind, device_type, dtype, backward):
    return Timing(2e-2, 1e-4) if kind.op == "convolution" else Timing(1e-4, 1e-4)


def test_what_is_slow_here_is_named_with_its_measure():
    found = probe(kinds_of(conv(), (2, 1, 8, 8)), "cpu", FP16, timer=slow)
    assert [(f.severity, f.module, f.op) for f in found] == [
        ("warning", "0", "convolution"),
        ("warning", "3", "convolution"),
    ]
    assert "200.0 times as long as float32" in found[0].what
    assert "bfloat16" in found[0].fix


def test_what_is_as_fast_or_too_short_to_tell_is_not_named():
    assert not probe(kinds_of(mlp(), (4, 8)), "cpu", FP16, timer=slow)
    kinds = kinds_of(mlp(), (4, 8))
    assert not probe(kinds, "cpu", FP16, timer=lambda *_: Timing(9e-6, 1e-6))


def test_a_kernel_that_is_missing_is_an_error():
    kinds = kinds_of(mlp(), (4, 8))
    found = probe(kinds, "cpu", FP16, timer=lambda *_: Timing(0, 1, "not implemented for 'Half'"))
    assert {(f.severity, f.module) for f in found} == {("error", "0"), ("error", "3")}


def test_a_probe_is_a_measurement_and_kept():
    kind = Kind("matmul", ((16, 64), (64, 64)))
    first = measure(kind, "cpu", BF16)
    assert first.half > 0
    assert first.full > 0
    assert measure(kind, "cpu", BF16) is first
    assert measure(Kind("matmul", ((2, 3), (4, 5))), "cpu", BF16).error


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_speed_is_not_guessed_for_a_device_that_is_not_here():
    (found,) = findings(mlp(), measure=True)
    assert (found.rule, found.severity) == ("speed", "info")
    assert "not measured" in found.what


# -- as read


def test_a_finding_is_a_frozen_value():
    finding = Finding("info", "speed", "", "mm", "what", "fix")
    with pytest.raises(dataclasses.FrozenInstanceError):
        finding.severity = "error"
    assert finding == Finding(**finding.to_dict())


def test_the_worst_comes_first_and_each_once():
    low, high = (Finding(s, "r", "", "mm", "what", "fix") for s in ("info", "error"))
    assert in_order([low, high, low]) == (high, low)


def test_findings_of_modules_alike_are_one():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Does(lambda x: x + 1e-8)) for _ in "ab"))
    text = "\n".join(as_lines(preflight(model, torch.randn(4, 8), measure=False).findings))
    assert "*.1  x2: add  [fp16-epsilon]" in text
    assert text.count("fp16-epsilon") == 1


def test_all_of_it_is_printed_and_written(tmp_path):
    result = preflight(inside(lambda x: x + 1e-8), torch.randn(4, 8))
    text = str(result)
    assert text.index("Precision report") < text.index("findings") < text.index("fp16-epsilon")
    result.to_json(tmp_path / "preflight.json")
    values = json.loads((tmp_path / "preflight.json").read_text())
    assert [Finding(**f) for f in values["findings"]] == list(result.findings)
    assert values["report"]["totals"] == result.report.totals.to_dict()
    from rich.console import Console

    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(result)
    assert "fp16-epsilon" in capture.get()


def test_a_model_with_nothing_to_mend_says_so():
    assert as_lines(preflight(mlp(), torch.randn(4, 8), measure=False).findings) == ["No findings."]


class PackedSequences(nn.Module):
    """A bidirectional LSTM over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Leave out the padding."""
        lengths = (ids != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(padded.mean(1))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_packed_sequences_are_simulated(device_type):
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
    result = preflight(PackedSequences(), ids, device_type, torch.bfloat16, measure=False)
    assert result.finished, str(result)
    assert "lstm" in result.visited


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_simulated_without_packing_too(kind):
    result = preflight(kind(8, 8, 2, bidirectional=True), torch.ones(3, 2, 8), measure=False)
    assert result.finished, str(result)


def test_a_number_can_be_formatted():
    result = preflight(inside(lambda x: x * len(f"{x.mean():.3f}")), torch.ones(2, 8))
    assert result.finished, str(result)


class ToNumPy(nn.Module):
    """Hands its output to NumPy, which has no bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by a number that NumPy works out."""
        y = self.layer(x)
        return y * float(y.detach().cpu().numpy().max())


def test_numpy_that_takes_no_bfloat16_is_an_error_of_the_region_and_not_of_the_step():
    pytest.importorskip("numpy")
    x = torch.ones(2, 8)
    with pytest.raises(TypeError), torch.autocast("cpu"):
        ToNumPy()(x)
    result = preflight(ToNumPy(), x, "cpu", torch.bfloat16, measure=False)
    assert [f.rule for f in result.errors] == ["autocast-error"]
    assert result.finished


class InATuple(nn.Module):
    """Computes with a parameter that it keeps in a tuple too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.weights = (self.weight,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x @ self.weights[0]


def test_a_parameter_kept_in_a_tuple_is_on_the_device_too():
    result = preflight(InATuple(), torch.ones(2, 8), "cuda", torch.float16, measure=False)
    assert [f.rule for f in result.errors] == []
    (product,) = [row for row in result.report.rows if row.op == "mm" and row.phase == "forward"]
    assert product.inputs == ("float16",)

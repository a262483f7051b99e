"""A model cast to a lower precision: its parameters and buffers, its inputs, and its outputs."""

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distamp import PrecisionLevel, cast_model, initialize, set_module_precision
from tests.levels.nets import batches, llama, loss_of, net
from tests.on_ranks import on_ranks
from tests.ranks import mesh

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BATCH = next(batches(1))


def half_of(level: str) -> torch.dtype:
    """Return the dtype to which a level casts a model."""
    return PrecisionLevel.from_name(level).param


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- parameters and buffers ------------------------------------------------------------------------


class DerivedBatchNorm(nn.BatchNorm1d):
    pass


def batch_norms() -> list[nn.Module]:
    """Return batch norms of every kind."""
    kinds = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, DerivedBatchNorm]
    norms = [kind(3) for kind in kinds]
    norms.append(nn.BatchNorm1d(3, affine=False))
    norms.append(nn.BatchNorm1d(3, track_running_stats=False))
    return norms


def floating_dtypes(module: nn.Module) -> set[torch.dtype]:
    tensors = [*module.parameters(), *module.buffers()]
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def check_dtypes_after_cast(level: str, dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    """Check the parameters and buffers of layers and of batch norms."""
    layers = nn.ModuleList([nn.Linear(2, 3), nn.LayerNorm(3), nn.GRU(3, 2)])
    layers[0].register_buffer("mean", torch.zeros(2))
    norms = nn.ModuleList(batch_norms())
    model = nn.ModuleList([layers, norms])
    assert cast_model(model, level) is model
    for layer in layers:
        assert floating_dtypes(layer) == {dtype}
    for norm in norms:
        assert floating_dtypes(norm) <= {norm_dtype}


@pytest.mark.parametrize("level", ["fp32", "fp16", "bf16"])
def test_a_level_with_float32_weights_casts_nothing(level):
    check_dtypes_after_cast(level, F32, F32)


@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
def test_o2_casts_everything_except_batch_norms(level):
    check_dtypes_after_cast(level, half_of(level), F32)


@pytest.mark.parametrize("level", ["fp16-O3", "bf16-O3"])
def test_o3_casts_batch_norms_as_well(level):
    check_dtypes_after_cast(level, half_of(level), half_of(level))


def test_batch_norms_are_cast_if_apexs_argument_demands_it():
    norms = nn.ModuleList(batch_norms())
    cast_model(norms, "fp16-O2", keep_batchnorm_fp32="False")
    for norm in norms:
        assert floating_dtypes(norm) <= {F16}


@pytest.mark.parametrize("level", ["fp16-O2", "fp16-O3", "bf16-O2", "bf16-O3"])
def test_integer_buffers_are_not_cast(level):
    layer = nn.Linear(2, 3)
    layer.register_buffer("count", torch.arange(2))
    norm = nn.BatchNorm1d(3)
    cast_model(nn.Sequential(layer, norm), level)
    assert layer.count.dtype is torch.int64
    assert norm.num_batches_tracked.dtype is torch.int64


def test_a_buffer_outside_of_checkpoints_is_cast():
    """Swin adds such a mask of shifted windows to half scores."""
    module = nn.Linear(2, 2)
    module.register_buffer("attn_mask", torch.zeros(2), persistent=False)
    assert cast_model(module, "bf16-O2").attn_mask.dtype is BF16


# -- inputs and outputs ----------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Echo(nn.Module):
    """Records its inputs and returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.inputs: Any = None

    def forward(self, *args, **kwargs):
        self.inputs = args, kwargs
        return self.inputs


def assert_only_floats_have_dtype(echoed: Any, dtype: torch.dtype) -> None:
    """Check the arguments of `Echo` after they were cast."""
    (first, (count, deep)), keywords = echoed
    pair = keywords["pair"]
    for tensor in (first, deep["deep"], pair.first):
        assert tensor.dtype is dtype
    for tensor in (count, pair.second):
        assert tensor.dtype is torch.int64
    assert keywords["name"] == "text"


def test_floating_inputs_are_cast_in_and_outputs_out_however_nested():
    model = cast_model(Echo(), "fp16-O2")
    x = torch.ones(2)
    count = torch.arange(2)
    outputs = model(x, [count, {"deep": x.double()}], pair=Pair(x, count), name="text")
    assert_only_floats_have_dtype(model.inputs, F16)
    assert_only_floats_have_dtype(outputs, F32)


@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
def test_a_mask_of_the_lowest_number_stays_finite_and_infinities_stay(level):
    model = cast_model(Echo(), level)
    lowest = torch.finfo(F32).min
    lowest_half = torch.finfo(model.weight.dtype).min
    model(torch.tensor([lowest, -torch.inf, 1.0]))
    ((mask,), _) = model.inputs
    assert mask.tolist() == [lowest_half, -torch.inf, 1.0]


def unusual_input(kind: str) -> Tensor:
    if kind == "sparse":
        return torch.eye(3).to_sparse()
    if kind == "sparse rows":
        return torch.eye(3).to_sparse_csr()
    layout = torch.jagged if kind == "jagged" else torch.strided
    return torch.nested.nested_tensor([torch.ones(2, 3)], layout=layout)


@pytest.mark.parametrize("kind", ["sparse", "sparse rows", "nested", "jagged"])
@pytest.mark.filterwarnings("ignore:.*prototype stage|.*beta state")
def test_sparse_and_nested_inputs_are_cast_in(kind):
    model = cast_model(nn.Linear(3, 3), "fp16-O2")
    inputs = []
    model.forward = inputs.append
    original = unusual_input(kind)
    model(original)
    assert inputs[0].dtype is F16
    assert inputs[0].layout is original.layout


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copy_model", [copy.deepcopy, pickled])
def test_a_copy_casts_as_the_original_does(copy_model):
    model = cast_model(nn.Linear(3, 2), "fp16-O2")
    copied = copy_model(model)
    x = torch.randn(4, 3)
    assert torch.equal(copied(x), model(x))


def test_a_model_that_is_cast_twice_casts_once():
    model = nn.Linear(3, 2)
    cast_model(model, "fp16-O2")
    cast_model(model, "fp16-O2")
    x = torch.randn(4, 3)
    expected = nn.functional.linear(x.half(), model.weight, model.bias).float()
    assert torch.equal(model(x), expected)


# -- module_precision= -----------------------------------------------------------------------------


def names_in_fp32(model: nn.Module) -> set[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, tensor in tensors if tensor.dtype is F32}


def test_the_last_pattern_that_matches_counts_and_an_earlier_pin_stays():
    model = net(batchnorm=False)
    set_module_precision(model.embedding, "fp32")
    cast_model(model, "fp16-O2", module_precision={"*": "fp32", "hidden": "fp16", "output": "fp16"})
    assert names_in_fp32(model) == {"embedding.weight", "norm.weight", "norm.bias"}
    context, following = BATCH
    assert loss_of(model(context), following).isfinite()


def test_a_module_that_shares_the_weight_of_a_pinned_one_computes_in_its_dtype():
    embedding = nn.Embedding(8, 4)
    head = nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Linear(4, 4), head)
    cast_model(model, "bf16-O2", module_precision={"2": "fp32"})
    assert embedding.weight is head.weight
    assert names_in_fp32(model) == {"0.weight"}
    model(torch.arange(3)).sum().backward()
    assert head.weight.grad.dtype is F32


def test_patterns_are_a_part_of_the_level_that_a_model_was_cast_for():
    pins = {"hidden": "fp32"}
    model = cast_model(net(), "fp16-O2", module_precision=pins)
    level = PrecisionLevel.from_name("fp16-O2", module_precision=pins)
    amp = initialize(model, None, level)
    assert amp.level.pins == (("hidden", "fp32"),)


# -- models of transformers, which declare modules in float32 --------------------------------------


def cosines_at(model: Any, position: int, dtype: torch.dtype) -> Tensor:
    """Return the cosines of a rotary embedding at a position."""
    hidden = torch.ones(1, dtype=dtype)
    cosines, _ = model.model.rotary_emb(hidden, torch.tensor([[position]]))
    return cosines.float()


class RotaryEmbedding(nn.Module):
    """A table under the name that transformers gives to it."""

    __module__ = "transformers.models.any"

    def __init__(self) -> None:
        super().__init__()
        table = torch.rand(4)
        self.register_buffer("inv_freq", table, persistent=False)


@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O3"])
def test_a_table_with_the_name_of_a_rotary_embedding_stays_fp32(level):
    """The tests below build models of transformers, which takes seconds to import."""
    rotary = RotaryEmbedding()
    model = nn.Sequential(nn.Linear(4, 4), rotary)
    cast_model(model, level)
    assert names_in_fp32(model) == {"1.inv_freq"}


@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
def test_a_module_that_an_owner_declares_as_transformers_does_stays_fp32(level):
    model = nn.Module()
    model.wi = nn.Linear(4, 4)
    model.wo = nn.Linear(4, 4)
    model._keep_in_fp32_modules = ["wo"]
    cast_model(model, level)
    assert names_in_fp32(model) == {"wo.weight", "wo.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O3"])
def test_tables_of_rotary_embeddings_keep_their_angles(level):
    model = cast_model(llama(), level)
    plain = llama()
    half = half_of(level)
    assert torch.equal(cosines_at(model, 4095, half), cosines_at(plain, 4095, half))
    assert "model.rotary_emb.inv_freq" in names_in_fp32(model)
    frequencies = plain.model.rotary_emb.inv_freq
    rounding = frequencies.to(half).float() - frequencies
    assert 4095 * rounding.abs().max() > 0.05, "a cast table would be far off"


def t5() -> Any:
    """Return a T5; transformers keeps its ``wo``, and so the residual stream, in float32."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0)
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
def test_a_module_that_transformers_declares_stays_fp32(level):
    model = cast_model(t5(), level)
    ids = torch.arange(8)[None]
    modules = {name.rsplit(".", 2)[1] for name in names_in_fp32(model)}
    assert modules == {"wo"}
    assert model(input_ids=ids, labels=ids).loss.isfinite()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["encoder.final_layer_norm", "*layer_norm"])
@pytest.mark.parametrize("level", ["fp16-O2", "fp16-O3", "bf16-O2", "bf16-O3"])
def test_a_pinned_norm_returns_the_models_dtype_from_a_float32_residual_stream(level, pattern):
    ids = torch.arange(8)[None]
    expected = t5()(input_ids=ids, labels=ids).loss
    model = t5()
    settings = {"module_precision": {pattern: "fp32"}}
    if level == "fp16-O2":
        settings["init_scale"] = 64.0
    amp = initialize(model, sgd(model), level, **settings)
    output = amp.model(input_ids=ids, labels=ids)
    loss = output.loss.float()
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    amp.backward(loss)
    assert amp.step()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_pinned_head_keeps_the_precision_of_its_logits(level, tied):
    model = llama(tie_word_embeddings=tied)
    pins = {"lm_head": "fp32", "*norm": "fp32"}
    cast_model(model, level, module_precision=pins)
    ids = torch.arange(8)[None]
    logits = model(ids).logits
    half = half_of(level)
    assert not torch.equal(logits, logits.to(half).float())


# -- modules that get float32 inputs in a half model -----------------------------------------------


class Conditioned(nn.Module):
    """A model that embeds a timestep, which is float32 at every level."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        angles = torch.linspace(0.0, 1.0, 4).expand(x.shape[0], 4)
        return self.out(self.embed(angles))


@pytest.mark.parametrize("pins", [{"embed": "fp32"}, {"embed*": "fp32"}])
@pytest.mark.parametrize("level", ["fp16-O3", "bf16-O2"])
def test_a_pinned_module_inside_of_a_pinned_one_returns_float32(level, pins):
    """The outer module rounds once at its end, and nothing is rounded inside of it."""
    torch.manual_seed(0)
    model = cast_model(Conditioned(), level, module_precision=pins)
    dtypes = {}

    def record(name: str) -> None:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            dtypes[name] = output.dtype

        model.get_submodule(name).register_forward_hook(hook)

    for name in ("embed.0", "embed", "out"):
        record(name)
    model(torch.ones(2, 4))
    half = half_of(level)
    assert dtypes == {"embed.0": F32, "embed": half, "out": half}


@on_ranks(2)
def test_a_pinned_module_with_float32_inputs_returns_the_models_dtype_under_a_policy():
    model = Conditioned()
    device_mesh = mesh((2,), ("shard",))
    fully_shard(model.embed, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    amp = initialize(model, sgd(model), "bf16-O2", module_precision={"embed": "fp32"})
    output = amp.model(torch.ones(2, 4))
    amp.backward(output.float().square().mean())
    assert amp.step()


# -- ranks with different modules ------------------------------------------------------------------


@on_ranks(2)
def test_a_pattern_needs_a_match_on_one_rank_alone():
    """Each rank has another part of a model, as a stage of a pipeline has."""
    model = net() if dist.get_rank() == 0 else nn.Sequential()
    model.add_module("head", nn.Linear(2, 2))
    pins = {"hidden": "fp32", "head": "fp32"}
    cast_model(model, "bf16", module_precision=pins)
    amp = initialize(model, sgd(model), "bf16", module_precision=pins)
    report = amp.check(lambda: amp.model.head(torch.ones(1, 2)))
    text = "The pattern 'hidden' of module_precision= matches no module on rank 1."
    assert text in report.unseen


@on_ranks(2)
def test_one_rank_alone_may_cast_and_run_a_model():
    """The casts and the model send nothing, so the other rank goes on without this one."""
    if dist.get_rank() == 0:
        pins = {"hidden": "fp32", "module of another rank": "fp32"}
        model = cast_model(net(), "bf16-O3", module_precision=pins)
        amp = initialize(model, None, "bf16-O3", module_precision=pins)
        output = amp.model(torch.zeros(2, 4, dtype=torch.long))
        assert output.isfinite().all()

"""A model cast to a lower precision: what is cast, what stays, and what goes in and comes out."""

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


class OwnBatchNorm(nn.BatchNorm1d):
    pass


BATCHNORMS = {
    "1d": lambda: nn.BatchNorm1d(3),
    "2d": lambda: nn.BatchNorm2d(3),
    "3d": lambda: nn.BatchNorm3d(3),
    "synced": lambda: nn.SyncBatchNorm(3),
    "a subclass": lambda: OwnBatchNorm(3),
    "no affine parameters": lambda: nn.BatchNorm1d(3, affine=False),
    "no statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
}


def floating(module: nn.Module) -> set[torch.dtype]:
    tensors = [*module.parameters(), *module.buffers()]
    return {t.dtype for t in tensors if t.is_floating_point()}


@pytest.mark.parametrize(
    ("level", "overrides", "dtype", "norm"),
    [
        ("fp16-O2", {}, F16, F32),
        ("fp16-O3", {}, F16, F16),
        ("bf16-O2", {}, BF16, F32),
        ("bf16-O3", {}, BF16, BF16),
        ("fp16-O2", {"keep_batchnorm_fp32": "False"}, F16, F16),
        ("fp32", {}, F32, F32),
        ("fp16", {}, F32, F32),
        ("bf16", {}, F32, F32),
    ],
)
def test_what_is_cast_and_what_stays(level, overrides, dtype, norm):
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.GRU(3, 2))
    model[0].register_buffer("seen", torch.zeros(2))
    model[0].register_buffer("count", torch.arange(2))
    norms = nn.Sequential(*(make() for make in BATCHNORMS.values()))
    assert cast_model(nn.Sequential(model, norms), level, **overrides)[0] is model
    assert [floating(module) for module in model] == [{dtype}] * 3
    assert [floating(module) - {norm} for module in norms] == [set()] * len(norms)
    assert model[0].count.dtype is norms[0].num_batches_tracked.dtype is torch.int64


class Both(NamedTuple):
    first: Tensor
    second: Tensor


class Echo(nn.Module):
    """Returns what it is given, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return args, kwargs


def test_floating_inputs_are_cast_in_and_outputs_out_however_nested():
    model = cast_model(Echo(), "fp16-O2")
    x, count = torch.ones(2), torch.arange(2)
    returned = model(x, [count, {"deep": x.double()}], both=Both(x, count), name="text")
    for dtype, ((one, (two, deep)), given) in ((F16, model.seen), (F32, returned)):
        assert one.dtype is deep["deep"].dtype is given["both"].first.dtype is dtype
        assert two.dtype is given["both"].second.dtype is torch.int64
        assert given["name"] == "text"


@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
def test_a_mask_of_the_lowest_number_stays_finite_and_infinities_stay(level):
    model = cast_model(Echo(), level)
    model(torch.tensor([torch.finfo(F32).min, -torch.inf, 1.0]))
    half = model.weight.dtype
    ((mask,), _) = model.seen
    assert mask.tolist() == [torch.finfo(half).min, -torch.inf, 1.0]


@pytest.mark.parametrize(
    "given",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged),
    ],
    ids=["sparse", "rows", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore:.*prototype stage|.*beta state")
def test_sparse_and_nested_inputs_are_cast_in(given):
    model, seen = cast_model(nn.Linear(3, 3), "fp16-O2"), []
    model.forward = seen.append
    model(given())
    assert (seen[0].dtype, seen[0].layout) == (F16, given().layout)


def test_copies_and_pickles_cast_as_the_original_does_and_twice_is_once():
    model = cast_model(cast_model(nn.Linear(3, 2), "fp16-O2"), "fp16-O2")
    x = torch.randn(4, 3)
    wanted = nn.functional.linear(x.half(), model.weight, model.bias).float()
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), wanted)


# -- what stays float32, by whose word; and pins by pattern ----------------------------------------

BATCH = next(batches(1))


def in_fp32(model: nn.Module) -> set[str]:
    both = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in both if tensor.dtype is F32}


def test_the_last_pattern_that_matches_counts_and_one_pinned_before_is_kept():
    model = net(batchnorm=False)
    set_module_precision(model.embedding, "fp32")
    cast_model(model, "fp16-O2", module_precision={"*": "fp32", "hidden": "fp16", "output": "fp16"})
    assert in_fp32(model) == {"embedding.weight", "norm.weight", "norm.bias"}
    assert loss_of(model(BATCH[0]), BATCH[1]).isfinite()


def test_who_shares_a_weight_with_a_pinned_module_computes_in_its_dtype():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    cast_model(model, "bf16-O2", module_precision={"2": "fp32"})
    assert model[0].weight is model[2].weight
    assert in_fp32(model) == {"0.weight"}
    model(torch.arange(3)).sum().backward()
    assert model[0].weight.grad.dtype is F32


def test_pins_are_part_of_what_a_model_was_cast_for():
    model = cast_model(net(), "fp16-O2", module_precision={"hidden": "fp32"})
    level = PrecisionLevel.from_name("fp16-O2", module_precision={"hidden": "fp32"})
    assert initialize(model, None, level).level.pins == (("hidden", "fp32"),)


# -- what its owner declared -----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O3"])
def test_tables_of_rotary_embeddings_keep_their_angles(level):
    model, plain = cast_model(llama(), level), llama()
    half, at = PrecisionLevel.from_name(level).param, torch.tensor([[4095]])
    cosines = [m.model.rotary_emb(torch.ones(1, dtype=half), at)[0].float() for m in (model, plain)]
    assert torch.equal(*cosines)
    assert in_fp32(model) >= {"model.rotary_emb.inv_freq"}
    rounded = plain.model.rotary_emb.inv_freq.to(half).float() - plain.model.rotary_emb.inv_freq
    assert 4095 * rounded.abs().max() > 0.05, "a cast table would be far off"


def t5() -> Any:
    """A T5 whose owner keeps ``wo``, and so the residual stream after it, in float32."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0)
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("pattern", ["encoder.final_layer_norm", "*layer_norm"])
@pytest.mark.parametrize("level", ["fp16-O2", "fp16-O3", "bf16-O2", "bf16-O3"])
def test_a_pinned_norm_returns_the_models_dtype_from_a_float32_residual_stream(level, pattern):
    ids = torch.arange(8)[None]
    wanted = t5()(input_ids=ids, labels=ids).loss
    model = t5()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"init_scale": 64.0} if level == "fp16-O2" else {}
    amp = initialize(model, optimizer, level, module_precision={pattern: "fp32"}, **settings)
    loss = amp.model(input_ids=ids, labels=ids).loss.float()
    torch.testing.assert_close(loss, wanted, rtol=0.02, atol=0)
    amp.backward(loss)
    assert amp.step()


class Conditioned(nn.Module):
    """A model that embeds a timestep, which is float32, beside its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        angles = torch.linspace(0.0, 1.0, 4).expand(x.shape[0], 4)
        return self.out(self.embed(angles))


@pytest.mark.parametrize("pins", [{"embed": "fp32"}, {"embed*": "fp32"}])
@pytest.mark.parametrize("level", ["fp16-O3", "bf16-O2"])
def test_a_module_pinned_inside_of_another_leaves_float32_there(level, pins):
    """One rounding at the end of the outer module, and none between those in it."""
    torch.manual_seed(0)
    model = cast_model(Conditioned(), level, module_precision=pins)
    seen = {}
    for name in ("embed.0", "embed", "out"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: output.dtype})
        )
    model(torch.ones(2, 4))
    half = PrecisionLevel.from_name(level).param
    assert seen == {"embed.0": torch.float32, "embed": half, "out": half}


@on_ranks(2)
def test_a_module_of_float32_inputs_returns_the_models_dtype_under_a_policy():
    model = Conditioned()
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    fully_shard(model.embed, mesh=mesh((2,), ("shard",)))
    fully_shard(model, mesh=mesh((2,), ("shard",)), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = initialize(model, optimizer, "bf16-O2", module_precision={"embed": "fp32"})
    amp.backward(amp.model(torch.ones(2, 4)).float().square().mean())
    assert amp.step()


@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
def test_what_a_model_of_transformers_declares_stays_fp32(level):
    model = cast_model(t5(), level)
    ids = torch.arange(8)[None]
    assert {name.rsplit(".", 2)[1] for name in in_fp32(model)} == {"wo"}
    assert model(input_ids=ids, labels=ids).loss.isfinite()


@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_pinned_head_keeps_the_precision_of_what_the_model_returns(level, tied):
    model, ids = llama(tie_word_embeddings=tied), torch.arange(8)[None]
    cast_model(model, level, module_precision={"lm_head": "fp32", "*norm": "fp32"})
    logits = model(ids).logits
    assert not torch.equal(logits, logits.to(PrecisionLevel.from_name(level).param).float())


def test_other_buffers_of_no_checkpoint_are_cast_with_the_model():
    """As the mask of Swin's shifted windows, which is added to half scores."""
    module = nn.Linear(2, 2)
    module.register_buffer("attn_mask", torch.zeros(2), persistent=False)
    assert cast_model(module, "bf16-O2").attn_mask.dtype is BF16


# -- on ranks --------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_pattern_needs_a_match_on_one_rank_alone():
    """Each rank has another part of a model, as a pipeline's stages."""
    model = nn.Sequential() if dist.get_rank() else net()
    model.add_module("head", nn.Linear(2, 2))
    pins = {"hidden": "fp32", "head": "fp32"}
    cast_model(model, "bf16", module_precision=pins)
    amp = initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", module_precision=pins
    )
    unseen = amp.check(lambda: amp.model.head(torch.ones(1, 2))).unseen
    assert "The pattern 'hidden' of module_precision= matches no module on rank 1." in unseen


@on_ranks(2)
def test_one_rank_alone_may_cast_and_run_a_model():
    """Neither sends anything: the other rank goes on without it."""
    if dist.get_rank() == 0:
        model = cast_model(
            net(), "bf16-O3", module_precision={"hidden": "fp32", "of another": "fp32"}
        )
        pins = {"hidden": "fp32", "of another": "fp32"}
        amp = initialize(model, None, "bf16-O3", module_precision=pins)
        assert amp.model(torch.zeros(2, 4, dtype=torch.long)).isfinite().all()

"""What stays float32 in a cast model, by whose word; and pins by pattern."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from distamp import Precision, cast_model, initialize, pin_precision
from distamp.errors import SettingError
from tests.initialize.nets import batches, loss_of, net
from tests.ranks import RankError, RankPool, mesh

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
EPS = {F16: 2.0**-10, BF16: 2.0**-7}
BATCH = next(batches(1))
PINS = {"no*": "fp32", "output": "fp32:keep"}


def in_fp32(model: nn.Module) -> set[str]:
    both = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in both if tensor.dtype is F32}


def logits_of(model: nn.Module, level: str, precision: dict[str, str]) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = initialize(model, optimizer, level, precision=precision)
    with amp.autocast():
        return amp.model(BATCH[0])


@pytest.mark.parametrize("level", ["O2", "O3", "bf16-O2", "bf16-O3"])
def test_named_modules_stay_fp32_and_the_layers_around_compute_in_the_levels_dtype(level):
    model, seen = net(batchnorm=False), {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda module, args, out, name=name: seen.update({name: out.dtype})
        )
    half = Precision.of(level).param
    out = logits_of(model, level, {"n*rm": "fp32", "output": "fp32:keep"})
    assert in_fp32(model) == {"norm.weight", "norm.bias", "output.weight", "output.bias"}
    assert seen == {"embedding": half, "hidden": half, "norm": half, "output": F32}
    wanted = net(batchnorm=False)(BATCH[0])
    assert (out - wanted).norm() < 4 * EPS[half] * wanted.norm()


def test_the_last_pattern_that_matches_counts_and_one_pinned_before_is_kept():
    model = net(batchnorm=False)
    pin_precision(model.embedding, "fp32")
    cast_model(model, "O2", precision={"*": "fp32", "hidden": "fp16", "output": "fp16"})
    assert in_fp32(model) == {"embedding.weight", "norm.weight", "norm.bias"}
    assert loss_of(model(BATCH[0]), BATCH[1]).isfinite()


def test_who_shares_a_weight_with_a_pinned_module_computes_in_its_dtype():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    cast_model(model, "bf16-O2", precision={"2": "fp32"})
    assert model[0].weight is model[2].weight
    assert in_fp32(model) == {"0.weight"}
    model(torch.arange(3)).sum().backward()
    assert model[0].weight.grad.dtype is F32


def test_a_model_that_is_pinned_as_a_whole_is_not_cast():
    with pytest.raises(SettingError, match="take O0"):
        cast_model(pin_precision(net(), "fp32"), "O2")


@pytest.mark.parametrize(
    ("precision", "says"),
    [
        ({"*.nrom": "fp32"}, r"pattern '\*.nrom', which no module's name matches .* are 'norm'"),
        ({"norm": "fp64"}, r"'norm': 'fp64'"),
        (["norm"], "must map patterns"),
    ],
)
@pytest.mark.parametrize("level", ["bf16", "O2"])
def test_patterns_that_cannot_be_meant(precision, says, level):
    model = net()
    for call in (cast_model, lambda *args, **kw: initialize(args[0], None, args[1], **kw)):
        with pytest.raises(SettingError, match=says):
            call(model, level, precision=precision)
    assert all(p.dtype is F32 for p in model.parameters())


def test_pins_are_part_of_what_a_model_was_cast_for():
    model = cast_model(net(), "O2", precision={"hidden": "fp32"})
    level = Precision.of("O2", precision={"hidden": "fp32"})
    assert initialize(model, None, level).precision.pins == (("hidden", "fp32"),)
    with pytest.raises(SettingError, match="give both the same"):
        initialize(model, None, "O2")


def test_in_a_region_pinned_modules_leave_their_weights_and_their_output_alone():
    model = net(batchnorm=False)
    assert logits_of(model, "bf16", PINS).dtype is F32
    assert initialize(net(batchnorm=False), None, "bf16").model(BATCH[0]).dtype is F32
    pin_precision(model.output, None)
    assert logits_of(model, "bf16", {"norm": "fp32"}).dtype is BF16


# -- what its owner declared -----------------------------------------------------------------------


def llama(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | heads | settings))


@pytest.mark.parametrize("level", ["O2", "bf16-O3"])
def test_tables_of_rotary_embeddings_keep_their_angles(level):
    model, plain = cast_model(llama(), level), llama()
    half, at = Precision.of(level).param, torch.tensor([[4095]])
    cosines = [m.model.rotary_emb(torch.ones(1, dtype=half), at)[0].float() for m in (model, plain)]
    assert torch.equal(*cosines)
    assert in_fp32(model) >= {"model.rotary_emb.inv_freq"}
    rounded = plain.model.rotary_emb.inv_freq.to(half).float() - plain.model.rotary_emb.inv_freq
    assert 4095 * rounded.abs().max() > 0.05, "a cast table would be far off"


@pytest.mark.parametrize("level", ["O2", "bf16-O2"])
def test_what_a_model_of_transformers_declares_stays_fp32(level):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=2, decoder_start_token_id=0)
    model = cast_model(transformers.T5ForConditionalGeneration(config), level)
    ids = torch.arange(8)[None]
    assert {name.rsplit(".", 2)[1] for name in in_fp32(model)} == {"wo"}
    assert model(input_ids=ids, labels=ids).loss.isfinite()


@pytest.mark.parametrize("level", ["O2", "bf16-O2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_pinned_head_keeps_the_precision_of_what_the_model_returns(level, tied):
    model, ids = llama(tie_word_embeddings=tied), torch.arange(8)[None]
    cast_model(model, level, precision={"lm_head": "fp32", "*norm": "fp32"})
    logits = model(ids).logits
    assert not torch.equal(logits, logits.to(Precision.of(level).param).float())


def test_other_buffers_of_no_checkpoint_are_cast_with_the_model():
    """As the mask of Swin's shifted windows, which is added to half scores."""
    module = nn.Linear(2, 2)
    module.register_buffer("attn_mask", torch.zeros(2), persistent=False)
    assert cast_model(module, "bf16-O2").attn_mask.dtype is BF16


# -- on ranks --------------------------------------------------------------------------------------


def parts(precision: dict[str, str]) -> str:
    """Each rank has another part of a model, as a pipeline's stages."""
    model = nn.Sequential() if dist.get_rank() else net()
    model.add_module("head", nn.Linear(2, 2))
    try:
        cast_model(model, "bf16", precision=precision)
    except SettingError as error:
        return str(error)
    return ""


def test_a_pattern_needs_a_match_on_one_rank_alone_and_without_one_raises_on_all(ranks2: RankPool):
    assert ranks2.run(parts, {"hidden": "fp32", "head": "fp32"}) == ["", ""]
    one, other = ranks2.run(parts, {"hiden": "fp32"})
    assert "the nearest are 'hidden', 'head'" in one
    assert one == other


def apart() -> None:
    cast_model(net(), "bf16", precision={"hidden" if dist.get_rank() else "norm": "fp32"})


def test_ranks_that_pin_differently_are_told(ranks2: RankPool):
    with pytest.raises(RankError, match=r"ranks were given different precision=: rank 0 {'norm'"):
        ranks2.run(apart)


def flat() -> list[str]:
    model, said = net(batchnorm=False), []
    policy = MixedPrecision(param_dtype=F16)
    wrapped = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True, mixed_precision=policy
    )
    cast = cast_model(net(batchnorm=False), "O2", precision=PINS)
    inside = net(batchnorm=False)
    block: Any = nn.Sequential(inside)
    for part in (inside.hidden, block):
        fully_shard(part, mesh=mesh((2,), ("shard",)), mp_policy=MixedPrecisionPolicy(F16))
    cases = (
        (wrapped, PINS),
        (DistributedDataParallel(cast), {"norm": "fp32"}),
        (block, {"0": "fp32"}),
    )
    for model, precision in cases:
        with pytest.raises(SettingError) as refused:
            initialize(model, None, "O2", precision=precision)
        said.append(str(refused.value))
    return said


def test_pins_that_a_wrapper_would_undo_are_refused(ranks2: RankPool):
    for one, two, three in ranks2.run(flat):
        assert "'norm' is to compute in fp32, and FullyShardedDataParallel gathers" in one
        assert "give both the same" in two
        assert "'0' is to compute in fp32, and fully_shard gathers" in three

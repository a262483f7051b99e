"""compare_gradients: clean layouts match, and a wrong gradient is named with its cause."""

import json
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from distamp.errors import CallOrderError, ConfigError, DistampError
from distamp.report import compare_gradients
from tests.on_ranks import on_devices, on_ranks
from tests.place import rank_device
from tests.quick_cases import quick_cases
from tests.ranks import mesh
from tests.report.gradient_plants import (
    PLANTS,
    expert_case,
    hand_case,
    pipeline_case,
    run_plants,
    score,
)
from tests.report.gradient_setups import (
    Case,
    cross_entropy,
    in_autocast,
    net_case,
    other_weights,
    tokens_and_targets,
)
from tests.report.setups import Net, parallel, sharded
from tests.scaler.matrix.layout import LAYERS
from tests.scaler.matrix.layouts import ALL_LAYOUTS
from tests.scaler.matrix.reference import KINDS, batch, loss_of

BF16 = torch.bfloat16
PRECISIONS = [None, BF16]
# The quick suite compares experts under autocast.
FP32_AND_SLOW_BF16 = [None, pytest.param(BF16, marks=pytest.mark.slow)]


def fsdp1(net: Net, **settings: Any) -> nn.Module:
    settings["device_id"] = torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about NO_SHARD
        net.blocks[0] = FullyShardedDataParallel(net.blocks[0], **settings)
        return FullyShardedDataParallel(net, **settings)


def compiled(net: Net) -> nn.Module:
    return torch.compile(DistributedDataParallel(net), backend="aot_eager")


def zero(net: Net) -> nn.Module:
    model = DistributedDataParallel(net)
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-3)
    return model


def tensor_parallel(net: Net) -> nn.Module:
    return parallel(net, mesh((dist.get_world_size(),), ("tp",)))


def sequence_parallel(net: Net, device_mesh: Any = None) -> nn.Module:
    device_mesh = device_mesh or mesh((2,), ("tp",))
    net = parallel(net, device_mesh, sequence=True)
    # The loss takes whole logits.
    net.head.register_forward_hook(lambda _, __, logits: whole(logits, device_mesh))
    return net


def whole(logits: torch.Tensor, device_mesh: Any) -> torch.Tensor:
    return DTensor.from_local(logits, device_mesh, [Shard(-1)]).full_tensor()


def fsdp2(net: Net) -> Any:
    return sharded(net, mesh((2,), ("dp",)))


def fsdp1_with_original_parameters(net: Net) -> nn.Module:
    return fsdp1(net, use_orig_params=True)


def fsdp1_with_flat_parameters(net: Net) -> nn.Module:
    return fsdp1(net, use_orig_params=False)


def fsdp1_without_shards(net: Net) -> nn.Module:
    strategy = ShardingStrategy.NO_SHARD
    return fsdp1(net, use_orig_params=True, sharding_strategy=strategy)


DATA_PARALLEL = (
    DistributedDataParallel,
    compiled,
    zero,
    fsdp2,
    fsdp1_with_original_parameters,
    fsdp1_with_flat_parameters,
    fsdp1_without_shards,
)
MODEL_PARALLEL = (tensor_parallel, sequence_parallel)


@on_ranks(2)
@pytest.mark.parametrize("region", FP32_AND_SLOW_BF16)
@pytest.mark.parametrize(
    "wrap", quick_cases(DATA_PARALLEL, [wrap for wrap in DATA_PARALLEL if wrap is not compiled])
)
def test_gradients_of_data_parallel_match(wrap, region):
    comparison = net_case(wrap, region=region, attends=True).compare()
    assert comparison.matches, str(comparison)
    assert len(comparison.rows) == len(list(Net().parameters()))


@on_ranks(2)
@pytest.mark.parametrize("region", FP32_AND_SLOW_BF16)
@pytest.mark.parametrize("wrap", quick_cases(MODEL_PARALLEL, [tensor_parallel]))
def test_gradients_of_tensor_parallel_match(wrap, region):
    # Attention would not see the positions of other ranks under sequence parallel.
    attends = wrap is tensor_parallel
    comparison = net_case(wrap, region=region, ranks=(0, 1), attends=attends).compare()
    assert comparison.matches, str(comparison)


def in_two_dimensions(net: Net) -> Any:
    grid = mesh((2, 2), ("dp", "tp"))
    return sharded(parallel(net, grid["tp"]), grid["dp"])


def hybrid_fsdp1(net: Net) -> nn.Module:
    grid = mesh((2, 2), ("replicate", "shard"))
    hybrid = ShardingStrategy.HYBRID_SHARD
    return fsdp1(net, use_orig_params=True, device_mesh=grid, sharding_strategy=hybrid)


def hsdp(net: Net) -> Any:
    return sharded(net, mesh((2, 2), ("replicate", "shard")))


@on_ranks(4)
@pytest.mark.parametrize("region", FP32_AND_SLOW_BF16)
@pytest.mark.parametrize(
    "wrap", quick_cases([in_two_dimensions, hsdp, hybrid_fsdp1], [hybrid_fsdp1])
)
def test_gradients_of_layouts_of_two_dimensions_match(wrap, region):
    ranks = None
    if wrap is in_two_dimensions:
        ranks = (dist.get_rank() // 2, 2)
    comparison = net_case(wrap, region=region, ranks=ranks, attends=True).compare()
    assert comparison.matches, str(comparison)


@on_ranks(2)
@pytest.mark.parametrize("region", PRECISIONS)
@pytest.mark.parametrize("make", [hand_case, expert_case])
def test_gradients_of_layouts_without_dtensor_match(make, region):
    comparison = make(region=region).compare()
    assert comparison.matches, str(comparison)


@on_ranks(4)
def test_gradients_of_plain_tensors_on_a_mesh_match():
    comparison = hand_case((2, 2), ("dp", "tp")).compare()
    assert comparison.matches, str(comparison)


@on_ranks(2)
@pytest.mark.parametrize("tied", ["", "summed"])
def test_gradients_of_pipeline_stages_match_by_their_names(tied):
    comparison = pipeline_case(tied).compare()
    assert comparison.matches, str(comparison)


# -- the layouts of the scaler's tests ---------------------------------------------------------

# Single processes, and experts with the same names on all ranks, which `ExpertNet` stands for.
_NOT_COMPARED = ("alone", "expert")
SCALER_LAYOUTS = [name for name in ALL_LAYOUTS if not any(part in name for part in _NOT_COMPARED)]


class NoScaler:
    """A scaler with a scale of 1."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def scaler_case(name: str, region: torch.dtype | None) -> Case:
    """Two micro-batches in a layout of the scaler's tests."""
    layout = ALL_LAYOUTS[name]()
    reference = other_weights(layout.make_net())
    optimizer = layout.optimizer(KINDS["SGD for-loop"], list(layout.net.parameters()))
    layout.attach([optimizer])
    model = layout.model
    if name == "pipeline":
        layer_name = LAYERS[dist.get_rank()]
        model = nn.ModuleDict({layer_name: layout.layer})

    def step() -> None:
        # Without the cache, which would hold casts of weights that FSDP2 has freed.
        dtype = region or BF16
        with torch.autocast("cpu", dtype, enabled=region is not None, cache_enabled=False):
            layout.backward(NoScaler(), 0, 2, [1.0, 1.0])

    def reference_step() -> None:
        for micro_batch in range(2):
            for shard in range(layout.shards):
                inputs = layout.inputs(batch(0, micro_batch, shard))
                with in_autocast(region):
                    loss = loss_of(reference(inputs).float())
                (loss / layout.shards).backward()

    return Case(step, model, reference_step, reference, {"process_group": layout.process_group()})


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("region", PRECISIONS)
@pytest.mark.parametrize("name", SCALER_LAYOUTS)
def test_gradients_in_the_layouts_of_the_scaler_match(name, region):
    if name == "OSS":
        pytest.importorskip("fairscale")
    case = scaler_case(name, region)
    comparison = compare_gradients(
        case.step, case.model, case.reference_step, case.reference, **case.settings
    )
    assert comparison.matches, str(comparison)


# -- wrong gradients ---------------------------------------------------------------------------

# One plant of each cause; `python -m tests.report.gradient_plants` runs all of them.
PLANTED = (
    "a gate not reduced over tp",
    "experts not divided by the ranks",
    "no_sync on the last micro-batch",
    "a bf16 hook",
    "a loss divided by the world, and DDP's mean",
    "a shard frozen on one rank",
    "a shard detached on one rank",
    "inf on one rank",
    "FSDP1 in no_sync on the last micro-batch",
    "FSDP2 without gradient sync on the last micro-batch",
    "experts averaged as replicas",
    "a tied embedding not summed over stages",
)


@on_ranks(2)
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_gradient_is_explained(name):
    plant = next(plant for plant in PLANTS if plant.name == name)
    result = score(plant, plant.build().compare())
    assert result.explained, result.text


@pytest.mark.slow
def test_the_score_of_all_plants_does_not_fall():
    scores = run_plants()
    assert sum(result.found for result in scores) >= 38
    assert sum(result.explained for result in scores) >= 34


@on_ranks(2)
def test_a_line_has_the_factor_the_axis_and_the_cause():
    plant = next(plant for plant in PLANTS if plant.name == "a gate not reduced over tp")
    comparison = plant.build().compare()
    line = "gate.weight: 0.50 of the reference on tp: not reduced over tp"
    assert str(comparison).splitlines()[1:] == [line]
    assert json.loads(json.dumps(comparison.to_dict()))["matches"] is False


@on_ranks(2)
def test_a_tolerance_of_the_user_replaces_the_derived_one():
    plant = next(plant for plant in PLANTS if plant.name == "a bf16 hook")
    assert plant.build().compare(tolerance=0.1).matches


# -- side effects and refusals -----------------------------------------------------------------


@on_ranks(2)
def test_the_call_changes_nothing_of_the_model_and_leaves_no_gradient():
    case = net_case(DistributedDataParallel)
    weights = {name: weight.clone() for name, weight in case.model.state_dict().items()}
    case.compare()
    for name, weight in case.model.state_dict().items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)
    for model in (case.model, case.reference):
        assert [param.grad for param in model.parameters() if param.grad is not None] == []


@on_ranks(2)
def test_buffers_reach_the_reference():
    case = net_case(lambda net: DistributedDataParallel(net))
    for model, value in ((case.model.module, 3.0), (case.reference, 5.0)):
        model.register_buffer("place", torch.full((2,), value))
    case.compare()
    if dist.get_rank() == 0:
        assert case.reference.place.tolist() == [3.0, 3.0]


def test_a_single_process_needs_no_group():
    model, reference = Net(attends=False), other_weights(Net(attends=False))
    tokens, targets = tokens_and_targets()
    comparison = compare_gradients(
        lambda: cross_entropy(model(tokens), targets).backward(),
        model,
        lambda: (2 * cross_entropy(reference(tokens), targets)).backward(),
        reference,
    )
    assert {row.cause for row in comparison.rows} == {"another number of tokens or micro-batches"}
    assert [round(row.factor, 3) for row in comparison.rows] == [0.5] * 13


@on_ranks(2)
def test_dropout_that_is_on_is_refused_on_every_rank():
    case = net_case(DistributedDataParallel)
    if dist.get_rank() == 1:
        case.model.module.head = nn.Sequential(case.model.module.head, nn.Dropout(0.1))
    with pytest.raises(DistampError, match=r"head.1 of model has dropout \(p=0.1\)"):
        case.compare()


@on_ranks(2)
def test_dropout_that_is_off_is_taken():
    case = net_case(DistributedDataParallel)
    case.model.module.blocks[0].attention_dropout = 0.1
    case.model.eval()
    assert case.compare().matches


@on_ranks(2)
def test_a_missing_reference_is_refused_on_every_rank():
    case = net_case(DistributedDataParallel)
    with pytest.raises(DistampError, match="reference_model are missing on rank 0"):
        compare_gradients(case.step, case.model)


@on_ranks(2)
def test_a_parameter_without_a_counterpart_is_refused_with_a_similar_name():
    case = net_case(DistributedDataParallel)
    case.reference.haed = case.reference.head
    del case.reference.head
    with pytest.raises(ConfigError, match=r"no parameter 'head.weight'.* Did you mean 'haed"):
        case.compare()


@on_ranks(2)
def test_a_shard_that_is_not_declared_is_refused():
    case = hand_case()
    with pytest.raises(ConfigError, match="return their group or mesh"):
        case.compare(shard_group_fn=None)


@on_ranks(2)
def test_names_of_a_rank_are_translated():
    case = net_case(DistributedDataParallel)
    case.model.module.end = case.model.module.head
    del case.model.module.head
    case.model.module.forward = forward_with_end.__get__(case.model.module)
    assert case.compare(reference_name_fn=lambda name: name.replace("end.", "head.")).matches


def forward_with_end(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = self.tok(tokens)
    for block in self.blocks:
        x = block(x)
    return self.end(x)


@on_ranks(2)
def test_a_step_that_drops_its_gradients_is_refused():
    case = net_case(DistributedDataParallel, after=lambda model: model.zero_grad())
    with pytest.raises(CallOrderError, match=r"No parameter has a gradient after step\(\)"):
        case.compare()


@on_ranks(2)
def test_a_step_that_raises_on_one_rank_raises_on_every_rank():
    case = net_case(DistributedDataParallel)
    plain_step = case.step

    def step() -> None:
        plain_step()
        if dist.get_rank() == 1:
            raise ZeroDivisionError("on purpose")

    case.step = step
    with pytest.raises((DistampError, ZeroDivisionError), match="on purpose"):
        case.compare()


@pytest.mark.slow
@on_devices(2)
def test_gradients_on_devices_match():
    mesh((2,), ("dp",))
    device = rank_device()
    model = DistributedDataParallel(Net(attends=False).to(device))
    reference = other_weights(Net(attends=False).to(device))
    tokens, targets = (tensor.to(device) for tensor in tokens_and_targets())
    place = dist.get_rank()
    local_tokens, local_targets = tokens.chunk(2)[place], targets.chunk(2)[place]
    comparison = compare_gradients(
        lambda: cross_entropy(model(local_tokens), local_targets).backward(),
        model,
        lambda: cross_entropy(reference(tokens), targets).backward(),
        reference,
    )
    assert comparison.matches, str(comparison)

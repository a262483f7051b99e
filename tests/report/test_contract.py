"""The contract: what is seen in each layout, what breaks it, and what a clean set-up says."""

import json
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel

import distamp
from distamp import PrecisionContract
from distamp.comm_hooks import register_comm_hook
from distamp.errors import ConfigError
from distamp.report import ContractReport
from tests.autocast.counting import Calls
from tests.levels.nets import train
from tests.on_ranks import on_ranks
from tests.ranks import mesh
from tests.report.plants_contract import PLANTS
from tests.report.setups import BF16, FP32, Net, parallel, sharded, trained

WORDS: dict[str, Any] = {
    "parameters": "fp32",
    "compute": "bf16",
    "norms": ("fp32", "bf16"),
    "param_all_gather": "bf16",
    "grad_reduce": "fp32",
    "activations": "bf16",
    "master_weights": "fp32",
    "optimizer_state": "fp32",
}


def checked(model: nn.Module, region: torch.dtype | None = BF16, **words: Any) -> ContractReport:
    return PrecisionContract(**words or WORDS).check(*trained(model, region=region))


def test_a_step_as_declared_breaks_nothing_says_what_it_saw_and_leaves_nothing():
    model = Net()
    model.idle = nn.Linear(2, 2)
    found = checked(model)
    assert [*found.unseen] == ["idle: did not run in this step"]
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert not found
    assert found.seen["compute"] == {"bf16": 31}
    assert found.seen["parameters"] == {"fp32": 27}
    assert "kept" in str(found)
    assert set(found.reasons) == {"param_all_gather", "grad_reduce", "activations"}
    assert "nothing seen  gradients sent between ranks: a single rank sends nothing" in str(found)


def test_a_whole_model_in_bf16_is_a_line_for_each_word_that_it_breaks():
    found = checked(Net().bfloat16())
    assert {each.key: (each.found, each.count) for each in found} == {
        "parameters": ("bf16", 25),
        "master_weights": ("bf16", 25),
        "optimizer_state": ("bf16", 50),
    }
    assert found[0].where[0] == "blocks.*.down.bias"
    assert "at every place (25 of 25)" in str(found)
    assert "load it in float32" in found[0].fix
    assert {each.fix for each in found[1:]} == {"as the parameters are, so see there"}


def test_exceptions_are_by_pattern_and_the_last_that_matches_counts():
    model = Net()
    distamp.set_module_precision(model.head, "fp32")
    assert [each.where for each in checked(model, compute="bf16")] == [("head",)]
    assert not checked(model, compute="bf16", modules={"he*": "fp32"})
    words = {"blocks.*": {"compute": "fp16"}, "blocks.1": {"compute": "bf16"}, "head": "fp32"}
    found = checked(model, compute="bf16", modules=words)
    assert [each.where for each in found] == [LINEAR]
    with pytest.raises(ConfigError, match=r"'haed' matches no module .* head"):
        checked(model, modules={"haed": "fp32"})


LINEAR = ("blocks.0", "blocks.0.down", "blocks.0.out", "blocks.0.qkv", "blocks.0.up")


@pytest.mark.parametrize("level", ["fp16", "fp16-O2", "bf16-O2", "bf16-O3"])
def test_pins_by_the_caller_and_the_models_owner_are_part_of_a_levels_contract(level):
    model = Net(batch_norm=True)
    model._keep_in_fp32_modules = ["down"]  # as transformers has it
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-6)
    pins = {"head": "fp32", "*.norm": "fp32"}
    amp = distamp.initialize(model, optimizer, level, module_precision=pins)

    def step() -> None:
        with amp.autocast():
            out = amp.model(torch.ones(2, 8, dtype=torch.int64))
        amp.backward(out.float().square().mean() / 2**10)
        amp.step()

    found = amp.check(step)
    assert not found, str(found)
    assert {"fp32"} < {*found.seen["compute"]}, "beside the level's own"


class Backbone(nn.Module):
    """A model whose submodules have the attribute names that wrappers use too."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.ModuleDict({"module": nn.BatchNorm1d(8), "a[0]": nn.Linear(8, 8)})
        self.add_module(attribute, inner)
        self.head = nn.Linear(8, 2)
        self.attribute = attribute

    def forward(self, x: Tensor) -> Tensor:
        inner = getattr(self, self.attribute)
        return self.head(inner["module"](inner["a[0]"](x)))


@on_ranks(2)
@pytest.mark.parametrize("attribute", ["module", "encoder"])
@pytest.mark.parametrize("layout", ["plain", "DDP", "DDP of a checkpoint", "FSDP2"])
def test_a_levels_contract_and_a_step_have_the_same_module_names(layout, attribute):
    """Batch norms of fp16-O2 stay float32, and their names become patterns of the contract."""
    model: Any = distamp.cast_model(
        Backbone(attribute), "fp16-O2", module_precision={"head": "fp32"}
    )
    if layout == "FSDP2":
        for unit in (model.head, getattr(model, attribute)["module"], model):
            fully_shard(unit)
    elif layout != "plain":
        model = checkpoint_wrapper(model) if "checkpoint" in layout else model
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = distamp.initialize(
        model, optimizer, "fp16-O2", module_precision={"head": "fp32"}, init_scale=2.0
    )

    def step() -> None:
        amp.backward(amp.model(torch.ones(4, 8)).float().mean())
        amp.step()

    names = {*PrecisionContract.from_level(amp.level, model).modules}
    assert names == {f"{attribute}.module", "head", "(outside)"}
    found = amp.check(step)
    assert found.seen["parameters"] == {"fp32": 4, "fp16": 2}
    assert not [each for each in found if each.key == "parameters"], str(found)


@pytest.mark.parametrize(
    "wrap", [torch.compile, checkpoint_wrapper, nn.DataParallel, AveragedModel]
)
def test_the_names_of_a_levels_contract_are_without_those_of_wrappers(wrap):
    model = wrap(distamp.cast_model(Backbone("module"), "fp16-O2"))
    assert {*PrecisionContract.from_level("fp16-O2", model).modules} == {
        "module.module",
        "(outside)",
    }


def test_a_module_name_with_brackets_is_no_shell_pattern():
    model = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "a0": nn.Linear(2, 2)})
    distamp.set_module_precision(model["a[0]"], "fp32")
    contract = PrecisionContract.from_level("bf16", model)
    assert contract.declared("compute", "a[0]") == ("fp32",)
    assert contract.declared("compute", "a0") == ("bf16",)


class NormByHand(Calls):
    """Told by its name, too."""


@pytest.mark.parametrize(("take", "broken_by"), [(Tensor.float, 0), (Tensor.clone, 1)])
def test_norms_written_in_python_are_told_by_their_statistics(take, broken_by):
    rms = NormByHand(lambda x: take(x) * take(x).pow(2).mean(-1, keepdim=True).rsqrt())
    model = nn.Sequential(nn.Linear(16, 16, dtype=BF16), rms)
    step = trained(model, inputs=torch.ones(2, 16, dtype=BF16))
    assert len(PrecisionContract(norms="fp32").check(*step)) == broken_by


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_modules_stay_compiled_and_what_is_in_them_is_listed_as_unseen():
    compiles, runs = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return lambda *given: runs.append(graph) or graph.forward(*given)

    model = Net()
    model.blocks[0].compile(backend=backend)
    model.head = torch.compile(model.head, backend=backend)
    step, *trains = trained(model, region=BF16)
    step()
    before = len(compiles)
    runs.clear()
    with PrecisionContract(compute="fp32", norms="bf16").watch(*trains) as found:
        step()
    assert len(compiles) == before == len(runs) > 1
    places = {place for each in found if each.key == "compute" for place in each.where}
    assert "head" in places
    assert any("blocks.0" in line and "compiled" in line for line in found.unseen)
    assert found.seen["norms"] == {"fp32": 8}, "of the other block, and a mean in the compiled one"


def test_what_a_compiler_traces_is_not_counted():
    x, weight = torch.ones(6, 8), torch.ones(8, 8, requires_grad=True)

    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        return torch.autograd.grad((x @ weight).sum(), weight)[0]

    def traced(x: Tensor, weight: Tensor) -> None:
        make_fx(gradient, tracing_mode="symbolic")(x, weight)
        gradient(x, weight)

    counts = []
    for step in (gradient, traced):
        with PrecisionContract(compute="fp32").watch(nn.Linear(2, 2)) as found:
            step(x, weight)
        counts.append(found.seen["compute"])
    assert counts[0] == counts[1] != {}


def test_it_is_json_and_a_contract_comes_back_from_it(tmp_path):
    found = checked(Net().bfloat16(), **WORDS, modules={"head": "fp32"})
    found.to_json(tmp_path / "contract.json")
    values = json.loads((tmp_path / "contract.json").read_text())
    assert len(values["violations"]) == len(found) > 0
    assert PrecisionContract(**values["contract"]) == found.contract


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            {"compute": "half"},
            "compute= of a PrecisionContract was 'half', which is no dtype. Choose from 'fp32', "
            "'bf16', 'fp16', 'fp8', 'fp64', 'int8', 'uint8', or pass a torch.dtype. There is no "
            "similar name.",
        ),
        ({"compute": ("fp32", 3)}, "was '3', which is no dtype. Choose from 'fp32', 'bf16', "),
        ({"compute": "bfloat"}, "torch.dtype. Did you mean 'bf16'?"),
        (
            {"modules": {"head": {"compoot": "fp32"}}},
            "modules= of a PrecisionContract has the key 'compoot' for the pattern 'head'. The "
            "keys are 'parameters', 'compute', 'norms', 'param_all_gather', 'grad_reduce', "
            "'activations', 'master_weights', 'optimizer_state'. Did you mean 'compute'?",
        ),
    ],
)
def test_mistakes_are_named(words, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        PrecisionContract(**words)


# Ranks and layouts.

BATCH = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)


@on_ranks("size")
@pytest.mark.parametrize(
    ("size", "place"),
    [pytest.param(p.ranks, place, id=p.name) for place, p in enumerate(PLANTS)],
)
def test_a_planted_violation_is_found(size, place):
    plant = PLANTS[place]
    if "OSS" in plant.name:
        pytest.importorskip("fairscale")
    with warnings.catch_warnings(action="ignore"):
        violations = PrecisionContract(**plant.declared).check(*plant.build())
    assert any(
        each.key in (plant.keys or plant.declared)
        and plant.found in each.found
        and (not plant.where or any(plant.where in where for where in each.where))
        for each in violations
    ), str(violations)


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="mended in torch 2.15")
@on_ranks(2)
def test_fsdps_reduce_dtype_does_not_reach_the_sum_over_tensor_parallel_ranks():
    """pytorch#190626, as the original code does it."""
    both = mesh((1, 2), ("dp", "tp"))
    net = parallel(Net(attends=False), both["tp"], sequence=True)
    model = sharded(net, both["dp"], param_dtype=BF16, reduce_dtype=FP32)
    found = PrecisionContract(grad_reduce="fp32", activations="bf16").check(*trained(model))
    (violation,) = found
    assert (violation.key, violation.found, violation.op) == ("grad_reduce", "bf16", "all_reduce")
    assert (violation.where, violation.ranks, violation.group[-3:]) == (
        ("blocks.*",),
        (0, 1),
        "[2]",
    )
    assert "reduce_dtype" in violation.fix
    assert found.seen["activations"]["bf16"] > 4


@on_ranks(2)
def test_a_step_that_raises_on_one_rank_hangs_none():
    step, *trains = trained(Net(), region=BF16)

    def fails() -> None:
        step()
        if torch.distributed.get_rank():
            raise ValueError("no data")

    says = "^no data$" if torch.distributed.get_rank() else "raised on rank 1: ValueError: no data$"
    for _ in range(2):
        with pytest.raises((ValueError, distamp.DistampError), match=says):
            PrecisionContract().check(fails, *trains)


@on_ranks(2)
def test_patterns_have_to_match_on_one_rank_alone():
    """As in a pipeline: each rank has modules that the other has not."""
    model = nn.Sequential()
    model.add_module(f"stage{torch.distributed.get_rank()}", nn.Linear(2, 2))
    contract = PrecisionContract(
        modules={"stage0": {"compute": "fp32"}, "stage1": {"compute": "bf16"}}
    )
    (violation,) = contract.check(lambda: model(torch.ones(1, 2)), model)
    assert (violation.where, violation.ranks) == (("stage1",), (1,))
    with pytest.raises(ConfigError, match="'stage2' matches no module"):
        PrecisionContract(modules={"stage2": "fp32"}).check(lambda: None, model)


@on_ranks(2)
def test_what_a_guard_tells_the_ranks_is_no_gradient_of_as_many_elements():
    """As the bias of a classifier of two classes has."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    amp = distamp.initialize(model, torch.optim.AdamW(model.parameters()), "bf16")
    assert not amp.check(lambda: train(amp, [BATCH], max_norm=1.0))


@on_ranks(2)
@pytest.mark.parametrize("level", ["bf16", "fp16"])
def test_weights_that_a_hook_gathers_are_gathered_and_no_gradients(level):
    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    hook = register_comm_hook(model, "int8", param_format="int8")
    optimizer = torch.optim.AdamW(model.parameters())
    amp = distamp.initialize(model, optimizer, level)
    assert amp.comm_hooks == (hook,)
    batch = torch.ones(4, 64), torch.zeros(4, dtype=torch.int64)
    found = amp.check(lambda: train(amp, [batch], max_norm=1.0))
    assert not found
    assert list(found.seen["param_all_gather"]) == ["int8"]
    assert list(found.seen["grad_reduce"]) == ["int8"]


@on_ranks(2)
@pytest.mark.parametrize("param_format", ["int8", "bf16"])
def test_a_contract_names_weights_that_a_hook_gathers_in_another_format(param_format):
    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    hook = register_comm_hook(model, "fp16", param_format=param_format)

    def step() -> None:
        model(torch.ones(4, 64)).sum().backward()

    (violation,) = PrecisionContract(param_all_gather="fp32", grad_reduce="fp16").check(
        step, model, hooks=[hook]
    )
    assert (violation.key, violation.declared, violation.found) == (
        "param_all_gather",
        ("fp32",),
        param_format,
    )


@on_ranks(2)
def test_gradients_that_would_grow_in_a_hooks_format_are_no_breach():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    amp = distamp.initialize(model, optimizer, "bf16", comm_hook="int8")
    found = amp.check(lambda: train(amp, [BATCH], max_norm=1.0))
    assert not found
    assert list(found.seen["grad_reduce"]) == ["fp32"]


@on_ranks(2)
@pytest.mark.parametrize("level", ["fp16-O2", "bf16-O2", "bf16-O3"])
@pytest.mark.parametrize("output", ["the level's", "half"])
def test_what_pipeline_stages_send_is_what_the_level_makes_them_return(level, output):
    rank, half = dist.get_rank(), torch.float16 if level == "fp16-O2" else BF16
    precision = distamp.PrecisionLevel.from_name(
        level, loss_scale=1.0 if level == "fp16-O2" else None
    )
    if output == "half":
        precision = precision.replace(output=half)
    torch.manual_seed(rank)
    module = distamp.cast_model(nn.Linear(8, 8), precision)
    amp = distamp.initialize(module, torch.optim.SGD(module.parameters(), lr=0.1), precision)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    scale = getattr(amp.scaler, "scale", lambda loss: loss)
    loss_fn = lambda y, target: scale((y.float() - target).mean())  # noqa: E731
    pipeline = ScheduleGPipe(stage, 2, loss_fn=loss_fn)

    def step() -> None:
        if rank == 0:
            pipeline.step(torch.ones(4, 8))
        else:
            pipeline.step(target=torch.ones(4, 8))
        amp.step()

    step()
    found = amp.check(step)
    assert not found, str(found)
    names = {torch.float16: "fp16", BF16: "bf16"}
    assert [*found.seen["activations"]] == ["fp32" if output == "the level's" else names[half]]
    (violation,) = PrecisionContract(activations="fp64").check(step, module)
    assert "PrecisionLevel.from_name(level).replace(output=dtype)" in violation.fix


@on_ranks(2)
def test_what_tensor_parallel_modules_send_stays_in_the_levels_dtype():
    """What a level's cast of the output allows outside of modules is no excuse inside."""
    model = parallel(Net(attends=False), mesh((2,), ("tp",)))
    contract = PrecisionContract(activations="bf16", modules={"(outside)": {"activations": "fp32"}})
    found = contract.check(*trained(model))
    assert {(each.key, each.found) for each in found} == {("activations", "fp32")}

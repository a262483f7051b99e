"""Tests of `PrecisionContract`: measured dtypes, violations and mistakes of the caller."""

import json
import re
import warnings
from collections.abc import Callable
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

MIXED_PRECISION: dict[str, Any] = {
    "parameters": "fp32",
    "compute": "bf16",
    "norms": ("fp32", "bf16"),
    "param_all_gather": "bf16",
    "grad_reduce": "fp32",
    "activations": "bf16",
    "master_weights": "fp32",
    "optimizer_state": "fp32",
}
BATCH = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)


def check_bf16_step(model: nn.Module, **contract: Any) -> ContractReport:
    """Return the report about a step under autocast to bf16."""
    arguments = trained(model, region=BF16)
    return PrecisionContract(**contract).check(*arguments)


def list_places(report: ContractReport) -> list[tuple[str, ...]]:
    """Return the modules of each violation."""
    return [violation.where for violation in report]


def list_keys_and_dtypes(report: ContractReport) -> list[tuple[str, str]]:
    """Return the key and the dtype of each violation."""
    return [(violation.key, violation.found) for violation in report]


def test_a_step_that_keeps_its_contract_has_no_violation():
    report = check_bf16_step(Net(), **MIXED_PRECISION)
    assert not report
    assert "kept" in str(report)


def test_a_report_counts_the_dtypes_of_products_and_parameters():
    model = Net()
    model.idle = nn.Linear(2, 2)
    report = check_bf16_step(model, **MIXED_PRECISION)
    assert report.seen["compute"] == {"bf16": 31}
    assert report.seen["parameters"] == {"fp32": 27}


def test_a_report_lists_modules_that_did_not_run():
    model = Net()
    model.idle = nn.Linear(2, 2)
    report = check_bf16_step(model, **MIXED_PRECISION)
    assert list(report.unseen) == ["idle: did not run in this step"]
    assert not report


def test_a_report_gives_the_reason_why_a_single_rank_sent_nothing():
    report = check_bf16_step(Net(), **MIXED_PRECISION)
    assert set(report.reasons) == {"param_all_gather", "grad_reduce", "activations"}
    reason = "nothing seen  gradients sent between ranks: a single rank sends nothing"
    assert reason in str(report)


def test_a_check_removes_its_hooks():
    model = Net()
    check_bf16_step(model, **MIXED_PRECISION)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_model_cast_to_bf16_has_one_violation_for_each_broken_key():
    report = check_bf16_step(Net().bfloat16(), **MIXED_PRECISION)
    counts = {}
    for violation in report:
        counts[violation.key] = (violation.found, violation.count)
    assert counts == {
        "parameters": ("bf16", 25),
        "master_weights": ("bf16", 25),
        "optimizer_state": ("bf16", 50),
    }
    assert report[0].where[0] == "blocks.*.down.bias"
    assert "at every place (25 of 25)" in str(report)


def test_violations_with_the_cause_of_another_refer_to_its_fix():
    report = check_bf16_step(Net().bfloat16(), **MIXED_PRECISION)
    parameters, *consequences = report
    assert "load it in float32" in parameters.fix
    fixes = {violation.fix for violation in consequences}
    assert fixes == {"as the parameters are, so see there"}


def make_net_with_fp32_head() -> Net:
    """Return a net with a head that a pin holds in fp32."""
    model = Net()
    distamp.set_module_precision(model.head, "fp32")
    return model


def test_exceptions_are_by_pattern_and_the_last_that_matches_counts():
    patterns = {"blocks.*": {"compute": "fp16"}, "blocks.1": {"compute": "bf16"}, "head": "fp32"}
    report = check_bf16_step(make_net_with_fp32_head(), compute="bf16", modules=patterns)
    linear_layers = ("blocks.0.down", "blocks.0.out", "blocks.0.qkv", "blocks.0.up")
    assert list_places(report) == [("blocks.0", *linear_layers)]


def test_a_pattern_allows_a_module_another_dtype():
    model = make_net_with_fp32_head()
    without_pattern = check_bf16_step(model, compute="bf16")
    assert list_places(without_pattern) == [("head",)]
    assert not check_bf16_step(model, compute="bf16", modules={"he*": "fp32"})


def test_a_pattern_that_matches_no_module_raises():
    with pytest.raises(ConfigError, match=r"'haed' matches no module .* head"):
        check_bf16_step(Net(), modules={"haed": "fp32"})


@pytest.mark.parametrize("level", ["fp16", "fp16-O2", "bf16-O2", "bf16-O3"])
def test_pins_by_the_caller_and_the_models_owner_are_part_of_a_levels_contract(level):
    model = Net(batch_norm=True)
    model._keep_in_fp32_modules = ["down"]  # The attribute of models of transformers.
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-6)
    pins = {"head": "fp32", "*.norm": "fp32"}
    amp = distamp.initialize(model, optimizer, level, module_precision=pins)
    tokens = torch.ones(2, 8, dtype=torch.int64)

    def step() -> None:
        with amp.autocast():
            logits = amp.model(tokens)
        loss = logits.float().square().mean()
        amp.backward(loss / 2**10)
        amp.step()

    report = amp.check(step)
    assert not report, str(report)
    compute_dtypes = set(report.seen["compute"])
    assert {"fp32"} < compute_dtypes, "the level's dtype as well"


class Backbone(nn.Module):
    """A model with submodules that have the attribute names of wrappers."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.ModuleDict({"module": nn.BatchNorm1d(8), "a[0]": nn.Linear(8, 8)})
        self.add_module(attribute, inner)
        self.head = nn.Linear(8, 2)
        self.attribute = attribute

    def forward(self, x: Tensor) -> Tensor:
        inner = getattr(self, self.attribute)
        hidden = inner["a[0]"](x)
        return self.head(inner["module"](hidden))


def wrap_backbone(model: Backbone, layout: str) -> nn.Module:
    """Return the model in a layout."""
    if layout == "plain":
        return model
    if layout == "FSDP2":
        inner = getattr(model, model.attribute)
        fully_shard(model.head)
        fully_shard(inner["module"])
        return fully_shard(model)
    if layout == "DDP of a checkpoint":
        return nn.parallel.DistributedDataParallel(checkpoint_wrapper(model))
    return nn.parallel.DistributedDataParallel(model)


@on_ranks(2)
@pytest.mark.parametrize("attribute", ["module", "encoder"])
@pytest.mark.parametrize("layout", ["plain", "DDP", "DDP of a checkpoint", "FSDP2"])
def test_a_levels_contract_and_a_step_have_the_same_module_names(layout, attribute):
    """Batch norms of fp16-O2 stay float32, and their names become patterns of the contract."""
    pins = {"head": "fp32"}
    backbone: Any = distamp.cast_model(Backbone(attribute), "fp16-O2", module_precision=pins)
    model = wrap_backbone(backbone, layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = distamp.initialize(model, optimizer, "fp16-O2", module_precision=pins, init_scale=2.0)

    def step() -> None:
        loss = amp.model(torch.ones(4, 8)).float().mean()
        amp.backward(loss)
        amp.step()

    contract = PrecisionContract.from_level(amp.level, model)
    assert set(contract.modules) == {f"{attribute}.module", "head", "(outside)"}
    report = amp.check(step)
    assert report.seen["parameters"] == {"fp32": 4, "fp16": 2}
    broken_keys = [violation.key for violation in report]
    assert "parameters" not in broken_keys, str(report)


@pytest.mark.parametrize(
    "wrap", [torch.compile, checkpoint_wrapper, nn.DataParallel, AveragedModel]
)
def test_the_names_of_a_levels_contract_are_without_those_of_wrappers(wrap):
    backbone = distamp.cast_model(Backbone("module"), "fp16-O2")
    contract = PrecisionContract.from_level("fp16-O2", wrap(backbone))
    assert set(contract.modules) == {"module.module", "(outside)"}


def test_a_module_name_with_brackets_is_no_shell_pattern():
    model = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "a0": nn.Linear(2, 2)})
    distamp.set_module_precision(model["a[0]"], "fp32")
    contract = PrecisionContract.from_level("bf16", model)
    assert contract.declared("compute", "a[0]") == ("fp32",)
    assert contract.declared("compute", "a0") == ("bf16",)


class CustomNorm(Calls):
    """A norm in Python, with a name by which the contract takes it for a norm."""


@pytest.mark.parametrize(
    ("copy", "violations"),
    [
        pytest.param(Tensor.float, 0, id="statistics in fp32"),
        pytest.param(Tensor.clone, 1, id="statistics in bf16"),
    ],
)
def test_the_dtype_of_a_norm_in_python_is_that_of_its_statistics(copy, violations):
    def normalize(x: Tensor) -> Tensor:
        mean_square = copy(x).pow(2).mean(-1, keepdim=True)
        return copy(x) * mean_square.rsqrt()

    layer = nn.Linear(16, 16, dtype=BF16)
    model = nn.Sequential(layer, CustomNorm(normalize))
    arguments = trained(model, inputs=torch.ones(2, 16, dtype=BF16))
    report = PrecisionContract(norms="fp32").check(*arguments)
    assert len(report) == violations


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_modules_stay_compiled_and_what_is_in_them_is_listed_as_unseen():
    compiled_graphs: list[Any] = []
    graph_runs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        compiled_graphs.append(graph)

        def run(*inputs: Any) -> Any:
            graph_runs.append(graph)
            return graph.forward(*inputs)

        return run

    model = Net()
    model.blocks[0].compile(backend=backend)
    model.head = torch.compile(model.head, backend=backend)
    step, _, optimizer = trained(model, region=BF16)
    step()
    number_of_graphs = len(compiled_graphs)
    graph_runs.clear()
    contract = PrecisionContract(compute="fp32", norms="bf16")
    with contract.watch(model, optimizer) as report:
        step()

    assert number_of_graphs > 1
    assert len(compiled_graphs) == number_of_graphs, "nothing is compiled again"
    assert len(graph_runs) == number_of_graphs, "every graph runs"
    places: set[str] = set()
    for violation in report:
        if violation.key == "compute":
            places.update(violation.where)
    assert "head" in places
    lines_of_block = [line for line in report.unseen if "blocks.0" in line]
    assert any("compiled" in line for line in lines_of_block)
    message = "the norms of the eager block, and a mean in the compiled block"
    assert report.seen["norms"] == {"fp32": 8}, message


def test_what_a_compiler_traces_is_not_counted():
    x = torch.ones(6, 8)
    weight = torch.ones(8, 8, requires_grad=True)

    def compute_gradient(x: Tensor, weight: Tensor) -> Tensor:
        loss = (x @ weight).sum()
        return torch.autograd.grad(loss, weight)[0]

    def trace_and_compute(x: Tensor, weight: Tensor) -> None:
        make_fx(compute_gradient, tracing_mode="symbolic")(x, weight)
        compute_gradient(x, weight)

    def count_products(step: Callable[[Tensor, Tensor], Any]) -> Any:
        with PrecisionContract(compute="fp32").watch(nn.Linear(2, 2)) as report:
            step(x, weight)
        return report.seen["compute"]

    products = count_products(compute_gradient)
    assert products != {}
    assert count_products(trace_and_compute) == products


def test_a_report_as_json_contains_its_violations_and_its_contract(tmp_path):
    model = Net().bfloat16()
    report = check_bf16_step(model, **MIXED_PRECISION, modules={"head": "fp32"})
    path = tmp_path / "contract.json"
    report.to_json(path)
    document = json.loads(path.read_text())
    assert len(document["violations"]) == len(report) > 0
    assert PrecisionContract(**document["contract"]) == report.contract


NO_DTYPE = (
    "compute= of a PrecisionContract was 'half', which is no dtype. Choose from 'fp32', 'bf16', "
    "'fp16', 'fp8', 'fp64', 'int8', 'uint8', or pass a torch.dtype. There is no similar name."
)
NO_KEY = (
    "modules= of a PrecisionContract has the key 'compoot' for the pattern 'head'. The keys are "
    "'parameters', 'compute', 'norms', 'param_all_gather', 'grad_reduce', 'activations', "
    "'master_weights', 'optimizer_state'. Did you mean 'compute'?"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"compute": "half"}, NO_DTYPE, id="a word that is no dtype"),
        pytest.param(
            {"compute": ("fp32", 3)},
            "was '3', which is no dtype. Choose from 'fp32', 'bf16', ",
            id="a number among dtypes",
        ),
        pytest.param(
            {"compute": "bfloat"}, "torch.dtype. Did you mean 'bf16'?", id="a similar name"
        ),
        pytest.param({"modules": {"head": {"compoot": "fp32"}}}, NO_KEY, id="no key"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        PrecisionContract(**arguments)


# The quick suite has another plant of the same wrapper, or a smaller test of the same fact.
SLOW_PLANTS = (
    "reduce_dtype does not reach tensor parallel",
    "an fp8 all-gather that is bf16",
    "DDP under fp16_compress_hook",
    "HSDP reduces in bf16",
    "tensor parallel sends fp32",
    "sequence parallel sends fp32",
    "a compiled block in fp32",
)
PLANT_CASES = []
for number, plant in enumerate(PLANTS):
    marks = pytest.mark.slow if plant.name in SLOW_PLANTS else ()
    PLANT_CASES.append(pytest.param(plant.ranks, number, id=plant.name, marks=marks))


@on_ranks("size")
@pytest.mark.parametrize(("size", "number"), PLANT_CASES)
def test_a_planted_violation_is_found(size, number):
    plant = PLANTS[number]
    if "OSS" in plant.name:
        pytest.importorskip("fairscale")
    contract = PrecisionContract(**plant.contract)
    with warnings.catch_warnings(action="ignore"):
        arguments = plant.build()
        violations = contract.check(*arguments)
    answers = [plant.is_found_by(violation) for violation in violations]
    assert any(answers), str(violations)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ >= "2.15", reason="mended in torch 2.15")
@on_ranks(2)
def test_fsdps_reduce_dtype_does_not_reach_the_sum_over_tensor_parallel_ranks():
    """The code repeats the report in pytorch#190626."""
    grid = mesh((1, 2), ("dp", "tp"))
    net = parallel(Net(attends=False), grid["tp"], sequence=True)
    model = sharded(net, grid["dp"], param_dtype=BF16, reduce_dtype=FP32)
    contract = PrecisionContract(grad_reduce="fp32", activations="bf16")
    report = contract.check(*trained(model))
    (violation,) = report
    assert violation.key == "grad_reduce"
    assert violation.found == "bf16"
    assert violation.op == "all_reduce"
    assert violation.where == ("blocks.*",)
    assert violation.ranks == (0, 1)
    assert violation.group[-3:] == "[2]"
    assert "reduce_dtype" in violation.fix
    assert report.seen["activations"]["bf16"] > 4


@on_ranks(2)
def test_a_step_that_raises_on_one_rank_hangs_none():
    rank = dist.get_rank()
    step, model, optimizer = trained(Net(), region=BF16)

    def step_that_fails_on_rank_1() -> None:
        step()
        if rank == 1:
            raise ValueError("no data")

    message = "^no data$"
    if rank == 0:
        message = "raised on rank 1: ValueError: no data$"
    for _ in range(2):
        with pytest.raises((ValueError, distamp.DistampError), match=message):
            PrecisionContract().check(step_that_fails_on_rank_1, model, optimizer)


@on_ranks(2)
def test_patterns_have_to_match_on_one_rank_alone():
    """In a pipeline, each rank has only the modules of its stage."""
    model = nn.Sequential()
    model.add_module(f"stage{dist.get_rank()}", nn.Linear(2, 2))
    patterns = {"stage0": {"compute": "fp32"}, "stage1": {"compute": "bf16"}}
    contract = PrecisionContract(modules=patterns)
    (violation,) = contract.check(lambda: model(torch.ones(1, 2)), model)
    assert violation.where == ("stage1",)
    assert violation.ranks == (1,)


@on_ranks(2)
def test_a_pattern_that_matches_on_no_rank_raises():
    model = nn.Sequential()
    model.add_module(f"stage{dist.get_rank()}", nn.Linear(2, 2))
    contract = PrecisionContract(modules={"stage2": "fp32"})
    with pytest.raises(ConfigError, match="'stage2' matches no module"):
        contract.check(lambda: None, model)


@on_ranks(2)
def test_a_message_of_a_guard_is_not_taken_for_a_gradient_of_equal_size():
    """The bias of a classifier of two classes has as many elements as the guard's message."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    amp = distamp.initialize(model, optimizer, "bf16")
    assert not amp.check(lambda: train(amp, [BATCH], max_norm=1.0))


def make_sharded_layers() -> Any:
    """Return two linear layers that FSDP2 shards over all ranks."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return fully_shard(layers)


@on_ranks(2)
@pytest.mark.parametrize("level", ["bf16", "fp16"])
def test_weights_that_a_hook_gathers_are_gathered_and_no_gradients(level):
    model = make_sharded_layers()
    hook = register_comm_hook(model, "int8", param_format="int8")
    optimizer = torch.optim.AdamW(model.parameters())
    amp = distamp.initialize(model, optimizer, level)
    assert amp.comm_hooks == (hook,)
    batch = torch.ones(4, 64), torch.zeros(4, dtype=torch.int64)
    report = amp.check(lambda: train(amp, [batch], max_norm=1.0))
    assert not report
    assert list(report.seen["param_all_gather"]) == ["int8"]
    assert list(report.seen["grad_reduce"]) == ["int8"]


@on_ranks(2)
@pytest.mark.parametrize("param_format", ["int8", "bf16"])
def test_a_contract_names_weights_that_a_hook_gathers_in_another_format(param_format):
    model = make_sharded_layers()
    hook = register_comm_hook(model, "fp16", param_format=param_format)

    def step() -> None:
        loss = model(torch.ones(4, 64)).sum()
        loss.backward()

    contract = PrecisionContract(param_all_gather="fp32", grad_reduce="fp16")
    (violation,) = contract.check(step, model, hooks=[hook])
    assert violation.key == "param_all_gather"
    assert violation.declared == ("fp32",)
    assert violation.found == param_format


@on_ranks(2)
def test_gradients_that_would_grow_in_a_hooks_format_are_no_breach():
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    amp = distamp.initialize(model, optimizer, "bf16", comm_hook="int8")
    report = amp.check(lambda: train(amp, [BATCH], max_norm=1.0))
    assert not report
    assert list(report.seen["grad_reduce"]) == ["fp32"]


@on_ranks(2)
@pytest.mark.parametrize(
    ("level", "output", "sent_dtype"),
    [
        pytest.param("fp16-O2", None, "fp32", id="fp16-O2"),
        pytest.param("bf16-O2", None, "fp32", id="bf16-O2"),
        pytest.param("bf16-O3", None, "fp32", id="bf16-O3"),
        pytest.param("fp16-O2", torch.float16, "fp16", id="fp16-O2 with output in fp16"),
        pytest.param("bf16-O2", BF16, "bf16", id="bf16-O2 with output in bf16"),
        pytest.param("bf16-O3", BF16, "bf16", id="bf16-O3 with output in bf16"),
    ],
)
def test_what_pipeline_stages_send_is_what_the_level_makes_them_return(level, output, sent_dtype):
    rank = dist.get_rank()
    loss_scale = None
    if level == "fp16-O2":
        loss_scale = 1.0
    precision = distamp.PrecisionLevel.from_name(level, loss_scale=loss_scale)
    if output is not None:
        precision = precision.replace(output=output)
    torch.manual_seed(rank)
    module = distamp.cast_model(nn.Linear(8, 8), precision)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    amp = distamp.initialize(module, optimizer, precision)

    def compute_loss(y: Tensor, target: Tensor) -> Any:
        loss = (y.float() - target).mean()
        if hasattr(amp.scaler, "scale"):
            return amp.scaler.scale(loss)
        return loss

    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    pipeline = ScheduleGPipe(stage, 2, loss_fn=compute_loss)

    def step() -> None:
        batch = torch.ones(4, 8)
        if rank == 0:
            pipeline.step(batch)
        else:
            pipeline.step(target=batch)
        amp.step()

    step()
    report = amp.check(step)
    assert not report, str(report)
    assert list(report.seen["activations"]) == [sent_dtype]
    (violation,) = PrecisionContract(activations="fp64").check(step, module)
    assert "PrecisionLevel.from_name(level).replace(output=dtype)" in violation.fix


@on_ranks(2)
def test_what_tensor_parallel_modules_send_stays_in_the_levels_dtype():
    """A contract that allows fp32 outside of modules does not allow it inside."""
    model = parallel(Net(attends=False), mesh((2,), ("tp",)))
    contract = PrecisionContract(activations="bf16", modules={"(outside)": {"activations": "fp32"}})
    report = contract.check(*trained(model))
    assert set(list_keys_and_dtypes(report)) == {("activations", "fp32")}

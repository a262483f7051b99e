"""Tests of `find_first_nonfinite` and `StepReplay`, which name the first NaN or inf of a step."""

import copy
import logging
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

import distamp
from distamp.errors import CallOrderError
from distamp.report import StepReplay
from tests.levels.cells import wrapped
from tests.on_ranks import on_ranks
from tests.place import rank_device
from tests.quick_cases import quick_cases
from tests.ranks import RankPool, logged, mesh
from tests.report.plants_nonfinite import FAULTS, Fault
from tests.report.setups import parallel

INF = float("inf")
NAN = float("nan")


def log(x: Tensor) -> Tensor:
    """Return a log that is -inf for negative elements."""
    return torch.log(x.relu())


def log_on_rank_1(x: Tensor) -> Tensor:
    """Return the log on rank 1, and the input on rank 0."""
    if dist.get_rank() == 1:
        return log(x)
    return x


def overflow_in_fp16(x: Tensor) -> Tensor:
    """Multiply matrices to numbers beyond the range of fp16."""
    rows = x.half() * 1e4
    columns = x.half().T * 1e2
    return torch.matmul(rows, columns).float() @ x


def divide_in_place(x: Tensor) -> Tensor:
    """Divide a copy by 0 in place."""
    return x.clone().div_(0.0)


def overflow_in_backward(x: Tensor) -> Tensor:
    """Add a product of 0, whose gradient is beyond the range of fp16."""
    zeros = x.half() * 0
    large = torch.full((16, 16), 6e4).half()
    product = torch.matmul(zeros, large) * 1e4
    return x + product.float()


root_of_0 = FAULTS["sqrt'"].change
softmax_of_masked_row = FAULTS["softmax of -inf"].change

# The faults that need no second rank.
LOCAL_FAULTS = {kind: fault for kind, fault in FAULTS.items() if "collective" not in kind}
LOCAL_FAULTS["a product in fp16"] = Fault(overflow_in_fp16, "matmul", ("mm",))
LOCAL_FAULTS["in place"] = Fault(divide_in_place, "div", ("div_",))
LOCAL_FAULTS["a product's backward"] = Fault(overflow_in_backward, "matmul", ("mm",), forward=False)


class Block(nn.Module):
    """A feed-forward block with an optional fault in its hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.1)
        self.fault: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if self.fault is not None:
            hidden = self.fault(hidden)
        return x + self.dropout(self.down(F.gelu(hidden)))


class Net(nn.Module):
    """A batch norm, attention with a causal mask of -inf, and three blocks.

    The fault is in the second block. Blocks are checkpointed unless ``use_reentrant`` is None.
    """

    def __init__(
        self,
        fault: Callable[[Tensor], Tensor] | None = None,
        use_reentrant: bool | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].fault = fault
        self.use_reentrant = use_reentrant
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.inp(x))
        scores = x @ x.T + self.mask
        x = torch.softmax(scores, -1) @ x
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def make_microbatches(seed: int = 1) -> Tensor:
    """Return two random microbatches."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, 8, generator=generator)


def make_step(model: nn.Module, microbatches: Tensor, scale: float = 1.0) -> Callable[[], Tensor]:
    """Return a step with a backward pass for each microbatch; it returns the sum of the losses."""

    def step() -> Tensor:
        total = torch.zeros((), device=microbatches.device)
        for microbatch in microbatches:
            loss = model(microbatch).pow(2).mean() * scale
            loss.backward()
            total = total + loss.detach()
        return total

    return step


def find_origin(model: nn.Module) -> Any:
    """Return the origin of the first nonfinite value in a step, or None."""
    step = make_step(model, make_microbatches())
    return distamp.find_first_nonfinite(step, model)


# Forward and backward, in place, in a checkpoint of each kind; the other cases are slow.
QUICK_CASES = (
    "fp16 product",
    "softmax of -inf",
    "custom'",
    "in place",
    "a product's backward in a reentrant checkpoint",
    "log in a checkpoint",
)


def make_fault_cases() -> list[Any]:
    """Return each fault in a block without a checkpoint, and in both kinds of checkpoints."""
    cases = []
    for kind, fault in LOCAL_FAULTS.items():
        names = {
            None: kind,
            True: f"{kind} in a reentrant checkpoint",
            False: f"{kind} in a checkpoint",
        }
        for use_reentrant, name in names.items():
            marks = () if name in QUICK_CASES else pytest.mark.slow
            cases.append(pytest.param(fault, use_reentrant, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("fault", "use_reentrant"), make_fault_cases())
def test_a_fault_is_found_where_it_is_planted(fault, use_reentrant):
    origin = find_origin(Net(fault.change, use_reentrant))
    assert origin.kind == "op"
    assert origin.op == fault.function
    assert origin.kernel in fault.kernels
    assert origin.module == "blocks.1"
    assert origin.direction == ("forward" if fault.forward else "backward")
    assert origin.ranks == (0,)
    assert str(Path(__file__).parent) in origin.line


def test_a_mask_of_inf_does_not_count():
    assert find_origin(Net()) is None


def test_an_inf_that_reaches_neither_loss_nor_gradient_does_not_count():
    def add_replaced_log(x: Tensor) -> Tensor:
        finite = torch.nan_to_num(x.log(), nan=0.0, posinf=0.0, neginf=0.0)
        return x + finite.detach()

    assert find_origin(Net(add_replaced_log)) is None


@pytest.fixture(scope="module")
def origin_in_microbatch_1() -> Any:
    """Return the origin of an inf in the second microbatch."""
    model = Net()
    microbatches = make_microbatches()
    microbatches[1, 2, 3] = INF
    return distamp.find_first_nonfinite(make_step(model, microbatches), model)


def test_the_input_of_one_micro_batch_is_named(origin_in_microbatch_1):
    origin = origin_in_microbatch_1
    assert origin.kind == "input"
    assert origin.op == "linear"
    assert origin.module == "inp"
    assert origin.micro_batch == 1


@pytest.mark.slow
def test_the_sentence_about_an_input_says_that_no_operation_made_it(origin_in_microbatch_1):
    sentence = origin_in_microbatch_1.sentence()
    assert "no operation had made" in sentence
    assert origin_in_microbatch_1.to_dict()["sentence"] == sentence


@pytest.mark.slow
def test_the_text_about_an_input_lists_no_output(origin_in_microbatch_1):
    """The output would be the input again."""
    assert "  output " not in str(origin_in_microbatch_1)


def nest(matrix: Tensor, layout: torch.layout) -> Tensor:
    """Return a nested tensor of one matrix."""
    return torch.nested.as_nested_tensor([matrix], layout=layout)


STORE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda matrix: matrix.to_sparse_coo(),
    "csr": lambda matrix: matrix.to_sparse_csr(),
    "csc": lambda matrix: matrix.to_sparse_csc(),
    "bsr": lambda matrix: matrix.to_sparse_bsr((2, 2)),
    "bsc": lambda matrix: matrix.to_sparse_bsc((2, 2)),
    "nested strided": lambda matrix: nest(matrix, torch.strided),
    "nested jagged": lambda matrix: nest(matrix, torch.jagged),
    "mkldnn": lambda matrix: matrix.to_mkldnn(),
}


def read_matrix(tensor: Tensor, layout: str) -> Tensor:
    """Return the matrix that a tensor of a layout stores."""
    if layout == "nested strided":
        return torch.nested.to_padded_tensor(tensor, 0.0)
    if layout == "nested jagged":
        return tensor.values()
    return tensor.to_dense()


def make_step_with_logs_in_layout(model: nn.Module, layout: str, number: float) -> Any:
    """Return a step that stores the log of a number in a layout, and reads it from there."""

    def step() -> None:
        logs = torch.full((4, 4), number).log()
        stored = STORE[layout](logs)
        inputs = read_matrix(stored, layout)
        model(inputs).sum().backward()

    return step


def ignore_warnings_of_layouts(test: Any) -> Any:
    """Decorate a test of layouts that torch calls experimental."""
    sparse = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
    nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    return sparse(nested(test))


SPARSE_AND_NESTED = [layout for layout in STORE if layout != "mkldnn"]


@ignore_warnings_of_layouts
@pytest.mark.parametrize("layout", SPARSE_AND_NESTED)
def test_tensors_of_every_layout_are_looked_at(layout):
    model = nn.Linear(4, 4)
    finite_step = make_step_with_logs_in_layout(model, layout, 1.0)
    assert distamp.find_first_nonfinite(finite_step, model) is None
    infinite_step = make_step_with_logs_in_layout(model, layout, 0.0)
    origin: Any = distamp.find_first_nonfinite(infinite_step, model)
    assert origin.op == "log"
    assert origin.kernel == "log"
    assert origin.output.low == -INF


@ignore_warnings_of_layouts
@pytest.mark.parametrize("layout", SPARSE_AND_NESTED)
def test_a_step_with_tensors_of_every_layout_is_reported(layout):
    model = nn.Linear(4, 4)
    step = make_step_with_logs_in_layout(model, layout, 1.0)
    with distamp.precision_report(model) as report:
        step()
    operators = {(row.module, row.op) for row in report.rows}
    assert ("", "addmm") in operators


@ignore_warnings_of_layouts
@pytest.mark.parametrize("layout", STORE)
def test_an_input_of_every_layout_that_holds_an_inf_is_named(layout):
    model = nn.Linear(4, 4)
    inputs = STORE[layout](torch.full((4, 4), INF))

    def step() -> None:
        matrix = read_matrix(inputs, layout)
        model(matrix).sum().backward()

    origin: Any = distamp.find_first_nonfinite(step, model)
    assert origin.kind == "input"
    assert origin.output.high == INF


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_quantised_tensors_and_dtypes_without_infinity_stop_no_search():
    model = nn.Linear(4, 4)

    def step() -> None:
        quantised = torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8)
        packed = torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).clone()
        scales = torch.ones(2, 4).to(torch.float8_e8m0fnu)
        assert packed.dtype is torch.float4_e2m1fn_x2
        inputs = quantised.dequantize() * scales.float()
        model(inputs).sum().backward()

    assert distamp.find_first_nonfinite(step, model) is None


@torch.no_grad()
def write_nan(model: nn.Module, name: str) -> None:
    """Write NaN into the first element of a parameter or a buffer."""
    model.state_dict()[name].view(-1)[0] = NAN


@pytest.mark.parametrize(
    ("name", "module"),
    [
        pytest.param("blocks.2.down.weight", "blocks.2.down", id="weight of a layer"),
        pytest.param(
            "blocks.0.norm.bias", "blocks.0.norm", id="bias of a norm", marks=pytest.mark.slow
        ),
    ],
)
def test_a_parameter_that_is_nan_is_named(name, module):
    model = Net()
    write_nan(model, name)
    origin = find_origin(model)
    assert origin.kind == "parameter"
    assert origin.parameter == name
    assert origin.module == module


def test_a_buffer_that_is_nan_is_named():
    model = Net()
    write_nan(model, "bn.running_mean")
    model.bn.eval()
    origin = find_origin(model)
    assert origin.kind == "buffer"
    assert origin.parameter == "bn.running_mean"
    assert origin.module == "bn"


def test_a_gradient_that_overflows_as_it_is_accumulated():
    model = nn.Linear(8, 8, dtype=torch.float16)
    microbatch = torch.ones(4, 8, dtype=torch.float16)

    def step() -> None:
        for _ in range(2):
            loss = model(microbatch).sum() * 1e4
            loss.backward()

    origin: Any = distamp.find_first_nonfinite(step, model)
    assert origin.op == "accumulate_grad"
    assert origin.direction == "backward"
    assert origin.micro_batch == 1
    assert origin.parameter in ("weight", "bias")


def test_the_loss_counts_where_all_gradients_are_finite():
    model = nn.Linear(8, 8)

    def step() -> None:
        large = model(torch.ones(2, 8)) + 3e38
        large.sum().backward()

    origin: Any = distamp.find_first_nonfinite(step, model)
    assert origin.op == "sum"
    assert origin.module == "(outside)"
    assert origin.reached == ("loss",)


def test_a_search_restores_parameters_and_buffers():
    model = Net(log)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    assert find_origin(model) is not None
    values_after = model.state_dict()
    for name, value in values.items():
        assert torch.equal(value, values_after[name])


def test_a_search_restores_random_number_generators():
    model = Net(log)
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    assert find_origin(model) is not None
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


@pytest.mark.slow
def test_gradients_are_none_after_a_search():
    model = Net(log)
    step = make_step(model, make_microbatches())
    step()
    assert distamp.find_first_nonfinite(step, model) is not None
    for param in model.parameters():
        assert param.grad is None


def test_a_step_that_was_bad_and_is_replayed_finite_is_said_to_be_unseen():
    model = Net()
    step = make_step(model, make_microbatches())
    step()
    model.inp.weight.grad.fill_(INF)
    origin: Any = distamp.find_first_nonfinite(step, model)
    assert origin.kind == "unseen"


FAULTS_OF_A_REPLAY = pytest.mark.parametrize(
    "fault",
    [
        pytest.param(log, id="log", marks=pytest.mark.slow),
        pytest.param(softmax_of_masked_row, id="softmax of -inf"),
    ],
)


@FAULTS_OF_A_REPLAY
def test_a_step_that_is_not_deterministic_is_said_to_be(fault):
    model = Net(fault)
    seeds = iter(range(9))

    def step_with_new_microbatches() -> Tensor:
        microbatches = make_microbatches(next(seeds))
        return make_step(model, microbatches)()

    origin: Any = distamp.find_first_nonfinite(step_with_new_microbatches, model)
    note = "the step is not deterministic: a second replay computed other numbers"
    assert origin.notes == (note,)


@pytest.mark.slow
@FAULTS_OF_A_REPLAY
def test_a_deterministic_step_has_no_note(fault):
    assert find_origin(Net(fault)).notes == ()


@pytest.mark.parametrize("scaler_class", [distamp.DistGradScaler, torch.amp.GradScaler])
def test_a_scaler_that_has_no_scale_yet_makes_no_step_random(scaler_class):
    """A scaler makes its scale in the first run of the step."""
    model = nn.Linear(4, 1)
    scaler = scaler_class("cpu", init_scale=2.0**127)

    def step() -> None:
        loss = model(torch.full((2, 4), 1e3)).sum()
        scaler.scale(loss).backward()

    origin = distamp.find_first_nonfinite(step, model)
    assert origin is not None
    assert origin.notes == ()


def test_the_line_of_what_amp_scales_is_the_users():
    model = nn.Linear(4, 1)
    amp = distamp.initialize(model, torch.optim.SGD(model.parameters()), "fp16")

    def step() -> None:
        loss = model(torch.ones(2, 4)).sum()
        amp.backward(loss * 1e37)

    origin = distamp.find_first_nonfinite(step, model)
    assert origin is not None
    assert __file__ in origin.line


@pytest.mark.slow
def test_a_compiled_model_is_replayed_eagerly(fresh_dynamo):
    origin = find_origin(torch.compile(Net(log), backend="eager"))
    assert origin.op == "log"
    assert origin.module == "blocks.1"
    (note,) = origin.notes
    assert "compiled code ran eagerly" in note


class OverflowBetweenCasts(nn.Module):
    """A model that overflows in fp16, unless a compiler removes the cast to fp16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        product = (self.inner(x) * 300.0).half() * 300.0
        return product.float() / 90000.0


class FiniteModel(nn.Module):
    """A model with a finite eager run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1.0


def remove_casts(graph: Any, example_inputs: Any) -> Any:
    """Compile like inductor, with float32 between the operations of a fused kernel."""
    for node in graph.graph.nodes:
        if node.target == "half":
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


def multiply_by_inf(graph: Any, example_inputs: Any) -> Any:
    """Compile a graph to code that returns infinite outputs."""

    def run(*inputs: Any) -> list[Tensor]:
        return [output * INF for output in graph.forward(*inputs)]

    return run


def compile_model(model: nn.Module, target: str, backend: Any) -> Callable[[Tensor], Tensor]:
    """Return a compiled call of a model."""
    if target == "model.compile()":
        model.compile(backend=backend)
        return model
    if target == "torch.compile(model)":
        return torch.compile(model, backend=backend)
    return torch.compile(lambda x: model(x), backend=backend)


COMPILE_TARGETS = pytest.mark.parametrize(
    "target", ["model.compile()", "torch.compile(model)", "torch.compile(function)"]
)


def make_step_of_call(call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """Return a step with the mean square of a call as its loss."""

    def step() -> None:
        loss = call(x).square().mean()
        loss.backward()

    return step


@COMPILE_TARGETS
def test_a_compiled_step_that_is_finite_has_no_answer(target, fresh_dynamo, caplog):
    """The eager replay of the step overflows, and the compiled step does not."""
    x = torch.full((2, 8), 3.0)
    eager_model = OverflowBetweenCasts()
    eager_step = make_step_of_call(eager_model, x)
    assert distamp.find_first_nonfinite(eager_step, eager_model) is not None

    model = OverflowBetweenCasts()
    call = compile_model(model, target, remove_casts)
    assert call(x).isfinite().all()
    assert distamp.find_first_nonfinite(make_step_of_call(call, x), model) is None
    assert "the compiled step was finite. Its eager replay was not: mul in" in caplog.text


@COMPILE_TARGETS
def test_a_step_that_only_its_compiler_spoils_is_unseen_and_compilation_is_named(
    target, fresh_dynamo
):
    model = FiniteModel()
    call = compile_model(model, target, multiply_by_inf)
    step = make_step_of_call(call, torch.ones(2, 8))
    origin = distamp.find_first_nonfinite(step, model)
    assert origin is not None
    assert origin.kind == "unseen"
    assert "compiled code is the suspect" in str(origin)
    assert "compiled code ran eagerly" in str(origin)


def test_a_skipped_step_whose_compiled_run_is_finite_again_is_unseen(fresh_dynamo):
    model = OverflowBetweenCasts()
    x = torch.full((2, 8), 3.0)
    call = compile_model(model, "torch.compile(model)", remove_casts)
    step = make_step_of_call(call, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard, replay = attach_guard(model)
    replay.record(step, x)
    step()
    model.inner.weight.grad.fill_(INF)
    guard.step(optimizer)
    guard.update()
    assert replay.found.kind == "unseen"
    assert "the compiled step was finite" in str(replay.found)
    assert "the step may depend on state that the replay does not restore" in str(replay.found)


def find_origins_on_device() -> list[Any]:
    """Return the origins of a finite step, of a log and of a root on the device of this rank."""
    device = rank_device()
    microbatches = make_microbatches().to(device)
    origins = []
    for fault in (None, log, root_of_0):
        model = Net(fault).to(device)
        step = make_step(model, microbatches)
        origins.append(distamp.find_first_nonfinite(step, model))
    return origins


def test_backward_passes_of_a_device_are_watched_too(sim: RankPool):
    (origins,) = sim.run(find_origins_on_device)
    finite_step, log_of_0, root = origins
    assert finite_step is None
    assert log_of_0.op == "log"
    assert log_of_0.direction == "forward"
    assert root.op == "sqrt"
    assert root.module == "blocks.1"
    assert root.direction == "backward"


LAYOUTS = ("DDP", "DDP, torch's", "DDP, int8", "FSDP1", "FSDP2", "TP")


def distribute(model: Any, layout: str) -> nn.Module:
    """Return a model in a layout over two ranks."""
    if layout == "TP":
        return parallel(model, mesh((2,), ("tp",)))
    wrapper, _, hook = layout.partition(", ")
    model = wrapped(model, wrapper, None, "")
    if hook == "torch's":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook:
        distamp.comm_hooks.register_comm_hook(model, hook)
    return model


def find_origin_in_layout(layout: str, model: nn.Module, scale: float = 1.0) -> Any:
    """Return the origin in a step on two ranks, after which gradients must be None.

    Ranks of tensor parallel have the same microbatches, and other ranks have their own.
    """
    warnings.filterwarnings("ignore")
    seed = 1 if layout == "TP" else dist.get_rank()
    distributed_model = distribute(model, layout)
    step = make_step(distributed_model, make_microbatches(seed), scale)
    origin = distamp.find_first_nonfinite(step, distributed_model)
    for param in distributed_model.parameters():
        assert param.grad is None
    return origin


def check_same_on_all_ranks(origin: Any) -> None:
    """Assert that both ranks have an origin."""
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, origin)
    assert gathered == [origin, origin]


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_finite_step_has_no_origin_in_any_layout(layout):
    origin = find_origin_in_layout(layout, Net())
    check_same_on_all_ranks(origin)
    assert origin is None


# Other quick tests search under communication hooks, and under FSDP2 (test_gathered.py).
@on_ranks(2)
@pytest.mark.parametrize("layout", quick_cases(LAYOUTS, quick=["DDP"]))
def test_a_root_of_0_is_found_in_the_backward_pass_of_both_ranks(layout):
    origin = find_origin_in_layout(layout, Net(root_of_0, use_reentrant=True))
    check_same_on_all_ranks(origin)
    assert origin.op == "sqrt"
    assert origin.module == "blocks.1"
    assert origin.direction == "backward"
    assert origin.ranks == (0, 1)
    assert origin.micro_batch == 0


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_log_of_0_on_one_rank_is_found_on_that_rank(layout):
    origin = find_origin_in_layout(layout, Net(log_on_rank_1, use_reentrant=False))
    check_same_on_all_ranks(origin)
    assert origin.op == "log"
    assert origin.module == "blocks.1"
    assert origin.direction == "forward"
    assert origin.ranks == (1,)
    assert origin.micro_batch == 0


@on_ranks(2)
def test_a_hook_that_overflows_is_named():
    origin = find_origin_in_layout("DDP, torch's", Net(), scale=1e8)
    assert origin.kernel == "_to_copy"
    assert origin.direction == "backward"
    assert origin.ranks == (0, 1)
    assert "default_hooks.py" not in origin.line


@on_ranks(2)
def test_residuals_of_a_hook_stay_and_it_is_said_to_be_left_out():
    model: Any = distribute(Net(), "DDP, int8")
    _, hook_state = model._comm_hooks[0]
    step = make_step(model, make_microbatches())
    step()
    residuals = copy.deepcopy(hook_state.state_dict()["residuals"])
    model.module.blocks[1].fault = log
    origin: Any = distamp.find_first_nonfinite(step, model)

    residuals_after = hook_state.state_dict()["residuals"]
    assert residuals_after.keys() == residuals.keys()
    for key, tensors in residuals.items():
        for tensor, tensor_after in zip(tensors, residuals_after[key], strict=True):
            assert torch.equal(tensor, tensor_after)
    assert origin.notes == ("the communication hook compressed_hook was left out",)


@on_ranks(2)
def test_a_collective_that_overflows_is_the_origin():
    def add_large_numbers(x: Tensor) -> Tensor:
        large = x.detach().abs() + 3e38
        dist.all_reduce(large)
        return x * large

    origin = find_origin_in_layout("DDP", Net(add_large_numbers))
    assert origin.kind == "collective"
    assert origin.kernel == "allreduce_"
    assert origin.ranks == (0, 1)
    assert [sent.name for sent in origin.inputs] == ["rank 0", "rank 1"]
    for sent in origin.inputs:
        assert sent.finite


@pytest.mark.slow
@on_ranks(2)
def test_a_collective_that_a_rank_fed_an_inf_is_not_the_origin():
    def add_inf_of_rank_1(x: Tensor) -> Tensor:
        large = x.detach().abs() + 3e38
        if dist.get_rank() == 1:
            large = large * 10
        dist.all_reduce(large)
        return x * large

    origin = find_origin_in_layout("DDP", Net(add_inf_of_rank_1))
    assert origin.kind == "op"
    assert origin.op == "mul"
    assert origin.ranks == (1,)
    assert origin.carried_by == ("allreduce_ over default_pg",)


@on_ranks(2)
@pytest.mark.parametrize(
    ("faulty_stage", "kind"),
    [
        pytest.param(0, "log", id="log in the first stage"),
        pytest.param(1, "sqrt'", id="root in the last stage", marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_is_followed_over_send_and_recv(faulty_stage, kind):
    rank = dist.get_rank()
    block = Block()
    if rank == faulty_stage:
        block.fault = FAULTS[kind].change
    stage = PipelineStage(block, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda x, y: (x - y).pow(2).mean())
    inputs = torch.randn(8, 8)
    targets = torch.zeros(8, 8)

    def step() -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)

    # In their first step, stages send the shapes of their outputs.
    step()
    origin = distamp.find_first_nonfinite(step, block)
    assert origin.op == FAULTS[kind].function
    assert origin.ranks == (faulty_stage,)
    assert origin.micro_batch == 0
    assert origin.module == ""


def attach_guard(model: nn.Module) -> tuple[distamp.StepGuard, StepReplay]:
    """Return a guard, and the replay of the steps that it skips."""
    guard = distamp.StepGuard()
    return guard, StepReplay(model).attach(guard)


def train_once(
    stepper: Any,
    replay: StepReplay,
    model: nn.Module,
    step: Callable[[], Any],
    grad_value: float | None = None,
) -> None:
    """Record a step, run it and update the weights with a guard or a scaler.

    ``grad_value`` replaces an element of a gradient after the step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    replay.record(step)
    step()
    if grad_value is not None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        grads[0].view(-1)[0] = grad_value
    stepper.step(optimizer)
    stepper.update()


def test_a_replay_names_the_origin_of_a_step_that_a_guard_skipped():
    model = Net()
    guard, replay = attach_guard(model)
    step = make_step(model, make_microbatches())
    train_once(guard, replay, model, step)
    assert replay.found is None
    model.blocks[1].fault = log
    train_once(guard, replay, model, step)
    assert replay.found.op == "log"
    assert replay.found.notes == ()


def test_a_row_of_skipped_steps_logs_its_origin_once(caplog):
    model = Net(log)
    guard, replay = attach_guard(model)
    for _ in range(2):
        train_once(guard, replay, model, make_step(model, make_microbatches()))
    (record,) = [record for record in caplog.records if record.name == "distamp.report"]
    assert record.levelno == logging.WARNING
    assert "log in blocks.1 made inf" in record.getMessage()


@pytest.mark.slow
def test_a_skipped_step_moves_the_statistics_of_a_batch_norm_although_it_is_replayed():
    model = Net(log)
    guard, replay = attach_guard(model)
    running_mean = model.bn.running_mean.clone()
    train_once(guard, replay, model, make_step(model, make_microbatches()))
    assert replay.found is not None
    assert not torch.equal(running_mean, model.bn.running_mean)


def test_a_scaler_replays_a_nan_at_once_and_an_overflow_at_the_third():
    """A scaler overflows twice in its search for a scale, so two overflows need no replay."""
    model = Net()
    scaler = distamp.DistGradScaler("cpu", init_scale=4.0)
    replay = StepReplay(model).attach(scaler)
    microbatch = make_microbatches()[0]

    def step() -> None:
        loss = model(microbatch).sum()
        scaler.scale(loss).backward()

    def train_and_return_whether_replayed(grad_value: float | None) -> bool:
        origin_before = replay.found
        train_once(scaler, replay, model, step, grad_value)
        return replay.found is not origin_before

    grad_values = (INF, INF, None, INF, INF, INF, INF, None, NAN, NAN)
    third_overflow, first_nan = 5, 8
    replayed_steps = []
    for step_number, grad_value in enumerate(grad_values):
        if train_and_return_whether_replayed(grad_value):
            replayed_steps.append(step_number)
    assert replayed_steps == [third_overflow, first_nan]
    assert replay.found.kind == "unseen", "the replay does not write into gradients"


def test_a_nan_is_replayed_at_once_where_masters_took_the_gradients():
    model = nn.Linear(8, 8)
    amp = distamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-O2")
    replay = StepReplay(model).attach(amp.scaler)
    inputs = torch.full((2, 8), NAN)

    def step() -> None:
        loss = amp.model(inputs).sum()
        amp.backward(loss)

    replay.record(step, inputs)
    step()
    assert not amp.step()
    assert replay.found.kind == "input"


def test_a_scaled_step_is_replayed_at_the_scale_that_it_had():
    model = nn.Linear(8, 8)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    scaler = distamp.DistGradScaler("cpu", init_scale=2.0**127, max_scale=2.0**127)
    replay = StepReplay(model).attach(scaler)
    scales = []

    def step() -> None:
        scales.append(scaler.get_scale())
        loss = model(torch.full((2, 8), 1e3)).sum()
        scaler.scale(loss).backward()

    for _ in range(3):
        train_once(scaler, replay, model, step)
    scales_of_steps = scales[:3]
    scales_of_replays = scales[3:]
    assert scales_of_steps == [2.0**127, 2.0**126, 2.0**125]
    assert set(scales_of_replays) == {2.0**125}
    assert scaler.get_scale() == 2.0**124
    assert replay.found.op == "linear"
    assert replay.found.kernel == "mm"
    assert replay.found.direction == "backward"


@on_ranks(2)
def test_a_step_that_raises_on_one_rank_raises_on_all():
    model = nn.Linear(4, 4)
    rank = dist.get_rank()
    raises = rank == 1

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        if raises:
            raise ValueError("no data")

    error: type[Exception] = ValueError
    message = "^no data$"
    if rank == 0:
        error = distamp.DistampError
        message = "^the step that is replayed raised on rank 1: ValueError: no"
    with pytest.raises(error, match=message):
        distamp.find_first_nonfinite(step, model)
    assert model.weight.grad is None
    raises = False
    assert distamp.find_first_nonfinite(step, model) is None


def test_a_batch_that_changed_in_place_is_said():
    model = Net(log)
    microbatches = make_microbatches()
    step = make_step(model, microbatches)
    guard, replay = attach_guard(model)
    replay.record(step, {"batches": [microbatches]})
    step()
    microbatches.add_(1.0)
    guard.step(torch.optim.SGD(model.parameters()))
    guard.update()
    assert replay.found.notes == ("a batch was changed in place since the step was recorded",)


def test_a_search_refuses_a_model_in_place_of_a_step():
    with pytest.raises(TypeError, match="find_first_nonfinite takes a function that runs forward"):
        distamp.find_first_nonfinite(Net(), lambda: None)  # type: ignore[arg-type]


def test_a_replay_that_is_not_attached_records_no_step():
    replay = StepReplay(nn.Linear(1, 1))
    with pytest.raises(CallOrderError, match=r"Attach it first: replay = StepReplay\(model\)"):
        replay.record(lambda: None)


def test_a_replay_attaches_to_a_guard_or_a_scaler_alone():
    replay = StepReplay(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"takes a StepGuard or a DistGradScaler, .* not Linear"):
        replay.attach(nn.Linear(1, 1))


def test_a_guard_refuses_a_model_in_place_of_a_replay():
    guard = distamp.StepGuard()
    with pytest.raises(TypeError, match=r"takes a StepReplay or None, not Linear"):
        guard.attach_replay(nn.Linear(1, 1))  # type: ignore[arg-type]


@on_ranks(2)
def test_all_ranks_find_the_same_and_one_logs_it():
    rank = dist.get_rank()
    model = distribute(Net(log_on_rank_1), "DDP")
    guard, replay = attach_guard(model)
    weights = [param.detach().clone() for param in model.parameters()]
    step = make_step(model, make_microbatches(rank))
    with logged("distamp.report") as lines:
        train_once(guard, replay, model, step)
    assert replay.found.op == "log"
    assert replay.found.ranks == (1,)
    for weight, param in zip(weights, model.parameters(), strict=True):
        assert torch.equal(weight, param), "the step was skipped"
    assert len(lines) == (1 if rank == 0 else 0)

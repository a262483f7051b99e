"""find_first_nonfinite: the first NaN or inf of a step, by its op, module, rank and direction."""

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
from tests.place import here
from tests.ranks import RankPool, logged, mesh
from tests.report.plants_nonfinite import FAULTS, Fault
from tests.report.setups import parallel

INF = float("inf")


def log(x: Tensor) -> Tensor:
    return torch.log(x.relu())


def log_on_rank_1(x: Tensor) -> Tensor:
    return log(x) if dist.get_rank() == 1 else x


ALONE = {kind: fault for kind, fault in FAULTS.items() if "collective" not in kind} | {
    "a product in fp16": Fault(
        lambda x: torch.matmul(x.half() * 1e4, x.half().T * 1e2).float() @ x, "matmul", ("mm",)
    ),
    "in place": Fault(lambda x: x.clone().div_(0.0), "div", ("div_",)),
    "a product's backward": Fault(
        lambda x: x + (torch.matmul(x.half() * 0, torch.full((16, 16), 6e4).half()) * 1e4).float(),
        "matmul",
        ("mm",),
        False,
    ),
}
root_of_0 = FAULTS["sqrt'"].change
fully_masked = FAULTS["softmax of -inf"].change


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.1)
        self.fault: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(self.norm(x))
        if self.fault is not None:
            inner = self.fault(inner)
        return x + self.dropout(self.down(F.gelu(inner)))


class Net(nn.Module):
    """Three blocks, checkpointed or not, behind a causal mask and a batch norm."""

    def __init__(self, fault: Callable[[Tensor], Tensor] | None = None, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].fault = fault
        self.how = how
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.inp(x))
        x = torch.softmax(x @ x.T + self.mask, -1) @ x
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=self.how == "reentrant")
                if self.how
                else block(x)
            )
        return x


def step_of(model: nn.Module, inputs: Tensor, scale: float = 1.0) -> Callable[[], Tensor]:
    def step() -> Tensor:
        total = torch.zeros((), device=inputs.device)
        for each in inputs:
            loss = model(each).pow(2).mean() * scale
            loss.backward()
            total = total + loss.detach()
        return total

    return step


def search(model: nn.Module, inputs: Tensor | None = None, step: Any = None) -> Any:
    """The first non-finite value of a step; None if there is none."""
    step = step or step_of(model, inputs_of() if inputs is None else inputs)
    return distamp.find_first_nonfinite(step, model)


def inputs_of(seed: int = 1) -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))


# -- one process --------------------------------------------------------------------------------


# Checkpointed runs that are quick enough for every run of the suite.
QUICK_CHECKPOINTED = ("a product's backward-reentrant", "sqrt'-reentrant", "log-not reentrant")


def planted_cells() -> list[Any]:
    """Return each fault alone and in a block that is checkpointed in either way."""
    cells = []
    for kind in ALONE:
        for how in ("", "reentrant", "not reentrant"):
            name = f"{kind}-{how}"
            is_quick = how == "" or name in QUICK_CHECKPOINTED
            marks = () if is_quick else pytest.mark.slow
            cells.append(pytest.param(kind, how, id=name, marks=marks))
    return cells


@pytest.mark.parametrize(("kind", "how"), planted_cells())
def test_a_fault_is_found_where_it_is_planted(kind: str, how: str) -> None:
    fault = ALONE[kind]
    found = search(Net(fault.change, how))
    assert found.op == fault.function
    assert found.module == "blocks.1"
    assert found.kernel in fault.kernels
    direction = "forward" if fault.forward else "backward"
    assert (found.kind, found.direction, found.ranks) == ("op", direction, (0,))
    assert str(Path(__file__).parent) in found.line


@pytest.mark.parametrize(
    "change", [None, lambda x: x + torch.nan_to_num(x.log(), 0.0, 0.0, 0.0).detach()]
)
def test_a_mask_of_inf_and_what_reaches_neither_loss_nor_gradient_do_not_count(change: Any) -> None:
    assert search(Net(change)) is None


def test_the_input_of_one_micro_batch_is_named() -> None:
    model, inputs = Net(), inputs_of()
    inputs[1, 2, 3] = INF
    found = search(model, inputs)
    assert (found.kind, found.op, found.module, found.micro_batch) == ("input", "linear", "inp", 1)
    assert "no operation had made" in found.to_dict()["sentence"] == found.sentence()
    assert "  output " not in str(found)  # which would be the input again


def stored_as(layout: str, x: Tensor) -> Tensor:
    """Return a (4, 4) tensor in a layout of another kind, and with the same elements."""
    if layout in ("strided", "jagged"):
        return torch.nested.as_nested_tensor([x], layout=getattr(torch, layout))
    if layout == "mkldnn":
        return x.to_mkldnn()
    blocks = ((2, 2),) if layout.startswith("bs") else ()
    return getattr(x, f"to_sparse_{layout}")(*blocks)


def elements(layout: str, x: Tensor) -> Tensor:
    if layout == "strided":
        return torch.nested.to_padded_tensor(x, 0.0)
    return x.values() if layout == "jagged" else x.to_dense()


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc", "strided", "jagged"])
def test_tensors_of_every_layout_are_looked_at(layout: str) -> None:
    """Sparse in five ways, and nested in two."""
    model = nn.Linear(4, 4)

    def step(low: float) -> None:
        values = elements(layout, stored_as(layout, torch.full((4, 4), low).log()))
        model(values).sum().backward()

    assert search(model, step=lambda: step(1.0)) is None
    found = search(model, step=lambda: step(0.0))
    assert found.op == "log"
    assert found.kernel == "log"
    assert found.output.low == -INF
    with distamp.precision_report(model) as report:
        step(1.0)
    assert any(row.module == "" and row.op == "addmm" for row in report.rows)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "layout", ["coo", "csr", "csc", "bsr", "bsc", "strided", "jagged", "mkldnn"]
)
def test_an_input_of_every_layout_that_holds_an_inf_is_named(layout: str) -> None:
    model = nn.Linear(4, 4)
    given = stored_as(layout, torch.full((4, 4), INF))
    found = search(model, step=lambda: model(elements(layout, given)).sum().backward())
    assert found.kind == "input"
    assert found.output.high == INF


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_quantised_tensors_and_dtypes_without_infinity_stop_no_search() -> None:
    model = nn.Linear(4, 4)

    def step() -> None:
        quantised = torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8)
        packed = torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).clone()
        scales = torch.ones(2, 4).to(torch.float8_e8m0fnu)
        assert packed.dtype is torch.float4_e2m1fn_x2
        model(quantised.dequantize() * scales.float()).sum().backward()

    assert search(model, step=step) is None


@pytest.mark.parametrize("name", ["blocks.2.down.weight", "bn.running_mean", "blocks.0.norm.bias"])
def test_a_weight_or_buffer_is_named(name: str) -> None:
    model = Net()
    with torch.no_grad():
        model.state_dict()[name].view(-1)[0] = float("nan")
    if "running" in name:
        model.bn.eval()
    found = search(model)
    kind = "buffer" if "running" in name else "parameter"
    assert (found.kind, found.parameter, found.module) == (kind, name, name.rpartition(".")[0])


def test_a_gradient_that_overflows_as_it_is_accumulated() -> None:
    model = nn.Linear(8, 8, dtype=torch.float16)
    inputs = torch.full((2, 4, 8), 1.0, dtype=torch.float16)
    found = search(model, step=lambda: [(model(x).sum() * 1e4).backward() for x in inputs])
    assert (found.op, found.direction, found.micro_batch) == ("accumulate_grad", "backward", 1)
    assert found.parameter in ("weight", "bias")


def test_the_loss_counts_where_all_gradients_are_finite() -> None:
    model = nn.Linear(8, 8)
    found = search(model, step=lambda: (model(torch.ones(2, 8)) + 3e38).sum().backward())
    assert (found.op, found.module, found.reached) == ("sum", "(outside)", ("loss",))


def test_all_is_put_back_and_gradients_are_none() -> None:
    model = Net(log)
    step_of(model, inputs_of())()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    assert search(model) is not None
    assert all(each.grad is None for each in model.parameters())
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == random.getstate()


def test_a_step_that_was_bad_and_is_replayed_finite_is_said_to_be_unseen() -> None:
    model = Net()
    step_of(model, inputs_of())()
    model.inp.weight.grad.fill_(INF)
    assert search(model).kind == "unseen"


@pytest.mark.parametrize("fault", [log, fully_masked])
def test_a_step_that_is_not_deterministic_is_said_to_be(fault: Any) -> None:
    model, drawn = Net(lambda x: fault(x * 1.0)), iter(range(9))
    step = lambda: step_of(model, inputs_of(next(drawn)))()  # noqa: E731
    found = search(model, step=step)
    assert found.notes == ("the step is not deterministic: a second replay computed other numbers",)
    assert search(model).notes == ()


@pytest.mark.parametrize("kind", [distamp.DistGradScaler, torch.amp.GradScaler])
def test_a_scaler_that_has_no_scale_yet_makes_no_step_random(kind: Any) -> None:
    """It makes one in the first run alone."""
    model, scaler = nn.Linear(4, 1), kind("cpu", init_scale=2.0**127)
    step = lambda: scaler.scale(model(torch.full((2, 4), 1e3)).sum()).backward()  # noqa: E731
    found = distamp.find_first_nonfinite(step, model)
    assert found is not None
    assert found.notes == ()


def test_the_line_of_what_amp_scales_is_the_users() -> None:
    model = nn.Linear(4, 1)
    amp = distamp.initialize(model, torch.optim.SGD(model.parameters()), "fp16")
    found = distamp.find_first_nonfinite(
        lambda: amp.backward(model(torch.ones(2, 4)).sum() * 1e37), model
    )
    assert found is not None
    assert __file__ in found.line


def test_a_compiled_model_is_replayed_eagerly(fresh_dynamo: None) -> None:
    found = search(torch.compile(Net(log), backend="eager"))
    assert (found.op, found.module) == ("log", "blocks.1")
    (note,) = found.notes
    assert "compiled code ran eagerly" in note


class Scaled(nn.Module):
    """Overflows in fp16 unless a compiler leaves out the casts between two multiplications."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.inner(x) * 300.0).half() * 300.0).float() / 90000.0


class Affine(Scaled):
    """Finite, unless its compiler spoils it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1.0


def without_casts(graph: Any, inputs: Any) -> Any:
    """Compile like inductor, with float32 between the operations of a fused kernel."""
    for node in graph.graph.nodes:
        if node.target == "half":
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


HOW = ["model.compile()", "torch.compile(model)", "torch.compile(function)"]


def compiled(model: nn.Module, how: str, backend: Any) -> Callable[[Tensor], Tensor]:
    if how == "model.compile()":
        model.compile(backend=backend)
        return model
    if how == "torch.compile(model)":
        return torch.compile(model, backend=backend)
    return torch.compile(lambda x: model(x), backend=backend)


@pytest.mark.parametrize("how", HOW)
def test_a_compiled_step_that_is_finite_has_no_answer(how, fresh_dynamo, caplog):
    model, x = Scaled(), torch.full((2, 8), 3.0)
    call = compiled(model, how, without_casts)
    assert call(x).isfinite().all()
    assert distamp.find_first_nonfinite(lambda: call(x).square().mean().backward(), model) is None
    assert "the compiled step was finite. Its eager replay was not: mul in" in caplog.text
    eager = distamp.find_first_nonfinite(lambda: Scaled()(x).square().mean().backward(), model)
    assert eager is not None, "as the eager run itself is not"


@pytest.mark.parametrize("how", HOW)
def test_a_step_that_only_its_compiler_spoils_is_unseen_and_compilation_is_named(how, fresh_dynamo):
    def spoil(graph: Any, inputs: Any) -> Any:
        return lambda *given: [each * INF for each in graph.forward(*given)]

    model, x = Affine(), torch.ones(2, 8)
    call = compiled(model, how, spoil)
    found = distamp.find_first_nonfinite(lambda: call(x).square().mean().backward(), model)
    assert found is not None
    assert found.kind == "unseen"
    assert "compiled code is the suspect" in str(found)
    assert "compiled code ran eagerly" in str(found)


def test_a_skipped_step_whose_compiled_run_is_finite_again_is_unseen(fresh_dynamo):
    model, x = Scaled(), torch.full((2, 8), 3.0)
    call = compiled(model, "torch.compile(model)", without_casts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = distamp.StepGuard()
    replay = StepReplay(model).attach(guard)

    def step() -> None:
        call(x).square().mean().backward()

    replay.record(step, x)
    step()
    model.inner.weight.grad.fill_(INF)
    guard.step(optimizer)
    guard.update()
    assert replay.found.kind == "unseen"
    assert "the compiled step was finite" in str(replay.found)
    assert "the step may depend on state that the replay does not restore" in str(replay.found)


def on_a_device() -> list[Any]:
    found = []
    for fault in (None, log, root_of_0):
        model = Net(fault).to(here())
        found.append(search(model, inputs_of().to(here())))
    return found


def test_backward_passes_of_a_device_are_watched_too(sim: RankPool) -> None:
    none, log_of_0, root = sim.run(on_a_device)[0]
    assert none is None
    assert (log_of_0.op, log_of_0.direction) == ("log", "forward")
    assert (root.op, root.module, root.direction) == ("sqrt", "blocks.1", "backward")


# -- ranks --------------------------------------------------------------------------------------


LAYOUTS = ("DDP", "DDP, torch's", "DDP, int8", "FSDP1", "FSDP2", "TP")


def spread(model: Any, layout: str) -> nn.Module:
    """The model over two ranks."""
    if layout == "TP":
        return parallel(model, mesh((2,), ("tp",)))
    kind, _, hook = layout.partition(", ")
    model = wrapped(model, kind, None, "")
    if hook == "torch's":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook:
        distamp.comm_hooks.register_comm_hook(model, hook)
    return model


def found_in(layout: str, how: str, fault: Any, scale: float = 1.0) -> Any:
    warnings.filterwarnings("ignore")
    model = spread(Net(fault, how), layout)
    inputs = inputs_of(dist.get_rank() if layout != "TP" else 1)
    found = distamp.find_first_nonfinite(step_of(model, inputs, scale), model)
    assert all(each.grad is None for each in model.parameters())
    return found


def layouts(*quick: str) -> list[Any]:
    """Return all layouts as cases of a test, which are slow unless they are named here."""
    cases = []
    for layout in LAYOUTS:
        marks = () if layout in quick else pytest.mark.slow
        cases.append(pytest.param(layout, marks=marks))
    return cases


def check_same_on_all_ranks(origin: Any) -> None:
    """Assert that both ranks have this answer."""
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, origin)
    assert gathered == [origin, origin]


@on_ranks(2)
@pytest.mark.parametrize("layout", layouts("DDP, int8", "FSDP1"))
def test_a_finite_step_has_no_origin_in_any_layout(layout):
    origin = found_in(layout, "", None)
    check_same_on_all_ranks(origin)
    assert origin is None


@on_ranks(2)
@pytest.mark.parametrize("layout", layouts("DDP", "FSDP2"))
def test_a_root_of_0_is_found_in_the_backward_pass_of_both_ranks(layout):
    origin = found_in(layout, "reentrant", root_of_0)
    check_same_on_all_ranks(origin)
    assert origin.op == "sqrt"
    assert origin.module == "blocks.1"
    assert origin.direction == "backward"
    assert origin.ranks == (0, 1)
    assert origin.micro_batch == 0


@on_ranks(2)
@pytest.mark.parametrize("layout", layouts("DDP, torch's", "TP"))
def test_a_log_of_0_on_one_rank_is_found_on_that_rank(layout):
    origin = found_in(layout, "not reentrant", log_on_rank_1)
    check_same_on_all_ranks(origin)
    assert origin.op == "log"
    assert origin.module == "blocks.1"
    assert origin.direction == "forward"
    assert origin.ranks == (1,)
    assert origin.micro_batch == 0


@on_ranks(2)
def test_a_hook_that_overflows_is_named() -> None:
    found = found_in("DDP, torch's", "", None, 1e8)
    assert (found.kernel, found.direction, found.ranks) == ("_to_copy", "backward", (0, 1))
    assert "default_hooks.py" not in found.line


@on_ranks(2)
def test_residuals_of_a_hook_stay_and_it_is_said_to_be_left_out() -> None:
    model = spread(Net(), "DDP, int8")
    state = model._comm_hooks[0][1]
    step = step_of(model, inputs_of())
    step()
    before = copy.deepcopy(state.state_dict()["residuals"])
    model.module.blocks[1].fault = log
    found = search(model, step=step)
    after = state.state_dict()["residuals"]
    assert before.keys() == after.keys()
    assert all(all(map(torch.equal, before[key], after[key])) for key in before)
    assert found.notes == ("the communication hook compressed_hook was left out",)


@on_ranks(2)
@pytest.mark.parametrize("fed", [False, True])
def test_a_collective_is_blamed_only_if_no_rank_fed_it_an_inf(fed: bool) -> None:
    def add(x: Tensor) -> Tensor:
        y = x.detach().abs() + 3e38
        if fed and dist.get_rank() == 1:
            y = y * 10
        dist.all_reduce(y)
        return x * y

    found = found_in("DDP", "", add)
    if fed:
        assert (found.kind, found.op, found.ranks) == ("op", "mul", (1,))
        assert found.carried_by == ("allreduce_ over default_pg",)
    else:
        assert (found.kind, found.kernel, found.ranks) == ("collective", "allreduce_", (0, 1))
        assert [each.name for each in found.inputs] == ["rank 0", "rank 1"]
        assert all(each.finite for each in found.inputs)


@on_ranks(2)
@pytest.mark.parametrize(("where", "kind"), [(0, "log"), (1, "sqrt'")])
def test_a_pipeline_is_followed_over_send_and_recv(where: int, kind: str) -> None:
    rank = dist.get_rank()
    block = Block()
    block.fault = FAULTS[kind].change if rank == where else None
    stage = PipelineStage(block, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda x, y: (x - y).pow(2).mean())
    x, y = torch.randn(8, 8), torch.zeros(8, 8)

    def step() -> None:
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {}))

    step()  # which asks for shapes, at first
    found = distamp.find_first_nonfinite(step, block)
    assert (found.op, found.ranks, found.micro_batch) == (FAULTS[kind].function, (where,), 0)
    assert found.module == ""


# -- a guard or scaler whose steps are replayed-----------------------------------------------------


def guard_and_replay(model: nn.Module) -> tuple[distamp.StepGuard, StepReplay]:
    guard = distamp.StepGuard()
    return guard, StepReplay(model).attach(guard)


def train_once(
    guard: Any, replay: StepReplay, model: nn.Module, step: Any, *batches: Any, spoil: Any = None
) -> None:
    """Run one iteration that is recorded before its step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    replay.record(step, *batches)
    step()
    if spoil is not None:
        next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = spoil
    guard.step(optimizer)
    guard.update()


def test_a_guard_says_why_it_skipped(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    guard, replay = guard_and_replay(model)
    train_once(guard, replay, model, step_of(model, inputs_of()))
    assert replay.found is None
    running = model.bn.running_mean.clone()
    model.blocks[1].fault = log
    for _ in range(2):
        train_once(guard, replay, model, step_of(model, inputs_of()))
    assert replay.found.op == "log"
    assert replay.found.notes == ()
    told = [each for each in caplog.records if each.name == "distamp.report"]
    assert len(told) == 1, "once in a row of skipped steps"
    assert told[0].levelno == logging.WARNING
    assert "log in blocks.1 made inf" in told[0].getMessage()
    assert not torch.equal(running, model.bn.running_mean), "the step itself moved it"


def test_a_scaler_replays_a_nan_at_once_and_an_overflow_at_the_third() -> None:
    model, replays = Net(), []
    scaler = distamp.DistGradScaler("cpu", init_scale=4.0)
    replay = StepReplay(model).attach(scaler)

    def step() -> None:
        scaler.scale(model(inputs_of()[0]).sum()).backward()

    for spoil in (INF, INF, None, INF, INF, INF, INF, None, float("nan"), float("nan")):
        found = replay.found
        train_once(scaler, replay, model, step, spoil=spoil)
        replays.append(replay.found is not found)
    assert replays == [False, False, False, False, False, True, False, False, True, False]
    assert replay.found.kind == "unseen", "what was spoilt by hand the replay has not"


def test_a_nan_is_replayed_at_once_where_masters_took_the_gradients() -> None:
    model = nn.Linear(8, 8)
    amp = distamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-O2")
    replay = StepReplay(model).attach(amp.scaler)
    inputs = torch.full((2, 8), float("nan"))

    def step() -> None:
        amp.backward(amp.model(inputs).sum())

    replay.record(step, inputs)
    step()
    assert not amp.step()
    assert replay.found.kind == "input"


def test_a_scaled_step_is_replayed_at_the_scale_that_it_had() -> None:
    model = nn.Linear(8, 8)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    scaler = distamp.DistGradScaler("cpu", init_scale=2.0**127, max_scale=2.0**127)
    replay = StepReplay(model).attach(scaler)
    scales = []

    def step() -> None:
        scales.append(scaler.get_scale())
        scaler.scale(model(torch.full((2, 8), 1e3)).sum()).backward()

    for _ in range(3):
        train_once(scaler, replay, model, step)
    trained_at, replayed_at = scales[:3], scales[3:]
    assert trained_at == [2.0**127, 2.0**126, 2.0**125]
    assert replayed_at
    assert set(replayed_at) == {2.0**125}
    assert scaler.get_scale() == 2.0**124
    found = replay.found
    assert (found.op, found.kernel, found.direction) == ("linear", "mm", "backward")


@on_ranks(2)
def test_a_step_that_raises_on_one_rank_raises_on_all() -> None:
    model, odd = nn.Linear(4, 4), dist.get_rank() == 1

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        if odd:
            raise ValueError("no data")

    says = "^no data$" if odd else "^the step that is replayed raised on rank 1: ValueError: no"
    with pytest.raises(ValueError if odd else distamp.DistampError, match=says):
        distamp.find_first_nonfinite(step, model)
    assert model.weight.grad is None
    odd = False
    assert distamp.find_first_nonfinite(step, model) is None


def test_a_batch_that_changed_in_place_is_said() -> None:
    model, inputs = Net(log), inputs_of()
    guard, replay = guard_and_replay(model)
    replay.record(step_of(model, inputs), {"batches": [inputs]})
    step_of(model, inputs)()
    inputs.add_(1.0)
    guard.step(torch.optim.SGD(model.parameters()))
    guard.update()
    assert replay.found.notes == ("a batch was changed in place since the step was recorded",)


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(TypeError, match="find_first_nonfinite takes a function that runs forward"):
        distamp.find_first_nonfinite(Net(), lambda: None)  # type: ignore[arg-type]
    with pytest.raises(CallOrderError, match=r"Attach it first: replay = StepReplay\(model\)"):
        StepReplay(nn.Linear(1, 1)).record(lambda: None)
    with pytest.raises(TypeError, match=r"takes a StepGuard or a DistGradScaler, .* not Linear"):
        StepReplay(nn.Linear(1, 1)).attach(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"takes a StepReplay or None, not Linear"):
        distamp.StepGuard().attach_replay(nn.Linear(1, 1))  # type: ignore[arg-type]


@on_ranks(2)
def test_all_ranks_find_the_same_and_one_logs_it() -> None:
    model = spread(Net(log_on_rank_1), "DDP")
    guard, replay = guard_and_replay(model)
    weights = [each.clone() for each in model.parameters()]
    with logged("distamp.report") as lines:
        train_once(guard, replay, model, step_of(model, inputs_of(dist.get_rank())))
    assert (replay.found.op, replay.found.ranks) == ("log", (1,))
    assert all(map(torch.equal, weights, model.parameters())), "the step was skipped"
    assert len(lines) == (dist.get_rank() == 0)

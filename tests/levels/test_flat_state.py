"""A flat state resumes a run bit-identical, or is refused with the states to save instead.

One process trains three steps, saves by ``torch.distributed.checkpoint`` and trains on. New objects
load the checkpoint and train the same steps. ``python -m pytest -m slow`` runs every optimizer at
every level.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp.errors import ConfigError
from distamp.levels import Amp
from tests.levels.cells import wrapped
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SEPARATE = r"model\.state_dict\(\), optimizer\.state_dict\(\) and amp\.state_dict\(\)"
LEVELS = ("fp32", "fp16", "bf16-O2")
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """A matrix, a matrix that a block of 256 elements divides, a norm and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(32, 256)
        self.middle = nn.Linear(256, 32)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.middle(self.hidden(inputs).tanh())) * self.scale


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make(make_optimizer: Make, level: str, seed: int = 0, layout: str = "plain") -> Amp:
    torch.manual_seed(seed)
    model: Any = distamp.cast_model(Net(), level)
    model = wrapped(model, layout, None, "")
    amp = distamp.initialize(model, make_optimizer([*model.parameters()]), level)
    set_training(amp)
    return amp


def set_training(amp: Amp) -> None:
    for optimizer in amp.optimizers:
        if hasattr(optimizer, "train"):  # schedulefree has weights for training, and others
            optimizer.train()


def train(amp: Amp, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        inputs = torch.randn(8, 32, device="cpu")
        targets = torch.randn(8, 32, device="cpu")
        amp.zero_grad()
        with amp.autocast():
            outputs = amp.model(inputs.to(next(amp.model.buffers()).dtype))
        amp.backward((outputs.float() - targets).square().mean())
        amp.step()


def save(amp: Amp, path: Path) -> None:
    amp.save(path)


def load(amp: Amp, path: Path) -> None:
    amp.load(path)


def save_flat_state(amp: Amp, path: Path) -> None:
    """Save a flat state without `Amp.save`, with other entries of one's own."""
    state = amp.flat_state_dict() | {"scaler": amp.scaler.state_dict()}
    dcp.save(state, checkpoint_id=path)


def load_flat_state(amp: Amp, path: Path) -> None:
    reader = dcp.FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    state = amp.flat_state_dict(saved) | {"scaler": amp.scaler.state_dict()}
    dcp.load(state, storage_reader=reader)
    amp.load_flat_state_dict(state)
    amp.scaler.load_state_dict(state["scaler"])


def full(value: Any) -> Any:
    """Return a value that this rank can compare: a copy, of a DTensor the whole tensor."""
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def contents(amp: Amp) -> dict[str, Any]:
    """Return everything that decides how a run continues, by flat names."""
    values = {name: full(value) for name, value in amp.flat_state_dict().items()}
    for name, param in amp.model.named_parameters():
        name = name.removeprefix("module.")
        values[f"weight.{name}"] = full(param)
    for number, optimizer in enumerate(amp.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            values[f"group.{number}.{index}"] = repr(settings)
        types = []
        for state in optimizer.state.values():
            if state:
                types.append({key: type(value) for key, value in state.items()})
        values[f"types.{number}"] = types
    return values


def assert_equal(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert values.keys() == expected.keys()
    exactly: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    for name, expected_value in expected.items():
        value = values[name]
        if isinstance(expected_value, Tensor):
            assert value.dtype == expected_value.dtype, name
            torch.testing.assert_close(value, expected_value, msg=name, **exactly)
        else:
            assert repr(value) == repr(expected_value), name


def has_nonzero_value(values: dict[str, Any]) -> bool:
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    return any(tensor.is_floating_point() and bool(tensor.any()) for tensor in tensors)


def check_resume(tmp_path: Path, make_optimizer: Make, level: str, layout: str = "plain") -> None:
    amp = make(make_optimizer, level, layout=layout)
    train(amp, 0, 3)
    save(amp, tmp_path)
    train(amp, 3, 6)
    expected = contents(amp)
    assert has_nonzero_value(expected)
    resumed = make(make_optimizer, level, seed=1, layout=layout)
    load(resumed, tmp_path)
    train(resumed, 3, 6)
    assert_equal(contents(resumed), expected)


# -- every optimizer at three levels ---------------------------------------------------------------


def torchs(name: str, **settings: Any) -> Make:
    return functools.partial(getattr(torch.optim, name), **{"lr": 1e-2} | settings)


def make_imported(
    parameters: Any, module: str, name: str, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    library = pytest.importorskip(module, reason=f"{module} is not installed")
    return getattr(library, name)(parameters, **settings)  # type: ignore[no-any-return]


def imported(module: str, name: str, **settings: Any) -> Make:
    return functools.partial(make_imported, module=module, name=name, settings=settings)


def muon(parameters: Any) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-2)


OPTIMIZERS: dict[str, Make] = {}
OPTIMIZERS["SGD"] = torchs("SGD")
OPTIMIZERS["SGD with momentum"] = torchs("SGD", momentum=0.9, nesterov=True)
OPTIMIZERS["fused SGD"] = torchs("SGD", momentum=0.9, fused=True)
OPTIMIZERS["Adam"] = torchs("Adam")
OPTIMIZERS["AdamW"] = torchs("AdamW")
OPTIMIZERS["AdamW with amsgrad"] = torchs("AdamW", amsgrad=True)
OPTIMIZERS["fused AdamW"] = torchs("AdamW", fused=True)
OPTIMIZERS["AdamW with a tensor as rate"] = torchs("AdamW", lr=torch.tensor(0.01), fused=True)
OPTIMIZERS["AdamW, one tensor at a time"] = torchs("AdamW", foreach=False)
OPTIMIZERS["Adagrad"] = torchs("Adagrad", lr_decay=0.1)
OPTIMIZERS["fused Adagrad"] = torchs("Adagrad", fused=True)
OPTIMIZERS["RMSprop"] = torchs("RMSprop", momentum=0.9, centered=True)
OPTIMIZERS["RAdam"] = torchs("RAdam", betas=(0.5, 0.6))
OPTIMIZERS["NAdam"] = torchs("NAdam")
OPTIMIZERS["Adamax"] = torchs("Adamax")
OPTIMIZERS["ASGD"] = torchs("ASGD", t0=1)
OPTIMIZERS["Rprop"] = torchs("Rprop")
OPTIMIZERS["Adadelta"] = torchs("Adadelta", lr=1.0)
OPTIMIZERS["Adafactor"] = torchs("Adafactor")
OPTIMIZERS["Muon"] = muon
OPTIMIZERS["schedulefree AdamW"] = imported(
    "schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=2
)
OPTIMIZERS["schedulefree RAdam"] = imported("schedulefree", "RAdamScheduleFree", lr=1e-2)
OPTIMIZERS["schedulefree SGD"] = imported("schedulefree", "SGDScheduleFree", lr=0.5)
OPTIMIZERS["torchao AdamW8bit"] = imported("torchao.optim", "AdamW8bit", lr=1e-2, block_size=64)
OPTIMIZERS["torchao AdamW4bit"] = imported("torchao.optim", "AdamW4bit", lr=1e-2)
OPTIMIZERS["torchao AdamWFp8"] = imported("torchao.optim", "AdamWFp8", lr=1e-2)
BITSANDBYTES = "bitsandbytes.optim"
# Smaller weights have 32-bit states.
IN_8_BITS = {"min_8bit_size": 256}
OPTIMIZERS["bitsandbytes AdamW8bit"] = imported(BITSANDBYTES, "AdamW8bit", lr=1e-2, **IN_8_BITS)
OPTIMIZERS["bitsandbytes Lion8bit"] = imported(BITSANDBYTES, "Lion8bit", lr=1e-3, **IN_8_BITS)
OPTIMIZERS["bitsandbytes SGD8bit"] = imported(
    BITSANDBYTES, "SGD8bit", lr=1e-2, momentum=0.9, **IN_8_BITS
)

QUICK_CELLS = {
    ("SGD", "fp16"),
    ("AdamW", "bf16-O2"),
    ("AdamW with a tensor as rate", "fp32"),
    ("NAdam", "fp16"),
    ("Adafactor", "fp32"),
    ("schedulefree AdamW", "bf16-O2"),
}
CELLS = quick_cases(itertools.product(OPTIMIZERS, LEVELS), QUICK_CELLS)


@pytest.fixture
def eager():
    """Run torchao's steps uncompiled: compilation takes long and changes no state."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("name", "level"), CELLS)
def test_a_resumed_run_is_bit_identical(tmp_path, name, level):
    check_resume(tmp_path, OPTIMIZERS[name], level)


def test_a_sparse_adam_resumes(tmp_path):
    def make_sparse(seed: int) -> Amp:
        torch.manual_seed(seed)
        model = nn.Embedding(16, 4, sparse=True)
        return distamp.initialize(model, torch.optim.SparseAdam(model.parameters(), lr=0.1), "fp32")

    def train_rows(amp: Amp, first: int, last: int) -> None:
        for step in range(first, last):
            amp.zero_grad()
            amp.backward(amp.model(torch.tensor([step, 3])).square().sum())
            amp.step()

    amp = make_sparse(0)
    resumed = make_sparse(1)
    train_rows(amp, 0, 3)
    save(amp, tmp_path)
    train_rows(amp, 3, 6)
    load(resumed, tmp_path)
    train_rows(resumed, 3, 6)
    assert_equal(contents(resumed), contents(amp))


# -- checkpoints without records -------------------------------------------------------------------


def save_without_records(amp: Amp, path: Path) -> None:
    """Save weights and states, as distamp did before each weight had a record."""
    state = amp.flat_state_dict()
    weights = [name for name in state if name.startswith("model.")]
    for name in weights:
        state.pop(name.replace("model.", "optimizer.", 1), None)
    dcp.save(state | {"scaler": amp.scaler.state_dict()}, checkpoint_id=path)


def check_resume_without_records(amp: Amp, resumed: Amp, path: Path) -> None:
    train(amp, 0, 3)
    save_without_records(amp, path)
    load_flat_state(resumed, path)
    train(amp, 3, 6)
    train(resumed, 3, 6)
    assert_equal(tensors_of(resumed), tensors_of(amp))


def tensors_of(amp: Amp) -> dict[str, Any]:
    """Return the tensors of the contents, without records and types.

    The states of a weight may come in another order, which records and types show.
    """
    return {name: value for name, value in contents(amp).items() if isinstance(value, Tensor)}


CELLS_WITHOUT_RECORDS = [
    ("AdamW", "fp32"),
    ("AdamW", "bf16-O2"),
    ("AdamW", "bf16-O3"),
    ("fused AdamW", "fp16-O2"),
    ("SGD with momentum", "fp16"),
    ("Adafactor", "fp32"),
    ("NAdam", "bf16-O2"),
]
QUICK_CELLS_WITHOUT_RECORDS = [("AdamW", "fp32"), ("Adafactor", "fp32"), ("NAdam", "bf16-O2")]


@pytest.mark.parametrize(
    ("name", "level"), quick_cases(CELLS_WITHOUT_RECORDS, QUICK_CELLS_WITHOUT_RECORDS)
)
def test_a_checkpoint_without_records_resumes_with_its_states(tmp_path, name, level, caplog):
    """The load misses no state of a frozen weight."""
    amp = make(OPTIMIZERS[name], level, seed=0)
    resumed = make(OPTIMIZERS[name], level, seed=1)
    amp.model.norm.bias.requires_grad_(False)
    resumed.model.norm.bias.requires_grad_(False)
    check_resume_without_records(amp, resumed, tmp_path)
    assert "optimizer state" not in caplog.text


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("layout", ["FSDP2", "TP"])
def test_ranks_resume_from_a_checkpoint_without_records(tmp_path, layout):
    amp = make(torchs("AdamW"), "bf16-O2", 0, layout)
    resumed = make(torchs("AdamW"), "bf16-O2", 1, layout)
    check_resume_without_records(amp, resumed, tmp_path)


def test_settings_stay_where_a_checkpoint_without_records_has_none(tmp_path):
    amp = make(torchs("AdamW", lr=0.5), "fp32")
    resumed = make(torchs("AdamW", lr=0.25), "fp32")
    train(amp, 0, 1)
    save_without_records(amp, tmp_path)
    load_flat_state(resumed, tmp_path)
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.25


def optimizer_states(amp: Amp) -> dict[str, Any]:
    states = {}
    for name, value in amp.flat_state_dict().items():
        if name.startswith("optimizer."):
            states[name] = full(value)
    return states


@pytest.mark.parametrize("optimizer", ["SGD with momentum", "SGD"])
def test_states_that_a_checkpoint_without_records_lacks_stay_with_a_warning(
    tmp_path, optimizer, caplog
):
    """The loading optimizer has taken a step, and the checkpoint has no states for it."""
    amp = make(OPTIMIZERS[optimizer], "fp32")
    train(amp, 0, 1)
    save_without_records(amp, tmp_path)
    loading = make(torchs("AdamW"), "fp32")
    train(loading, 0, 1)
    before = optimizer_states(loading)
    load_flat_state(loading, tmp_path)
    assert "no optimizer state of 6 weights, first model.hidden.weight" in caplog.text
    assert_equal(optimizer_states(loading), before)


# -- settings of groups ----------------------------------------------------------------------------


def test_a_learning_rate_that_a_schedule_lowered_is_in_a_flat_state(tmp_path):
    """Chained schedules go on from the group's rate, also over an optimizer without states."""

    def make_scheduled(seed: int) -> tuple[Amp, Any]:
        amp = make(torchs("SGD", lr=0.5), "fp32", seed)
        return amp, torch.optim.lr_scheduler.ExponentialLR(amp.optimizers[0], 0.5)

    amp, schedule = make_scheduled(0)
    resumed, resumed_schedule = make_scheduled(1)
    for step in range(3):
        train(amp, step, step + 1)
        schedule.step()
    save(amp, tmp_path)
    load(resumed, tmp_path)
    resumed_schedule.load_state_dict(schedule.state_dict())
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.5**4
    schedule.step()
    resumed_schedule.step()
    train(amp, 3, 5)
    train(resumed, 3, 5)
    assert_equal(contents(resumed), contents(amp))


def test_a_rate_in_a_tensor_stays_in_the_tensor_that_the_group_has(tmp_path):
    """A schedule on the device writes to this very tensor."""
    amp = make(torchs("AdamW", lr=torch.tensor(0.25)), "fp32")
    rate = torch.tensor(1.0)
    resumed = make(torchs("AdamW", lr=rate), "fp32")
    train(amp, 0, 1)
    save(amp, tmp_path)
    load(resumed, tmp_path)
    assert resumed.optimizers[0].param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_the_kernel_of_an_optimizer_is_chosen_where_it_is_made(tmp_path):
    """A checkpoint of a fused optimizer loads into one that is not."""
    amp = make(torchs("AdamW", fused=True), "fp32")
    resumed = make(torchs("AdamW"), "fp32", 1)
    train(amp, 0, 2)
    save(amp, tmp_path)
    load(resumed, tmp_path)
    assert resumed.optimizers[0].param_groups[0]["fused"] is None
    train(resumed, 2, 3)


def in_two_groups(parameters: Any) -> torch.optim.Optimizer:
    first = {"params": parameters[:2], "lr": 0.1}
    second = {"params": parameters[2:], "lr": 0.2}
    return torch.optim.AdamW([first, second])


def test_groups_that_were_saved_with_different_rates_do_not_become_one(tmp_path):
    amp = make(in_two_groups, "fp32")
    resumed = make(torchs("AdamW"), "fp32", 1)
    train(amp, 0, 1)
    save(amp, tmp_path)
    before = [p.detach().clone() for p in resumed.model.parameters()]
    amp.optimizers[0].param_groups.reverse()
    state = amp.flat_state_dict()
    with pytest.raises(ConfigError, match=r"shares its group in AdamW here with lr=0\.[12]"):
        resumed.load_flat_state_dict(state)
    assert all(map(torch.equal, before, resumed.model.parameters()))


def test_groups_may_come_in_another_order(tmp_path):
    def reversed_groups(parameters: Any) -> torch.optim.Optimizer:
        first = {"params": parameters[2:]}
        second = {"params": parameters[:2]}
        return torch.optim.AdamW([first, second], lr=9.0)

    amp = make(in_two_groups, "fp32")
    resumed = make(reversed_groups, "fp32", 1)
    train(amp, 0, 1)
    save(amp, tmp_path)
    load(resumed, tmp_path)
    assert [group["lr"] for group in resumed.optimizers[0].param_groups] == [0.2, 0.1]


# -- dtypes of states ------------------------------------------------------------------------------


class OptimizerOfManyDtypes(torch.optim.Optimizer):
    """An optimizer with states of several dtypes; its momentum is in bfloat16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    self._begin(state, param)
                self._update(state, param.grad)
                momentum = state["momentum"].to(param.dtype)
                param.sub_(group["lr"] * momentum * state["signs"].logical_not())

    def _begin(self, state: dict[str, Any], param: Tensor) -> None:
        state["momentum"] = torch.zeros_like(param, dtype=torch.bfloat16)
        state["counts"] = torch.zeros_like(param, dtype=torch.int64)
        state["signs"] = torch.zeros_like(param, dtype=torch.bool)
        state["step"] = 0
        state["window"] = (0, 0.0)
        state["note"] = None

    def _update(self, state: dict[str, Any], grad: Tensor) -> None:
        state["momentum"].mul_(0.5).add_(grad.to(torch.bfloat16))
        state["counts"] += grad > 0
        state["signs"] ^= grad > 0
        state["step"] += 1
        state["window"] = (state["step"], 1 / state["step"])


@pytest.mark.parametrize("level", quick_cases(["fp32", "bf16-O2", "bf16-O3"], quick=["bf16-O2"]))
def test_a_state_keeps_its_own_dtype(tmp_path, level):
    check_resume(tmp_path, OptimizerOfManyDtypes, level)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("layout", ["FSDP2", "DDP", "TP"])
def test_a_run_of_ranks_with_states_of_many_dtypes_resumes(tmp_path, layout):
    check_resume(tmp_path, OptimizerOfManyDtypes, "fp32", layout)


@pytest.mark.slow
@on_ranks(2)
def test_a_run_of_fsdp2_with_adamw_resumes(tmp_path):
    check_resume(tmp_path, torchs("AdamW"), "fp32", "FSDP2")


@pytest.mark.slow
@on_ranks(2)
def test_a_run_of_tp_with_asgd_resumes(tmp_path):
    check_resume(tmp_path, torchs("ASGD"), "fp32", "TP")


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("level", ["bf16", "bf16-O2"])
@pytest.mark.parametrize("layout", ["HSDP", "FSDP2 x TP"])
def test_a_run_of_four_ranks_resumes(tmp_path, layout, level):
    check_resume(tmp_path, torchs("AdamW"), level, layout)


# -- another layout --------------------------------------------------------------------------------


def save_run(path: Path, make_optimizer: Make, layout: str) -> dict[str, Any]:
    amp = make(make_optimizer, "bf16-O2", layout=layout)
    train(amp, 0, 3)
    save(amp, path)
    return contents(amp)


def load_run(path: Path, make_optimizer: Make, layout: str) -> dict[str, Any]:
    amp = make(make_optimizer, "bf16-O2", seed=1, layout=layout)
    load(amp, path)
    return contents(amp)


def assert_equal_except_types(values: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare contents; in another layout a DTensor may have become a tensor."""
    assert_equal(values | {"types.0": None}, expected | {"types.0": None})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "make_optimizer"),
    [("FSDP2", OptimizerOfManyDtypes), ("TP", torchs("AdamW", lr=0.25))],
    ids=["FSDP2", "TP"],
)
def test_a_checkpoint_of_two_ranks_loads_in_one_process(ranks2, tmp_path, layout, make_optimizer):
    expected, _ = ranks2.run(save_run, tmp_path, make_optimizer, layout)
    values = load_run(tmp_path, make_optimizer, "plain")
    assert_equal_except_types(values, expected)


def check_other_layout(pools: Any, path: Path, make_optimizer: Make, *layouts: str) -> None:
    """Save in a layout of two ranks, and load in another one of four ranks."""
    before, after = layouts
    expected, _ = pools(2).run(save_run, path, make_optimizer, before)
    for values in pools(4).run(load_run, path, make_optimizer, after):
        assert_equal_except_types(values, expected)


@pytest.mark.slow
def test_a_checkpoint_of_fsdp2_loads_in_hsdp(ranks, tmp_path):
    check_other_layout(ranks, tmp_path, torchs("AdamW", lr=0.25), "FSDP2", "HSDP")


@pytest.mark.slow
def test_a_checkpoint_of_tp_loads_in_fsdp2_and_tp(ranks, tmp_path):
    check_other_layout(ranks, tmp_path, OptimizerOfManyDtypes, "TP", "FSDP2 x TP")


@pytest.mark.slow
def test_a_checkpoint_of_fsdp2_loads_on_more_ranks(ranks, tmp_path):
    check_other_layout(ranks, tmp_path, OptimizerOfManyDtypes, "FSDP2", "FSDP2")


@pytest.mark.slow
def test_a_checkpoint_of_ddp_loads_in_fsdp2(ranks, tmp_path):
    check_other_layout(ranks, tmp_path, torchs("AdamW", lr=0.25), "DDP", "FSDP2")


# -- refusals --------------------------------------------------------------------------------------


class WithState(torch.optim.SGD):
    """SGD that keeps one more state for each parameter."""

    def __init__(self, parameters: Any, value: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for param in parameters:
            self.state[param]["more"] = value


class WithOptimizer(torch.optim.SGD):
    """SGD with an AdamW for biases inside."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        biases = [param for param in parameters if param.ndim == 1]
        self.inner = torch.optim.AdamW(biases)


class WithExtraState(torch.optim.SGD):
    """SGD with more in its state dict than states and groups."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rounds": 3}


class UnknownTensor(Tensor):
    """A subclass of Tensor without a description of its contents."""


@contextlib.contextmanager
def refused(text: str) -> Iterator[None]:
    """Check that the block raises an error with this text and the separate states."""
    with pytest.raises(ConfigError, match=rf"A flat state.*{text}.*{SEPARATE}"):
        yield


def flat_state_with(value: Any) -> None:
    """Call ``flat_state_dict`` of an optimizer with one more state for each parameter."""
    amp = make(functools.partial(WithState, value=value), "fp32")
    amp.flat_state_dict()


def test_a_state_that_is_a_list_of_tensors_is_refused():
    with refused(r"'more' that WithState has of model\.hidden\.weight: it is a list"):
        flat_state_with([torch.zeros(2)])


def test_a_state_that_is_a_dict_is_refused():
    with refused("it is a dict"):
        flat_state_with({"a": 1})


def test_a_state_of_an_unknown_subclass_is_refused():
    with refused("it is a UnknownTensor of layout"):
        flat_state_with(torch.zeros(2).as_subclass(UnknownTensor))


def test_a_sparse_state_is_refused():
    with refused("layout torch.sparse_coo"):
        flat_state_with(torch.zeros(2, device="cpu").to_sparse())


def test_an_optimizer_with_another_one_inside_is_refused():
    amp = make(WithOptimizer, "fp32")
    with refused("another optimizer in 'inner'"):
        amp.flat_state_dict()


def test_an_optimizer_with_more_in_its_state_dict_is_refused():
    amp = make(WithExtraState, "fp32")
    with refused(r"its state_dict\(\) has 'rounds'"):
        amp.flat_state_dict()


def test_a_state_of_no_parameter_is_refused():
    amp = make(torchs("SGD"), "fp32")
    amp.optimizers[0].state["global"] = {"rounds": 3}
    with refused("a state under 'global'"):
        amp.flat_state_dict()


def test_a_tensor_in_a_group_is_refused():
    amp = make(torchs("SGD"), "fp32")
    amp.optimizers[0].param_groups[0]["history"] = torch.zeros(3)
    with refused("tensors of several elements in 'history'"):
        amp.flat_state_dict()


@pytest.mark.slow
def test_lbfgs_is_refused():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters())
    amp = distamp.initialize(model, optimizer, "fp32")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 32)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(ConfigError, match=rf"LBFGS has of .*it is a list.*{SEPARATE}"):
        amp.flat_state_dict()


def test_a_class_of_a_module_that_is_not_imported_is_refused():
    """A checkpoint imports nothing."""
    amp = make(torchs("SGD"), "fp32")
    state = amp.flat_state_dict()
    spec = ("os.nowhere", "system", ("codes",), None, (256, 32), (32, 1))
    state["optimizer.hidden.weight"] = ((("momentum", spec),), ())
    state["optimizer.hidden.weight.momentum.codes"] = torch.zeros(2)
    with pytest.raises(ConfigError, match=rf"has not imported.*{SEPARATE}"):
        amp.load_flat_state_dict(state)


def check_refused_layout(model: Any, optimizer: Any) -> None:
    amp = distamp.initialize(model, optimizer, "fp32")
    with pytest.raises(ConfigError, match=SEPARATE):
        amp.flat_state_dict()


@on_ranks(2)
def test_fsdp1_is_refused_with_the_separate_states():
    model = wrapped(Net(), "FSDP1", None, "")
    check_refused_layout(model, torch.optim.AdamW(model.parameters()))


@on_ranks(2)
def test_zero_is_refused_with_the_separate_states():
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    check_refused_layout(model, optimizer)


@on_ranks(2)
def test_oss_is_refused_with_the_separate_states():
    oss = pytest.importorskip("fairscale.optim.oss")
    model = Net()
    optimizer = oss.OSS(model.parameters(), optim=torch.optim.AdamW)
    check_refused_layout(model, optimizer)


def sums_of_rows(param: Any) -> Tensor:
    """Return a DTensor of another shape than the parameter's, as factored moments are."""
    if param.ndim == 2:
        return param.detach().sum(dim=-1)
    return param.detach().clone()


class WithStateOf(torch.optim.SGD):
    """SGD that keeps one more state, made from each parameter."""

    def __init__(self, parameters: Any, make_state: Callable[[Any], Tensor]) -> None:
        super().__init__(parameters, lr=0.1)
        for param in parameters:
            self.state[param]["more"] = make_state(param)


def replicated(parameter: Any) -> Tensor:
    return parameter.detach().redistribute(placements=[Replicate()])  # type: ignore[no-any-return]


OPTIMIZERS_WITH_OTHER_LAYOUTS = {
    "another shape": functools.partial(WithStateOf, make_state=sums_of_rows),
    "replicated": functools.partial(WithStateOf, make_state=replicated),
    "a tensor": functools.partial(WithState, value=torch.zeros(3)),
    "blocks of 8 bits": OPTIMIZERS["torchao AdamW8bit"],
}


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    # The ranks import torchao for blocks of 8 bits.
    quick_cases(OPTIMIZERS_WITH_OTHER_LAYOUTS, ["another shape", "replicated", "a tensor"]),
)
def test_a_state_without_the_layout_of_its_shards_is_refused(name):
    torch.compiler.set_stance("force_eager")
    amp = make(OPTIMIZERS_WITH_OTHER_LAYOUTS[name], "fp32", layout="FSDP2")
    train(amp, 0, 1)
    with pytest.raises(ConfigError, match=rf"A flat state cannot.*{SEPARATE}"):
        amp.flat_state_dict()


@on_ranks(2)
@pytest.mark.parametrize("name", quick_cases(["Adafactor", "torchao AdamW8bit"], ["Adafactor"]))
def test_a_whole_state_is_not_loaded_into_shards(tmp_path, name):
    torch.compiler.set_stance("force_eager")
    amp = make(OPTIMIZERS[name], "fp32", layout="DDP")
    train(amp, 0, 1)
    save(amp, tmp_path)
    sharded = make(OPTIMIZERS[name], "fp32", seed=1, layout="FSDP2")
    with pytest.raises(ConfigError, match=rf"the weight here is a DTensor.*{SEPARATE}"):
        load(sharded, tmp_path)


# -- one name on several ranks ---------------------------------------------------------------------


class Expert(nn.Module):
    """A layer that all ranks have, and another layer on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8)
        torch.manual_seed(dist.get_rank())
        self.expert = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.expert(self.shared(inputs))


def experts_in_ddp() -> nn.Module:
    model = Expert()
    names = [f"expert.{name}" for name, _ in model.expert.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def experts_in_fsdp2() -> nn.Module:
    model = Expert()
    experts = {*model.expert.parameters()}
    return fully_shard(model, mesh=mesh((4,), ("shard",)), ignored_params=experts)


def stage() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(8, 8))


def uneven_stage() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8 + dist.get_rank()))


def sharded_stage() -> nn.Module:
    """Two stages of two ranks, with a sharded layer on each stage."""
    mesh_of_stage = mesh((2, 2), ("pp", "shard"))["shard"]
    torch.manual_seed(dist.get_rank() // 2)
    return fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=mesh_of_stage)


def megatron_shard() -> nn.Module:
    """This rank's columns, which only marks on the parameter declare."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 2))
    for parameter in model.parameters():
        parameter.tensor_model_parallel = True
        parameter.partition_dim = 0
    return model


@on_ranks(4)
@pytest.mark.parametrize(
    "make_model",
    [experts_in_ddp, experts_in_fsdp2, stage, uneven_stage, sharded_stage, megatron_shard],
)
def test_different_weights_under_one_name_are_refused_on_every_rank(make_model):
    model = make_model()
    amp = distamp.initialize(model, sgd(model), "bf16")
    text = rf"ranks 0 and [12] hold different weights under that name.*{SEPARATE}"
    with pytest.raises(ConfigError, match=text):
        amp.flat_state_dict()


@on_ranks(2)
def test_masters_are_compared_if_there_are_any():
    """Experts that began equal may differ by less than half precision shows."""
    model = distamp.cast_model(nn.Sequential(nn.Linear(8, 8)), "bf16-O2")
    amp = distamp.initialize(model, sgd(model), "bf16-O2")
    _, master = next(amp.masters[0].pairs())
    with torch.no_grad():
        master += dist.get_rank() * 2.0**-20
    amp.masters[0].write_back()
    with pytest.raises(ConfigError, match=r"different weights under that name"):
        amp.flat_state_dict()


def replicas() -> nn.Module:
    """Copies of a sharded layer that no mesh declares, as hooks average them."""
    mesh_of_shards = mesh((2, 2), ("replicas", "shard"))["shard"]
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=mesh_of_shards)


def distinct_stage() -> nn.Module:
    """Stages that keep the names of the whole model."""
    return nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(8, 8)})


def equal_and_distinct_names() -> nn.Module:
    """Megatron's norms are equal on every rank, and shards have a name for each rank."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    torch.manual_seed(dist.get_rank())
    return nn.ModuleDict({"norm": norm, f"shard{dist.get_rank()}": nn.Linear(8, 2)})


@on_ranks(4)
@pytest.mark.parametrize("make_model", [replicas, distinct_stage, equal_and_distinct_names])
def test_equal_copies_and_distinct_names_are_saved(make_model):
    model = make_model()
    amp = distamp.initialize(model, sgd(model), "fp32")
    assert len(amp.flat_state_dict()) == 2 * len([*model.parameters()])


@on_ranks(4)
def test_running_statistics_may_differ_between_replicas():
    """DDP broadcasts the statistics of the first rank in its next forward pass."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = DistributedDataParallel(net)
    amp = distamp.initialize(model, sgd(model), "fp32")
    model(torch.full((4, 8), float(dist.get_rank())))
    assert "model.1.running_mean" in amp.flat_state_dict()


@on_ranks(2)
def test_ranks_that_differ_load_a_checkpoint(tmp_path):
    """Weights are compared where they are saved, not where they are about to be overwritten."""
    amp = make(torchs("AdamW"), "fp32")
    train(amp, 0, 1)
    save(amp, tmp_path)
    loading = make(torchs("AdamW"), "fp32", seed=1 + dist.get_rank())
    load(loading, tmp_path)
    assert_equal(contents(loading), contents(amp))


@on_ranks(4)
def test_an_error_of_one_rank_is_raised_on_every_rank():
    make_optimizer = WithExtraState if dist.get_rank() == 2 else torchs("SGD")
    amp = make(make_optimizer, "fp32")
    text = "has 'rounds'" if dist.get_rank() == 2 else "failed on rank 2.*has 'rounds'"
    with pytest.raises(ConfigError, match=text):
        amp.flat_state_dict()


@on_ranks(4)
def test_only_ranks_of_the_process_group_are_compared():
    """Two runs in one job have two groups."""
    group = mesh((2, 2), ("run", "rank"))["rank"]
    torch.manual_seed(dist.get_rank() // 2)
    model = nn.Linear(8, 8)
    optimizer = sgd(model)
    amp = distamp.initialize(model, optimizer, "bf16", process_group=group)
    assert "model.weight" in amp.flat_state_dict()


def test_settings_that_are_inf_and_nan_are_loaded():
    """Two groups with NaN become one group."""

    def make_two_groups(parameters: Any) -> torch.optim.Optimizer:
        settings = {"limit": math.inf, "last": math.nan}
        first = {"params": parameters[:2], **settings}
        second = {"params": parameters[2:], **settings}
        return torch.optim.SGD([first, second], lr=0.1)

    amp = make(make_two_groups, "fp32")
    resumed = make(torchs("SGD"), "fp32", 1)
    resumed.load_flat_state_dict(amp.flat_state_dict())
    (group,) = resumed.optimizers[0].param_groups
    assert group["limit"] == math.inf
    assert math.isnan(group["last"])

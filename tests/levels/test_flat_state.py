"""A flat state resumes a run bit-identical, or is refused in a sentence with what to save instead.

One process trains three steps, saves by ``torch.distributed.checkpoint`` and trains on. New objects
load the checkpoint and train the same steps. ``python -m pytest -m slow`` runs every optimizer at
every level.
"""

import functools
import itertools
import math
from collections.abc import Callable
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
    found = {name: full(value) for name, value in amp.flat_state_dict().items()}
    for name, parameter in amp.model.named_parameters():
        found[f"weight.{name.removeprefix('module.')}"] = full(parameter)
    for number, optimizer in enumerate(amp.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            found[f"group.{number}.{index}"] = repr(settings)
        kinds = [{key: type(v) for key, v in s.items()} for s in optimizer.state.values() if s]
        found[f"kinds.{number}"] = kinds
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype, name
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
        else:
            assert repr(found[name]) == repr(value), name


def check_resume(tmp_path: Path, make_optimizer: Make, level: str, layout: str = "plain") -> None:
    amp = make(make_optimizer, level, layout=layout)
    train(amp, 0, 3)
    save(amp, tmp_path)
    train(amp, 3, 6)
    expected = contents(amp)
    assert any(not torch.equal(v, torch.zeros_like(v)) for v in expected.values() if is_real(v))
    resumed = make(make_optimizer, level, seed=1, layout=layout)
    load(resumed, tmp_path)
    train(resumed, 3, 6)
    assert_equal(contents(resumed), expected)


def is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


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


OPTIMIZERS: dict[str, Make] = {
    "SGD": torchs("SGD"),
    "SGD with momentum": torchs("SGD", momentum=0.9, nesterov=True),
    "fused SGD": torchs("SGD", momentum=0.9, fused=True),
    "Adam": torchs("Adam"),
    "AdamW": torchs("AdamW"),
    "AdamW with amsgrad": torchs("AdamW", amsgrad=True),
    "fused AdamW": torchs("AdamW", fused=True),
    "AdamW with a tensor as rate": torchs("AdamW", lr=torch.tensor(1e-2), fused=True),
    "AdamW, one tensor at a time": torchs("AdamW", foreach=False),
    "Adagrad": torchs("Adagrad", lr_decay=0.1),
    "fused Adagrad": torchs("Adagrad", fused=True),
    "RMSprop": torchs("RMSprop", momentum=0.9, centered=True),
    "RAdam": torchs("RAdam", betas=(0.5, 0.6)),
    "NAdam": torchs("NAdam"),
    "Adamax": torchs("Adamax"),
    "ASGD": torchs("ASGD", t0=1),
    "Rprop": torchs("Rprop"),
    "Adadelta": torchs("Adadelta", lr=1.0),
    "Adafactor": torchs("Adafactor"),
    "Muon": muon,
    "schedulefree AdamW": imported("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=2),
    "schedulefree RAdam": imported("schedulefree", "RAdamScheduleFree", lr=1e-2),
    "schedulefree SGD": imported("schedulefree", "SGDScheduleFree", lr=0.5),
    "torchao AdamW8bit": imported("torchao.optim", "AdamW8bit", lr=1e-2, block_size=64),
    "torchao AdamW4bit": imported("torchao.optim", "AdamW4bit", lr=1e-2),
    "torchao AdamWFp8": imported("torchao.optim", "AdamWFp8", lr=1e-2),
    "bitsandbytes AdamW8bit": imported(
        "bitsandbytes.optim", "AdamW8bit", lr=1e-2, min_8bit_size=256
    ),
    "bitsandbytes Lion8bit": imported("bitsandbytes.optim", "Lion8bit", lr=1e-3, min_8bit_size=256),
    "bitsandbytes SGD8bit": imported(
        "bitsandbytes.optim", "SGD8bit", lr=1e-2, momentum=0.9, min_8bit_size=256
    ),
}
FAST = {
    ("SGD", "fp16"),
    ("AdamW", "bf16-O2"),
    ("AdamW with a tensor as rate", "fp32"),
    ("NAdam", "fp16"),
    ("Adafactor", "fp32"),
    ("schedulefree AdamW", "bf16-O2"),
    ("torchao AdamW8bit", "fp32"),
    ("torchao AdamW4bit", "bf16-O2"),
}
CELLS = [
    pytest.param(name, level, marks=() if (name, level) in FAST else pytest.mark.slow)
    for name, level in itertools.product(OPTIMIZERS, LEVELS)
]


@pytest.fixture
def eager():
    """torchao compiles its steps, which takes long and changes nothing of what is saved."""
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

    amp, resumed = make_sparse(0), make_sparse(1)
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
    # The states of a weight may come in another order, which its record and ``kinds`` show.
    found, expected = (
        {k: v for k, v in contents(each).items() if isinstance(v, Tensor)}
        for each in (resumed, amp)
    )
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *[
            ("AdamW", "fp32"),
            ("AdamW", "bf16-O2"),
            ("AdamW", "bf16-O3"),
            ("fused AdamW", "fp16-O2"),
        ],
        *[("SGD with momentum", "fp16"), ("Adafactor", "fp32"), ("NAdam", "bf16-O2")],
    ],
)
def test_a_checkpoint_without_records_resumes_with_its_states(tmp_path, name, level, caplog):
    """No state of a frozen weight is missed."""
    amp, resumed = (make(OPTIMIZERS[name], level, seed) for seed in (0, 1))
    for each in (amp, resumed):
        each.model.norm.bias.requires_grad_(False)
    check_resume_without_records(amp, resumed, tmp_path)
    assert "optimizer state" not in caplog.text


@on_ranks(2)
@pytest.mark.parametrize("layout", ["FSDP2", "TP"])
def test_ranks_resume_from_a_checkpoint_without_records(tmp_path, layout):
    amp, resumed = (make(torchs("AdamW"), "bf16-O2", seed, layout) for seed in (0, 1))
    check_resume_without_records(amp, resumed, tmp_path)


def test_settings_stay_where_a_checkpoint_without_records_has_none(tmp_path):
    amp, resumed = (make(torchs("AdamW", lr=lr), "fp32") for lr in (0.5, 0.25))
    train(amp, 0, 1)
    save_without_records(amp, tmp_path)
    load_flat_state(resumed, tmp_path)
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("saved_by", ["SGD with momentum", "SGD"])
def test_states_that_a_checkpoint_without_records_lacks_stay_with_a_warning(
    tmp_path, saved_by, caplog
):
    """Of an optimizer that took a step, and whose states the checkpoint does not replace."""
    amp, stepped = make(OPTIMIZERS[saved_by], "fp32"), make(torchs("AdamW"), "fp32")
    train(amp, 0, 1)
    train(stepped, 0, 1)
    save_without_records(amp, tmp_path)
    before = {name: full(value) for name, value in stepped.flat_state_dict().items()}
    load_flat_state(stepped, tmp_path)
    assert "no optimizer state of 6 weights, first model.hidden.weight" in caplog.text
    after = {name: full(value) for name, value in stepped.flat_state_dict().items()}
    states = [name for name in before if name.startswith("optimizer.")]
    assert_equal({name: after[name] for name in states}, {name: before[name] for name in states})


# -- settings of groups ----------------------------------------------------------------------------


def test_a_learning_rate_that_a_schedule_lowered_is_in_a_flat_state(tmp_path):
    """Chained schedules go on from the group's rate, also over an optimizer without states."""

    def make_scheduled(seed: int) -> tuple[Amp, Any]:
        amp = make(torchs("SGD", lr=0.5), "fp32", seed)
        return amp, torch.optim.lr_scheduler.ExponentialLR(amp.optimizers[0], 0.5)

    (amp, schedule), (resumed, other) = make_scheduled(0), make_scheduled(1)
    for step in range(3):
        train(amp, step, step + 1)
        schedule.step()
    save(amp, tmp_path)
    load(resumed, tmp_path)
    other.load_state_dict(schedule.state_dict())
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.5**4
    schedule.step()
    other.step()
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
    amp, resumed = make(torchs("AdamW", fused=True), "fp32"), make(torchs("AdamW"), "fp32", 1)
    train(amp, 0, 2)
    save(amp, tmp_path)
    load(resumed, tmp_path)
    assert resumed.optimizers[0].param_groups[0]["fused"] is None
    train(resumed, 2, 3)


def in_two_groups(parameters: Any) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.2}]
    return torch.optim.AdamW(groups)


def test_groups_that_were_saved_with_different_rates_do_not_become_one(tmp_path):
    amp, resumed = make(in_two_groups, "fp32"), make(torchs("AdamW"), "fp32", 1)
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
        return torch.optim.AdamW([{"params": parameters[2:]}, {"params": parameters[:2]}], lr=9.0)

    amp, resumed = make(in_two_groups, "fp32"), make(reversed_groups, "fp32", 1)
    train(amp, 0, 1)
    save(amp, tmp_path)
    load(resumed, tmp_path)
    assert [group["lr"] for group in resumed.optimizers[0].param_groups] == [0.2, 0.1]


# -- dtypes of states ------------------------------------------------------------------------------


class Keeper(torch.optim.Optimizer):
    """Has states of several dtypes, and of a dtype of its own for momentum."""

    def __init__(self, parameters: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=self.dtype)
                    state["counts"] = torch.zeros_like(p, dtype=torch.int64)
                    state["signs"] = torch.zeros_like(p, dtype=torch.bool)
                    state["step"] = 0
                    state["window"] = (0, 0.0)
                    state["note"] = None
                state["momentum"].mul_(0.5).add_(p.grad.to(self.dtype))
                state["counts"] += p.grad > 0
                state["signs"] ^= p.grad > 0
                state["step"] += 1
                state["window"] = (state["step"], 1 / state["step"])
                p.sub_(group["lr"] * state["momentum"].to(p.dtype) * state["signs"].logical_not())


@pytest.mark.parametrize("level", ["fp32", "bf16-O2", "bf16-O3"])
def test_a_state_keeps_its_own_dtype(tmp_path, level):
    check_resume(tmp_path, Keeper, level)


@on_ranks(2)
@pytest.mark.parametrize(
    ("layout", "make_optimizer"),
    [
        *[("DDP", Keeper), ("FSDP2", Keeper), ("TP", Keeper)],
        *[("FSDP2", torchs("AdamW")), ("TP", torchs("ASGD"))],
    ],
)
def test_a_run_of_ranks_resumes(tmp_path, layout, make_optimizer):
    check_resume(tmp_path, make_optimizer, "fp32", layout)


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("level", ["bf16", "bf16-O2"])
@pytest.mark.parametrize("layout", ["HSDP", "FSDP2 x TP"])
def test_a_run_of_four_ranks_resumes(tmp_path, layout, level):
    check_resume(tmp_path, torchs("AdamW"), level, layout)


def saved_by(path: Path, make_optimizer: Make, layout: str) -> dict[str, Any]:
    amp = make(make_optimizer, "bf16-O2", layout=layout)
    train(amp, 0, 3)
    save(amp, path)
    return contents(amp)


def loaded_by(path: Path, make_optimizer: Make, layout: str) -> dict[str, Any]:
    amp = make(make_optimizer, "bf16-O2", seed=1, layout=layout)
    load(amp, path)
    return contents(amp)


@pytest.mark.parametrize(
    ("before", "after", "size", "make_optimizer"),
    [
        ("FSDP2", "plain", 1, Keeper),
        ("FSDP2", "FSDP2", 4, Keeper),
        ("FSDP2", "HSDP", 4, torchs("AdamW", lr=0.25)),
        ("DDP", "FSDP2", 4, torchs("AdamW", lr=0.25)),
        ("TP", "plain", 1, torchs("AdamW", lr=0.25)),
        ("TP", "FSDP2 x TP", 4, Keeper),
    ],
)
def test_a_checkpoint_of_two_ranks_loads_in_another_layout(
    ranks, tmp_path, before, after, size, make_optimizer
):
    expected, _ = ranks(2).run(saved_by, tmp_path, make_optimizer, before)
    if size == 1:
        found = [loaded_by(tmp_path, make_optimizer, after)]
    else:
        found = ranks(size).run(loaded_by, tmp_path, make_optimizer, after)
    kinds = "kinds.0"
    for each in found:  # the class of a DTensor is no longer what it was
        assert_equal(each | {kinds: None}, expected | {kinds: None})


# -- refusals --------------------------------------------------------------------------------------


class WithState(torch.optim.SGD):
    """Keeps one more state for each parameter."""

    def __init__(self, parameters: Any, value: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for p in parameters:
            self.state[p]["more"] = value


class WithOptimizer(torch.optim.SGD):
    """Steps biases by an optimizer of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.AdamW([p for p in parameters if p.ndim == 1])


class WithExtraState(torch.optim.SGD):
    """Has more in its state dict than states and groups."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rounds": 3}


def keeping_a_global_state(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.state["global"] = {"rounds": 3}
    return optimizer


def with_group_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": parameters, "history": torch.zeros(3)}], lr=0.1)


class Odd(Tensor):
    """A subclass of which nothing says what is in it."""


REFUSED_OPTIMIZERS: dict[str, tuple[Make, str]] = {
    "a list of tensors": (
        functools.partial(WithState, value=[torch.zeros(2)]),
        r"'more' that WithState has of model\.hidden\.weight: it is a list",
    ),
    "a dict": (functools.partial(WithState, value={"a": 1}), "it is a dict"),
    "a subclass": (
        functools.partial(WithState, value=torch.zeros(2).as_subclass(Odd)),
        "it is a Odd of layout",
    ),
    "a sparse tensor": (
        functools.partial(WithState, value=torch.zeros(2, device="cpu").to_sparse()),
        "layout torch.sparse_coo",
    ),
    "an optimizer inside": (WithOptimizer, "another optimizer in 'inner'"),
    "more in its state dict": (WithExtraState, "its state_dict\\(\\) has 'rounds'"),
    "a state of no parameter": (keeping_a_global_state, "a state under 'global'"),
    "a tensor in a group": (with_group_tensor, "tensors of several elements in 'history'"),
}


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_what_has_no_name_is_refused_with_the_separate_states(name):
    make_optimizer, text = REFUSED_OPTIMIZERS[name]
    with pytest.raises(ConfigError, match=rf"A flat state.*{text}.*{SEPARATE}"):
        make(make_optimizer, "fp32").flat_state_dict()


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


@on_ranks(2)
@pytest.mark.parametrize("layout", ["FSDP1", "ZeRO", "OSS"])
def test_layouts_without_names_are_refused_with_the_separate_states(layout):
    torch.manual_seed(0)
    model: Any = Net()
    if layout == "FSDP1":
        model = wrapped(model, layout, None, "")
        optimizer: Any = torch.optim.AdamW(model.parameters())
    elif layout == "ZeRO":
        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    else:
        oss = pytest.importorskip("fairscale.optim.oss")
        optimizer = oss.OSS(model.parameters(), optim=torch.optim.AdamW)
    amp = distamp.initialize(model, optimizer, "fp32")
    with pytest.raises(ConfigError, match=SEPARATE):
        amp.flat_state_dict()


def whole_rows(parameter: Any) -> Tensor:
    """A DTensor of another shape than the parameter's, as factored moments are."""
    return parameter.detach().sum(dim=-1) if parameter.ndim == 2 else parameter.detach().clone()


class WithStateOf(torch.optim.SGD):
    """Keeps one more state, made from each parameter."""

    def __init__(self, parameters: Any, make_state: Callable[[Any], Tensor]) -> None:
        super().__init__(parameters, lr=0.1)
        for p in parameters:
            self.state[p]["more"] = make_state(p)


def replicated(parameter: Any) -> Tensor:
    return parameter.detach().redistribute(placements=[Replicate()])  # type: ignore[no-any-return]


@on_ranks(2)
@pytest.mark.parametrize(
    "make_optimizer",
    [
        functools.partial(WithStateOf, make_state=whole_rows),
        functools.partial(WithStateOf, make_state=replicated),
        functools.partial(WithState, value=torch.zeros(3)),
        OPTIMIZERS["torchao AdamW8bit"],
    ],
)
def test_a_state_without_the_layout_of_its_shards_is_refused(make_optimizer):
    torch.compiler.set_stance("force_eager")
    amp = make(make_optimizer, "fp32", layout="FSDP2")
    train(amp, 0, 1)
    with pytest.raises(ConfigError, match=rf"A flat state cannot.*{SEPARATE}"):
        amp.flat_state_dict()


@on_ranks(2)
@pytest.mark.parametrize("name", ["Adafactor", "torchao AdamW8bit"])
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
    """A layer that all ranks have, and one of this rank's own."""

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
    """Two stages of two ranks, each of which shards its own layer."""
    own = mesh((2, 2), ("pp", "shard"))["shard"]
    torch.manual_seed(dist.get_rank() // 2)
    return fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=own)


def megatron_shard() -> nn.Module:
    """This rank's columns, which only marks on the parameter declare."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 2))
    for parameter in model.parameters():
        parameter.tensor_model_parallel = True
        parameter.partition_dim = 0
    return model


SEPARATE_WEIGHTS = (
    *(experts_in_ddp, experts_in_fsdp2, stage, uneven_stage, sharded_stage, megatron_shard),
)


@on_ranks(4)
@pytest.mark.parametrize("make_model", SEPARATE_WEIGHTS)
def test_different_weights_under_one_name_are_refused_on_every_rank(make_model):
    model = make_model()
    amp = distamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    text = rf"ranks 0 and [12] hold different weights under that name.*{SEPARATE}"
    with pytest.raises(ConfigError, match=text):
        amp.flat_state_dict()


def test_masters_are_compared_where_there_are_any(ranks2):
    """Experts that began equal may differ by less than half precision shows."""
    ranks2.run(_save_almost_equal_experts)


def _save_almost_equal_experts() -> None:
    model = distamp.cast_model(nn.Sequential(nn.Linear(8, 8)), "bf16-O2")
    amp = distamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-O2")
    _, master = next(amp.masters[0].pairs())
    with torch.no_grad():
        master += dist.get_rank() * 2.0**-20
    amp.masters[0].write_back()
    with pytest.raises(ConfigError, match=r"different weights under that name"):
        amp.flat_state_dict()


def replicas() -> nn.Module:
    """Copies of a sharded layer that no mesh declares, as hooks average them."""
    own = mesh((2, 2), ("replicas", "shard"))["shard"]
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=own)


def distinct_stage() -> nn.Module:
    """Stages that keep the names of the whole model."""
    return nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(8, 8)})


def equal_and_apart() -> nn.Module:
    """Megatron's norms: equal on every rank, beside shards that have names of their own."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    torch.manual_seed(dist.get_rank())
    return nn.ModuleDict({"norm": norm, f"shard{dist.get_rank()}": nn.Linear(8, 2)})


@on_ranks(4)
@pytest.mark.parametrize("make_model", [replicas, distinct_stage, equal_and_apart])
def test_equal_copies_and_names_apart_are_saved(make_model):
    model = make_model()
    amp = distamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    assert len(amp.flat_state_dict()) == 2 * len([*model.parameters()])


@on_ranks(4)
def test_running_statistics_may_differ_between_replicas():
    """DDP broadcasts those of the first rank in its next forward pass."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    amp = distamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    model(torch.full((4, 8), float(dist.get_rank())))
    assert "model.1.running_mean" in amp.flat_state_dict()


@on_ranks(2)
def test_ranks_that_differ_load_a_checkpoint(tmp_path):
    """Weights are compared where they are saved, not where they are about to be overwritten."""
    amp = make(torchs("AdamW"), "fp32")
    train(amp, 0, 1)
    save(amp, tmp_path)
    other = make(torchs("AdamW"), "fp32", seed=1 + dist.get_rank())
    load(other, tmp_path)
    assert_equal(contents(other), contents(amp))


@on_ranks(4)
def test_an_error_of_one_rank_is_raised_on_every_rank():
    make_optimizer = WithExtraState if dist.get_rank() == 2 else torchs("SGD")
    amp = make(make_optimizer, "fp32")
    text = "has 'rounds'" if dist.get_rank() == 2 else "failed on rank 2.*has 'rounds'"
    with pytest.raises(ConfigError, match=text):
        amp.flat_state_dict()


@on_ranks(4)
def test_only_ranks_of_the_process_group_are_compared():
    """Two runs in one job, each with a group of its own."""
    own = mesh((2, 2), ("run", "rank"))["rank"]
    torch.manual_seed(dist.get_rank() // 2)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = distamp.initialize(model, optimizer, "bf16", process_group=own)
    assert "model.weight" in amp.flat_state_dict()


def test_an_infinite_setting_and_nan_travel(tmp_path):
    def odd(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p], "limit": math.inf, "last": math.nan} for p in parameters]
        return torch.optim.SGD(groups, lr=0.1)

    amp, resumed = make(odd, "fp32"), make(torchs("SGD"), "fp32", 1)
    resumed.load_flat_state_dict(amp.flat_state_dict())
    (group,) = resumed.optimizers[0].param_groups
    assert group["limit"] == math.inf
    assert math.isnan(group["last"])

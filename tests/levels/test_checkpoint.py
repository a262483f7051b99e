"""Amp.save and Amp.load: a checkpoint of a run, for any layout and any level."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import distamp
from distamp.errors import ConfigError
from distamp.levels import Amp
from tests.levels.cells import wrapped
from tests.on_ranks import on_ranks
from tests.quick_cases import quick_cases
from tests.ranks import mesh

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SEEDS_A_STEP = 3


class Net(nn.Module):
    """Two matrices, a norm, and a buffer that counts forward passes in training."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(32, 256)
        self.middle = nn.Linear(256, 32)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        return self.norm(self.middle(self.hidden(inputs).tanh()))


def make(level: str, layout: str = "plain", seed: int = 0, **settings: Any) -> Amp:
    torch.manual_seed(seed)
    model: Any = distamp.cast_model(Net(), level)
    model = wrapped(model, layout, None, "")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return distamp.initialize(model, optimizer, level, **settings)


def train(amp: Amp, first: int, last: int, *, by_rank: bool = False) -> None:
    """Train the steps from ``first`` to ``last``, on different data in all ranks if ``by_rank``."""
    for step in range(first, last):
        seed = step
        if by_rank:
            seed = step * SEEDS_A_STEP + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(8, 32, generator=generator)
        targets = torch.randn(8, 32, generator=generator)
        amp.zero_grad()
        with amp.autocast():
            outputs = amp.model(inputs)
        amp.backward((outputs.float() - targets).square().mean())
        amp.step()


def full_tensor(value: Any) -> Any:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def contents(amp: Amp) -> dict[str, Any]:
    """Return copies of weights, optimizer state and settings by flat names."""
    return {name: full_tensor(value) for name, value in amp.flat_state_dict().items()}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=name)
        else:
            assert repr(actual[name]) == repr(value), name


# -- one process -----------------------------------------------------------------------------------


LEVELS = ["fp32", "fp16", "bf16", "fp16-O2", "bf16-O2", "bf16-O3"]


@pytest.mark.parametrize("level", quick_cases(LEVELS, quick=["fp16", "fp16-O2", "bf16-O3"]))
def test_a_run_that_was_loaded_continues_bit_identical(tmp_path, level):
    amp = make(level)
    train(amp, 0, 3)
    amp.save(tmp_path)
    train(amp, 3, 6)
    resumed = make(level, seed=1)
    resumed.load(tmp_path)
    train(resumed, 3, 6)
    assert_same(contents(resumed), contents(amp))


def test_split_masters_continue_bit_identical(tmp_path):
    amp = make("bf16-O2", master_weights="split")
    train(amp, 0, 3)
    amp.save(tmp_path)
    train(amp, 3, 6)
    resumed = make("bf16-O2", seed=1, master_weights="split")
    resumed.load(tmp_path)
    train(resumed, 3, 6)
    assert_same(contents(resumed), contents(amp))


def test_a_checkpoint_of_whole_masters_loads_into_split_masters(tmp_path):
    amp = make("bf16-O2")
    train(amp, 0, 3)
    amp.save(tmp_path)
    split = make("bf16-O2", seed=1, master_weights="split")
    split.load(tmp_path)
    assert_same(contents(split), contents(amp))


def test_the_loss_scale_and_its_counter_are_restored(tmp_path):
    amp = make("fp16", init_scale=512.0)
    train(amp, 0, 3)
    amp.save(tmp_path)
    resumed = make("fp16", seed=1)
    resumed.load(tmp_path)
    assert resumed.scaler.get_scale() == 512.0
    assert resumed.state_dict()["loss_scalers"] == amp.state_dict()["loss_scalers"]


def test_the_loss_scale_of_a_static_level_is_not_replaced(tmp_path):
    amp = make("fp16", init_scale=512.0)
    train(amp, 0, 1)
    amp.save(tmp_path)
    static = make("fp16", seed=1, loss_scale=128.0)
    static.load(tmp_path)
    assert static.scaler.get_scale() == 128.0


def test_the_learning_rate_is_restored(tmp_path):
    amp = make("bf16")
    amp.optimizers[0].param_groups[0]["lr"] = 0.125
    train(amp, 0, 1)
    amp.save(tmp_path)
    resumed = make("bf16", seed=1)
    resumed.load(tmp_path)
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize(
    "other_level", quick_cases(["fp32", "fp16", "fp16-O2", "bf16"], quick=["fp32", "fp16-O2"])
)
def test_a_checkpoint_loads_at_another_level(tmp_path, other_level):
    amp = make("bf16-O2")
    train(amp, 0, 3)
    amp.save(tmp_path)
    target = make(other_level, seed=1)
    target.load(tmp_path)
    expected = contents(amp)
    for name, value in contents(target).items():
        if name.startswith("model.") and "passes" not in name:
            assert value.dtype is torch.float32
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_several_models_and_optimizers_are_restored(tmp_path):
    def make_two(seed: int) -> Amp:
        torch.manual_seed(seed)
        models = [nn.Linear(4, 4), nn.Linear(4, 2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        return distamp.initialize(models, optimizers, "bf16-O2")

    amp = make_two(0)
    outputs = amp.models[1](amp.models[0](torch.ones(3, 4)))
    amp.backward(outputs.float().square().mean())
    amp.step()
    amp.save(tmp_path)
    resumed = make_two(1)
    resumed.load(tmp_path)
    assert_same(contents(resumed), contents(amp))


def test_a_string_is_a_path_too(tmp_path):
    amp = make("fp32")
    amp.save(str(tmp_path / "step-1"))
    resumed = make("fp32", seed=1)
    resumed.load(str(tmp_path / "step-1"))
    assert_same(contents(resumed), contents(amp))


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="contains no whole checkpoint"):
        make("fp32").load(tmp_path)


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    amp = make("fp32")
    dcp.save(amp.flat_state_dict(), checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ConfigError, match=r"was not written by amp\.save\(\)"):
        amp.load(tmp_path)


def _amp_of(model: nn.Module) -> Amp:
    return distamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")


def test_a_model_with_another_weight_is_refused_before_a_value_changes(tmp_path):
    _amp_of(nn.Sequential(nn.Linear(4, 4))).save(tmp_path)
    target = _amp_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    initial = contents(target)
    with pytest.raises(ConfigError, match=r"has no model\.1\.weight\. Build the model"):
        target.load(tmp_path)
    assert_same(contents(target), initial)


def test_a_model_with_another_shape_is_refused_before_a_value_changes(tmp_path):
    _amp_of(nn.Linear(4, 4)).save(tmp_path)
    target = _amp_of(nn.Linear(4, 8))
    initial = contents(target)
    with pytest.raises(ConfigError, match=r"model\.weight has shape \(4, 4\) in the checkpoint"):
        target.load(tmp_path)
    assert_same(contents(target), initial)


# -- layouts ---------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("layout", quick_cases(["FSDP2", "TP", "plain", "DDP"], quick=["FSDP2"]))
def test_a_run_of_ranks_continues_bit_identical(tmp_path, layout):
    amp = make("bf16-O2", layout)
    train(amp, 0, 3)
    amp.save(tmp_path)
    train(amp, 3, 5)
    resumed = make("bf16-O2", layout, seed=1)
    resumed.load(tmp_path)
    train(resumed, 3, 5)
    assert_same(contents(resumed), contents(amp))


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize(
    ("saved_in", "loaded_in"),
    [
        ("FSDP2", "TP"),
        ("TP", "plain"),
        ("DDP", "FSDP2"),
        ("plain", "DDP"),
    ],
)
def test_a_checkpoint_loads_in_another_layout(tmp_path, saved_in, loaded_in):
    amp = make("fp16-O2", saved_in, init_scale=1024.0)
    train(amp, 0, 2)
    amp.save(tmp_path)
    target = make("fp16-O2", loaded_in, seed=1)
    target.load(tmp_path)
    assert target.scaler.get_scale() == amp.scaler.get_scale()
    assert_same(contents(target), contents(amp))


def _shared_directory(tmp_path: Path) -> Path:
    """Return the directory of the first rank, which all ranks write to."""
    paths = [tmp_path]
    dist.broadcast_object_list(paths)
    return paths[0]


@on_ranks(2)
def test_a_checkpoint_of_two_ranks_loads_in_a_group_of_one(tmp_path):
    path = _shared_directory(tmp_path)
    amp = make("bf16", "FSDP2")
    train(amp, 0, 2)
    amp.save(path)
    expected = contents(amp)
    single_rank = mesh((2, 1), ("run", "rank"))["rank"]
    target = make("bf16", "plain", seed=1, process_group=single_rank)
    target.load(path)
    assert_same(contents(target), expected)


@pytest.mark.slow
@on_ranks(2)
def test_fsdps_own_mixed_precision_is_saved(tmp_path):
    def make_mixed(seed: int) -> Amp:
        torch.manual_seed(seed)
        model: Any = Net()
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        fully_shard(model, mesh=mesh((2,), ("shard",)), mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return distamp.initialize(model, optimizer, "bf16-O2")

    amp = make_mixed(0)
    train(amp, 0, 2)
    amp.save(tmp_path)
    train(amp, 2, 4)
    resumed = make_mixed(1)
    resumed.load(tmp_path)
    train(resumed, 2, 4)
    assert_same(contents(resumed), contents(amp))


def _fsdp1() -> Amp:
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    return distamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")


def _zero() -> Amp:
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    return distamp.initialize(model, optimizer, "bf16")


@on_ranks(2)
@pytest.mark.parametrize(("make_amp", "reason"), [(_fsdp1, "flat or wrapped"), (_zero, "a share")])
def test_a_layout_without_names_is_refused_with_the_states_to_save(tmp_path, make_amp, reason):
    amp = make_amp()
    separate = r"Save model\.state_dict\(\), optimizer\.state_dict\(\) and amp\.state_dict\(\)"
    for call in (amp.save, amp.load):
        if call == amp.load:
            _amp_of(Net()).save(_shared_directory(tmp_path))
        with pytest.raises(ConfigError, match=rf"amp\.save\(\).*{reason}.*{separate}"):
            call(_shared_directory(tmp_path))


@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_every_rank(tmp_path):
    path = _shared_directory(tmp_path)
    amp = _amp_of(nn.Sequential(nn.Linear(4, 4)))
    amp.save(path)
    layers = [nn.Linear(4, 4)] * 1 if dist.get_rank() == 0 else [nn.Linear(4, 4), nn.Linear(4, 4)]
    target = _amp_of(nn.Sequential(*layers))
    text = r"amp\.load\(\) failed on rank 1, so it stops on every rank.*has no model\.1\.weight"
    if dist.get_rank() == 1:
        text = r"^The checkpoint in .* has no model\.1\.weight"
    with pytest.raises(ConfigError, match=text):
        target.load(path)


# -- residuals of communication hooks --------------------------------------------------------------


def _residuals(amp: Amp) -> dict[str, list[Tensor]]:
    residuals: dict[str, list[Tensor]] = amp.comm_hooks[0].state_dict()["residuals"]
    return residuals


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("level", ["bf16", "fp16"])
def test_a_run_with_residuals_continues_bit_identical_under_fsdp2(tmp_path, level):
    path = _shared_directory(tmp_path)
    amp = make(level, "FSDP2", comm_hook="int8")
    train(amp, 0, 3, by_rank=True)
    amp.save(path)
    assert any(tensor.any() for tensors in _residuals(amp).values() for tensor in tensors)
    train(amp, 3, 6, by_rank=True)
    resumed = make(level, "FSDP2", seed=1, comm_hook="int8")
    resumed.load(path)
    train(resumed, 3, 6, by_rank=True)
    assert_same(contents(resumed), contents(amp))


@on_ranks(2)
def test_the_residuals_of_this_rank_are_restored_under_ddp(tmp_path):
    """DDP builds its buckets in the first step after the load, so the step has no residuals."""
    path = _shared_directory(tmp_path)
    amp = make("bf16", "DDP", comm_hook="int8")
    train(amp, 0, 3, by_rank=True)
    amp.save(path)
    resumed = make("bf16", "DDP", seed=1, comm_hook="int8")
    resumed.load(path)
    expected = _residuals(amp)
    assert any(tensor.any() for tensors in expected.values() for tensor in tensors)
    assert _residuals(resumed).keys() == expected.keys()
    for name, tensors in expected.items():
        assert all(map(torch.equal, _residuals(resumed)[name], tensors))


class _Messages(logging.Handler):
    """A log handler that keeps messages; ranks cannot share the fixture of pytest."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@on_ranks(2)
def test_residuals_are_dropped_with_a_log_line_if_other_ranks_load(tmp_path):
    path = _shared_directory(tmp_path)
    amp = make("bf16", "DDP", comm_hook="int8")
    train(amp, 0, 2, by_rank=True)
    amp.save(path)
    resumed = make("bf16", "DDP", seed=1, comm_hook="int8")
    handler = _Messages()
    logger = logging.getLogger("distamp.levels")
    logger.addHandler(handler)
    label = f"rank {dist.get_rank()} of 3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distamp.levels.checkpoint.rank_label", lambda: label)
        resumed.load(path)
    logger.removeHandler(handler)
    assert any(f"for other ranks than {label}" in message for message in handler.messages)
    assert _residuals(resumed) == {}
    assert_same(contents(resumed), contents(amp))


@on_ranks(2)
def test_a_checkpoint_with_residuals_loads_without_a_hook(tmp_path):
    path = _shared_directory(tmp_path)
    amp = make("bf16", "DDP", comm_hook="int8")
    train(amp, 0, 2, by_rank=True)
    amp.save(path)
    resumed = make("bf16", "DDP", seed=1)
    resumed.load(path)
    assert_same(contents(resumed), contents(amp))

"""A model that is sharded before it has memory starts and trains as one built whole does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from distamp.precision import LEVELS
from launch.config import Config, Shape
from launch.data import load_data
from launch.errors import UsageError
from launch.memory import ModelSize, Shares, check_memory, needs
from launch.models import init_model, recipe_for
from launch.networks import GPT
from launch.ranks import Ranks
from launch.sketch import Sketch, sketch
from launch.train import train as train_job
from tests.launch import jobs, pooled
from tests.launch.test_strategies import PRECISIONS, SMALL, _agree, alone, text

__all__ = ["alone", "text"]

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]


# -- one model, drawn a parameter at a time -------------------------------------------------------


def _state(model: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return {**tensors, **dict(model.named_buffers(remove_duplicate=False))}


def _assert_drawn_as_built(found: Sketch | None, model: nn.Module) -> None:
    assert found is not None
    drawn = dict(found.draw())
    assert drawn.keys() == _state(model).keys()
    for name, tensor in _state(model).items():
        assert torch.equal(drawn[name], tensor), name


MODELS: dict[str, tuple[str, ...]] = {
    "gpt": (),
    "digits": (),
    "hf:gpt2": ("n_layer=2", "n_embd=96", "n_head=3"),
    "hf:llama": (
        *("num_hidden_layers=2", "hidden_size=64", "intermediate_size=128"),
        *("num_attention_heads=2", "num_key_value_heads=2"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_drawn_as_the_constructor_draws_them(text, name):
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    config = Config(model=name, model_args=MODELS[name], data=None if name == "digits" else text)
    recipe = recipe_for(config)
    data = load_data(config, recipe.kind)
    _ = data.sample
    model = init_model(recipe, data, 3, torch.device("cpu"))
    _assert_drawn_as_built(sketch(lambda: recipe.build(data), 3), model)


def test_drawing_holds_the_largest_parameter_and_no_more():
    found = sketch(lambda: GPT(Shape(layers=4)), 0)
    assert found is not None
    assert found.scratch() == found.largest == 4 * 96 * 96 * 4
    assert found.parameters == sum(p.numel() for p in GPT(Shape(layers=4)).parameters())


class Odd(nn.Module):
    """Ties, views, values computed from others, and draws that are overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 6)
        self.two = nn.Linear(4, 6)
        self.two.weight = self.one.weight
        self.padded = nn.Embedding(5, 3, padding_idx=2)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(5, 4)))
        self.scaled = nn.Parameter(torch.randn(3, 3) * torch.tensor([1.0, 2.0, 3.0]))
        with torch.no_grad():
            self.one.bias[1:3].normal_()
            self.two.bias.copy_(self.one.bias).mul_(2)
        self.register_buffer("steps", torch.arange(4) + 1)
        self.register_buffer("noise", torch.rand(2), persistent=False)
        nn.init.normal_(self.one.weight)


def test_ties_views_and_computed_values_come_out_as_built():
    torch.manual_seed(5)
    model = Odd()
    found = sketch(Odd, 5)
    _assert_drawn_as_built(found, model)
    assert found is not None
    assert found.model.one.weight is found.model.two.weight
    assert all(t.is_meta for t in _state(found.model).values())
    _assert_drawn_as_built(found, model)  # and again


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(400), std=2.0))


def test_a_model_whose_initialiser_looks_at_values_is_built_whole():
    state = torch.get_rng_state()
    assert sketch(NeedsValues, 0) is None
    assert torch.equal(torch.get_rng_state(), state)


# -- sharded --------------------------------------------------------------------------------------


def _started(data: Path, folder: Path, *flags: object) -> dict[str, Tensor]:
    """Every weight that a run starts with, whole."""
    job = pooled.job("--data", data, *SMALL, "--run-dir", folder, *flags)
    job.report.close()
    found = {name: _whole(t) for name, t in job.run.tensors().items() if name[:6] == "model."}
    if dist.is_initialized():
        dist.barrier()
        pooled._keep_groups()
    return found


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp", "fsdp2+tp"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_run_starts_to_the_bit_as_one_process_does(ranks4, text, tmp_path, strategy, level):
    flags = ("--opt-level", level, "--heads", 4)
    expected = _started(text, tmp_path / "one", *flags)
    several = (*flags, "--strategy", strategy)
    for found in ranks4.run(_started, text, tmp_path / "four", *several):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def make_tied(data: Any, width: int = 8) -> nn.Module:
    return Tied(data.classes, int(width))


class Tied(nn.Module):
    """One matrix at both ends, rows no number of ranks divides, and a buffer that is not saved."""

    scale: Tensor

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.odd = nn.Linear(width, 7)
        self.even = nn.Linear(7, width)
        self.head = nn.Linear(width, classes, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(1) + 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).relu()
        logits: Tensor = self.head(self.even(self.odd(x)) * self.scale)
        return logits


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_of_ones_own_trains_as_on_one_process(ranks4, text, tmp_path, precision):
    flags = ("--data", text, *SMALL, *PRECISIONS[precision], "--model", f"{__name__}:make_tied")
    expected = pooled.train(tmp_path / "one", flags)
    rows = ranks4.run(pooled.train, tmp_path / "four", (*flags, "--strategy", "fsdp2"))[0]
    _agree(rows, expected, precision)


def _bytes_at_most(data: Path, folder: Path, layers: int) -> tuple[int, int]:
    """What building a run added to this rank's largest resident set, and what was foretold."""
    from launch.memory import peak_memory

    cpu = torch.device("cpu")
    flags = ("--layers", 1, "--width", 16, "--heads", 2, "--strategy", "fsdp2")
    pooled.job("--data", data, *flags, "--run-dir", folder / "small").report.close()
    before = peak_memory(cpu)
    flags = ("--layers", layers, "--width", 512, "--heads", 4, "--strategy", "fsdp2")
    job = pooled.job("--data", data, *flags, "--run-dir", folder / "large")
    job.report.close()
    pooled._keep_groups()
    return peak_memory(cpu) - before, job.needed.weights + job.needed.gradients + job.needed.state


@pytest.mark.slow
def test_no_rank_ever_holds_the_whole_model(new_ranks, text, tmp_path):
    # 50 M parameters: 202 MB of weights, 50 on each of four ranks; gradients and moments are made
    # at the start too, so that a checkpoint can be read into them.
    for grown, foretold in new_ranks(4).run(_bytes_at_most, text, tmp_path, 16, timeout=300.0):
        assert grown < 1.25 * foretold
        assert foretold == pytest.approx(4 * 202e6 / 4, rel=0.02)


# -- gathered in the dtype of the region ----------------------------------------------------------


class _Counting(TorchDispatchMode):
    """Bytes of all-gathers and reduce-scatters that this rank takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"_allgather_base_": 0, "_reduce_scatter_base_": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("c10d::")
        if name in self.bytes:
            self.bytes[name] += max(args[0].nbytes, args[1].nbytes)
        return func(*args, **(kwargs or {}))


def _gathered(data: Path, folder: Path, *flags: object) -> tuple[int, int]:
    job = pooled.job("--data", data, *SMALL, "--run-dir", folder, *flags)
    with job.report, _Counting() as counting:
        train_job(job)
    pooled._keep_groups()
    return counting.bytes["_allgather_base_"], counting.bytes["_reduce_scatter_base_"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_weights_gathered_in_half_the_bytes_train_as_those_gathered_in_fp32(
    ranks4, alone, text, tmp_path, precision
):
    flags = ("--data", text, *SMALL, *PRECISIONS[precision], "--strategy", "fsdp2")
    for more in ((), ("--gather-fp32",)):
        folder = tmp_path / f"run{len(more)}"
        _agree(ranks4.run(pooled.train, folder, (*flags, *more))[0], alone[precision], precision)


def test_blocks_are_gathered_in_half_the_bytes_and_reduced_in_fp32(ranks2, text, tmp_path):
    flags = ("--precision", "bf16", "--strategy", "fsdp2", "--steps", 1, "--width", 64)
    half, reduced = ranks2.run(_gathered, text, tmp_path / "half", *flags)[0]
    full, expected = ranks2.run(_gathered, text, tmp_path / "full", *flags, "--gather-fp32")[0]
    assert reduced == expected > 0
    assert 0.5 <= half / full < 0.7  # embeddings and head stay in fp32


# -- what does not fit ----------------------------------------------------------------------------

BF16 = Config(precision="bf16")
LARGE = ModelSize(34_000_000_000, block=500_000_000, outside=10_000_000, largest=100_000_000)


def _refusal(shares: Shares, ranks: int, monkeypatch: pytest.MonkeyPatch, have: int) -> str:
    monkeypatch.setattr("launch.memory._memory", lambda device: have)
    found = needs(LARGE, LEVELS["bf16"], shares, torch.bfloat16)
    with pytest.raises(UsageError) as refused:
        check_memory(
            LARGE, Config(precision="bf16"), torch.device("cpu"), Ranks(0, 0, ranks), found, "ddp"
        )
    return str(refused.value)


def test_what_a_rank_needs_depends_on_the_layout_and_what_fits_is_reported(monkeypatch):
    shown = _refusal(Shares(), 8, monkeypatch, 80 * 2**30)
    assert "3.4e+10 parameters under ddp need 507 GiB on each of 8 ranks, and there are 80" in shown
    assert "--strategy fsdp2 on 8 ranks with that much each would fit (68 GiB)" in shown
    assert "no number of ranks would do" in _refusal(Shares(), 8, monkeypatch, 2**30)


def test_a_model_that_fits_in_shards_alone_is_allowed_there(monkeypatch):
    monkeypatch.setattr("launch.memory._memory", lambda device: 80 * 2**30)
    found = needs(LARGE, LEVELS["bf16"], Shares(8, 8, built_whole=False), torch.bfloat16)
    check_memory(
        LARGE, Config(precision="bf16"), torch.device("cpu"), Ranks(0, 0, 8), found, "fsdp2"
    )
    whole = replace(found, built=LARGE.parameters * 4)
    with pytest.raises(UsageError, match="need 127 GiB"):
        check_memory(
            LARGE, Config(precision="bf16"), torch.device("cpu"), Ranks(0, 0, 8), whole, "fsdp1"
        )


def test_ranks_of_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr("launch.memory._memory", lambda device: 80 * 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = needs(LARGE, LEVELS["bf16"], Shares(8, 8, built_whole=False), torch.bfloat16)
    with pytest.raises(UsageError, match="there are 20 for each of the 4 ranks here"):
        check_memory(
            LARGE, Config(precision="bf16"), torch.device("cpu"), Ranks(0, 0, 8), found, "fsdp2"
        )


# -- what malloc keeps ----------------------------------------------------------------------------

FREED = """
import sys, torch
from launch.memory import Needs, return_freed_memory
return_freed_memory(Needs(int(sys.argv[1]), 0, 0, 0, 0), torch.device("cpu"))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

del_me = torch.ones(31 << 18)  # what malloc takes from its heap grows with what was freed
del del_me
kept, freed = [], []
for _ in range(50):
    freed.append(torch.ones(1 << 20))
    kept.append(torch.ones(1000))
before = resident()
del freed
print((before - resident()) / (50 << 22))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc alone has it")
@pytest.mark.parametrize(("needed", "returned"), [(0, False), (1 << 60, True)])
def test_malloc_returns_what_is_freed_where_memory_is_scarce(needed, returned):
    command = [sys.executable, "-c", FREED, str(needed)]
    # Otherwise where small tensors lie decides, by chance, what malloc returns by itself.
    keeps = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=jobs.ROOT,
        check=True,
        env={**os.environ, **keeps},
    )
    assert (float(done.stdout) > 0.9) == returned

"""Compiled and checkpointed blocks: the same numbers, under the same names, in less memory."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.blocks import prepare_blocks
from launch.config import Config
from launch.networks import GPT
from tests.launch import jobs, pooled
from tests.launch.pooled import Rows
from tests.launch.test_strategies import PRECISIONS, SMALL, _agree

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]

MODES = ("full", "selective")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


def _kept_bytes(mode: str) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters not among them."""
    torch.manual_seed(0)
    config = Config(checkpoint_activations=mode)  # type: ignore[arg-type]
    model = GPT(config.shape)
    prepare_blocks(model, config)
    kept: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.zeros(4, 64, dtype=torch.int64))
    assert output.requires_grad
    return sum(kept.values())


def test_what_is_kept_for_the_backward_pass_is_less():
    # Selective checkpointing keeps products where these hooks do not see them.
    assert _kept_bytes("full") < 0.3 * _kept_bytes("none")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_checkpointed_activations_change_no_number(text, tmp_path, mode, precision):
    flags = ("--data", text, *SMALL, *PRECISIONS[precision], "--dropout", 0.1)
    expected = pooled.train(tmp_path / "none", flags)
    more = ("--checkpoint-activations", mode)
    assert pooled.train(tmp_path / mode, (*flags, *more)) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "strategy",
    ["fsdp2", *(pytest.param(s, marks=pytest.mark.slow) for s in ("ddp", "fsdp1", "fsdp2+tp"))],
)
def test_so_it_is_in_every_layout(ranks4, text, tmp_path, strategy, mode):
    flags = ("--data", text, *SMALL, *PRECISIONS["fp16"], "--strategy", strategy)
    expected = ranks4.run(pooled.train, tmp_path / "none", flags)[0]
    more = ("--checkpoint-activations", mode)
    assert ranks4.run(pooled.train, tmp_path / mode, (*flags, *more))[0] == expected


def _ops_of_a_backward_pass(mode: str) -> list[str]:
    from torch.utils._python_dispatch import TorchDispatchMode

    ran: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            ran.append(func.name().removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    config = Config(checkpoint_activations=mode)  # type: ignore[arg-type]
    model = GPT(config.shape)
    prepare_blocks(model, config)
    loss = model(torch.zeros(2, 8, dtype=torch.int64)).sum()
    with Watch():
        loss.backward()
    return ran


def test_selective_computes_no_product_again_and_full_does():
    def count(mode: str, op: str) -> int:
        return sum(name.startswith(op) for name in _ops_of_a_backward_pass(mode))

    assert count("none", "addmm") == count("selective", "addmm") == 0
    # Of four layers in each of two blocks; nothing in a block needs what the last one returns.
    assert count("full", "addmm") == 3 * 2
    assert count("selective", "gelu") > count("none", "gelu")


# -- compiled -------------------------------------------------------------------------------------


def _train_compiled(folder: Path, flags: tuple[object, ...]) -> tuple[Rows, int]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # else what an earlier test compiled is found again
    counters.clear()
    rows = pooled.train(folder, (*flags, "--compile"))
    return rows, counters["stats"]["unique_graphs"]


# The compiler looks at the .grad of a block's input; a user does not hear of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "precision"),
    [*(("none", precision) for precision in PRECISIONS), *((mode, "fp16") for mode in MODES)],
)
def test_compiled_blocks_train_as_others_do(text, tmp_path, precision, mode):
    flags = ("--data", text, *SMALL, *PRECISIONS[precision], "--checkpoint-activations", mode)
    expected = pooled.train(tmp_path / "eager", flags)
    rows, graphs = _train_compiled(tmp_path / "compiled", flags)
    _agree(rows, expected, precision)
    assert graphs > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "hsdp", "fsdp2+tp", "zero1"])
def test_so_they_do_in_every_layout(ranks4, text, tmp_path, strategy):
    flags = ("--data", text, *SMALL, *PRECISIONS["fp16"], "--strategy", strategy)
    flags = (*flags, "--checkpoint-every", 3, "--keep-checkpoints", 9)
    expected = ranks4.run(pooled.train, tmp_path / "eager", flags)[0]
    rows, graphs = ranks4.run(_train_compiled, tmp_path / "run", flags, timeout=jobs.TIMEOUT_S)[0]
    _agree(rows, expected, "fp16")
    assert graphs > 0
    middle = tmp_path / "run" / "checkpoints" / "step-00000003"  # goes on without compiled blocks
    resumed = ranks4.run(pooled.train, tmp_path / "run", (*flags, "--resume", middle))[0]
    _agree(resumed, expected, "fp16")


# -- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (("--compile", "--strategy", "dp"), "--compile: --strategy dp copies the model"),
        (("--checkpoint-activations", "full", "--strategy", "dp"), "take ddp"),
        (("--compile", "--report"), "--report: a compiled block runs kernels"),
        (("--compile", "--model", "tests.launch.test_models:make_own"), "has no blocks"),
    ],
)
def test_what_cannot_be_is_refused(text, tmp_path, args, shown):
    assert shown in pooled.refusal("--data", text, *SMALL, *args, "--run-dir", tmp_path)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_compiler_says_nothing_of_selective_checkpointing(monkeypatch, caplog):
    import torch._logging._internal

    compiled = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiled)
    torch._logging._internal.warning_once.cache_clear()
    torch._dynamo.reset()
    config = Config(compile=True, checkpoint_activations="selective")
    model = GPT(replace(config.shape, layers=1, width=12))
    prepare_blocks(model, config)
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert "context_fn" not in caplog.text
    assert not any(row.levelname == "WARNING" for row in caplog.records)

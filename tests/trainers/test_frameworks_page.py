"""Run the code of docs/frameworks.md, and Ray's example, unchanged on two ranks."""

import contextlib
import importlib.util
import math
import operator
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import distamp
from tests.docs_code import as_torchrun_starts_it, blocks_of
from tests.trainers import common, titan
from tests.trainers.common import FAULT, GROUPS, data, digest, faulty, needs, quiet, rank

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks.md"
STEPS = 6
BATCH_SIZE = 2
# Both ranks together.
SAMPLES = 2 * BATCH_SIZE * STEPS

pytestmark = pytest.mark.filterwarnings("ignore")

Namespace = dict[str, Any]


def snippets() -> dict[str, str]:
    """Return the code of each snippet of the page, by the name that its comment gives it."""
    code_by_name = {}
    for block in blocks_of(PAGE):
        if block.language == "python":
            name = block.how.removeprefix("run: ")
            code_by_name[name] = block.code
    return code_by_name


# -- the names that the snippets use ---------------------------------------------------------------


def make_small_data(samples: int) -> TensorDataset:
    """Return data whose gradients float16 holds at the first loss scale of 2^16."""
    inputs, targets = data(samples).tensors
    return TensorDataset(inputs * 0.01, targets * 0.01)


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Return the batches of this rank, which has every second sample."""
    inputs, targets = make_small_data(SAMPLES).tensors
    rank_inputs = inputs[rank() :: 2].split(BATCH_SIZE)
    rank_targets = targets[rank() :: 2].split(BATCH_SIZE)
    return list(zip(rank_inputs, rank_targets, strict=True))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.float() - targets).square().mean()


def define_loop() -> Namespace:
    """Define a model in DDP, an optimizer and batches, as a training loop has them."""
    net = faulty(common.model())
    return define_loop_of(DistributedDataParallel(net))


def define_loop_without_ddp() -> Namespace:
    """Define the names of a loop whose trainer wraps the model."""
    return define_loop_of(faulty(common.model()))


def define_loop_of(model: nn.Module) -> Namespace:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "batches": make_batches(),
        "loss_fn": squared_error,
    }


def define_for_accelerate() -> Namespace:
    common.fresh_accelerate()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return define_loop_without_ddp()


def define_for_lightning() -> Namespace:
    from tests.trainers.in_lightning import Net

    loader = torch.utils.data.DataLoader(make_small_data(SAMPLES), batch_size=BATCH_SIZE)
    return {"module": Net({}), "batches": loader}


def define_for_transformers() -> Namespace:
    from tests.trainers import in_transformers

    namespace = define_for_accelerate()
    namespace["model"] = faulty(in_transformers.make_model())
    namespace["tokenizer"] = in_transformers.make_tokenizer()
    namespace["rows"] = in_transformers.make_rows(96)
    if importlib.util.find_spec("datasets"):
        from datasets import Dataset

        namespace["texts"] = Dataset.from_dict({"text": in_transformers.make_texts(96)})
    return namespace


def define_for_mmengine() -> Namespace:
    from mmengine.optim import AmpOptimWrapper
    from mmengine.optim.optimizer import amp_optimizer_wrapper

    # The wrapper raises on a machine without a GPU.
    amp_optimizer_wrapper.is_cuda_available = lambda: True
    namespace = define_loop()
    namespace["wrapper"] = AmpOptimWrapper(
        optimizer=namespace["optimizer"],
        clip_grad={"max_norm": 1.0},
        dtype="bfloat16",
    )
    return namespace


def define_for_torchtitan() -> Namespace:
    titan.on_cpu()
    return {"debug_model": titan.config_for("runs", FAULT + 2)}


@dataclass(frozen=True)
class Snippet:
    """How to run one snippet of the page.

    Attributes:
        package: The package that it needs.
        define_names: Returns the names that the snippet reads.
        scaler: The expression for its scaler after the run.
    """

    package: str
    define_names: Callable[[], Namespace]
    scaler: str


SNIPPETS = {
    "lightning": Snippet("lightning", define_for_lightning, "trainer.precision_plugin.scaler"),
    "fabric": Snippet("lightning", define_loop_without_ddp, "plugin.scaler"),
    "accelerate": Snippet("accelerate", define_for_accelerate, "accelerator.scaler"),
    "transformers": Snippet("transformers", define_for_transformers, "trainer.accelerator.scaler"),
    "trl": Snippet("trl", define_for_transformers, "trainer.accelerator.scaler"),
    "install": Snippet("timm", define_loop, "loss_scaler._scaler"),
    "mmengine": Snippet("mmengine", define_for_mmengine, "wrapper.loss_scaler"),
    "torchtitan": Snippet("torchtitan", define_for_torchtitan, "trainer.scaler"),
}


# -- running a snippet -----------------------------------------------------------------------------

# The page's instruction for bf16 replaces the scaler by a guard.
REPLACEMENTS_FOR_BF16 = {
    "from distamp import GradScaler": "from distamp import StepGuard",
    'GradScaler("cpu")': "StepGuard()",
    '"float16"': '"bfloat16"',
}


@dataclass(frozen=True)
class Outcome:
    """The state of one rank after a snippet.

    Attributes:
        weights: One number for all weights.
        scale_ratio: The last loss scale divided by the first.
        scaler_module: The module of the scaler's class.
    """

    weights: float
    scale_ratio: float
    scaler_module: str


def run(name: str) -> Outcome:
    """Run a snippet on this rank."""
    return run_code(name, code_for_cpu(name))


def run_in_bf16(name: str) -> Outcome:
    """Run a snippet on this rank with the changes that the page describes for bf16."""
    code = code_for_cpu(name)
    for fp16_code, bf16_code in REPLACEMENTS_FOR_BF16.items():
        assert fp16_code in code
        code = code.replace(fp16_code, bf16_code)
    return run_code(name, code)


def code_for_cpu(name: str) -> str:
    code = snippets()[name]
    return code.replace('"cuda"', '"cpu"').replace('"gpu"', '"cpu"')


def run_code(name: str, code: str) -> Outcome:
    quiet()
    snippet = SNIPPETS[name]
    namespace = snippet.define_names()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            exec(compile(code, str(PAGE), "exec"), namespace)
        finally:
            distamp.unpatch_torch()
    variables = types.SimpleNamespace(**namespace)
    scaler = operator.attrgetter(snippet.scaler)(variables)
    init_scale = getattr(scaler, "_init_scale", 1.0)  # A guard has no scale.
    return Outcome(
        weights=digest(find_model(namespace)),
        scale_ratio=scaler.get_scale() / init_scale,
        scaler_module=type(scaler).__module__,
    )


def find_model(namespace: Namespace) -> nn.Module:
    """Return the model that a snippet trained."""
    model: nn.Module | None = namespace.get("model", namespace.get("module"))
    if model is None:
        (model,) = namespace["trainer"].model_parts
    return model


def run_as_torchrun(new_ranks: Any, run_function: Callable[[str], Outcome], name: str) -> Any:
    """Run a snippet that makes the process group; return the outcomes of both ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool = new_ranks(2, timeout=550)
    return pool.run(as_torchrun_starts_it, store.port, run_function, name, group="none")


def test_every_snippet_is_run():
    assert set(snippets()) == set(SNIPPETS)


# Their packages take long to import and to start.
SLOW_SNIPPETS = ("lightning", "transformers", "trl")


def snippet_params() -> list[Any]:
    """Return the names of all snippets, each with the worker that imports its package."""
    params = []
    for name in SNIPPETS:
        worker = GROUPS.get(name, "other_trainers")
        marks = [pytest.mark.xdist_group(worker)]
        if name in SLOW_SNIPPETS:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(name, marks=marks))
    return params


@pytest.mark.timeout(600)  # An import of a package takes minutes on a busy machine.
@pytest.mark.parametrize("name", snippet_params())
def test_an_overflow_of_one_rank_halves_the_scale_of_both_and_they_stay_equal(
    ranks2, new_ranks, name
):
    needs(SNIPPETS[name].package)
    if name == "torchtitan":
        rank_0, rank_1 = run_as_torchrun(new_ranks, run, name)
    else:
        rank_0, rank_1 = ranks2.run(run, name)
    assert rank_0 == rank_1
    assert math.isfinite(rank_0.weights)
    assert rank_0.scale_ratio == 0.5, "the ranks skipped exactly once"
    assert rank_0.scaler_module.startswith("distamp.")


@pytest.mark.timeout(600)  # An import of a package takes minutes on a busy machine.
@pytest.mark.xdist_group("other_trainers")
def test_in_bf16_torchtitan_skips_an_overflow_of_one_rank_on_both_by_a_guard(new_ranks):
    needs("torchtitan")
    rank_0, rank_1 = run_as_torchrun(new_ranks, run_in_bf16, "torchtitan")
    assert rank_0 == rank_1
    assert math.isfinite(rank_0.weights)
    assert rank_0.scaler_module.startswith("distamp.guard")


# -- Ray -------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("other_trainers")
@pytest.mark.timeout(600)  # Ray and its workers take tens of seconds to start.
def test_two_workers_of_ray_continue_from_a_checkpoint_to_the_same_weights():
    needs("ray")
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    process = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    uninterrupted, resumed, checkpoint = process.stdout.strip().splitlines()[-3:]
    assert uninterrupted.removeprefix("uninterrupted: ") == resumed.removeprefix("resumed: ")
    assert "scale 512" in uninterrupted, "one worker overflowed once, and both skipped"
    assert "fp16 saved" in checkpoint

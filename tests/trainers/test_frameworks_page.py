"""The code of docs/frameworks.md, and Ray's example, run as they stand on two ranks."""

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
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import distamp
from tests.docs_code import as_torchrun_starts_it, blocks_of
from tests.trainers import common, titan
from tests.trainers.common import FAULT, GROUPS, data, digest, faulty, needs, quiet, rank

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
STEPS = 6

pytestmark = pytest.mark.filterwarnings("ignore")


def snippets() -> dict[str, str]:
    """Name and code of each piece of code on the page."""
    return {b.how.removeprefix("run: "): b.code for b in blocks_of(PAGE) if b.language == "python"}


# -- what the code is given -----------------------------------------------------------------------


def small(samples: int) -> TensorDataset:
    """Data whose gradients float16 holds at the first loss scale of 2^16."""
    return TensorDataset(*(each * 0.01 for each in data(samples).tensors))


def plain(wrap: bool = True) -> dict[str, Any]:
    """A model, an optimizer and batches, as a loop of one's own has them."""
    net = faulty(common.model())
    model: nn.Module = DistributedDataParallel(net) if wrap else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    mine = slice(rank(), 2 * 2 * STEPS, 2)
    inputs, targets = (each[mine].split(2) for each in small(2 * 2 * STEPS).tensors)
    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "batches": list(zip(inputs, targets, strict=True)),
        "loss_fn": lambda outputs, targets: (outputs.float() - targets).square().mean(),
    }


def given_accelerate() -> dict[str, Any]:
    common.fresh_accelerate()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return plain(wrap=False)


def given_lightning() -> dict[str, Any]:
    from tests.trainers.in_lightning import Net

    loader = torch.utils.data.DataLoader(small(2 * 2 * STEPS), batch_size=2)
    return {"module": Net({}), "batches": loader}


def given_transformers() -> dict[str, Any]:
    from tests.trainers import in_transformers as hugging_face

    given = given_accelerate()
    given["model"] = faulty(hugging_face.net())
    given["tokenizer"] = hugging_face.tokenizer()
    given["rows"] = [
        {"input_ids": ids, "labels": ids}
        for ids in hugging_face.tokenizer()(hugging_face.texts(96))["input_ids"]
    ]
    if importlib.util.find_spec("datasets"):
        from datasets import Dataset

        given["texts"] = Dataset.from_dict({"text": hugging_face.texts(96)})
    return given


def given_mmengine() -> dict[str, Any]:
    from mmengine.optim import AmpOptimWrapper
    from mmengine.optim.optimizer import amp_optimizer_wrapper

    given = plain()
    amp_optimizer_wrapper.is_cuda_available = lambda: True  # else it refuses to be made
    given["wrapper"] = AmpOptimWrapper(
        optimizer=given["optimizer"], clip_grad={"max_norm": 1.0}, dtype="bfloat16"
    )
    return given


def given_torchtitan() -> dict[str, Any]:
    titan.on_cpu()
    return {"debug_model": titan.config_for("runs", FAULT + 2)}


# For each piece of code its package, what it is given, and where its scaler is in the end.
GIVEN: dict[str, tuple[str, Callable[[], dict[str, Any]], str]] = {
    "lightning": ("lightning", given_lightning, "trainer.precision_plugin.scaler"),
    "fabric": ("lightning", lambda: plain(wrap=False), "plugin.scaler"),
    "accelerate": ("accelerate", given_accelerate, "accelerator.scaler"),
    "transformers": ("transformers", given_transformers, "trainer.accelerator.scaler"),
    "trl": ("trl", given_transformers, "trainer.accelerator.scaler"),
    "install": ("timm", plain, "loss_scaler._scaler"),
    "mmengine": ("mmengine", given_mmengine, "wrapper.loss_scaler"),
    "torchtitan": ("torchtitan", given_torchtitan, "trainer.scaler"),
}
# -- running it -----------------------------------------------------------------------------------


# What the page says is to be changed for a guard in bf16.
IN_BF16 = [
    ("from distamp import GradScaler", "from distamp import StepGuard"),
    ('GradScaler("cpu")', "StepGuard()"),
    ('"float16"', '"bfloat16"'),
]


def run(name: str, in_bf16: bool = False) -> tuple[float, float, str]:
    """Weights, last loss scale over the first, and the scaler's class, after one piece of code."""
    quiet()
    text = snippets()[name].replace('"cuda"', '"cpu"').replace('"gpu"', '"cpu"')
    for old, new in IN_BF16 if in_bf16 else []:
        assert old in text
        text = text.replace(old, new)
    _, given, place = GIVEN[name]
    namespace = given()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            exec(compile(text, str(PAGE), "exec"), namespace)
        finally:
            distamp.unpatch_torch()
    scaler = operator.attrgetter(place)(types.SimpleNamespace(**namespace))
    net = namespace.get("model", namespace.get("module"))
    if net is None:
        (net,) = namespace["trainer"].model_parts
    first = getattr(scaler, "_init_scale", 1.0)
    return digest(net), scaler.get_scale() / first, type(scaler).__module__


def test_every_piece_of_code_is_run():
    assert set(snippets()) == set(GIVEN)


@pytest.mark.timeout(600)  # minutes go by on a busy machine while a package is imported
@pytest.mark.parametrize(
    ("name", "in_bf16"),
    [
        pytest.param(*case, marks=pytest.mark.xdist_group(GROUPS.get(case[0], "beside")))
        for case in (*((name, False) for name in GIVEN), ("torchtitan", True))
    ],
)
def test_the_code_runs_and_keeps_ranks_together(ranks2, new_ranks, name, in_bf16):
    needs(GIVEN[name][0])
    if name == "torchtitan":  # makes its own process group
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        own = (as_torchrun_starts_it, store.port, run, name, in_bf16)
        one, other = new_ranks(2, timeout=550).run(*own, group="none")
    else:
        one, other = ranks2.run(run, name)
    assert one == other
    weights, scale, module = one
    assert math.isfinite(weights)
    assert in_bf16 or scale == 0.5, "the overflow of one rank halves the scale of both, once"
    assert module.startswith("distamp.guard" if in_bf16 else "distamp.")


@pytest.mark.xdist_group("beside")
@pytest.mark.timeout(600)  # starting Ray and its workers takes tens of seconds
def test_two_workers_go_on_from_a_checkpoint_to_the_same_weights():
    needs("ray")
    command = [sys.executable, str(PAGE.parents[1] / "examples" / "ray_train.py")]
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1]), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        command, env=environment, cwd=PAGE.parents[1], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    uninterrupted, resumed, saved = done.stdout.strip().splitlines()[-3:]
    assert uninterrupted.removeprefix("uninterrupted: ") == resumed.removeprefix("resumed: ")
    assert "scale 512" in uninterrupted, "one worker overflowed once, and both skipped"
    assert "fp16 saved" in saved

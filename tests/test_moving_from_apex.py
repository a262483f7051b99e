"""The script of docs/howto/moving.md, moved from Apex, learns at each level and resumes."""

import os
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.docs_code import as_torchrun_starts_it, blocks_of

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "moving.md"
slow = pytest.mark.slow
EPOCHS = 3
# One worker runs all tests that need the loss in float32.
pytestmark = pytest.mark.xdist_group("moving from Apex")
# A model that has learned is below this loss; chance is log(4) = 1.39.
LEARNED_LOSS = 0.9


def script() -> str:
    """Return the script of the page, changed to run without a GPU."""
    (code,) = (block.code for block in blocks_of(PAGE) if block.how == "run: after")
    code = code.replace("        torch.cuda.set_device(args.local_rank)\n", "")
    return code.replace(".cuda()", "").replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')


def build_model(arch: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
    model.append(nn.AdaptiveAvgPool2d(1))
    model.append(nn.Flatten())
    model.append(nn.Linear(8, 4))
    return model


def build_loader(args: Any) -> list[tuple[Tensor, Tensor]]:
    """Return batches of images; the class of an image decides its bright rows."""
    generator = torch.Generator().manual_seed(args.local_rank)
    target = torch.randint(4, (64,), generator=generator)
    images = torch.randn(64, 3, 8, 8, generator=generator) * 0.1
    for image, label in zip(images, target, strict=True):
        channel, rows = label % 3, 4 + int(label)
        image[channel, :rows] += 1.0
    image_batches = images.split(8)
    target_batches = target.split(8)
    return list(zip(image_batches, target_batches, strict=True))


def run(level: str, folder: Path, **changed: Any) -> float:
    """Run the script at a level with changed arguments; return its last loss."""
    args = types.SimpleNamespace(
        distributed=False,
        local_rank=0,
        arch="small",
        sync_bn=False,
        lr=0.1,
        momentum=0.9,
        max_norm=5.0,
        opt_level=level,
        keep_batchnorm_fp32=None,
        loss_scale=None,
        epochs=EPOCHS,
        resume="",
        save=folder / "saved.pt",
    )
    vars(args).update(changed)
    namespace: dict[str, Any] = {"build_model": build_model, "build_loader": build_loader}
    exec(compile(script(), PAGE, "exec"), namespace)
    return namespace["main"](args)


@pytest.fixture(scope="module")
def loss_in_float32(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the last loss of the script in float32."""
    return run("O0", tmp_path_factory.mktemp("O0"))


def test_the_script_learns_in_float32(loss_in_float32):
    assert loss_in_float32 < LEARNED_LOSS


@pytest.mark.parametrize("level", [pytest.param("O1", marks=slow), "O2"])
def test_a_level_learns_as_o0_does(tmp_path, loss_in_float32, level):
    assert run(level, tmp_path) == pytest.approx(loss_in_float32, rel=0.05)


@slow
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_resumed_run_ends_with_the_loss_of_an_uninterrupted_run(tmp_path, level):
    uninterrupted = run(level, tmp_path)
    run(level, tmp_path, epochs=2)
    assert run(level, tmp_path, resume=tmp_path / "saved.pt") == uninterrupted


@slow
def test_the_flags_of_apexs_examples_work(tmp_path):
    loss = run("O2", tmp_path, keep_batchnorm_fp32="True", loss_scale="128.0")
    assert loss < LEARNED_LOSS


def run_on_rank(folder: Path, port: int) -> float:
    """Run the script as torchrun starts it; return the last loss of this rank."""
    warnings.simplefilter("ignore")
    changed = {"distributed": True, "local_rank": int(os.environ["RANK"])}
    return as_torchrun_starts_it(port, run, "O1", folder, **changed)


@slow
def test_it_trains_on_two_ranks(new_ranks, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    losses = new_ranks(2, timeout=200).run(run_on_rank, tmp_path, store.port, group="none")
    assert sum(losses) / 2 < LEARNED_LOSS

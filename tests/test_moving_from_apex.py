"""The script of docs/howto/moving.md, which was Apex's: it learns at each level, and goes on."""

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
EPOCHS = 3
LEVELS = ["O0", "O1", "O2"]


def script() -> str:
    """For a machine without a GPU."""
    (code,) = (block.code for block in blocks_of(PAGE) if block.how == "run: after")
    code = code.replace("        torch.cuda.set_device(args.local_rank)\n", "")
    return code.replace(".cuda()", "").replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')


def build_model(arch: str) -> nn.Module:
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def build_loader(args: Any) -> list[tuple[Tensor, Tensor]]:
    """Images whose class is the corner that is bright."""
    generator = torch.Generator().manual_seed(args.local_rank)
    target = torch.randint(4, (64,), generator=generator)
    images = torch.randn(64, 3, 8, 8, generator=generator) * 0.1
    for image, label in zip(images, target, strict=True):
        image[label % 3, : 4 + int(label) :] += 1.0
    return list(zip(images.split(8), target.split(8), strict=True))


def run(level: str, folder: Path, **changed: Any) -> float:
    """The loss that the script ends with."""
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


@pytest.mark.parametrize("level", LEVELS)
def test_it_learns_what_float32_learns_and_goes_on_from_its_checkpoint(tmp_path, level):
    full, whole = run("O0", tmp_path), run(level, tmp_path)
    assert full < 0.9, "it learns: chance is 1.39"
    assert whole == pytest.approx(full, rel=0.05)
    run(level, tmp_path, epochs=2)
    assert run(level, tmp_path, resume=tmp_path / "saved.pt") == whole


def test_the_flags_of_apexs_examples_work(tmp_path):
    flags = {"keep_batchnorm_fp32": "True", "loss_scale": "128.0"}
    assert run("O2", tmp_path, **flags) < 0.9


def on_ranks(folder: Path, port: int) -> float:
    warnings.simplefilter("ignore")
    changed = {"distributed": True, "local_rank": int(os.environ["RANK"])}
    return as_torchrun_starts_it(port, run, "O1", folder, **changed)


def test_it_trains_on_two_ranks(new_ranks, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    losses = new_ranks(2, timeout=200).run(on_ranks, tmp_path, store.port, group="none")
    assert sum(losses) / 2 < 0.9

"""The script of docs/howto/moving.md and the one of Apex that it was: both learn the same."""

import contextlib
import os
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "moving.md"
EPOCHS = 3
LEVELS = ["O0", "O1", "O2"]
HALVES = ("before", "after")
# Structured like Apex's own example.
BEFORE = """\
import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from torch import nn


def main(args):
    if args.distributed:
        torch.cuda.set_device(args.local_rank)
        dist.init_process_group("nccl")
    model = build_model(args.arch)
    if args.sync_bn:
        model = convert_syncbn_model(model)
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DistributedDataParallel(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().cuda()
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cuda")
        start = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
    for epoch in range(start, args.epochs):
        loss = train(args, build_loader(args), model, criterion, optimizer)
        checkpoint = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        if args.local_rank == 0:
            torch.save(checkpoint, args.save)
    return loss


def train(args, loader, model, criterion, optimizer):
    model.train()
    for images, target in loader:
        loss = criterion(model(images.cuda()), target.cuda())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
        optimizer.step()
    return loss.item()
"""


def script(half: str) -> str:
    """One of the two scripts, for a machine without a GPU."""
    (code,) = re.findall(r"<!-- run: after -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = BEFORE if half == "before" else code
    code = code.replace("        torch.cuda.set_device(args.local_rank)\n", "")
    return code.replace(".cuda()", "").replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')


@contextlib.contextmanager
def apex() -> Iterator[None]:
    """Apex's names, doing in fp32 what Apex does at O0 with a constant loss scale."""
    amp, parallel = types.ModuleType("apex.amp"), types.ModuleType("apex.parallel")

    def initialize(model: Any, optimizer: Any, **_: Any) -> tuple[Any, Any]:
        return model, optimizer

    @contextlib.contextmanager
    def scale_loss(loss: Tensor, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        yield loss * 128
        for parameter in amp.master_params(optimizer):
            parameter.grad /= 128

    amp.initialize, amp.scale_loss = initialize, scale_loss
    amp.master_params = lambda optimizer: [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    amp.state_dict = lambda: {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}
    amp.load_state_dict = lambda state: None
    parallel.DistributedDataParallel = lambda model, delay_allreduce: DistributedDataParallel(model)
    parallel.convert_syncbn_model = lambda model: model
    package = types.ModuleType("apex")
    package.amp, package.parallel = amp, parallel
    names = {"apex": package, "apex.amp": amp, "apex.parallel": parallel}
    with mock.patch.dict(sys.modules, names):
        yield


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


def run(half: str, level: str, folder: str, **changed: Any) -> float:
    """The loss that a script ends with."""
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
        save=f"{folder}/{half}.pt",
    )
    vars(args).update(changed)
    namespace: dict[str, Any] = {"build_model": build_model, "build_loader": build_loader}
    with apex():
        exec(compile(script(half), f"{PAGE}:{half}", "exec"), namespace)
        return namespace["main"](args)


@pytest.mark.parametrize("level", LEVELS)
def test_both_scripts_learn_the_same_and_go_on_from_each_others_checkpoints(tmp_path, level):
    folder, resume = str(tmp_path), {half: str(tmp_path / f"{half}.pt") for half in HALVES}
    before, after = (run(half, level, folder) for half in HALVES)
    assert before < 0.9, "it learns: chance is 1.39"
    assert after == pytest.approx(before, rel=0.05)
    for half in HALVES:
        run(half, level, folder, epochs=2)
    assert run("after", level, folder, resume=resume["before"]) == pytest.approx(after, rel=0.05)
    run("after", level, folder, epochs=2)
    assert run("after", level, folder, resume=resume["after"]) == after


def test_the_flags_of_apexs_examples_work(tmp_path):
    flags = {"keep_batchnorm_fp32": "True", "loss_scale": "128.0"}
    assert run("after", "O2", str(tmp_path), **flags) < 0.9


def on_ranks(half: str, level: str, folder: str, port: int) -> float:
    """A script as torchrun starts it: it makes the process group itself."""
    # The store is the test's, as it is torchrun's agent's: no port is let go and taken again.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    warnings.simplefilter("ignore")
    changed = {"distributed": True, "local_rank": int(os.environ["RANK"])}
    try:
        return run(half, level, folder, **changed)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("half", HALVES)
def test_each_script_trains_on_two_ranks(new_ranks, tmp_path, half):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = new_ranks(2, timeout=200)
    losses = ranks.run(on_ranks, half, "O1", str(tmp_path), store.port, group="none")
    assert sum(losses) / 2 < 0.9

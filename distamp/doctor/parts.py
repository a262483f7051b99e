"""Which parts of distamp can work here: each is tried on something small."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from distamp.autocast import OpLists, autocast, preflight
from distamp.doctor.environment import backends
from distamp.initialize import initialize
from distamp.scaler import DistGradScaler

__all__ = ["Part", "tried_parts"]

# Versions of torch that the tests run on.
_FIRST, _LAST = (2, 11), (2, 13)


@dataclass(frozen=True)
class Part:
    """One part of distamp, and whether it works here.

    Args:
        name: What ``--require`` takes.
        state: ``"works"``; ``"missing"``, where it needs what is not here; ``"broken"``, where it
            should work and does not; ``"untested"``.
        why: What is missing or went wrong, and what to do.
    """

    name: str
    state: str
    why: str = ""


class _Missing(Exception):
    """What a part needs and is not here."""


def tried_parts(device: str) -> list[Part]:
    """Try every part on ``device``; takes about a second."""
    tries: dict[str, Callable[[], str]] = {
        "torch": _torch,
        "autocast": lambda: _autocast(device),
        "op-lists": lambda: _op_lists(device),
        "scaler": lambda: _scaler(device),
        "masters": lambda: _masters(device),
        "preflight": _preflight,
        "ranks": _ranks,
        "nccl": _nccl,
        "hook-kernels": lambda: _hook_kernels(device),
        "pictures": lambda: _needs("matplotlib", "report"),
        "tables": lambda: _needs("rich", "report"),
        "lightning": lambda: _needs("lightning", "trainers"),
        "accelerate": lambda: _needs("accelerate", "trainers"),
        "transformers": lambda: _needs("transformers", "hf"),
        "fairscale": lambda: _needs("fairscale", "fairscale"),
    }
    return [_tried(name, function) for name, function in tries.items()]


def _tried(name: str, function: Callable[[], str]) -> Part:
    log = logging.getLogger("distamp")
    level = log.level
    log.setLevel(logging.ERROR)  # the overflow that is made on purpose is no news
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Part(name, "works", function())
    except _Missing as reason:
        return Part(name, "missing", str(reason))
    except Exception as error:
        return Part(name, "broken", f"{type(error).__name__}: {str(error).splitlines()[0][:300]}")
    finally:
        log.setLevel(level)


def _torch() -> str:
    numbers = torch.__version__.split("+")[0].split(".")[:2]
    version = tuple(int(number) for number in numbers if number.isdigit())
    tested = f"{_FIRST[0]}.{_FIRST[1]} to {_LAST[0]}.{_LAST[1]}"
    if version < _FIRST:
        raise RuntimeError(f"torch {torch.__version__} is older than {_FIRST[0]}.{_FIRST[1]}")
    return f"tests run on {tested}" if version <= _LAST else f"newer than the tests': {tested}"


def _autocast(device: str) -> str:
    if not torch.amp.is_autocast_available(device):
        raise _Missing(f"torch has no autocast for {device}")
    works = []
    for dtype in (torch.bfloat16, torch.float16):
        layer = nn.Linear(8, 8, device=device)
        with autocast(device, dtype=dtype):
            out = layer(torch.ones(4, 8, device=device))
        if out.dtype is not dtype:
            raise RuntimeError(f"a region of {dtype} computed in {out.dtype}")
        out.float().sum().backward()
        works.append(str(dtype).removeprefix("torch."))
    return " and ".join(works)


def _op_lists(device: str) -> str:
    with autocast(device, dtype=torch.bfloat16, ops=OpLists(fp32={"linear"})):
        out = nn.Linear(8, 8, device=device)(torch.ones(4, 8, device=device))
    if out.dtype is not torch.float32:
        raise RuntimeError(f"an op listed as fp32 computed in {out.dtype}")
    return ""


def _scaler(device: str) -> str:
    weight = nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.SGD([weight], 0.25)
    scaler = DistGradScaler(device, init_scale=1024.0)
    for factor, stepped in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        if scaler.stepped(optimizer) is not stepped:
            raise RuntimeError(f"a gradient of {factor} was {'' if not stepped else 'not '}stepped")
        scaler.update()
    if weight.tolist() != [0.75] * 4:
        raise RuntimeError(f"a step from 1.0 by 0.25 came to {weight.tolist()}")
    return "an overflow was skipped and the next step taken"


def _masters(device: str) -> str:
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp = initialize(model, optimizer, "O2")
    amp.backward(amp.model(torch.ones(2, 4, device=device)).float().mean())
    if not amp.step().taken:
        raise RuntimeError("a step at O2 with finite gradients was skipped")
    return "a step at level O2"


def _preflight() -> str:
    result = preflight(nn.Linear(8, 8), torch.ones(2, 8), "cuda", torch.float16, measure=False)
    return "" if result.finished else "a linear layer could not be simulated to its end"


def _ranks() -> str:
    if not backends()["gloo"]:
        raise _Missing("this torch was built without gloo: one process, or NCCL alone")
    return "gloo"


def _nccl() -> str:
    if not backends()["nccl"]:
        what = "a CUDA device" if not torch.cuda.is_available() else "a torch with NCCL"
        raise _Missing(f"needs {what}; gradients travel over gloo")
    return ""


def _hook_kernels(device: str) -> str:
    if device != "cuda":
        raise _Missing(f"for CUDA alone; on {device} torch's ops do the same")
    return _needs("triton", "a torch for CUDA brings it")


def _needs(package: str, extra: str) -> str:
    if importlib.util.find_spec(package) is None:
        if " " in extra:
            raise _Missing(f"{package} is not installed: {extra}")
        raise _Missing(f"{package} is not installed: pip install 'distamp[{extra}]'")
    return "installed, not imported"

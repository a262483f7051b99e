"""distamp in the trainers people use: each test runs the real package, and is skipped without it.

`make test-trainers` installs them all.
"""

import importlib.util

import torch


def _torchvision_without_cuda() -> None:
    """Let torchvision's wheel, whose kernels need CUDA, be imported beside a CPU build of torch."""
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # what it defines lives as long as it does


_torchvision_without_cuda()

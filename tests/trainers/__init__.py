"""distamp in trainers: each test runs the real package, and is skipped without it.

`make test-trainers` installs them all.
"""

import importlib.util

import torch


def _torchvision_without_cuda() -> None:
    """Define ops that torchvision's wheel for CUDA needs to be imported with torch for the CPU."""
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # The ops live as long as the library.


_torchvision_without_cuda()

"""A small counter of kernels and casts, the reference of a report, and models to count in."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distamp.report import PrecisionReport

BF16, FP16 = torch.bfloat16, torch.float16


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def dtype_names(tensors: list[Tensor]) -> frozenset[str]:
    """Return the names of the dtypes of tensors, such as ``"float32"``."""
    return frozenset(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


class Independent(TorchDispatchMode):
    """Kernels by name and dtypes, and casts with their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[Any] = Counter()
        self.casts = self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        inputs = tensors_in((args, kwargs))
        outputs = tensors_in(out)
        kernel = (name.removeprefix("aten::"), dtype_names(inputs), dtype_names(outputs))
        self.kernels[kernel] += 1
        pairs: Any = []
        if name in ("aten::_to_copy", "aten::to"):
            pairs = [(inputs[0], outputs[0])]
        elif name == "aten::copy_":
            pairs = [(inputs[1], inputs[0])]
        elif name == "aten::_foreach_copy_":
            pairs = zip(args[1], args[0], strict=True)
        for source, result in pairs:
            if source.dtype != result.dtype:
                self.casts += 1
                self.read += source.nbytes
                self.written += result.nbytes
        return out

    def agrees(self, report: PrecisionReport) -> bool:
        """Return whether a report has the same kernels, and the same casts and bytes."""
        kernels: Counter[Any] = Counter()
        for row in report.rows:
            kernels[row.op, frozenset(row.inputs), frozenset(row.outputs)] += row.calls
        has_kernels = kernels == self.kernels
        has_casts = report.casts == self.casts
        has_bytes = (report.bytes_read, report.bytes_written) == (self.read, self.written)
        return has_kernels and has_casts and has_bytes


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 8))


def transformer() -> nn.Sequential:
    return nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(2)))


def conv() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model.append(nn.Conv2d(4, 1, 3))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4, 8)),
    "transformer": (transformer, (2, 5, 8)),
    "conv": (conv, (2, 1, 8, 8)),
}


class Calls(nn.Module):
    """A module that calls one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)

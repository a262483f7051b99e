"""Print the page of ops: what this torch lists, and where its documents say otherwise.

The site makes its page of ops by this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from distamp import OpLists

DOCUMENTS: dict[str, dict[str, dict[str, list[str]]]] = json.loads(
    Path(__file__).with_name("documented_ops.json").read_text()
)
CATEGORIES = ("lower_precision", "fp32", "promote")
HEAD = """\
# Op reference

Made by `python docs/op_reference.py`.

What torch {torch} lists, as `distamp.OpLists.of_torch(device_type)` reads it off the kernels
that are registered, and where a document of torch's says otherwise. *lower_precision*: inputs
are cast to the region's dtype. *fp32*: inputs are cast to float32. *promote*: inputs are cast
to the widest of their dtypes. Every other op is *unlisted* and runs in the dtype of its inputs,
or comes down to ops that are listed, as `cross_entropy` does to `log_softmax` and `nll_loss`,
or promotes by itself, as `cat` does. *gone*: this torch has no such op.
"""


def registered(name: str, by_op: dict[str, str]) -> str:
    """The category that this torch has for a documented name."""
    try:
        ops = OpLists(fp32={name}, exact=True).fp32
    except ValueError:
        return "gone"
    return next((by_op[str(op)] for op in ops if str(op) in by_op), "unlisted")


def page() -> Iterator[str]:
    """The lines of the page."""
    yield HEAD.format(torch=torch.__version__.split("+")[0])
    for device_type in ("cuda", "cpu"):
        lists = OpLists.of_torch(device_type)
        yield f"## {device_type}\n"
        for category in CATEGORIES:
            names = sorted(map(str, getattr(lists, category)))
            yield f"- {category}: {', '.join(f'`{name}`' for name in names)}"
        by_op = {op: category.value for op, category in lists.by_op().items()}
        for document, devices in DOCUMENTS.items():
            says = {
                name: category
                for category, names in devices.get(device_type, {}).items()
                for name in names
            }
            differ = {name: registered(name, by_op) for name in sorted(says)}
            differ = {name: found for name, found in differ.items() if found != says[name]}
            if differ:
                yield f"\n{document} says otherwise:\n"
                yield "| Op | Documented | Registered |\n| --- | --- | --- |"
                for name, found in differ.items():
                    yield f"| `{name}` | {says[name]} | {found} |"
        yield ""


if __name__ == "__main__":
    print("\n".join(page()).rstrip())

"""The page that says where the running torch differs from the documents.

``python -m benchmarks.op_reference_page > docs/op_reference.md`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from benchmarks.op_reference.observed import agrees, observed
from distamp import OpReference, op_reference
from distamp.autocast.op_lists.names import documented, documents

__all__ = ["differing", "page"]

_HEAD = """# Op reference: where torch and the documents differ

Written by `python -m benchmarks.op_reference_page > docs/op_reference.md`; do not edit. A
test fails when this page is not what that command writes.

Three sources, for each op: what a document says, what the running torch registered an autocast
kernel for, and what the op does when it runs. `distamp.op_reference(device_type)` gives the first
two for every op; this page holds the ops on which the three disagree. To run a document's lists as
it states them, pass `ops=OpLists.documented("torch.amp")` to a region.

- *lower_precision*: inputs are cast to the region's dtype. *fp32*: inputs are cast to float32.
  *promote*: inputs are cast to the widest of their dtypes. *unlisted*: the op runs in the dtype of
  its inputs. *banned*: the op raises in a region.
- *promote without autocast*: torch lists the op nowhere; it promotes by itself, with the result
  the document states.
- *gone*: this torch has no such op.
- *Registered* holds for some overload of the op, *observed* for the one that its usual call takes:
  on CPU torch lists `_convolution` in its deprecated overload alone.

CUDA ops were run on fake tensors, which need no GPU; `-` stands where an op does not run on them.

"""


def _where(does: str | None, known: bool) -> str:
    return "gone" if not known else does or "-"


def differing(document: str, device_type: str) -> list[str]:
    """The ops of a document that the running torch does otherwise."""
    does, reference = observed(device_type), op_reference(device_type)
    return [
        name
        for name, row in sorted(reference.items())
        if document in row.documented
        and not agrees(row.documented[document], does[name] or row.registered)
    ]


def _rows(document: str, device_type: str) -> Iterator[str]:
    for name in differing(document, device_type):
        row = op_reference(device_type)[name]
        known = row.registered is not None
        yield (
            f"| `{name}` | {row.documented[document]} | {_where(row.registered, known)} "
            f"| {_where(observed(device_type)[name], known)} |"
        )


def _unlisted(reference: Mapping[str, OpReference]) -> Iterator[str]:
    """Ops that torch lists and no document does, a line for each category."""
    by_category: dict[str, list[str]] = {}
    for name, row in sorted(reference.items()):
        if not row.documented and row.registered not in (None, "unlisted"):
            by_category.setdefault(str(row.registered), []).append(f"`{name}`")
    for category, found in sorted(by_category.items()):
        yield f"- {category}: {', '.join(found)}"


def page() -> str:
    """The whole page, in Markdown."""
    version = torch.__version__.partition("+")[0]
    parts = [_HEAD + f"This page: torch {version}.\n"]
    for device_type in ("cpu", "cuda"):
        reference = op_reference(device_type)
        for document in documents():
            if device_type not in documented(document):
                continue
            listed = [row for row in reference.values() if document in row.documented]
            rows = list(_rows(document, device_type))
            parts.append(
                f"\n## {device_type}: the documents of {document}\n\n"
                f"{len(listed) - len(rows)} of {len(listed)} ops do what the document says.\n"
            )
            if rows:
                parts.append(
                    "\n| Op | Documented | Registered | Observed |\n| --- | --- | --- | --- |\n"
                )
                parts.append("\n".join(rows) + "\n")
        parts.append(f"\n## {device_type}: listed by torch, in no document\n\n")
        parts.append("\n".join(_unlisted(reference)) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")

"""op_reference: each op of every documented list, run and compared with the document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distamp.autocast.op_lists.names import documented, documents, known

from benchmarks.op_reference.observed import NATIVE, observe, observed
from benchmarks.op_reference.samples import SAMPLES, Inputs
from benchmarks.op_reference_page import differing, page
from distamp.autocast import op_reference

PAGE = Path(__file__).parents[3] / "docs" / "op_reference.md"
WRITTEN_FOR = "2.13.0"
LISTS = [
    (document, device_type) for document in documents() for device_type in documented(document)
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
same_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != WRITTEN_FOR,
    reason=f"the page in docs is for torch {WRITTEN_FOR}",
)


def differences(text: str, device_type: str, document: str) -> dict[str, list[str]]:
    """The rows of one table of the page: op to its cells."""
    section = text.split(f"\n## {device_type}: the documents of {document}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}


@pytest.mark.parametrize(("document", "device_type"), LISTS)
def test_every_documented_op_is_run(document: str, device_type: str) -> None:
    not_run = {
        name
        for names in documented(document)[device_type].values()
        for name in names
        if known(name) and observed(device_type)[name] is None
    }
    assert not not_run


@same_torch
@pytest.mark.parametrize(("document", "device_type"), LISTS)
def test_every_documented_op_does_what_the_document_says_or_stands_in_the_page(
    document: str, device_type: str
) -> None:
    exceptions = differences(PAGE.read_text(), device_type, document)
    assert differing(document, device_type) == sorted(exceptions)
    for category, names in documented(document)[device_type].items():
        for name in names:
            assert op_reference(device_type)[name].documented[document] == category


@same_torch
def test_the_page_is_what_its_command_writes() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.op_reference_page"


# Counted by hand from torch's page of lists and its header autocast_mode.h.
@pytest.mark.parametrize(
    ("device_type", "name", "category"),
    [
        ("cpu", "linear", "lower_precision"),
        ("cpu", "scaled_dot_product_attention", "lower_precision"),
        ("cpu", "mse_loss", "fp32"),
        ("cpu", "view_as_complex", "fp32"),
        ("cpu", "index_copy", "promote"),
        ("cuda", "LSTMCell", "lower_precision"),
        ("cuda", "softmax", "fp32"),
        ("cuda", "norm", "fp32"),
        ("cuda", "pow", "fp32"),
        ("cuda", "index_put", "promote"),
        ("cuda", "binary_cross_entropy", "banned"),
    ],
)
def test_registered_equals_observed(device_type: str, name: str, category: str) -> None:
    assert op_reference(device_type)[name].registered == category
    assert observed(device_type)[name] == category


def test_observed_is_what_a_plain_torch_region_gives() -> None:
    """An independent look: output dtypes under torch.autocast, for ops that give floats."""
    with torch.autocast("cpu"):
        for name in ("mm", "conv1d", "prelu", "mse_loss", "quantile", "stack"):
            lower, full = torch.bfloat16, torch.float32
            of_full = SAMPLES[name](Inputs("cpu", [full])).dtype
            of_lower = SAMPLES[name](Inputs("cpu", [lower])).dtype
            seen = {
                (lower, lower): "lower_precision",
                (full, full): "fp32",
                (full, lower): "promote",
            }[of_full, of_lower]
            assert observe(name, "cpu") in (seen, NATIVE)


def test_observing_leaves_autocast_as_it_was() -> None:
    observe("mm", "cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_an_unknown_device_type_is_refused() -> None:
    with pytest.raises(ValueError, match="no autocast for 'fpga'"):
        op_reference("fpga")


# Runs on fake CUDA tensors, in a process of its own. No tensor here needs a gradient: one that
# does would abort a process without a GPU.
FAKE_CUDA = """
import json
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from distamp.autocast import OpLists, op_lists
from distamp.autocast.op_lists.names import documented, documents
from distamp.autocast.devices import autocast_without_device
from benchmarks.op_reference.observed import observe
from benchmarks.op_reference.samples import SAMPLES

seen = {}
with FakeTensorMode(), autocast_without_device("cuda", torch.float16):
    x = torch.randn(4, 4, device="cuda")
    calls = {
        "linear": lambda: F.linear(x, x), "bmm": lambda: torch.bmm(x.unsqueeze(0), x.unsqueeze(0)),
        "softmax": lambda: F.softmax(x.half(), -1),
        "layer_norm": lambda: F.layer_norm(x.half(), (4,)),
        "tanh": lambda: torch.tanh(x), "cpu": lambda: torch.randn(2, 2) @ torch.randn(2, 2),
    }
    for name, lists in {
        "torch": OpLists(),
        "ours": OpLists(fp32={"mm"}, lower_precision={"softmax", "tanh"}),
    }.items():
        token = op_lists.push(lists, "cuda")
        seen[name] = {name: str(call().dtype) for name, call in calls.items()}
        op_lists.restore(token)
for document in documents():
    if "cuda" in documented(document):
        token = op_lists.push(OpLists.documented(document), "cuda")
        seen[document] = {name: observe(name, "cuda") for name in SAMPLES}
        op_lists.restore(token)
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def fake_cuda() -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", FAKE_CUDA], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_cuda_lists_can_be_changed_without_a_gpu(fake_cuda: dict[str, dict[str, str]]) -> None:
    half, full = "torch.float16", "torch.float32"
    assert fake_cuda["torch"] == {
        "linear": half, "bmm": half, "softmax": full, "layer_norm": full, "tanh": full, "cpu": full,
    }  # fmt: skip
    assert fake_cuda["ours"] == {
        "linear": full, "bmm": full, "softmax": half, "layer_norm": full, "tanh": half, "cpu": full,
    }  # fmt: skip


@pytest.mark.parametrize("document", [it for it, device_type in LISTS if device_type == "cuda"])
def test_cuda_lists_run_as_the_document_states(
    fake_cuda: dict[str, dict[str, str]], document: str
) -> None:
    wrong = {
        name: (fake_cuda[document][name], category)
        for category, names in documented(document)["cuda"].items()
        for name in names
        if fake_cuda[document][name] not in (category, NATIVE if category == "promote" else "")
    }
    assert not wrong
    assert fake_cuda[document]["prelu"] == "lower_precision"
    assert fake_cuda[document]["rms_norm"] == fake_cuda[document]["logsumexp"] == "unlisted"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("document", ["torch.amp", "torch.cuda.amp"])
def test_cuda_ops_on_a_gpu(document: str) -> None:
    exceptions = differences(PAGE.read_text(), "cuda", document)
    assert differing(document, "cuda") == sorted(exceptions)
    for row in op_reference("cuda").values():
        if document in row.documented:
            assert observed("cuda")[row.name] is not None, row

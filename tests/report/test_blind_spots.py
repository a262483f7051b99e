"""What contract and non-finite search do not see yet: each test passes on the day that they do."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distamp
from distamp.report import following, observing
from tests.on_ranks import on_ranks


class RootMeanSquareOf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (16,))


class RootMeanSquare(nn.Module):
    """The norm of Llama, by a class name without the word norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def seen_of(norm: nn.Module) -> dict[str, dict[str, int]]:
    model = nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    amp = distamp.initialize(model, optimizer, "bf16")

    def step() -> None:
        with amp.autocast():
            loss = amp.model(torch.ones(4, 16)).float().mean()
        amp.backward(loss)
        amp.step()

    return amp.check(step).seen


NORMS = {
    "a norm without weight": RootMeanSquareOf,
    "a norm written by hand": RootMeanSquare,
}


@pytest.mark.xfail(
    strict=True,
    reason="a norm is told by a fused kernel, or by a class name that has the word norm",
)
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_seen(kind):
    assert seen_of(NORMS[kind]()).get("norms")


@on_ranks(2)
@pytest.mark.xfail(
    strict=True,
    reason="FSDP2 gathers a unit of frozen bf16 and trained fp32 parameters as bytes, of which the "
    "contract does not know the dtypes",
)
def test_a_gather_of_a_unit_with_two_dtypes_is_seen():
    model = nn.Sequential(nn.Linear(16, 16).bfloat16().requires_grad_(False), nn.Linear(16, 16))
    fully_shard(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    amp = distamp.initialize(model, torch.optim.AdamW(trained), "bf16")

    def step() -> None:
        with amp.autocast():
            loss = amp.model(torch.ones(4, 16)).float().square().mean()
        amp.backward(loss)
        amp.step()

    assert {"bf16", "fp32"} <= amp.check(step).seen.get("gather", {}).keys()


COLLECTIVES = {
    "_dtensor::shard_dim_alltoall": "collective",
    "symm_mem::one_shot_all_reduce": "collective",
    "symm_mem::_low_contention_all_gather": "collective",
    "_c10d_functional::isend": "send",
    "_c10d_functional::irecv": "recv",
}


@pytest.mark.xfail(
    strict=True,
    reason="a collective is told by c10d in its namespace and by its first word being send or recv",
)
@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_search_for_a_nan_knows_that_ranks_meet_in_a_collective(op):
    namespace, _, name = op.partition("::")
    kernel = following._kernel_of(getattr(getattr(torch.ops, namespace), name).default)
    assert kernel.meets == COLLECTIVES[op]


@pytest.mark.xfail(
    strict=True, reason="a contract looks at the messages of three namespaces of torch alone"
)
@pytest.mark.parametrize("op", [op for op in COLLECTIVES if "c10d" not in op])
def test_a_contract_looks_at_the_messages_of_a_collective(op):
    assert op.partition("::")[0] in observing._COLLECTIVES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.xfail(
    strict=True,
    reason="a contract knows compiled modules by the model that it is given, and of a function "
    "that torch.compile returned for the model it says that the modules did not run",
)
@pytest.mark.parametrize("level", ["bf16", "bf16-O2"])
def test_a_compiled_model_with_a_pinned_module_keeps_its_contract(level):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = distamp.initialize(model, optimizer, level, module_precision={"1": "fp32"})
    call = torch.compile(amp.model, backend="aot_eager")

    def step() -> None:
        with amp.autocast():
            loss = call(torch.ones(4, 8)).float().square().mean()
        amp.backward(loss)
        amp.step()

    step()
    found = amp.check(step)
    assert not found
    assert not any("did not run" in line for line in found.unseen)

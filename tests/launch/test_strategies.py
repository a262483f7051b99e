"""Every way to spread the model trains as one process does, and goes on where it was."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch.job import Job
from launch.strategies import STRATEGIES
from tests.launch import jobs, pooled
from tests.launch.pooled import Rows

# Pools of ranks and their runs: one at a time.
pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]

TRAINED = [n for n, s in STRATEGIES.items() if s.several and s.device is None]
SMALL = (
    *("--layers", 2, "--width", 16, "--heads", 2, "--block", 16, "--batch", 16, "--warmup", 2),
    *("--lr", 1e-2, "--validation-windows", 40, "--evaluate-every", 3, "--steps", 6),
)
# At a scale of 2^10 no gradient overflows, at 2^40 all do: ranks that each sum over a part of the
# examples overflow at other scales than one process does, though never by a factor of a thousand.
PRECISIONS = {
    "fp32": ("--precision", "fp32"),
    "fp16": ("--precision", "fp16", "--init-scale", 2.0**10),
    "fp16 overflow": ("--precision", "fp16", "--init-scale", 2.0**40),
    "bf16": ("--precision", "bf16"),
}
# The same sums in another order. In fp32 six steps differ by parts in 1e7; a product in 16 bits
# rounds each rank's sum over fewer examples, by up to 2^-11 (fp16) or 2^-8 (bf16) of its value,
# and a gradient norm shows that, while the loss averages it away.
TOLERANCE = {"fp32": (1e-6, 1e-5), "fp16": (1e-4, 2e-3), "bf16": (1e-3, 2e-2)}
TOLERANCE["fp16 overflow"] = TOLERANCE["fp16"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    """What one process comes to, on the same global batches."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        name: pooled.train(folder / name, ("--data", text, *SMALL, *flags))
        for name, flags in PRECISIONS.items()
    }


def _agree(rows: Rows, expected: Rows, precision: str) -> None:
    """Compare two runs: losses and norms within the precision's tolerance, the rest exactly."""
    loss, norm = TOLERANCE[precision]
    tolerance = {"loss": loss, "bits_per_byte": loss, "validation_loss": loss}
    tolerance |= {"validation_bits_per_byte": loss, "gradient_norm": norm}
    # An example whose two likeliest answers are all but equal may be counted either way.
    tolerance |= {"validation_accuracy": 0.05}
    assert len(rows) == len(expected)
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if value is None or name not in tolerance:
                assert ours[name] == value, name
            else:
                assert ours[name] == pytest.approx(value, rel=tolerance[name]), name


# test_every_strategy.py has fp16 and bf16.
@pytest.mark.parametrize(
    "precision",
    ["fp32", *(pytest.param(p, marks=pytest.mark.slow) for p in PRECISIONS if p != "fp32")],
)
@pytest.mark.parametrize("strategy", TRAINED)
def test_four_ranks_train_as_one_process_does_and_go_on_where_they_were(
    ranks4, alone, text, tmp_path, strategy, precision
):
    flags = ("--data", text, *SMALL, *PRECISIONS[precision], "--strategy", strategy)
    flags = (*flags, "--checkpoint-every", 3, "--keep-checkpoints", 9)
    middle = tmp_path / "checkpoints" / "step-00000003"

    straight, *others = ranks4.run(pooled.train, tmp_path, flags)
    assert others == [straight] * 3
    _agree(straight, alone[precision], precision)
    assert straight[-2]["skipped"] == (6 if precision == "fp16 overflow" else 0)

    resumed = ranks4.run(pooled.train, tmp_path, (*flags, "--resume", middle))[0]
    assert resumed == straight


def test_random_numbers_go_on_where_they_were(ranks4, text, tmp_path):
    flags = ("--data", text, *SMALL, "--dropout", 0.2, "--checkpoint-every", 3)
    flags = (*flags, "--keep-checkpoints", 9)
    straight = ranks4.run(pooled.train, tmp_path, flags)[0]
    middle = tmp_path / "checkpoints" / "step-00000003"
    assert ranks4.run(pooled.train, tmp_path, (*flags, "--resume", middle))[0] == straight


# The others pause the exchange of gradients as one of these does.
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            s, marks=() if s in ("ddp", "sharded_ddp", "fsdp1", "fsdp2") else pytest.mark.slow
        )
        for s in TRAINED
    ],
)
def test_microbatches_are_one_batch(ranks4, alone, text, tmp_path, strategy):
    flags = ("--data", text, *SMALL, "--strategy", strategy, "--accumulate", 2)
    _agree(ranks4.run(pooled.train, tmp_path, flags)[0], alone["fp32"], "fp32")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_replicas_in_one_process_train_as_one_device_does(alone, text, tmp_path, precision):
    flags = ("--data", text, *SMALL, *PRECISIONS[precision], "--strategy", "dp", "--replicas", 2)
    _agree(pooled.train(tmp_path, flags), alone[precision], precision)


def _bytes_held(strategy: str, data: Path, folder: Path) -> tuple[int, int]:
    """Bytes of parameters, and of optimizer state, that this rank holds."""
    job = pooled.job("--data", data, *SMALL, "--strategy", strategy, "--run-dir", folder)
    parameters = sum(_local(p) for p in job.run.model.parameters())
    state = getattr(job.run.optimizer, "optim", job.run.optimizer).state.values()
    sizes = parameters, sum(_local(t) for s in state for n, t in s.items() if n != "step")
    pooled._keep_groups()
    return sizes


def _local(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor
    return local.numel() * local.element_size()


@pytest.mark.parametrize(
    ("strategy", "parameters", "state"),
    [
        ("ddp", 1, 1),
        ("zero1", 1, 4),
        ("oss", 1, 4),
        ("sharded_ddp", 1, 4),
        ("fsdp1", 4, 4),
        ("fsdp2", 4, 4),
        ("hsdp", 2, 2),
    ],
)
def test_each_rank_holds_its_part_alone(ranks4, text, tmp_path, strategy, parameters, state):
    kept = ranks4.run(_bytes_held, strategy, text, tmp_path)
    whole = ranks4.run(_bytes_held, "ddp", text, tmp_path / "ddp")[0]
    assert sum(p for p, _ in kept) == pytest.approx(4 * whole[0] / parameters, rel=0.1)
    assert sum(s for _, s in kept) == pytest.approx(4 * whole[1] / state, rel=0.1)


def _first_and_second_pass_agree(data: Path, folder: Path) -> bool:
    # Larger than DDP's first bucket of 1 MiB, so that there is a layout to change.
    shape = ("--layers", 3, "--heads", 4, "--width", 128, "--block", 16, "--batch", 4)
    job = pooled.job("--data", data, *shape, "--run-dir", folder)
    first = _gradients(job, last=True)
    return all(map(torch.equal, first, _gradients(job, last=True)))


def _gradients(job: Job, *, last: bool) -> list[torch.Tensor]:
    job.run.amp.zero_grad()
    inputs, _ = job.data.take(dist.get_rank(), 1)
    with contextlib.nullcontext() if last else job.run.amp.no_sync():
        job.run.parallel.model(inputs).float().square().mean().backward()
    return [p.grad.clone() for p in job.run.model.parameters()]


def test_gradients_of_the_first_step_are_added_as_those_of_any_later_one(ranks4, text, tmp_path):
    # Else the first step after a resume would differ from the same step of a run never stopped.
    assert ranks4.run(_first_and_second_pass_agree, text, tmp_path) == [True] * 4


def _agree_with_rank_0(data: Path, folder: Path, last: bool) -> bool:
    job = pooled.job("--data", data, *SMALL, "--run-dir", folder)
    mine = torch.cat([g.flatten() for g in _gradients(job, last=last)])
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    return torch.equal(mine, theirs)


def test_gradients_travel_in_the_last_microbatch_alone(ranks2, text, tmp_path):
    assert ranks2.run(_agree_with_rank_0, text, tmp_path / "1", True) == [True, True]
    assert ranks2.run(_agree_with_rank_0, text, tmp_path / "2", False) == [True, False]


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--strategy", "none"], "--strategy none: it is for one process"),
        (["--strategy", "dp"], "--strategy dp: it is for one process"),
        (["--strategy", "fairscale_fsdp"], "it needs cuda and this is cpu"),
        (["--strategy", "zero"], "--strategy zero: it must be one of none, dp, ddp"),
        (["--strategy", "hsdp", "--shards", 3], "--shards 3: 4 ranks must be two or more groups"),
        (["--strategy", "hsdp", "--shards", 4], "(say 2)"),
        (["--strategy", "fsdp2+tp", "--tp", 4], "--tp 4: 4 ranks must be two or more groups"),
        (["--strategy", "fsdp2+tp", "--heads", 1], "--tp 2: it must divide --heads 1"),
        (["--strategy", "fsdp2+tp", "--adamw", "fused"], "parameters of two meshes"),
        (["--strategy", "fsdp2+tp", "--adamw", "foreach"], "needs --adamw loop"),
        (["--strategy", "ddp", "--shards", 2], "--shards: it is for --strategy hsdp"),
        (["--strategy", "fsdp2", "--replicas", 2], "--replicas: it is for --strategy dp"),
        (["--strategy", "fsdp2", "--batch", 6], "--batch 6: it must be a multiple of"),
        (
            ["--strategy", "fsdp2+tp", "--model", "tests.launch.test_models:make_own"],
            "does not say how to divide its layers",
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_combination_that_cannot_be_is_refused_on_every_rank(ranks4, text, tmp_path, args, shown):
    refusals = ranks4.run(pooled.refusal, "--data", text, "--run-dir", tmp_path, *SMALL, *args)
    assert len(set(refusals)) == 1
    assert shown in refusals[0]
    assert "\n" not in refusals[0]


@pytest.mark.parametrize("strategy", TRAINED)
def test_one_process_is_refused_what_needs_several(text, strategy):
    shown = pooled.refusal("--data", text, *SMALL, "--strategy", strategy)
    assert shown.startswith(f"--strategy {strategy}: it needs several ranks; torchrun")

"""Every level of precision in the launcher trains, goes on where it was, and ends as fp32 does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distamp.precision import LEVELS
from distamp.scaler import masters_of
from launch.command_line import parse
from launch.config import Config
from launch.data import Data
from launch.errors import UsageError
from launch.job import Job
from launch.levels import eps_for
from launch.memory import ModelSize, Shares, needs
from launch.strategies import STRATEGIES
from tests.launch import compare_levels, jobs, pooled
from tests.launch.pooled import Rows
from tests.launch.test_strategies import SMALL

pytestmark = [pytest.mark.xdist_group("levels"), pytest.mark.timeout(1500)]

# The strategies that the levels were made for, and what else they work with.
FOUR = compare_levels.FOUR
OTHERS = [name for name, s in STRATEGIES.items() if s.device is None and name not in FOUR]
# A step of these is an overflow: at 2^19 the first two of a dynamic scale.
STEPS = ("--steps", 4, "--evaluate-every", 2, "--checkpoint-every", 2, "--keep-checkpoints", 9)
SCALE = dict.fromkeys(("O1", "O2"), ("--init-scale", 2.0**19))
MIDDLE = Path("checkpoints", "step-00000002")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


def flags(text: Path, level: str, *more: object) -> tuple[object, ...]:
    scale = SCALE.get(level, ())
    return ("--data", text, *SMALL, *STEPS, "--opt-level", level, *scale, *more)


def trained(ranks, strategy: str, folder: Path, args: tuple[object, ...], world: int = 4) -> Rows:
    """Train on as many ranks as the strategy needs; all of them must see the same records."""
    args = (*args, "--strategy", strategy)
    if not STRATEGIES[strategy].several:
        return pooled.train(folder, args)
    first, *others = ranks(world).run(pooled.train, folder, args)
    assert others == [first] * (world - 1)
    return first


def losses(rows: Rows) -> list[float]:
    return [row.get("loss", row.get("validation_loss")) for row in rows]


# -- train and go on ------------------------------------------------------------------------------


def _goes_on(ranks, text: Path, folder: Path, strategy: str, level: str) -> None:
    args = flags(text, level)
    straight = trained(ranks, strategy, folder, args)
    assert straight[-1]["step"] == 4
    resumed = trained(ranks, strategy, folder, (*args, "--resume", folder / MIDDLE))
    assert resumed == straight


# Those without masters or a cast model are precisions, which test_every_strategy.py has.
# O2 has all that others have a part of; each of these is once in every run of the tests.
OFTEN = {("O3", "none"), ("O3", "fsdp2"), ("bf16-O2", "fsdp1"), ("bf16-O2", "fsdp2")}


@pytest.mark.parametrize(
    ("level", "strategy"),
    [
        pytest.param(
            name,
            strategy,
            marks=() if name == "O2" or (name, strategy) in OFTEN else pytest.mark.slow,
        )
        for name in LEVELS
        for strategy in FOUR
    ],
)
def test_a_resumed_run_writes_the_losses_of_one_never_stopped(
    ranks, text, tmp_path, strategy, level
):
    _goes_on(ranks, text, tmp_path, strategy, level)


@pytest.mark.parametrize(
    "level",
    ["O2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("O3", "bf16-O2", "bf16-O3"))],
)
@pytest.mark.parametrize("strategy", OTHERS)
def test_so_it_does_with_every_other_strategy(ranks, text, tmp_path, strategy, level):
    _goes_on(ranks, text, tmp_path, strategy, level)


def test_the_three_precisions_are_levels(text, tmp_path):
    for precision, level in {"fp32": "O0", "fp16": "O1", "bf16": "bf16"}.items():
        short = ("--data", text, *SMALL, *STEPS, *SCALE.get(level, ()), "--precision", precision)
        expected = pooled.train(tmp_path / precision, short)
        assert pooled.train(tmp_path / f"level {level}", flags(text, level)) == expected


# -- masters in checkpoints -----------------------------------------------------------------------


def _weights(folder: Path, args: tuple[object, ...]) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """What a run that goes on starts with: every weight as it is stepped, and what was stepped."""
    job = pooled.job("--run-dir", folder, *args)
    job.report.close()
    masters = masters_of(job.run.optimizer)
    dtypes = {t.dtype for _, t in masters.pairs()} if masters is not None else set()
    named = {n: t for n, t in job.run.tensors().items() if n.startswith("model.")}
    return {n: _whole(t) for n, t in named.items()}, dtypes


def _whole(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    pooled._keep_groups() if torch.distributed.is_initialized() else None
    return full.detach().clone()


@pytest.fixture(scope="module")
def o2(ranks, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at O2 that four ranks did with FSDP1, in which steps were taken."""
    folder = tmp_path_factory.mktemp("o2")
    trained(ranks, "fsdp1", folder, (*flags(text, "O2"), "--init-scale", 2.0**10))
    return folder


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(1, "none"), (2, "fsdp1"), (2, "fsdp2"), (2, "zero1"), (4, "oss"), (4, "fsdp2+tp")],
)
def test_masters_reach_other_ranks_and_strategies_exactly(
    ranks, o2, text, tmp_path, world, strategy
):
    args = (*flags(text, "O2"), "--steps", 6, "--resume", o2)
    expected, _ = ranks(4).run(_weights, tmp_path / "same", (*args, "--strategy", "fsdp1"))[0]
    assert any((t != t.half().float()).any() for t in expected.values()), "these are no masters"
    args = (*args, "--strategy", strategy)
    if world == 1:
        everyone = [_weights(tmp_path / "other", args)]
    else:
        everyone = ranks(world).run(_weights, tmp_path / "other", args)
    # ZeRO and OSS hold the masters of one weight on one rank alone.
    for name, value in expected.items():
        kept = [weights[name] for weights, _ in everyone]
        assert any(torch.equal(one, value) for one in kept), name
        assert all(torch.equal(one.half(), value.half()) for one in kept), name
    assert all(dtypes == {torch.float32} for _, dtypes in everyone)


def _agree(ours: Rows, theirs: Rows, rel: float) -> None:
    assert losses(ours) == pytest.approx(losses(theirs), rel=rel)
    assert [r.get("stepped") for r in ours] == [r.get("stepped") for r in theirs]


@pytest.mark.parametrize(
    ("strategy", "world", "then", "other"),
    [
        ("fsdp1", 4, "fsdp1", 2),
        ("fsdp1", 2, "zero1", 4),
        ("zero1", 4, "oss", 2),
        ("oss", 2, "fsdp2", 4),
        ("fsdp2", 4, "sharded_ddp", 2),
        ("sharded_ddp", 2, "fsdp2+tp", 4),
        ("fsdp2+tp", 4, "hsdp", 4),
    ],
)
def test_o2_goes_on_with_other_ranks_and_another_strategy(
    ranks, text, tmp_path, strategy, world, then, other
):
    args = (*flags(text, "O2"), "--init-scale", 2.0**10, "--steps", 6)
    straight = pooled.train(tmp_path / "alone", args)
    trained(ranks, strategy, tmp_path / "run", args, world)
    resumed = trained(
        ranks, then, tmp_path / "run", (*args, "--resume", tmp_path / "run" / MIDDLE), other
    )
    _agree(resumed, straight, 2e-3)


@pytest.mark.parametrize(("before", "after"), [("O1", "O2"), ("O2", "O0"), ("bf16", "bf16-O2")])
def test_a_run_goes_on_at_another_level(text, tmp_path, capsys, before, after):
    def one(level: str) -> tuple[object, ...]:
        return (*flags(text, level), *(("--init-scale", 2.0**10) if level in SCALE else ()))

    straight = pooled.train(tmp_path / "straight", one(before))
    folder = tmp_path / "run"
    pooled.train(folder, one(before))
    resumed = pooled.train(folder, (*one(after), "--resume", folder / MIDDLE))
    assert resumed[:3] == straight[:3]
    assert losses(resumed) == pytest.approx(losses(straight), rel=0.01)


def test_a_constant_scale_is_the_levels_own_whatever_the_run_before_had(text, tmp_path):
    pooled.train(tmp_path, flags(text, "O1"))
    constant = (*flags(text, "bf16"), "--loss-scale", 128.0, "--steps", 6)
    rows = pooled.train(tmp_path, (*constant, "--resume", tmp_path))
    assert [row["loss_scale"] for row in rows if row.get("loss") and row["step"] > 4] == [128.0] * 2


# -- as good as fp32 ------------------------------------------------------------------------------

# O3 cannot have an eps of 1e-8, so fp32 has the same as O3. bf16-O3 loses small updates, which a
# run as short as this one shows and a longer one does not: compare_levels.py.
LEARNS = (*SMALL, "--lr", 4e-3, "--warmup", 10, "--steps", 60, "--evaluate-every", 60)
LEARNS = (*LEARNS, "--eps", 1e-3)


@pytest.fixture(scope="module")
def fp32(text: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The validation loss that fp32 comes to."""
    rows = pooled.train(tmp_path_factory.mktemp("fp32"), ("--data", text, *LEARNS))
    loss: float = rows[-1]["validation_loss"]
    assert loss < 0.75 * rows[0]["validation_loss"], "it has learnt next to nothing"
    return loss


@pytest.mark.parametrize("level", [name for name in LEVELS if name not in ("O0", "bf16-O3")])
def test_a_level_ends_within_one_percent_of_fp32(fp32, text, tmp_path, level):
    rows = pooled.train(tmp_path, ("--data", text, *LEARNS, "--opt-level", level))
    assert rows[-1]["validation_loss"] == pytest.approx(fp32, rel=0.01)


@pytest.mark.parametrize("level", ["O2", pytest.param("bf16-O2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_masters_end_within_one_percent_of_fp32_on_two_ranks(
    ranks, fp32, text, tmp_path, strategy, level
):
    args = ("--data", text, *LEARNS, "--opt-level", level)
    rows = trained(ranks, strategy, tmp_path, args, world=2)
    assert rows[-1]["validation_loss"] == pytest.approx(fp32, rel=0.01)


@pytest.mark.slow
def test_every_level_in_every_layout_ends_within_one_percent_of_fp32():
    losses = compare_levels.compare(steps=150)
    for row, strategy in losses:
        assert abs(compare_levels.beside(losses, row, strategy)) < 0.01, (row, strategy)


# -- models with batch norms ----------------------------------------------------------------------


class WithBatchNorm(nn.Module):
    """A network of linear layers over pixels, normalised over the batch."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        pixels = data.sample[0].numel()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(pixels, pixels), nn.BatchNorm1d(pixels), nn.ReLU())
            for _ in range(2)
        )
        self.head = nn.Linear(pixels, data.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def with_batch_norm(data: Data) -> nn.Module:
    torch.manual_seed(0)
    return WithBatchNorm(data)


IMAGES = ("--model", "tests.launch.test_opt_level:with_batch_norm", "--data", "digits")
IMAGES = (*IMAGES, "--batch", 16, "--warmup", 2, "--lr", 1e-2, "--validation-windows", 32, *STEPS)


def _dtypes_of_batch_norms(folder: Path, args: tuple[object, ...]) -> tuple[Rows, set[torch.dtype]]:
    job: Job = pooled.job("--run-dir", folder / "look", *args)
    job.report.close()
    parts = (m for m in job.run.model.modules() if isinstance(m, nn.BatchNorm1d))
    dtypes = {t.dtype for m in parts for t in [*m.parameters(), m.running_mean] if t is not None}
    del job
    return pooled.train(folder / "run", args), dtypes


@pytest.mark.parametrize(("level", "kept"), [("O2", True), ("O3", False)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_batch_norms_stay_in_fp32_where_the_level_says_so(ranks, tmp_path, strategy, level, kept):
    args = (*IMAGES, "--opt-level", level, "--strategy", strategy)
    rows, dtypes = ranks(2).run(_dtypes_of_batch_norms, tmp_path, args)[0]
    assert dtypes == {torch.float32 if kept else torch.float16}
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]


# -- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--opt-level", "O4"], "--opt-level O4: opt_level must be one of ['O0', 'O1', 'O2'"),
        (["--opt-level", "02"], "the O is a letter"),
        (
            ["--opt-level", "O2", "--precision", "fp16"],
            "--precision fp16: it is short for --opt-level O1, and --opt-level O2 is given too",
        ),
        (
            ["--opt-level", "O1", "--keep-batchnorm-fp32", "True"],
            "--opt-level O1: keep_batchnorm_fp32=True contradicts O1",
        ),
        (["--precision", "fp16", "--master-weights", "True"], "--precision fp16: master_weights="),
        (["--opt-level", "O0", "--master-weights", "True"], "the weights are float32 themselves"),
        (["--opt-level", "O2", "--loss-scale", "big"], "loss_scale must be 'dynamic' or a number"),
        (["--opt-level", "O2", "--loss-scale", "0"], "loss_scale must be 'dynamic' or a number"),
        (["--opt-level", "O3", "--eps", "1e-9"], "AdamW has eps=1e-09, which float16 rounds to"),
        (["--opt-level", "O3", "--init-scale", "4"], "--init-scale 4.0: the loss scale at"),
        (["--precision", "bf16", "--growth-interval", "4"], "pass --loss-scale dynamic too"),
        (["--opt-level", "O2", "--eps", "0"], "--eps 0.0: it must be more than 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_levels_and_overrides_that_contradict_each_other_are_refused(text, tmp_path, args, shown):
    refusal = pooled.refusal("--data", text, *SMALL, *args, "--run-dir", tmp_path / "run")
    assert shown in refusal
    assert "\n" not in refusal
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_a_wire_that_saves_nothing_is_refused_on_every_rank(ranks2, text, tmp_path, strategy):
    args = ("--data", text, *SMALL, "--opt-level", "O2", "--comm-hook", "fp16")
    shown = ranks2.run(pooled.refusal, *args, "--strategy", strategy, "--run-dir", tmp_path / "run")
    assert len(set(shown)) == 1
    assert shown[0].startswith("--comm-hook fp16: gradients at --opt-level O2 are fp16 already")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "scale", "scales"),
    [
        (["--opt-level", "O1", "--loss-scale", "128"], 128.0, True),
        (["--opt-level", "bf16-O2", "--loss-scale", "dynamic"], "dynamic", True),
        (["--opt-level", "bf16-O2"], 1.0, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_loss_scale_is_overridden(args, scale, scales):
    level = parse(args, quiet=True).level
    assert (level.loss_scale, level.scales) == (scale, scales)


def test_a_cast_model_without_masters_can_be_asked_for(text, tmp_path):
    args = ("--master-weights", "False", "--keep-batchnorm-fp32", "False")
    ready = pooled.job("--data", text, *SMALL, "--opt-level", "O2", *args, "--run-dir", tmp_path)
    ready.report.close()
    assert masters_of(ready.run.optimizer) is None
    assert {p.dtype for p in ready.run.model.parameters()} == {torch.float16}
    assert ready.run.amp.scaler.get_scale() == 65536.0


def test_adamw_has_an_eps_that_its_state_can_hold():
    for level in LEVELS:
        half = torch.float16 if level == "O3" else torch.float32
        assert torch.tensor(eps_for(Config(opt_level=level)), dtype=half) > 0
    assert eps_for(Config(opt_level="O3", eps=1e-3)) == 1e-3
    assert eps_for(Config(opt_level="O2")) == 1e-8


@pytest.mark.parametrize(
    ("level", "size"), [("O0", 16), ("O1", 16), ("O2", 18), ("O3", 8), ("bf16-O2", 18)]
)
def test_bytes_of_a_parameter_are_those_of_weights_gradients_and_moments(level, size):
    assert needs(ModelSize(10), LEVELS[level], Shares(), torch.float32).total == 10 * size


def test_a_level_is_checked_before_a_model_is_built():
    with pytest.raises(UsageError, match="contradicts O0"):
        _ = Config(opt_level="O0", keep_batchnorm_fp32=False).level

"""Checkpoints: read by other ranks and strategies, never half a one, and no run lost over them."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch import checkpoint
from launch.config import Config
from launch.errors import UsageError
from launch.folder import check_shared, check_space
from tests.launch import jobs, pooled
from tests.launch.pooled import Rows
from tests.launch.test_strategies import SMALL, _agree

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]

FP16 = ("--precision", "fp16", "--init-scale", 2.0**19, "--checkpoint-every", 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What one process comes to in fp16, undisturbed."""
    return pooled.train(tmp_path_factory.mktemp("straight"), ("--data", text, *SMALL, *FP16))


# -- other ranks, other strategies ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks_before", "before", "ranks_after", "after"),
    [
        (4, "ddp", 2, "ddp"),
        (2, "zero1", 4, "fsdp2"),
        (4, "fsdp2", 2, "fsdp1"),
        (2, "fsdp1", 4, "fsdp2+tp"),
        (4, "fsdp2+tp", 2, "oss"),
        (4, "hsdp", 2, "sharded_ddp"),
        (2, "oss", 4, "zero1"),
        (2, "sharded_ddp", 4, "hsdp"),
    ],
    ids=lambda value: str(value),
)
def test_a_run_goes_on_with_other_ranks_and_another_strategy(
    ranks, straight, text, tmp_path, ranks_before, before, ranks_after, after
):
    flags = ("--data", text, *SMALL, *FP16)
    first = (*flags, "--strategy", before)
    ranks(ranks_before).run(pooled.train, tmp_path, (*first, "--keep-checkpoints", 9))
    middle = tmp_path / "checkpoints" / "step-00000004"
    then = (*flags, "--strategy", after, "--resume", middle)
    rows = ranks(ranks_after).run(pooled.train, tmp_path, then)[0]
    # Two steps are skipped before it and two taken: a lost scale or moment would show.
    _agree(rows, straight, "fp16")


def test_one_process_goes_on_from_many_and_many_from_one(ranks4, straight, text, tmp_path):
    flags = ("--data", text, *SMALL, *FP16, "--keep-checkpoints", 9)
    ranks4.run(pooled.train, tmp_path, (*flags, "--strategy", "fsdp2"))
    resume = ("--resume", tmp_path / "checkpoints" / "step-00000002")
    pooled.train(tmp_path, (*flags, "--strategy", "none", *resume))
    resume = ("--resume", tmp_path / "checkpoints" / "step-00000004")
    rows = ranks4.run(pooled.train, tmp_path, (*flags, "--strategy", "fsdp2", *resume))[0]
    _agree(rows, straight, "fp16")


# -- never half a one -----------------------------------------------------------------------------


def _run(text: Path, folder: Path, *more: object) -> Rows:
    return pooled.train(folder, ("--data", text, *SMALL, *FP16, *more))


def _newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_a_newest_checkpoint_that_is_not_whole_is_passed_over(
    straight, text, tmp_path, name: str, damage: Callable[[Path], None]
):
    _run(text, tmp_path)
    assert _newest(tmp_path).name == "step-00000006"
    damage(_newest(tmp_path) / name)
    path, manifest, broken = checkpoint.find(tmp_path, pooled.here())
    assert (path.name, manifest["progress"]["step"]) == ("step-00000004", 4)
    assert "step-00000006 is not whole" in broken[0]
    assert _run(text, tmp_path, "--resume", tmp_path) == straight


def test_a_manifest_with_any_bit_flipped_is_the_same_or_not_whole(text, tmp_path):
    _run(text, tmp_path)
    path, draw = _newest(tmp_path), random.Random(0)
    _, whole, _ = checkpoint.find(path, pooled.here())
    rest = {name: value for name, value in whole.items() if name != "digest"}
    content = (path / "manifest.json").read_bytes()
    for _ in range(200):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (path / "manifest.json").write_bytes(flipped)
        with contextlib.suppress(UsageError):
            found = checkpoint.find(path, pooled.here())[1]
            # Only the name of the digest itself may have changed.
            assert {name: found[name] for name in whole if name != "digest"} == rest


def test_a_run_whose_every_checkpoint_is_damaged_is_refused(text, tmp_path):
    _run(text, tmp_path)
    for path in (tmp_path / "checkpoints").glob("step-*"):
        _truncate(path / "__0_0.distcp")
    with pytest.raises(UsageError, match=r"is not whole .* and there is no other"):
        checkpoint.find(tmp_path, pooled.here())


def test_what_is_half_written_has_no_name_that_counts(text, tmp_path):
    _run(text, tmp_path)
    partial = tmp_path / "checkpoints" / ".partial"
    _newest(tmp_path).rename(partial)
    assert checkpoint.find(tmp_path, pooled.here())[0].name == "step-00000004"
    _run(text, tmp_path, "--resume", tmp_path)
    assert not partial.exists()


def test_the_newest_are_kept_and_the_others_removed(text, tmp_path):
    _run(text, tmp_path, "--keep-checkpoints", 2)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint", b'{"format": "another"}'])
def test_resuming_from_what_is_no_checkpoint_is_refused(text, tmp_path, content):
    folder = tmp_path / "old" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "manifest.json").write_bytes(content)
    shown = pooled.refusal("--data", text, *SMALL, "--resume", tmp_path / "old")
    assert shown.startswith(f"--resume {tmp_path / 'old'}: step-00000001 is not whole")
    assert "no such run" in pooled.refusal("--data", text, "--resume", tmp_path / "nowhere")
    assert "no checkpoint in it" in pooled.refusal("--data", text, "--resume", tmp_path)


# -- disks ----------------------------------------------------------------------------------------


@contextmanager
def _files_at_most(size: int) -> Iterator[None]:
    """Have the kernel refuse longer files, as a full disk would; metrics stay below."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def _two_saves(folder: Path, data: Path) -> tuple[str, list[str], Rows]:
    """Save with room, without, and with room again; return what was printed and what there is."""
    job = pooled.job("--data", data, *SMALL, *FP16, "--run-dir", folder)
    shown: list[str] = []
    job.report.note = shown.append  # type: ignore[method-assign]
    checkpoints = folder / "checkpoints"
    job.run.progress.step = 1
    job.save(must=False)
    job.run.progress.step = 2
    with _files_at_most(20_000):
        job.save(must=False)
    after = sorted(path.name for path in checkpoints.glob("step-*"))
    whole = checkpoint.find(folder, job.ranks)[0].name
    job.run.progress.step = 3
    job.save(must=False)
    with _files_at_most(20_000), pytest.raises(UsageError, match="File too large"):
        job.save(must=True)
    job.report.close()
    return whole, shown, [*after, checkpoint.find(folder, job.ranks)[0].name]


@pytest.mark.parametrize("world", [1, 2])
def test_a_disk_that_fills_up_costs_a_checkpoint_and_not_the_run(ranks, text, tmp_path, world):
    if world == 1:
        whole, shown, names = _two_saves(tmp_path, text)
    else:
        whole, shown, names = ranks(2).run(_two_saves, tmp_path, text)[0]
    assert whole == "step-00000001"
    assert names == ["step-00000001", "step-00000003"]
    assert len(shown) == 1
    assert "File too large" in shown[0]
    assert "the run goes on and tries again" in shown[0]


def test_metrics_that_cannot_be_written_are_written_later(text, tmp_path):
    job = pooled.job("--data", text, *SMALL, "--run-dir", tmp_path)
    record = {**job.losses(1.0), "loss_scale": 1.0, "skipped": 0}
    shown: list[str] = []
    job.report.note = shown.append  # type: ignore[method-assign]
    with job.report:
        for step in range(100):  # far more than what the run prints, which may be a file too
            job.report.step({"step": step, **record}, tokens=1)
        with _files_at_most((tmp_path / "metrics.jsonl").stat().st_size + 40):
            job.report.step({"step": 100, **record}, tokens=1)
        job.report.step({"step": 101, **record}, tokens=1)
    assert [row["step"] for row in jobs.records(tmp_path)] == list(range(102))
    assert shown == ["Warning: cannot write metrics.jsonl: File too large; the run goes on"]


def test_a_disk_too_small_for_the_checkpoints_is_refused_before_training(tmp_path):
    config = Config(run_dir=tmp_path / "run")
    check_space(config, parameters=1000, ranks=1)
    with pytest.raises(UsageError, match=r"checkpoints and the next one need .* free"):
        check_space(config, parameters=10**15, ranks=1)


def _not_shared(folder: Path) -> str:
    ranks = pooled.here()
    mine = folder / str(ranks.rank)
    mine.mkdir(parents=True, exist_ok=True)
    try:
        check_shared(Config(run_dir=mine), ranks)
    except UsageError as error:
        return str(error)
    return "was not refused"


def test_a_folder_that_the_ranks_do_not_share_is_refused(ranks2, tmp_path):
    shown = ranks2.run(_not_shared, tmp_path)
    assert len(set(shown)) == 1
    assert "rank 1 does not see what rank 0 writes there" in shown[0]


def test_the_manifest_says_what_the_run_is(text, tmp_path):
    _run(text, tmp_path)
    manifest = json.loads((_newest(tmp_path) / "manifest.json").read_text())
    assert manifest["progress"] == {"step": 6, "position": 96, "skipped": 2}
    assert manifest["scaler"]["scale"] == 2.0**17
    assert manifest["settings"]["strategy"] == "none"


def _names_and_bytes(folder: Path, data: Path) -> dict[str, int]:
    """Bytes that this rank wrote."""
    pooled.train(folder, ("--data", data, *SMALL, "--strategy", "fsdp2"))
    newest = _newest(folder)
    return {path.name: path.stat().st_size for path in newest.glob(f"__{dist.get_rank()}_*")}


def test_every_rank_writes_its_own_part(ranks4, text, tmp_path):
    parts = ranks4.run(_names_and_bytes, tmp_path, text)
    sizes = [sum(part.values()) for part in parts]
    assert len(sizes) == 4
    assert max(sizes) < 0.6 * sum(sizes)


def test_a_state_read_back_is_the_state_that_was_written(text, tmp_path):
    job = pooled.job("--data", text, *SMALL, *FP16, "--run-dir", tmp_path)
    for tensor in job.run.tensors().values():
        tensor.copy_(torch.rand(tensor.shape))
    expected = {name: tensor.clone() for name, tensor in job.run.tensors().items()}
    job.run.progress.step = 1
    job.save(must=True)
    job.report.close()
    again = pooled.job("--data", text, *SMALL, *FP16, "--resume", tmp_path)
    again.report.close()
    for name, tensor in again.run.tensors().items():
        assert torch.equal(tensor, expected[name]), name

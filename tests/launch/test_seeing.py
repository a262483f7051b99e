"""What a run says at its end: how it went, what overflowed, what it took; and what costs no run."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distamp.scaler.overflow import Overflow, OverflowReport
from launch.errors import UsageError
from launch.memory import largest_peak, peak_memory
from launch.overflows import Overflows
from launch.train import train as train_job
from tests.launch import jobs, pooled
from tests.launch.finished import SKIPPING, finish
from tests.launch.jobs import TIMEOUT_S
from tests.launch.test_strategies import SMALL

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


# -- which parameter overflowed -------------------------------------------------------------------


def _report(*found: tuple[str, int, int, int]) -> OverflowReport:
    rows = [Overflow(name, rank, infs, nans, 100, 1.0) for name, rank, infs, nans in found]
    return OverflowReport(1.0, tuple(rows))


def test_overflows_are_counted_by_steps_and_not_by_ranks():
    overflows = Overflows()
    overflows.add(_report(("a", 0, 1, 0), ("a", 1, 1, 0), ("b", 1, 9, 0)))
    overflows.add(_report(("a", 1, 1, 0)))
    assert overflows.worst == [("a", 2), ("b", 1)]
    assert str(overflows) == "most often a, in 2 steps; then b, in 1"


def test_nan_that_came_of_anothers_inf_is_not_an_overflow_unless_there_is_no_inf():
    overflows = Overflows()
    overflows.add(_report(("came of it", 0, 0, 50), ("overflowed", 0, 2, 3)))
    assert overflows.worst == [("overflowed", 1)]
    overflows.add(_report(("came of it", 0, 0, 50)))
    assert overflows.counts == {"overflowed": (1, 2), "came of it": (1, 0)}


def test_of_two_that_overflowed_as_often_the_one_with_more_infs_comes_first():
    overflows = Overflows()
    overflows.add(_report(("few", 0, 1, 0), ("many", 0, 5, 0), ("fewer", 0, 1, 0)))
    assert overflows.worst[0] == ("many", 1)
    assert str(overflows).endswith("; and 1 more")


@pytest.fixture(scope="module")
def counted_alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process counts, undisturbed."""
    return finish(tmp_path_factory.mktemp("alone"), "--data", text, *SMALL, *SKIPPING)


def _expected_counts(text: Path, folder: Path) -> dict[str, int]:
    """The steps in which each parameter's gradient held inf, counted beside the launcher."""
    job = pooled.job("--data", text, *SMALL, *SKIPPING, "--run-dir", folder)
    counts: dict[str, int] = {}
    inner = job.run.count_overflow

    def count() -> None:
        for name, parameter in job.run.model.named_parameters():
            assert parameter.grad is not None
            counts[name] = counts.get(name, 0) + int(parameter.grad.isinf().any())
        inner()

    job.run.count_overflow = count  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()), job.report:
        train_job(job)
    return {name: steps for name, steps in counts.items() if steps}


def test_the_summary_names_the_parameter_that_overflowed_most(counted_alone, text, tmp_path):
    expected = _expected_counts(text, tmp_path)
    counts = counted_alone["manifest"]["overflows"]
    assert {name: steps for name, (steps, _) in counts.items()} == expected
    assert counted_alone["manifest"]["progress"]["skipped"] == max(expected.values()) == 2
    worst = max(counts, key=counts.get)
    assert counted_alone["summary"]["Overflowed"].startswith(f"most often {worst}, in 2 steps")
    assert f"most often {worst}" in counted_alone["printed"]


def test_the_counts_survive_a_resume(text, tmp_path):
    flags = ("--data", text, *SMALL, *SKIPPING)
    straight = finish(tmp_path, *flags)
    middle = tmp_path / "checkpoints" / "step-00000003"
    assert json.loads((middle / "manifest.json").read_text())["overflows"]
    resumed = finish(tmp_path, *flags, "--resume", middle)
    assert resumed["manifest"]["overflows"] == straight["manifest"]["overflows"]
    assert resumed["summary"]["Overflowed"] == straight["summary"]["Overflowed"]


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("strategy", ["none", "fsdp2", "zero1"])
def test_parameters_of_a_cast_model_are_named_as_the_model_names_them(
    ranks2, text, tmp_path, level, strategy
):
    flags = ("--data", text, *SMALL, "--opt-level", level, "--loss-scale", "dynamic")
    flags = (*flags, "--init-scale", 2.0**24, "--strategy", strategy)
    if strategy == "none":
        ended = finish(tmp_path, *flags)
    else:
        ended = ranks2.run(finish, tmp_path, *flags, timeout=TIMEOUT_S)[0]
    job = pooled.job("--data", text, *SMALL, "--run-dir", tmp_path / "names")
    job.report.close()
    names = {name for name, _ in job.run.model.named_parameters()}
    assert ended["manifest"]["progress"]["skipped"] > 0
    assert ended["manifest"]["overflows"].keys() <= names
    assert ended["manifest"]["overflows"]


def test_a_run_that_skipped_nothing_says_nothing_of_overflows(text, tmp_path):
    ended = finish(tmp_path, "--data", text, *SMALL)
    assert "Overflowed" not in ended["summary"]
    assert ended["manifest"]["overflows"] == {}


# -- the summary ----------------------------------------------------------------------------------


def test_the_summary_says_how_the_run_ended(counted_alone, text):
    printed = counted_alone["printed"]
    rows = dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", printed, re.MULTILINE))
    for name in ("Loss", "Bits per byte", "Right"):
        assert re.fullmatch(r"[\d.%]+ -> [\d.%]+", rows[name]), name
    assert re.fullmatch(r"\d+ s for 6 steps, [\d,]+ tokens/s", rows["Time"])
    assert rows["Loss scale"] == "2^17"
    assert rows["Skipped"] == "2 of 6 steps"
    assert re.fullmatch(
        r"[\d,]+ MB at most \(resident, torch and Python included\)", rows["Memory"]
    )
    assert "Gradients" not in rows  # one process sends none


def test_the_summary_of_a_resumed_run_counts_its_own_steps_and_time(text, tmp_path):
    flags = ("--data", text, *SMALL, "--checkpoint-every", 2)
    finish(tmp_path, *flags)
    ended = finish(tmp_path, *flags, "--resume", tmp_path / "checkpoints" / "step-00000004")
    assert "s for 2 steps, " in ended["printed"]


def test_the_summary_says_what_travels_without_a_hook(ranks2, text, tmp_path):
    job = pooled.job("--data", text, *SMALL, "--run-dir", tmp_path / "alone")
    job.report.close()
    parameters = sum(p.numel() for p in job.run.model.parameters())
    for strategy in ("fsdp1", "fsdp2"):  # whose ranks hold parts
        flags = ("--data", text, *SMALL, "--steps", 1, "--strategy", strategy)
        shown = ranks2.run(finish, tmp_path / strategy, *flags, timeout=TIMEOUT_S)[0]["summary"][
            "Gradients"
        ]
        assert shown == f"{parameters * 4 / 1e6:.3g} MB of float32 a step, sent as they are"


def test_the_summary_says_what_a_hook_sent_and_saved(ranks2, text, tmp_path):
    flags = ("--data", text, *SMALL, "--strategy", "fsdp2", "--comm-hook", "fp16")
    shown = ranks2.run(finish, tmp_path, *flags, timeout=TIMEOUT_S)[0]["summary"]["Gradients"]
    found = re.search(r"exchanges sent .* as fp16; .* uncompressed, (\d+)% saved", shown)
    assert found is not None, shown
    assert int(found[1]) > 40


@pytest.mark.skipif(sys.platform != "linux", reason="compared with /proc")
def test_peak_memory_is_what_the_kernel_counts():
    status = Path("/proc/self/status").read_text()
    [high_water] = re.findall(r"VmHWM:\s+(\d+) kB", status)
    assert peak_memory(torch.device("cpu")) >= int(high_water) * 1024 * 0.99
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(100_000_000 // 4)
    assert peak_memory(torch.device("cpu")) <= before + 2 * held.numel() * 4
    more = torch.ones((before + 200_000_000) // 4)  # more than was ever held
    assert peak_memory(torch.device("cpu")) >= more.numel() * 4
    del held, more
    assert peak_memory(torch.device("cpu")) >= before + 200_000_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_of_a_gpu_is_what_tensors_took():
    device = torch.device("cuda", 0)
    torch.ones(1 << 28, dtype=torch.uint8, device=device)
    assert 1 << 28 <= peak_memory(device) == torch.cuda.max_memory_allocated(device)


def _hold(megabytes: int) -> str:
    ranks = pooled.here()
    held = torch.ones(megabytes * 250_000 * (ranks.rank == 1))
    shown = largest_peak(torch.device("cpu"), ranks)
    del held
    return shown


def test_the_largest_peak_over_the_ranks_is_reported_with_its_rank(new_ranks):
    one, other = new_ranks(2).run(_hold, 800)
    assert one == other
    assert "at most on rank 1 (resident" in one
    assert int(one.split(" MB")[0].replace(",", "")) > 800


@pytest.mark.parametrize("level", [("--precision", "fp16"), ("--opt-level", "O2")])
def test_the_loss_scale_is_shown_wherever_there_is_one(text, tmp_path, level):
    printed = finish(tmp_path, "--data", text, *SMALL, *level)["printed"]
    assert "scale 2^16  skipped 0" in printed
    assert "Skipped        0 of 6 steps" in printed


def test_images_are_counted_as_images(tmp_path):
    flags = ("--model", "digits", "--width", 16, "--heads", 2, "--layers", 1, "--batch", 8)
    printed = finish(tmp_path, *flags, "--steps", 2)["printed"]
    assert re.search(r"Time .* images/s", printed)
    assert "Bits per byte" not in printed


# -- what cannot be written costs no run ----------------------------------------------------------


def test_a_picture_that_cannot_be_written_is_a_warning(text, tmp_path):
    (tmp_path / "curves.png").mkdir()
    printed = finish(tmp_path, "--data", text, *SMALL)["printed"]
    assert "Warning: cannot write curves.png: Is a directory" in printed
    assert "Results are in" in printed
    assert "  curves.png" not in printed


def test_checkpoints_that_cannot_be_written_are_a_warning_until_the_last(text, tmp_path):
    job = pooled.job("--data", text, *SMALL, "--checkpoint-every", 2, "--run-dir", tmp_path)
    shown: list[str] = []
    job.report.note = shown.append  # type: ignore[method-assign]
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").touch()  # a file in the place of the folder
    with job.report, pytest.raises(UsageError, match=r"cannot write .*checkpoints"):
        train_job(job)
    assert len(shown) == 2  # after steps 2 and 4; after the last there is no other time
    assert all("the run goes on and tries again at the next save" in line for line in shown)
    assert job.run.progress.step == 6
    (tmp_path / "checkpoints").unlink()
    job.save(must=True)
    assert (tmp_path / "checkpoints" / "step-00000006" / "manifest.json").is_file()


def test_a_precision_report_that_cannot_be_written_is_a_warning(text, tmp_path):
    (tmp_path / "precision.json").mkdir()
    ended = finish(tmp_path, "--data", text, *SMALL, "--report")
    assert "Warning: cannot write the precision report: Is a directory" in ended["printed"]
    assert ended["manifest"]["progress"]["step"] == 6

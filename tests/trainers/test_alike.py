"""Compare each trainer with distamp with the same trainer with torch's scaler."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.trainers import cells
from tests.trainers.cells import LAYOUTS, PACKAGES, PRECISIONS
from tests.trainers.common import FAULT, GROUPS, SCALE, STEPS, needs, train

pytestmark = pytest.mark.filterwarnings("ignore")

CLIP_BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
ACCUMULATE_2 = {"accumulate_grad_batches": 2}

# Options of runs without an overflow, by trainer and by the name of the case.
TRAINING: dict[str, dict[str, Any]] = {}
TRAINING["lightning"] = {
    "defaults": {},
    "clip by value": {"trainer": CLIP_BY_VALUE},
    "accumulation": {"trainer": ACCUMULATE_2},
    "a batch without a loss": {"devices": 1, "no_loss_at": 3},
    "accumulation, a batch without a loss": {
        "trainer": ACCUMULATE_2,
        "devices": 1,
        "no_loss_at": 3,
    },
}
TRAINING["fabric"] = {
    "defaults": {},
    "clip": {"clip": 0.1},
}
TRAINING["accelerate"] = {
    "clip, accumulation": {"clip": 0.1, "accumulation_steps": 2},
    "clip, fused optimizer": {"clip": 0.1, "fused": True},
}
for _layout in ("DDP", "FSDP1", "FSDP2"):
    TRAINING["accelerate"][_layout] = {"layout": _layout}
    TRAINING["accelerate"][f"clip, {_layout}"] = {"layout": _layout, "clip": 0.1}
TRAINING["transformers"] = {
    "defaults": {},
    "clip, accumulation": {"clip": 1.0, "gradient_accumulation_steps": 2},
    "clip, fused optimizer": {"clip": 0.1, "optim": "adamw_torch_fused"},
}

# Options of runs that save or load a checkpoint.
CHECKPOINTS: dict[str, dict[str, Any]] = {}
CHECKPOINTS["lightning"] = {"fp16": {}}
CHECKPOINTS["accelerate"] = {
    "fp16": {},
    "bf16": {"precision": "bf16"},
    "bf16, FSDP2": {"precision": "bf16", "layout": "FSDP2"},
}
CHECKPOINTS["transformers"] = {
    "fp16": {},
    "bf16": {"precision": "bf16"},
}


def in_group_of(trainer: str) -> pytest.MarkDecorator:
    """Return the mark of tests that import the same trainer."""
    return pytest.mark.xdist_group(GROUPS[trainer])


# `make test` imports neither transformers nor TRL for these tests, because the imports take long.
QUICK_CASES = {
    "lightning-accumulation, a batch without a loss",
    "fabric-clip",
    "accelerate-clip, accumulation",
    "accelerate-clip, fused optimizer",
    "accelerate-DDP",
    "accelerate-FSDP1",
    "accelerate-fp16-distamp",
    "accelerate-fp16-torch",
    "accelerate-bf16, FSDP2-torch",
}


def marks_of(trainer: str, is_quick: bool) -> list[pytest.MarkDecorator]:
    """Return the marks of a case: the group of its trainer, and whether it is slow."""
    marks = [in_group_of(trainer)]
    if not is_quick:
        marks.append(pytest.mark.slow)
    return marks


def trainer_params() -> list[Any]:
    """Return the trainers for which distamp installs communication hooks."""
    params = []
    for trainer in ("lightning", "accelerate", "transformers"):
        marks = marks_of(trainer, is_quick=trainer == "accelerate")
        params.append(pytest.param(trainer, marks=marks))
    return params


def case_params(table: dict[str, dict[str, Any]]) -> list[Any]:
    """Return the parameters ``trainer`` and ``options`` for each case of a table."""
    params = []
    for trainer, cases in table.items():
        for case, options in cases.items():
            name = f"{trainer}-{case}"
            marks = marks_of(trainer, name in QUICK_CASES)
            params.append(pytest.param(trainer, options, id=name, marks=marks))
    return params


def checkpoint_params() -> list[Any]:
    """Return ``trainer``, ``options`` and the scaler of the run that saves, for each checkpoint."""
    params = []
    for trainer, cases in CHECKPOINTS.items():
        for (case, options), saved_with in itertools.product(cases.items(), ("distamp", "torch")):
            name = f"{trainer}-{case}-{saved_with}"
            marks = marks_of(trainer, name in QUICK_CASES)
            params.append(pytest.param(trainer, options, saved_with, id=name, marks=marks))
    return params


@pytest.mark.parametrize(("trainer", "options"), case_params(TRAINING))
def test_without_an_overflow_distamp_trains_as_torchs_scaler_does(ranks2, trainer, options):
    needs(trainer)
    distamp_runs = ranks2.run(train, trainer, with_distamp=True, fault=None, **options)
    torch_runs = ranks2.run(train, trainer, with_distamp=False, fault=None, **options)
    # distamp sums a norm over ranks in another order than torch.
    tolerance = 1e-6 if "clip" in options else 0.0
    for distamp_run, torch_run in zip(distamp_runs, torch_runs, strict=True):
        assert distamp_run.rates == torch_run.rates
        assert distamp_run.weights == pytest.approx(torch_run.weights, rel=tolerance, abs=0)
        assert len(set(distamp_run.weights)) > 1, "the run trains"


@pytest.mark.parametrize("trainer", trainer_params())
def test_with_a_hook_ranks_skip_together_and_rates_and_logs_have_the_skip(ranks2, trainer):
    needs(trainer)
    run_0, run_1 = ranks2.run(train, trainer, comm_hook="fp16")
    assert run_0.weights == run_1.weights
    assert run_0.scale == SCALE / 2
    assert len(set(run_0.rates)) == STEPS - 1, "the schedule waits in the skipped step"
    assert run_0.skipped == [step == FAULT for step in range(STEPS)]
    if trainer != "accelerate":  # Accelerate has no log.
        assert run_0.logged == [SCALE / 2, 1]


@pytest.mark.parametrize("trainer", trainer_params())
def test_a_hook_rounds_the_gradients_that_it_sends(ranks2, trainer):
    needs(trainer)
    run_with_hook, _ = ranks2.run(train, trainer, comm_hook="fp16")
    run_without_hook, _ = ranks2.run(train, trainer)
    assert run_with_hook.weights != run_without_hook.weights
    assert run_with_hook.weights == pytest.approx(run_without_hook.weights, rel=1e-3)


@pytest.mark.parametrize(("trainer", "options", "saved_with"), checkpoint_params())
def test_a_checkpoint_continues_equally_with_distamp_and_with_torchs_scaler(
    ranks2, tmp_path: Path, trainer, options, saved_with
):
    needs(trainer)
    folder = str(tmp_path)

    def run_on_rank_0(with_distamp: bool, **paths: str) -> Any:
        runs = ranks2.run(train, trainer, with_distamp=with_distamp, fault=None, **paths, **options)
        return runs[0]

    saved_run = run_on_rank_0(saved_with == "distamp", save=folder)
    distamp_run = run_on_rank_0(True, load=folder)
    torch_run = run_on_rank_0(False, load=folder)
    assert distamp_run.weights == torch_run.weights
    assert distamp_run.weights[0] != saved_run.weights[0], "the run continues from the checkpoint"
    is_fp16 = not options
    if is_fp16:
        assert distamp_run.growth == torch_run.growth
        assert distamp_run.growth > STEPS / 2, "the scale's growth continues its count"


# -- a NaN on one of two ranks; `cells` has the whole table ----------------------------------------

# `make test-all` runs all cells.
QUICK_CELLS = {"Accelerate-bf16-FSDP2", "Accelerate-fp16-FSDP2"}


def cell_params() -> list[Any]:
    """Return a trainer, a precision and a layout for each cell."""
    params = []
    for trainer, precision, layout in itertools.product(PACKAGES, PRECISIONS, LAYOUTS):
        cell = f"{trainer}-{precision}-{layout}"
        marks = marks_of(PACKAGES[trainer], cell in QUICK_CELLS)
        params.append(pytest.param(trainer, precision, layout, id=cell, marks=marks))
    return params


@pytest.mark.parametrize(("trainer", "precision", "layout"), cell_params())
def test_a_nan_on_one_rank_is_skipped_and_reported_on_both(ranks2, trainer, precision, layout):
    needs(PACKAGES[trainer])
    if layout.startswith("LoRA"):
        needs("peft")
    runs = ranks2.run(cells.run, trainer, precision, layout)
    assert cells.find_faults(runs) == []

"""Each trainer with distamp beside the same run with torch's scaler, and what it then knows."""

from typing import Any

import pytest

from tests.trainers import cells
from tests.trainers.cells import LAYOUTS, PRECISIONS, TRAINERS
from tests.trainers.common import FAULT, GROUPS, SCALE, STEPS, needs, train

pytestmark = pytest.mark.filterwarnings("ignore")

BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
# What a run is made with. A norm over ranks is summed in another order than torch's.
TO_THE_BIT: dict[str, list[dict[str, Any]]] = {
    "lightning": [
        {},
        {"trainer": BY_VALUE},
        {"trainer": {"accumulate_grad_batches": 2}},
        {"trainer": {"accumulate_grad_batches": 2}, "devices": 1, "no_loss_at": 3},
        {"devices": 1, "no_loss_at": 3},
    ],
    "fabric": [{}, {"clip": 0.1}],
    "accelerate": [
        {"clip": 0.1, "parts": 2},
        {"clip": 0.1, "fused": True},
        *({"layout": each} for each in ("DDP", "FSDP1", "FSDP2")),
        *({"layout": each, "clip": 0.1} for each in ("DDP", "FSDP1", "FSDP2")),
    ],
    "transformers": [
        {},
        {"clip": 1.0, "gradient_accumulation_steps": 2},
        {"clip": 0.1, "optim": "adamw_torch_fused"},
    ],
}
SAVED = {
    "lightning": [{}],
    "accelerate": [{}, *({"precision": "bf16", "layout": each} for each in ("DDP", "FSDP2"))],
    "transformers": [{}, {"precision": "bf16"}],
}


def each_of(table: dict[str, list[dict[str, Any]]]) -> Any:
    return pytest.mark.parametrize(
        ("name", "options"),
        [
            pytest.param(name, options, marks=pytest.mark.xdist_group(GROUPS[name]))
            for name, cases in table.items()
            for options in cases
        ],
    )


@each_of(TO_THE_BIT)
def test_without_an_overflow_the_run_is_the_trainers_own_to_the_bit(ranks2, name, options):
    needs(name)
    ours, theirs = (
        ranks2.run(train, name, ours=each, fault=None, **options) for each in (True, False)
    )
    rel = 1e-6 if "clip" in options else 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.rates == other.rates
        assert mine.weights == pytest.approx(other.weights, rel=rel, abs=0)
        assert len(set(mine.weights)) > 1


@each_of({name: [{}] for name in SAVED})
def test_ranks_skip_together_under_a_hook_too_and_rates_and_logs_know_it(ranks2, name, options):
    needs(name)
    hooked, other = ranks2.run(train, name, comm_hook="fp16")
    plain, _ = ranks2.run(train, name)
    assert hooked.weights == other.weights
    assert (hooked.scale, len(set(hooked.rates))) == (SCALE / 2, STEPS - 1)
    assert hooked.skipped == [step == FAULT for step in range(STEPS)]
    assert hooked.told in (None, [SCALE / 2, 1])  # Accelerate has no log
    assert hooked.weights != plain.weights, "rounded on the way"
    assert hooked.weights == pytest.approx(plain.weights, rel=1e-3)


@pytest.mark.parametrize("first", [True, False])
@each_of(SAVED)
def test_a_checkpoint_of_either_goes_on_in_the_other(ranks2, tmp_path, name, options, first):
    needs(name)
    saving, loading = ({each: str(tmp_path), **options} for each in ("save", "load"))
    saved, _ = ranks2.run(train, name, ours=first, fault=None, **saving)
    one, other = (
        ranks2.run(train, name, ours=each, fault=None, **loading)[0] for each in (True, False)
    )
    assert one.weights == other.weights
    assert one.weights[0] != saved.weights[0]
    assert options or one.growth == other.growth > STEPS / 2


# -- a NaN on one of two ranks; `cells` has the whole table ----------------------------------------

# Every trainer, layout and precision; `make test-all` runs them all.
QUICK = {
    ("Lightning", "bf16", "FSDP2"),
    ("Lightning", "fp32", "DDP"),
    ("Fabric", "bf16", "LoRA on FSDP2"),
    ("Accelerate", "bf16", "FSDP2"),
    ("Accelerate", "fp16", "FSDP2"),
    ("Accelerate", "fp32", "LoRA on FSDP2"),
    ("Trainer", "bf16", "DDP"),
    ("Trainer", "bf16", "LoRA on FSDP2"),
    ("TRL", "bf16", "FSDP2"),
}


@pytest.mark.parametrize(
    ("trainer", "precision", "layout"),
    [
        pytest.param(
            *(trainer, precision, layout),
            marks=[
                pytest.mark.xdist_group(GROUPS[TRAINERS[trainer]]),
                *([] if (trainer, precision, layout) in QUICK else [pytest.mark.slow]),
            ],
        )
        for trainer in TRAINERS
        for precision in PRECISIONS
        for layout in LAYOUTS
    ],
)
def test_a_nan_on_one_rank_is_skipped_on_both_and_the_trainer_knows(
    ranks2, trainer, precision, layout
):
    needs(TRAINERS[trainer], *(["peft"] if "LoRA" in layout else []))
    assert cells.faults_of(ranks2.run(cells.run, trainer, precision, layout)) == []

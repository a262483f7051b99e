"""A NaN on one of two ranks in trainers that scale no loss; `cells` has the whole table."""

import importlib.util

import pytest

from tests.trainers import cells
from tests.trainers.cells import LAYOUTS, PRECISIONS, TRAINERS

pytestmark = pytest.mark.filterwarnings("ignore")
GROUPS = {"Lightning": "lightning", "Fabric": "lightning"}
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
                pytest.mark.xdist_group(GROUPS.get(trainer, "hugging_face")),
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
    for package in (TRAINERS[trainer][0], *(["peft"] if "LoRA" in layout else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    assert cells.faults_of(ranks2.run(cells.run, trainer, precision, layout)) == []

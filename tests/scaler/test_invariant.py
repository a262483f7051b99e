"""Layouts x optimizers x orders x faults, and one invariant.

All ranks agree on skipped, scale and parameters; a skipped step changes nothing; a kept step equals
the float64 reference. What an optimizer itself cannot do on a layout, found by running it without a
scaler, comes through as torch's own error on all ranks, with parameters unchanged.

``python -m tests.scaler.test_invariant LAYOUT ...`` runs every cell of these layouts (of all, when
none is given) outside pytest, tells every cell that breaks the invariant and counts them.
"""

import datetime
import sys
import time

import pytest
import torch

from tests.ranks import RankPool
from tests.scaler.matrix.cells import cell, cells, chain, sample
from tests.scaler.matrix.judge import Judge
from tests.scaler.matrix.layouts import ALL_LAYOUTS, WORLD
from tests.scaler.matrix.programs import Iteration, Program

# Of each layout; all of them in long runs.
SAMPLED_CELLS = 1


@pytest.fixture(scope="module")
def judge(ranks):
    return Judge(ranks(WORLD))


def _wrong(judge, wanted):
    found = judge.judge(*(cell(*each) for each in wanted))
    return {each: wrong for each, wrong in zip(wanted, found, strict=True) if wrong}


def wrong_cells(judge, layout, kind):
    """The cells of one layout and optimizer that break the invariant, and how.

    Cells that differ in their fault alone run one after the other on one model, which spares most
    of the time. Where such a chain breaks, each of its cells runs on a model of its own.
    """
    chains: dict[str, list] = {}
    for each in cells([layout], [kind]):
        chains.setdefault(each[2], []).append(each)
    programs = [
        chain(layout, kind, order, [fault for *_, fault in links])
        for order, links in chains.items()
    ]
    found = judge.judge(*programs)
    broken = [links for wrong, links in zip(found, chains.values(), strict=True) if wrong]
    return {each: wrong for links in broken for each, wrong in _wrong(judge, links).items()}


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_invariant_holds_on_a_sample_of_cells(judge, layout):
    assert _wrong(judge, sample(layout, SAMPLED_CELLS)) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layout", "kind"), sorted({each[:2] for each in cells()}))
def test_invariant_holds_in_every_cell(judge, layout, kind):
    assert wrong_cells(judge, layout, kind) == {}


@pytest.mark.parametrize("kind", ["SGD for-loop", "Adam fused"])
def test_an_overflow_made_by_the_reduction_is_skipped_everywhere(judge, kind):
    assert _wrong(judge, [("FSDP2 in fp16", kind, "step", "sum")]) == {}


@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2", "FSDP2 x TP", "ZeRO", "pipeline"])
def test_a_rank_astray_stops_every_rank_and_one_that_unscales_by_itself_goes_on(judge, layout):
    for what in ("swap", "scale", "call"):
        program = Program(layout, "SGD for-loop", (Iteration(), Iteration()), 2, astray=(what, 2))
        assert judge.judge(program) == [[]], what


# -- the judge itself can tell right from wrong -------------------------------------------------


def test_torch_s_scaler_is_judged_right_where_it_is_right(ranks):
    assert _wrong(Judge(ranks(WORLD), "torch"), [("DDP", "SGD for-loop", "step", "loss")]) == {}


@pytest.mark.parametrize(
    ("scaler", "layout", "kind", "order", "fault", "complaint"),
    [
        ("torch", "FSDP1", "Adam foreach", "unscale", "nan", "should have skipped"),
        ("sharded", "DDP", "Adam fused", "unscale", "none", "raised RuntimeError"),
        ("sharded", "DDP", "SGD fused", "unscale", "every rank", "parameters"),
    ],
)
def test_known_faults_of_other_scalers_are_seen(
    new_ranks, scaler, layout, kind, order, fault, complaint
):
    wrong = _wrong(Judge(new_ranks(WORLD), scaler, timeout=5.0), [(layout, kind, order, fault)])
    assert any(complaint in each for found in wrong.values() for each in found)


def main() -> None:
    with RankPool(WORLD) as pool:
        for layout in sys.argv[1:] or ALL_LAYOUTS:
            start = time.monotonic()
            wrong: dict[tuple[str, ...], list[str]] = {}
            for kind in dict.fromkeys(kind for _, kind, *_ in cells([layout])):
                wrong |= wrong_cells(Judge(pool), layout, kind)
            for each, complaints in wrong.items():
                print(each, *complaints, sep="\n    ", flush=True)
            count = len(list(cells([layout])))
            print(
                f"{datetime.date.today()}, torch {torch.__version__}: {count} cells of {layout}, "
                f"{len(wrong)} broke the invariant; {time.monotonic() - start:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

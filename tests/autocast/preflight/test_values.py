"""Control flow that depends on values: known ones are the real ones, others are made up."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distamp import preflight
from tests.autocast.report.test_report import FP16

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


class Reads(nn.Module):
    """Hands what it is called with to a function that notes what it read."""

    def __init__(self, what):
        super().__init__()
        self.l, self.what, self.read = nn.Linear(8, 8), what, []

    def forward(self, x, mask):
        return self.l(x) * self.what(self, x, mask)


def reads(what, mask=MASK, x=None, device_type="cuda", **options):
    """What the function read in a simulation, and the result."""
    found = []

    def noted(model, x, mask):
        found.append(what(x, mask))
        return 1.0

    x = torch.randn(2, 4, 8) if x is None else x
    result = preflight(Reads(noted), (x, mask), device_type, FP16, measure=False, **options)
    return found[0] if found else None, result


KNOWN = {
    "all": lambda mask: bool(mask.bool().all()),
    "lengths": lambda mask: mask.sum(-1).tolist(),
    "longest": lambda mask: int(mask.sum(-1).max()),
    "shape of nonzero": lambda mask: tuple(mask.nonzero().shape),
    "where": lambda mask: [t.tolist() for t in torch.where(mask == 0)],
    "masked_select": lambda mask: mask[mask.bool()].tolist(),
    "unique": lambda mask: torch.unique(mask).tolist(),
    "equal": lambda mask: torch.equal(mask, torch.ones_like(mask)),
    "index": lambda mask: mask[:, torch.tensor([0, 3], device=mask.device)].tolist(),
    "arithmetic": lambda mask: ((1 - mask.float()) * -2).tolist(),
    "repeat": lambda mask: torch.repeat_interleave(mask[0], mask[1] + 1).tolist(),
    "numpy": lambda mask: mask.cpu().numpy().tolist(),
    "constant": lambda mask: (torch.tensor([1, 2], device=mask.device) + mask[0, 0]).tolist(),
    "written": lambda mask: written(mask).tolist(),
    "view written": lambda mask: view_written(mask).tolist(),
    "one hot": lambda mask: F.one_hot(mask.sum(-1), 5).tolist(),
    "sorted": lambda mask: torch.sort(mask, -1)[1].tolist(),
    "big": lambda mask: big(mask),
}


def written(mask):
    out = torch.zeros(2, 4, dtype=torch.int64, device=mask.device)
    out[:, 1:] = mask[:, :-1]
    out.masked_fill_(mask == 0, 7)
    out += 1
    return out


def view_written(mask):
    copy = mask.clone()
    row = copy[1]
    row.add_(1)
    copy.view(-1)[0] = 9
    return copy


def big(mask):
    """Beyond the size up to which values are worked out at once."""
    wide = mask.repeat(1, 5000)
    return int((wide == 0).sum()), bool(wide.any())


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("name", KNOWN)
def test_what_follows_from_the_inputs_is_the_real_value(name, device_type):
    read, result = reads(lambda x, mask: KNOWN[name](mask), device_type=device_type)
    assert read == KNOWN[name](MASK)
    assert result.finished
    assert not result.findings


def test_buffers_have_their_values():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)
            self.register_buffer("enabled", torch.tensor(False))

        def forward(self, x):
            return self.l(x) if self.enabled else self.l(x).exp()

    rows = preflight(Net(), torch.randn(2, 8), measure=False).report.rows
    assert "exp" in {row.op for row in rows}


MADE_UP = {
    "finite": (lambda y: bool(torch.isfinite(y).all()), True),
    "infinite": (lambda y: bool(torch.isinf(y).any() or torch.isnan(y).any()), False),
    "item": (lambda y: 0 <= y.amax().item() <= 1, True),
    "chosen": (lambda y: y.topk(2, -1)[1].max().item() < 8, True),
}


@pytest.mark.parametrize("name", MADE_UP)
def test_what_does_not_is_made_up_and_said(name):
    what, expected = MADE_UP[name]
    wide = nn.Linear(512, 8, bias=False)
    model = nn.Sequential(wide, Decides(what))
    result = preflight(model, torch.randn(64, 512), measure=False)
    assert model[1].read == []
    assert Decides.last == expected
    assert result.finished
    (found,) = result.findings
    assert (found.severity, found.rule, found.module) == ("info", "made-up-values", "1")


class Decides(nn.Module):
    last = None

    def __init__(self, what):
        super().__init__()
        self.what, self.read = what, []

    def forward(self, y):
        Decides.last = self.what(y)
        self.read.append(Decides.last)
        return y


def test_inputs_on_the_meta_device_stand_in_as_ones():
    read, result = reads(lambda x, mask: mask.sum(-1).tolist(), MASK.to("meta"))
    assert read == [4, 4]
    assert {f.rule for f in result.findings} == {"made-up-values"}


def test_what_is_on_the_meta_device_is_where_it_would_be():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.scale = nn.Linear(8, 8), torch.ones(8)

        def forward(self, x):
            return self.l(x) * self.scale.to(x.device)

    with torch.device("meta"):
        model, x, labels = Net(), torch.randn(2, 8), torch.ones(2, dtype=torch.int64)
    result = preflight(model, x, loss_fn=lambda y: F.cross_entropy(y, labels), measure=False)
    assert result.finished, result.findings
    assert not result.errors
    model.forward = lambda x: model.l(x) * model.scale
    (found,) = preflight(model, x, measure=False).errors
    assert (found.rule, "cuda:0 and cpu" in found.what) == ("step-fails", True)


def test_a_recomputed_forward_goes_the_same_way():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(512, 4)
            self.experts = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.routed, x, use_reentrant=False)

        def routed(self, x):
            out, chosen = torch.zeros_like(x), self.router(x).argmax(-1)
            for number in chosen.unique().tolist():
                where = (chosen == number).nonzero()[:, 0]
                out = out.index_add(0, where, self.experts[number](x[where]).float())
            return out

    result = preflight(Routed(), torch.randn(64, 512, requires_grad=True), measure=False)
    assert result.finished, result.findings
    assert not result.not_visited


def test_a_loop_that_only_data_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(import_module("distamp.autocast.preflight.simulate"), "_MOST_DECISIONS", 50)

    def until_it_fails(y):
        while not torch.isnan(y).any():
            y = y + 1
        return y

    model = nn.Sequential(nn.Linear(512, 8, bias=False), Decides(until_it_fails))
    result = preflight(model, torch.randn(64, 512), measure=False)
    (found,) = result.errors
    assert (found.rule, found.module) == ("not-simulated", "1")
    assert "depends on values" in found.what


def test_a_layer_that_is_left_out_at_random_is_kept():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                if torch.rand([]) > 0.4:
                    x = layer(x)
            return x

    assert not preflight(Dropped(), torch.randn(2, 8), measure=False).not_visited


def test_ops_without_a_fake_kernel_are_run_for_their_shapes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(8, 8, 2, batch_first=True, bidirectional=True)

        def forward(self, x, lengths):
            logits = self.gru(x)[0].transpose(0, 1).log_softmax(-1)
            targets = torch.ones(2, 2, dtype=torch.int64, device=x.device)
            return F.ctc_loss(logits, targets, lengths, torch.tensor([2, 2], device=x.device))

    inputs = torch.randn(2, 4, 8), torch.tensor([4, 3])
    result = preflight(Net(), inputs, "cuda", FP16, measure=False)
    assert result.finished, result.findings
    assert not result.findings
    assert not result.not_visited


def test_names_of_the_device_are_those_of_the_first():
    def moves(x, mask):
        other = torch.ones(2).cuda(), torch.ones(2).to("cuda"), torch.ones(2).to(0)
        return {str(t.device) for t in (*other, torch.ones(2, device="cuda"), x)}

    read, result = reads(moves)
    assert read == {"cuda:0"}
    assert result.finished


def test_gradients_inside_the_step_are_simulated():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x):
            x.requires_grad_()
            out = self.l(x).sin()
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.sum() + grad.float().square().sum()

    model, x = Penalty(), torch.randn(4, 8)
    result = preflight(model, x, "cuda", FP16, measure=False)
    assert result.finished, result.findings
    ops = {row.op for row in result.report.rows if row.module == "" and row.phase == "backward"}
    assert "cos" in ops

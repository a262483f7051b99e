"""The model after preflight is the model before it, however preflight ended."""

from __future__ import annotations

import copy
import functools
import pickle
import random

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations

from distamp import autocast, preflight
from tests.autocast.report.test_report import mlp
from tests.ranks import mesh


class Twice(nn.Module):
    """A layer under three names, one of them in a list of layers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.layers = nn.Sequential(*[nn.BatchNorm1d(4)] * 3)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.a.weight

    def forward(self, x):
        return self.head(self.layers(self.b(self.a(x))))


class Keeps(nn.Module):
    """Leaves all sorts of things on itself."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.steps, self.cache, self.seen = 0, {}, [1]
        self.aliases = {"weight": self.l.weight, "pair": (self.l.bias,)}
        self.helper = Helper()

    def forward(self, x):
        assert type(self.aliases["weight"]) is type(self.l.weight)
        self.steps += 1
        self.cache["x"] = self.last = x
        self.seen.append(x)
        self.helper.x = x
        self.register_buffer("made", x.detach())
        self.l.bias = nn.Parameter(self.l.bias * 2)
        self.extra = nn.Linear(4, 4)
        return self.l(x) * self.l.weight.sum()


class Helper:
    """An object that is no module."""


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.body, self.error = Twice(), error

    def forward(self, x):
        self.body(x)
        raise self.error


class Guarded(nn.Module):
    """Copies and pickles in ways of its own."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def __deepcopy__(self, memo):
        raise RuntimeError("not to be copied")

    def __getstate__(self):
        raise RuntimeError("not to be pickled")

    def forward(self, x):
        return self.l(x)


class OldNorm(nn.Module):
    """A parametrization by hand: a plain attribute that is computed from parameters."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.g = nn.Parameter(torch.ones(1))
        self.scaled = self.l.weight * self.g

    def forward(self, x):
        self.scaled = self.l.weight * self.g
        return F.linear(x, self.scaled)


def shared_buffer():
    one, two = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    two.running_mean = one.running_mean
    return nn.Sequential(one, two)


def bound_forward():
    model = nn.Linear(4, 4)
    model.forward = functools.partial(type(model).forward, model)
    return model


MODELS = {
    "shared": Twice,
    "attributes": Keeps,
    "guarded": Guarded,
    "by hand": OldNorm,
    "buffer": shared_buffer,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "lstm": lambda: nn.LSTM(4, 4, 2),
    "bound forward": bound_forward,
}


def state(model):
    """All that can be asked of a model, by identity."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = id(module), type(module), module.training, list(module._forward_hooks)
        for key, value in vars(module).items():
            found[name, key] = id(value)
            if isinstance(value, dict):
                found[name, key, "items"] = [(k, id(v)) for k, v in value.items()]
            elif isinstance(value, list):
                found[name, key, "items"] = [id(v) for v in value]
    return found


def values(model):
    tensors = [*model.parameters(), *model.buffers()]
    return [(id(t), t.detach().clone(), t.grad, t._version) for t in tensors]


def same(before, after):
    assert len(before) == len(after)
    for (i, value, grad, version), (j, now, grad_now, version_now) in zip(
        before, after, strict=True
    ):
        assert (i, version) == (j, version_now)
        assert grad is grad_now
        assert torch.equal(value, now)


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_everything_is_as_it_was(name, device_type):
    model, x = MODELS[name](), torch.randn(5, 4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    found, before = state(model), values(model)
    result = preflight(model, x, device_type, torch.bfloat16, measure=False)
    assert result.finished, result.findings
    assert state(model) == found
    same(before, values(model))
    # A fake parameter left behind would end the process here.
    output = model(x)
    (output[0] if isinstance(output, tuple) else output).sum().backward()


@pytest.mark.parametrize("error", [KeyError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_also_after_an_exception(error):
    model = Fails(error)
    found, before = state(model.body), values(model)
    if isinstance(error, Exception):
        (finding,) = preflight(model, torch.randn(5, 4), measure=False).errors
        assert "KeyError" in finding.what
    else:
        with pytest.raises(type(error)):
            preflight(model, torch.randn(5, 4), measure=False)
    assert state(model.body) == found
    same(before, values(model))
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    model.body(torch.randn(5, 4)).sum().backward()


def test_a_model_that_writes_to_its_parameters_is_not_written_to():
    class Decays(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)
            self.count = torch.zeros((), dtype=torch.int64)
            self.average = torch.zeros(4)

        def forward(self, x):
            with torch.no_grad():
                self.l.weight.mul_(0.5)
            self.count += 1
            return self.l(x)

    model = Decays()
    before, average, count = values(model), model.average, model.count
    assert preflight(model, torch.randn(5, 4), measure=False).finished
    same(before, values(model))
    assert (model.average is average, model.count is count, int(count)) == (True, True, 0)


def test_random_numbers_are_drawn_as_if_it_had_not_run():
    import numpy as np

    def draws():
        return torch.rand(2).tolist(), random.random(), np.random.rand(), torch.rand(1, generator=g)

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.generator = nn.Linear(4, 4), g

        def forward(self, x):
            x = F.dropout(x) + torch.rand(4, device=x.device) + random.random() + np.random.rand()
            noise = torch.rand(4, generator=self.generator)
            return self.l(x + float(noise.sum()))

    def seed():
        torch.manual_seed(1), random.seed(1), np.random.seed(1), g.manual_seed(1)

    g = torch.Generator()
    seed()
    expected = draws()
    seed()
    assert preflight(Draws(), torch.randn(5, 4).fill_(1), measure=False).finished
    seed_after = draws()
    assert seed_after[1:3] == expected[1:3]
    assert torch.equal(seed_after[3], expected[3])
    assert seed_after[0] != []


def test_hooks_run_and_stay():
    model, calls = mlp(), []
    model[0].register_forward_hook(lambda module, args, out: calls.append(out.device.type))
    model[0].register_full_backward_hook(lambda *_: None)
    found = state(model)
    assert preflight(model, torch.randn(4, 8), measure=False).finished
    assert calls == ["cuda"]
    assert state(model) == found


@pytest.mark.parametrize("training", [True, False])
def test_modes_of_modules_are_those_given(training):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()).train(training)
    model[1].train(not training)
    result = preflight(model, torch.randn(4, 8), measure=False)
    assert ("2" in {row.module for row in result.report.rows}) == training
    assert [module.training for module in model] == [training, not training, training]


def _wrapped_in_ddp():
    model = DistributedDataParallel(mlp())
    result = preflight(model, torch.randn(4, 8), measure=False)
    model(torch.randn(4, 8)).sum().backward()
    return result.finished, result.visited, all(p.grad is not None for p in model.parameters())


def test_a_ddp_model_trains_on(ranks2):
    assert ranks2.run(_wrapped_in_ddp) == [(True, ("", "0", "1", "2", "3"), True)] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_regions_for_a_device_that_is_not_here_are_off_again():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            with autocast("cuda", torch.bfloat16):
                y = self.l(x)
            with torch.autocast("cuda", torch.bfloat16):
                return y + self.l(x)

    rows = preflight(Net(), torch.randn(5, 4), "cuda", torch.float16, measure=False).report.rows
    assert {row.inputs for row in rows if row.op == "addmm"} == {("bfloat16",)}
    for region in (autocast, torch.autocast):
        with pytest.warns(UserWarning, match="CUDA is not available"), region("cuda"):
            assert not torch.is_autocast_enabled("cuda")


class Reduces(nn.Module):
    """Adds over ranks in forward, and reads the sum."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        count = torch.tensor([1, 2], device=x.device)
        torch.distributed.all_reduce(count)
        return self.l(x) * count.sum().item()


def _alone_on_one_rank(device_type):
    if torch.distributed.get_rank() == 0:
        result = preflight(Reduces(), torch.randn(4, 4), device_type, measure=False)
        return result.finished, {finding.rule for finding in result.findings}
    return True, {"made-up-values"}


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_a_collective_in_forward_waits_for_no_other_rank(ranks2, device_type):
    assert ranks2.run(_alone_on_one_rank, device_type) == [(True, {"made-up-values"})] * 2


@pytest.mark.parametrize("wrap", [DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_wrappers_are_looked_through(wrap):
    result = preflight(wrap(mlp()), torch.randn(4, 8), measure=False)
    assert result.finished
    assert result.visited == ("", "0", "1", "2", "3")
    assert result.report.model == "Sequential"


def test_a_part_that_is_compiled_runs_uncompiled():
    model = nn.Sequential(torch.compile(nn.Linear(8, 8)), nn.ReLU())
    model[1].compile()
    result = preflight(model, torch.randn(4, 8), measure=False)
    assert result.finished
    assert {row.op for row in result.report.rows if row.phase == "forward"} >= {"addmm", "relu"}


def test_a_copy_or_pickle_of_the_model_afterwards_is_a_real_one():
    model = Twice()
    preflight(model, torch.randn(5, 4), measure=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(torch.ones(5, 4)), model(torch.ones(5, 4)))


def test_models_that_cannot_be_simulated_are_refused():
    with pytest.raises(ValueError, match=r"weight has no shape yet: run a lazy model"):
        preflight(nn.LazyLinear(3), torch.ones(1, 4))
    with pytest.raises(TypeError, match="0 is a scripted module; script it afterwards"):
        preflight(nn.Sequential(torch.jit.script(nn.Linear(4, 4))), torch.ones(1, 4))
    sparse = nn.Module()
    sparse.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"edges is torch.sparse_coo"):
        preflight(sparse, torch.ones(1, 4))


def _tensor_parallel():
    model = nn.Linear(4, 4)
    parallelize_module(model, mesh((2,), ("tp",)), ColwiseParallel())
    with pytest.raises(ValueError, match="weight is a DTensor; give preflight the model before"):
        preflight(model, torch.ones(1, 4))


def test_a_tensor_parallel_model_is_refused(ranks2):
    ranks2.run(_tensor_parallel)


def test_a_loss_s_own_weights_are_simulated_and_put_back():
    head, labels = nn.Linear(4, 3), torch.tensor([0, 2, 1, 0, 1])
    weights = torch.ones(3)

    def loss_fn(output):
        return F.cross_entropy(head(output), labels, weight=weights) + head.weight.square().sum()

    before = values(head)
    result = preflight(nn.Linear(4, 4), torch.randn(5, 4), loss_fn=loss_fn, measure=False)
    assert result.finished
    assert not result.findings
    same(before, values(head))
    assert preflight(nn.Linear(4, 4), torch.randn(5, 4), loss_fn=Loss(), measure=False).finished


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, output):
        return self.head(output).float().mean()

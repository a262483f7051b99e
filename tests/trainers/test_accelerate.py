"""Accelerate and Hugging Face's Trainer with distamp: facts that other trainers do not have."""

import pickle

import pytest
import torch
from torch import nn

import distamp
from distamp import DistGradScaler
from tests.comm_hooks.training import agreed
from tests.on_ranks import on_ranks
from tests.trainers.common import FAULT, STEPS, model, needs, train

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
needs("accelerate")


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_hook_keeps_follows_the_loss_scale(ranks2, is_late):
    options = {"comm_hook": "int8", "fault": None, "init_scale": 1.0, "is_late": is_late}
    (constant, _), (growing, _), (plain, _) = (
        ranks2.run(train, "accelerate", **options | changed)
        for changed in ({"growth_interval": 99}, {"growth_interval": 1}, {"comm_hook": None})
    )
    assert growing.scale == 2.0**STEPS
    # At a scale of 1 small gradients of float16 are rounded otherwise than at 64.
    assert growing.weights == pytest.approx(constant.weights, rel=1e-9)
    assert growing.weights != pytest.approx(plain.weights, rel=1e-9)


@pytest.mark.parametrize("first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_sharded_checkpoint_goes_on_with_the_count_it_was_saved_with(ranks2, tmp_path, first):
    """torch makes the optimizer's state by a step before it loads: no step to the scaler."""
    options, path = {"layout": "FSDP2"}, str(tmp_path)
    ranks2.run(train, "accelerate", with_distamp=first, save=path, **options)
    for run in ranks2.run(train, "accelerate", is_late=True, fault=None, load=path, **options):
        assert run.growth == (STEPS - FAULT - 1) + STEPS


@on_ranks(2)
def test_a_static_graph_accumulates_as_another_one_does():
    """torch asserts inside where the first backward pass of a static graph is not reduced."""
    from accelerate.utils import DistributedDataParallelKwargs

    from distamp.integrations.accelerate import prepare
    from tests.trainers.in_accelerate import make_accelerator

    weights = []
    for is_static in (True, False):
        accelerator = make_accelerator(True, "fp32", accumulation_steps=2)
        accelerator.ddp_handler = DistributedDataParallelKwargs(static_graph=is_static)
        prepare(accelerator)
        net = model()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(accelerator.process_index)
        for _ in range(4):
            with accelerator.accumulate(net):
                inputs = torch.randn(2, next(net.parameters()).shape[1], generator=generator)
                accelerator.backward(net(inputs).float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
        weights.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
    torch.testing.assert_close(*weights)
    assert agreed(weights[0])


# -- scalers that exist, and refusals -----------------------------------------------------------


@on_ranks(2)
def test_scalers_that_are_there_are_kept_and_optimizers_can_be_pickled():
    from accelerate.utils import GradScalerKwargs
    from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler

    from distamp.integrations.accelerate import prepare
    from tests.trainers.in_accelerate import make_accelerator

    accelerator = make_accelerator(False)
    accelerator.scaler_handler = GradScalerKwargs(growth_interval=7)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    scaler = prepare(accelerator)
    assert (scaler.get_growth_interval(), scaler.get_scale()) == (7, 32.0)
    assert prepare(accelerator) is accelerator.scaler is scaler
    second = prepare(accelerator, init_scale=2.0)
    optimizer = accelerator.prepare(torch.optim.SGD(model().parameters(), lr=0.1))
    assert optimizer.scaler is accelerator.scaler is second
    assert pickle.loads(pickle.dumps(optimizer)).scaler.get_scale() == 2.0
    with distamp.patch_torch():
        assert isinstance(get_fsdp2_grad_scaler(device="cpu"), DistGradScaler)


@on_ranks(2)
def test_what_cannot_be_is_refused():
    from distamp.integrations.accelerate import prepare
    from tests.trainers.in_accelerate import make_accelerator

    with pytest.raises(ValueError, match=r"'bf16'.*init_scale"):
        prepare(make_accelerator(False, "bf16"), init_scale=2.0)
    accelerator = make_accelerator(False, "fp32")
    accelerator.state._mixed_precision = "fp8"  # Accelerate has none of its backends here
    with pytest.raises(ValueError, match="fp8"):
        prepare(accelerator)
    with pytest.raises(TypeError, match=r"distamp\.DistGradScaler"):
        prepare(make_accelerator(False), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="'fp17'"):
        prepare(make_accelerator(False), comm_hook="fp17")  # also where one rank has no use for it
    accelerator = make_accelerator(True)
    accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"before accelerator\.prepare"):
        prepare(accelerator)


@pytest.mark.slow  # It imports transformers.
@on_ranks(2)
def test_bases_in_the_other_order_are_refused():
    """The Trainer's own methods would hide the mixin's, without a word."""
    from transformers import Trainer

    from distamp.integrations.transformers import DistTrainerMixin

    with pytest.raises(TypeError, match=r"write class Mine\(DistTrainerMixin, Trainer\)"):
        type("Mine", (Trainer, DistTrainerMixin), {})

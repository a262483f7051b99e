"""The outputs of a user's model from which the launcher computes the loss and the accuracy."""

from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from launch.model import mean_cross_entropy, read_logits


def test_a_model_may_return_outputs_of_transformers_in_place_of_logits():
    """A model of peft returns them, as every model of transformers does."""
    logits = torch.randn(2, 3, 5)
    targets = torch.randint(5, (2, 3))
    outputs = SimpleNamespace(loss=None, logits=logits)

    assert read_logits(outputs) is logits
    assert read_logits(logits) is logits
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert mean_cross_entropy(outputs, targets) == expected
    assert mean_cross_entropy(logits, targets) == expected

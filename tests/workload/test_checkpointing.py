"""Find the layers to checkpoint by their class, its name, or the mark of transformers."""

from __future__ import annotations

import pytest
from raised import raises
from torch import nn

from autosplit.errors import WorkloadError
from autosplit.workload.checkpointing import Checkpointing


class Block(nn.Sequential):
    """A repeated layer."""


class Late(Block):
    """A layer of a class that is defined later."""


class GradientCheckpointingLayer(nn.Module):
    """A fake of transformers' class of this name."""

    gradient_checkpointing = False


class TheirLayer(GradientCheckpointingLayer):
    pass


def stack(kind: type[nn.Module] = Block, depth: int = 5) -> nn.Module:
    return nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.ModuleList([kind() for _ in range(depth)])})


@pytest.mark.parametrize("kind", [Block, "Block"])
@pytest.mark.parametrize(
    ("every", "names"),
    [(1, tuple(f"body.{number}" for number in range(5))), (2, ("body.0", "body.2", "body.4"))],
)
def test_layers_are_found_by_their_class_and_by_its_name(kind, every, names):
    assert Checkpointing((kind,), every).names_in(stack()) == names
    assert Checkpointing((kind,), every).names_in(stack(Late)) == names, "of a class below, too"


def test_of_layers_within_each_other_the_outermost_is_one():
    """Otherwise the inner layer's activations would be computed three times."""
    assert Checkpointing((Block,), 1).names_in(nn.ModuleList([Block(Block(), nn.ReLU())])) == ("0",)


def test_a_layer_of_two_parents_is_one_layer():
    """It counted twice, so `every=2` checkpointed only this layer, under both names."""
    shared, second, third = Block(), Block(), Block()
    model = nn.ModuleList([nn.ModuleList([shared, second]), nn.ModuleList([shared, third])])
    assert Checkpointing((Block,), 1).names_in(model) == ("0.0", "0.1", "1.1")
    assert Checkpointing((Block,), 2).names_in(model) == ("0.0", "1.1")


def test_those_of_transformers_are_found_by_themselves():
    assert Checkpointing(("auto",), 2).names_in(stack(TheirLayer)) == ("body.0", "body.2", "body.4")


def test_a_model_that_has_none_is_refused():
    with raises(WorkloadError, "'Tower'", "ModuleDict"):
        Checkpointing(("Tower",), 1).names_in(stack())
    with raises(WorkloadError):
        Checkpointing(("auto",), 1).names_in(stack())


def test_a_model_that_checkpoints_them_already_is_refused():
    model = stack(TheirLayer)
    for layer in model["body"]:
        layer.gradient_checkpointing = True
    with raises(WorkloadError):
        Checkpointing(("auto",), 2).names_in(model)

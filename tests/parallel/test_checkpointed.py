"""Layers checkpointed in place: the same gradients, names and state dict, with less saved memory."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from ddp_jobs import make_plan
from raised import raises
from torch import Tensor, nn

from autosplit.errors import PlanError
from autosplit.parallel.checkpointed import checkpoint_layer, checkpoint_layers, checkpointed_in


class Block(nn.Module):
    """Counts its forwards. Dropout shows whether the second forward has the random numbers of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)
        self.forwards = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.forwards += 1
        return x + scale * self.dropout(torch.tanh(self.linear(x)))


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().mean(dim=1)


NAMES = ("blocks.0", "blocks.2")


def made() -> Stack:
    torch.manual_seed(0)
    return Stack().double()


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    model.zero_grad()
    model(x).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


X = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_gradients_are_the_same_and_the_layers_run_twice():
    plain, checkpointed = made(), made()
    checkpoint_layers(checkpointed, NAMES)
    assert torch.equal(gradient(checkpointed, X), gradient(plain, X))
    assert [block.forwards for block in checkpointed.blocks] == [2, 1, 2, 1]
    assert checkpointed_in(checkpointed) == NAMES


def test_names_state_dict_and_class_stay():
    plain, checkpointed = made(), made()
    checkpoint_layers(checkpointed, NAMES)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    assert isinstance(checkpointed.blocks[0], Block)
    assert repr(checkpointed) == repr(plain)
    plain.load_state_dict(checkpointed.state_dict())


def test_nothing_is_computed_again_where_nothing_is_trained():
    model = made()
    checkpoint_layers(model, NAMES)
    with torch.no_grad():
        model(X)
    model.eval()(X).sum().backward()
    assert [block.forwards for block in model.blocks] == [2, 2, 2, 2]


def test_it_is_undone_and_done_once():
    model = made()
    undo = checkpoint_layer(model.blocks[0])
    kind = type(model.blocks[0])
    again = checkpoint_layer(model.blocks[0])
    assert type(model.blocks[0]) is kind
    again()
    assert checkpointed_in(model) == ("blocks.0",), "the second call did nothing"
    undo()
    assert type(model.blocks[0]) is Block


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_checkpointed_too(copied):
    """The class is created dynamically, and pickle searched for it in the module."""
    model = made()
    checkpoint_layers(model, NAMES)
    other = copied(model)
    assert checkpointed_in(other) == NAMES
    assert torch.equal(gradient(other, X), gradient(made(), X))


@pytest.mark.parametrize("split", [(12,), (5, 7)])
def test_a_plan_wraps_with_its_layers_checkpointed(split):
    plan = replace(make_plan(split), checkpointed=NAMES)
    plain, model = made().requires_grad_(), made()
    for one in (plain, model):
        for block in one.blocks:
            block.dropout.p = 0.0  # each share draws its own
    wrapper = plan.wrap(model)
    expected = gradient(plain, X)
    torch.manual_seed(1)
    wrapper(X).mean().backward()
    assert checkpointed_in(model) == NAMES
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_a_model_without_these_layers_is_refused_and_left_as_it_is():
    model = made()
    with raises(PlanError, "checkpointed-layer-missing", "blocks.9", "Stack"):
        replace(make_plan((4,)), checkpointed=("blocks.0", "blocks.9")).wrap(model)
    assert checkpointed_in(model) == ()


def test_a_layer_of_transformers_is_told_to():
    transformers = pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config)

    def gradient(model: nn.Module) -> Tensor:
        tokens = torch.arange(32).reshape(2, 16)
        torch.manual_seed(1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    forwards: list[int] = []
    plain, model = made(), made()
    undo = checkpoint_layer(model.transformer.h[1])
    model.transformer.h[1].attn.register_forward_pre_hook(lambda *_: forwards.append(1))
    torch.testing.assert_close(gradient(model), gradient(plain), rtol=1e-6, atol=1e-9)
    assert len(forwards) == 2
    assert checkpointed_in(model) == checkpointed_in(copy.deepcopy(model)) == ("transformer.h.1",)
    undo()
    assert checkpointed_in(model) == ()
    assert not vars(model.transformer.h[1]).get("gradient_checkpointing")

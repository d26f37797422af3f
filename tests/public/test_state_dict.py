"""A state dict loads into the same model with any wrapper on either side."""

from __future__ import annotations

import gc
from collections import OrderedDict

import pytest
import torch
from error_types import InputError
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit import BalancedDataParallel, matching_state_dict


class HasModule(nn.Module):
    """A layer called `module` next to a parameter `weight`: the names are `module.weight` and `weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.module = nn.Linear(3, 3)


class OnlyModule(nn.Module):
    """All names already begin with `module.` in the plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


class Versioned(nn.Module):
    """A layer without tensors whose format has changed since the checkpoint."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.loaded = None

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.loaded = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = nn.Linear(3, 3), {"scale": torch.randn(1)}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def compiled(module: nn.Module) -> nn.Module:
    if hasattr(module, "_orig_mod"):  # compiled twice, torch returns a function that has no state
        return module
    return torch.compile(module, backend="eager")


def balanced(module: nn.Module) -> nn.Module:
    # Compiled modules and modules with compiled parts raise an error there. Compile the wrapper instead.
    has_compiled = any(hasattr(part, "_orig_mod") for part in module.modules())
    return nn.DataParallel(module) if has_compiled else BalancedDataParallel(1, module, ["cpu", "cpu"])


WRAPPERS = {"DataParallel": nn.DataParallel, "balanced": balanced, "compiled": compiled}
MODELS = {
    "linear": lambda: nn.Linear(3, 3),
    "norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()),
    "has_module": HasModule,
    "only_module": OnlyModule,
    "nested": lambda: nn.Sequential(OrderedDict(module=HasModule(), other=OnlyModule())),
    "tied": Tied,
    "extra": WithExtra,
    "part_compiled": lambda: nn.Sequential(compiled(nn.Linear(3, 3)), nn.Linear(3, 3)),
    "part_wrapped": lambda: nn.Sequential(nn.DataParallel(nn.Linear(3, 3)), nn.Linear(3, 3)),
}


def wrapped(model: nn.Module, wrappers) -> nn.Module:
    for name in wrappers:
        model = WRAPPERS[name](model)
    return model


def same(one, other) -> bool:
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other)


def check_round_trip(source: nn.Module, target: nn.Module) -> None:
    state = source.state_dict()
    matched = matching_state_dict(target, state)
    assert sorted(matched) == sorted(target.state_dict())
    assert [id(value) for value in matched.values()] == [id(value) for value in state.values()]
    target.load_state_dict(matched)
    theirs = list(target.state_dict().values())
    assert all(same(one, other) for one, other in zip(state.values(), theirs, strict=True))


stacks = st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3)


@given(st.sampled_from(sorted(MODELS)), stacks, stacks)
def test_any_stack_of_wrappers_loads_into_any_other(model, saved, loading):
    check_round_trip(wrapped(MODELS[model](), saved), wrapped(MODELS[model](), loading))


@given(st.sampled_from(sorted(MODELS)), stacks)
def test_a_state_of_the_same_names_stays(model, wrappers):
    module = wrapped(MODELS[model](), wrappers)
    state = module.state_dict()
    matched = matching_state_dict(module, state)
    assert list(matched) == list(state)
    assert matched is not state
    assert matched._metadata.items() <= state._metadata.items()  # the inner layer's version is used for its wrapper
    assert {name.rpartition(".")[0] for name in state} <= set(matched._metadata)


@pytest.fixture
def one_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # A reducer that drops the last reference to its group may deadlock with a thread of gloo.
    distributed.destroy_process_group()


@pytest.mark.parametrize("model", ["norm", "has_module", "only_module"])
def test_distributed_data_parallel(one_rank, model):
    ddp = DistributedDataParallel(MODELS[model]())
    check_round_trip(ddp, MODELS[model]())
    check_round_trip(MODELS[model](), ddp)
    check_round_trip(ddp, wrapped(MODELS[model](), ["balanced", "compiled"]))


def test_an_averaged_model():
    """It keeps its own buffer next to the wrapped module."""
    averaged = torch.optim.swa_utils.AveragedModel(MODELS["norm"]())
    plain = MODELS["norm"]()
    assert plain.load_state_dict(matching_state_dict(plain, averaged.state_dict()), strict=False).missing_keys == []
    loaded = averaged.load_state_dict(matching_state_dict(averaged, plain.state_dict()), strict=False)
    assert loaded == (["n_averaged"], [])


@pytest.mark.parametrize("wrappers", [["DataParallel"], ["balanced", "compiled"], ["compiled", "DataParallel"]])
def test_versions_go_along(wrappers):
    old = Versioned().state_dict()
    assert old._metadata[""] == {"version": 2}
    old._metadata[""] = {"version": 1}
    inner = Versioned()
    inner_wrapped = wrapped(inner, wrappers)
    inner_wrapped.load_state_dict(matching_state_dict(inner_wrapped, old))
    assert inner.loaded == 1
    state = inner_wrapped.state_dict()
    plain = Versioned()
    plain.load_state_dict(matching_state_dict(plain, state))
    assert plain.loaded == 2


def test_batch_norms_version_is_seen():
    """Without the version, torch reads the state as an old format and fills in num_batches_tracked."""
    model = MODELS["norm"]()
    state = nn.DataParallel(model).state_dict()
    del state["module.1.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r"1\.num_batches_tracked"):
        model.load_state_dict(matching_state_dict(model, state))


def test_a_state_without_metadata():
    plain = MODELS["norm"]()
    matched = matching_state_dict(plain, dict(nn.DataParallel(MODELS["norm"]()).state_dict()))
    assert not hasattr(matched, "_metadata")
    plain.load_state_dict(matched)


def test_the_given_state_is_left_alone():
    state = nn.DataParallel(MODELS["norm"]()).state_dict()
    names, layers = list(state), list(state._metadata)
    matching_state_dict(MODELS["norm"](), state)
    assert (list(state), list(state._metadata)) == (names, layers)


@pytest.mark.parametrize("wrappers", [[], ["DataParallel"], ["balanced", "compiled"]])
def test_missing_and_unexpected_names_are_reported_by_torch(wrappers):
    state = nn.DataParallel(MODELS["norm"]()).state_dict()
    del state["module.0.bias"]
    state["module.head.weight"] = torch.zeros(2)
    target = wrapped(MODELS["norm"](), wrappers)
    prefix = next(iter(target.state_dict())).removesuffix("0.weight")
    matched = matching_state_dict(target, state)
    assert target.load_state_dict(matched, strict=False) == ([f"{prefix}0.bias"], [f"{prefix}head.weight"])
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.bias"):
        target.load_state_dict(matched)


def test_nothing_in_common_stays_as_it_is():
    state = {"encoder.weight": torch.zeros(1), "module.bias_of_it": torch.zeros(1)}
    assert matching_state_dict(MODELS["norm"](), state) == state


def test_an_empty_state():
    assert matching_state_dict(nn.ReLU(), nn.DataParallel(nn.ReLU()).state_dict()) == {}


def test_checkpoints_of_the_same_training_load():
    """A run without the wrapper loads the wrapper's checkpoint and resumes with the same numbers."""
    torch.manual_seed(1)
    model = MODELS["norm"]()
    wrapper = BalancedDataParallel(None, model, ["cpu", "cpu"], split=(3, 5))
    wrapper(torch.randn(8, 3)).sum().backward()
    with torch.no_grad():
        for parameter in wrapper.parameters():
            parameter -= 0.1 * parameter.grad
    plain = MODELS["norm"]()
    plain.load_state_dict(matching_state_dict(plain, wrapper.state_dict()))
    x = torch.randn(4, 3)
    assert torch.equal(plain.eval()(x), model.eval()(x))


# Not a state dict


def refusal(state, module=None) -> str:
    with pytest.raises(InputError) as caught:
        matching_state_dict(nn.Linear(3, 3) if module is None else module, state)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key", ["model", "state_dict", "net"])
def test_a_checkpoint_is_refused_with_where_its_state_is(key):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = {"epoch": 3, "best": torch.tensor(0.5), key: model.state_dict(), "optimizer": optimizer.state_dict()}
    message = refusal(checkpoint)
    assert "whole checkpoint" in message
    assert f", state['{key}']." in message


def test_a_checkpoint_of_long_names_is_one_short_line():
    message = refusal({f"model_number_{index}": {"weight": torch.zeros(1000)} for index in range(100)})
    assert len(message) < 300


def test_an_optimizers_state_is_refused():
    model = nn.Linear(3, 3)
    assert "no tensor" in refusal(torch.optim.Adam(model.parameters()).state_dict())


@pytest.mark.parametrize("state", [[], None, 3, "model.pt", {0: torch.zeros(1)}, [torch.zeros(1)]], ids=repr)
def test_other_things_are_refused(state):
    assert "model.state_dict()" in refusal(state)


def test_a_module_is_refused():
    assert "a Linear. Expected its state dict" in refusal(nn.Linear(3, 3))


def test_swapped_arguments_are_refused():
    assert "module first" in refusal(nn.Linear(3, 3), module=nn.Linear(3, 3).state_dict())


def test_two_states_in_one_are_refused():
    state = nn.Linear(3, 3).state_dict()
    state["_orig_mod.weight"] = torch.zeros(3, 3)
    assert "weight" in refusal(state)


def test_a_plain_state_dict_in_the_wrapper_names_the_call_that_loads_it():
    plain = nn.Linear(3, 3)
    wrapper = BalancedDataParallel(None, nn.Linear(3, 3), ["cpu", "cpu"], split=(2, 1))
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        wrapper.load_state_dict(plain.state_dict())
    assert "autosplit.matching_state_dict(model, state)" in caught.value.autosplit_advice
    wrapper.load_state_dict(matching_state_dict(wrapper, plain.state_dict()))
    assert torch.equal(wrapper.module.weight, plain.weight)

"""A plan is a value: it survives JSON, rejects invalid data, and passes its numbers to the wrappers."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, replace

import pytest
import torch
from error_types import DeviceError, InputError, PlanError
from plans import MIB, make_plan, plan_device, simulated_plan
from raised import raises
from torch import nn

from autosplit import OutOfMemoryError, Plan

PLAN = make_plan()


class TestJson:
    def test_comes_back_as_it_went(self):
        assert Plan.from_json(PLAN.to_json()) == PLAN
        assert Plan.from_json(json.dumps(PLAN.to_dict()).encode()) == PLAN

    def test_keys_are_the_attributes_names(self):
        plain = PLAN.to_dict()
        assert set(plain) == {field.name for field in fields(Plan)}
        assert plain["schema_version"] == 2
        assert plain["ddp"]["ranks"][1]["batch_size"] == PLAN.ddp.ranks[1].batch_size

    def test_tuples_become_lists(self):
        plain = PLAN.to_dict()
        assert plain["split"] == [2, 4]
        assert plain["trials"][0]["split"] == [2, 4]
        assert json.loads(PLAN.to_json()) == plain

    def test_a_plan_of_before_its_memory_was_told_apart_is_read(self):
        plain = PLAN.to_dict()
        for device in plain["devices"]:
            del device["memory"]
        assert all(device.memory is None for device in Plan.from_json(json.dumps(plain)).devices)

    def test_keys_that_a_later_version_adds_are_let_through(self):
        assert Plan.from_json(json.dumps({**PLAN.to_dict(), "colour": "red"})) == PLAN


class TestWhatIsNoPlan:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"split": ()}, "split"),
            ({"split": (0, 0), "gpu0_bsz": 0, "batch_size": 0}, "split"),
            ({"split": (-1, 7), "gpu0_bsz": -1}, "split"),
            ({"gpu0_bsz": 3}, "gpu0_bsz is 3. Expected split"),
            ({"batch_size": 7}, "batch_size is 7. Expected the split's sum, 6"),
            ({"effective_batch_size": 0}, "effective_batch_size is 0"),
            ({"accumulation_steps": 2}, "accumulation_steps is 2. Expected ceil"),
            ({"devices": (plan_device(0, 2),)}, "devices"),
            ({"ceilings": (5,)}, "ceilings"),
            ({"ceilings": (5, 3)}, "split is .* within the ceilings"),
            ({"samples_per_s": 0.0}, "samples_per_s is 0.0"),
            ({"samples_per_s": math.nan}, "samples_per_s is nan"),
            ({"samples_per_s": math.inf}, "samples_per_s is inf"),
            ({"simulated": True}, "simulated is True. Expected False"),
            ({"loss_reduction": "max"}, "loss_reduction is 'max'"),
            ({"ddp": replace(PLAN.ddp, ranks=PLAN.ddp.ranks[:1])}, "ddp"),
            ({"ddp": replace(PLAN.ddp, ranks=PLAN.ddp.ranks[::-1])}, "ddp"),
            ({"real_steps": -1}, "real_steps is -1"),
            ({"devices": (plan_device(0, 2), plan_device(1, 4, peak_bytes=-1))}, "peak_bytes is -1"),
            ({"batch_dim": -1}, "batch_dim is -1"),
            ({"schema_version": 3}, "schema_version is 3. Expected 2"),
        ],
    )
    def test_is_refused_with_what_was_expected(self, changes, message):
        with pytest.raises(PlanError, match=message) as caught:
            make_plan(**changes)
        assert "expected" in str(caught.value).lower()
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"{",
            b"null",
            b"[]",
            b"\xff\xfe{}",
            b"{}",
            b'{"schema_version": "1"}',
            b'{"schema_version": 1}',
            b'{"schema_version": NaN}',
            b"[" * 100_000,
            b'{"schema_version": 2}',
            b'{"schema_version": 1, "machine": ' + b'{"a":' * 100_000,
            b'{"schema_version": 2, "machine": ' + b'{"a":' * 100_000,
        ],
    )
    def test_text_that_is_none(self, text):
        with pytest.raises(PlanError, match="is not a plan") as caught:
            Plan.from_json(text, source="plan.json")
        assert str(caught.value).startswith("plan.json is not a plan")
        assert "\n" not in str(caught.value)

    def test_its_repr_has_two_lines(self):
        """The repr had 5,746 characters, which a notebook printed after every call."""
        lines = repr(PLAN).split("\n")
        assert len(lines) == 2
        assert all(device.label in lines[0] for device in PLAN.devices)
        assert str(PLAN) in lines[1]

    def test_a_file_of_version_1_has_notes_without_kinds(self):
        plain = {**PLAN.to_dict(), "schema_version": 1, "notes": ["a note"]}
        plain["devices"][0]["ceiling"]["notes"] = ["a note on a ceiling"]
        plan = Plan.from_json(json.dumps(plain))
        notes = (*plan.notes, *plan.devices[0].ceiling.notes)
        assert [(note.kind, note.text) for note in notes] == [("note", "a note"), ("note", "a note on a ceiling")]
        assert (plan.split, plan.schema_version) == (PLAN.split, 2)

    def test_another_version_is_named(self):
        text = json.dumps({**PLAN.to_dict(), "schema_version": 99})
        with raises(PlanError, "99", "2"):
            Plan.from_json(text)


def test_a_plan_has_few_public_methods():
    """`dir(plan)` is what users see in a notebook."""
    public = {name for name in dir(PLAN) if not name.startswith("_")}
    assert public - {one.name for one in fields(PLAN)} == {
        *("wrap", "steps", "batch_sampler", "token_sampler", "max_tokens", "loader", "budgets", "devices_here"),
        *("explain", "fastest", "compare_with", "goodput", "plot", "export"),
        *("path", "save", "load", "to_dict", "to_json", "from_json"),
    }


class TestFiles:
    @pytest.mark.smoke
    def test_saves_and_loads(self, tmp_path):
        path = tmp_path / "new" / "folder" / "plan.json"
        PLAN.save(path)
        assert Plan.load(path) == PLAN
        assert Plan.load(str(path)) == PLAN

    def test_knows_its_file_which_is_no_part_of_it(self, tmp_path):
        made = PLAN
        made.save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
        assert plan.path == tmp_path / "plan.json"
        assert plan == made
        assert plan.to_json() == made.to_json()
        assert str(tmp_path) not in repr(plan)
        assert replace(plan, precision="bf16").path is None, "another plan is in no file"

    def test_others_may_read_it_as_any_new_file(self, tmp_path):
        (tmp_path / "any").write_text("")
        PLAN.save(tmp_path / "plan.json")
        assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "any").stat().st_mode

    def test_an_interrupted_save_leaves_the_old_plan_and_nothing_else(self, tmp_path, monkeypatch):
        path = tmp_path / "plan.json"
        PLAN.save(path)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(type(path), "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replace(PLAN, complete=False).save(path)
        monkeypatch.undo()
        assert Plan.load(path) == PLAN
        assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]

    def test_a_place_that_can_not_be_written_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with raises(PlanError):
            PLAN.save(tmp_path / "file" / "plan.json")

    def test_a_link_is_followed_and_what_is_no_file_stays(self, tmp_path):
        """`save` replaced a device with a file."""
        link, pipe = tmp_path / "link.json", tmp_path / "pipe"
        link.symlink_to(tmp_path / "plan.json")
        PLAN.save(link)
        assert link.is_symlink()
        assert Plan.load(tmp_path / "plan.json") == PLAN
        os.mkfifo(pipe)
        with raises(PlanError):
            PLAN.save(pipe)
        assert pipe.is_fifo()

    def test_a_missing_file_is_named(self, tmp_path):
        with raises(PlanError):
            Plan.load(tmp_path / "nowhere.json")

    def test_a_folder_is_no_plan(self, tmp_path):
        with raises(PlanError):
            Plan.load(tmp_path)

    def test_a_truncated_file_is_named(self, tmp_path):
        path = tmp_path / "plan.json"
        path.write_bytes(PLAN.to_json().encode()[:500])
        with pytest.raises(PlanError, match=r"plan\.json is not a plan"):
            Plan.load(path)


def model_of(*, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class TestDownToTheWrappers:
    @pytest.mark.smoke
    @pytest.mark.parametrize("split", [(2, 4), (0, 6), (5, 1)])
    def test_the_wrapped_model_has_the_gradients_of_the_plain_one(self, split):
        plan = make_plan(split=split, gpu0_bsz=split[0], ceilings=(6, 6))
        inputs, targets = torch.randn(6, 4).double(), torch.randn(6, 1).double()
        plain, wrapped = model_of(), plan.wrap(model_of())
        nn.functional.mse_loss(plain(inputs), targets).backward()
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        for expected, found in zip(plain.parameters(), wrapped.module.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14)

    def test_the_wrapper_has_the_plans_numbers(self):
        wrapped = PLAN.wrap(model_of())
        assert (wrapped.split, wrapped.ceilings) == (PLAN.split, PLAN.ceilings)

    @pytest.mark.parametrize(("reduction", "expected"), [("mean", 3.5), ("sum", 21.0)])
    def test_scalar_outputs_are_combined_as_the_loss_is(self, reduction, expected):
        class Loss(nn.Module):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return getattr(inputs, reduction)()

        wrapped = make_plan(loss_reduction=reduction).wrap(Loss())
        assert wrapped(torch.arange(1.0, 7.0)).item() == pytest.approx(expected)

    def test_a_plan_for_simulated_cards_wraps_nothing(self):
        with raises(DeviceError, "RTX3090"):
            simulated_plan().wrap(model_of())

    def test_a_move_to_new_parameters_leaves_no_optimizer_behind(self, monkeypatch):
        """The optimizer went on to train the old parameters, which the model no longer used."""
        monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with raises(InputError, "cpu"):
            PLAN.wrap(model)
        del optimizer
        wrapped = PLAN.wrap(model)  # the optimizer of a deleted model does not matter
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        monkeypatch.undo()
        wrapped(torch.ones(2, 4).double()).sum().backward()
        optimizer.step()
        assert PLAN.wrap(model).module is model, "where parameters stay what they are, any optimizer goes on"


class TestBudgets:
    def test_holds_the_plans_devices_to_their_capacity(self):
        plan = make_plan(devices=(plan_device(0, 2), plan_device(1, 4, capacity_bytes=MIB)))
        model, inputs = nn.Linear(1000, 1000), torch.randn(6, 1000)
        with pytest.raises(OutOfMemoryError, match="cpu:1"), plan.budgets():
            plan.wrap(model)(inputs)

    def test_counts_what_each_device_holds(self):
        model, inputs = model_of().float(), torch.randn(6, 4)
        with PLAN.budgets() as tracker:
            PLAN.wrap(model)(inputs).sum().backward()
        assert len(tracker.peak_bytes) == 2
        assert all(peak > 0 for peak in tracker.peak_bytes)

    def test_devices_without_budgets_have_none(self):
        plan = make_plan(devices=(plan_device(0, 2, budgeted=False, label="cpu"), plan_device(1, 4)))
        with raises(DeviceError), plan.budgets():
            pass

    def test_simulated_cards_have_none(self):
        with raises(DeviceError, "sim:0, sim:1"), simulated_plan().budgets():
            pass

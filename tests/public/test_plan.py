"""A plan is a value: it survives JSON, rejects invalid data, and passes its numbers to the wrappers."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from error_types import DeviceError, InputError, PlanError
from plans import MIB, make_plan, plan_seat, simulated_plan
from raised import raises
from torch import nn

from autosplit import OutOfMemoryError, Plan

PLAN = make_plan()
OLD = json.loads((Path(__file__).parents[1] / "plan_of_version_2.json").read_text(encoding="utf-8"))
"""A plan that autosplit 1.0 saved, with schema_version 2."""


class TestJson:
    def test_comes_back_as_it_went(self):
        assert Plan.from_json(PLAN.to_json()) == PLAN
        assert Plan.from_json(json.dumps(PLAN.to_dict()).encode()) == PLAN

    def test_keys_are_the_attributes_names(self):
        plain = PLAN.to_dict()
        assert set(plain) == {field.name for field in fields(Plan)}
        assert plain["schema_version"] == 3
        assert plain["layouts"][1]["seats"][1]["samples"] == PLAN.ddp.split[1]

    def test_tuples_become_lists(self):
        plain = PLAN.to_dict()
        assert [seat["samples"] for seat in plain["layouts"][0]["seats"]] == [2, 4]
        assert plain["trials"][0]["split"] == [2, 4]
        assert json.loads(PLAN.to_json()) == plain

    def test_a_plan_of_before_its_memory_was_told_apart_is_read(self):
        old = {**OLD, "devices": [{**device} for device in OLD["devices"]]}
        for device in old["devices"]:
            del device["memory"]
        assert all(seat.memory is None for seat in Plan.from_json(json.dumps(old)).main.seats)

    def test_keys_that_a_later_version_adds_are_let_through(self):
        assert Plan.from_json(json.dumps({**PLAN.to_dict(), "colour": "red"})) == PLAN


class TestWhatIsNoPlan:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"seats": ()}, "split"),
            ({"seats": (plan_seat(0, 0), plan_seat(1, 0))}, "split"),
            ({"seats": (plan_seat(0, -1), plan_seat(1, 7))}, "split"),
            ({"effective_batch_size": 0}, "effective_batch_size is 0"),
            ({"accumulation_steps": 2}, "accumulation_steps is 2. Expected ceil"),
            ({"seats": (plan_seat(0, 6),)}, "layouts"),
            (
                {"seats": (plan_seat(0, 2), plan_seat(1, 65)), "accumulation_steps": 1},
                "split is .* within the ceilings",
            ),
            ({"samples_per_s": 0.0}, "samples_per_s is 0.0"),
            ({"samples_per_s": math.nan}, "samples_per_s is nan"),
            ({"samples_per_s": math.inf}, "samples_per_s is inf"),
            ({"loss_reduction": "max"}, "loss_reduction is 'max'"),
            ({"layouts": ()}, "layouts"),
            ({"layouts": (PLAN.main, PLAN.main)}, "layouts"),
            ({"layouts": (PLAN.main, replace(PLAN.ddp, seats=PLAN.ddp.seats[::-1]))}, "layouts"),
            ({"layouts": (PLAN.main, replace(PLAN.ddp, seats=PLAN.ddp.seats[:1], accumulation_steps=8))}, "layouts"),
            ({"real_steps": -1}, "real_steps is -1"),
            ({"seats": (plan_seat(0, 2), replace(plan_seat(1, 4), peak_bytes=-1))}, "peak_bytes is -1"),
            ({"batch_dim": -1}, "batch_dim is -1"),
            ({"schema_version": 2}, "schema_version is 2. Expected 3"),
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
            b'{"schema_version": 3}',
            b'{"schema_version": 1, "machine": ' + b'{"a":' * 100_000,
            b'{"schema_version": 2, "machine": ' + b'{"a":' * 100_000,
            b'{"schema_version": 3, "machine": ' + b'{"a":' * 100_000,
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
        first, *others = OLD["devices"]
        first = {**first, "ceiling": {**first["ceiling"], "notes": ["a note on a ceiling"]}}
        old = {**OLD, "schema_version": 1, "notes": ["a note"], "devices": [first, *others]}
        plan = Plan.from_json(json.dumps(old))
        notes = (*plan.notes, *plan.main.seats[0].ceiling.notes)
        assert [(note.kind, note.text) for note in notes] == [("note", "a note"), ("note", "a note on a ceiling")]
        assert (plan.split, plan.schema_version) == (tuple(OLD["split"]), 3)

    def test_a_file_of_version_2_is_converted(self):
        plan = Plan.from_json(json.dumps(OLD))
        ranks = OLD["ddp"]["ranks"]
        assert (plan.split, plan.ceilings) == (tuple(OLD["split"]), tuple(OLD["ceilings"]))
        assert plan.ddp.split == tuple(rank["batch_size"] for rank in ranks)
        assert plan.ddp.ceilings == tuple(rank["ceiling"]["batch_size"] for rank in ranks)
        assert plan.ddp.peak_bytes == tuple(rank["peak_bytes"] for rank in ranks)
        for layout, old in ((plan.main, OLD), (plan.ddp, OLD["ddp"])):
            assert layout.samples_per_s == old["samples_per_s"]
            assert layout.effective_batch_size == old["effective_batch_size"]
        assert plan.accumulation_steps == OLD["accumulation_steps"]
        assert plan.main.peak_bytes == tuple(device["peak_bytes"] for device in OLD["devices"])
        assert (plan.main.region, plan.main.cost, plan.ddp.cost) != (None, None, None)
        assert str(plan.explain())
        assert json.loads(plan.to_json())["schema_version"] == 3
        assert Plan.from_json(plan.to_json()) == plan

    def test_another_version_is_named(self):
        text = json.dumps({**PLAN.to_dict(), "schema_version": 99})
        with raises(PlanError, "99", "3"):
            Plan.from_json(text)


def test_a_plan_has_few_public_methods():
    """`dir(plan)` is what users see in a notebook."""
    public = {name for name in dir(PLAN) if not name.startswith("_")}
    assert public - {one.name for one in fields(PLAN)} == {
        *("wrap", "steps", "batch_sampler", "token_sampler", "max_tokens", "loader", "budgets", "devices_here"),
        *("explain", "fastest", "compare_with", "goodput", "plot", "export"),
        *("path", "save", "load", "to_dict", "to_json", "from_json"),
        *("recommended", "balanced", "ddp", "main", "split", "gpu0_bsz", "batch_size", "accumulation_steps"),
        *("effective_batch_size", "samples_per_s", "even_samples_per_s", "ceilings", "devices", "simulated"),
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
        plan = make_plan(seats=tuple(map(plan_seat, range(2), split)))
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
        plan = make_plan(seats=(plan_seat(0, 2), plan_seat(1, 4, capacity_bytes=MIB)))
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
        seats = plan_seat(0, 2, budgeted=False, label="cpu"), plan_seat(1, 4)
        plan = replace(PLAN, layouts=(replace(PLAN.main, seats=seats),))
        with raises(DeviceError), plan.budgets():
            pass

    def test_simulated_cards_have_none(self):
        with raises(DeviceError, "sim:0, sim:1"), simulated_plan().budgets():
            pass

"""The doctor: its checks run, each problem comes with a fix, and saved rates can be read back."""

from __future__ import annotations

import itertools
import json
import re
import runpy
from dataclasses import replace

import msgspec
import pytest
import torch
from examined import CARD, examined
from folders import DOCS
from gpus import COUNT, KIND, card
from raised import raises

from autosplit.accelerators import accelerator_kind
from autosplit.cli.main import main
from autosplit.devices import peer_copy_check
from autosplit.devices.catalog import GPUS_VARIABLE
from autosplit.devices.spec import list_devices, parse_devices
from autosplit.errors import DeviceError
from autosplit.tools import collective_check, doctor, measured_rates
from autosplit.tools.doctor import examine
from autosplit.tools.examination import Meeting, SharedResult
from autosplit.tools.inventory import DeviceReport

GIB = 2**30
CPU = torch.device("cpu")


def reported(**changes: object) -> DeviceReport:
    known = DeviceReport(0, 0, "RTX 3090", 24 * GIB, 23 * GIB, 0, "GPU-a", visible=True)
    return replace(known, **changes)


class TestRates:
    @pytest.mark.parametrize(("capability", "has"), [((9, 0), True), ((7, 5), False)])
    def test_float32_by_tensor_cores_is_a_rate_of_its_own(self, monkeypatch, capability, has):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        seen = []

        def rate(_device: object, dtype: torch.dtype, **_options: object) -> float:
            seen.append((dtype, torch.get_float32_matmul_precision()))
            return 1e12 * len(seen)

        monkeypatch.setattr(measured_rates, "matmul_flops", rate)
        found = doctor._flops_of(torch.device("cuda", 0), 2**30)
        assert ("tf32" in found) == has
        assert (torch.float32, "highest") in seen
        assert ((torch.float32, "high") in seen) == has
        assert torch.get_float32_matmul_precision() == "highest"


class TestProblems:
    def test_who_else_holds_memory_is_said_with_a_cure(self):
        assert doctor._problems_of(reported()) == []
        (found,) = doctor._problems_of(reported(used_by_others_bytes=4 * GIB))
        assert found.problem == "cuda:0: other processes use 4 GiB of 24 GiB"
        assert "end them" in found.cure

    def test_a_slow_card_and_one_for_a_single_process_are_named(self):
        assert doctor._problems_of_rates(CARD) == []
        slow = replace(CARD, tflops_of_catalogue={"float16": 0.1}, memory_of_catalogue=0.3)
        texts = [one.problem for one in doctor._problems_of_rates(slow)]
        assert [text.split(" of the")[0] for text in texts] == ["cuda:0 reaches 10%", "cuda:0 reaches 30%"]
        (found,) = doctor._problems_of_rates(replace(CARD, compute_mode="exclusive process"))
        assert "--no-isolate" in found.cure

    def test_simulated_cards_are_refused(self):
        with raises(DeviceError):
            examine("sim:RTX3090")


class TestCards:
    def test_a_file_that_can_not_be_written_loses_nothing(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr(doctor, "examine", lambda *_, **__: examined(CARD))
        assert main(["doctor", "--save", str(tmp_path / "none" / "cards.toml")]) == 2
        printed = capsys.readouterr()
        assert "H200" in printed.out
        assert "Choose a file in an existing folder." in printed.err.replace("\n", " ")

    def test_the_command_of_the_error_makes_sim_know_the_gpu(self, tmp_path, monkeypatch):
        new = replace(CARD, name="NVIDIA GeForce RTX 6090", catalogue=None, usual_link_gb_per_s=None)
        monkeypatch.setattr(doctor, "examine", lambda *_, **__: examined(new))
        monkeypatch.chdir(tmp_path)
        with raises(DeviceError) as caught:
            parse_devices("sim:2xRTX 6090")
        command = re.search("`python -m autosplit (doctor .*?)`", str(caught.value))[1]
        assert main(command.split()) == 0
        monkeypatch.setenv(GPUS_VARIABLE, "gpus.toml")
        assert [device.spec.rates[:8] for device in parse_devices("sim:2xRTX 6090")] == ["measured"] * 2


class TestSharedResults:
    def test_what_is_shared_has_the_rates_and_nothing_private(self, monkeypatch, capsys, tmp_path):
        found = replace(
            examined(replace(CARD, free_bytes=5, used_by_others_bytes=7)),
            notes=("process 4711 of anna",),
            collective=Meeting("nccl", 2, 3.5, "/home/anna/x.py failed", "mend it"),
        )
        monkeypatch.setattr(doctor, "examine", lambda *_, **__: found)
        path = tmp_path / "shared.json"
        assert main(["doctor", "--share", str(path)]) == 0
        text = path.read_text()
        read = msgspec.json.decode(text, type=SharedResult)
        assert read.cards[0].tflops == CARD.tflops
        assert (read.torch, read.collective.gb_per_s, read.schema_version) == (found.torch, 3.5, 2)
        assert not [private for private in ("anna", "4711", "/home", "GPU-") if private in text]
        assert (read.cards[0].free_bytes, read.cards[0].used_by_others_bytes) == (None, None)
        assert "docs/results" in capsys.readouterr().err

    def test_the_table_is_that_of_the_contributed_files(self):
        made = runpy.run_path(str(DOCS / "results.py"))
        assert (DOCS / "results.md").read_text(encoding="utf-8") == made["page"](), "run python docs/results.py"
        assert len([*(DOCS / "results").glob("*.json")]) >= 1

    def test_a_file_with_other_keys_is_refused(self, tmp_path):
        made = runpy.run_path(str(DOCS / "results.py"))
        content = json.loads(next((DOCS / "results").glob("*.json")).read_text())
        (tmp_path / "one.json").write_text(json.dumps({**content, "user": "anna"}))
        with pytest.raises(ValueError, match="unknown keys: user"):
            made["read"](tmp_path / "one.json")
        (tmp_path / "one.json").write_text(json.dumps({**content, "cards": 3}))
        with pytest.raises(msgspec.ValidationError):
            made["read"](tmp_path / "one.json")


@pytest.mark.slow
class TestThisMachine:
    def test_two_processes_meet(self):
        found = collective_check.met([CPU, CPU])
        assert (found.backend, found.ranks, found.failure) == ("gloo", 2, None)
        assert found.gb_per_s > 0.01

    def test_ranks_that_can_not_meet_say_why(self):
        found = collective_check.met([torch.device("cuda", 0), torch.device("cuda", 1)])
        if accelerator_kind() == "cuda":
            pytest.skip("here they can")
        assert found == Meeting("nccl", 2, failure=found.failure, cure=found.cure)
        assert found.failure
        assert "NCCL_DEBUG" in found.cure

    def test_a_processor_is_examined_and_its_model_holds_what_the_plan_says(self, capsys):
        code = main(["doctor", "--devices", "cpu:64MiB,cpu:32MiB", "--json", "--quiet"])
        printed = capsys.readouterr()
        answer = json.loads(printed.out)
        assert printed.err == ""
        assert code == 0
        assert [card["device"] for card in answer["cards"]] == ["cpu:0", "cpu:1"]
        assert answer["training"]["measured_bytes"] == pytest.approx(answer["training"]["predicted_bytes"], rel=0.01)
        assert answer["training"]["measured_samples_per_s"] > 0
        assert answer["collective"] is None
        assert answer["took_s"] < 120


@pytest.mark.gpu
class TestAccelerators:
    @pytest.mark.release  # the stage "doctor" of benchmarks/gpu.py, too
    def test_all_of_it_is_looked_at_and_nothing_private_said(self, capsys, tmp_path):
        saved = tmp_path / "cards.toml"
        assert main(["doctor", "--json", "--quiet", "--save", str(saved)]) == 0
        text = capsys.readouterr().out
        answer = json.loads(text)
        labels = [f"{KIND}:{index}" for index in range(COUNT)]
        assert (answer["kind"], [card["device"] for card in answer["cards"]]) == (KIND, labels)
        assert all(
            one["tflops"]["float32"] > 0 < one["memory_gb_per_s"] and one["launch_s"] > 0 for one in answer["cards"]
        )
        assert all(one["arrives"] and one["gb_per_s"] > 0 for one in answer["copies"])
        ways = [(one["source"], one["destination"]) for one in answer["copies"]]
        assert sorted(ways) == sorted(itertools.permutations(labels, 2))
        if COUNT > 1:
            assert answer["collective"]["gb_per_s"] > 0
        training = answer["training"]
        assert training is not None, answer["problems"]
        assert sum(training["split"]) > 0
        assert training["measured_bytes"] == pytest.approx(training["predicted_bytes"], rel=0.15)
        private = [device.uuid for device in list_devices()]
        assert not [uuid for uuid in private if uuid in text]
        assert "cards." in saved.read_text()

    @pytest.mark.skipif(KIND != "emu", reason="sound cards can't be made to fail")
    def test_copies_that_arrive_as_zeros_are_named_with_a_cure(self, monkeypatch):
        import emulated

        monkeypatch.setattr(peer_copy_check, "_sound", set())
        emulated.copies_arrive_as_zeros()
        try:
            problems: list = []
            assert not doctor._copy_of(card(0), card(1), problems).arrives
        finally:
            emulated.mend()
        assert "arrived as zeros" in problems[0].problem
        assert "IOMMU" in problems[0].problem + problems[0].cure


def test_the_cards_are_read_on_80_columns(monkeypatch, capsys):
    """One table held everything, and broke words: `float` above `64`, `memor` above `y`."""
    rates = dict.fromkeys(("float64", "float32", "tf32", "bfloat16", "float16"), 123.4)
    card = replace(CARD, name="NVIDIA H100 80GB HBM3", tflops=rates, tflops_of_catalogue=dict.fromkeys(rates, 0.75))
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: examined(card, replace(card, tflops={"float32": 1.0})))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any({"device", "memory", "free", "launch"} <= {*line.split()} for line in lines)
    assert any({"TFLOP/s", *rates} <= {*line.split()} for line in lines)
    assert sum("123 (75%)" in line for line in lines) == 1

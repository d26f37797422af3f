"""Comparing machines: arguments, prices, machines that do not fit, and the output."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from folders import ROOT
from handmade import made_plan, only_ddp
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import autosplit
from autosplit.cli.main import main
from autosplit.devices.catalog import SIMULATED_ERRORS
from autosplit.errors import InputError
from autosplit.oom import DoesNotFitError
from autosplit.plan.plan import Plan
from autosplit.sim.compare import Comparison, ComparisonInterrupted, asked_machines, compared
from autosplit.sim.compare_command import print_comparison
from autosplit.tuning import tune

GIB = 2**30


def planned(rate: float, split=(100, 156), **changes):
    return made_plan(split, kind="sim", samples_per_s=rate, **changes)


def one_device_plan(rate: float, **changes):
    return planned(rate, (64,), **changes)


def misfit():
    return DoesNotFitError(
        "it needs 31 GiB\nand may hold 16 GiB; expected less; take less",
        device="sim:0",
        requested_bytes=31 * GIB,
        capacity_bytes=16 * GIB,
    )


def comparison_of(answers, prices=None, **options):
    """Compare machines with a given result for each: a plan or an exception."""
    machines = asked_machines(list(answers), prices)

    def tune_one(machine, timed):
        answer = answers[machine.spec]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return compared(machines, tune_one, **options)


# Arguments


@pytest.mark.parametrize("name", ["2xL4", " sim: 2 x nvidia l4 "])
def test_a_price_finds_its_machine_with_or_without_sim(name):
    machines = asked_machines(["sim:2xA100-40GB", "sim:2xL4"], {name: 1.2})
    assert [machine.price_per_hour for machine in machines] == [None, 1.2]


def test_a_processor_has_a_price_too():
    machines = asked_machines(
        ["cpu:1GiB,cpu:2GiB", "cpu", "sim:L4@8GiB"], {"cpu": 0, "cpu:1GiB,cpu:2GiB": 3, "L4@8GiB": 1}
    )
    assert [machine.price_per_hour for machine in machines] == [3.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ({"2xL4": -1}, "The price for '2xL4' is -1. Expected a price per hour: a number from 0 to 1e+15"),
        ({"2xL4": True}, "is True."),
        (
            {"2xL40S": 1.2},
            "price for '2xL40S', but this machine is not compared. Expected one of 'sim:2xL4', 'cpu:1GiB'. Name",
        ),
        (
            {"2xL4": 1.2, "sim:2xL4": 1.5},
            "sim:2xL4 has two prices, 1.2 and 1.5. Expected one price per machine. Leave one out",
        ),
    ],
)
def test_bad_prices_name_what_was_given(prices, said):
    with pytest.raises(InputError) as raised:
        asked_machines(["sim:2xL4", "cpu:1GiB"], prices)
    assert said in str(raised.value)
    assert "expected" in str(raised.value).lower()


@pytest.mark.parametrize(
    ("devices", "error", "said"),
    [
        ([], InputError, "no devices to compare. Name each machine, as in"),
        ("sim:2xL4", InputError, "devices is 'sim:2xL4'. Expected a list"),
        (
            ["sim:2xL4", "sim:L4+L4"],
            InputError,
            "'sim:L4+L4' and 'sim:2xL4' are the same machine. Expected each machine once",
        ),
    ],
)
def test_bad_machines_are_refused(devices, error, said):
    with pytest.raises(error) as raised:
        asked_machines(devices)
    assert said in str(raised.value)


def test_options_are_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(tune, "tune", lambda *_, **__: pytest.fail("it ran"))
    for bad in ({"n_trials": 0}, {"time_limit_s": -1.0}, {"reserve": "90GiB"}, {"strategy": "best"}, {"seed": -1}):
        with pytest.raises(InputError, match=next(iter(bad))):
            autosplit.compare(lambda: None, devices=["sim:L4"], **bad)


# Arithmetic

RATES = st.floats(1e-3, 1e7)
PRICES = st.one_of(st.none(), st.floats(0.0, 1e6))
SPECS = [f"sim:{count}xL4" for count in range(1, 8)]


@given(st.lists(st.tuples(st.one_of(st.none(), RATES), PRICES), min_size=1, max_size=7))
def test_costs_and_order(rows):
    answers = {spec: misfit() if rate is None else planned(rate) for spec, (rate, _) in zip(SPECS, rows, strict=False)}
    prices = {spec: price for spec, (_, price) in zip(SPECS, rows, strict=False) if price is not None}
    found = comparison_of(answers, prices)
    given_prices = {spec: prices.get(spec) for spec in answers}
    assert {machine.devices: machine.price_per_hour for machine in found.machines} == given_prices
    for machine in found.machines:
        cost = machine.cost_per_million_samples
        assert (cost is None) == (machine.plan is None or machine.price_per_hour is None)
        if cost is not None:
            # The samples that an hour's money buys take an hour.
            assert cost * machine.samples_per_s * 3600 == pytest.approx(machine.price_per_hour * 1e6, rel=1e-9)
    fitting = [machine for machine in found.machines if machine.plan is not None]
    assert list(found.machines[: len(fitting)]) == fitting
    costs = [machine.cost_per_million_samples for machine in fitting]
    known = [cost for cost in costs if cost is not None]
    assert costs[: len(known)] == sorted(known)
    rates = [machine.samples_per_s for machine in fitting if machine.cost_per_million_samples is None]
    assert rates == sorted(rates, reverse=True)
    assert found.sorted_by == ("cost_per_million_samples" if prices else "samples_per_s")
    assert found.best is (fitting[0] if fitting else None)
    json.dumps(found.to_dict(), allow_nan=False)


# Results


@pytest.mark.smoke
def test_a_machine_that_is_too_small_is_a_row_with_the_reason():
    found = comparison_of({"sim:T4": misfit(), "sim:2xL4": planned(5.0)}, {"T4": 0.4})
    assert [machine.devices for machine in found.machines] == ["sim:2xL4", "sim:T4"]
    row = found.to_dict()["machines"][1]
    assert row["plan"] is None
    assert row["misfit"] == {
        "reason": "it needs 31 GiB and may hold 16 GiB; expected less; take less",
        "device": "sim:0",
        "needed_bytes": 31 * GIB,
        "capacity_bytes": 16 * GIB,
    }
    assert (row["samples_per_s"], row["price_per_hour"], row["cost_per_million_samples"]) == (None, 0.4, None)
    assert "it needs 31 GiB" in str(found)


def test_what_runs_is_measured_and_what_is_computed_predicted():
    real = made_plan((4, 8), kind="cpu")
    answers = {"sim:L4": one_device_plan(5.0), "cpu:1GiB,cpu:1GiB": only_ddp(real), "cpu": made_plan((8,), kind="cpu")}
    found = comparison_of(answers)
    assert {machine.devices: machine.predicted for machine in found.machines} == {
        "sim:L4": True,
        "cpu:1GiB,cpu:1GiB": True,  # DDP's layout was solved and not run
        "cpu": False,
    }
    joint = only_ddp(real, measured=True)
    assert not comparison_of({"cpu:1GiB,cpu:1GiB": joint}).machines[0].predicted


@pytest.mark.parametrize("complete", [False, True])
def test_an_interrupted_search_is_shown_as_the_best_so_far(complete):
    best = planned(5.0, complete=complete)  # complete for only one of the precisions
    with pytest.raises(ComparisonInterrupted) as raised:
        comparison_of({"sim:2xL4": tune.TuningInterrupted(best), "sim:T4": misfit()})
    found = raised.value.comparison
    assert (found.not_compared, found.complete) == (("sim:T4",), False)
    assert found.to_dict()["machines"][0]["complete"] is False
    assert any("The search for sim:2xL4 was interrupted" in note for note in found.notes)


def test_the_errors_that_are_quoted_are_those_that_were_measured():
    found = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text(encoding="utf-8"))
    held_out = [found["step times"][f"timm RTX3090 fp16 {layout} held out"] for layout in ("nchw", "nhwc")]
    time, memory = SIMULATED_ERRORS
    assert f"for {sum(half['steps'] for half in held_out)} steps of image models" in time
    assert f"within {max(half['median'] for half in held_out):.0%}" in time
    assert f"within {max(half['p90'] for half in held_out):.0%}" in time
    language = found["step times"]["transformers, all cards"]
    assert f"For {language['steps']} steps of transformers" in time
    assert all(f"within {language[share]:.0%}" in time for share in ("median", "p90"))
    largest = found["largest batch"]
    assert f"of {largest['models']} largest batches" in memory
    assert f" {largest['inside']:.0%} are predicted within" in memory
    assert f"{largest['above']:.0%} are predicted too large" in memory


# The table


def printed(comparison: Comparison, width: int) -> str:
    stream = io.StringIO()
    print_comparison(comparison, Console(file=stream, width=width, force_terminal=False, color_system=None))
    return stream.getvalue()


def rented() -> Comparison:
    split = (12, *[35] * 7)
    answers = {
        "sim:8xL4": planned(31234.5, split),
        "sim:A100-40GB": one_device_plan(20000.0),
        "sim:T4": misfit(),
        "cpu": made_plan((8,), kind="cpu", samples_per_s=2.5),
    }
    return comparison_of(answers, {"8xL4": 4.8, "A100-40GB": 1.9, "cpu": 0.0})


def test_the_table_is_sorted_marked_and_says_what_it_does_not_know():
    lines = printed(rented(), 120).splitlines()
    assert lines[0] == "some are predicted: for GPUs that this machine does not have"
    assert lines[1] == "sorted by the cost of 1M samples"
    rows = [line.split() for line in lines if line.strip().startswith(("sim:", "cpu"))]
    assert [row[0] for row in rows] == ["cpu", "sim:A100-40GB", "sim:8xL4", "sim:T4"]
    assert [row[-1] for row in rows] == ["measured", "predicted", "predicted", "predicted"]
    text = " ".join(" ".join(lines).split())
    assert "(12, 7x35) = 257, 2 steps 31,234" in text
    assert "batch 64, 8 steps 20,000 6 GiB 1.90 0.0264 predicted" in text
    assert "does not fit: sim:0 needs 31 GiB, has 16 GiB" in text
    assert "samples/s" in text
    assert "that the prediction was not fitted to" in text


# The command line

HEAD = "import torch, autosplit\n"
WORKLOAD = f"{HEAD}workload = autosplit.Workload(torch.nn.Linear(3, 1), torch.randn(4, 3))\n"
BOTH = ("--devices", "sim:2xL4", "--devices", "sim:T4")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write train.py into the current folder; undo what loading it leaves in the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(text=WORKLOAD):
        Path("train.py").write_text(text)
        return "train.py"

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("autosplit_file_"):
            del sys.modules[name]


@pytest.fixture
def answers(monkeypatch):
    """Replace tune by a function with a result for each device spec. `calls` has its arguments."""

    class Answers(dict):
        calls: list

        def __call__(self, workload, **keywords):
            self.calls.append(keywords)
            answer = self[keywords["devices"]]
            if isinstance(answer, BaseException):
                raise answer
            return answer

    found = Answers({"sim:2xL4": planned(9.0), "sim:T4": one_device_plan(5.0)})
    found.calls = []
    monkeypatch.setattr(tune, "tune", found)
    return found


def test_flags_become_keywords_of_tune(script, answers, capsys):
    flags = ["--strategy", "balanced", "--precision", "bf16", "--effective-batch-size", "512", "--seed", "3"]
    flags += ["--max-batch-size", "300", "--reserve", "1GiB", "--n-trials", "7"]
    flags += ["--profile", "refresh", "--name", "mine", "--no-isolate", "--quiet"]
    assert main(["compare", script(), *BOTH, *flags]) == 0
    same = {
        "strategy": "balanced",
        "precision": "bf16",
        "effective_batch_size": 512,
        "max_batch_size": 300,
        "reserve": "1GiB",
        "n_trials": 7,
        "profile": "refresh",
        "name": "mine",
        "seed": 3,
        "isolate": False,
    }
    assert all(call.pop("progress") is not None for call in answers.calls), "a bar would be drawn without one"
    assert answers.calls == [{"devices": spec, **same} for spec in ("sim:2xL4", "sim:T4")]
    assert capsys.readouterr().err == ""


def test_exit_codes_of_misfits(script, answers, capsys):
    answers["sim:T4"] = misfit()
    assert main(["compare", script(), *BOTH]) == 0
    assert "does not fit" in capsys.readouterr().out
    answers["sim:2xL4"] = misfit()
    assert main(["compare", script(), *BOTH]) == 3
    out, err = capsys.readouterr()
    assert out.count("does not fit") == 2
    assert (
        err == "error: The workload fits none of the 2 machines. The table shows the memory that each machine lacks.\n"
    )


def test_an_interrupt_on_the_command_line(script, answers, capsys):
    answers["sim:T4"] = tune.TuningInterrupted(None)
    assert main(["compare", script(), *BOTH]) == 4
    out, err = capsys.readouterr()
    assert "sim:2xL4" in out
    assert "- not compared: sim:T4" in out
    assert err.startswith(
        "error: The comparison was interrupted, so only the finished machines are shown. Run the command again"
    )
    answers["sim:2xL4"] = tune.TuningInterrupted(None)
    assert main(["compare", script(), *BOTH]) == 4
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: The command was interrupted before it had a result. Run it again.\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no devices to compare"),
        ([*BOTH, "--devices", "sim:T4"], "are the same machine"),
        ([*BOTH, "--price", "2xL4"], "--price '2xL4' is not a machine and its price per hour"),
        ([*BOTH, "--price", "2xL4=$1.2"], "--price '2xL4=$1.2' is not"),
        (
            [*BOTH, "--price", "3xL4=1"],
            "price for '3xL4', but this machine is not compared. Expected one of 'sim:2xL4', 'sim:T4'",
        ),
        ([*BOTH, "--output", "x.json"], "--output"),
    ],
)
def test_bad_flags_are_refused_before_the_file_runs(script, answers, capsys, arguments, said):
    assert main(["compare", script("raise SystemError('the file ran')"), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err
    assert answers.calls == []


def test_tune_is_for_one_machine(script, answers, capsys):
    assert main(["tune", script(), *BOTH]) == 2
    assert capsys.readouterr().err == (
        "error: You gave --devices 2 times, but tune plans for one machine. To compare machines, run "
        "autosplit compare train.py --devices sim:2xL4 --devices sim:T4\n"
    )


def test_one_of_several_processes_is_refused(script, answers, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["compare", script(), *BOTH]) == 2
    assert "in a job of several processes, but it needs only one process" in capsys.readouterr().err


def test_simulated_machines_are_compared_and_remembered(script, capsys):
    command = ["compare", script(), "--devices", "sim:L4", "--devices", "sim:T4@1KiB", "--n-trials", "1"]
    command += ["--max-batch-size", "8", "--price", "L4=0.5", "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    fits, too_small = first["machines"]
    assert (fits["devices"], fits["plan"]["batch_size"], fits["predicted"]) == ("sim:L4", 8, True)
    assert fits["cost_per_million_samples"] == pytest.approx(0.5 / 3600 * 1e6 / fits["samples_per_s"])
    assert fits["headroom_bytes"] < 24 * GIB
    assert too_small["misfit"]["device"] == "sim:0"
    assert too_small["misfit"]["needed_bytes"] > too_small["misfit"]["capacity_bytes"] == 1024
    assert main(["tune", "train.py", "--devices", "sim:L4", "--max-batch-size", "8", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.notes[0].kind == "from-profile"  # the comparison saved the profile that tune returns
    assert plan.samples_per_s == fits["samples_per_s"]

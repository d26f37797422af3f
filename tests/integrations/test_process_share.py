"""Shared code of the integrations: a process's part of a plan, its loader, loss weights and backward."""

from __future__ import annotations

import math
import pickle
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shared_training as shared
import torch
from handmade import changed_layout, changed_plan
from hypothesis import assume, given
from hypothesis import strategies as st
from noted import noted
from plans import simulated_plan
from raised import raises
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from autosplit.ddp.rendezvous import Place, place_here
from autosplit.errors import DeviceError, InputError, PlanError
from autosplit.integrations.loss_mean import TOLERANCE, Samples, count_by, examine_others, warn_of_finding
from autosplit.integrations.process_share import Share, Uncounted, find_share, share_of
from autosplit.integrations.share_loader import MARK, MarkingDataset, loader_options, taken_mark
from autosplit.integrations.weighted_backward import weighed, weighted_backward
from autosplit.parallel.loss_weights import UnevenLossWarning
from autosplit.plan.other_model import OtherModelWarning
from autosplit.plan.record import without_notes
from autosplit.rng import RngState


def as_job(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))


def made_share(rank: int, sizes: tuple[int, ...], effective: int) -> Share:
    return share_of(shared.shares_plan(sizes, effective), Place(rank, len(sizes)))


class TestShare:
    def test_a_rank_has_its_own_size_and_the_jobs_steps(self):
        share = made_share(1, (7, 1), 20)
        assert (share.batch_size, share.num_processes, share.wraps) == (1, 2, False)
        assert (share.accumulation_steps, share.effective_batch_size) == (3, 20)
        assert str(share) == "7 + 1 samples per forward, 3 forwards per optimizer step of 20"

    def test_one_process_has_all_devices(self):
        share = share_of(shared.shares_plan((5, 3), 20, in_one=True), Place(0, 1))
        assert (share.batch_size, share.num_processes, share.wraps) == (8, 1, True)
        assert str(share) == "5 + 3 samples per forward, 3 forwards per optimizer step of 20"
        assert not made_share(0, (8,), 40).wraps

    def test_a_plan_for_other_jobs_is_refused(self):
        plan = shared.shares_plan((7, 1), 20)
        with raises(PlanError, "world-size", "2", "s", "3"):
            share_of(plan, Place(0, 3))
        with raises(PlanError, "2"):
            share_of(plan, Place(0, 1))
        with raises(PlanError):
            share_of(shared.shares_plan((5, 3), 20, in_one=True), Place(0, 2))

    def test_a_plan_for_a_sharded_model_is_refused(self):
        """The batch sizes of such a plan may run out of memory with a whole model on each rank."""
        plan = changed_layout(shared.shares_plan((7, 1), 20), shard_size=2)
        with raises(PlanError, "Pass a plan from autosplit.tune"):
            share_of(plan, Place(0, 2))

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_a_plan_for_simulated_cards_is_refused(self, world_size):
        with raises(DeviceError):
            share_of(simulated_plan(), Place(0, world_size))

    def test_another_device_is_refused(self):
        share = made_share(0, (8,), 40)
        share.refuse_other_job(1, torch.device("cpu"), "it")
        with raises(DeviceError, "it", "cuda:0", "0", "8"):
            share.refuse_other_job(1, torch.device("cuda:0"), "it")
        made_share(1, (7, 1), 20).refuse_other_job(2, torch.device("cpu"), "it")

    def test_a_tool_with_other_processes_is_refused(self):
        with raises(PlanError, "it", "1 process", "2 processes", "2"):
            made_share(1, (7, 1), 20).refuse_other_job(1, torch.device("cpu"), "it")
        with raises(PlanError, "it", "2 processes", "1 process", "1"):
            made_share(0, (8,), 40).refuse_other_job(2, torch.device("cpu"), "it")

    def test_batchnorms_of_a_process_without_a_share_are_refused(self):
        """A process without samples runs an extra sample with weight 0, but a BatchNorm counted it."""
        share = made_share(1, (7, 1), 16)
        sampler = share.batch_sampler(50)
        share.refuse_uncounted_batchnorms(nn.Linear(2, 2), sampler)
        norm = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
        with raises(InputError, "2", "(2, 0)"):
            share.refuse_uncounted_batchnorms(norm, sampler)
        share.refuse_uncounted_batchnorms(norm, share.batch_sampler(50, drop_last=True))

    @pytest.mark.parametrize("in_one", [False, True], ids=["two ranks", "two devices"])
    def test_a_last_batch_with_a_sample_too_few_for_a_batchnorm_is_refused(self, in_one):
        plan = changed_plan(shared.shares_plan((2, 2), 4, in_one=in_one), least_batch=2)
        share = share_of(plan, Place(0, 1 if in_one else 2))
        assert len(share.batch_sampler(8)) == 2
        with raises(InputError, "3"):
            share.batch_sampler(7)

    @given(
        sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
        effective=st.integers(1, 40),
        num_samples=st.integers(1, 90),
        epoch=st.integers(0, 2),
        drop_last=st.booleans(),
    )
    def test_the_ranks_see_every_sample_once(self, sizes, effective, num_samples, epoch, drop_last):
        assume(sum(sizes) <= effective)
        assume(not drop_last or num_samples >= effective)
        plan = shared.shares_plan(tuple(sizes), effective)
        ranks = []
        for rank in range(len(sizes)):
            share = share_of(plan, Place(rank, len(sizes)))
            sampler = share.batch_sampler(num_samples, shuffle=True, seed=3, drop_last=drop_last)
            sampler.set_epoch(epoch)
            ranks.append([*sampler])
            assert len(sampler) == len(ranks[-1])
            assert all(ranks[-1]), "a micro-batch without samples could not be run"
        counted = [index for found in ranks for batch in found if not isinstance(batch, Uncounted) for index in batch]
        assert len(counted) == num_samples - drop_last * (num_samples % effective)
        assert len(set(counted)) == len(counted)
        assert set(counted) <= set(range(num_samples))


class TestFindShare:
    def test_nothing_given_and_nothing_remembered(self):
        assert find_share(None, parameters=None) is None

    def test_a_file_and_the_environment(self, tmp_path, monkeypatch):
        as_job(monkeypatch, 1, 2)
        plan, path = shared.shares_plan((7, 1), 20), tmp_path / "plan.json"
        plan.save(path)
        assert find_share(path, parameters=None) == find_share(plan, parameters=None)
        monkeypatch.setenv("AUTOSPLIT_PROFILE", str(path))
        found = find_share(None, parameters=None)
        assert (found.place.rank, found.batch_size) == (1, 1)

    def test_no_path(self):
        with raises(InputError, "''"):
            find_share("", parameters=None)

    def test_of_what_is_remembered_the_newest_that_fits(self, monkeypatch, capfd):
        alone, ranks = (
            replace(shared.shares_plan(*job), workload={"parameters": 12}) for job in (((8,), 40), ((7, 1), 20))
        )
        larger = changed_plan(alone, workload={"parameters": 13}, effective_batch_size=41, accumulation_steps=6)
        remembered = [alone, ranks, replace(alone, notes=noted("again")), larger]
        monkeypatch.setattr(
            "autosplit.integrations.process_share.usable_here",
            lambda: tuple((Path("ab.json"), plan) for plan in remembered),
        )
        assert without_notes(find_share(None, parameters=12).plan) == without_notes(alone)
        assert find_share(None, parameters=13).plan == larger
        assert find_share(None, parameters=14) is None
        remembered.append(replace(larger, workload={"parameters": 12}))
        remembered.reverse()  # newest first
        assert find_share(None, parameters=12).plan.effective_batch_size == 41
        assert "the newest of several saved plans" in capfd.readouterr().err
        remembered.reverse()
        as_job(monkeypatch, 1, 2)
        assert find_share(None, parameters=12).plan == ranks
        as_job(monkeypatch, 1, 3)
        assert find_share(None, parameters=12) is None

    def test_of_an_unknown_model_nothing_is_remembered(self, monkeypatch):
        """The only plan of the cache, for another model, set the batch size of any Lightning training."""
        plans = [shared.shares_plan((8,), 40), replace(shared.shares_plan((8,), 40), workload={"parameters": 12})]
        monkeypatch.setattr(
            "autosplit.integrations.process_share.usable_here", lambda: tuple((None, plan) for plan in plans)
        )
        assert find_share(None, parameters=None) is None


class TestAnotherModel:
    plan = replace(shared.shares_plan((8,), 40), workload={"model": "Large\x1b[31m", "parameters": 12_345})

    def test_it_is_warned_of(self):
        with pytest.warns(
            OtherModelWarning, match=r"for Large\S* with 12,345 parameters, but this Linear has 6\."
        ) as told:
            share_of(self.plan, place_here()).check_model(nn.Linear(2, 2))
        assert "\x1b" not in str(told[0].message)

    @pytest.mark.parametrize("model", [nn.Linear(12_344, 1), nn.LazyLinear(3), lambda: None, None])
    def test_the_same_and_the_unknown_are_not(self, model):
        share_of(self.plan, place_here()).check_model(model)


class Rows(Dataset[Any]):
    """Samples by index, several at once, and an extra attribute."""

    name = "rows"

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return {"x": torch.tensor(index)}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def made_loader(share: Share, dataset: Any = None, **options: Any) -> DataLoader[Any]:
    loader = DataLoader(Rows() if dataset is None else dataset, **options)
    return DataLoader(**loader_options(loader, share, shuffle=True, seed=3, drop_last=False, marks=True))


class TestLoader:
    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("dataset", [Rows(), [{"x": torch.tensor(index)} for index in range(50)]])
    def test_a_batch_without_a_share_is_marked(self, dataset, workers):
        seen, unmarked = [], 0
        for rank in (0, 1):
            for batch in made_loader(made_share(rank, (7, 1), 12), dataset, num_workers=workers):
                counts = taken_mark(batch) != 0
                assert set(batch) == {"x"}
                seen += batch["x"].tolist() if counts else []
                unmarked += not counts
        assert sorted(seen) == [*range(50)]
        assert unmarked == 5, "rank 1 has none of 4 + 4 + 2 + 2 samples, and 1 of 2 in the last step"

    def test_the_data_set_travels_to_workers(self):
        copy = pickle.loads(pickle.dumps(MarkingDataset([1, 2])))
        assert (len(copy), copy[1], copy.__getitems__([0, 1])) == (2, 2, [1, 2])
        with pytest.raises(AttributeError, match="nothing"):
            _ = copy.nothing
        assert MarkingDataset(Rows()).name == "rows"

    def test_a_batch_that_can_not_be_marked_is_refused(self):
        loader = made_loader(made_share(1, (7, 1), 12), collate_fn=lambda samples: [sample["x"] for sample in samples])
        with raises(InputError, "list"):
            list(loader)

    def test_only_a_mark_is_taken_off(self):
        batch = {"x": 1, MARK: 0}
        assert taken_mark(batch) == 0
        assert taken_mark(batch) is None
        assert batch == {"x": 1}
        assert taken_mark(torch.ones(2)) is None


LABELS = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100], [1, -100, 2, 3]])


class TestCounting:
    def test_each_rule(self):
        batch = {"x": torch.zeros(3, 4), "labels": LABELS}
        counts = {rule: count_by(rule, batch) for rule in ("samples", "labels", "shifted labels")}
        assert counts == {"samples": 3, "labels": 9, "shifted labels": 6}
        assert count_by("shifted labels", {"shift_labels": LABELS, "labels": LABELS}) == 9
        assert count_by("labels", {"x": torch.zeros(3, 4)}) == 3

    @given(
        rule=st.sampled_from(["samples", "labels", "shifted labels"]),
        lengths=st.lists(st.integers(2, 9), min_size=3, max_size=9),
        seed=st.integers(0, 99),
    )
    def test_the_rule_of_a_loss_is_found(self, rule, lengths, seed):
        """Found from the loss only, whatever the tool assumes. The lengths must differ to distinguish the rules."""
        generator = torch.Generator().manual_seed(seed)
        labels = torch.full((len(lengths), 9), -100)
        for row, length in enumerate(lengths):
            labels[row, :length] = 1
        values = torch.rand(len(lengths), 9, generator=generator, dtype=torch.float64)
        assume(len(set(lengths[:8])) > 1)

        def loss(batch: dict[str, torch.Tensor]) -> float:
            kept = batch["labels"].ne(-100)
            kept[:, 0] &= rule != "shifted labels"
            each = (batch["x"] * kept).sum(1)
            return float(each.sum() / kept.sum() if rule != "samples" else (each / kept.sum(1)).mean())

        found, error, *_ = examine_others(loss, {"x": values, "labels": labels}, otherwise="labels")
        assert error < 1e-9
        assert found == rule

    def test_one_label_a_sample(self):
        """A shifted single label leaves none. That rule then gives no result, but the others are still tried."""
        batch = {"x": torch.rand(4, 3), "labels": torch.tensor([0, 1, 2, 0])}
        mean = lambda rows: float(F.cross_entropy(rows["x"], rows["labels"]))
        rule, error, *_ = examine_others(mean, batch, otherwise="labels")
        assert (rule, error < 1e-6) == ("labels", True)
        _, error, *_rest = examine_others(lambda rows: mean(rows) ** 2 * len(rows["x"]) ** 2, batch, otherwise="labels")
        assert error > TOLERANCE

    @pytest.mark.parametrize("labels", [None, LABELS, torch.tensor([0, 1, 2])])
    def test_a_sum(self, labels):
        """A sum has no count."""
        batch = {"x": torch.rand(3, 4)} if labels is None else {"x": torch.rand(3, 4), "labels": labels}
        rule, error, *_ = examine_others(lambda rows: float(rows["x"].sum()), batch, otherwise="samples")
        assert (rule, error < 1e-6) == ("sum", True)

    @pytest.mark.parametrize(
        "batch",
        [
            {"x": torch.zeros(1, 4), "labels": LABELS[:1]},
            {"x": torch.zeros(2, 4), "labels": torch.full((2, 4), -100)},
            {"labels": "none"},
        ],
    )
    def test_where_nothing_can_be_told_it_is_as_said(self, batch):
        rule, error, *_ = examine_others(lambda rows: 1.0, batch, otherwise="labels")
        assert (rule, math.isnan(error)) == ("labels", True)

    def test_a_loss_that_is_no_number_tells_nothing(self):
        batch = {"x": torch.zeros(3, 4), "labels": LABELS}
        assert examine_others(lambda rows: math.nan, batch, otherwise="labels")[0] == "labels"


class TestExamining:
    """Only one pair of samples and no ragged batch was compared, so no reduction was detected in both cases."""

    @pytest.mark.parametrize("labels", [[0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0]])
    def test_class_weights_are_found_whichever_samples_share_a_class(self, labels):
        weights = torch.tensor([0.3, 2.7])
        batch = {"x": torch.randn(6, 2).requires_grad_(), "labels": torch.tensor(labels)}
        finding = examine_others(
            lambda rows: F.cross_entropy(rows["x"], rows["labels"], weight=weights), batch, otherwise="samples"
        )
        assert finding.rule == "cross entropy"
        assert finding.counts(batch) == pytest.approx(float(weights[batch["labels"]].sum()))
        assert str(finding) == "a mean over the class weights of the labels that are not -100"

    @pytest.mark.parametrize("labels", [[0, 0, 0, 1, 1, 1], [1, 1, 0, 1, 0, 1]])
    def test_weights_that_are_in_no_graph_are_warned_of(self, labels):
        """They are detached. A pair of samples of one class does not show them, but the other pairs do."""
        batch = {"x": torch.rand(6), "labels": torch.tensor(labels)}
        weigh = lambda rows: 0.3 + 2.4 * rows["labels"]
        finding = examine_others(
            lambda rows: float((rows["x"] * weigh(rows)).sum() / weigh(rows).sum()), batch, otherwise="samples"
        )
        assert finding.error > TOLERANCE
        with pytest.warns(UnevenLossWarning, match=r"The loss is not a mean over .*Pass count= to the Trainer"):
            warn_of_finding(finding, where="the Trainer")

    def test_a_compiled_model_runs_eagerly(self):
        """It would be compiled for each number of samples."""
        compiled = []
        weights = torch.tensor([1.0, 5.0, 2.0])

        def backend(graph, _inputs):
            compiled.append(graph)
            return graph.forward

        loss = torch.compile(lambda x, labels: F.cross_entropy(x, labels, weights), backend=backend)
        batch = {"x": torch.randn(8, 3), "labels": torch.randint(3, (8,))}
        finding = examine_others(lambda rows: loss(**rows), batch, otherwise="samples")
        assert "class weights" in str(finding)
        assert not compiled

    def test_another_ignored_label_is_counted_in_any_batch(self):
        batch = (torch.randn(4, 3).requires_grad_(), torch.tensor([0, 255, 2, 1]))
        finding = examine_others(lambda rows: F.cross_entropy(*rows, ignore_index=255), batch, otherwise="samples")
        assert finding.counts((batch[0], torch.tensor([255, 255, 0, 1]))) == 2

    def test_ragged_samples_are_collated_instead_of_cut(self):
        data = [{"x": torch.rand(4), "boxes": torch.rand(1 + index % 3, 4)} for index in range(10)]

        def collate(samples):
            return {
                "x": torch.stack([one["x"] for one in samples]),
                "labels": [{"boxes": one.pop("boxes")} for one in samples],  # as some collators do
            }

        def loss(rows):
            pairs = zip(rows["x"], rows["labels"], strict=True)
            return sum(((x - one["boxes"]) ** 2).mean() for x, one in pairs) / len(rows["x"])

        finding = examine_others(loss, Samples.in_data_set(data, collate), otherwise="labels")
        assert (finding.rule, finding.error < 1e-6) == ("samples", True)
        assert count_by("samples", collate([dict(one) for one in data[:3]]), 3) == 3
        assert all("boxes" in one for one in data)

    def test_samples_come_from_all_over_a_data_set(self):
        data = [torch.tensor([index]) for index in range(80)]
        batch = Samples.in_data_set(data, torch.stack).batch_of(range(8))
        assert batch.flatten().tolist() == [*range(0, 80, 10)]

    def test_lists_are_cut_like_tensors(self):
        batch = {"x": torch.rand(4), "names": ["a", "bb", "ccc", "dddd"]}
        finding = examine_others(
            lambda rows: sum(float(x) * len(name) for x, name in zip(*rows.values(), strict=True)) / len(rows["x"]),
            batch,
            otherwise="labels",
        )
        assert (finding.rule, finding.error < TOLERANCE) == ("samples", True)

    @pytest.mark.parametrize(
        ("batch", "loss", "why"),
        [
            ({"x": torch.rand(1, 2)}, lambda rows: float(rows["x"].mean()), "there is only one sample"),
            ({"x": torch.rand(4), "y": torch.rand(3, 5)}, lambda rows: 1.0, "disagree on the batch size"),
            ({"x": torch.rand(4)}, lambda rows: float(torch.rand(())), "not the same twice"),
            (
                {"x": torch.rand(4), "positive": torch.tensor([1.0, 0.0, 1.0, 1.0])},
                lambda rows: float(rows["x"].sum() / rows["positive"].sum()),
                "one sample alone has no finite loss",
            ),
            ({"x": torch.rand(4)}, lambda rows: math.nan, "fewer than two samples have a finite loss"),
            (
                {"x": torch.rand(4)},
                lambda rows: math.inf if len(rows["x"]) > 1 else 1.0,
                "the loss of several samples is not finite",
            ),
        ],
    )
    def test_what_could_not_be_examined_is_warned_of(self, batch, loss, why):
        torch.manual_seed(0)
        finding = examine_others(loss, batch, otherwise="samples")
        assert math.isnan(finding.error)
        with pytest.warns(
            UnevenLossWarning,
            match=rf"(?i)could not examine what the loss is a mean over.*{why}(?s:.*)Pass count= to Shares",
        ):
            warn_of_finding(finding, where="Shares")


class TestWeighing:
    def test_a_weight_is_on_the_gradient(self):
        model = nn.Linear(2, 1)
        weighted_backward(torch.Tensor.backward, model(torch.ones(1, 2)).sum(), 0.25, [model])
        assert model.weight.grad.tolist() == [[0.25, 0.25]]

    @pytest.mark.parametrize("value", [math.nan, math.inf, 1.0])
    def test_no_weight_sends_zeros_whatever_the_loss(self, value):
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        kept = torch.tensor([[3.0, 4.0]])
        model.weight.grad = kept.clone()
        weighted_backward(torch.Tensor.backward, model(torch.full((1, 2), value)).sum() / 0, 0.0, [model])
        assert torch.equal(model.weight.grad, kept)
        weighted_backward(torch.Tensor.backward, model(torch.ones(1, 2)).sum(), 1.0, [model])
        assert torch.equal(model.weight.grad, kept + 1), "the hooks are off again"

    def test_the_hooks_go_where_the_backward_fails(self):
        model = nn.Linear(2, 1)

        def failing(loss: torch.Tensor) -> None:
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            weighted_backward(failing, model(torch.ones(1, 2)).sum(), 0.0, [model])
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[1.0, 1.0]]


class Twice:
    """A user's batch sampler."""

    def __iter__(self):
        yield from ([0, 0], [1, 1])

    def __len__(self):
        return 2


class ByLength(Sampler[int]):
    """A sampler that shuffles and then sorts within groups, by one of three generators."""

    def __init__(self, draws_by: str) -> None:
        self.generator = torch.Generator() if draws_by == "its own" else None
        self.draws_by = draws_by

    def __len__(self):
        return 50

    def __iter__(self):
        drawn = [*range(50)]
        if self.draws_by == "python":
            random.shuffle(drawn)
        elif self.draws_by == "numpy":
            np.random.shuffle(drawn)  # noqa: NPY002
        else:
            drawn = torch.randperm(50, generator=self.generator).tolist()
        return iter([one for begin in range(0, 50, 10) for one in sorted(drawn[begin : begin + 10])])


class Endless:
    def __iter__(self):
        while True:
            yield from range(50)


class ByChance:
    """Draws with a generator that no seed reaches, so each process would get another order."""

    def __init__(self):
        self.rng = np.random.default_rng()

    def __iter__(self):
        return iter(self.rng.permutation(50))


class TestOrder:
    """The loader's own order was ignored: samples of a weighted sampler came unweighted."""

    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_what_the_loader_does_the_shares_do(self, shuffle, drop_last):
        share = made_share(0, (8,), 16)
        loader = DataLoader(Rows(), batch_size=4, shuffle=shuffle, drop_last=drop_last)
        sampler = loader_options(loader, share, seed=0)["batch_sampler"]
        assert (sampler.shuffle, sampler.drop_last) == (shuffle, drop_last)
        sampler = loader_options(loader, share, shuffle=not shuffle, seed=0, drop_last=not drop_last)["batch_sampler"]
        assert (sampler.shuffle, sampler.drop_last) == (not shuffle, not drop_last), "the keywords have priority"

    def test_samples_that_are_dealt_out_are_those_of_all(self):
        dealt = DistributedSampler(Rows(), num_replicas=2, rank=1, shuffle=True)
        sampler = loader_options(DataLoader(Rows(), sampler=dealt), made_share(0, (8,), 16), seed=0)["batch_sampler"]
        assert (sampler.num_samples, sampler.shuffle) == (50, True)

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"sampler": WeightedRandomSampler([1.0] * 50, 50)}, "WeightedRandomSampler"),
            ({"sampler": SubsetRandomSampler([1, 2])}, "SubsetRandomSampler"),
            ({"sampler": RandomSampler(range(50), replacement=True)}, "RandomSampler"),
            ({"sampler": RandomSampler(range(50), num_samples=9)}, "RandomSampler"),
            ({"sampler": [*range(49), 48]}, "list"),
            ({"sampler": ["a"] * 50}, "list"),
            ({"sampler": iter(range(50))}, "range_iterator"),
            ({"sampler": Endless()}, "Endless"),
            ({"sampler": ByChance()}, "ByChance"),
            ({"batch_sampler": Twice()}, "Twice"),
        ],
    )
    def test_a_sampler_that_chooses_is_refused(self, options, named):
        with raises(InputError, str(named)):
            loader_options(DataLoader(Rows(), **options), made_share(0, (8,), 16), seed=0)

    @pytest.mark.parametrize("draws_by", ["torch", "its own", "python", "numpy"])
    def test_a_sampler_that_groups_is_taken(self, draws_by):
        """It raised an error, so training grouped by length could not use a plan."""
        ranks = []
        for rank in range(2):
            torch.manual_seed(rank)
            random.seed(rank)
            loader = DataLoader(Rows(), batch_size=4, sampler=ByLength(draws_by))
            before = RngState([] if loader.sampler.generator is None else [loader.sampler.generator])
            state = torch.get_rng_state(), random.getstate()
            sampler = loader_options(loader, made_share(rank, (7, 1), 20), seed=3)["batch_sampler"]
            epochs = []
            for epoch in (0, 1, 0):
                sampler.set_epoch(epoch)
                epochs.append([[] if isinstance(batch, Uncounted) else [*batch] for batch in sampler])
            assert torch.equal(state[0], torch.get_rng_state())
            assert state[1] == random.getstate()
            before.put_back()
            assert epochs[0] == epochs[2] != epochs[1]
            ranks.append(epochs[0])
        together = [sample for pair in zip(*ranks, strict=True) for part in pair for sample in part]
        assert sorted(together) == [*range(50)]
        assert together[:10] == sorted(together[:10]), "they are cut in the sampler's order"

    def test_a_sampler_is_left_as_it_was(self):
        sampler, inner = ByLength("torch"), torch.Generator()
        sampler.sampler = RandomSampler(range(50), generator=inner)  # the generators that it may use
        before = inner.get_state()
        loader_options(DataLoader(Rows(), batch_size=4, sampler=sampler), made_share(0, (8,), 16), seed=0)
        assert torch.equal(inner.get_state(), before)

    def test_an_epoch_that_repeats_samples_is_refused_when_it_is_drawn(self):
        """Only the first epoch was checked. A later epoch trained on one sample repeatedly."""

        class Later(ByLength):
            epoch = 0

            def set_epoch(self, epoch):
                self.epoch = epoch

            def __iter__(self):
                return iter([0] * 50) if self.epoch else super().__iter__()

        loader = DataLoader(Rows(), batch_size=4, sampler=Later("torch"))
        sampler = loader_options(loader, made_share(0, (8,), 16), seed=0)["batch_sampler"]
        assert sorted(one for batch in sampler for one in batch) == [*range(50)]
        sampler.set_epoch(1)
        with raises(InputError, "Later", "1", "50"):
            list(sampler)

    @pytest.mark.parametrize("kind", ["arrays", "tensors"])
    def test_batches_may_be_arrays(self, kind):
        parts = torch.arange(50).split(7)
        batches = [part.numpy() for part in parts] if kind == "arrays" else [*parts]
        loader = DataLoader(Rows(), batch_sampler=batches)
        sampler = loader_options(loader, made_share(0, (8,), 16), seed=0)["batch_sampler"]
        assert [one for batch in sampler for one in batch] == [*range(50)]

    def test_batches_of_like_length_are_taken_in_their_order(self):
        buckets = [[*range(begin, min(begin + 6, 50))] for begin in range(0, 50, 6)][::-1]
        loader = DataLoader(Rows(), batch_sampler=buckets)
        sampler = loader_options(loader, made_share(0, (8,), 16), seed=0)["batch_sampler"]
        assert [one for batch in sampler for one in batch] == [one for bucket in buckets for one in bucket]


class TestWeighed:
    @given(
        sizes=st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any),
        effective=st.integers(1, 20),
        num_samples=st.integers(1, 45),
        where=st.integers(0, 99),
        length=st.integers(1, 99),
    )
    def test_the_weights_of_a_step_add_up_also_of_a_part_of_it(self, sizes, effective, num_samples, where, length):
        """An epoch that ended within a step (Lightning's limit_train_batches) had half of the step's gradient."""
        plan = shared.shares_plan(tuple(sizes), effective)
        weights: Counter[int] = Counter()
        for rank in range(len(sizes)):
            share = share_of(plan, Place(rank, len(sizes)))
            sampler = share.batch_sampler(num_samples)
            step_of = [index for index, step in enumerate(sampler.schedule) for _ in step.micro_batch_sizes]
            batches, begin = [*sampler], where % len(sampler)
            end = min(begin + length, len(sampler))
            sampler.resume(step_of[begin] * effective)
            found = [*weighed(sampler, sampler, begin=begin, end=end)]
            assert [one.number for one in found] == [*range(begin, end)]
            assert [one.batch for one in found] == batches[begin:end]
            assert [one.is_last for one in found] == [False] * (end - begin - 1) + [True]
            for one in found:
                weights[step_of[one.number]] += one.weight / len(sizes)
                assert one.weight == 0 if isinstance(one.batch, Uncounted) else one.weight > 0
        assert all(math.isclose(weight, 1) for weight in weights.values())

    def test_what_counts_is_counted_over_the_part_of_a_step_that_is_run(self):
        sampler = made_share(0, (8,), 20).batch_sampler(50)
        found = [*weighed(sampler, sampler, count=lambda batch: torch.tensor(sum(batch)), end=5)]
        first, second, third = sum(range(8)), sum(range(8, 16)), sum(range(16, 20))
        assert [one.weight for one in found[:3]] == [n / (first + second + third) for n in (first, second, third)]
        assert sum(one.weight for one in found[3:]) == 1

    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_parts_of_a_sum_count_whole(self, rank):
        sampler = made_share(rank, (7, 1), 12).batch_sampler(50)
        weights = [one.weight for one in weighed(sampler, sampler, sums=True)]
        assert weights == ([2.0] * 9 if rank == 0 else [2.0, 0.0] * 4 + [0.0])

    def test_a_count_that_is_none(self):
        sampler = made_share(0, (8,), 20).batch_sampler(50)
        with raises(InputError, "count(batch)", "None"):
            next(weighed(sampler, sampler, count=lambda batch: None))


def test_without_marks_batches_are_of_any_kind() -> None:
    """A tool whose loader knows the schedule needs no marks. Pairs of tensors failed in the short last step."""
    loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(50), torch.arange(50)), batch_size=9)
    options = loader_options(loader, made_share(1, (7, 1), 20), shuffle=False, seed=0, drop_last=False)
    assert [len(first) for first, _ in DataLoader(**options)] == [1] * 8

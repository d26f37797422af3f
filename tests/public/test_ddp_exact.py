"""DDP with a plan trains as one device does on the whole batch, in real processes: gradients, steps and failures.

Each scenario's results on every rank are compared with one model that trains here on whole batches.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ddp_jobs import gradient, make_plan, relative_error, weights
from folders import PAGES
from marks import for_release
from ranks import for_workers, found_by, run_ranks, run_ranks_once
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from autosplit import ddp

NUM_SAMPLES = 203
INPUTS = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(NUM_SAMPLES, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
EXACT = 1e-10
"""Largest relative error of a gradient."""
FOLLOWS = 1e-9
"""Largest error of the weights after all steps."""
SEED = 7


class Samples(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return INPUTS[index], TARGETS[index], index


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), targets)


def loader_of(ctx: ddp.Context, workers: int = 0) -> DataLoader:
    sampler = ctx.batch_sampler(NUM_SAMPLES, shuffle=True, seed=SEED)
    context = for_workers("test_ddp_exact") if workers else None
    return DataLoader(Samples(), batch_sampler=sampler, num_workers=workers, multiprocessing_context=context)


def whole_batches(effective: int, num_steps: int) -> Iterator[list[int]]:
    """Return the samples of each optimizer step, over several epochs."""
    sampler = make_plan((effective,)).batch_sampler(NUM_SAMPLES, shuffle=True, seed=SEED)
    left = num_steps
    while left > 0:
        for batch in list(sampler)[:left]:
            yield batch
            left -= 1
        sampler.set_epoch(sampler.epoch + 1)


def on_one_device(effective: int, num_steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return each step's gradients and weights with Adam."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    gradients, followed = [], []
    for batch in whole_batches(effective, num_steps):
        loss_of(model, INPUTS[batch], TARGETS[batch]).backward()
        gradients.append(gradient(model))
        optimizer.step()
        optimizer.zero_grad()
        followed.append(weights(model))
    return gradients, followed


# ------------------------------------------------------------------------------------------------------- trajectories


def trained(sizes: tuple[int, ...], effective: int, num_steps: int, workers: int = 0) -> dict[str, Any]:
    """Train with a plan. Return each step's gradient and weights, and each epoch's samples on this rank."""
    found: dict[str, Any] = {"gradients": [], "weights": [], "epochs": []}
    with ddp.setup(make_plan(sizes, effective)) as ctx:
        model = ctx.wrap(make_model())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        loader = loader_of(ctx, workers)
        while len(found["weights"]) < num_steps:
            loader.batch_sampler.set_epoch(len(found["epochs"]))
            found["epochs"].append([])
            for step in ctx.steps(loader):
                for inputs, targets, indices in step:
                    step.backward(loss_of(model, inputs, targets))
                    found["epochs"][-1] += indices.tolist() if step.weight else []
                found["gradients"].append(gradient(model).clone())
                optimizer.step()
                optimizer.zero_grad()
                found["weights"].append(weights(model))
    return found


def trained_by_hand(sizes: tuple[int, ...], effective: int, num_steps: int) -> dict[str, Any]:
    """Run the same local batches in plain DDP: the mean loss of each, and the mean of the ranks' gradients."""
    found: dict[str, Any] = {"gradients": [], "weights": []}
    with ddp.setup(make_plan(sizes, effective)) as ctx:
        model = ctx.wrap(make_model())  # plain DistributedDataParallel; ctx.steps makes the gradient exact
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        loader = loader_of(ctx)
        while len(found["weights"]) < num_steps:
            batches = iter(loader)
            for step in loader.batch_sampler.schedule:
                micro_steps = len(step.micro_batch_sizes)
                for micro_step in range(micro_steps):
                    inputs, targets, _ = next(batches)
                    with model.no_sync() if micro_step + 1 < micro_steps else nullcontext():
                        (loss_of(model, inputs, targets) / micro_steps).backward()
                found["gradients"].append(gradient(model).clone())
                optimizer.step()
                optimizer.zero_grad()
                found["weights"].append(weights(model))
            loader.batch_sampler.set_epoch(loader.batch_sampler.epoch + 1)
    return found


SHORT = 14
LONG = 50
TWO = {"1 and 7": ((1, 7), 20), "3 and 5": ((3, 5), 24), "0 and 8": ((0, 8), 20)}
THREE = {"2, 3 and 7": ((2, 3, 7), 30)}
FOUR = {"1, 2, 2 and 5": ((1, 2, 2, 5), 40)}


def check_follows(both: list[dict[str, Any]], effective: int, num_steps: int) -> None:
    gradients, followed = on_one_device(effective, num_steps)
    assert any(len(batch) < effective for batch in whole_batches(effective, num_steps)), "a short last step is in it"
    for found in both:
        assert len(found["weights"]) >= num_steps
        for got, wanted in zip(found["gradients"], gradients, strict=False):
            assert relative_error(got, wanted) < EXACT
        for got, wanted in zip(found["weights"], followed, strict=False):
            assert float((got - wanted).abs().max()) < FOLLOWS
    for number in range(len(both[0]["epochs"])):
        gathered = [index for found in both for index in found["epochs"][number]]
        assert sorted(gathered) == list(range(NUM_SAMPLES)), f"epoch {number}"


# -------------------------------------------------------------------------------------------- variants of the loop


def single(num_steps: int, effective: int = 24) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for batch in whole_batches(effective, num_steps):
        yield INPUTS[batch], TARGETS[batch]


OVERFLOWS_IN_STEP = 2


def overflowing(loss: torch.Tensor, number: int, targets: torch.Tensor) -> torch.Tensor:
    """A loss that overflows for one sample in one step: on one rank and in one micro-batch."""
    batch = list(whole_batches(24, OVERFLOWS_IN_STEP + 1))[-1]
    hit = number == OVERFLOWS_IN_STEP and bool((targets == TARGETS[batch[0]]).any())
    return loss * math.inf if hit else loss


def scaled_steps(batches: Iterator[Any], model: nn.Module) -> list[tuple[float, float, torch.Tensor]]:
    """Steps with a GradScaler and clipping. Return the scale after each, the clipped norm, and the weights."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found = []
    for number, step in enumerate(batches):
        for inputs, targets, *_ in step:
            loss = overflowing(loss_of(model, inputs, targets), number, targets)
            if hasattr(step, "backward"):
                step.backward(loss, scaler)
            else:
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), norm, weights(model)))
        if len(found) == 6:
            break
    return found


def scaled() -> Any:
    with ddp.setup(make_plan((2, 6), 24)) as ctx:
        return scaled_steps(ctx.steps(loader_of(ctx)), ctx.wrap(make_model()))


def half_precision() -> list[torch.Tensor]:
    """Return gradients under float16 autocast with a GradScaler, and train in float32."""
    with ddp.setup(make_plan((2, 6), 24)) as ctx:
        model, scaler, found = ctx.wrap(make_model().float()), torch.amp.GradScaler("cpu", init_scale=2.0**8), []
        for step in ctx.steps(loader_of(ctx)):
            for inputs, targets, _ in step:
                with torch.autocast("cpu", torch.float16):
                    outputs = model(inputs.float())
                step.backward(F.mse_loss(outputs.float(), targets.float()), scaler)
            found.append(gradient(model) / scaler.get_scale())
            model.zero_grad()
    return found


def left_in_the_middle() -> dict[str, Any]:
    """Run the step after an abandoned step: after a break inside, a break outside, and an exception in the loss.

    The exception comes after the last forward, so DDP still expects its all-reduce.
    """
    found: dict[str, Any] = {}

    def next_step(ctx: ddp.Context, model: nn.Module) -> torch.Tensor:
        model.zero_grad()
        loader = loader_of(ctx, workers=1)
        for step in ctx.steps(loader):
            for inputs, targets, _ in step:
                step.backward(loss_of(model, inputs, targets))
            break
        return gradient(model).clone()

    def left(ctx: ddp.Context, model: nn.Module, *, after: int, by: str) -> None:
        for step in ctx.steps(loader_of(ctx, workers=1)):
            for number, (inputs, targets, _) in enumerate(step):
                loss = loss_of(model, inputs, targets)
                if number == after and by == "exception":
                    raise ZeroDivisionError
                step.backward(loss)
                if number == after:
                    break
            break

    with ddp.setup(make_plan((2, 6), 24)) as ctx:
        model = ctx.wrap(make_model())
        for name, after, by in [
            ("break in the first", 0, "break"),
            ("break in the last", 2, "break"),
            ("exception in the last", 2, "exception"),
        ]:
            with nullcontext() if by == "break" else pytest.raises(ZeroDivisionError):
                left(ctx, model, after=after, by=by)
            found[name] = [next_step(ctx, model) for _ in range(2)]
    return found


# Options of DDP


class Branching(nn.Module):
    """A model with an unused part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.used, self.unused, self.head = (
            layer.double() for layer in (nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 1))
        )

    def forward(self, inputs):
        return self.head(torch.tanh(self.used(inputs)))


OPTIONS: dict[str, tuple[tuple[int, ...], int, dict[str, bool], Callable[[], nn.Module]]] = {
    "static graph, one micro-step": ((2, 6), 8, {"static_graph": True}, make_model),
    "static graph": ((2, 6), 24, {"static_graph": True}, make_model),
    "static graph, copied buckets": ((2, 6), 24, {"static_graph": True, "gradient_as_bucket_view": False}, make_model),
    "static graph, no share": ((0, 8), 20, {"static_graph": True}, make_model),
    "static graph, unused": ((1, 7), 20, {"static_graph": True}, Branching),
    "find unused": ((2, 6), 24, {"find_unused_parameters": True}, Branching),
    "find unused, no share": ((0, 8), 20, {"find_unused_parameters": True}, Branching),
}


def with_options(
    sizes: tuple[int, ...], effective: int, options: dict[str, bool], make: Callable[[], nn.Module]
) -> list[torch.Tensor]:
    """Return each step's gradient, over more than an epoch."""
    found = []
    with ddp.setup(make_plan(sizes, effective)) as ctx:
        model = ctx.wrap(make(), **options)
        loader = loader_of(ctx)
        for epoch in range(2):
            loader.batch_sampler.set_epoch(epoch)
            for step in ctx.steps(loader):
                for inputs, targets, _ in step:
                    step.backward(loss_of(model, inputs, targets))
                found.append(gradient(model).clone())
                model.zero_grad()
    return found


# Two models in one loop

NOISE = torch.randn(NUM_SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def make_pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(6)
    generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    return generator, nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def adversaries_loss(number: int, generator: nn.Module, critic: nn.Module, indices: Any) -> torch.Tensor:
    """The critic's loss in even steps, the generator's in odd ones."""
    made = generator(NOISE[indices])
    if number % 2:
        return F.softplus(-critic(made)).mean()
    return F.softplus(-critic(INPUTS[indices])).mean() + F.softplus(critic(made.detach())).mean()


def adversaries(sizes: tuple[int, ...], effective: int, **options: bool) -> list[torch.Tensor]:
    """Return the weights of both after each step. The two train in turn."""
    found = []
    with ddp.setup(make_plan(sizes, effective)) as ctx:
        pair = [ctx.wrap(model, **options) for model in make_pair()]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in pair]
        for step in ctx.steps(loader_of(ctx)):
            for _, _, indices in step:
                step.backward(adversaries_loss(step.index, *pair, indices))
            optimizers[1 - step.index % 2].step()
            for model in pair:
                model.zero_grad()
            found.append(torch.cat([weights(model) for model in pair]))
    return found


# Buffers, and losses over nothing


def make_normed() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def statistics() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return BatchNorm's running means after an epoch with most samples on rank 0, and this rank's batches."""
    batches = []
    with ddp.setup(make_plan((9, 3), 24)) as ctx:
        model = ctx.wrap(make_normed())
        for step in ctx.steps(loader_of(ctx)):
            for inputs, targets, _ in step:
                batches.append(inputs)
                step.backward(loss_of(model, inputs, targets))
            model.zero_grad()
        with torch.no_grad():
            model.eval()(INPUTS[:2])  # DDP sends rank 0's buffers at the next forward
    return model.module[1].running_mean.clone(), batches


def kept(indices: torch.Tensor) -> torch.Tensor:
    return indices % 3 == 0


def kept_count(batch: Any) -> int:
    return int(kept(batch[2]).sum())


def kept_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    """A common handwritten mean. It is 0/0 if nothing counts."""
    inputs, targets, indices = batch
    mask = kept(indices)[:, None]
    return (((model(inputs) - targets) ** 2) * mask).sum() / mask.sum()


def means_over_nothing() -> tuple[list[torch.Tensor], list[int]]:
    found, counts = [], []
    with ddp.setup(make_plan((1, 7), 24)) as ctx:
        model = ctx.wrap(make_model())
        for step in ctx.steps(loader_of(ctx), count=kept_count):
            for batch in step:
                counts.append(kept_count(batch))
                step.backward(kept_mean(model, batch))
            found.append(gradient(model).clone())
            model.zero_grad()
    return found, counts


# The README's iterable data set

RECIPES = [block for block in re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL) if "IterableDataset" in block]


class Stream:
    """The samples in a fixed order, one at a time."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self):
        return (Samples()[number] for number in range(self.num_samples))


def recipe_module(classes: str) -> ModuleType:
    """Import the README's classes from a file, as a script would. A worker of a loader imports them from there, too."""
    folder = Path(os.environ["AUTOSPLIT_CACHE_DIR"]).parent / f"recipe of rank {os.environ['RANK']}"
    folder.mkdir(exist_ok=True)
    (folder / "recipe.py").write_text(f"import torch\n{classes}", encoding="utf-8")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("recipe")


def streamed(sizes: tuple[int, ...], effective: int, num_samples: int) -> dict[str, Any]:
    """Run the README's own code. Return each step's gradient, the counts, and the warnings."""
    found: dict[str, Any] = {"gradients": [], "steps": [], "num_samples": []}
    for_workers("test_ddp_exact")
    torch.multiprocessing.set_start_method("forkserver", force=True)
    classes, use = RECIPES[0].split("stream = ")
    recipe = recipe_module(classes)
    with warnings.catch_warnings(record=True) as caught, ddp.setup(make_plan(sizes, effective)) as ctx:
        warnings.simplefilter("always")
        names = {"Part": recipe.Part, "DataLoader": DataLoader, "ctx": ctx, "stream": Stream(num_samples)}
        lines = [line.strip() for line in use.splitlines() if line.strip().startswith(("part = ", "loader = "))]
        exec("\n".join(lines), names)
        model = ctx.wrap(make_model())
        for step in ctx.steps(names["loader"]):
            found["steps"].append([])
            found["num_samples"].append(step.num_samples)
            for inputs, targets, indices in step:
                step.backward(loss_of(model, inputs, targets))
                found["steps"][-1] += indices.tolist() if step.weight else []
            found["gradients"].append(gradient(model).clone())
            model.zero_grad()
    found["warned"] = [str(w.message) for w in caught if issubclass(w.category, ddp.LeftOverWarning)]
    return found


STREAMS = {
    "stream of whole batches": ((2, 6), 24, 48),
    "stream with a short end": ((2, 6), 24, 43),
    "stream with an end for one rank": ((2, 6), 24, 41),
    "stream with an end that is left": ((2, 6), 8, 41),
    "stream with no share on one rank": ((8, 0), 24, 43),
    "stream with no share on rank 0": ((0, 8), 16, 40),
}

FAST: dict[str, Callable[[], Any]] = {
    **{name: partial(trained, *job, SHORT, workers=1) for name, job in TWO.items()},
    **{f"{name}, plain": partial(trained_by_hand, *job, SHORT) for name, job in TWO.items()},
    **{name: partial(with_options, *job) for name, job in OPTIONS.items()},
    "scaled": scaled,
    "half precision": half_precision,
    "left in the middle": left_in_the_middle,
    "adversaries": partial(adversaries, (2, 6), 24),
    "adversaries, static graphs": partial(adversaries, (2, 6), 24, static_graph=True),
    "adversaries, copied buckets": partial(adversaries, (1, 7), 20, gradient_as_bucket_view=False),
    "statistics": statistics,
    "means over nothing": means_over_nothing,
    **{name: partial(streamed, *job) for name, job in STREAMS.items()},
}
LONG_TWO = {
    **{name: partial(trained, *job, LONG, workers=workers) for workers, (name, job) in enumerate(TWO.items())},
    **{f"{name}, plain": partial(trained_by_hand, *job, LONG) for name, job in TWO.items()},
}
LONG_THREE = {
    **{name: partial(trained, *job, LONG, workers=1) for name, job in THREE.items()},
    **{f"{name}, plain": partial(trained_by_hand, *job, LONG) for name, job in THREE.items()},
}
LONG_FOUR = {
    **{name: partial(trained, *job, LONG, workers=1) for name, job in FOUR.items()},
    **{f"{name}, plain": partial(trained_by_hand, *job, LONG) for name, job in FOUR.items()},
}


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks_once(tmp_path_factory, __name__, "FAST", 2, limit_s=250)


class TestTraining:
    @pytest.mark.parametrize("name", TWO)
    def test_every_step_is_that_of_a_single_device(self, ranks, name):
        check_follows(found_by(ranks, name), TWO[name][1], SHORT)

    @pytest.mark.parametrize("name", TWO)
    def test_ddp_as_it_is_trains_on_something_else(self, ranks, name):
        check_differs(found_by(ranks, f"{name}, plain"), TWO[name][1], SHORT)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("table", "jobs"), [for_release("LONG_TWO", TWO), ("LONG_THREE", THREE), for_release("LONG_FOUR", FOUR)]
    )
    def test_fifty_steps_with_adam(self, tmp_path, table, jobs):
        count = len(next(iter(jobs.values()))[0])
        found = run_ranks(__name__, table, count, tmp_path, limit_s=300)
        for name, (_, effective) in jobs.items():
            check_follows(found_by(found, name), effective, LONG)
            check_differs(found_by(found, f"{name}, plain"), effective, LONG)


def check_differs(both: list[dict[str, Any]], effective: int, num_steps: int) -> None:
    """Run the same slices without weights. If this were as exact, the weights would have no effect."""
    gradients, followed = on_one_device(effective, num_steps)
    for found in both:
        assert relative_error(found["gradients"][0], gradients[0]) > 0.01
        assert float((found["weights"][num_steps - 1] - followed[-1]).abs().max()) > 0.001


class TestStepsOverRanks:
    def test_a_scaler_and_clipping_do_as_on_one_device(self, ranks):
        """All ranks see the overflow of one rank, because gradients are reduced before they are unscaled."""
        expected = scaled_steps(([batch] for batch in single(6)), make_model())
        scales = [scale for scale, _, _ in expected]
        assert scales[OVERFLOWS_IN_STEP] < scales[OVERFLOWS_IN_STEP - 1], "there was an overflow"
        assert torch.equal(expected[OVERFLOWS_IN_STEP][2], expected[OVERFLOWS_IN_STEP - 1][2])
        assert not any(norm <= 0.05 for _, norm, _ in expected), "all of them were clipped"
        for found in found_by(ranks, "scaled"):
            assert [scale for scale, _, _ in found] == scales
            for (_, norm, got), (_, expected_norm, wanted) in zip(found, expected, strict=True):
                assert norm == pytest.approx(expected_norm, rel=EXACT, nan_ok=True)
                assert float((got - wanted).abs().max()) < FOLLOWS

    def test_half_precision_is_off_by_its_own_rounding(self, ranks):
        first = next(single(1))
        reference = make_model()
        loss_of(reference, *first).backward()
        for found in found_by(ranks, "half precision"):
            assert relative_error(found[0].double(), gradient(reference)) < 0.005
        plain = found_by(ranks, "3 and 5, plain")[0]["gradients"][0]
        assert relative_error(plain, gradient(reference)) > 0.02, "so that this tells them apart"

    @pytest.mark.parametrize("name", ["break in the first", "break in the last", "exception in the last"])
    def test_a_step_that_was_left_leaves_the_next_ones_whole(self, ranks, name):
        reference = make_model()
        loss_of(reference, *next(single(1))).backward()
        for found in found_by(ranks, "left in the middle"):
            assert [relative_error(got, gradient(reference)) < EXACT for got in found[name]] == [True, True]

    @pytest.mark.parametrize("name", OPTIONS)
    def test_options_of_ddp_change_no_gradient(self, ranks, name):
        """DDP learnt a static graph from a backward without an all-reduce, and an assertion of PyTorch failed."""
        _, effective, _, make = OPTIONS[name]
        steps = 2 * -(-NUM_SAMPLES // effective)
        for found in found_by(ranks, name):
            assert len(found) == steps
            for got, batch in zip(found, whole_batches(effective, steps), strict=True):
                reference = make()
                loss_of(reference, INPUTS[batch], TARGETS[batch]).backward()
                assert relative_error(got, _as_many(gradient(reference), got)) < EXACT

    @pytest.mark.parametrize(
        ("name", "effective"),
        [("adversaries", 24), ("adversaries, static graphs", 24), ("adversaries, copied buckets", 20)],
    )
    def test_two_models_in_one_loop(self, ranks, name, effective):
        pair = make_pair()
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in pair]
        expected = []
        for number, batch in enumerate(whole_batches(effective, -(-NUM_SAMPLES // effective))):
            adversaries_loss(number, *pair, batch).backward()
            optimizers[1 - number % 2].step()
            for model in pair:
                model.zero_grad()
            expected.append(torch.cat([weights(model) for model in pair]))
        for found in found_by(ranks, name):
            for got, wanted in zip(found, expected, strict=True):
                assert float((got - wanted).abs().max()) < FOLLOWS

    def test_running_statistics_are_those_of_the_largest_share(self, ranks):
        both = found_by(ranks, "statistics")
        reference = make_normed()
        for inputs in both[0][1]:
            reference(inputs)
        assert [len(batches[0]) for _, batches in both] == [9, 3]
        for running_mean, _ in both:
            assert relative_error(running_mean, reference[1].running_mean) < EXACT

    def test_a_mean_over_nothing_gives_no_gradient(self, ranks):
        """A rank's last micro-batch had no label that counts. 0/0 times 0 made every rank's gradient NaN."""
        both = found_by(ranks, "means over nothing")
        assert 0 in both[0][1], "there was such a micro-batch"
        for found, _ in both:
            for got, batch in zip(found, whole_batches(24, len(found)), strict=True):
                reference = make_model()
                kept_mean(reference, (INPUTS[batch], TARGETS[batch], torch.tensor(batch))).backward()
                assert relative_error(got, gradient(reference)) < EXACT


class TestReadme:
    def test_there_is_one_recipe(self):
        assert len(RECIPES) == 1

    @pytest.mark.parametrize("name", STREAMS)
    def test_a_stream_is_cut_by_the_plan_and_the_gradient_is_exact(self, ranks, name):
        sizes, _, num_samples = STREAMS[name]
        both = found_by(ranks, name)
        used = [[*itertools.chain(*parts)] for parts in zip(*(found["steps"] for found in both), strict=True)]
        for found in both:
            assert found["num_samples"] == [len(batch) for batch in used]
            for got, batch in zip(found["gradients"], used, strict=True):
                reference = make_model()
                loss_of(reference, INPUTS[batch], TARGETS[batch]).backward()
                assert relative_error(got, gradient(reference)) < EXACT
        left = 1 if "left" in name else 0
        assert sorted(index for batch in used for index in batch) == list(range(num_samples - left))
        assert [len(found["warned"]) for found in both] == [left, 0]
        firsts = [len([i for i in found["steps"][0] if i < sum(sizes)]) for found in both]
        assert tuple(firsts) == sizes, "in the proportions of the plan"


def _as_many(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """On one device, unused parameters have no gradient. In DDP, their gradient may be zero."""
    if len(expected) == len(got):
        return expected
    with_gaps = torch.zeros_like(got)
    with_gaps[got != 0] = expected
    return with_gaps

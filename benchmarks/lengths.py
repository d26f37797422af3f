"""Compare training in batches of similar lengths with training in batches of one size.

    python benchmarks/lengths.py

A small transformer trains on a corpus with lengths from 8 to 2,048, within enforced CPU memory budgets. Epochs with
both kinds of batches take turns, from the same weights. Expected: no batch exceeds a budget, 1.5 times the samples/s,
and in float64 the same weights as one process, to 1e-9. The script also computes the effect of the constants that cut
the batches, from the measured lengths.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from itertools import islice
from typing import Any
from unittest import mock

import torch
from answer import of_this_run, put
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import autosplit
from autosplit.plan.plan import Plan
from autosplit.tools import padded_length

DEVICES = "cpu:24MiB,cpu:8MiB"
SIMULATED = "sim:2xL4"
"""The constants are also evaluated for a plan on these GPUs, because its batches are large."""
SAMPLES, SHORTEST, LONGEST, WORDS = 800, 8, 2048, 30_000
EPOCHS = 3
STEPS = 12
"""Optimizer steps whose weights are compared in float64."""


class Classifier(nn.Module):
    """A transformer with one layer that classifies sequences into two kinds. Padding is masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 32, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of each sequence from the mean over its tokens."""
        known = (tokens != 0).unsqueeze(-1)
        outputs = self.layer(self.embedding(tokens), src_key_padding_mask=~known.squeeze(-1))
        return self.head((outputs * known).sum(1) / known.sum(1))


def corpus() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw sequences with log-normal lengths, which are typical of text."""
    drawn, chance = random.Random(0), torch.Generator().manual_seed(0)  # noqa: S311
    lengths = [min(LONGEST, max(SHORTEST, int(drawn.lognormvariate(5, 1)))) for _ in range(SAMPLES)]
    lengths[:2] = [LONGEST, SHORTEST]
    return [(torch.randint(1, WORDS, (n,), generator=chance), torch.randint(2, (), generator=chance)) for n in lengths]


def pad(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack samples, padded to the longest."""
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence([*tokens], batch_first=True), torch.stack(labels)


def loader_of(data: list[Any], sampler: Any) -> DataLoader[Any]:
    """Make a DataLoader of padded batches."""
    return DataLoader(data, batch_sampler=sampler, collate_fn=pad)  # type: ignore[arg-type]


def epoch(plan: Plan, loader: DataLoader[Any]) -> tuple[float, tuple[int, ...]]:
    """Train one epoch within the budgets. Return its seconds and the peak bytes of each device."""
    loss_fn = nn.CrossEntropyLoss()
    with plan.budgets() as tracker:
        model = plan.wrap(Classifier())
        optimizer = torch.optim.AdamW(model.parameters())
        begun_s = time.perf_counter()
        for step in plan.steps(loader):
            for tokens, labels in step:
                step.backward(loss_fn(model(tokens), labels))
            optimizer.step()
            optimizer.zero_grad()
        spent_s = time.perf_counter() - begun_s
        peaks = tuple(tracker.peak_bytes)
    return spent_s, peaks


def weights_apart(plan: Plan, data: list[Any], lengths: list[int]) -> float:
    """Train some steps split and in one process, in float64. Return the largest difference between weights."""
    trained = []
    for split in (True, False):
        net = Classifier().double()
        model = plan.wrap(net) if split else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = loader_of(data, plan.token_sampler(lengths, shuffle=True))
        for step in islice(plan.steps(loader), STEPS):
            for tokens, labels in step:
                step.backward(nn.functional.cross_entropy(model(tokens), labels))
            optimizer.step()
            optimizer.zero_grad()
        trained.append(torch.cat([one.detach().flatten() for one in net.parameters()]))
    return float((trained[0] - trained[1]).abs().max())


def constants(plan: Plan, lengths: list[int]) -> dict[str, list[dict[str, float]]]:
    """Compute samples/s and padding of a larger corpus for other constants."""
    assert plan.lengths is not None
    points, drawn = plan.lengths.points, random.Random(1)  # noqa: S311
    many = [drawn.choice(lengths) for _ in range(50_000)]

    def row(effective: int | None, **changed: float) -> dict[str, float]:
        with mock.patch.multiple(padded_length, **changed):
            found = padded_length.predicted_lengths(points, many, plan.split, effective)
        return {
            **changed,
            "steps_of_batches": (effective or 0) // plan.batch_size,
            "samples_per_s": round(found.samples_per_s, 2),
            "padding_share": round(found.padding_share, 4),
        }

    windows = [row(None, WINDOW_BATCHES=window) for window in (32, 128, 512, 2048)]
    cuts = [
        row(batches * plan.batch_size, SHORTER=shorter, FULL_ENOUGH=full)
        for batches in (1, 4, 16, 64)
        for shorter, full in ((0.0, 1.0), (0.5, 0.25), (0.7, 0.1), (0.7, 0.25), (0.7, 0.5), (0.85, 0.25))
    ]
    return {"windows": windows, "cuts": cuts}


def tuned(data: list[Any], lengths: list[int], devices: str) -> Plan:
    """Tune for the corpus on the given devices."""
    return autosplit.tune_lengths(
        Classifier(),
        pad(data[2:6]),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        devices=devices,
        lengths=lengths,
        profile="off",
    )


def main() -> None:
    """Tune, train both kinds of batches, and print the results."""
    data = corpus()
    lengths = [len(tokens) for tokens, _ in data]
    plan, simulated = tuned(data, lengths, DEVICES), tuned(data, lengths, SIMULATED)
    assert plan.lengths is not None
    print(plan, plan.lengths, sep="\n", file=sys.stderr)
    rates: dict[str, list[float]] = {"like": [], "fixed": []}
    peaks: list[tuple[int, ...]] = []
    for number in range(EPOCHS):
        samplers: dict[str, Any] = {
            "like": plan.token_sampler(lengths, shuffle=True),
            "fixed": plan.batch_sampler(len(data), shuffle=True),
        }
        for name, sampler in samplers.items():
            sampler.set_epoch(number)
            seconds, held = epoch(plan, loader_of(data, sampler))
            rates[name].append(len(data) / seconds)
            if name == "like":
                peaks.append(held)
            print(name, rates[name][-1], held, file=sys.stderr, flush=True)
    gains = [like / fixed for like, fixed in zip(rates["like"], rates["fixed"], strict=True)]
    budgets = [device.capacity_bytes for device in plan.devices]
    answer = {
        **of_this_run(),
        "devices": DEVICES,
        "samples": SAMPLES,
        "lengths": [min(lengths), max(lengths)],
        "split": plan.split,
        "points": [{"length": one.length, "times": round(one.times, 3)} for one in plan.lengths.points],
        "fullest_share_of_budget": [
            round(max(held[index] for held in peaks) / budget, 4) for index, budget in enumerate(budgets)
        ],
        "like_samples_per_s": round(statistics.median(rates["like"]), 2),
        "fixed_samples_per_s": round(statistics.median(rates["fixed"]), 2),
        "gains": [round(gain, 3) for gain in gains],
        "gain": round(statistics.median(gains), 3),
        "predicted_gain": round(plan.lengths.samples_per_s / plan.lengths.fixed_samples_per_s, 3),
        "padding_share": round(plan.lengths.padding_share, 4),
        "fixed_padding_share": round(plan.lengths.fixed_padding_share, 4),
        "weights_apart": weights_apart(plan, data, lengths),
        "constants": {DEVICES: constants(plan, lengths), SIMULATED: constants(simulated, lengths)},
    }
    put(answer)


if __name__ == "__main__":
    main()

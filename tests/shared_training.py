"""Models and data for the tests of the integrations: padded texts, tiny float64 models, and a reference loop.

A sample's first token is its number, so a batch shows its samples.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from handmade import made_ceiling, on_devices
from plans import make_plan, plan_seat
from torch import nn
from torch.nn import functional as F

from autosplit.devices.accelerator import visible_devices
from autosplit.plan.layout import Layout
from autosplit.plan.plan import Plan
from autosplit.solve.memory import MemoryFit, Region
from autosplit.solve.split import accumulation_steps

NUM_SAMPLES = 50
STEPS = 20
"""Optimizer steps: at least two epochs of every job in `JOBS`."""

STOPS_AT = 10
"""The optimizer step whose checkpoint is resumed. It is the first of the 3 steps of its epoch."""

LR, WARMUP, CLIP, SEED = 1e-3, 5, 0.3, 3
LENGTH, TOKENS = 12, 80
FIRST = 10
"""The token that begins sample 0."""

HELD_OUT, EVALUATES_BY = 42, 7
"""Number of evaluation samples and their batch size. There are equally many batches for 1, 2 or 3 ranks."""

PRELOAD = (
    "lightning.pytorch",
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
)
"""Modules that take seconds to import. Missing modules are left out."""

JOBS: dict[int, dict[str, tuple[str, tuple[int, ...], int]]] = {
    2: {  # model, split, samples per optimizer step; rank 1 has no samples in the short last step
        "bert, 5 forwards a step": ("bert", (7, 1), 40),
        "gpt, 3 forwards a step": ("gpt", (7, 1), 20),
    },
    3: {"bert, 2 forwards a step": ("bert", (5, 2, 1), 16), "gpt, 5 forwards a step": ("gpt", (1, 1, 2), 20)},
}


def shares_plan(sizes: tuple[int, ...], effective: int, *, in_one: bool = False) -> Plan:
    """Return a plan with one process per device, or with `in_one` for one process with all devices."""
    total, count = sum(sizes), len(sizes)
    steps = accumulation_steps(effective, total)
    ceiling = made_ceiling("cpu:0", 99, 2**30)
    seats = tuple(replace(plan_seat(i, n), ceiling=ceiling) for i, n in enumerate(sizes))
    layout = Layout("ddp", seats, steps, effective, 11.0, measured=False)
    if count == 1 or in_one:
        region = Region(MemoryFit(9, 3), 2**30, total, (total,) * (count - 1), total)
        even_rate = None if count == 1 else 10.0
        layout = Layout("balanced", seats, steps, effective, 12.5, even_samples_per_s=even_rate, region=region)
    return make_plan(layouts=(layout,), trials=())


def on_cards(plan: Plan, monkeypatch: Any = None) -> Plan:
    """Return a plan with this machine's accelerators as its devices.

    Args:
        monkeypatch: For a plan of one process, it adds a device kind that accelerate lacks.
    """
    from gpus import COUNT, KIND

    if monkeypatch is not None and KIND not in {"cuda", "xpu", "npu"}:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", f"{KIND}:0")
    here = visible_devices(KIND)
    placed = [
        replace(device, label=f"{KIND}:{n}", kind=KIND, index=n, name=here[n].name, uuid=here[n].uuid)
        for n, device in ((device.index % COUNT, device) for device in plan.devices)
    ]
    return on_devices(plan, *placed)


def shares_of_cards(sizes: tuple[int, ...], effective: int) -> Plan:
    """Return a plan with a process for each accelerator of this machine."""
    return on_cards(shares_plan(sizes, effective))


def make_text(index: int, generator: torch.Generator) -> dict[str, Any]:
    length = int(torch.randint(3, LENGTH, (1,), generator=generator))
    ids = torch.randint(1, TOKENS, (length,), generator=generator)
    ids[0] = FIRST + index
    return {"input_ids": ids, "kind": int(ids.sum() % 3)}


_TEXTS = torch.Generator().manual_seed(1)
TEXTS = [make_text(index, _TEXTS) for index in range(NUM_SAMPLES)]


def padded(samples: list[dict[str, Any]], *, next_tokens: bool) -> dict[str, Any]:
    """Collate texts of different lengths, for GPT with their own tokens as labels."""
    ids = torch.zeros(len(samples), LENGTH, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length] = labels[row, :length] = sample["input_ids"]
        mask[row, :length] = 1
    if not next_tokens:
        labels = torch.tensor([sample["kind"] for sample in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


COLLATE = {name: functools.partial(padded, next_tokens=name == "gpt") for name in ("bert", "gpt")}


def make_model(kind: str) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if kind == "gpt":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        size = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=TOKENS, **size, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **ends)
        ).double()
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=TOKENS, **size, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3)
    return BertForSequenceClassification(config).double()


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the model's own loss in double precision. GPT-2's own loss casts its logits to float32."""
    logits = outputs["logits"]
    if logits.dim() == 2:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def loss_on(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return loss_of(model(**inputs), batch["labels"])


def count_tokens(batch: dict[str, torch.Tensor]) -> int:
    """Count the labels that GPT's mean loss averages over."""
    return int(batch["labels"][:, 1:].ne(-100).sum())


COUNT: dict[str, Callable[[Any], int] | None] = {"bert": None, "gpt": count_tokens}


def lr_factor(step: int) -> float:
    """A warmup and half a cosine, like transformers."""
    if step < WARMUP:
        return step / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def optimizer_for(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)


def forget_accelerate() -> None:
    """Reset accelerate's global state, as in a new process. Another test's settings would stay."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def clean_workers() -> None:
    """Start a loader's workers from the ranks' server. A rank has gloo's threads, and forked workers hung."""
    torch.multiprocessing.set_start_method("forkserver", force=True)


def folder_of_job(name: str) -> Path:
    """Return a folder that all ranks of this job share."""
    return Path(os.environ["AUTOSPLIT_CACHE_DIR"]).parent / re.sub(r"\W+", "_", name)


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


def epoch_order(epoch: int) -> list[int]:
    return torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


@functools.cache
def by_hand(kind: str, effective: int) -> dict[str, Any]:
    """Train in one process with one batch per optimizer step. Return each step's weights and learning rate."""
    model = make_model(kind)
    optimizer, schedule = optimizer_for(model)
    weights, lrs, norms, losses = [], [], [], []
    for step in range(STEPS):
        epoch, number = divmod(step, -(-NUM_SAMPLES // effective))
        order = epoch_order(epoch)[number * effective : (number + 1) * effective]
        loss = loss_on(model, COLLATE[kind]([TEXTS[index] for index in order]))
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        lrs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        weights.append(weights_of(model))
    assert max(norms) > CLIP, "clipping did something"
    return {"weights": weights, "lrs": lrs, "losses": losses}


def evaluated_by_hand(kind: str, effective: int, step: int) -> float:
    """Return the mean loss after a step, over the batches of what is held out."""
    model = make_model(kind)
    nn.utils.vector_to_parameters(by_hand(kind, effective)["weights"][step - 1], model.parameters())
    batches = [TEXTS[first : first + EVALUATES_BY] for first in range(0, HELD_OUT, EVALUATES_BY)]
    with torch.no_grad():
        return sum(float(loss_on(model, COLLATE[kind](batch))) for batch in batches) / len(batches)


def samples_in(batch: dict[str, torch.Tensor]) -> list[int]:
    return (batch["input_ids"][:, 0] - FIRST).tolist()


def check_epochs(ranks: list[list[tuple[list[int], bool]]], sizes: tuple[int, ...], effective: int) -> None:
    """Make sure that every epoch's samples were each seen once, and each in its optimizer step.

    Args:
        ranks: For each rank, every micro-batch's samples, and whether they counted.
        sizes: The ranks' shares of a full micro-batch.
        effective: Samples of an optimizer step.
    """
    assert len({len(found) for found in ranks}) == 1, "all ranks run equally many micro-batches"
    per_step = [list(range(0, n, sum(sizes))) for n in step_sizes(effective)]
    per_epoch = sum(map(len, per_step))
    for begin in range(0, len(ranks[0]) - per_epoch + 1, per_epoch):
        epoch, order = begin // per_epoch, iter(epoch_order(begin // per_epoch))
        position = begin
        for step, n in zip(per_step, step_sizes(effective), strict=True):
            part = [found[position + index] for found in ranks for index in range(len(step))]
            seen = Counter(sample for samples, counted in part for sample in samples if counted)
            assert seen == Counter(next(order) for _ in range(n)), f"epoch {epoch}"
            position += len(step)
    for found, size in zip(ranks, sizes, strict=True):
        assert {len(samples) for samples, _ in found[:1]} == {size}


def step_sizes(effective: int) -> list[int]:
    return [min(effective, NUM_SAMPLES - first) for first in range(0, NUM_SAMPLES, effective)]


def check_trained(ranks: list[dict[str, Any]], job: tuple[str, tuple[int, ...], int], bound: float = 1e-9) -> None:
    """Check that all ranks have the weights and learning rates of one process.

    Args:
        ranks: For each rank, its `weights`, `lrs` by optimizer step, `scheduler_steps`, and `seen`.
        job: The trained job.
        bound: Largest error of the weights.
    """
    kind, sizes, effective = job
    expected = by_hand(kind, effective)
    for found in ranks:
        assert float((found["weights"] - expected["weights"][-1]).abs().max()) < bound
        assert found["scheduler_steps"] == STEPS
        for step, lr in found["lrs"].items():
            assert math.isclose(lr, expected["lrs"][step - 1], rel_tol=1e-12, abs_tol=1e-18), step
    check_epochs([found["seen"] for found in ranks], sizes, effective)
    moved = float((expected["weights"][-1] - expected["weights"][0]).abs().max())
    assert moved > 1e-3, "so that the bound tells something"


def check_resumed(ranks: list[dict[str, Any]], job: tuple[str, tuple[int, ...], int], bound: float = 1e-9) -> None:
    """Check that training from a checkpoint in the middle of an epoch ends as the uninterrupted training.

    Args:
        ranks: For each rank, its `seen`, and the `weights`, `scheduler_steps` and `seen` of `resumed`.
    """
    expected = by_hand(job[0], job[2])["weights"][-1]
    for found in ranks:
        resumed = found["resumed"]
        assert float((resumed["weights"] - expected).abs().max()) < bound
        assert resumed["scheduler_steps"] == STEPS
        assert 0 < len(resumed["seen"]) < len(found["seen"])
        assert resumed["seen"] == found["seen"][-len(resumed["seen"]) :]

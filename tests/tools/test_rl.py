from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from folders import DOCS, ROOT
from raised import raises
from torch import nn
from torch.nn import functional as F

from autosplit import Workload, find_ceiling
from autosplit.errors import InputError, WorkloadError
from autosplit.tools.rl import token_budgets

WORDS, LENGTH = 500, 6


def workload(**options) -> Workload:
    model = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS))
    return Workload(model, torch.randint(0, WORDS, (4, LENGTH)), optimizer=torch.optim.AdamW, **options)


def log_probs(model, batch):
    return F.log_softmax(model(batch).float(), -1).gather(-1, batch[..., None])


def chunked(model, batch):
    return torch.cat([log_probs(model, part) for part in batch.split(1, dim=1)])


def test_both_passes_have_their_own_ceiling_in_real_steps():
    """CPU devices with a memory budget: both sizes ran. A pass in chunks fits more samples."""
    found = token_budgets(workload(), log_probs, device="cpu:2MiB", exact=True)
    assert found.basis == "steps"
    assert found.train_micro_batch_size == find_ceiling(workload(), "cpu:2MiB").batch_size
    assert found.max_tokens_per_gpu == found.train_micro_batch_size * LENGTH
    assert found.log_prob_max_tokens_per_gpu == found.log_prob_micro_batch_size * LENGTH
    in_chunks = token_budgets(workload(), chunked, device="cpu:2MiB")
    assert in_chunks.train_micro_batch_size == found.train_micro_batch_size
    assert in_chunks.log_prob_micro_batch_size > 2 * found.log_prob_micro_batch_size


@pytest.mark.usefixtures("exact_allocator")
def test_the_forward_leaves_room_for_the_optimizer_state():
    found = token_budgets(workload, log_probs, device="sim:RTX3090@1GiB", tokens_per_sample=3)
    alone = find_ceiling(workload(evaluate=log_probs), "sim:RTX3090@1GiB", role="eval")
    parameters = sum(p.nbytes for p in workload().model.parameters())
    assert found.basis == "traces"
    assert found.max_tokens_per_gpu == 3 * found.train_micro_batch_size
    assert found.log_prob.fixed_bytes - alone.fixed_bytes == pytest.approx(2 * parameters, rel=0.02)


def test_a_batch_without_tokens_needs_their_number():
    images = Workload(nn.Linear(4, 2), torch.randn(4, 4), optimizer=torch.optim.AdamW)
    with raises(InputError):
        token_budgets(images, log_probs, device="sim:RTX3090")


def test_a_second_evaluation_is_refused():
    with raises(WorkloadError):
        token_budgets(workload(evaluate=log_probs), log_probs, device="sim:RTX3090")


@pytest.mark.slow
def test_the_page_shows_what_its_code_prints():
    page = (DOCS / "reinforcement-learning.md").read_text(encoding="utf-8")
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)[:2]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown

"""A collective that another rank does not join ends with an error that names the ranks and their steps."""

from __future__ import annotations

import pytest
import torch
from ddp_jobs import INPUTS, loader_of, make_model, make_plan
from error_types import InputError, RankFailedError
from ranks import found_by, job_of
from torch import nn

from autosplit import ddp

TIMEOUT_S = 30.0
"""Long enough that two ranks on a busy machine join each collective in time."""


def left_early() -> str:
    """Leave the second epoch on rank 0 after its first step, while rank 1 goes on. Return this rank's error."""
    try:
        with ddp.setup(make_plan((5, 3), 16), timeout_s=TIMEOUT_S) as ctx:
            model = ctx.wrap(nn.Sequential(nn.BatchNorm1d(5).double(), make_model()))
            for epoch in range(3):
                for step in ctx.steps(loader_of(ctx)):
                    for indices in step:
                        step.backward(model(INPUTS[indices]).square().mean())
                    if epoch == 1 and ctx.rank == 0:
                        break
    except RankFailedError as error:
        return str(error)
    return "no error"


SCENARIOS = {"left early": left_early}

ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.slow
def test_the_error_names_the_ranks_and_their_steps(ranks):
    """Both ranks waited in different collectives. Nothing was printed in 130 s, and the time-out was 30 minutes."""
    places = ["at the start of loop 3", "in micro-batch 2 of optimizer step 1 of loop 2"]
    for rank, text in enumerate(found_by(ranks, "left early")):
        own, other = places[rank], places[1 - rank]
        assert f"rank {rank} waited" in text
        assert f"{own} (" in text
        assert f"rank {1 - rank} is {other}" in text
        assert "timeout_s=" in text


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_time_out_is_above_zero(timeout_s):
    with pytest.raises(InputError, match="timeout_s"), ddp.setup(make_plan((8,)), timeout_s=timeout_s):
        pass


def test_the_time_out_is_given_to_the_process_group(monkeypatch):
    """gloo's own time-out is 30 minutes."""
    given = []
    join = torch.distributed.init_process_group
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *args, **kwargs: (given.append(kwargs), join(*args, **kwargs))
    )
    with ddp.setup(make_plan((8,))):
        pass
    assert given[0]["timeout"].total_seconds() == 600

"""A router's auxiliary loss depends on the whole batch. The check and the Trainer say so, and name no other cause."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from torch import Tensor, nn
from torch.nn import functional as F

import autosplit


class Experts(nn.Module):
    """Route each token to one of four experts, with the auxiliary loss of the Switch Transformer."""

    def __init__(self, *, coefficient: float, sorts: bool) -> None:
        super().__init__()
        self.coefficient, self.sorts = coefficient, sorts
        self.router, self.head = nn.Linear(16, 4), nn.Linear(16, 1)
        self.inner, self.act, self.outer = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.randn(4, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        weight, chosen = probabilities.max(-1)
        order = chosen.argsort() if self.sorts else torch.arange(len(chosen))  # sorted tokens, as Mixtral computes them
        hidden = self.act(self.inner(tokens[order])) * self.scale[chosen[order]]
        mixed = torch.zeros_like(tokens).index_copy(0, order, self.outer(hidden)) * weight.unsqueeze(-1)
        shares = F.one_hot(chosen, 4).to(probabilities).mean(0)
        return self.head(tokens + mixed).view(len(x), -1).mean(1), 4 * (shares * probabilities.mean(0)).sum()


def checks_of(model: Experts) -> tuple[Any, ...]:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs, auxiliary = model(batch[0])
        return F.mse_loss(outputs, batch[1]) + model_coefficient * auxiliary.mean()

    model_coefficient = model.coefficient
    return autosplit.check(autosplit.Workload(model, (torch.randn(8, 5, 16), torch.randn(8)), compute_loss=loss))


@pytest.mark.parametrize("sorts", [True, False])
def test_the_check_names_no_layer(sorts):
    """It said that the output of the activation depends on other samples, because experts sort their tokens."""
    gradient, loss = checks_of(Experts(coefficient=0.1, sorts=sorts))
    assert gradient.depends
    assert (loss.subject, loss.depends) == ("loss", True)
    assert "depends on the whole batch" in loss.advice
    assert "auxiliary loss" in loss.advice
    assert "GELU" not in str(loss)


def test_without_a_coefficient_nothing_depends():
    assert [check.depends for check in checks_of(Experts(coefficient=0.0, sorts=True))] == [False]


CONFIGS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}


@pytest.fixture
def _tools():
    pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
    pytest.importorskip("accelerate", reason="needs accelerate (the extra `integrations`)")


def trainer_of(name: str, folder: Any, split: tuple[int, ...], effective: int, **options: Any) -> Any:
    import transformers

    from autosplit.integrations.transformers import Trainer

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 1}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **CONFIGS[name], **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (8, 6))]
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True)
    return Trainer(model, arguments, train_dataset=data, plan=make_plan(split, effective))


@pytest.mark.whole
@pytest.mark.usefixtures("_tools")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_trainer_warns_of_a_routers_loss(name, tmp_path):
    """It trained the average of the micro-batches' auxiliary losses without a word."""
    with pytest.warns(UserWarning, match=r"router's auxiliary loss \(router_aux_loss_coef=0.001\), which depends"):
        trainer_of(name, tmp_path, (2,), 4, output_router_logits=True)


@pytest.mark.whole
@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize(
    ("effective", "options"),
    [
        (4, {"output_router_logits": False}),
        (4, {"output_router_logits": True, "router_aux_loss_coef": 0.0}),
        (2, {"output_router_logits": True}),
    ],
    ids=["no loss", "coefficient 0", "one forward"],
)
def test_the_trainer_warns_of_nothing_else(effective, options, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of("Mixtral", tmp_path, (2,), effective, **options)
    assert not [one for one in caught if "router" in str(one.message)]

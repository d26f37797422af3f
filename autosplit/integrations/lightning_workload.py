"""Create a `Workload` from a LightningModule's training step, to tune it before training.

    model = MyModule()
    plan = autosplit.tune(workload(model, datamodule), devices="cuda", strategy="ddp", effective_batch_size=512)

The module is not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import lightning.pytorch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from autosplit.errors import InputError
from autosplit.rng import preserved_rng
from autosplit.workload.compiled import eager_of
from autosplit.workload.sample_batch import largest_batch
from autosplit.workload.workload import Workload

PRECISIONS = {"32-true": "none", "32": "none", "16-mixed": "fp16", "bf16-mixed": "bf16"}
"""autosplit's precision for each precision of a Trainer."""


class TrainingStep(nn.Module):
    """Wrap a LightningModule so that its forward runs the training step.

    Args:
        trainer: The value of ``self.trainer`` during the step, or None.
        optimizer: The result of ``self.optimizers()`` during the step. None to keep the method.
    """

    def __init__(self, module: lightning.pytorch.LightningModule, trainer: Any, optimizer: Any = None) -> None:
        super().__init__()
        self.module = module
        self.training = module.training  # do not call train(), which would change submodules in evaluation mode
        self._trainer = trainer
        self._optimizer = optimizer

    @property
    def named_by(self) -> nn.Module:
        """The module whose class name a profile uses for the model."""
        return self.module

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingStep:
        return TrainingStep(copy.deepcopy(self.module, memo), self._trainer, self._optimizer)

    def forward(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        with _attached(self.module, self._trainer, self._optimizer):
            batch = self.module.on_after_batch_transfer(batch, 0)
            return _loss_of_step(self.module, batch)


def asked_loss(module: lightning.pytorch.LightningModule, batch: Any) -> Tensor:
    """Return the loss of a training step on a copy of the module in evaluation mode."""
    asked = copy.deepcopy(module).eval()
    with preserved_rng(), _attached(asked, module.trainer), redirect_stdout(StringIO()):
        return _loss_of_step(asked, batch)


def _loss_of_step(module: lightning.pytorch.LightningModule, batch: Any) -> Tensor:
    takes_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)  # as in Lightning
    given = (batch, 0) if takes_number else (batch,)
    output = _asking_for_trainer(lambda: module.training_step(*given), "training_step")
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise InputError(
            f"training_step returned a {type(loss).__name__} as its loss. Expected a tensor, or a mapping with a "
            "tensor under 'loss'. A skipped step can't be measured.",
        )
    return loss


def workload(
    module: lightning.pytorch.LightningModule,
    data: Iterable[Any] | lightning.pytorch.LightningDataModule | None = None,
    *,
    trainer: lightning.pytorch.Trainer | None = None,
    batches: int = 32,
    **options: Any,
) -> Workload:
    """Create a workload from a LightningModule's training step, its optimizer, and the largest batch of its loader.

        plan = autosplit.tune(workload(model, datamodule), strategy="ddp", effective_batch_size=512)
        shares = Shares(plan)

    For several devices pass ``strategy="ddp"`` to `tune`, because Lightning cannot split a batch over the devices of
    one process.

    Args:
        module: The module, plain or compiled by ``torch.compile``. `configure_model` is called on a copy.
        data: A loader, or a data module. Its `prepare_data` and `setup("fit")` are called. Default: the module's
            `train_dataloader`.
        trainer: The Trainer that will train the module. Its precision is used, and ``self.trainer`` returns it. If the
            scheduler needs the number of steps (`estimated_stepping_batches`), pass ``optimizer=``, because the Trainer
            does not run.
        batches: The number of batches to draw.
        **options: The other arguments of `Workload`. An ``optimizer`` replaces the result of `configure_optimizers`.

    Raises:
        InputError: The module uses manual optimization, several optimizers, several loaders, a training step over an
            iterator, or a precision that is not mixed. Or its code needs a Trainer, and `trainer` is None.
        WorkloadError: The loader yielded no sample.
    """
    module = eager_of(module) if isinstance(module, nn.Module) else module
    _refuse_unlike(module, trainer)
    if "precision" not in options:
        options["precision"] = "none" if trainer is None else _precision_of(trainer)
    with preserved_rng():
        if is_overridden("configure_model", module):
            module = copy.deepcopy(module)
            with _attached(module, trainer):
                _asking_for_trainer(module.configure_model, "configure_model")
        if "optimizer" not in options:
            with _attached(module, trainer):
                configured = _asking_for_trainer(module.configure_optimizers, "configure_optimizers")
            options["optimizer"] = _optimizer_of(configured)
        sample_batch = _sample_batch(module, data, trainer, batches, options.get("batch_dim", 0))
    optimizer = options["optimizer"] if isinstance(options["optimizer"], Optimizer) else None
    return Workload(TrainingStep(module, trainer, optimizer), sample_batch, compute_loss=_loss_of, **options)


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def _refuse_unlike(module: Any, trainer: Any) -> None:
    if not isinstance(module, lightning.pytorch.LightningModule):
        raise InputError(
            f"module is a {type(module).__name__}. Expected a lightning.pytorch.LightningModule. For another "
            "module, use Workload(model, sample_batch).",
        )
    if not module.automatic_optimization:
        raise InputError(
            "automatic_optimization is False. Expected True, because only the module knows its optimizer steps "
            "otherwise. Use Workload(models, batch, step=...).",
        )
    if trainer is not None and not isinstance(trainer, lightning.pytorch.Trainer):
        raise InputError(
            f"trainer is a {type(trainer).__name__}. Expected a lightning.pytorch.Trainer or None.",
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise InputError(
            "training_step takes the iterator of its loader. Expected a batch, because autosplit makes batches of "
            "other sizes from it. Declare training_step(self, batch, batch_idx).",
        )


def _sample_batch(module: Any, data: Any, trainer: Any, batches: int, batch_dim: int) -> Any:
    """Return the largest of a few batches of the training loader. Apply the hooks that Lightning calls on a batch."""
    is_module = isinstance(data, lightning.pytorch.LightningDataModule)
    owner = data if is_module else module
    with _attached(module, trainer), _known_to(data if is_module else None, trainer):
        if is_module:
            data.prepare_data()
            data.setup("fit")
        loader = data
        if is_module or data is None:
            loader = _asking_for_trainer(owner.train_dataloader, "train_dataloader")
        if loader is None or isinstance(loader, (Mapping, list, tuple, CombinedLoader)):
            raise InputError(
                f"The training loader is a {type(loader).__name__}. Expected a single loader, because autosplit "
                "makes batches of other sizes from its batches. Pass the loader that determines the memory.",
            )
        batch = largest_batch(loader, batches, batch_dim)
        hooks = owner if is_overridden("on_before_batch_transfer", owner) else module
        batch = _asking_for_trainer(lambda: hooks.on_before_batch_transfer(batch, 0), "on_before_batch_transfer")
        if is_module and is_overridden("on_after_batch_transfer", data):
            batch = data.on_after_batch_transfer(batch, 0)
        return batch


@contextmanager
def _known_to(data: Any, trainer: Any) -> Iterator[None]:
    if data is None or trainer is None:
        yield
        return
    before, data.trainer = data.trainer, trainer
    try:
        yield
    finally:
        data.trainer = before


def _optimizer_of(configured: Any) -> Optimizer:
    several = configured
    if isinstance(several, (list, tuple)) and len(several) == 2 and isinstance(several[0], list):
        several = several[0]  # optimizers and schedulers
    found = several if isinstance(several, (list, tuple)) else [several]
    optimizers = [one.get("optimizer") if isinstance(one, Mapping) else one for one in found]
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        kinds = ", ".join(type(one).__name__ for one in optimizers) or "nothing"
        raise InputError(
            f"configure_optimizers returned {kinds}. Expected one torch.optim.Optimizer, with or without a "
            "scheduler. Pass optimizer= for other optimizers.",
        )
    return optimizers[0]


def _precision_of(trainer: Any) -> str:
    named = str(trainer.precision)
    if named not in PRECISIONS:
        raise InputError(
            f"The Trainer's precision is {named!r}. Expected one of {', '.join(map(repr, PRECISIONS))}. Convert the "
            "module yourself and pass precision='none'.",
        )
    return PRECISIONS[named]


def _asking_for_trainer(call: Any, name: str) -> Any:
    try:
        return call()
    except RuntimeError as error:
        if "is not attached to a `Trainer`" not in str(error):
            raise
        raise InputError(
            f"{name} uses self.trainer, but there is no Trainer. Pass trainer=, the Trainer that will train the "
            "module.",
        ) from error


@contextmanager
def _attached(module: Any, trainer: Any, optimizer: Any = None) -> Iterator[None]:
    shadows = {"log": _nothing, "log_dict": _nothing}
    if optimizer is not None:
        shadows["optimizers"] = lambda **_options: optimizer
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, lightning.pytorch.LightningModule):
                own = {name: vars(part)[name] for name in ("_trainer", *shadows) if name in vars(part)}
                stack.callback(_put_back, part, own, ("_trainer", *shadows))
                found = own["_trainer"] if trainer is None else trainer
                part.__dict__.update(shadows, _trainer=found)  # the setter of `trainer` would also change submodules
        yield


def _put_back(part: Any, own: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        part.__dict__.pop(name, None)
    part.__dict__.update(own)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Log nothing."""

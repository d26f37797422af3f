"""Define a linear layer with weights in 4 bits, stored as bitsandbytes stores them, to plan QLoRA without a GPU.

`bitsandbytes.nn.Linear4bit` quantises in CUDA kernels, which fake tensors can't run. `Nf4Linear` has the same bytes and
makes the same temporary tensors, with one op per kernel. Train with bitsandbytes, and plan with this class.

The layout is that of bitsandbytes 0.50.2 (`functional.quantize_4bit`, `autograd._functions.MatMul4Bit`) and of the
paper (Dettmers et al., QLoRA, arXiv:2305.14314):

- Two weights share a byte. Each block of 64 weights has a scale, the largest absolute value of the block.
- Double quantisation stores the scales, minus their mean, in 8 bits, with a float32 scale for each 256 of them.
- Forward and backward each restore the whole weight in the compute dtype and free it after the product. No activation
  is saved for the backward, because the weight gets no gradient.

For products with few tokens, bitsandbytes has fused kernels that restore no weight. They need less memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.errors import WorkloadError
from autosplit.torch_versions import FakeTensor

BLOCK, SCALES_BLOCK = 64, 256
"""Number of weights that share a scale, and number of scales that share a second scale (double quantisation)."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of the data type NF4 (appendix E of the paper)."""


@torch.library.custom_op("autosplit::restore_scales", mutates_args=())
def restore_scales(scales: Tensor, steps: Tensor, mean: Tensor) -> Tensor:
    """Return the float32 scales of double quantisation: ``scales / 127 * step + mean`` with centred 8-bit scales."""
    centred = scales.float() - 128
    return centred / 127 * steps.repeat_interleave(SCALES_BLOCK)[: len(scales)] + mean


@restore_scales.register_fake
def _(scales: Tensor, steps: Tensor, mean: Tensor) -> Tensor:
    del steps, mean
    return torch.empty_like(scales, dtype=torch.float32)


# torch 2.6 can't infer the schema of a parameter of type list[int].
@torch.library.custom_op(
    "autosplit::restore_weight",
    mutates_args=(),
    schema="(Tensor packed, Tensor scales, Tensor code, int[] shape, ScalarType dtype) -> Tensor",
)
def restore_weight(packed: Tensor, scales: Tensor, code: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return a weight of the given shape and dtype from its packed bytes and its scales."""
    indices = torch.stack((packed >> 4, packed & 15), dim=-1).flatten().long()
    count = shape[0] * shape[1]
    values = code[indices][:count] * scales.repeat_interleave(BLOCK)[:count]
    return values.to(dtype).view(shape)


@restore_weight.register_fake
def _(packed: Tensor, scales: Tensor, code: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    del scales, code
    return packed.new_empty(shape, dtype=dtype)


class _Product(torch.autograd.Function):
    """Multiply by a restored weight. The backward restores it again, and saves only the stored bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.restored(), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return gradients[0] @ ctx.layer.restored() if ctx.needs_input_grad[0] else None, None


class Nf4Linear(nn.Linear):
    """A frozen linear layer with its weight in NF4, for plans. peft accepts it as a subclass of `nn.Linear`.

    Args:
        layer: The layer to quantise. Its bias is kept, and frozen.
        double: Whether the scales are quantised, too (``bnb_4bit_use_double_quant``).
        compute_dtype: The dtype of the restored weight and of the product (``bnb_4bit_compute_dtype``).
    """

    mean: Tensor | None
    steps: Tensor | None
    scales: Tensor
    code: Tensor

    def __init__(self, layer: nn.Linear, *, double: bool = True, compute_dtype: torch.dtype = torch.bfloat16) -> None:
        nn.Module.__init__(self)  # nn.Linear would allocate a weight
        self.in_features, self.out_features, self.compute_dtype = layer.in_features, layer.out_features, compute_dtype
        weight = layer.weight.detach().float().flatten()
        code = torch.tensor(NF4, device=weight.device)
        blocks = F.pad(weight, (0, -len(weight) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        between = (code[1:] + code[:-1]) / 2
        nearest = torch.bucketize(blocks / scales.clamp(min=1e-30)[:, None], between).to(torch.uint8).flatten()
        nearest = nearest[: len(weight) + len(weight) % 2].view(-1, 2)
        self.weight = nn.Parameter(nearest[:, :1] * 16 + nearest[:, 1:], requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        mean, steps = None, None
        if double:
            mean = scales.mean()
            groups = F.pad(scales - mean, (0, -len(scales) % SCALES_BLOCK)).view(-1, SCALES_BLOCK)
            steps = groups.abs().amax(1)
            rounded = (groups / steps.clamp(min=1e-30)[:, None] * 127).round() + 128
            scales = rounded.to(torch.uint8).flatten()[: len(scales)].clone()  # without the padding
        for name, tensor in (("scales", scales), ("steps", steps), ("mean", mean), ("code", code)):
            self.register_buffer(name, tensor)

    def restored(self) -> Tensor:
        """Return the weight in the compute dtype, as a temporary tensor of shape (out_features, in_features)."""
        scales = self.scales
        if self.steps is not None and self.mean is not None:
            scales = restore_scales(scales, self.steps, self.mean)
        shape = [self.out_features, self.in_features]
        restored: Tensor = restore_weight(self.weight, scales, self.code, shape, self.compute_dtype)
        return restored

    def forward(self, x: Tensor) -> Tensor:
        """Return the product in the dtype of `x`.

        Raises:
            WorkloadError: `x` is on a GPU. Only bitsandbytes has kernels for it.
        """
        if x.device.type != "cpu" and not isinstance(x, FakeTensor):
            raise WorkloadError(
                f"Nf4Linear is on {x.device}. It only plans memory, on simulated GPUs and the CPU. On a GPU, tune the "
                "model that you train: load it with transformers' BitsAndBytesConfig.",
            )
        product: Tensor = _Product.apply(x.to(self.compute_dtype), self)  # type: ignore[no-untyped-call]
        return product.to(x.dtype)


def quantize_linear(model: nn.Module, *, double: bool = True, compute_dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Replace all linear layers of a model with `Nf4Linear`, in place, and return the model.

    The last child of the model stays unchanged: the output layer of a language model, or the head of a classifier.
    transformers also leaves it out if it loads a model with a `BitsAndBytesConfig`.
    """
    *inner, _last = model.named_children()
    found = [(model, name, child) for name, child in inner]
    found += [(part, *named) for _, child in inner for part in child.modules() for named in part.named_children()]
    for parent, name, layer in found:
        if type(layer) is nn.Linear:
            setattr(parent, name, Nf4Linear(layer, double=double, compute_dtype=compute_dtype))
    return model

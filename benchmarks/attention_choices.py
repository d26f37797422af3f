"""Record which back end torch chooses for calls of attention, on each generation of GPUs.

    python benchmarks/attention_choices.py --output FILE

Runs `scaled_dot_product_attention` on fake `cuda` tensors. torch chooses as it does for real tensors, and computes
nothing. This needs a CUDA build of torch, and a GPU or the stub of ``cuda_stub/cuda_stub.c``. Each run adds the choices
of one version of torch on one compute capability to the file. tests/runtime/test_attention.py compares
`chosen_backend` with them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = Path(__file__).parent / "results" / "kernels" / "attention.json"

CALLS = 300

_HEAD_SIZES = [(20, 20), (32, 32), (60, 60), (62, 62), (80, 80), (96, 96), (128, 128), (160, 160), (192, 192)]
_HEAD_SIZES += [(200, 200), (224, 224), (232, 232), (256, 256), (320, 320), (192, 128), (64, 128), (128, 64)]
_LENGTHS = [(128, 128)] * 4 + [(1, 128), (128, 1), (64, 128), (50, 50), (511, 511), (197, 197)]


class _Operators(TorchDispatchMode):
    """Keeps the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def random_calls(count: int = CALLS) -> list[dict[str, Any]]:
    """Return calls of attention that torch takes, the same ones each time."""
    draw = random.Random(0)  # noqa: S311  # no secret
    return [_random_call(draw) for _ in range(count)]


def _random_call(draw: random.Random) -> dict[str, Any]:
    is_causal = draw.random() < 0.3
    heads = draw.choice([(8, 8), (8, 8), (8, 8), (8, 2), (8, 1)])
    queries, keys = draw.choice(_LENGTHS)
    batch = draw.choice([1, 4, 1031])
    masks = [(batch, 8, queries, keys), (batch, 1, 1, keys), (batch, 1, queries, keys), (queries, keys)]
    return {
        "batch": batch,
        "heads": heads,
        "lengths": (queries, keys),
        "head_sizes": draw.choice([*[(64, 64)] * 4, *_HEAD_SIZES]),
        "dtype": draw.choice(["float32", "float16", "bfloat16"]),
        "mask": None if is_causal or draw.random() < 0.55 else draw.choice(masks),
        "mask_kind": draw.choice(["bool", "float", "trained"]),
        "dropout": draw.choice([0.0, 0.0, 0.0625, 0.1]),
        "is_causal": is_causal,
        "needs_grad": draw.random() < 0.8,
        "layout": draw.choice(["transposed", "plain", "plain", "strided"]),
    }


def tensors_of(call: dict[str, Any], device: str) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Return query, key and value of a call, and its mask."""
    dtype = getattr(torch, call["dtype"])

    def made(heads: int, length: int, size: int) -> Tensor:
        batch, options = call["batch"], {"device": device, "dtype": dtype, "requires_grad": call["needs_grad"]}
        if call["layout"] == "transposed":
            return torch.empty(batch, length, heads, size, **options).transpose(1, 2)
        if call["layout"] == "strided":
            return torch.empty(batch, heads, size, length, **options).transpose(2, 3)
        return torch.empty(batch, heads, length, size, **options)

    (queries, keys), (size, value_size), (length, key_length) = call["heads"], call["head_sizes"], call["lengths"]
    inputs = made(queries, length, size), made(keys, key_length, size), made(keys, key_length, value_size)
    if call["mask"] is None:
        return inputs, None
    kind = call["mask_kind"]
    mask_dtype = torch.bool if kind == "bool" else dtype
    return inputs, torch.empty(call["mask"], device=device, dtype=mask_dtype, requires_grad=kind == "trained")


def choice(call: dict[str, Any]) -> str:
    """Return the back end that torch chooses for a call on fake CUDA tensors."""
    inputs, mask = tensors_of(call, "cuda")
    is_grouped = call["heads"][0] != call["heads"][1]
    with _Operators() as operators:
        F.scaled_dot_product_attention(*inputs, mask, call["dropout"], call["is_causal"], enable_gqa=is_grouped)
    fused = ("cudnn", "flash", "efficient")
    return next((one for one in fused if any(f"_{one}_attention" in name for name in operators.names)), "math")


def main() -> None:
    """Add the choices of this torch on this GPU to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    output: Path = parser.parse_args().output
    major, minor = torch.cuda.get_device_capability()
    with FakeTensorMode():
        found = [choice(call) for call in random_calls()]
    version = ".".join(torch.__version__.split(".")[:2])
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    results.setdefault(version, {})[f"{major}.{minor}"] = " ".join(f"{one[0]}" for one in found)
    rows = [f'"{key}": {json.dumps(value, indent=1)}' for key, value in sorted(results.items())]
    output.write_text("{" + ",\n".join(rows) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""A diagnosis of a machine, made by hand."""

from __future__ import annotations

from handmade import GIB

from autosplit.tools.examination import Card, Copy, Examination

CARD = Card(
    device="cuda:0",
    name="NVIDIA H200",
    memory_bytes=140 * GIB,
    free_bytes=139 * GIB,
    used_by_others_bytes=GIB,
    compute_capability="9.0",
    compute_mode="default",
    catalogue="H200",
    tflops={"float32": 50.0, "bfloat16": 700.0, "float16": 690.0},
    tflops_of_catalogue={"float32": 0.75, "bfloat16": 0.71, "float16": 0.70},
    memory_gb_per_s=4100.0,
    memory_of_catalogue=0.85,
    launch_s=4e-6,
)


def examined(*cards: Card, copies: tuple[Copy, ...] = ()) -> Examination:
    return Examination("2.13.0", "13.0", "580.65", "cuda", cards, copies, None, None, (), (), 12.0)

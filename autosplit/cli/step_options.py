"""The command lines of what runs single steps: `autosplit measure`, `probe` and `check`."""

from __future__ import annotations

from typing import Annotated

import typer

from autosplit.cli.options import (
    Command,
    ImageSize,
    Isolate,
    Json,
    Quiet,
    Reserve,
    SameWorkload,
    SeqLen,
    Task,
    Text,
    Verbose,
    keywords_given,
    to_run,
)
from autosplit.cli.output import Manner

__all__ = ["check_command", "measure_command", "probe_command"]


def measure_command(
    spec: SameWorkload,
    devices: Annotated[
        Text, typer.Option(metavar="SPEC", help="As for tune. Default: every visible GPU; without any, cpu.")
    ] = None,
    split: Annotated[
        Text,
        typer.Option(
            metavar="N,N,...", help="Samples per device in one forward. Default: the sample batch, split evenly."
        ),
    ] = None,
    accumulation_steps: Annotated[
        Text, typer.Option(metavar="N", help="Forwards per optimizer step. Default: 1.")
    ] = None,
    strategy: Annotated[
        Text,
        typer.Option(
            metavar="auto|balanced|ddp",
            help="Whose step; ddp starts a process for each real device, by torchrun. Default: auto, balanced.",
        ),
    ] = None,
    precision: Annotated[Text, typer.Option(metavar="none|bf16|fp16", help="Default: what the workload says.")] = None,
    reserve: Reserve = None,
    isolate: Isolate = None,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    task: Task = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Show what one setting does: its time, its memory, its bounds."""
    keywords = keywords_given(
        devices=devices,
        split=split,
        accumulation_steps=accumulation_steps,
        strategy=strategy,
        precision=precision,
        reserve=reserve,
        isolate=isolate,
    )
    model_options = keywords_given(seq_len=seq_len, image_size=image_size, task=task)
    return to_run("measure.measure", Manner(as_json, quiet, verbose), spec, keywords, model_options=model_options)


def probe_command(
    spec: SameWorkload,
    devices: Annotated[
        Text, typer.Option(metavar="SPEC", help="As for tune. Default: every visible GPU; without any, cpu.")
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="primary|replica|rank|eval",
            help="What a device does: device 0 of BalancedDataParallel, another of it, a DDP process, a forward "
            "without gradients. May be given several times. Default: rank.",
        ),
    ] = None,
    max_batch_size: Annotated[Text, typer.Option(metavar="N", help="Look no further.")] = None,
    reserve: Reserve = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Also run one sample more, which must run out of memory.")
    ] = False,
    time_limit_s: Annotated[
        Text, typer.Option(metavar="SECONDS", help="For all ceilings; past it no further step confirms one.")
    ] = None,
    isolate: Isolate = None,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    task: Task = None,
    plot: Annotated[
        Text, typer.Option(metavar="PATH", help="Draw bytes against batch (.png, .pdf, .svg). Needs matplotlib.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Find how many samples each device holds."""
    limit_s = keywords_given(time_limit_s=time_limit_s).get("time_limit_s")
    keywords = keywords_given(max_batch_size=max_batch_size, reserve=reserve, exact=exact or None)
    model_options = keywords_given(seq_len=seq_len, image_size=image_size, task=task)
    asked = (spec, model_options, devices, tuple(dict.fromkeys(role or ["rank"])), keywords, limit_s, isolate)
    return to_run("probe.probe", Manner(as_json, quiet, verbose), asked, plot=plot)


def check_command(
    spec: SameWorkload,
    seq_len: SeqLen = None,
    image_size: ImageSize = None,
    task: Task = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> Command:
    """Tell what of the training changes with the split."""
    model_options = keywords_given(seq_len=seq_len, image_size=image_size, task=task)
    return to_run("check.check", Manner(as_json, quiet, verbose), spec, model_options=model_options)

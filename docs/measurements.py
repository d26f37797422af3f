"""Writes docs/measurements.md from the committed results: python docs/measurements.py. A test compares the page."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

INTRODUCTION = """# Measurements

`python docs/measurements.py` makes this page from `benchmarks/results/*.json`. Each section names the command, the
date, the machine and the versions. Only the first two sections were measured on a GPU. All other figures about GPUs are
predictions, or comparisons with published measurements. The column "holds" shows whether the limit was met. The
predictions of a section were made with the autosplit of its date.
"""


def page() -> str:
    """Return docs/measurements.md."""
    sections = (
        _gpu,
        _second_gpu,
        _ceilings,
        _search,
        _simulation,
        _rivals,
        _reserved,
        _allocator,
        _language,
        _models,
        _scaling,
        _sharded,
        _compiled,
        _kernels,
        _fit,
        _balanced,
        _ddp,
        _failing_ranks,
        _loader,
        _lengths,
        _noise_scale,
        _startup,
        _growth,
        _tune_time,
    )
    return "\n".join([INTRODUCTION, *(line for section in sections for line in section())]) + "\n"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _opened(title: str, text: str, name: str, found: Mapping[str, Any]) -> list[str]:
    """Return a section's heading: title, description, and where, when and with which versions it was measured."""
    machine = found.get("machine")
    where = "predictions, the same on every machine"
    if machine is not None:
        where = f"{machine['processor']}, {machine['cpus']} CPUs, {machine['system']}"
    versions = found.get("versions") or {"torch": found["torch"]}
    with_what = ", ".join(f"{tool} {version}" for tool, version in versions.items())
    return [
        f"## {title}\n",
        f"{text}\n",
        f"`python benchmarks/{name}.py`, {found['date']}; {where}; {with_what}.\n",
    ]


def _table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    names = list(columns)
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}", *lines, ""]


def _claims(claims: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = ((one["claim"], f"{one['figure']:.4g}", one["limit"], "yes" if one["holds"] else "**no**") for one in claims)
    return _table(("claim", "measured", "limit", "holds"), rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


_PREDICTED = (
    "Predictions are divided by the measured values: 1.00 is exact. In this run, `sim:` still simulated the CPU's "
    "kernels for attention with dropout, so its predictions were too high there. Later code predicts kernels that "
    "this run showed: causal attention, copies of rows, pooling and BatchNorm in half precision, and copies over "
    "PCI Express 5.0. Pooling, BatchNorm and the copies are fitted to this run.\n"
)


def _gpu() -> list[str]:
    found = _read("gpu/h100")
    text = (
        f"Largest batches, step times and memory on one {found['gpu']['name']}. The `sim:` predictions were made "
        "before the run, on a machine without a GPU. The limit of each ceiling was 8 GiB."
    )
    stages = {stage["name"]: stage["findings"] for stage in found["stages"]}
    later = _read("gpu/predictions")["gpus"]["H100-80GB"]
    ceilings = [
        (
            one["name"].removeprefix("ceiling of "),
            one["batch_size"],
            one["plain_loop"],
            one["errors"],
            one["steps"],
            f"{one['search_s']:.0f}",
        )
        for one in stages["ceilings"]
    ]
    steps = [
        (
            one["name"].removeprefix("step of "),
            f"{1e3 * one['measured_s']:.1f}",
            *(f"{one[name]:.2f}" for name in ("measured/loop", "time predicted/measured")),
            f"{later[one['name'].removeprefix('step of ')]['step_s'] / one['measured_s']:.2f}",
            f"{one['memory predicted/measured'][1]:.2f}",
        )
        for one in stages["steps"]
    ]
    unfinished = [stage["name"] for stage in found["stages"] if stage["status"] != "done"]
    return [
        *_opened("On a GPU", text, "gpu", found),
        *_table(("model", "ceiling found", "plain loop", "out-of-memory errors", "steps", "seconds"), ceilings),
        *_table(
            (
                "step",
                "measured, ms",
                "relative to a plain loop",
                "time predicted",
                "time predicted by later code",
                "memory predicted",
            ),
            steps,
        ),
        _PREDICTED,
        f"Stages that exceeded their time budget: {', '.join(unfinished) or 'none'}.\n",
        "All findings are in `benchmarks/results/gpu/h100.json`; `h100_first.json` is a run before the first fixes.\n",
    ]


def _second_gpu() -> list[str]:
    found, after = _read("gpu/h200_before"), _read("gpu/h200")
    stages, later = ({stage["name"]: stage["findings"] for stage in run["stages"]} for run in (found, after))
    tests = next(one for one in later["tests"] if one["name"] == "the tests marked gpu pass")
    corrected = _read("gpu/predictions")["gpus"]["H200"]
    steps = [
        (
            name,
            f"{1e3 * one['loop_s']:.1f}",
            f"{one['time predicted/loop']:.2f}",
            f"{corrected[name]['step_s'] / one['loop_s']:.2f}",
            f"{one['memory predicted/measured'][1]:.3f}",
        )
        for one in stages["steps"]
        if (name := one["name"].removeprefix("step of "))
    ]
    ceilings = [
        (one["name"].removeprefix("ceiling of "), one["batch_size"], one["plain_loop"], one["errors"], one["steps"])
        for one in later["ceilings"]
    ]
    text = (
        f"Steps on one {found['gpu']['name']}, a GPU that no prediction was fitted to. The predictions of time and "
        "memory were committed before the run. The loop is a plain training loop. Two corrections followed: recurrent "
        "layers use TF32, and the H200 sustains 76% of its float32 peak."
    )
    columns = ("step", "loop, ms", "time predicted", "time predicted after the corrections", "memory predicted")
    passed = (
        f"On this GPU, {tests['PASSED']} of the {tests['PASSED'] + tests['FAILED']} tests for one GPU passed. The "
        "other test computed a memory limit before its process had a CUDA context. It was corrected.\n"
    )
    loops = {one["name"].removeprefix("step of "): one["loop_s"] for one in stages["steps"]}
    slower = sorted(one["step_s"] / loops[name] for name, one in _read("gpu/h200_kernels")["steps"].items())
    host = (
        "A second machine with an H200 had a slower CPU. The same loops took "
        f"{slower[0]:.2f} to {slower[-1]:.2f} times as long there, because the CPU limits steps of many small kernels "
        "(GPT, BERT, Llama, LoRA). No prediction of a GPU's time can be closer than this for such steps.\n"
    )
    files = (
        "All findings are in `benchmarks/results/gpu/h200_before.json` (before the corrections), `h200.json` (after "
        "them) and `h200_kernels.json` (the time of each kernel).\n"
    )
    return [
        *_opened("On a GPU that was never fitted", text, "gpu", found),
        *_table(columns, steps),
        host,
        passed,
        *_table(("model", "ceiling found", "plain loop", "out-of-memory errors", "steps"), ceilings),
        "The search for the CNN ran out of steps at 92% of its ceiling. Since then the search takes larger steps.\n",
        files,
    ]


def _ceilings() -> list[str]:
    found = _read("ceilings")
    cpu = found["cpu"]
    text = (
        "Methods that find the largest batch that fits, with their accuracy and cost: medians over "
        f"{len(cpu['cases'])} pairs of a model and a budget. The step is {found['step']}."
    )
    rows = [
        (
            found["rivals"][name],
            _percent(one["of_ceiling"]),
            "" if "exact_share" not in one else _percent(one["exact_share"]),
            one["steps"],
            one["samples"],
            one["ooms"],
            f"{one['seconds']:.2f}" if "seconds" in one else "",
        )
        for name, one in cpu["medians"].items()
    ]
    columns = ("method", "share of the ceiling", "exact", "steps", "samples", "out of memory", "seconds")
    opened = _opened("The largest batch that fits", text, "ceilings", found)
    return [*opened, *_table(columns, rows), *_claims(cpu["claims"])]


def _search() -> list[str]:
    found = _read("search")
    text = (
        "The search compared with an exhaustive search in the event simulator, and the speedup of its splits. "
        "“Regret” is the lost share of the best samples/s. “Tight” machines have little memory."
    )
    columns = ("machine", "over nn.DataParallel", "over our even split", "over equal ranks in DDP", "worst regret")
    rows = [
        (
            name,
            f"{one['over_data_parallel']:.2f}",
            f"{one['over_our_even_split']:.2f}",
            f"{one['over_equal_ranks_in_ddp_predicted']:.2f}",
            _percent(one["worst_regret"]),
        )
        for name, one in found["search"]["machines"].items()
    ]
    claims = [claim for part in ("search", "solver", "overhead") for claim in found[part]["claims"]]
    return [*_opened("The search", text, "search", found), *_table(columns, rows), *_claims(claims)]


def _errors(errors: Mapping[str, Mapping[str, float]]) -> list[str]:
    columns = ("steps of", "steps", "bias", "50% within", "90% within", "worst")
    rows = (
        (name, one["steps"], f"{one['bias']:.2f}", *(_percent(one[key]) for key in ("median", "p90", "worst")))
        for name, one in sorted(errors.items())
    )
    return _table(columns, rows)


def _simulation() -> list[str]:
    found, largest = _read("published"), _read("published")["largest batch"]
    text = (
        "Predictions for simulated GPUs compared with published measurements. “Held out” models and GPUs were not "
        "fitted. A bias of 1.1 means that the median prediction is 1.1 times the measured value."
    )
    batches = (
        f"Of {largest['models']} published largest batches, {_percent(largest['inside'])} are predicted correctly, and "
        f"{_percent(largest['above'])} are predicted too large ({largest['date']}).\n"
    )
    opened = _opened("Simulated GPUs", text, "published", found)
    again = found.get("sample")
    if again:
        own = again["largest batch"]
        batches += (
            f"\nLater code predicted a random sample of these steps ({again['date']}). Of "
            f"{own['models']} largest batches, {_percent(own['inside'])} are correct, and {_percent(own['above'])} are "
            "too large.\n"
        )
    sampled = _errors(again["step times"]) if again else []
    gained = f"Speedup of nn.DataParallel on several GPUs over one GPU ({found['gain date']}):\n"
    gains = [gained, *_errors(found["gain of DataParallel"])]
    return [*opened, *_errors(found["step times"]), batches, *sampled, *gains]


def _rivals() -> list[str]:
    found = _read("rivals")
    count = len(found["predictions"])
    text = (
        "Estimators that predict memory without a GPU, on published largest batches. A published bracket has the "
        "largest batch that fits on an RTX 3090 and the next larger batch that failed, for an image model in fp16 "
        f"autocast. The {count} models are drawn at random (seed {found['seed']}) from {found['published brackets']} "
        f"such rows. Every estimator gets the same {found['usable_bytes'] / 2**30:.2f} GiB: the GPU without its CUDA "
        'context, and no reserve. "Correct" is a prediction inside the bracket. "Ratio" is the prediction divided by '
        "the nearest end of the bracket. The docstring of the script explains how each estimator is used."
    )
    rows = [
        (
            f"{name} {found['estimators'][name]}" if name != "Megatron-Bridge" else "formula of Megatron-Bridge",
            one["brackets"],
            *(_percent(one[share]) for share in ("inside", "below", "above")),
            f"{one['median']:.2f}",
            f"{one['factor of 90%']:.2f}",
        )
        for name, one in sorted(found["errors"].items(), key=lambda pair: -pair[1].get("inside", 0))
        if one["brackets"]
    ]
    columns = ("estimator", "models", "correct", "too small", "too large", "median ratio", "90% within a factor of")
    missing = "".join(f"- Not installed: {name}.\n" for name in found["not installed"])
    unanswered = [f"- {name} is not compared: {reason}.\n" for name, reason in found["no answer"].items()]
    remarks = (
        "If an estimator failed on a model, its row has fewer models. Megatron-Bridge's formula covers plain vision "
        "transformers only.\n"
    )
    return [
        *_opened("Other estimators", text, "rivals", found),
        *_table(columns, rows),
        remarks,
        "".join([missing, *unanswered]),
    ]


def _models() -> list[str]:
    found = _read("compare_models")
    text = (
        "The largest batch on one GPU and, after the slash, the samples/s at the fastest batch. All figures are "
        "predictions, with 5% of the memory in reserve. The last column is the measured error of predicted samples/s "
        "for such models: half of the predictions were off by at most the first share, and 90% by at most the second. "
        "It was measured in fp16 for image models and in fp32 for transformers. [Language models in "
        "bfloat16](#language-models-in-bfloat16) lists the steps in bfloat16. `autosplit compare --models FILE "
        "--devices sim:L4 --devices sim:H200 --price L4=0.8` makes this table for your models, with your prices."
    )
    models = found["models"]
    gpus = list(next(iter(models.values()))["gpus"])
    rows = [
        (
            name,
            *("does not fit" if cell is None else _cell(cell) for cell in (one["gpus"][gpu] for gpu in gpus)),
            one["error"],
        )
        for name, one in models.items()
    ]
    opened = _opened("Models and GPUs", text, "compare_models", found)
    prices = found["prices"]
    priced = [gpu for gpu in gpus if gpu in prices]
    costs = [(name, *(_cost(one["gpus"][gpu], prices[gpu]) for gpu in priced)) for name, one in models.items()]
    listed = "; ".join(f"{gpu} {prices[gpu]['usd per hour']:.2f} ({prices[gpu]['source']})" for gpu in priced)
    return [
        *opened,
        *_table(("model", *gpus, "error of samples/s"), rows),
        f"USD for a million samples, at these on-demand prices per hour: {listed}.\n",
        *_table(("model", *priced), costs),
    ]


def _cost(cell: Mapping[str, float] | None, price: Mapping[str, Any]) -> str:
    """Return the USD for a million samples, or nothing if the model does not fit."""
    return "" if cell is None else f"{price['usd per hour'] / 3600 * 1e6 / cell['samples/s']:.2f}"


def _cell(cell: Mapping[str, float]) -> str:
    return f"{cell['largest batch']:,} / {cell['samples/s']:,.{0 if cell['samples/s'] >= 10 else 1}f}"


def _reserved() -> list[str]:
    steps, found = _read("gpu_reserved"), _read("published_reserved")
    text = (
        "Memory that torch's allocator reserves, predicted by replaying the step's allocations through a model of the "
        "allocator. A ratio is predicted / measured. The rule is allocated memory / 0.9, which plans used before. "
        "cuDNN's workspaces are not published, so steps with NCHW convolutions or an LSTM are counted separately."
    )
    rows = [
        (one["step"], one["GPU"], one["samples"], *(f"{one[key]:.3f}" for key in ("ratio", "rule's ratio")))
        for one in steps["compared"]
    ]
    published = (
        "Published figures: `torch.cuda.max_memory_reserved`, or the memory of the process. A seed drew half of the "
        "rows before the model was tuned. The other half was kept apart, and predicted once. “Exact” rows have samples "
        "of one length, and torch 2.4 or later. Some sources do not state the length of each sample, and Adam of older "
        f"versions has larger temporary tensors. `python benchmarks/published_reserved.py`, {found['date']}.\n"
    )
    each = [
        (one["row"], one["kind"], *(f"{one[key]:.3f}" for key in ("ratio", "rule's ratio")), one["source"].split()[0])
        for one in found["compared"]
        if one["half"] == "kept apart"
    ]
    return [
        *_opened("Reserved memory", text, "gpu_reserved", steps),
        *_summaries(steps["summary"]),
        *_table(("step", "GPU", "samples", "predicted", "rule"), rows),
        published,
        *_summaries(found["summary"]),
        *_table(("step that was kept apart", "kind", "predicted", "rule", "source"), each),
        f"Not compared: {len(found['not compared'])} rows. `published_reserved.csv` has all sources and reasons.\n",
    ]


def _summaries(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    columns = ("figures", "by", "rows", "within 5%", "within 10%", "median error", "most too low")
    lines = [
        (name, by, *(one[key] for key in columns[2:5]), *map(_percent, (one["median error"], -one["most too low"])))
        for name, both in found.items()
        for by, one in both.items()
    ]
    return _table(columns, lines)


def _allocator() -> list[str]:
    found = _read("allocator")
    text = (
        "The model of torch's caching allocator, compared with torch's own allocator by random sequences of "
        "allocations and frees. torch ran on a GPU that does nothing. A sequence is equal if allocated bytes, reserved "
        "bytes and retries are equal after each operation."
    )
    columns = ("settings", "limit MiB", "sequences", "operations", "with retries", "equal sequences")
    rows = [
        (one["settings"], one["limit MiB"] or "none", *(one[key] for key in columns[2:])) for one in found["compared"]
    ]
    return [*_opened("The model of the allocator", text, "allocator", found), *_table(columns, rows)]


def _language() -> list[str]:
    found = _read("published_language")
    text = (
        "Predictions for `sim:` compared with published eager steps of language models in bfloat16 on one GPU. "
        "Nothing is fitted to them. A ratio is predicted / published. Reserved memory includes the gaps of the "
        "allocator. VRAM is all memory of the process, with the CUDA context. Exceeded is the memory of a GPU on which "
        "the step failed, so a ratio above 1 is right."
    )
    rows = []
    for one in found["compared"]:
        ratio = [f"{one[name]:.2f}" if name in one else "" for name in ("time ratio", "memory ratio")]
        kind = next((name.split()[-1] for name in one if name.startswith("published GB")), "")
        rows.append((one["model"], one["card"], one["precision"], one["attention"], *ratio, kind, one["source"]))
    columns = ("model", "GPU", "precision", "attention", "time", "memory", "kind of memory", "source")
    return [
        *_opened("Language models in bfloat16", text, "published_language", found),
        *_table(columns, rows),
        f"Not compared: {'; '.join(found['not compared'])}.\n",
    ]


def _sharded() -> list[str]:
    found = _read("published_sharded")
    text = (
        "Predicted steps of sharded models compared with published steps of FSDP in bfloat16 on 8 H100-80GB (torch "
        "1.13 to 2.1). Nothing is fitted to these rows. The plan has the published batch size."
    )
    rows = [
        (
            one["model"],
            "yes" if one["whole_model_fits"] else "no",
            one["batch"],
            one["step_s"],
            f"{one['predicted_step_s']:.3f}",
            f"{one['ratio']:.2f}",
            f"{one['predicted_peak_bytes'] / 2**30:.1f}",
        )
        for one in found["compared"]
    ]
    columns = ("model", "fits one GPU", "batch per GPU", "published s", "predicted s", "ratio", "predicted GiB")
    lora = [
        (one["batch"], one["published_reserved_gib"], f"{one['predicted_gib']:.2f}", f"{one['ratio']:.2f}")
        for one in found["memory of LoRA"]
    ]
    return [
        *_opened("Sharded models", text, "published_sharded", found),
        *_table(columns, rows),
        (
            "Memory of LoRA with sharded frozen weights: Llama-2 7B on two RTX 3090 with FSDP1. The published memory "
            "includes the allocator's gaps, for which a plan keeps 10% free.\n"
        ),
        *_table(("batch per GPU", "published GiB", "predicted GiB", "ratio"), lora),
    ]


def _scaling() -> list[str]:
    found = _read("published_scaling")
    ddp = found["summary"]["ddp"]
    text = (
        "Predicted scaling over nodes compared with published steps. Efficiency is samples/s per node, relative to the "
        "fewest nodes. Buckets: DDP overlaps the all-reduce with the backward. One message: the script reduces all "
        "gradients after the backward. One number is fitted, to the FSDP rows: the waits for the slowest rank, "
        f"{found['median loss per doubling, fsdp']:.1%} for each doubling of the nodes. The {ddp['rows']} DDP rows are "
        f"held out: {ddp['within 10 points']} are within 10 points, the median error is {ddp['median points off']} "
        f"points, and the largest {ddp['largest points off']} points. Assuming perfect scaling instead is within 10 "
        f"points for {ddp['within 10 points of perfect scaling']} of them, and off by up to "
        f"{ddp['largest points off of perfect scaling']} points. "
        f"BERT on 4,096 GPUs of three kinds: {found['4,096 ranks']['s to trace and time three GPUs']} s to trace and "
        f"time three GPUs, and {found['4,096 ranks']['s to solve all numbers of nodes']} s to solve all numbers of "
        "nodes."
    )
    keys = ("model", "gpus", "reduced", "nodes", "published", "predicted", "samples/s, predicted / published")
    rows = [[one[key] for key in keys] for one in found["compared"]]
    own = {size: {} for size in (1.0, 32.0, 128.0, 1024.0)}
    for one in found["all-reduces"]:
        own.get(one["MiB"], {})[one["cluster"]] = f"{one['time ratio']:.2f}"
    clusters = [*own[1.0]]
    diffusion = found["stable diffusion 2"]
    nodes = [*diffusion["published"]]
    steps = [("published, network not stated", *diffusion["published"].values(), "")]
    steps += [
        (one["network"], *one["predicted"].values(), one["largest points off"]) for one in diffusion["by network"]
    ]
    return [
        *_opened("Scaling over nodes", text, "published_scaling", found),
        *_table(("model", "nodes with", "reduced", "nodes", "published", "predicted", "samples/s ratio"), rows),
        (
            "Predicted / measured time of one all-reduce, by MiB. The network of the four nodes is EFA, whose "
            "latency is above that of InfiniBand.\n"
        ),
        *_table(("MiB", *clusters), [(f"{size:.0f}", *ratios.values()) for size, ratios in own.items()]),
        (
            "Efficiency of Stable Diffusion 2 with 2,048 samples per step, by the number of nodes. A network of 200 "
            "Gbit/s per node would explain the published values, but the network is not stated.\n"
        ),
        *_table(("network", *nodes, "largest points off"), steps),
        f"Not compared: {'; '.join(found['not compared'])}.\n",
    ]


def _compiled() -> list[str]:
    with (RESULTS.parent / "compiled.csv").open(encoding="utf-8") as file:
        pairs = list(csv.DictReader(file))
    rows = []
    for kind, precision in sorted({(pair["kind"], pair["precision"]) for pair in pairs}):
        own = [pair for pair in pairs if (pair["kind"], pair["precision"]) == (kind, precision)]
        times = [float(pair["compiled_s"]) / float(pair["eager_s"]) for pair in own]
        shares = [float(pair["compiled_gib"]) / float(pair["eager_gib"]) for pair in own if pair["eager_gib"]]
        memory = f"{min(shares):.2f} to {max(shares):.2f} ({len(shares)} pairs)" if shares else ""
        middle = f"{statistics.median(times):.2f}"
        rows.append((kind, precision, len(own), f"{min(times):.2f} to {max(times):.2f}", middle, memory))
    steps = _read("published_compiled")
    share = f"{steps['fused share']:.0%}"
    text = (
        f"For compiled transformers, `sim:` assumes that all kernels except matrix products take {share} of their "
        "eager time. This fraction is fitted to the steps that the table marks. The ratios are predicted / measured. "
        "The predicted memory is that of an eager step, which is more than a compiled step needs."
    )
    predicted = [
        (
            one["model"],
            one["gpu"],
            one["torch"],
            "yes" if one["fitted"] else "no",
            *(f"{one[name]:.2f}" if name in one else "" for name in ("compiled ratio", "eager ratio", "memory ratio")),
        )
        for one in steps["steps"]
    ]
    columns = ("model", "GPU", "torch", "fitted", "time", "time of an eager step", "memory")
    pairs_text = (
        "These are published pairs of an eager and a compiled step with the same model, GPU and batch, in "
        "`benchmarks/compiled.csv`. The numbers are compiled / eager.\n"
    )
    return [
        *_opened("Compiled models", text, "published_compiled", steps),
        *_table(columns, predicted),
        f"Not compared: {'; '.join(f'{name} ({why})' for name, why in steps['not compared'].items())}.\n",
        pairs_text,
        *_table(("models", "precision", "pairs", "time", "median", "memory"), rows),
    ]


def _kernels() -> list[str]:
    found = _read("kernels/sim-2.13")
    column = _read(f"kernels/{found['column'].removesuffix('.json')}")
    uncompared, failed = found["summary"]["not compared"], found["summary"]["error"]
    coverage = f"This run traced {found['summary']['rows']} of the {len(column['rows'])} steps in the CUDA column."
    text = (
        "`sim:` traces a step on the CPU and replaces the operators that differ on CUDA. The same steps were traced "
        "with fake `cuda` tensors in a CUDA build of torch, with a stub of the CUDA runtime. The ratios are "
        '`sim:` / CUDA. "Peak of activations" is the largest memory of the activations in a step. "Saved for the '
        'backward" is the memory in use when the backward begins. Both are per sample. No GPU took part, so '
        "memory inside kernels is not compared. Attention is traced for six "
        "compute capabilities from 7.5 to 12.0."
    )
    names = {"memory": "peak of activations", "saved": "saved for the backward", "time": "compute time"}
    parts = {name: found["summary"][name] for name in names}
    shares = [(names[name], one["rows"], _percent(one["close"]), len(one["far"])) for name, one in parts.items()]
    far = sorted((row, names[name], f"{ratio:.2f}") for name, one in parts.items() for row, ratio in one["far"].items())
    columns = ("quantity", "steps", "within 5%", "outside 0.8 to 1.25")
    outside = _table(("step", "quantity", "ratio"), far) if far else []
    return [
        *_opened("CUDA's operators on the CPU", text, "cuda_kernels", found),
        *_table(columns, shares),
        *outside,
        f"{coverage} `sim:` could not trace: {', '.join(failed) or 'none'}.\n",
        f"Not compared, because fake `cuda` tensors cannot run them: {', '.join(uncompared)}.\n",
    ]


def _fit() -> list[str]:
    found = _read("fit_cards")
    text = (
        "The rates of kernels are fitted to these published steps. The table shows the remaining errors with the rates "
        "that the fit found for each GPU."
    )
    return [*_opened("The fit of the GPUs", text, "fit_cards", found), *_errors(found["errors"])]


def _balanced() -> list[str]:
    found = _read("balanced")
    text = "The time of a step in `BalancedDataParallel`, divided by the time in a rival."
    rows: list[tuple[object, ...]] = []
    for part, rival in (("cpu", "a handwritten loop over the chunks"), ("simulated", "nn.DataParallel, simulated")):
        for name, one in found[part].items():
            if isinstance(one, dict):
                holds = "yes" if one["holds"] else "**no**"
                rows.append((name, tuple(one["split"]), rival, f"{one['ratio']:.3f}", one["limit"], holds))
    columns = ("model or machine", "split", "rival", "ratio", "limit", "holds")
    return [*_opened("The wrapper", text, "balanced", found), *_table(columns, rows)]


def _ddp() -> list[str]:
    found = _read("ddp")
    text = "The overhead of DDP with a plan if the ranks are equal, and its speedup if they differ."
    parts = _opened("DDP", text, "ddp", found)
    for place, one in found["places"].items():
        unlike = one["unlike"]
        gained = (
            f"{place}, {found['ranks']} ranks: one rank does {max(unlike['work'])} times the work. "
            f"{tuple(unlike['solved'])} instead of {tuple(unlike['even'])} is {unlike['gain']:.2f} times as fast "
            f"({unlike['predicted']:.2f} predicted).\n"
        )
        parts += [gained, *_claims(one["claims"])]
    return parts


def _failing_ranks() -> list[str]:
    found = _read("failing_ranks")
    text = (
        f"One of {found['ranks']} ranks fails in the middle of an optimizer step. The time runs until torchrun has "
        "ended all ranks and printed its report, which names the failed rank."
    )
    limit_s = found["promised_s"]
    rows = [
        (
            f"a rank {way}",
            f"{statistics.median(seconds):.1f}",
            f"{max(seconds):.1f}",
            limit_s,
            "yes" if max(seconds) <= limit_s else "**no**",
        )
        for way, seconds in found["seconds"].items()
    ]
    return [
        *_opened("Ranks that fail", text, "failing_ranks", found),
        *_table(("failure", "median, s", "longest, s", "limit, s", "holds"), rows),
    ]


def _loader() -> list[str]:
    found = _read("loader")
    text = (
        "`autosplit.measure_loader` compared with a full grid of workers and batches ahead: samples/s of the setting "
        "found, and time of the search. Expected: 95% of the best samples/s in a fifth of the time."
    )
    columns = ("dataset", "workers found", "share of the best samples/s", "share of the grid's time")
    rows = [
        (one["data_set"], one["found"]["num_workers"], _percent(one["share_of_best"]), _percent(one["share_of_time"]))
        for one in found["results"]
    ]
    return [*_opened("The loader", text, "loader", found), *_table(columns, rows)]


def _lengths() -> list[str]:
    found = _read("lengths")
    least, most = found["lengths"]
    text = (
        f"An epoch of {found['samples']} samples with lengths from {least} to {most:,} on {found['devices']}, in "
        f"batches of similar lengths and in batches of {sum(found['split'])}, padded to the longest: "
        f"{found['gain']:.1f} times as fast ({found['predicted_gain']:.1f} predicted), with "
        f"{_percent(found['padding_share'])} of padding instead of {_percent(found['fixed_padding_share'])}."
    )
    fullest = max(found["fullest_share_of_budget"])
    claims = [
        (
            "speedup of batches of similar lengths over batches of one size",
            found["gain"],
            "1.5 or more",
            found["gain"] >= 1.5,
        ),
        ("largest share of an enforced memory budget in use", fullest, "1", fullest <= 1),
        (
            "largest difference of float64 weights from training in one process",
            f"{found['weights_apart']:.1g}",
            "1e-9",
            found["weights_apart"] <= 1e-9,
        ),
    ]
    rows = [(what, measured, limit, "yes" if holds else "no") for what, measured, limit, holds in claims]
    return [
        *_opened("Batches of like length", text, "lengths", found),
        *_table(("claim", "measured", "limit", "holds"), rows),
    ]


def _noise_scale() -> list[str]:
    found = _read("noise_scale")
    recommended, own = found["recommended"], found["plan_effective_batch_size"]
    text = (
        "Training to a target loss at several effective batch sizes, each with `plan.goodput`'s factor for the "
        "learning rate. "
        f"The noise scale, estimated with an effective batch of {own}, was {found['noise_scale']:,.0f}. "
        f"`plan.goodput` then recommended {recommended}. Training with {recommended} took "
        f"{found['ratio_to_best']:.2f} times as long as the best, {found['best']} (expected: at most 1.10), and "
        f"{found['ratio_to_plan']:.2f} times as long as {own} ({1 / found['predicted_gain']:.2f} predicted)."
    )
    columns = ("effective batch", "steps", "seconds", "samples/s", "predicted")
    rows: list[tuple[object, ...]] = []
    for size, row in found["batches"].items():
        if row is None:
            rows.append((size, "did not reach the target", "", "", ""))
        else:
            rates = f"{row['samples_per_s']:,}", f"{row['predicted_samples_per_s']:,}"
            rows.append((size, f"{row['steps']:,g}", f"{row['seconds']:.2f}", *rates))
    return [*_opened("The effective batch", text, "noise_scale", found), *_table(columns, rows)]


def _startup() -> list[str]:
    found = _read("startup")
    text = "The time of commands that need no tuning, compared with importing torch."
    rows = [
        (f"`{command}`", f"{found[name]['median_s']:.2f}", f"{found['shares'][name]['ratio_of_medians']:.2f}")
        for name, command in found["commands"].items()
    ]
    columns = ("command", "seconds", "relative to importing torch")
    return [*_opened("Start-up", text, "startup", found), *_table(columns, rows), f"Limits: {found['claim']}."]


def _growth() -> list[str]:
    found = _read("growth")
    now, before = found["commits"]["now"], found["commits"]["before"]
    text = (
        f"Commit {now} and commit {before} in turns, on a machine with other load. CPU seconds depend less on that "
        "load than the wall time. A model of N tensors has N parameters with one operator each."
    )
    cases = {f"{name} (tensors)": case for name, case in found["tensors"].items()}
    cases["`examples/char_gpt.py` on sim:2xRTX4090"] = found["char_gpt on sim:2xRTX4090"]
    rows = [
        (name, *(f"{case[key]:.2f}" for key in ("before_cpu_s", "now_cpu_s", "cpu_ratio", "wall_ratio")))
        for name, case in cases.items()
    ]
    columns = ("tune", "before, CPU s", "now, CPU s", "ratio", "ratio of wall times")
    stored = next(value for name, value in found.items() if name.endswith("profiles"))
    commands = [
        (
            f"`{command}`",
            *(f"{case[name][key]:.2f}" for name in ("before", "now") for key in ("cpu_ratio", "wall_ratio")),
        )
        for command, case in stored.items()
    ]
    headings = ("1,000 profiles relative to 1", "before, CPU", "before, wall", "now, CPU", "now, wall")
    lines = [*_opened("Growth", text, "growth", found), *_table(columns, rows), *_table(headings, commands)]
    return [*lines, f"Limits: {found['claim']}."]


def _tune_time() -> list[str]:
    found = _read("tune_time")
    text = (
        f"The wall time of `tune`, compared with commit {found['before']}, which traced real devices. The versions "
        "take turns. The times of equal runs differ by up to a factor of 2 on this machine, so the least times are "
        "compared, too."
    )
    rows = [
        (name, f"{min(case['before_s']):.1f}", f"{min(case['now_s']):.1f}", case["ratio_of_least"], case["ratio"])
        for name, case in found["cases"].items()
    ]
    columns = ("case", "least before, s", "least now, s", "ratio", "median ratio of a round")
    return [*_opened("The time of a tuning", text, "tune_time", found), *_table(columns, rows)]


if __name__ == "__main__":
    (Path(__file__).parent / "measurements.md").write_text(page(), encoding="utf-8")

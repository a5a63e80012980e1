"""``kvevict bench``: speed and memory beside transformers' own caches, in one process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvevict.commands.options import Commands, add_device, counts, names, need, positive, say
from kvevict.commands.progress import bar
from kvevict.errors import OptionError

if TYPE_CHECKING:
    from kvevict.bench import Report, Settings

POLICIES = ["streaming_llm", "tova", "h2o", "snapkv", "adaptive_ema"]
QUICK_POLICIES = ["streaming_llm", "tova", "h2o"]
USED_BY = {
    "held": ("decode", "compiled"),
    "seen": ("after", "fit"),
    "prefill": ("prefill", "memory"),
    "repeats": ("prefill",),
    "cost": ("cost",),
    "scale_policies": ("scaling", "bounded"),
    "scale_seen": ("scaling",),
    "scale_budget": ("scaling",),
    "scale_batch": ("scaling",),
    "scale_layers": ("scaling",),
    "long": ("bounded",),
    "chunk": ("bounded",),
}
"""The sections that an option is for, where it is not for all of them."""


def add(commands: Commands) -> None:
    """Declares the command."""
    bench = commands.add_parser(
        "bench",
        help="measure speed and memory against transformers' own caches",
        description="Time decode steps and prompts with every cache in turn, in one process, and print medians as "
        "ratios to DynamicCache; measure peak memory, the cost of each policy per layer, how steps scale, and long "
        "prompts in pieces. Run it on a machine that does nothing else. In brackets: the default; with --quick.",
    )
    bench.set_defaults(run=run)
    add = bench.add_argument
    add("--model", help='"smollm2", "gemma3", a local folder, or a Hugging Face Hub id [smollm2]')
    add("--shape", help='a Llama with random weights instead: 1b, 3b, 8b, or "layers=2,hidden=64,heads=4,kv_heads=2"')
    add_device(bench)
    add("--quick", action="store_true", help="small sizes and few repetitions: under a minute, to see that all works")
    add("--policies", type=names, help=f'"all", or names separated by commas [{",".join(POLICIES)}; three of them]')
    sections = "decode, after, prefill, memory, cost, scaling, bounded, waits, fit, compiled [all but compiled]"
    add("--sections", type=names, help=sections)
    add("--baselines", type=names, help="beside DynamicCache: eager, static, sliding, in-place [all]")
    add("--kvpress", metavar="PYTHON", help="also measure kvpress's decode presses with this interpreter, which has it")
    add("--held", type=counts, help="decode and compiled: tokens in every cache, separated by commas [256,1024; 256]")
    add("--seen", type=counts, help="decode after so many tokens, against the full cache [4096; 1024]")
    add("--prefill", type=counts, help="tokens of the prompts [1024; 256]")
    add("--budget", type=positive, help="tokens per KV head after a prompt and after --seen [512; 256]")
    add("--steps", type=positive, help="decode steps of each cache [30; 8]")
    add("--repeats", type=positive, help="prompts of each cache [3; 2]")
    add("--cost", type=counts, help="policy cost: tokens held [512; 256]")
    add("--scale-policies", type=names, help="who takes part in scaling and in the long prompt [h2o]")
    add("--scale-seen", type=counts, help="tokens seen [1024,2048,4096,8192,16384; 512,1024]")
    add("--scale-budget", type=counts, help="budgets [64,256,1024,4096; 64,256]")
    add("--scale-batch", type=counts, help="rows [1,4,16; 1,4]")
    add("--scale-layers", type=counts, help="layers [4,8,16,32; 2,4]")
    add("--long", type=positive, help="tokens of a prompt read in pieces, at a budget of one piece [8192; 1024]")
    add("--chunk", type=positive, help="tokens of a piece [1024; 128]")
    add("--output", type=Path, default=Path("kvevict-results"), help="folder for bench.json [kvevict-results]")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the tables and writes the file."""
    need("bench", "tqdm")
    # imported here: the other commands need none of it
    from kvevict import bench
    from kvevict.policies import POLICIES as KNOWN
    from kvevict.policies import make_policy
    from kvevict.results import check_folder, environment, save_files

    # whatever can be wrong with the command is found before anything slow
    wanted = (QUICK_POLICIES if options.quick else POLICIES) if options.policies is None else options.policies
    if not wanted:
        raise OptionError("no policy to measure: name at least one, or leave --policies out")
    policies = {name: make_policy(name) for name in (KNOWN if wanted == ["all"] else wanted)}
    settings = settings_of(options, list(policies))
    check_folder(options.output)
    if settings.kvpress:
        bench.check_kvpress(settings.kvpress)
    model, description = model_of(options)
    report = bench.Report(
        {
            "model": description,
            "device": device_name(model.device),
            "attention": str(model.config._attn_implementation),
            "budget": settings.budget,
            "steps": settings.steps,
            "repeats": settings.repeats,
            "chunk": settings.chunk,
            **environment(),
        }
    )
    measure(model, policies, settings, report)
    [path] = save_files(options.output, {bench.FILE: report.json().encode()})
    print(report.text())
    print("Written:", path)


def settings_of(options: argparse.Namespace, policies: list[str]) -> Settings:
    """The settings that the options ask for. Raises OptionError for an option of sections that are not asked for."""
    from kvevict import bench
    from kvevict.bench.plan import changed

    lists = ("held", "seen", "prefill", "cost", "scale_seen", "scale_budget", "scale_batch", "scale_layers")
    given: dict[str, Any] = {
        name: None if (value := getattr(options, name)) is None else tuple(value)
        for name in (*lists, "sections", "baselines", "scale_policies")
    }
    given |= {name: getattr(options, name) for name in ("budget", "steps", "repeats", "long", "chunk", "kvpress")}
    settings = bench.QUICK if options.quick else bench.DEFAULT
    if given["scale_policies"] is None and not set(settings.scale_policies or ()) <= set(policies):
        given["scale_policies"] = tuple(policies[:1])
    wanted = changed(settings, **given)
    for name, sections in USED_BY.items():
        if getattr(options, name) is not None and not set(sections) & set(wanted.sections):
            raise OptionError(
                f"--{name.replace('_', '-')} is for the sections {' and '.join(sections)}, and --sections is "
                f"{','.join(wanted.sections)}: leave it out, or add one of them"
            )
    return wanted


def model_of(options: argparse.Namespace) -> tuple[Any, str]:
    """The model and one line that says what it is. Raises OptionError for options that exclude one another."""
    import torch

    from kvevict.bench import parse_shape, random_model
    from kvevict.models import check_device, check_installed, load_model

    if options.device is not None:
        check_device(options.device)
    if options.device == "auto":
        raise OptionError("device='auto' spreads a model over devices that wait for one another: name one device")
    if options.shape is None:
        check_installed(options.model)
        loaded = load_model(options.model, device=options.device, dtype=options.dtype, notify=say)
        return loaded.model, loaded.description
    if options.model is not None or options.kvpress is not None:
        other = "--model" if options.model is not None else "--kvpress"
        raise OptionError(f"--shape makes a model that is on no disk: leave out {other}")
    shape = parse_shape(options.shape)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device is None else options.device
    name = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    if name == "auto":
        raise OptionError("dtype='auto' is a checkpoint's own, and --shape has none: give float32, bfloat16 or float16")
    model = random_model(shape, device=device, dtype=getattr(torch, name))
    return model, f"random Llama {shape}, {name} on {torch.device(device).type}"


def device_name(device: Any) -> str:
    """The device, and what kind of accelerator it is."""
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def measure(model: Any, policies: dict[str, Any], settings: Settings, report: Report) -> None:
    """Runs the jobs under a progress bar that tells the time left."""
    from kvevict.bench import jobs

    todo = jobs(model, policies, settings, report)
    total, form = sum(job.weight for job in todo), "{l_bar}{bar}| {elapsed} gone, {remaining} left"
    with bar(total=total, bar_format=form, smoothing=0.05) as shown:
        done = 0.0
        for job in todo:
            shown.set_description(job.title, refresh=False)
            done += job.weight

            def progress(share: float, weight: float = job.weight, end: float = done) -> None:
                shown.update(min(share * weight, end - shown.n))  # sums of shares are not exact

            job.run(progress)
            shown.update(done - shown.n)  # whatever the job did not tell

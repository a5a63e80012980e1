"""What one run of the bench measures: sizes by section, and the jobs in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from kvevict import host
from kvevict.bench import compiling, memory, overhead, peers, scaling, timing
from kvevict.bench.caches import BASELINES, check_baselines, left_out
from kvevict.bench.rows import Report
from kvevict.bench.timing import WARM_UP, Progress
from kvevict.cache import EvictingCache
from kvevict.errors import OptionError
from kvevict.policies.base import Policy

SECTIONS = ("decode", "after", "prefill", "memory", "cost", "scaling", "bounded", "waits", "fit", "compiled")
"""As the command calls them. ``waits`` and ``fit`` need an accelerator."""
USUAL = tuple(each for each in SECTIONS if each != "compiled")
"""All but the one that needs a compiler, and a minute for each kind of cache."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the sections; one that is empty leaves its section out.

    held, seen, prefill: tokens, of ``decode`` and ``compiled_steps``, of ``against_full``, and of ``prefill`` and
        ``prompt_memory``.
    budget:      after a prompt and after ``seen``.
    cost:        tokens held where the policies' cost is measured.
    scale_*:     what the scaling sections vary; ``scale_policies`` take part, all of them if None.
    scale_held:  tokens held while rows or layers vary; ``scale_budget`` is what holds while ``scale_seen`` varies.
    long, chunk: tokens of the bounded prompt, and of a piece of it, at a budget of one piece.
    """

    sections: tuple[str, ...] = USUAL
    baselines: tuple[str, ...] = tuple(BASELINES)
    held: tuple[int, ...] = (256, 1024)
    seen: tuple[int, ...] = (4096,)
    prefill: tuple[int, ...] = (1024,)
    budget: int = 512
    steps: int = 30
    repeats: int = 3
    cost: tuple[int, ...] = (512,)
    scale_policies: tuple[str, ...] | None = ("h2o",)
    scale_seen: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    scale_budget: tuple[int, ...] = (64, 256, 1024, 4096)
    scale_batch: tuple[int, ...] = (1, 4, 16)
    scale_layers: tuple[int, ...] = (4, 8, 16, 32)
    scale_held: int = 256
    long: int = 8192
    chunk: int = 1024
    kvpress: str | None = None

    def __post_init__(self) -> None:
        for name in self.sections:
            if name not in SECTIONS:
                raise OptionError(f"section {name!r}: give some of {', '.join(SECTIONS)}")
        check_baselines(self.baselines)
        timing.check_counts(self.steps, self.budget, self.scale_held, *self.held, *self.seen, *self.prefill, *self.cost)
        timing.check_counts(self.repeats, *(self.scale_seen or (2,)), *(self.scale_budget or (2,)))
        memory.check_pieces(self.long, self.chunk)
        peer = ("decode" in self.sections and self.held) or ("after" in self.sections and self.seen)
        if self.kvpress and not peer:
            raise OptionError("kvpress is measured at the sizes of the sections decode and after: ask for one of them")

    def budgets(self) -> list[int]:
        """Every budget that some policy gets."""
        named = {"decode": self.held, "after": (self.budget,), "prefill": (self.budget,), "cost": self.cost}
        scaling = (*self.scale_budget, self.scale_held, self.budget)
        named |= {"scaling": scaling, "bounded": (self.chunk,), "compiled": self.held}
        return sorted({each for section, sizes in named.items() if section in self.sections for each in sizes})

    def longest(self) -> int:
        """The most tokens that any cache will see."""
        named = {"decode": self.held, "after": self.seen, "prefill": self.prefill, "memory": self.prefill}
        scaling = (*self.scale_seen, *self.scale_budget, self.scale_held)
        named |= {"cost": self.cost, "scaling": scaling, "bounded": (self.long,), "waits": (self.budget,)}
        named |= {"compiled": self.held}
        sizes = [each for section, sizes in named.items() if section in self.sections for each in sizes]
        return max(sizes, default=0) + len(self.scale_seen or (0,)) * (self.steps + WARM_UP)


DEFAULT = Settings()
QUICK = Settings(
    held=(256,),
    seen=(1024,),
    prefill=(256,),
    budget=256,
    steps=8,
    repeats=2,
    cost=(256,),
    scale_seen=(512, 1024),
    scale_budget=(64, 256),
    scale_batch=(1, 4),
    scale_layers=(2, 4),
    scale_held=128,
    long=1024,
    chunk=128,
)
"""Under a minute for a small model; too few repetitions for figures to be quoted."""


@dataclass(frozen=True)
class Job:
    """One section at one size: what it is called, how long it may last in rough units, and what runs it."""

    title: str
    weight: float
    run: Callable[[Progress | None], None]


def jobs(model: PreTrainedModel, policies: Mapping[str, Policy], settings: Settings, report: Report) -> list[Job]:
    """What to run, in order; each adds its rows to ``report``. What cannot be measured is noted there at once.

    Raises OptionError for names that scaling should take and that are not among ``policies``, for a policy that one
    of the budgets cannot hold, for sizes beyond a model's learned positions, and where nothing is asked for.
    """
    scaled = _scaled(policies, settings)
    _check_positions(model, settings)
    if "compiled" in settings.sections:
        compiling.check_compiler(model.device)
    for budget in settings.budgets():  # found now, and not after minutes
        for policy in policies.values():
            EvictingCache(model, policy, budget=budget)
    _note(model, settings, report)
    made = [*_step_jobs(model, policies, settings, report), *_prompt_jobs(model, policies, settings, report)]
    if "cost" in settings.sections:
        for held in settings.cost:
            weight = (len(policies) + 1) * (settings.steps + held / 15)

            def cost(progress: Progress | None, held: int = held) -> None:
                report.policy_cost += overhead.policy_cost(
                    model, policies, held, steps=settings.steps, progress=progress
                )

            made.append(Job("policy cost", weight, cost))
    if "scaling" in settings.sections:
        made += _scaling_jobs(model, scaled, settings, report)
    if "bounded" in settings.sections:
        weight = settings.long / 30 * (len(scaled) + 1) * (1 + settings.long / 16000)

        def bounded(progress: Progress | None) -> None:
            chunk = settings.chunk
            report.bounded += memory.bounded_prefill(model, scaled, settings.long, chunk, chunk, progress=progress)

        made.append(Job("bounded prefill", weight, bounded))
    if model.device.type != "cpu":
        made += _accelerator_jobs(model, policies, settings, report)
    if settings.kvpress:
        made.append(_kvpress_job(model, settings, report))
    if not made:
        raise OptionError(
            f"nothing to measure on {model.device} in sections={settings.sections}: ask for a section, and a size in it"
        )
    return made


def _scaled(policies: Mapping[str, Policy], settings: Settings) -> dict[str, Policy]:
    if settings.scale_policies is None:
        return dict(policies)
    missing = [name for name in settings.scale_policies if name not in policies]
    if missing:
        raise OptionError(f"scaling should take {', '.join(missing)}, which is not among {', '.join(policies)}")
    return {name: policies[name] for name in settings.scale_policies}


def _check_positions(model: PreTrainedModel, settings: Settings) -> None:
    """Learned positions end; rotary ones go on, and their speed with them."""
    config = host.decoder_config(model)
    known = getattr(config, "max_position_embeddings", None)
    if known is None or getattr(config, "rope_parameters", None) is not None or settings.longest() <= known:
        return
    raise OptionError(
        f"{type(model).__name__} has learned {known} positions, and {settings.longest()} are asked for: give smaller "
        "sizes, or leave sections out"
    )


def _note(model: PreTrainedModel, settings: Settings, report: Report) -> None:
    """What is left out, and why."""
    reasons = left_out(model, settings.baselines)
    report.notes += [f"{name} is left out: {why}" for name, why in reasons.items()]
    if host.implementation(model) != "sdpa":
        report.notes.append(f"DynamicCache runs {host.implementation(model)} attention here, not sdpa")
    missing = [name for name in ("waits", "fit") if name in settings.sections]
    if model.device.type == "cpu" and missing:
        names = {"waits": "waits for the accelerator per step", "fit": "the largest batch that fits"}
        report.notes.append(f"{' and '.join(names[each] for each in missing)}: does not apply to a CPU")


def _step_jobs(model: PreTrainedModel, policies: Mapping[str, Policy], settings: Settings, report: Report) -> list[Job]:
    made = []
    group = len(policies) + 1 + len(settings.baselines)
    for held in settings.held if "decode" in settings.sections else ():

        def decode(progress: Progress | None, held: int = held) -> None:
            report.timings += timing.decode(
                model, policies, held, steps=settings.steps, baselines=settings.baselines, progress=progress
            )

        weight = group * (settings.steps + WARM_UP) * (1 + held / 4000) + len(policies) * held / 30
        made.append(Job(f"decode, {held} held", weight, decode))
    for seen in settings.seen if "after" in settings.sections else ():

        def after(progress: Progress | None, seen: int = seen) -> None:
            report.timings += timing.against_full(
                model,
                policies,
                seen,
                settings.budget,
                steps=settings.steps,
                baselines=settings.baselines,
                progress=progress,
            )

        weight = (group + 1) * (settings.steps + WARM_UP) * 1.3 + len(policies) * seen / 30
        made.append(Job(f"decode, {seen} seen", weight, after))
    for held in settings.held if "compiled" in settings.sections else ():

        def compiled(progress: Progress | None, held: int = held) -> None:
            report.timings += compiling.compiled_steps(
                model, policies, held, steps=settings.steps, baselines=settings.baselines, progress=progress
            )

        weight = 2 * group * (settings.steps + WARM_UP) * (1 + held / 4000) + 800
        made.append(Job(f"compiled, {held} held", weight, compiled))
    return made


def _prompt_jobs(
    model: PreTrainedModel, policies: Mapping[str, Policy], settings: Settings, report: Report
) -> list[Job]:
    made = []
    group = len(policies) + len(settings.baselines)
    for tokens in settings.prefill if "prefill" in settings.sections else ():

        def prefill(progress: Progress | None, tokens: int = tokens) -> None:
            report.timings += timing.prefill(
                model,
                policies,
                tokens,
                settings.budget,
                repeats=settings.repeats,
                baselines=settings.baselines,
                progress=progress,
            )

        weight = group * (settings.repeats + 1) * tokens / 30 * (1 + tokens / 4000)
        made.append(Job(f"prompts of {tokens}", weight, prefill))
    for tokens in settings.prefill if "memory" in settings.sections else ():

        def peaks(progress: Progress | None, tokens: int = tokens) -> None:
            report.memory += memory.prompt_memory(
                model, policies, tokens, settings.budget, baselines=settings.baselines, progress=progress
            )

        made.append(Job(f"memory of {tokens}", group * tokens / 30 * (1 + tokens / 4000), peaks))
    return made


def _scaling_jobs(
    model: PreTrainedModel, policies: Mapping[str, Policy], settings: Settings, report: Report
) -> list[Job]:
    steps, held = settings.steps, settings.scale_held
    each = (len(policies) + 1) * (steps + WARM_UP)
    made = []
    if settings.scale_seen:

        def seen(progress: Progress | None) -> None:
            sizes, budget = settings.scale_seen, settings.budget
            report.timings += scaling.by_seen(model, policies, sizes, budget, steps=steps, progress=progress)

        weight = each * sum(1 + n / 4000 for n in settings.scale_seen) + len(policies) * max(settings.scale_seen) / 30
        made.append(Job("scaling, seen", weight, seen))
    if settings.scale_budget:

        def budgets(progress: Progress | None) -> None:
            report.timings += scaling.by_budget(model, policies, settings.scale_budget, steps=steps, progress=progress)

        weight = sum(each * (1 + n / 4000) + len(policies) * n / 30 for n in settings.scale_budget)
        made.append(Job("scaling, budget", weight, budgets))
    if settings.scale_batch:

        def batches(progress: Progress | None) -> None:
            sizes = settings.scale_batch
            report.timings += scaling.by_batch(model, policies, sizes, held, steps=steps, progress=progress)

        weight = sum(each * (1 + n / 8) + len(policies) * n * held / 30 for n in settings.scale_batch)
        made.append(Job("scaling, batch", weight, batches))
    if settings.scale_layers:

        def layers(progress: Progress | None) -> None:
            sizes = settings.scale_layers
            report.timings += scaling.by_layers(model, policies, sizes, held, steps=steps, progress=progress)

        made.append(Job("scaling, layers", sum(each * n / 30 + 60 for n in settings.scale_layers), layers))
    return made


def _accelerator_jobs(
    model: PreTrainedModel, policies: Mapping[str, Policy], settings: Settings, report: Report
) -> list[Job]:
    made = []
    if "waits" in settings.sections:

        def waits(progress: Progress | None) -> None:
            report.waits += overhead.host_waits(model, policies, settings.budget, progress=progress)

        made.append(Job("host waits", 20 * len(policies), waits))
    for seen in settings.seen if "fit" in settings.sections else ():

        def fit(progress: Progress | None, seen: int = seen) -> None:
            report.fits += memory.largest_batches(model, policies, seen, settings.budget, progress=progress)

        made.append(Job(f"largest batch, {seen} seen", 200 * len(policies), fit))
    return made


def _kvpress_job(model: PreTrainedModel, settings: Settings, report: Report) -> Job:
    held = settings.held if "decode" in settings.sections else ()
    seen = settings.seen if "after" in settings.sections else ()

    def kvpress(progress: Progress | None) -> None:
        assert settings.kvpress is not None
        peer = peers.measure_kvpress(
            settings.kvpress, model, held, seen, settings.budget, steps=settings.steps, progress=progress
        )
        report.timings += peer.rows
        report.notes += peer.notes()

    steps = (len(peers.PRESSES) + 1) * (settings.steps + WARM_UP) * 1.2
    return Job("kvpress", sum(steps + n / 30 for n in (*held, *seen)) + 200, kvpress)


def changed(settings: Settings, **given: object) -> Settings:
    """The settings with those of ``given`` that are not None."""
    return replace(settings, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]  # replace() checks the names

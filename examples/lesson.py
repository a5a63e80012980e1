"""A lesson in four caches: what a bounded cache forgets, and what that costs, on random text and on real text.

    python examples/lesson.py [--text FILE] [--output lesson.png]

A decoder keeps a key and a value for every token that it has read. This walk gives it room for 64 and reads four times
as many, once for each cache:

    full            forgets nothing
    sliding window  the newest 64
    StreamingLLM    the first 4, which models use as attention sinks, and the newest 60
    H2O             the 32 with the most attention so far, and the newest 32

It does so for a small GPT that never learned anything, on random numbers for text, and for a model that reads English.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from kvevict import EvictingCache
from kvevict.bootstrap import Interval, paired_bootstrap
from kvevict.evaluation import Result, perplexity
from kvevict.models import load_model
from kvevict.protocols import streaming
from kvevict.text import load_text, tokenize

VOCABULARY = 1000
FULL = "full"
CACHES = {"sliding window": "sliding_window", "StreamingLLM": "streaming_llm", "H2O": "h2o"}
SINKS = 4
HATCHES = {FULL: "", "sliding window": "//", "StreamingLLM": "..", "H2O": "xx"}  # told apart in black and white too
Runs = Mapping[str, list[Result]]
"""For each cache, what each text gave."""


def small_gpt(positions: int) -> GPT2LMHeadModel:
    """A GPT of four layers with four heads of 32, its weights random: it has learned nothing."""
    torch.manual_seed(0)
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": positions}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **ends)).eval()


def read(model: PreTrainedModel, texts: list[Tensor], budget: int) -> Runs:
    """Reads each text (N,) through each cache, one token at a time, as a model that generates would."""
    makers = {FULL: partial(DynamicCache, config=model.config)}
    makers |= {title: partial(EvictingCache, model, policy, budget) for title, policy in CACHES.items()}
    return {
        title: [perplexity(model, ids, make, protocol=streaming()) for ids in texts] for title, make in makers.items()
    }


def total(results: list[Result]) -> float:
    """The perplexity of all texts together: exp of the mean loss of a token."""
    return float(torch.cat([result.nll for result in results]).double().mean().exp())


def difference(runs: Runs, first: str, second: str) -> Interval:
    """How much more the first cache loses than the second, in nats per token, with its 95 % interval."""
    return paired_bootstrap([result.nll for result in runs[first]], [result.nll for result in runs[second]])


def table(runs: Runs) -> str:
    """Perplexity and bytes of each cache, and how much more it loses than the full one."""
    lines = [f"{'cache':16}{'perplexity':>11}{'held':>11}  loss beyond the full cache's, nats per token"]
    for title, results in runs.items():
        size = f"{results[0].held_bytes / 2**20:.2f} MiB"
        gap = difference(runs, title, FULL)
        verdict = "" if title == FULL else f"  {gap.difference:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"
        verdict += " a tie" if title != FULL and gap.tie else ""
        lines.append(f"{title:16}{total(results):11.2f}{size:>11}{verdict}")
    return "\n".join([*lines, f"(intervals: paired bootstrap over {gap.units})"])


def claims(runs: Runs) -> str:
    """What the lesson expects to see, and whether it was seen."""
    evicting = list(CACHES)
    others = [name for name in evicting if name != "sliding window"]
    streaming_gap, window_gap = (difference(runs, name, FULL).difference for name in ("StreamingLLM", "sliding window"))
    lines = [
        said("the full cache has the lowest perplexity", [difference(runs, name, FULL) for name in evicting]),
        said("the sliding window has the highest", [difference(runs, "sliding window", name) for name in others]),
        said("four sinks make the window better", [difference(runs, "sliding window", "StreamingLLM")]),
    ]
    if lines[2].endswith("yes"):
        lines[2] += f": they win back {1 - streaming_gap / window_gap:.0%} of what the window loses"
    return "\n".join(lines)


def said(claim: str, gaps: list[Interval]) -> str:
    """The claim with "yes" if all differences are surely above 0, "no" if one is surely below, else "cannot tell"."""
    if all(gap.low > 0 for gap in gaps):
        verdict = "yes"
    else:
        verdict = "no" if any(gap.high < 0 for gap in gaps) else "cannot tell"
    return f"  {claim + ' ':.<45} {verdict}"


@torch.no_grad()
def where_attention_goes(model: PreTrainedModel, ids: Tensor, budget: int) -> str:
    """How much of the attention of the queries past the budget is on the first tokens, the newest, and between."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # fused kernels never write the weights down
    try:
        weights = model(ids[None].to(model.device), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    mean = torch.stack([layer[0, :, budget:].float().mean(0) for layer in weights]).mean(0).cpu()  # (Q, N)
    queries = torch.arange(budget, len(ids))[:, None]
    columns = torch.arange(len(ids))
    newest = (columns > queries - (budget - SINKS)) & (columns <= queries)
    first = float(mean[:, :SINKS].sum(1).mean())
    recent = float((mean * newest).sum(1).mean())
    even = float((SINKS / (queries + 1)).mean())
    return (
        f"Of a query's attention, {first:.0%} is on the first {SINKS} tokens, {recent:.0%} on the newest "
        f"{budget - SINKS}, {1 - first - recent:.0%} between. Spread evenly, the first {SINKS} would get {even:.0%}."
    )


def chart(systems: Mapping[str, Runs], budget: int) -> Figure:
    """A bar for each cache with its perplexity above, one panel for each system, the full cache as a dashed line."""
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    for axes, (title, runs) in zip(figure.subplots(1, len(systems)), systems.items(), strict=True):
        heights = [total(results) for results in runs.values()]
        bars = axes.bar(range(len(runs)), heights, color="0.85", edgecolor="black", zorder=2)
        axes.axhline(heights[0], color="black", linestyle="--", linewidth=1, zorder=3)
        for bar, name, height in zip(bars, runs, heights, strict=True):
            bar.set_hatch(HATCHES[name])
            axes.annotate(
                f"{height:.2f}",
                (bar.get_x() + bar.get_width() / 2, height),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
            )
        axes.set_ylim(0, 1.12 * max(heights))
        axes.set_xticks(range(len(runs)), [name.replace(" ", "\n") for name in runs])
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel("Perplexity (lower is better)")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Caches of {budget} tokens per head and layer; dashed: the full cache", x=0.01, ha="left")
    return figure


def main() -> None:
    """Walks through both systems, prints what is seen, and writes the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2", a local folder, or a Hub id')
    parser.add_argument("--text", help="a text file; left out, WikiText-2 or Python's documentation")
    parser.add_argument("--tokens", type=int, default=512, help="of the real text")
    parser.add_argument("--budget", type=int, default=64, help="tokens that each cache may hold, per head and layer")
    parser.add_argument("--draws", type=int, default=10, help="random texts")
    parser.add_argument("--output", type=Path, default=Path("lesson.png"))
    options = parser.parse_args()
    budget, length = options.budget, 4 * options.budget
    print((__doc__ or "").partition("A decoder")[0].splitlines()[0])

    print(f"\n1. A small GPT with random weights, {options.draws} random texts of {length} tokens, budget {budget}\n")
    gpt = small_gpt(length)
    generator = torch.Generator().manual_seed(0)
    draws = list(torch.randint(VOCABULARY, (options.draws, length), generator=generator))
    toy = read(gpt, draws, budget)
    print(table(toy), "", claims(toy), "", where_attention_goes(gpt, draws[0], budget), sep="\n")
    print(
        f"""
What this can show: that bounded caches work. They hold a quarter of the bytes, however long the text becomes, and
the first {budget} tokens cost the same through all of them: {same_until(toy, budget)}.

What it cannot show: quality. Each token was drawn by lot, so nothing that came before helps to predict it, and the
best anyone can do is a perplexity of {VOCABULARY:,}, the size of the vocabulary. Where remembering is of no use,
forgetting costs nothing, and may even help by a hair: the context is only noise. Nor has this model learned to lean on
its first tokens, so there are no sinks to evict. Look at the intervals, not at the order of the bars: other random
texts, or other random weights, rank them differently."""
    )

    text = load_text(options.text)
    if text.notice:
        print(f"\n{text.notice}")
    model, tokenizer, description = load_model(options.model, notify=print)
    ids = tokenize(tokenizer, text.text, options.tokens).ids
    print(f"\n2. {description}, the first {len(ids)} tokens of {text.name}, budget {budget}\n")
    real = read(model, [ids], budget)
    print(table(real), "", claims(real), "", where_attention_goes(model, ids, budget), sep="\n")
    print(
        f"""
What this can show: what forgetting costs this model on this text. Evicting the first tokens takes away where the
heads put the attention that they have no use for; sinks give it back for {SINKS} slots. H2O looks for the tokens that
are attended to, wherever they are, and has to see the attention for that: kvevict computes its rows beside the fused
kernel, which never writes them down. `kvevict bench` says what that costs.

What it cannot show: other models, other texts, longer ones, or whether an answer is still found. `kvevict compare`
takes another model, `kvevict sweep` many budgets and texts, `kvevict needle` asks for facts."""
    )
    words = description.split(" (")[0].split(",")[0]
    titles = (
        f"Random GPT on random text, {options.draws} × {length} tokens",
        f"{words} on {text.name}, {len(ids)} tokens",
    )
    chart(dict(zip(titles, (toy, real), strict=True)), budget).savefig(options.output, dpi=150)
    print(f"\nWritten: {options.output}")


def same_until(runs: Runs, budget: int) -> str:
    """The largest difference in loss before anything was evicted."""
    most = max(
        float((result.nll - full.nll)[:budget].abs().max())
        for results in runs.values()
        for result, full in zip(results, runs[FULL], strict=True)
    )
    return f"their losses differ by at most {most:.0e}" if most else "their losses are the same to the last bit"


if __name__ == "__main__":
    main()

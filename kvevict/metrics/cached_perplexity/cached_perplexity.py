"""Perplexity of texts through a cache that evicts, as a metric of ``evaluate``."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from kvevict.metrics import text_perplexities

DESCRIPTION = """
The perplexity of each text, read through transformers' full cache or through a kvevict cache with a policy and a
budget; fresh for each text. At a budget that no text exceeds it is the perplexity metric of evaluate.
"""
INPUTS = """
predictions (list of str): the texts.
model_id (str): "smollm2", "gemma3", a local folder, or a Hugging Face Hub id.
policy (str), budget (int or float), and the policy's options: as kvevict.EvictingCache takes them.
chunk (int): tokens per forward; 32 if left out.
add_start_token (bool): predict the first token too, after the start token; True if left out.
max_length (int): the most tokens of a text; all if left out.
device (str): such as "cpu" or "cuda".

Returns: perplexities (list of float), mean_perplexity (float).
"""


class CachedPerplexity(evaluate.Metric):  # type: ignore[misc]  # evaluate is not annotated
    """The perplexity metric with a policy and a budget."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            module_type="metric",
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
            reference_urls=["https://huggingface.co/docs/transformers/perplexity"],
        )

    def _compute(self, predictions: list[str], model_id: str, **options: Any) -> dict[str, Any]:
        return text_perplexities(predictions, model_id, **options)

"""The model ``kvevict`` of lm-evaluation-harness: ``python -m kvevict.harness`` is its command with this model known.

    python -m kvevict.harness run --model kvevict --tasks lambada_openai \\
        --model_args pretrained=HuggingFaceTB/SmolLM2-135M,policy=h2o,budget=128
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from kvevict.cache import EvictingCache
from kvevict.checks import check_budget
from kvevict.errors import OptionError
from kvevict.host import cache_argument
from kvevict.policies import make_policy
from kvevict.policies.base import Policy


@register_model("kvevict")
class KvevictLM(HFLM):  # type: ignore[misc]  # lm_eval is not annotated for its users
    """A Hugging Face model that reads and generates through an ``EvictingCache``, fresh for each batch.

    policy, budget: as ``EvictingCache`` takes them, with the policy's options beside them, such as ``sinks=4``.
    chunk:          tokens per forward of texts that are scored. A text fed at once would be attended to in full, and
        its likelihood would be the full cache's.

    Other arguments are those of the harness's model ``hf``. Texts that are generated from are fed whole and cut once,
    as ``generate()`` does.
    """

    def __init__(
        self, pretrained: Any, policy: str = "h2o", budget: int | float = 512, chunk: int = 32, **arguments: Any
    ) -> None:
        names = {option.name for option in dataclasses.fields(type(make_policy(policy)))}
        options = {name: arguments.pop(name) for name in list(arguments) if name in names}
        self.policy: Policy = make_policy(policy, **options)
        self.budget = check_budget(budget)
        if type(chunk) is not int or chunk < 1:
            raise OptionError(f"chunk={chunk!r}: give at least 1 token per forward")
        self.chunk = chunk
        super().__init__(pretrained, **arguments)
        if self.backend != "causal":
            raise OptionError(f"backend={self.backend!r}: only decoders are handled")

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits (B, N, vocabulary) of ``inps`` (B, N), which are padded on the right, where no real token sees it."""
        if attn_mask is not None or labels is not None:
            raise OptionError("attn_mask and labels belong to encoder-decoders: only decoders are handled")
        dtype = self.mixed_precision_dtype
        with (
            torch.no_grad(),
            torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None),
            EvictingCache(self.model, self.policy, self.budget) as cache,
        ):
            arguments = {cache_argument(self.model): cache, "use_cache": True}
            return torch.cat([self.model(block, **arguments).logits for block in inps.split(self.chunk, 1)], 1)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **arguments: Any) -> Tensor:
        """Greedy or sampled tokens after ``context`` (B, N), which is padded on the left."""
        with EvictingCache(self.model, self.policy, self.budget) as cache:
            arguments[cache_argument(self.model)] = cache
            tokens: Tensor = super()._model_generate(context, max_length, stop, **arguments)
            return tokens


if __name__ == "__main__":
    cli_evaluate()

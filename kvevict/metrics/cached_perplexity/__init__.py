"""The metric ``cached_perplexity`` of ``evaluate``."""

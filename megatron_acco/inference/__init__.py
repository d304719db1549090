"""A trained model in one process: its loading, the scores of texts, and text sampled from it.

loading.py    model and tokenizer of a checkpoint
scoring.py    perplexity, bits per byte, last-word accuracy
sampling.py   batched sampling with a cache of keys and values
"""

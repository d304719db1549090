"""From raw text to Megatron indexed files: what `megatron-acco preprocess-data` does, usable from Python as well.

inputs.py      find the files, read them as a stream of tasks with positions that can be continued from
encode.py      tokenize batches of documents, exactly as the tokenizer does one at a time
work.py        a task (raw lines, rows, texts) to token bytes; runs in the worker processes
writer.py      append token bytes to an indexed dataset with memory that does not grow
vocabulary.py  train a SentencePiece model
metadata.py    which tokenizer wrote a dataset; written beside it, compared when training starts
pipeline.py    all of it together: partitions, resuming, progress, publishing
"""

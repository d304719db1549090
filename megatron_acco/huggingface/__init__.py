"""Checkpoints to and from Hugging Face folders.

families.py   the GPT-2 and Llama families: what of one side the other can express, and the weights' names and layouts
exporting.py  a checkpoint to a folder for transformers
importing.py  a folder of transformers to a checkpoint
tokenizers.py the tokenizer's files
output.py     folders that are whole or not there

megatron-core has no converter of its own; transformers reads and writes the files.
"""

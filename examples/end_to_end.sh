#!/usr/bin/env bash
# From raw text to a model that transformers runs, with every step of megatron-acco on the way:
# raw text -> tokenizer and indexed data -> training with ACCO on two ranks -> perplexity -> Hugging Face folder -> text.
#
#   bash examples/end_to_end.sh OUT [TEXT FILE ...]
#
# Without text files it takes Python's own standard library. Needs: pip install -e '.[hf]'. UPDATES=300 trains longer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:?usage: bash examples/end_to_end.sh OUT [TEXT FILE ...]}
shift
LIBRARY=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
if [ $# -eq 0 ]; then set -- "$LIBRARY"/*.py; fi
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -n "$(ls -A "$OUT" 2>/dev/null)" ]; then
    echo "error: $OUT is not empty; give another folder" >&2
    exit 2
fi
mkdir -p "$OUT"

echo "== 1. tokenizer and indexed data"
megatron-acco preprocess-data --input "$@" --input-format text --output-prefix "$OUT/text" --append-eod \
    --tokenizer-type SentencePieceTokenizer --train-tokenizer --vocab-size "${VOCABULARY:-2000}"

echo "== 2. training with ACCO on two ranks"
deepspeed --num_gpus 2 --master_port "${PORT:-29500}" pretrain_gpt_acco.py \
    --deepspeed_config examples/end_to_end.json \
    --num-layers 2 --hidden-size "${HIDDEN:-128}" --num-attention-heads 4 --seq-length 128 --max-position-embeddings 256 \
    --swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2 \
    --untie-embeddings-and-output-weights --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 \
    --micro-batch-size 4 --global-batch-size 32 --train-iters "${UPDATES:-60}" --lr 3e-3 --min-lr 3e-4 \
    --lr-decay-style cosine --lr-warmup-iters 2 --data-path "$OUT/text_text_document" --split 90,10,0 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/text.model" \
    --save "$OUT/checkpoints" --eval-interval 0 --eval-iters 2 --log-interval 10 --num-workers 0

echo "== 3. perplexity and bits per byte of text that it has not seen"
megatron-acco evaluate --checkpoint "$OUT/checkpoints" --input "$LIBRARY"/json/*.py --input-format text \
    --out "$OUT/scores.json"

echo "== 4. Hugging Face folder"
megatron-acco export --checkpoint "$OUT/checkpoints" --out "$OUT/huggingface"

echo "== 5. text, with transformers alone"
python - "$OUT/huggingface" <<'PYTHON'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
# In training every document stands behind the end of another.
start = tokenizer.eos_token + "def main():\n"
ids = tokenizer(start, add_special_tokens=False, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=40, do_sample=False)[0], skip_special_tokens=True))
PYTHON

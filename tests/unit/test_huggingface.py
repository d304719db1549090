"""To and from Hugging Face folders, with small random models of transformers as the judge.

A model of each kind is imported, computes the same logits as transformers', and is exported again, bit for bit.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_acco.cli.main import main
from megatron_acco.training.checkpoint.weights import find_weights, fit_rows
from megatron_acco.training.model import ModelOptions
from megatron_acco.training.options import ArgumentParser, add_options, build

transformers = pytest.importorskip("transformers")

VOCABULARY = 203  # no multiple of anything
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "llama, grouped queries": LLAMA,
    "llama, tied, biases, one group, bf16": {
        **LLAMA,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "dtype": torch.bfloat16,
    },
    "gpt2": GPT2,
    "gpt2, untied, exact gelu": {**GPT2, "n_inner": 40, "activation_function": "gelu", "tie_word_embeddings": False},
}


def make(folder: Path, **settings: Any) -> Any:
    """A random model of transformers, saved in `folder`. Every tensor differs from what it is initialized with."""
    kind = transformers.GPT2Config if "n_embd" in settings else transformers.LlamaConfig
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    model.to(settings.get("dtype", torch.float32)).save_pretrained(folder)
    # Read again: transformers rounds the rotary frequencies of a model that it has converted.
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    from megatron_acco.inference.loading import one_process

    with one_process():
        yield


def logits_of(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    from megatron_acco.training.model import build_model

    weights = find_weights(checkpoint)
    model = build_model(weights.options, weights.rows)
    model.load_state_dict(weights.state())
    with torch.no_grad():
        return model.eval()(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_import_computes_the_same_and_export_gives_the_same_bytes(settings: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = make(tmp_path / "hf", **settings)
    assert main(["import", "--input", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 0
    tokens = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(tmp_path / "run", tokens), expected, rtol=0, atol=1e-4)
    # The arguments that it names are those of this model.
    parser = ArgumentParser()
    add_options(parser, ModelOptions, "model")
    given = vars(parser.parse_args(shlex.split((tmp_path / "run" / "arguments.txt").read_text())))
    options = build(ModelOptions, given)
    found = find_weights(tmp_path / "run").options
    assert {**vars(options), "make_vocab_size_divisible_by": 128} == vars(found)
    assert options.padded_vocab_size(VOCABULARY) == VOCABULARY

    words = ["export", "--checkpoint", str(tmp_path / "run"), "--no-tokenizer"]
    assert main([*words, "--out", str(tmp_path / "again")]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "again")]
    assert configs[0] == configs[1]
    assert not list(tmp_path.glob(".partial*"))


def test_export_cuts_padding_converts_and_shards(tmp_path: Path) -> None:
    """A padded checkpoint, as training writes it; the exported rows are those of the tokenizer."""
    from megatron_acco.training.checkpoint import store

    make(tmp_path / "hf", **CASES["gpt2"])
    assert main(["import", "--input", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 0
    weights = find_weights(tmp_path / "run")
    content = torch.load(weights.folder / store.MODEL_FILE, weights_only=False)
    content["module"] = fit_rows(content["module"], VOCABULARY, 256)
    content["megatron_acco"]["identity"]["model"]["padded_vocab_size"] = 256
    padded = tmp_path / "padded"
    padded.mkdir()
    torch.save(content, padded / store.MODEL_FILE)
    tokens = torch.randint(VOCABULARY, (1, 40))
    logits = logits_of(padded, tokens)
    assert logits.shape[-1] == 256
    # The padding of `fit_rows` is at most as likely as an average id.
    assert float(logits.softmax(-1)[..., VOCABULARY:].max()) <= 1 / VOCABULARY
    words = ["export", "--checkpoint", str(padded), "--no-tokenizer", "--max-shard-size", "20KB"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, logits[..., :VOCABULARY], rtol=0, atol=1e-4)
    assert main([*words, "--out", str(tmp_path / "half"), "--dtype", "bf16"]) == 0
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype is torch.bfloat16
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.bfloat16())


def test_weights_are_taken_as_the_files_have_them(tmp_path: Path) -> None:
    """config.json may name another type, or one of two: nothing is rounded. Ids that nobody named are not made up."""
    from safetensors.torch import load_file, save_file

    make(tmp_path / "named", **GPT2)
    file = tmp_path / "named" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": "bfloat16", "eos_token_id": None}))
    make(tmp_path / "mixed", **{**LLAMA, "dtype": torch.bfloat16})
    weights = tmp_path / "mixed" / "model.safetensors"
    state = {n: v.float() * 1.001 if "norm" in n else v for n, v in load_file(weights).items()}
    save_file(state, weights, {"format": "pt"})
    for name in ("named", "mixed"):
        before = load_file(tmp_path / name / "model.safetensors")
        assert main(["import", "--input", str(tmp_path / name), "--out", str(tmp_path / f"{name}-run")]) == 0
        words = ["export", "--checkpoint", str(tmp_path / f"{name}-run"), "--no-tokenizer"]
        assert main([*words, "--out", str(tmp_path / f"{name}-again")]) == 0
        after = load_file(tmp_path / f"{name}-again" / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(after[n].dtype is torch.float32 and torch.equal(before[n].float(), after[n]) for n in before)
    content = torch.load(tmp_path / "named-run/global_step0/mp_rank_00_model_states.pt", weights_only=False)
    del content["megatron_acco"]["identity"]["arguments"]["huggingface"]  # as training writes it
    (tmp_path / "trained").mkdir()
    torch.save(content, tmp_path / "trained" / "mp_rank_00_model_states.pt")
    words = ["export", "--checkpoint", str(tmp_path / "trained"), "--no-tokenizer", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["bos_token_id"] is config["eos_token_id"] is None


def test_an_output_layer_of_its_own_is_not_lost_to_a_config_that_ties_it(tmp_path: Path) -> None:
    """transformers takes the two matrices of the file as they are; so must the import."""
    make(tmp_path / "hf", **{**LLAMA, "tie_word_embeddings": False})
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert main(["import", "--input", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 0
    words = ["export", "--checkpoint", str(tmp_path / "run"), "--no-tokenizer", "--out", str(tmp_path / "again")]
    assert main(words) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    tokens = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
        torch.testing.assert_close(logits_of(tmp_path / "run", tokens), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=1e-4)


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import resource
    import signal

    make(tmp_path / "hf", **LLAMA)
    words = ["import", "--input", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]
    assert main(words) == 0
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1][1]))
    try:
        codes = [
            main([*words[:-1], str(tmp_path / "second")]),
            main(["export", "--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--no-tokenizer"]),
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megatron-acco: error: ")]
    assert codes == [2, 2] and len(errors) == 2
    assert all("cannot be written: " in line and "File too large" in line for line in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rope": (
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "rope scaling of type linear",
    ),
    "bias": ({**LLAMA, "attention_bias": True}, "attention_bias True beside mlp_bias False"),
    "activation": ({**LLAMA, "hidden_act": "gelu"}, "hidden_act gelu"),
    "relu": ({**GPT2, "activation_function": "relu"}, "activation_function relu"),
    "rope of a part": (
        {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "rope setting partial_rotary_factor",
    ),
    "rope base": ({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "no whole number"),
    "scale": ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
}


def test_import_refuses_what_the_model_cannot_express(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(folder: Path, message: str) -> None:
        assert main(["import", "--input", str(folder), "--out", str(tmp_path / "run")]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".partial*"))

    for name, (settings, message) in REFUSED.items():
        make(tmp_path / name, **settings)
        refused(tmp_path / name, message)
    refused(tmp_path / "nowhere", "no Hugging Face model there")
    sizes = tmp_path / "sizes"
    make(sizes, **LLAMA)
    config = json.loads((sizes / "config.json").read_text())
    (sizes / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY + 1}))
    refused(sizes, "weights with mismatched keys: ")
    (sizes / "config.json").write_text("[1]")
    refused(sizes, "config.json cannot be used: it is not a JSON object")
    whole = make(tmp_path / "llama", **LLAMA)
    state = {name: value for name, value in whole.state_dict().items() if "layers.1.mlp.up" not in name}
    whole.save_pretrained(tmp_path / "llama", state_dict=state)
    refused(tmp_path / "llama", "missing keys: model.layers.1.mlp.up_proj.weight")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    refused(tmp_path / "llama", "a model of type mistral; gpt2 and llama can be imported")


def test_export_refuses_other_families_and_places_that_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_acco.huggingface.families import family_of

    shape: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16,
    }  # fmt: skip
    assert family_of(ModelOptions(**shape)) == "gpt2"
    with pytest.raises(ValueError, match="GPT-2 knows no --normalization RMSNorm; Llama knows no --position"):
        family_of(ModelOptions(**shape, normalization="RMSNorm"))
    make(tmp_path / "hf", **LLAMA)
    words = ["import", "--input", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]
    assert main(words) == 0 and main(words) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["export", "--checkpoint", str(tmp_path / "hf"), "--out", str(tmp_path / "out")]) == 2
    assert "no checkpoint there" in (told := capsys.readouterr().err) and "`megatron-acco import` makes" in told
    words = ["export", "--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert main([*words, "--no-tokenizer", "--max-shard-size", "5"]) == 2
    assert "--max-shard-size 5: give a number with KB" in capsys.readouterr().err
    assert main(words) == 2
    assert "names no tokenizer; give --tokenizer-model" in capsys.readouterr().err
    file = tmp_path / "run" / "global_step0" / "mp_rank_00_model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main([*words, "--no-tokenizer"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".partial*"))


def test_sentencepiece_models_become_tokenizers_of_transformers_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quick BPE model of `preprocess-data --train-tokenizer`, and a unigram model with a dummy prefix."""
    import sentencepiece

    from megatron_acco.preprocess.vocabulary import train_tokenizer

    text = Path(__file__).read_text()
    (tmp_path / "bpe.model").write_bytes(train_tokenizer([text], 400))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_prefix=str(tmp_path / "unigram"), vocab_size=300, minloglevel=2
    )
    make(tmp_path / "hf", **{**LLAMA, "vocab_size": 400})
    assert main(["import", "--input", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 0
    for name in ("bpe", "unigram"):
        model, out = tmp_path / f"{name}.model", tmp_path / name
        words = ["export", "--checkpoint", str(tmp_path / "run"), "--tokenizer-model", str(model), "--out", str(out)]
        assert main(words) == 0
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        for sample in (text[:3000], "  two  spaces\n\tüñ 日本 🙂", "x"):
            ids = processor.encode(sample)
            assert tokenizer(sample, add_special_tokens=False)["input_ids"] == ids
        assert tokenizer.eos_token_id == 2
    # An imported folder brings its tokenizer, which then is the checkpoint's own.
    assert main(["import", "--input", str(tmp_path / "bpe"), "--out", str(tmp_path / "back")]) == 0
    assert "--tokenizer-type HuggingFaceTokenizer" in (tmp_path / "back" / "arguments.txt").read_text()
    assert main(["export", "--checkpoint", str(tmp_path / "back"), "--out", str(tmp_path / "again")]) == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again")("a b")["input_ids"]
    # It knows its tokenizer where it is moved to, and refuses one that gives other ids, in whatever form.
    moved = (tmp_path / "back").rename(tmp_path / "moved")
    words = ["export", "--checkpoint", str(moved), "--out", str(tmp_path / "from moved")]
    assert main([*words, "--tokenizer-model", str(tmp_path / "unigram")]) == 2
    assert "was trained with another tokenizer" in capsys.readouterr().err
    assert main(words) == 0
    words[-1] += " too"
    assert main([*words, "--tokenizer-model", str(tmp_path / "bpe.model")]) == 0
    shutil.rmtree(moved / "tokenizer")
    assert main(["export", "--checkpoint", str(moved), "--out", str(tmp_path / "gone")]) == 2

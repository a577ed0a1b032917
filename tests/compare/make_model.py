"""Make a small Llama with random weights, for a vLLM without a GPU: its text is nonsense, its timing is real.

Run it with the Python of vLLM's environment, which has torch, transformers and tokenizers. Nothing is downloaded: the
byte-level tokenizer learns its merges from the text of this repository. ``make_model.py DIRECTORY [HIDDEN LAYERS]``;
512 and 8 (the default, 23 million parameters) make the engine, and not its HTTP server, the limit on one core.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

TOKENS = 4096
CONTEXT = 8192
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def make_tokenizer(directory: Path) -> None:
    """Train a byte-level tokenizer of ``TOKENS`` tokens and keep it in ``directory``."""
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    trained = tokenizers.ByteLevelBPETokenizer()
    texts = [str(path) for path in sorted(Path(__file__).parents[2].glob("*/**/*.py")) if ".venv" not in path.parts]
    trained.train(texts, vocab_size=TOKENS, min_frequency=1, special_tokens=["<s>", "</s>"], show_progress=False)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="</s>"
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)


def make_weights(directory: Path, hidden: int, layers: int) -> int:
    """Draw the weights, keep them in ``directory`` and return how many there are."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.manual_seed(0)
    heads = max(2, hidden // 64)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return sum(weights.numel() for weights in model.parameters())


def main(arguments: list[str]) -> str:
    """Make the model that the command line asks for; return what to tell."""
    if len(arguments) not in {1, 3}:
        sys.exit(__doc__)
    directory = Path(arguments[0])
    hidden, layers = map(int, arguments[1:] or ("512", "8"))
    make_tokenizer(directory)
    return f"{directory}: {make_weights(directory, hidden, layers):,} parameters\n"


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]))

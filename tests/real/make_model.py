"""Make a small Llama of random weights with a tokenizer of its own: ``make_model.py DIRECTORY [HIDDEN LAYERS]``.

256 and 4 (the default) are tiny; 512 and 8 (23 million parameters) make the engine, and not its HTTP server, the limit.

Nothing is downloaded: the tokenizer learns from Python's own library. Runs in the environment of ``install_engine.py``.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content']|string + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def main() -> None:
    directory, *size = sys.argv[1:]
    hidden, layers = map(int, size or (256, 4))
    torch.manual_seed(7)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*.py"))
    learner = ByteLevelBPETokenizer()
    learner.train([str(path) for path in library], vocab_size=VOCABULARY, special_tokens=["<bos>", "<eos>", "<unk>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=learner._tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    main()

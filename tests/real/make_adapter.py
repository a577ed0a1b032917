"""Make a small LoRA adapter for a model of ``make_model.py``: ``make_adapter.py MODEL DIRECTORY``.

Random weights, large enough for the adapter to say something else. Runs in the environment of ``install_engine.py``.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def main() -> None:
    model, directory = map(Path, sys.argv[1:])
    shape = json.loads((model / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    keys = hidden // heads * shape["num_key_value_heads"]
    torch.manual_seed(11)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, width in (("q_proj", hidden), ("v_proj", keys)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, hidden, dtype=torch.bfloat16)
            weights[f"{at}.lora_B.weight"] = torch.randn(width, RANK, dtype=torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()

"""The files of a model that only fake workers serve: all that a gateway reads, and no weights."""

import json
from pathlib import Path

from common.tiny_text import CONTEXT_TOKENS, VOCAB_TOKENS, write_tokenizer


def write_model(folder: Path) -> Path:
    """Write the text files of a tiny model."""
    write_tokenizer(folder)
    config = {
        "model_type": "llama",
        "max_position_embeddings": CONTEXT_TOKENS,
        "vocab_size": VOCAB_TOKENS,
        "eos_token_id": [0, 3],
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "hidden_size": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder

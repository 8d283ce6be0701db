"""The text of a tiny model: a byte-level tokenizer and a chat template. For tests and benchmarks; needs no torch."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_TOKENS = 320
CONTEXT_TOKENS = 512
BOS, EOS, TURN_END = "<|bos|>", "<|eos|>", "<|im_end|>"
SPECIAL_TOKENS = [EOS, BOS, "<|im_start|>", TURN_END]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Prefill and decode are kept apart.",
    "A block holds the keys and values of a few tokens; a prefix is a chain of full blocks.",
    "user assistant system hello world, what is the capital of France? Paris.",
    "Grüße, naïve café, 你好世界, 🙂🙃",
]


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer of VOCAB_TOKENS tokens, with a chat template, into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))

"""Text to token ids and back, chat templates, and text that grows token by token; no torch, no transformers.

tokenizer = Tokenizer.load(resolve("smollm2-135m"))
ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]), add_special_tokens=False)
"""

from specengine.tokenizer.base import Tokenizer, first_difference
from specengine.tokenizer.detokenizer import Detokenizer

__all__ = ["Detokenizer", "Tokenizer", "first_difference"]

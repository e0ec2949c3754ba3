"""A model folder's tokenizer, for texts and pairs of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chairlift.engine.embedding.types import TokenizedText
from chairlift.engine.errors import ContextLengthExceeded, ModelUnavailable


class PairTokenizer:
    """`chairlift.engine.embedding.types.EmbeddingTokenizer` over the tokenizers library.

    Safe to call from any thread: no call changes its settings, since what is too long is cut here.
    """

    def __init__(self, backend: Any) -> None:
        # Settings of the file's maker: some files pad every text to 128 tokens.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        limit: int | None = None,
    ) -> TokenizedText:
        """As the protocol says.

        Raises:
            ContextLengthExceeded: what `limit` leaves for the text, or for a pair's second, is nothing.
        """
        backend = self._backend
        encoded = backend.encode(text, pair, add_special_tokens=add_special_tokens)
        if limit is not None and len(encoded.ids) > limit:
            first = backend.encode(text, add_special_tokens=False)
            second = None if pair is None else backend.encode(pair, add_special_tokens=False)
            added = backend.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
            room = limit - added - (0 if second is None else len(first.ids))
            if room <= 0:
                what = "the special tokens" if second is None else "the first text"
                raise ContextLengthExceeded(
                    "truncate_prompt_tokens", f"truncate_prompt_tokens leaves no room beside {what}."
                )
            (first if second is None else second).truncate(room)
            encoded = backend.post_process(first, second, add_special_tokens)
        types = tuple(encoded.type_ids)
        return TokenizedText(tuple(encoded.ids), types if any(types) else ())


def load_pair_tokenizer(folder: Path) -> PairTokenizer:
    """The tokenizer of a model folder.

    Raises:
        ModelUnavailable: its files are missing or cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        if (folder / "tokenizer.json").is_file():
            return PairTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))
        from transformers import AutoTokenizer

        # Code that came with a model is not run; left unset, transformers would ask at the terminal.
        slow = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return PairTokenizer(slow.backend_tokenizer)
    except Exception as error:  # both libraries raise whatever their parsers do
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelUnavailable(f"The tokenizer of {folder} cannot be loaded: {reason}") from error

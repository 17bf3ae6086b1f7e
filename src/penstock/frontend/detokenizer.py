"""Converts tokens to text incrementally, and detects the strings that end a request.

Text grows by whole characters: the bytes of an incomplete character are held back, and dropped if the request ends on
them. Bytes that cannot become characters are shown as U+FFFD.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from penstock.messages.sampling_params import SamplingParams
from penstock.tokenizer.tokenizer import Tokenizer

# The number of prompt tokens that a decoder may need to know whether the first output token continues a word.
_NUM_CONTEXT_TOKENS = 8
# A character has at most four bytes: after this many tokens without text, none of them will complete one.
_MAX_SILENT_TOKENS = 16


class Detokenizer:
    """The text of one completion. `stable_text` may be shown: no stop string can still remove it."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.text = ""
        self._backend = tokenizer.backend
        context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        # A prompt that ends inside a character would be treated as incomplete output, and repeated.
        if tokenizer.decode(context, params.skip_special_tokens).endswith("\ufffd"):
            context = []
        self._stream = DecodeStream(ids=context, skip_special_tokens=params.skip_special_tokens)
        self._skip_special_tokens = params.skip_special_tokens
        self._skipped = tokenizer.special_tokens if params.skip_special_tokens else {}
        self._silent: list[int] = []
        joins = not params.skip_special_tokens and not params.spaces_between_special_tokens
        # The second of two consecutive special tokens is shown as it is spelled, without the decoder's space.
        self._joined = tokenizer.special_tokens if joins else {}
        self._follows_special = False
        self._stop = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._search_from = 0
        self._held_back = 0 if self._include_stop else max((len(stop) for stop in self._stop), default=1) - 1

    def stable_text(self, finished: bool) -> str:
        if finished or not self._held_back:
            return self.text
        return self.text[: max(0, len(self.text) - self._held_back)]

    def append(self, token_id: int) -> str | None:
        """Adds one token; returns the stop string that it completed, before which the text is then cut."""
        self._num_tokens += 1
        before = len(self.text)
        self.text += self._decode(token_id)
        if self._num_tokens < self._min_tokens:
            self._search_from = len(self.text)
            return None
        if not self._stop or len(self.text) == before:
            return None
        return self._cut_at_stop(before)

    def skip(self) -> None:
        """Counts a token whose text is not shown (one that ended the request)."""
        self._num_tokens += 1

    def _cut_at_stop(self, before: int) -> str | None:
        """Cuts the text before the stop string that begins first."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            # A match may have begun in earlier text, but it cannot have ended there.
            position = self.text.find(stop, max(self._search_from, before - len(stop) + 1))
            if position >= 0 and (found is None or position < found[0]):
                found = (position, stop)
        if found is None:
            return None
        position, stop = found
        self.text = self.text[: position + len(stop) if self._include_stop else position]
        return stop

    def _decode(self, token_id: int) -> str:
        text = self._decode_next(token_id)
        special = self._joined.get(token_id)
        if special is not None and self._follows_special:
            text = special
        self._follows_special = special is not None
        return text

    def _decode_next(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - the library raises bare Exception when a token rewrites earlier text
            # The tokens without text before it may be bytes that completed no character: they are shown too.
            text = self._backend.decode([*self._silent, token_id], self._skip_special_tokens)
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=self._skip_special_tokens)
        self._silent = [] if text else [*self._silent, token_id]
        if len(self._silent) == _MAX_SILENT_TOKENS:
            # A step decodes all tokens since the last text, so the time of each would grow with their number.
            text = self._backend.decode(self._silent, self._skip_special_tokens)
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            self._silent = []
        return text or ""

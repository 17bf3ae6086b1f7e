"""The fields that clients of other servers send to pooling routes, and the effect of each, as in `openai.dialects`.

`docs/POOLING.md` shows the table.
"""

from __future__ import annotations

from penstock.server.openai.dialects import DialectField, Effect

_SAMPLING = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools", "tool_choice",
    "num_speculative_tokens",
)  # fmt: skip
_SAMPLED = "belongs to generation: nothing is sampled here"


def _inert(note: str, *names: str) -> list[DialectField]:
    return [DialectField(name, Effect.INERT, note) for name in names]


def _refused(name: str, note: str, *neutral: object) -> DialectField:
    return DialectField(name, Effect.REFUSED, note, neutral)


POOLING_FIELDS: tuple[DialectField, ...] = (
    *_inert("concerns the service that it comes from", "metadata", "store", "service_tier", "safety_identifier"),
    *_inert("concerns the client library", "timeout", "num_retries", "max_retries", "caching", "drop_params"),
    *_inert("concerns images and sound", "mm_processor_kwargs", "media_io_kwargs"),
    *(_refused(name, _SAMPLED) for name in _SAMPLING),
    _refused("n", _SAMPLED, 1),
    _refused("stream", _SAMPLED, False),
    _refused("messages", "are not supported here: send texts"),
    _refused("chat_template", "cannot be sent: use `score_template` of --pooler-config"),
    _refused("add_special_tokens", "is not supported: send token ids, which are taken as they are", True),
    _refused("truncation_side", "is not supported: the beginning of an input is kept", "right"),
    _refused("truncate", "is not supported: use `truncate_prompt_tokens`", False),
    _refused("truncation", "is not supported: use `truncate_prompt_tokens`", False),
    _refused("embed_dtype", "is not supported: vectors are float32", "float32"),
    _refused("endianness", "is not supported: base64 holds little-endian numbers", "native", "little"),
    _refused("embedding_types", "is not supported: use `encoding_format`", ["float"]),
    _refused("task", "is not supported: use `prompt_name`"),
    _refused("late_chunking", "is not supported: every input has a vector of its own", False),
    _refused("input_type", "is not supported: use `prompt_name`"),
    _refused("instruction", "is not supported: write it into the texts, or use `prompt_name`", ""),
    _refused("softmax", "is not supported: use `use_activation`"),
    _refused("max_chunks_per_doc", "is not supported: use `truncate_prompt_tokens`"),
    _refused("max_tokens_per_doc", "is not supported: use `truncate_prompt_tokens`"),
    _refused("rank_fields", "is not supported: send each document as one text", [], ["text"]),
    _refused("overflow", "is not supported: use `truncate_prompt_tokens`"),
    _refused("kv_transfer_params", "is not supported: the prompts of a pooling engine are not handed over"),
)  # fmt: skip

"""The fields that clients of other servers send to pooling routes, and the effect of each, as in `openai.dialects`.

`docs/POOLING.md` shows the table.
"""

from __future__ import annotations

from penstock.server.openai.dialects import DialectField, inert, refused

_SAMPLING = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools", "tool_choice",
    "num_speculative_tokens",
)  # fmt: skip
_SAMPLED = "belongs to generation: nothing is sampled here"


POOLING_FIELDS: tuple[DialectField, ...] = (
    *inert("concerns the service that it comes from", "metadata", "store", "service_tier", "safety_identifier"),
    *inert("concerns the client library", "timeout", "num_retries", "max_retries", "caching", "drop_params"),
    *inert("concerns images and sound", "mm_processor_kwargs", "media_io_kwargs"),
    *(refused(name, _SAMPLED) for name in _SAMPLING),
    refused("n", _SAMPLED, 1),
    refused("stream", _SAMPLED, False),
    refused("messages", "are not supported here: send texts"),
    refused("chat_template", "cannot be sent: use `score_template` of --pooler-config"),
    refused("add_special_tokens", "is not supported: send token ids, which are taken as they are", True),
    refused("truncation_side", "is not supported: the beginning of an input is kept", "right"),
    refused("truncate", "is not supported: use `truncate_prompt_tokens`", False),
    refused("truncation", "is not supported: use `truncate_prompt_tokens`", False),
    refused("embed_dtype", "is not supported: vectors are float32", "float32"),
    refused("endianness", "is not supported: base64 holds little-endian numbers", "native", "little"),
    refused("embedding_types", "is not supported: use `encoding_format`", ["float"]),
    refused("task", "is not supported: use `prompt_name`"),
    refused("late_chunking", "is not supported: every input has a vector of its own", False),
    refused("input_type", "is not supported: use `prompt_name`"),
    refused("instruction", "is not supported: write it into the texts, or use `prompt_name`", ""),
    refused("softmax", "is not supported: use `use_activation`"),
    refused("max_chunks_per_doc", "is not supported: use `truncate_prompt_tokens`"),
    refused("max_tokens_per_doc", "is not supported: use `truncate_prompt_tokens`"),
    refused("rank_fields", "is not supported: send each document as one text", [], ["text"]),
    refused("overflow", "is not supported: use `truncate_prompt_tokens`"),
    refused("kv_transfer_params", "is not supported: the prompts of a pooling engine are not handed over"),
)  # fmt: skip

"""The table of fields that clients of other servers send, and of their effects here.

A field in no table and in no request model is refused, because a misspelled field would silently change answers; with
`--ignore-unknown-fields` it is ignored, and a response header names it. `docs/SERVING.md` shows the table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from penstock.server import limits
from penstock.utils.errors import RequestError
from penstock.utils.names import nearest

MAX_IGNORED_FIELDS = 32
ignored_fields: ContextVar[list[str] | None] = ContextVar("ignored_fields", default=None)
"""Collects the unknown fields of the current request; None if they are refused."""


class Effect(enum.StrEnum):
    """The effect of a field: supported, without effect, or refused unless its value is neutral."""

    DONE = "done"
    INERT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class DialectField:
    """`note` describes a field or, if it is refused, names an alternative. `neutral` values are accepted like null."""

    name: str
    effect: Effect
    note: str
    neutral: tuple[Any, ...] = ()


def _done(note: str, *names: str) -> list[DialectField]:
    return [DialectField(name, Effect.DONE, note) for name in names]


def inert(note: str, *names: str) -> list[DialectField]:
    return [DialectField(name, Effect.INERT, note) for name in names]


def refused(name: str, note: str, *neutral: Any) -> DialectField:
    return DialectField(name, Effect.REFUSED, note, neutral)


CLIENT_LIBRARY_FIELDS: tuple[DialectField, ...] = (
    *inert(
        "concerns the client library",
        "drop_params", "allowed_openai_params", "num_retries", "max_retries", "timeout", "caching", "tags",
        "litellm_metadata", "litellm_session_id",
    ),
    refused("extra_body", "is a parameter of client libraries: send its entries as fields of the request", {}),
    refused("model_kwargs", "is a parameter of client libraries: send its entries as fields of the request", {}),
    refused("streaming", "is a parameter of client libraries: use `stream`", False),
)  # fmt: skip

REQUEST_FIELDS: tuple[DialectField, ...] = (
    *_done("on completions the same as `max_tokens`", "max_completion_tokens"),
    *_done("cuts the prompt to that many tokens; -1 leaves room for `max_tokens`", "truncate_prompt_tokens"),
    *_done("`left` (default) keeps the prompt's end, `right` its beginning", "truncation_side"),
    *_done("whether the tokenizer adds its special tokens to the prompt", "add_special_tokens"),
    *_done("false: no space between special tokens that are shown", "spaces_between_special_tokens"),
    *_done("log probabilities name tokens as `token_id:N`", "return_tokens_as_token_ids"),
    *_done("becomes the answer's `id` and its `X-Request-Id`, as the request's `X-Request-Id` does", "request_id"),
    *_done("the older form of `tools` and `tool_choice`; the answer has it too", "functions", "function_call"),
    *_done(
        "the older form of `structured_outputs`",
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object",
    ),
    *_done("the same as `include_stop_str_in_output`", "no_stop_trim"),
    *_done("for the engine's KV connector; an engine without one ignores it", "kv_transfer_params"),
    *_done("a variable of the chat template, where the template knows it", "reasoning_effort", "documents"),
    DialectField("include_reasoning", Effect.DONE, "false: the answer leaves the reasoning out", (True,)),
    DialectField("separate_reasoning", Effect.DONE, "false: the reasoning, with its tags, is content", (True,)),
    *inert(
        "concerns OpenAI's own service",
        "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "verbosity", "prediction",
    ),
    *inert("reasoning is streamed as it is generated", "stream_reasoning"),
    *inert("prefixes are always cached; `cache_salt` separates them", "cache_prompt", "id_slot", "n_keep"),
    *inert("the model stays loaded", "keep_alive"),
    *inert("does not change the answer; the header `X-data-parallel-rank` selects an engine", "data_parallel_rank"),
    *inert("does not change the answer", "session_id", "rid"),
    *inert("there is one implementation", "guided_decoding_backend", "watermarking", "stream_interval"),
    *inert("concerns images and sound", "media_io_kwargs", "mm_processor_kwargs"),
    *inert("concerns vLLM's own routes", "return_token_offsets", "routed_experts_prompt_start"),
    *inert("adds nothing to the answer", "timings_per_token", "return_progress", "post_sampling_probs"),
    *CLIENT_LIBRARY_FIELDS,
    *inert(
        "belongs to a sampler that is off",
        "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "dry_sequence_breakers",
    ),
    refused("modalities", "must be [\"text\"]: the model writes text only", ["text"]),
    refused("audio", "cannot be given: the model writes text only"),
    refused("web_search_options", "cannot be given: the server does not search the web"),
    refused("suffix", "is not supported: write the model's fill-in-the-middle tokens into `prompt`", ""),
    refused("use_beam_search", "is not supported: use `n` with a `temperature` above 0", False),
    refused("length_penalty", "belongs to beam search, which is not supported", 1),
    refused("early_stopping", "belongs to beam search, which is not supported", False),
    refused("do_sample", "is not supported: `temperature` 0 is greedy, and above 0 it samples"),
    refused("max_new_tokens", "is not supported: use `max_tokens`"),
    refused("n_predict", "is not supported: use `max_tokens`", -1),
    refused("min_new_tokens", "is not supported: use `min_tokens`", 0),
    refused("n_probs", "is not supported: use `logprobs`", 0),
    refused("logprob_token_ids", "is not supported: use `logprobs`", []),
    refused("repeat_penalty", "is not supported: use `repetition_penalty`", 1),
    refused("repeat_last_n", "is not supported: `repetition_penalty` counts the whole text", -1, 64),
    refused("penalize_nl", "is not supported: use `logit_bias`", False),
    refused("typical_p", "is not supported: use `top_p` or `min_p`", 1),
    refused("tfs_z", "is not supported: use `top_p` or `min_p`", 1),
    refused("top_a", "is not supported: use `top_p` or `min_p`", 0),
    refused("top_n_sigma", "is not supported: use `top_p` or `min_p`", -1),
    refused("mirostat", "is not supported: use `top_p` or `min_p`", 0),
    refused("dynatemp_range", "is not supported: use `temperature`", 0),
    refused("xtc_probability", "is not supported: use `top_p` or `min_p`", 0),
    refused("dry_multiplier", "is not supported: use `repetition_penalty`", 0),
    refused("samplers", "is not supported: the order of the samplers is fixed"),
    refused("min_keep", "is not supported: use `top_p` or `min_p`", 0),
    refused("grammar", "is not supported here: use `structured_outputs` with `grammar`", ""),
    refused("ebnf", "is not supported here: use `structured_outputs` with `grammar`", ""),
    refused("regex", "is not supported here: use `structured_outputs` with `regex`", ""),
    refused("json_schema", "is not supported here: use `response_format`", {}),
    refused("format", "is not supported: use `response_format`", ""),
    refused("guided_whitespace_pattern", "is not supported: use `structured_outputs` with `grammar`"),
    refused("structural_tag", "is not supported: use `tools` or `structured_outputs` with `grammar`"),
    refused("stop_regex", "is not supported: use `stop`", []),
    refused("logits_processors", "are not supported: use `logit_bias`, `bad_words` or `structured_outputs`", []),
    refused("custom_logit_processor", "is not supported: use `logit_bias`, `bad_words` or `structured_outputs`"),
    refused("repetition_detection", "is not supported: use `repetition_penalty` or `max_tokens`"),
    refused("thinking_token_budget", "is not supported: use `max_tokens`", -1),
    refused("think", "is not supported: use `chat_template_kwargs`, such as {\"enable_thinking\": false}"),
    refused("chat_template", "cannot be sent: the template comes with the model; use `/v1/completions`"),
    refused("template", "cannot be sent: the template comes with the model; use `/v1/completions`", ""),
    refused("raw", "is not supported: use `/v1/completions`", False),
    refused("system", "is not a field of this request: send a message with the role `system`", ""),
    refused("context", "is not supported: send the earlier turns as messages", []),
    refused("options", "is not supported: send its entries as fields; `num_predict` is `max_tokens`", {}),
    refused("images", "cannot be given: this model takes text only", []),
    refused("image_data", "cannot be given: this model takes text only", []),
    refused("prompt_embeds", "are not supported: use `prompt` or `prompt_token_ids`"),
    refused("return_prompt_text", "is not supported: `/tokenize` and `/detokenize` show the prompt", False),
    refused("return_hidden_states", "is not supported", False),
    refused("return_routed_experts", "is not supported", False),
    refused("lora_path", "cannot be sent: name a served adapter in `model`"),
    refused("lora", "cannot be sent: name a served adapter in `model`", []),
    refused("session_params", "is not supported: send the whole conversation; its prefix is cached"),
    refused("vllm_xargs", "are for extensions of vLLM: none is loaded", {}),
    refused("ec_transfer_params", "are for encoders of images: this model takes text only"),
    refused("cache_hit_threshold", "is not supported: routers can follow `--kv-events-config`", 0),
    refused("bootstrap_host", "is not supported: use `kv_transfer_params`"),
    refused("bootstrap_port", "is not supported: use `kv_transfer_params`"),
    refused("bootstrap_room", "is not supported: use `kv_transfer_params`"),
    refused("input", "is not a field of this request: use `/v1/responses`"),
    refused("max_output_tokens", "is not a field of this request: use `max_tokens`"),
)  # fmt: skip

COMPLETION_FIELDS = (refused("messages", "is not a field of this request: use `/v1/chat/completions`"),)
CHAT_FIELDS = (refused("prompt", "is not a field of this request: use `/v1/completions`"),)

MESSAGE_FIELDS: tuple[DialectField, ...] = (
    *inert("prefixes are always cached", "cache_control"),
    *inert(
        "says how an earlier answer came about",
        "annotations", "refusal", "provider_specific_fields", "thinking_blocks", "id", "index", "status",
        "finish_reason",
    ),
    refused("audio", "cannot be given: this model takes text only"),
    refused("images", "cannot be given: this model takes text only", []),
    refused("prefix", "is not supported: use `continue_final_message`", False),
    refused("partial", "is not supported: use `continue_final_message`", False),
)  # fmt: skip

PART_FIELDS: tuple[DialectField, ...] = (
    *inert("prefixes are always cached", "cache_control", "prompt_cache_breakpoint"),
    *inert("says how an earlier answer came about", "annotations", "citations", "logprobs", "id"),
)

TOKENIZE_FIELDS: tuple[DialectField, ...] = (
    *inert("concerns images and sound", "media_io_kwargs", "mm_processor_kwargs"),
    refused("chat_template", "cannot be sent: the template comes with the model"),
)

RESPONSES_FIELDS: tuple[DialectField, ...] = (
    *inert(
        "concerns OpenAI's own service",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "stream_options",
    ),
    *inert("concerns images and sound", "media_io_kwargs", "mm_processor_kwargs"),
    refused("prompt", "names a template stored by OpenAI: use `instructions` and `input`"),
    refused("conversation", "is not supported: use `previous_response_id`"),
    refused("context_management", "is not supported: send the items that the model is to see", []),
    refused("top_logprobs", "is not supported here: use `/v1/chat/completions`", 0),
    refused("stop", "is not supported here: use `/v1/chat/completions`", []),
    refused("messages", "is not a field of this request: use `input`"),
    refused("max_tokens", "is not a field of this request: use `max_output_tokens`"),
    refused("max_completion_tokens", "is not a field of this request: use `max_output_tokens`"),
    refused("response_format", "is not a field of this request: use `text` with `format`"),
    refused("reasoning_effort", "is not a field of this request: use `reasoning` with `effort`"),
    refused("request_id", "is not a field of this request: use the header `X-Request-Id`"),
)  # fmt: skip

MESSAGES_FIELDS: tuple[DialectField, ...] = (
    *inert("concerns Anthropic's own service", "betas", "diagnostics", "inference_geo", "metadata", "service_tier"),
    *inert("does not change the answer", "speed"),
    *inert("prefixes are always cached", "cache_control"),
    refused("container", "is for running code, which is not supported"),
    refused("mcp_servers", "is not supported: offer their tools as `tools`", []),
    refused("context_management", "is not supported: send the turns that the model is to see", {}),
    refused("n", "is not supported here: use `/v1/chat/completions`", 1),
    refused("stop", "is not a field of this request: use `stop_sequences`"),
    refused("max_completion_tokens", "is not a field of this request: use `max_tokens`"),
    refused("response_format", "is not a field of this request: use `output_config` with `format`"),
)

TOOL_FIELDS: tuple[DialectField, ...] = (
    *inert("prefixes are always cached", "cache_control"),
    *inert("concerns Anthropic's own service", "allowed_callers", "defer_loading", "eager_input_streaming"),
    *inert("is not shown to the model", "input_examples"),
)

EARLIER_ANSWER_FIELDS: tuple[DialectField, ...] = (
    *inert("prefixes are always cached", "cache_control", "prompt_cache_breakpoint"),
    *inert(
        "says how an earlier answer came about",
        "annotations", "caller", "citations", "container", "data", "encrypted_content", "id", "logprobs", "model",
        "namespace", "phase", "signature", "status", "stop_details", "stop_reason", "stop_sequence", "type", "usage",
    ),
)  # fmt: skip
"""Fields of messages, items and blocks that clients of the Responses and the Messages API send back."""

STRUCTURED_OUTPUTS_FIELDS: tuple[DialectField, ...] = (
    *inert("there is one implementation", "disable_fallback", "backend"),
    refused("disable_any_whitespace", "is not supported: use `grammar`", False),
    refused("disable_additional_properties", "is not supported: write it into the schema", False),
    refused("whitespace_pattern", "is not supported: use `grammar`"),
    refused("structural_tag", "is not supported: use `grammar`"),
)


def translate(given: Any, table: Iterable[DialectField], known: Iterable[str]) -> Any:
    """Returns an object's fields except those without effect. Raises RequestError for refused and unknown fields.

    `known` names the object's own fields, which are kept whatever the table says.
    """
    if not isinstance(given, Mapping):
        return given
    rows = {row.name: row for row in table}
    kept: dict[Any, Any] = {}
    declared = set(known)
    for name, value in given.items():
        row = rows.get(name)
        if name in declared:
            kept[name] = value
        elif row is None:
            if not is_ignored(name):
                shown = str(name)[: limits.MAX_NAME_CHARACTERS]
                raise RequestError(f"{shown} is not a field of this request{nearest(shown, declared)}", shown)
        elif row.effect is not Effect.INERT and value is not None and value not in row.neutral:
            # A supported field that this request does not have belongs to another route.
            why = row.note if row.effect is Effect.REFUSED else "is not supported by this route"
            raise RequestError(f"{name} {why}", name)
    return kept


def is_ignored(name: Any) -> bool:
    """Whether unknown fields are ignored; if so, records the name for the current request."""
    ignored = ignored_fields.get()
    if ignored is None:
        return False
    if len(ignored) < MAX_IGNORED_FIELDS:
        ignored.append(str(name))
    return True

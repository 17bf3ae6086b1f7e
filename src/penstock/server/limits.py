"""All limits that are checked before a request reaches the engine. A request beyond a limit gets a 4xx that names the
field and the bound.

Limits of sampling parameters, which also apply to `LLM`, are in `messages.sampling_params`, those that depend on the
model (prompt length, token ids) in `frontend.input_processor`, and the size of a body is `--max-body-bytes`.
"""

from __future__ import annotations

MAX_PROMPTS = 256
"""Prompts in one completion request."""
MAX_COMPLETIONS = 1024
"""Prompts times `n` in one request."""
MAX_POOLING_INPUTS = 2048
"""Inputs of one request for embeddings, classes or scores."""
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 256
"""Parts of one message's content."""
MAX_TOOLS = 128
MAX_MESSAGE_VALUES = 1 << 17
"""Texts, numbers, lists and objects in all messages of a request together: validating one part takes microseconds."""
MAX_ENTRY_VALUES = 1 << 13
"""The same, for an object whose entries are validated one by one: metadata, `logit_bias`, template variables."""
MAX_TOOL_SCHEMA_BYTES = 64 << 10
"""A tool's parameters, as JSON."""
MAX_NAME_CHARACTERS = 256
"""Names of models, roles, tools, users; cache salts."""
MAX_STOP_CHARACTERS = 1024
"""One stop string."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_TOKEN_LIST = 1024
"""`stop_token_ids`."""
MAX_ALLOWED_TOKENS = 1 << 19
"""`allowed_token_ids`, which may contain the whole vocabulary."""
MAX_REPEATED_BYTES = 32 << 20
"""Lists of tokens and words, and transfer parameters, as JSON, for all completions of a request together: the engine
has a copy of them for each, which takes several times as much memory.
"""
MAX_TEMPLATE_VARIABLES = 32
MAX_HEAD_BYTES = 256 << 10
"""An incomplete request's first line and headers; at least the size of one read."""
MAX_HEAD_SECONDS = 30.0
"""Time limit of the first request's head from the opening of the connection, and of a later head from its first
byte.
"""
MAX_BODY_SECONDS = 60.0
"""Time limit of a request body."""
MAX_METADATA_CHARACTERS = 512
"""One value of a response's metadata."""
MAX_STORED_RESPONSES = 1024
"""Responses that can be continued with `previous_response_id`; the least recently used one is evicted."""
MAX_STORED_RESPONSE_BYTES = 64 << 20
"""Total size of stored responses, with their conversations, as JSON."""

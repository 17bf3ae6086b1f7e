"""Every bound that a request meets before the engine sees it. Beyond one it is answered 4xx, naming field and bound.

The bounds of sampling parameters that hold in a program too are in `messages.sampling_params`, those that follow from
the model (prompt length, token ids) in `frontend.input_processor`, and the size of a body is `--max-body-bytes`.
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
MAX_TOOL_SCHEMA_BYTES = 64 << 10
"""A tool's parameters, as JSON."""
MAX_NAME_CHARACTERS = 256
"""Names of models, roles, tools, users; cache salts."""
MAX_STOP_CHARACTERS = 1024
"""One stop string or bad word."""
MAX_BAD_WORDS = 128
MAX_TOKEN_LIST = 1024
"""`stop_token_ids`; `allowed_token_ids` may name as many as the vocabulary has."""
MAX_TEMPLATE_VARIABLES = 32
MAX_HEAD_BYTES = 256 << 10
"""A request's first line and headers, before they are whole; at least what one read may bring."""
MAX_HEAD_SECONDS = 30.0
"""How long a new connection has for its first request's head, and a later head from its first byte."""
MAX_BODY_SECONDS = 60.0
"""How long a body may take to arrive."""
MAX_METADATA_CHARACTERS = 512
"""One value of a response's metadata."""
MAX_STORED_RESPONSES = 1024
"""Responses that can be continued by `previous_response_id`; the one not used for longest is forgotten."""
MAX_STORED_RESPONSE_BYTES = 64 << 20
"""All of them together, with their conversations, as JSON."""

"""Finds a model's files: the built-in model, a local folder, a GGUF file, or a Hugging Face model id."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.utils.errors import ConfigError

BUILT_IN_MODEL = "demo"
_FILES = ["*.json", "*.safetensors", "*.jinja"]
# The same weights again, in their makers' own formats: of gpt-oss in `original`, of Mistral's models beside the others.
_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]
_DEMO_FOLDER = Path(__file__).parents[1] / "demo"
# The built-in model, and its EAGLE-3 head.
_BUILT_IN = {BUILT_IN_MODEL: _DEMO_FOLDER, f"{BUILT_IN_MODEL}/eagle3": _DEMO_FOLDER / "eagle3"}


def resolve_model_path(model: str, revision: str | None = None, needs_tokenizer: bool = False) -> Path:
    """Returns the checkpoint's folder. Of a GGUF file it is made (`unpack_gguf`); a model id is downloaded through
    huggingface_hub, or found in its cache.

    Raises ConfigError if there is no such folder and the id cannot be downloaded, and if `needs_tokenizer` and a GGUF
    file has a vocabulary that cannot be read.
    """
    if model in _BUILT_IN:
        return _BUILT_IN[model]
    # Not pathlib, which raises for an unknown user and for a name that is too long.
    folder = Path(os.path.expanduser(model))
    if os.path.isdir(folder):
        return folder
    if folder.suffix == ".gguf":
        # Imported here: the help text needs no numpy.
        from penstock.config.gguf.folder import unpack_gguf

        return unpack_gguf(folder, needs_tokenizer)
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ConfigError(f"there is no folder {model!r}, and it is not a Hugging Face model id (owner/name)")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    # Imported here because it takes longer than loading the built-in model.
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_FILES, ignore_patterns=_COPIES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the model id {model!r} cannot be downloaded and is not in the local cache: {reason}"
        ) from None

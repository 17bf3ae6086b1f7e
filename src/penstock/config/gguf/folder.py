"""Makes of a GGUF file a checkpoint folder: its metadata as JSON files, and a link to the file.

Everything that reads a checkpoint reads a folder, in every process. The folders are in the user's cache, under a name
that changes with the file's path, size and time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config import env
from penstock.config.gguf.architectures import read_config
from penstock.config.gguf.file import GGUFFile
from penstock.config.gguf.vocabulary import end_tokens, read_tokenizer, read_tokenizer_config
from penstock.utils.errors import ConfigError

LINK = "unpacked.gguf"
_TOKENIZER = "tokenizer.json"
# Changes when what is written changes, so that no older folder is used.
_VERSION = 1


def unpack_gguf(file: Path, needs_tokenizer: bool = True) -> Path:
    """Returns the folder of a file. Raises ConfigError if the file is not a model that Penstock serves, or with
    `needs_tokenizer` if its vocabulary cannot be read.
    """
    file = file.resolve()
    try:
        facts = file.stat()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    name = hashlib.sha256(f"{_VERSION} {file} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:32]
    folder = env.cache_folder() / "gguf" / name
    if not folder.is_dir():
        _write(file, folder)
    if needs_tokenizer and not (folder / _TOKENIZER).is_file():
        read_tokenizer(GGUFFile(file))
    return folder


def _write(file: Path, folder: Path) -> None:
    opened = GGUFFile(file)
    contents = {"config.json": read_config(opened)}
    # A vocabulary that cannot be read is no matter with another tokenizer.
    with suppress(ConfigError):
        contents[_TOKENIZER] = read_tokenizer(opened)
    with suppress(ConfigError):
        contents["tokenizer_config.json"] = read_tokenizer_config(opened)
        contents["generation_config.json"] = {"eos_token_id": end_tokens(opened)}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _fill(unfinished, file, contents)
            unfinished.rename(folder)
        except (OSError, ConfigError):
            shutil.rmtree(unfinished)
            # Another process may have made it meanwhile.
            if not folder.is_dir():
                raise
    except OSError as error:
        raise ConfigError(
            f"the metadata of {file} cannot be written to {folder}: {error}. Set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from None


def _fill(folder: Path, file: Path, contents: dict[str, dict[str, Any]]) -> None:
    for name, value in contents.items():
        try:
            text = json.dumps(value, ensure_ascii=False)
        except TypeError:
            raise ConfigError(f"{file} has a list for {name} where one value is expected: it is damaged") from None
        (folder / name).write_text(text, encoding="utf-8")
    (folder / LINK).symlink_to(file)

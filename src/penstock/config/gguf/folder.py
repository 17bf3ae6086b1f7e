"""Makes of a GGUF file a checkpoint folder: its metadata as JSON files, and a link to the file.

Everything that reads a checkpoint reads a folder, in every process. The folders are in the user's cache, under a name
that changes with the file's path, size and time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config import env
from penstock.config.gguf.architectures import read_config
from penstock.config.gguf.file import open_gguf, part_paths
from penstock.config.gguf.vocabulary import end_tokens, read_sampling, read_tokenizer, read_tokenizer_config
from penstock.utils.errors import ConfigError

_LINK = "unpacked.gguf"
_TOKENIZER = "tokenizer.json"
# Changes when what is written changes, so that no older folder is used.
_VERSION = 8


def unpack_gguf(file: Path, needs_tokenizer: bool = True) -> Path:
    """Returns the folder of a file, which may be any part of a model in several. Raises ConfigError if the file is not
    a model that Penstock serves, if a part is missing, or with `needs_tokenizer` if its vocabulary cannot be read.
    """
    # Not what a link leads to: parts are found by their names.
    paths = part_paths(Path(os.path.abspath(file)))
    try:
        facts = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    name = hashlib.sha256(" ".join((str(_VERSION), *facts)).encode()).hexdigest()[:32]
    folder = env.cache_folder() / "gguf" / name
    if not folder.is_dir():
        _write(paths[0], folder)
    if needs_tokenizer and not (folder / _TOKENIZER).is_file():
        read_tokenizer(open_gguf(paths[0]))
    return folder


def unpacked_file(folder: Path) -> Path | None:
    """Returns the file of which `unpack_gguf` has made a folder, the first of several; None if it has not made it."""
    link = folder / _LINK
    return Path(os.readlink(link)) if link.is_symlink() else None


def _write(file: Path, folder: Path) -> None:
    opened = open_gguf(file)
    contents = {"config.json": read_config(opened)}
    # A vocabulary that cannot be read is no matter with another tokenizer.
    with suppress(ConfigError):
        contents[_TOKENIZER] = read_tokenizer(opened)
    with suppress(ConfigError):
        contents["tokenizer_config.json"] = read_tokenizer_config(opened)
        contents["generation_config.json"] = {"eos_token_id": end_tokens(opened)} | read_sampling(opened)
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
        raise ConfigError(f"{file} cannot be unpacked: {error}: set XDG_CACHE_HOME to a folder to write to") from None


def _fill(folder: Path, file: Path, contents: dict[str, dict[str, Any]]) -> None:
    for name, value in contents.items():
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):
            what = "a list where one value is expected, or a number that is not finite"
            raise ConfigError(f"{file} has for {name} {what}: it is damaged") from None
        (folder / name).write_text(text, encoding="utf-8")
    (folder / _LINK).symlink_to(file)

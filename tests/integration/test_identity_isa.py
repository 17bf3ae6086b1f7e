"""Promise P4 between instruction sets: KV moves between those of one arithmetic, and no token changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.kernels import native
from tests.integration.test_kv_connectors import POOL, offloading

SETS = [isa for isa in native.instruction_sets() if native.ARITHMETIC[isa] == "fma"]


@pytest.mark.skipif(len(SETS) < 2, reason="this processor has one instruction set of this arithmetic")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kv_moves_between_instruction_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    prompt = [{"prompt_token_ids": [i % 90 + 5 for i in range(100)]}]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    def run(isa: str, folder: Path) -> tuple[list[int], int | None]:
        """Returns the tokens, and how many of the prompt had KV in the folder."""
        monkeypatch.setenv("PENSTOCK_CPU_ISA", isa)
        native.library.cache_clear()
        llm = LLM(**POOL, dtype=dtype, kv_transfer_config=offloading(disk_path=str(folder)))
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        llm.shutdown()
        return output.outputs[0].token_ids, output.num_cached_tokens

    try:
        found = {isa: run(isa, tmp_path / isa) for isa in SETS}
        expected, num_cached = found[SETS[0]]
        assert num_cached == 0
        assert all(each == found[SETS[0]] for each in found.values()), found
        files = {isa: files_of(tmp_path / isa) for isa in SETS}
        assert len(files[SETS[0]]) > 6, "blocks of 16 tokens"
        assert all(each == files[SETS[0]] for each in files.values()), "the bytes of KV differ"
        for writer, reader in zip(SETS, SETS[1:] + SETS[:1], strict=True):
            assert run(reader, tmp_path / writer) == (expected, 96), f"{reader} with the KV of {writer}"
    finally:
        native.library.cache_clear()


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of every file by its name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

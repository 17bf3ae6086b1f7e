"""The built-in model's perplexity in Penstock, llama.cpp and transformers, from the same files.

    PENSTOCK_PYTHON bench/peers/perplexity.py prepare FOLDER --text LICENSE
    LLAMA_PYTHON bench/peers/perplexity.py llama_cpp FOLDER
    PENSTOCK_PYTHON bench/peers/perplexity.py penstock FOLDER          # or penstock+int8: with rounded activations
    TRANSFORMERS_PYTHON bench/peers/perplexity.py transformers FOLDER

The first line writes the model in bf16, in every format of `quantized_checkpoint.py`, and the tokens of the text and of
additions, the model's own subject; llama.cpp writes the other GGUF files, and reads no safetensors. transformers
computes in float32: with the values of a GGUF file that the `gguf` package reads there, rounded to bfloat16, and with
checkpoints that it loads itself, for which it needs `compressed-tensors`, `triton` for FP8 in blocks, and `optimum`,
`gptqmodel` and `triton` for GPTQ and AWQ. `--formats` chooses some. Perplexity is as in `bench/quality.py`: of windows
of 256 tokens that do not overlap.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WINDOW, MOST_TOKENS = 256, 8192
GGUF = ("bf16", "q8_0", "q6_k", "q4_k_m", "q4_0")

LogProbabilities = Callable[[list[int]], list[float]]
"""Returns the log probability of every token of a window but the first."""


def prepare(folder: Path, text: Path) -> None:
    import gguf
    import gguf_header
    from quantized_checkpoint import KINDS, rounded
    from safetensors import safe_open

    from penstock import LLM

    sys.path.insert(0, str(Path(__file__).parents[1]))
    import quality

    folder.mkdir(parents=True, exist_ok=True)
    llm = LLM("demo", max_model_len=WINDOW)
    texts = {text.name: text.read_text(encoding="utf-8"), "additions": quality.default_texts()["additions"]}
    ids = {name: llm.get_tokenizer().encode(each)[:MOST_TOKENS] for name, each in texts.items()}
    llm.shutdown()
    (folder / "ids.json").write_text(json.dumps(ids))
    demo = Path(quality.__file__).parents[1] / "src" / "penstock" / "demo"
    config = json.loads((demo / "config.json").read_text())
    writer = gguf.GGUFWriter(str(folder / "bf16.gguf"), "qwen3")
    gguf_header.describe(writer, config)
    gguf_header.describe_heads(writer, config, config["head_dim"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    with safe_open(demo / "model.safetensors", "pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - it is no dictionary
            own = names.get_name(name, try_suffixes=(".weight",))
            if own is None:
                continue  # the module that drafts
            values = stored.get_tensor(name).float().numpy()
            kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType.BF16
            writer.add_tensor(own, gguf.quantize(values, kind), raw_dtype=kind)
    gguf_header.write(writer)
    for kind in KINDS:
        print(f"written: {rounded(demo, folder / kind, kind)}")


@functools.cache
def _silent() -> Any:
    """Returns a callback that is never freed, as llama.cpp goes on calling it."""
    import llama_cpp as library

    return library.llama_log_callback(lambda *_: None)


def llama_cpp(file: Path) -> LogProbabilities:
    import ctypes

    import llama_cpp as library
    from gguf_mixes import MIXES, quantized

    library.llama_log_set(_silent(), ctypes.c_void_p())
    if not file.exists():
        MIXES.update(q8_0=library.LLAMA_FTYPE_MOSTLY_Q8_0, q4_0=library.LLAMA_FTYPE_MOSTLY_Q4_0)
        quantized(file.with_name("bf16.gguf"), file)
    llm = library.Llama(str(file), logits_all=True, n_ctx=WINDOW, n_batch=WINDOW, n_threads=2, verbose=False)

    def run(window: list[int]) -> list[float]:
        llm.reset()
        llm.eval(window)
        logits = np.array(llm.scores[: len(window) - 1], dtype=np.float64)
        return _of_logits(logits, window)

    return run


def penstock(file: Path, activations: str | None = None) -> LogProbabilities:
    from penstock import LLM, SamplingParams

    rounded = activations if file.stem != "bf16" else None
    llm = LLM(str(file), skip_tokenizer_init=True, max_model_len=WINDOW + 16, quantize_activations=rounded)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def run(window: list[int]) -> list[float]:
        output = llm.generate([window], params, use_tqdm=False)[0]
        return [each[token].logprob for token, each in zip(window[1:], output.prompt_logprobs[1:], strict=True)]

    return run


def transformers(file: Path) -> LogProbabilities:
    import torch
    from transformers import AutoModelForCausalLM

    if file.suffix == ".gguf":
        model = _of_gguf(file)
    else:
        model = AutoModelForCausalLM.from_pretrained(file, dtype=torch.float32, device_map="cpu")

    @torch.inference_mode()
    def run(window: list[int]) -> list[float]:
        return _of_logits(model(torch.tensor([window])).logits[0, :-1].double().numpy(), window)

    return run


def _of_gguf(file: Path) -> Any:
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    demo = Path(__file__).parents[2] / "src" / "penstock" / "demo"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo), dtype=torch.float32).eval()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, model.config.num_hidden_layers)
    state = {}
    for name, parameter in model.state_dict().items():
        tensor = stored[names.get_name("model.embed_tokens.weight" if name == "lm_head.weight" else name, (".weight",))]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        state[name] = values.bfloat16().float().view_as(parameter)
    model.load_state_dict(state)
    return model


def _of_logits(logits: np.ndarray, window: list[int]) -> list[float]:
    logits = logits - logits.max(1, keepdims=True)
    chosen = logits[np.arange(len(logits)), window[1:]]
    return (chosen - np.log(np.exp(logits).sum(1))).tolist()


ENGINES = {
    "llama_cpp": llama_cpp,
    "penstock": penstock,
    "penstock+int8": functools.partial(penstock, activations="int8"),
    "transformers": transformers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("prepare", *ENGINES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, default=Path("LICENSE"))
    parser.add_argument("--formats", nargs="+", help="by default all that the engine reads")
    args = parser.parse_args()
    if args.engine == "prepare":
        prepare(args.folder, args.text)
        return
    texts = json.loads((args.folder / "ids.json").read_text())
    engine, files = ENGINES[args.engine], [args.folder / f"{kind}.gguf" for kind in GGUF]
    if args.engine != "llama_cpp":
        files += sorted(file.parent for file in args.folder.glob("*/model.safetensors"))
    for file in files:
        if args.formats and file.stem not in args.formats:
            continue
        run = engine(file)
        line = []
        for name, ids in texts.items():
            windows = [ids[first : first + WINDOW] for first in range(0, len(ids) - 1, WINDOW)]
            found = [value for window in windows if len(window) > 1 for value in run(window)]
            line.append(f"{name} {math.exp(-sum(found) / len(found)):.3f}")
        print(f"{args.engine} {file.stem}: {', '.join(line)}", flush=True)


main()

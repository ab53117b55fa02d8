"""The README.md of an exported folder: what the model is, what it saw, how to load it."""

from pathlib import Path
from typing import Any

from nanogpt_tpu.hf_format import GPT2, OWN, QWEN3

_ELSEWHERE = {
    GPT2: "For llama.cpp: `python convert_hf_to_gguf.py FOLDER` in its checkout.",
    QWEN3: "Its activation is `{hidden_act}`: llama.cpp and others that assume SiLU do not fit.",
    OWN: "Load it with `trust_remote_code=True`: its code is `modeling_nanogpt_tpu.py`, here.",
}


def model_card(
    state: dict[str, Any], values: dict[str, Any], num_params: int, has_picture: bool
) -> str:
    """The model card: what it is, what it was trained on, how to load it."""
    loss = "not measured" if state["val_loss"] is None else f"{state['val_loss']:.4f} nats a token"
    name = values["architectures"][0]
    remote = ", trust_remote_code=True" if name == OWN else ""
    return "\n".join([
        "---",
        "license: unknown  # choose one: your data and you decide",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "---",
        f"A GPT of {num_params:,} parameters ({name}), trained from scratch with nanogpt_tpu.",
        "",
        f"- Data: {Path(state['data']['source']).name}, {state['data']['num_tokens']:,} tokens",
        f"- Trained: {state['step']:,} steps, {state['tokens']:,} tokens",
        f"- Validation loss: {loss}",
        f"- Tokenizer: {state['tokenizer']['kind']}, {state['tokenizer']['vocab_size']:,} ids; "
        "each training document begins with `<|endoftext|>`",
        f"- Context: {state['config']['model']['block_size']:,} tokens, prompt included",
        "",
        *(["![loss](loss.png)", ""] if has_picture else []),
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{remote})',
        f'model = AutoModelForCausalLM.from_pretrained("FOLDER"{remote})',
        'ids = tokenizer("Once upon a time", return_tensors="pt").input_ids',
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))",
        "```",
        "",
        _ELSEWHERE[name].format(**{"hidden_act": "", **values}),
        "",
    ])  # fmt: skip

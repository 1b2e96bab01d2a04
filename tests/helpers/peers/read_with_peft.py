"""Read an exported adapter with PEFT, and write the logits of its model.

    PYTHON tests/helpers/peers/read_with_peft.py REQUEST ANSWER

REQUEST is a JSON object with the folder `model` of the base model, the folder `adapter` and the
chat `messages`. ANSWER is the .npz file to write. PYTHON needs peft, which brings transformers and
torch, so this file imports nothing of the project.
"""

import json
import sys

import numpy as np
import peft
import torch
import transformers


def main() -> None:
    request = json.loads(sys.argv[1])
    # As the model card of an adapter says.
    base = transformers.AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, request["adapter"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["adapter"])

    text = tokenizer.apply_chat_template(
        request["messages"], tokenize=False, add_generation_prompt=True
    )
    prompt_ids = tokenizer(text, add_special_tokens=False).input_ids
    tokens = torch.tensor([prompt_ids])
    with torch.no_grad():
        logits = model(tokens).logits[0].numpy()
        with model.disable_adapter():
            base_logits = model(tokens).logits[0].numpy()
    np.savez(
        sys.argv[2],
        version=f"{peft.__version__} (transformers {transformers.__version__})",
        prompt_ids=prompt_ids,
        logits=logits,
        base_logits=base_logits,
    )


main()

"""Read an exported policy with vLLM, and write its log-probabilities and its greedy tokens.

    PYTHON tests/helpers/peers/read_with_vllm.py REQUEST ANSWER

REQUEST is a JSON object with the folder `model`, the folder `adapter` or null, the chat `messages`
and the number `new_tokens`. ANSWER is the .npz file to write. PYTHON needs vllm alone, so this file
imports nothing of the project.
"""

import json
import sys

import numpy as np
import vllm
from vllm.lora.request import LoRARequest

# The smallest number that vLLM accepts and no adapter of the tests exceeds.
MAX_LORA_RANK = 8


def main() -> None:
    request = json.loads(sys.argv[1])
    adapter = None
    options = {}
    if request["adapter"] is not None:
        adapter = LoRARequest("policy", 1, request["adapter"])
        options = {"enable_lora": True, "max_lora_rank": MAX_LORA_RANK}
    engine = vllm.LLM(
        request["model"], dtype="float32", enforce_eager=True, max_model_len=256, **options
    )
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=request["new_tokens"],
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0,
    )
    (result,) = engine.chat([request["messages"]], sampling, lora_request=adapter)

    # The first token of a prompt has no log-probability.
    prompt_ids = list(result.prompt_token_ids)
    new_ids = list(result.outputs[0].token_ids)
    entries = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs]
    logprobs = []
    for token_id, logprobs_of_tokens in zip([*prompt_ids[1:], *new_ids], entries, strict=True):
        logprobs.append(logprobs_of_tokens[token_id].logprob)
    np.savez(
        sys.argv[2],
        version=vllm.__version__,
        prompt_ids=prompt_ids,
        new_ids=new_ids,
        logprobs=logprobs,
    )


# vLLM starts processes that import this file again.
if __name__ == "__main__":
    main()

"""A plain training loop of transformers (torch) on the conversations of
`benchmarks/train_tokens.py`, which starts it; trains for as many seconds as each line of its input
says and prints JSON.

`--rows` conversations a step, padded to the longest of them, labels of untrained tokens ignored,
AdamW in float32, products in `--dtype`. With `--lora-rank` peft's adapters of all linear layers are
trained and nothing else.
"""

import argparse
import importlib
import json
import sys
import time

import numpy as np
import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", required=True)
parser.add_argument("--rows", type=int, required=True)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--lora-rank", type=int, default=0)
parser.add_argument("workload")
arguments = parser.parse_args()

work = np.load(arguments.workload)
ends = np.cumsum(work["lengths"])
tokens, trained = (np.split(work[name], ends[:-1]) for name in ("tokens", "trained"))
model = transformers.AutoModelForCausalLM.from_pretrained(
    arguments.checkpoint, dtype=torch.float32, attn_implementation="sdpa"
)
if arguments.lora_rank:
    peft = importlib.import_module("peft")
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=arguments.lora_rank, target_modules="all-linear")
    )
model.train()
optimizer = torch.optim.AdamW(
    [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-5
)


def step(start: int) -> tuple[int, float]:
    chosen = [(start + place) % len(tokens) for place in range(arguments.rows)]
    longest = max(len(tokens[index]) for index in chosen)
    ids = torch.zeros((len(chosen), longest), dtype=torch.int64)
    filled = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, index in enumerate(chosen):
        length = len(tokens[index])
        ids[row, :length] = torch.from_numpy(tokens[index].astype(np.int64))
        filled[row, :length] = 1
        labels[row, :length] = torch.where(
            torch.from_numpy(trained[index]), ids[row, :length], -100
        )
    with torch.autocast("cpu", torch.bfloat16, enabled=arguments.dtype == "bfloat16"):
        loss = model(input_ids=ids, attention_mask=filled, labels=labels, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return int(filled.sum()), float(loss.detach())


step(0)
done = 1
for line in sys.stdin:
    start_time = time.perf_counter()
    tokens_trained = 0
    steps = 0
    loss = 0.0
    while time.perf_counter() - start_time < float(line):
        tokens_of_step, loss = step(done * arguments.rows)
        tokens_trained += tokens_of_step
        steps += 1
        done += 1
    seconds = time.perf_counter() - start_time
    print(
        json.dumps({"tokens": tokens_trained, "steps": steps, "seconds": seconds, "loss": loss}),
        flush=True,
    )

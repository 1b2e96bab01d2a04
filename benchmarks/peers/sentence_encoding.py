"""sentence-transformers on the passages of `benchmarks/retrieval.py encode`, which starts it by a
Python that has it; speaks JSON lines.

    sentence_encoding.py TEXTS.json FOLDER --threads N      FOLDER is the embedder; float32

Each line of its input is a batch size, and asks for one pass over the texts; the answer is the
seconds. After the first one the embeddings are in TEXTS.json.npy.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

parser = argparse.ArgumentParser()
parser.add_argument("texts", type=Path)
parser.add_argument("folder")
parser.add_argument("--threads", type=int, required=True)
arguments = parser.parse_args()

torch.set_num_threads(arguments.threads)
texts = json.loads(arguments.texts.read_text())
model = SentenceTransformer(arguments.folder, device="cpu")
for number, line in enumerate(sys.stdin):
    start_time = time.perf_counter()
    embeddings = model.encode(texts, batch_size=int(line), show_progress_bar=False)
    seconds = time.perf_counter() - start_time
    if number == 0:
        np.save(f"{arguments.texts}.npy", embeddings)
    print(json.dumps({"seconds": seconds}), flush=True)

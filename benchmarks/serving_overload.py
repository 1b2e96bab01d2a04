"""What clients of OpenAI's interface see under more load than there is room for.

    python benchmarks/serving_overload.py DIRECTORY [--slots 8] [--queue-size 32] [--load 4] [--rounds 4] \\
        [--new-tokens 32]

DIRECTORY holds a Hugging Face config.json; the weights are drawn, their values do not matter here.
`load` x (slots + queue-size) clients send `rounds` requests to /v1/completions each, one after the
other, and read their answers as streams. Who is refused (429) pauses for 0.1 s before the next. Prompts
are random, two thirds of each are the same for all. Server and clients share one process, so the
seconds hold the clients' own work.

Prints one JSON line: requests, how many were answered, refused, and anything else (which would be a
fault); p50 and p99 of the seconds to the whole answer, to its first token, and to a refusal; the
most requests that ran and waited at a time, and the room there was; generated tokens a second; by
how many MiB resident memory grew from the end of the first round to the end of the last.
"""

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jax
import numpy as np
from fastapi import FastAPI
from flax import nnx

from mujica_jax.config.schema import EngineConfig
from mujica_jax.errors import UserError
from mujica_jax.inference.background import BackgroundGenerator
from mujica_jax.inference.engine.factory import make_engine
from mujica_jax.inference.requests import SamplingParams
from mujica_jax.inference.scheduler import BatchedGenerator
from mujica_jax.models.decoder import Decoder
from mujica_jax.models.tokenizer import Tokenizer
from mujica_jax.models.weights import load_config
from mujica_jax.retrieval.service import address_of, make_server, open_port
from mujica_jax.web.openai.routes import router
from mujica_jax.web.served import ServedPolicy

PATIENCE_SECONDS = 600.0
PAUSE_SECONDS = 0.1
MIN_VOCABULARY = 300
OK = 200
TOO_MANY_REQUESTS = 429
WARM_ROUNDS = 2  # the second one finds prompts in memory, which takes programs of its own
DECODE_STEPS = 8
PREFILL_TOKENS = 1024


def resident_mebibytes() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    return int(status.read_text().split("VmRSS:")[1].split()[0]) / 1024


def quantiles(seconds: Sequence[float]) -> list[float] | None:
    """Return p50 and p99."""
    if not seconds:
        return None
    return [round(float(value), 4) for value in np.quantile(seconds, [0.5, 0.99])]


class Clients:
    """Send requests and keep what became of them."""

    def __init__(self, url: str, callers: int, new_tokens: int) -> None:
        limits = httpx.Limits(max_connections=callers)
        self._http = httpx.Client(base_url=url, limits=limits, timeout=PATIENCE_SECONDS)
        self._new_tokens = new_tokens
        self.whole: list[float] = []
        self.first: list[float] = []
        self.refused: list[float] = []
        self.faults: list[str] = []

    def ask(self, prompt: Sequence[int]) -> None:
        body = {
            "model": "policy",
            "prompt": list(prompt),
            "max_tokens": self._new_tokens,
            "stream": True,
            "return_token_ids": True,
        }
        start_time = time.perf_counter()
        tokens = 0
        first_seconds = None
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == TOO_MANY_REQUESTS:
                self.refused.append(time.perf_counter() - start_time)
            elif response.status_code != OK:
                self.faults.append(f"status {response.status_code}")
            else:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if first_seconds is None:
                        first_seconds = time.perf_counter() - start_time
                    piece = json.loads(line.removeprefix("data: "))
                    tokens += len(piece["choices"][0]["token_ids"])
        if response.status_code == TOO_MANY_REQUESTS:
            time.sleep(PAUSE_SECONDS)
            return
        if response.status_code != OK:
            return
        if first_seconds is None or tokens != self._new_tokens:
            self.faults.append(f"{tokens} tokens in the place of {self._new_tokens}")
            return
        self.first.append(first_seconds)
        self.whole.append(time.perf_counter() - start_time)


def make_generator(arguments: argparse.Namespace) -> tuple[BatchedGenerator, int]:
    """Return the generator and the size of the vocabulary."""
    config = load_config(arguments.directory)
    decoder = nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()
    sizes = EngineConfig(
        max_num_seqs=arguments.slots,
        decode_steps_per_call=DECODE_STEPS,
        prefill_tokens=PREFILL_TOKENS,
    )
    positions = arguments.prompt_tokens + arguments.new_tokens
    engine = make_engine(decoder, sizes, positions=positions, stop_token_ids=[])
    return BatchedGenerator(engine, prefix_reuse=True), config.vocab_size


def make_prompts(
    callers: int, vocabulary: int, arguments: argparse.Namespace
) -> list[list[list[int]]]:
    """Return the prompts, [rounds][callers]; the first rounds only compile."""
    draw = np.random.default_rng(0)
    shared = draw.integers(0, vocabulary, 2 * arguments.prompt_tokens // 3).tolist()
    own = arguments.prompt_tokens - len(shared)
    others = draw.integers(0, vocabulary, (WARM_ROUNDS + arguments.rounds, callers, own)).tolist()
    prompts = []
    for of_round in others:
        prompts.append([[*shared, *own_tokens] for own_tokens in of_round])
    return prompts


class Peak:
    """The largest value of a number that is read every millisecond."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._stopped = threading.Event()
        self.value = 0

    def watch(self) -> None:
        while not self._stopped.wait(0.001):
            self.value = max(self.value, self._read())

    def stop(self) -> None:
        self._stopped.set()


def load(
    url: str,
    prompts: Sequence[Sequence[Sequence[int]]],
    new_tokens: int,
    read: Callable[[], int],
) -> tuple[Clients, int, float]:
    """Let all callers play their rounds.

    Returns what became of the requests, the largest number that `read` gave meanwhile, and by how
    many MiB memory grew.
    """
    callers = len(prompts[0])
    peak = Peak(read)
    together = threading.Barrier(callers)
    clients = Clients(url, callers, new_tokens)
    memory = []

    def play(caller: int) -> None:
        together.wait()
        for number, of_round in enumerate(prompts):
            clients.ask(of_round[caller])
            if number == 0 and caller == 0:
                memory.append(resident_mebibytes())

    with ThreadPoolExecutor(callers + 1) as pool:
        watching = pool.submit(peak.watch)
        try:
            list(pool.map(play, range(callers)))
        finally:
            peak.stop()
        watching.result()
    return clients, peak.value, resident_mebibytes() - memory[0]


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve the application in a thread, and yield its address."""
    server_socket = open_port("127.0.0.1", 0)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server_socket]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield address_of(server_socket)
    finally:
        server.should_exit = True
        thread.join()
        server_socket.close()


def measure(arguments: argparse.Namespace) -> dict:
    generator, vocabulary = make_generator(arguments)
    background = BackgroundGenerator.of(generator, queue_size=arguments.queue_size)
    prompts = make_prompts(arguments.load * background.capacity, vocabulary, arguments)
    # Prompts are token ids. The tokenizer only writes the text beside the tokens of an answer.
    tokenizer = Tokenizer.train(["a text"], vocab_tokens=MIN_VOCABULARY)
    defaults = SamplingParams(max_new_tokens=arguments.new_tokens, temperature=1.0, seed=0)
    positions = arguments.prompt_tokens + arguments.new_tokens
    policy = ServedPolicy(background, tokenizer, max_tokens=positions, defaults=defaults)
    app = FastAPI()
    app.include_router(router(policy, None))

    def read() -> int:
        counters = background.statistics
        return counters.running + counters.waiting

    background.start()
    with serving(app) as url:
        load(url, prompts[:WARM_ROUNDS], arguments.new_tokens, read)
        tokens_before = background.statistics.generated_tokens
        start_time = time.perf_counter()
        clients, max_in_engine, growth = load(
            url, prompts[WARM_ROUNDS:], arguments.new_tokens, read
        )
        seconds = time.perf_counter() - start_time
        tokens = background.statistics.generated_tokens - tokens_before
    background.stop()
    return {
        "requests": len(prompts[0]) * arguments.rounds,
        "answered": len(clients.whole),
        "refused": len(clients.refused),
        "faults": clients.faults,
        "answer_seconds_p50_p99": quantiles(clients.whole),
        "first_token_seconds_p50_p99": quantiles(clients.first),
        "refusal_seconds_p50_p99": quantiles(clients.refused),
        "max_running_and_waiting": max_in_engine,
        "room": background.capacity,
        "tokens_per_second": round(tokens / seconds, 1),
        "memory_growth_mebibytes": round(growth, 1),
        "device": jax.devices()[0].device_kind,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--queue-size", type=int, default=32)
    parser.add_argument(
        "--load", type=int, default=4, help="clients, as a multiple of the room there is"
    )
    parser.add_argument("--rounds", type=int, default=4, help="requests a client")
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=32)
    try:
        result = measure(parser.parse_args())
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0 if result["answered"] + result["refused"] == result["requests"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

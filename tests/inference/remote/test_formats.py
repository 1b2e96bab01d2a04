"""The requests to an endpoint and the reading of its answers, against a server that answers in
vLLM's and OpenAI's own words.
"""

import asyncio
import json

import pytest

from mujica_jax.config.methods import RemoteConfig
from mujica_jax.inference.remote.generator import RemoteGenerator
from mujica_jax.inference.requests import (
    Completion,
    ReplyError,
    RequestError,
    SamplingParams,
    check_params,
    check_prompt,
)
from mujica_jax.models.tokenizer import Tokenizer
from tests.helpers.local_endpoint import Answer, LocalEndpoint, serving

TOKENIZER = Tokenizer.train(iter(["Who directed The Purple Shore? Ann Lee did, in 1987."] * 3), 300)
PROMPT = TOKENIZER.open_conversation("Be brief.", "Who directed it?")
END = TOKENIZER.end_of_turn_id
WORDS = TOKENIZER.encode_model("<answer>Ann Lee</answer>")


def params(
    *, max_new_tokens: int = 40, temperature: float = 1.0, seed: int = 7, **options
) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, **options
    )


def generator(
    endpoint: LocalEndpoint,
    mode="completions",
    *,
    tokenizer=TOKENIZER,
    max_attempts=6,
    first_wait_seconds=0.01,
    **options,
) -> RemoteGenerator:
    remote = RemoteConfig(base_url=endpoint.base_url, model="m", mode=mode, **options)
    return RemoteGenerator(
        remote, tokenizer, max_attempts=max_attempts, first_wait_seconds=first_wait_seconds
    )


def vllm(ids, finish="stop", *, stop_reason=None, logprobs=None, **changes) -> dict:
    """Return a reply as vLLM writes it: ids as a list, and as strings beside their
    log-probabilities. No other field is needed.
    """
    if logprobs is None:
        logprobs = [-0.25 * (place + 1) for place in range(len(ids))]
    details = {
        "tokens": [f"token_id:{id}" for id in ids],
        "token_logprobs": logprobs,
        "top_logprobs": [],
        "text_offset": [],
    }
    choice = {
        "index": 0,
        "text": "unread",
        "finish_reason": finish,
        "stop_reason": stop_reason,
        "token_ids": list(ids),
        "logprobs": details,
        "prompt_token_ids": PROMPT,
    } | changes
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(ids), "total_tokens": 0}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


def openai(text, finish="stop", **changes) -> dict:
    message = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish} | changes
    return {
        "id": "c",
        "object": "chat.completion",
        "choices": [choice],
        "usage": {"prompt_tokens": 11, "completion_tokens": 5},
    }


def answered(content, mode="completions", prompt=PROMPT, **changes) -> Completion:
    with serving(lambda request, before: Answer(content=content)) as endpoint:
        return asyncio.run(generator(endpoint, mode).generate(prompt, params(**changes)))


# --- completions ---


def test_ids_and_logprobs_are_those_of_the_endpoint():
    completion = answered(vllm([*WORDS, END]))
    assert completion.token_ids == (*WORDS, END)
    assert completion.finish_reason == "stop"
    assert completion.logprobs == tuple(-0.25 * (place + 1) for place in range(len(WORDS) + 1))
    assert completion.sampling_logprobs == completion.logprobs, (
        "temperature 1 without filters draws from the policy itself"
    )
    assert completion.policy_version < 0, "no policy of a run"


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}],
)
def test_an_endpoint_does_not_say_the_logprobs_of_another_distribution(changes):
    completion = answered(vllm([*WORDS, END]), **changes)
    assert completion.logprobs is not None
    assert completion.sampling_logprobs is None


def test_everything_that_shapes_the_distribution_is_said():
    """vLLM takes missing fields from the model's generation_config.json.

    Qwen2.5's has a repetition penalty.
    """
    with serving(lambda request, before: Answer(content=vllm([*WORDS, END]))) as endpoint:
        wanted = params(
            top_k=5,
            top_p=0.9,
            min_p=0.05,
            stop_token_ids=(3,),
            stop_strings=("\n\n",),
            temperature=0.7,
        )
        asyncio.run(generator(endpoint).generate(PROMPT, wanted))
        asyncio.run(generator(endpoint).generate(PROMPT, params()))
    first, second = endpoint.requests
    assert first.path == "/v1/completions"
    assert first.body == {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 40,
        "seed": 7,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": ["\n\n"],
        "stop_token_ids": sorted({3, *TOKENIZER.stop_token_ids}),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    assert second.body["top_k"] == -1, "vLLM's word for no filter, in all versions"


def test_ids_are_read_from_tokens_where_a_server_gives_no_list():
    reply = vllm([*WORDS, END])
    del reply["choices"][0]["token_ids"], reply["choices"][0]["prompt_token_ids"]
    assert answered(reply).token_ids == (*WORDS, END)


def test_a_reply_without_logprobs_has_none():
    reply = vllm([*WORDS, END])
    reply["choices"][0]["logprobs"] = None
    completion = answered(reply)
    assert completion.logprobs is None
    assert completion.sampling_logprobs is None


def test_a_completion_may_end_at_its_limit():
    completion = answered(vllm(WORDS, "length"), max_new_tokens=len(WORDS))
    assert completion.finish_reason == "length"


def test_a_stop_token_at_the_limit_counts_as_a_stop():
    # vLLM looks at the length first; the stop token is there all the same.
    completion = answered(vllm([*WORDS, END], "length"), max_new_tokens=len(WORDS) + 1)
    assert completion.finish_reason == "stop"


def test_a_completion_may_end_at_a_stop_token_of_the_request():
    completion = answered(vllm([*WORDS, 5], stop_reason=5), stop_token_ids=(5,))
    assert completion.finish_reason == "stop"


def test_a_completion_ends_with_the_token_that_completes_a_stop_string():
    ids = TOKENIZER.encode_model("Ann Lee. Then Bob")
    pieces = [TOKENIZER.token_bytes(id).decode() for id in ids]
    end = next(count for count in range(len(ids)) if ". Th" in "".join(pieces[:count]))
    reply = vllm(ids, stop_reason=". Th")
    completion = answered(reply, stop_strings=("Bobby", ". Th"))
    assert (completion.finish_reason, completion.stop_string) == ("stop_string", ". Th")
    assert completion.token_ids == tuple(ids[:end])
    assert completion.logprobs is not None
    assert list(completion.logprobs) == reply["choices"][0]["logprobs"]["token_logprobs"][:end]


def parts_of_a_reply(*parts: list[int], ends: str = "</answer>"):
    """Return the behaviour of a server that stops at every stop string.

    It sends the parts in their order; each is asked for with the text before it.
    """

    def answer(request, before) -> Answer:
        last = before == len(parts) - 1
        reply = vllm(
            parts[before],
            stop_reason=None if last else ends,
            prompt_token_ids=request.body["prompt"],
        )
        return Answer(content=reply)

    return answer


def test_a_server_that_stops_inside_of_a_thought_is_asked_to_go_on():
    thought = TOKENIZER.encode_model("<think> put it into <answer>Ann</answer>")
    continuation = TOKENIZER.encode_model(" and close </answer>")
    rest = [*TOKENIZER.encode_model("</think>"), *WORDS]
    wanted = params(stop_strings=("</answer>",), max_new_tokens=90)
    with serving(parts_of_a_reply(thought, continuation, rest)) as endpoint:
        remote = generator(endpoint)
        completion = asyncio.run(remote.generate(PROMPT, wanted))
    assert completion.token_ids == (*thought, *continuation, *rest)
    assert (completion.finish_reason, completion.stop_string) == ("stop_string", "</answer>")
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    first, second, third = [request.body for request in endpoint.requests]
    assert second["prompt"] == [*PROMPT, *thought]
    assert third["prompt"] == [*PROMPT, *thought, *continuation]
    room = [90, 90 - len(thought), 90 - len(thought) - len(continuation)]
    assert [first["max_tokens"], second["max_tokens"], third["max_tokens"]] == room
    assert first["stop"] == second["stop"] == ["</answer>"]
    assert len({first["seed"], second["seed"], third["seed"]}) == 3
    counts = remote.statistics
    assert counts.requests == 1
    assert counts.generated_tokens == len(thought) + len(continuation) + len(rest)


def test_a_thought_that_the_prompt_left_open_hides_stop_strings_of_a_server():
    thought = TOKENIZER.encode_model("put it into </answer>")
    rest = TOKENIZER.encode_model(" </think> x</answer>")
    wanted = params(stop_strings=("</answer>",), max_new_tokens=90, thought_open=True)
    with serving(parts_of_a_reply(thought, rest)) as endpoint:
        completion = asyncio.run(generator(endpoint).generate(PROMPT, wanted))
    assert completion.token_ids == (*thought, *rest)
    assert completion.finish_reason == "stop_string"


def test_a_thought_that_a_server_cuts_at_the_last_token_is_cut_by_its_length():
    thought = TOKENIZER.encode_model("<think> </answer>")
    completion = answered(
        vllm(thought, stop_reason="</answer>"),
        stop_strings=("</answer>",),
        max_new_tokens=len(thought),
    )
    assert (completion.token_ids, completion.finish_reason) == (tuple(thought), "length")


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ({}, "gave 0 choices where 1 was asked for"),
        ({"choices": [{}, {}]}, "gave 2 choices where 1"),
        ({"choices": ["x"]}, "gave 1 choices"),
        (vllm(WORDS, "abort"), "ended a completion by 'abort' where 'stop' or 'length'"),
        (vllm(WORDS, {"why": 1}), "ended a completion by .* where 'stop' or 'length'"),
        (vllm(WORDS, "stop"), r"last token \d+ is none of the stop tokens"),
        (vllm([], "stop"), "generated 0 tokens of 40"),
        (vllm([1] * 41, "length"), "generated 41 tokens, but max_new_tokens is 40"),
        (
            vllm([*WORDS, END], logprobs=[-1.0]),
            rf"gave 1 log-probabilities for {len(WORDS) + 1} tokens",
        ),
        (vllm([1, END], logprobs=[-1.0, None]), "gave None as log-probability of token 1 of 2"),
        (vllm([1, END], logprobs=[float("nan"), -1.0]), "gave nan as log-probability"),
        (vllm([1, END], logprobs=[-1.0, 10**400]), "gave 1000"),
        (vllm([1, END], logprobs=[0.5, -1.0]), "gave 0.5 as log-probability"),
        (vllm([1, END], logprobs="many"), "token_logprobs of type str"),
        (
            vllm([300, END]),
            rf"token ids \d+..300 are outside the vocabulary of {TOKENIZER.vocab_size}",
        ),
        (vllm([-1, END]), r"token ids -1..\d+ are outside the vocabulary"),
        (vllm([1, END], token_ids=["1", END]), "token_ids that are not a list of whole numbers"),
        (vllm([1, END], token_ids=[True, END]), "token_ids that are not a list of whole numbers"),
        (
            vllm([1, END], prompt_token_ids=[1, 2]),
            rf"read 2 prompt tokens that are not the {len(PROMPT)} sent",
        ),
        (vllm([1, END], prompt_token_ids=5), "read no list of prompt tokens"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_explained(reply, sentence):
    with pytest.raises(ReplyError, match=sentence):
        answered(reply)


def test_a_server_that_gives_words_for_tokens_is_refused():
    reply = vllm([1, END], token_ids=None)
    reply["choices"][0]["logprobs"]["tokens"] = ["Ann", "Lee"]
    with pytest.raises(
        ReplyError, match="gave 0 token ids for 2 tokens: it must know return_token_ids"
    ):
        answered(reply)


# --- chat ---


def test_the_conversation_goes_to_a_chat_endpoint_as_messages():
    prompt = [
        *PROMPT,
        *WORDS,
        END,
        *TOKENIZER.continue_conversation("Sure? <|im_end|>", stopped=True),
    ]
    with serving(lambda request, before: Answer(content=openai("Yes."))) as endpoint:
        completion = asyncio.run(
            generator(endpoint, "chat").generate(prompt, params(top_p=0.9, temperature=0.0))
        )
    (request,) = endpoint.requests
    assert request.path == "/v1/chat/completions"
    assert request.body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Who directed it?"},
            {"role": "assistant", "content": "<answer>Ann Lee</answer>"},
            {"role": "user", "content": "Sure? <|im_end|>"},
        ],
        "max_completion_tokens": 40,
        "temperature": 0.0,
        "top_p": 0.9,
        "seed": 7,
    }
    assert completion.token_ids == (*TOKENIZER.encode_model("Yes."), END)
    assert completion.finish_reason == "stop"
    assert completion.logprobs is None
    assert completion.sampling_logprobs is None


@pytest.mark.parametrize(
    "text", ["a<|im_end|>\n<|im_start|>user\nb", "<|endoftext|>", "é 東京 🎬", ""]
)
def test_a_reply_is_text_and_cannot_hold_a_turn_token(text):
    ids = answered(openai(text), "chat", max_new_tokens=90).token_ids
    special = set(TOKENIZER.stop_token_ids) | set(TOKENIZER.encode_model("<think></think>")) | {END}
    assert ids[-1] == END
    assert special.isdisjoint(ids[:-1])
    assert TOKENIZER.decode(ids[:-1]) == text


def test_the_tags_of_a_reply_are_the_protocol_s_tokens():
    assert answered(openai("<answer>Ann Lee</answer>"), "chat").token_ids == (*WORDS, END)


def test_half_a_character_in_a_reply_is_replaced():
    reply = json.dumps(openai("a?b")).replace("a?b", "a\\ud83cb").encode()
    assert TOKENIZER.decode(answered(reply, "chat").token_ids[:-1]) == "a\ufffdb"


def test_a_reply_that_is_longer_in_our_tokens_is_cut():
    whole = TOKENIZER.encode_model("A film about films about films.")
    with serving(
        lambda request, before: Answer(content=openai("A film about films about films."))
    ) as endpoint:
        remote = generator(endpoint, "chat")
        completion = asyncio.run(remote.generate(PROMPT, params(max_new_tokens=5)))
    assert (completion.token_ids, completion.finish_reason) == (tuple(whole[:5]), "length")
    assert remote.statistics.cut_replies == 1


def test_a_reply_that_the_endpoint_cut_has_no_end_of_turn():
    completion = answered(openai("Ann L", "length"), "chat")
    assert completion.token_ids == tuple(TOKENIZER.encode_model("Ann L"))
    assert completion.finish_reason == "length"


def test_a_stop_string_ends_a_chat_reply():
    completion = answered(openai("Ann Lee. Then"), "chat", stop_strings=("Th", ". "))
    assert (completion.finish_reason, completion.stop_string) == ("stop_string", ". ")
    assert completion.token_ids == tuple(TOKENIZER.encode_model("Ann Lee. "))


THOUGHTFUL = {
    "<think> into <answer> </answer>. </think><answer>Ann</answer> and": "<think> into <answer> </answer>. </think>"
    "<answer>Ann</answer>",
    "into <answer> </answer>. </think><answer>Ann</answer> and": "into <answer> </answer>. </think>"
    "<answer>Ann</answer>",
    "<answer>Ann</answer> and": "<answer>Ann</answer>",
    "<THINK> </answer> </THINK> <answer>Ann</answer>": "<THINK> </answer> </THINK> <answer>Ann</answer>",
    "<think> </answer> and no end": "<think> </answer> and no end",
    "<answer>Ann</answer><think> </answer>": "<answer>Ann</answer>",
}


@pytest.mark.parametrize("text", THOUGHTFUL)
def test_a_chat_reply_is_cut_outside_of_its_thoughts(text):
    with serving(lambda request, before: Answer(content=openai(text))) as endpoint:
        completion = asyncio.run(
            generator(endpoint, "chat").generate(
                PROMPT, params(stop_strings=("</answer>",), max_new_tokens=99)
            )
        )
    (request,) = endpoint.requests
    assert "stop" not in request.body, "the server would stop inside of a thought"
    stopped = completion.finish_reason == "stop_string"
    assert (
        TOKENIZER.decode(completion.token_ids if stopped else completion.token_ids[:-1])
        == THOUGHTFUL[text]
    )
    assert stopped == THOUGHTFUL[text].endswith("</answer>")


def test_reasoning_that_a_server_keeps_apart_is_no_part_of_the_reply():
    reply = openai("<answer>Ann</answer>")
    reply["choices"][0]["message"]["reasoning_content"] = "into <answer> Rome </answer>"
    completion = answered(reply, "chat", stop_strings=("</answer>",))
    assert TOKENIZER.decode(completion.token_ids) == "<answer>Ann</answer>"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (
            "<answer>Ann</answer>",
            "</think>\n\n<answer>Ann</answer>",
        ),  # the server took the thought out
        ("I know. </think><answer>Ann</answer>", "I know. </think><answer>Ann</answer>"),
        ("<think> I know. </think><answer>Ann</answer>", " I know. </think><answer>Ann</answer>"),
    ],
)
def test_a_reply_to_a_prompt_that_left_a_thought_open_goes_on_inside_of_it(text, written):
    completion = answered(
        openai(text), "chat", stop_strings=("</answer>",), thought_open=True, max_new_tokens=90
    )
    assert TOKENIZER.decode(completion.token_ids) == written


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (openai(None), "gave no text and ended by 'stop'"),
        (openai({"text": "no list"}), "gave no text and ended by 'stop': its content is {'text'"),
        (openai([{"type": "refusal", "refusal": "no"}]), "refused to reply"),
        (
            openai(None, message={"role": "assistant", "content": None, "refusal": "I cannot"}),
            "refused to reply",
        ),
        (
            openai("x", "tool_calls"),
            "ended a completion by 'tool_calls' where 'stop' or 'length' is expected",
        ),
        ({"error": {"message": "overloaded"}}, "answered with an error: .*overloaded"),
        ({"error": "no", "choices": []}, "answered with an error: 'no'"),
        (openai("x", "content_filter"), "ended a completion by 'content_filter'"),
        (openai("x", message="hello"), "gave no text"),
    ],
)
def test_a_chat_answer_without_a_reply_is_explained(reply, sentence):
    with pytest.raises(ReplyError, match=sentence):
        answered(reply, "chat")


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"min_p": 0.1}, {"stop_token_ids": (5,)}])
def test_what_a_chat_endpoint_cannot_do_is_refused_and_not_dropped(changes):
    (name,) = changes
    refused = pytest.raises(
        RequestError, match=rf"{name} is .*, but a chat endpoint does not accept it"
    )
    with serving(lambda request, before: Answer(content=openai("x"))) as endpoint, refused:
        asyncio.run(generator(endpoint, "chat").generate(PROMPT, params(**changes)))
    assert endpoint.requests == []


def test_a_prompt_that_is_no_conversation_is_refused():
    with pytest.raises(RequestError, match="the conversation begins with"):
        answered(openai("x"), "chat", prompt=TOKENIZER.encode_plain("Hello"))


# --- parameters, whoever serves them ---


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0: ask for at least 1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"stop_token_ids": (3, -2)}, "stop_token_ids contain -2"),
        ({"stop_strings": ("a", "")}, "a stop string is empty"),
        ({"deadline_seconds": 0.0}, "deadline_seconds is 0.0"),
    ],
)
def test_parameters_that_nobody_can_honour_are_refused(changes, sentence):
    with pytest.raises(RequestError, match=sentence):
        check_params(params(**changes))
    check_params(params())


def test_prompts_that_nobody_can_serve_are_refused():
    for prompt, sentence in [
        ([], "the prompt is empty"),
        ([1, 300], r"1\.\.300 are outside the vocabulary of 300"),
        ([-1], r"-1\.\.-1"),
    ]:
        with pytest.raises(RequestError, match=sentence):
            check_prompt(prompt, 300)
    check_prompt([0, 299], 300)

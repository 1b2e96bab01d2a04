"""The routes of the page that asks, health, and the API key."""

import json
import time

import httpx
import openai
import pytest

from mujica_jax.web.app import MAX_REQUEST_BYTES, create_app
from mujica_jax.web.model_routes import model_routers
from tests.helpers.little_agent import QUESTION
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.served_agent import NOTE, UNKNOWN, WHO, PausedPolicy, served_agent
from tests.helpers.served_app import app_served


@pytest.fixture
def url():
    with (
        served_agent() as served,
        app_served(create_app([], model_routers=model_routers(served))) as address,
    ):
        yield address


def asked(url: str, question: str = QUESTION.text, **fields: object) -> httpx.Response:
    body = {"question": question, **fields}
    return httpx.post(f"{url}/api/ask", json=body, timeout=HANG_SECONDS)


def happenings(response: httpx.Response) -> list[dict]:
    """Return the server-sent events of an answer."""
    events = response.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_the_page_learns_what_can_be_asked(url):
    assert httpx.get(f"{url}/api/ask").json() == {
        "model": "little, policy 3",
        "agents": ["mujica"],
        "sources": ["graph"],
        "examples": [QUESTION.text],
    }


def test_an_episode_arrives_event_by_event_and_its_trajectory_can_be_read(url):
    response = asked(url)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    events = happenings(response)
    assert [event["event"] for event in events if event["event"] != "text"] == [
        "note",
        "started",
        "turn",
        "search",
        "search",
        "worker",
        "worker",
        "turn",
        "search",
        "worker",
        "turn",
        "finished",
        "trajectory",
    ]
    assert events[0]["note"] == NOTE
    first_turn = next(event for event in events if event["event"] == "turn")
    written = [event["text"] for event in events[: events.index(first_turn)] if "text" in event]
    assert "".join(written) == first_turn["text"]
    assert first_turn["sub_questions"][0]["query"] == WHO
    assert (events[-2]["answer"], events[-2]["searches"]) == ("Ghent", 3)

    trace = httpx.get(f"{url}/api/ask/{events[-1]['id']}").json()
    assert (trace["question"], trace["answer"]) == (QUESTION.text, "Ghent")
    assert [len(turn["searches"]) for turn in trace["iterations"]] == [2, 1, 0]
    assert trace["has_tokenizer"]


def test_a_question_that_cannot_be_asked_is_answered_with_its_reason(url):
    response = asked(url, "Who?")
    assert (response.status_code, response.json()) == (400, {"error": UNKNOWN})


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "the request is not JSON"),
        (b"[]", "the request is a JSON list: send a JSON object"),
        (b"{}", "question is None: write a question"),
        (b'{"question": "  "}', "question is '  ': write a question"),
        (
            b'{"question": "Who?", "agent": "mujika"}',
            "unknown agent 'mujika'; did you mean mujica?",
        ),
        (b'{"question": "Who?", "source": 3}', "source is 3: give one of the names"),
        (b'{"question": "%b"}' % (b"a" * 4001), "the question has 4,001 characters"),
    ],
)
def test_a_wrong_request_is_answered_with_one_sentence(url, body, sentence):
    response = httpx.post(f"{url}/api/ask", content=body, timeout=HANG_SECONDS)
    assert response.status_code == 400
    assert sentence in response.json()["error"]


def test_an_unknown_trajectory_and_a_server_without_a_model_are_told(url):
    assert "there is no trajectory 7" in httpx.get(f"{url}/api/ask/7").json()["error"]
    with app_served(create_app([])) as other:
        assert httpx.get(f"{other}/api/ask").json()["model"] is None
        assert "start it with `mujica serve RUN`" in asked(other).json()["error"]
        assert httpx.get(f"{other}/healthz").json() == {"status": "ok", "model": None}


def test_a_body_of_many_megabytes_is_refused(url):
    response = httpx.post(
        f"{url}/v1/chat/completions", content=b"x" * (MAX_REQUEST_BYTES + 1), timeout=HANG_SECONDS
    )
    assert response.status_code == 413
    assert "send less" in response.json()["error"]["message"]


def test_a_full_server_asks_to_come_later():
    policy = PausedPolicy()
    policy.pause()
    with (
        served_agent(policy, capacity=1) as served,
        app_served(create_app([], model_routers=model_routers(served))) as url,
        httpx.Client(timeout=HANG_SECONDS) as client,
    ):
        body = {"question": QUESTION.text}
        with client.stream("POST", f"{url}/api/ask", json=body) as first:
            assert first.status_code == 200
            second = asked(url)
            assert (second.status_code, second.headers["Retry-After"]) == (429, "1")
            assert "the server is full" in second.json()["error"]
            assert httpx.get(f"{url}/healthz").json()["under_way"] == 1
        # The first client has left, so that its episode is ended.
        while served.background.under_way:
            time.sleep(0.01)
        policy.permits.release(100)
        assert happenings(asked(url))[-1]["event"] == "trajectory"


def test_the_agent_answers_openais_clients_with_its_searches(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=HANG_SECONDS)
    assert [model.id for model in client.models.list()] == ["agent"]
    messages = [{"role": "user", "content": QUESTION.text}]
    answer = client.chat.completions.create(model="agent", messages=messages)
    assert answer.choices[0].message.content == "Ghent"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.mujica["stop_reason"] == "answered"
    assert answer.mujica["searches"][0]["query"] == WHO
    assert len(answer.mujica["searches"]) == 3


def test_the_agents_stream_tells_what_happens_and_ends_with_the_answer(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=HANG_SECONDS)
    messages = [{"role": "user", "content": QUESTION.text}]
    pieces = list(client.chat.completions.create(model="agent", messages=messages, stream=True))
    events = [piece.mujica.get("event") for piece in pieces]
    assert events[:4] == ["note", "started", "text", "text"]
    assert events[-2:] == ["finished", None]
    contents = [piece.choices[0].delta.content for piece in pieces]
    assert [content for content in contents if content] == ["Ghent"]


def test_the_agent_answers_no_prompts_and_no_unknown_questions(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=HANG_SECONDS)
    with pytest.raises(openai.BadRequestError, match="send the question to /v1/chat/completions"):
        client.completions.create(model="agent", prompt="Who?")
    messages = [{"role": "user", "content": "Who?"}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="names no entity of the graph"):
            client.chat.completions.create(model="agent", messages=messages, stream=stream)


def test_an_api_key_protects_data_and_not_the_page():
    with served_agent() as served:
        app = create_app([], model_routers=model_routers(served), api_key="secret")
        with app_served(app) as url:
            for path in ("/", "/static/app.js", "/healthz"):
                assert httpx.get(f"{url}{path}").status_code == 200
            for path in ("/api/ask", "/api/runs", "/metrics", "/v1/models"):
                assert httpx.get(f"{url}{path}").status_code == 401
                wrong = httpx.get(f"{url}{path}", headers={"Authorization": "Bearer secreT"})
                assert wrong.status_code == 401
                right = httpx.get(f"{url}{path}", headers={"Authorization": "Bearer secret"})
                assert right.status_code == 200
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
            with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
                client.models.list()

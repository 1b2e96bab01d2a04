"""The application as a whole: names, headers, limits."""

import shutil

import httpx
import pytest

from mujica_jax.errors import UserError
from mujica_jax.web.app import MAX_REQUEST_BYTES, create_app
from tests.helpers.served_app import app_served


def test_the_page_allows_only_content_of_its_own(client):
    for path in ("/", "/static/app.js", "/api/runs", "/nowhere"):
        policy = client.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy


def test_every_file_that_the_page_names_is_served(client):
    page = client.get("/").text
    for path in ("/static/style.css", "/static/app.js", "/static/icon.svg"):
        assert path in page
        assert client.get(path).status_code == 200


def test_another_host_name_is_refused(client):
    """A page elsewhere may point a name of its own at 127.0.0.1. This machine's names are known."""
    assert client.get("/api/runs", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/api/runs", headers={"Host": "localhost:1234"}).status_code == 200


def test_any_host_name_is_allowed_where_the_port_is_open_to_others(run_directory):
    app = create_app([str(run_directory)], allowed_hosts=["*"])
    with app_served(app) as address:
        answer = httpx.get(f"{address}/api/runs", headers={"Host": "machine.example"})
    assert answer.status_code == 200


def test_no_other_site_may_read_an_answer(client):
    answer = client.get("/api/runs", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_body_above_the_limit_is_refused(client):
    answer = client.post("/api/runs", content=b"x" * (MAX_REQUEST_BYTES + 1))
    assert answer.status_code == 413
    assert answer.json()["error"] == "the request has more than 4,194,304 bytes: send less"


def test_a_body_of_unknown_length_is_refused_above_the_limit(client):
    def parts():
        for _ in range(3):
            yield b"x" * (MAX_REQUEST_BYTES // 2)

    assert client.post("/api/runs", content=parts()).status_code == 413


def test_an_unknown_page_is_answered_with_a_sentence(client):
    answer = client.get("/nowhere")
    assert answer.status_code == 404
    assert answer.json() == {"error": "there is no page '/nowhere'; start at /"}


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd"]
)
def test_no_file_outside_the_page_is_served(client, path):
    request = httpx.Request("GET", str(client.base_url).rstrip("/") + path)
    answer = client.send(request)
    assert answer.status_code == 404


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"is not the directory of a run: it has no config\.json and no"
    ):
        create_app([str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_runs_of_one_name_get_numbers(written_run, tmp_path):
    for folder in ("a", "b"):
        shutil.copytree(written_run, tmp_path / folder / "little")
    app = create_app([f"{tmp_path}/a/little", f"{tmp_path}/b/little/"])
    with app_served(app) as address:
        runs = httpx.get(f"{address}/api/runs").json()["runs"]
    assert [run["name"] for run in runs] == ["little", "little (2)"]

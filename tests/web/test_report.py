"""The route of the report."""

from mujica_jax.report.metrics_log import MetricsLog


def test_a_report_has_the_runs_that_are_asked_for(client):
    content = client.get("/api/report?run=little&run=little").json()
    assert [run["name"] for run in content["runs"]] == ["little"]
    assert content["runs"][0]["phases"][0]["em"] == 10.0
    assert content["differences"] == []


def test_nothing_is_sent_until_something_has_changed(client, run_directory):
    first = client.get("/api/report?run=little")
    tag = {"If-None-Match": first.headers["etag"]}
    unchanged = client.get("/api/report?run=little", headers=tag)
    assert unchanged.status_code == 304
    assert unchanged.content == b""
    with MetricsLog(run_directory) as log:
        log.write("mygo", 2, {"k": 0.7})
    changed = client.get("/api/report?run=little", headers=tag)
    assert changed.status_code == 200
    assert changed.headers["etag"] != first.headers["etag"]


def test_an_unknown_run_is_answered_with_a_sentence(client):
    answer = client.get("/api/report?run=litle")
    assert answer.status_code == 404
    assert answer.json() == {"error": "unknown run 'litle'; did you mean little?"}


def test_a_report_needs_a_run(client):
    answer = client.get("/api/report")
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("run: ")

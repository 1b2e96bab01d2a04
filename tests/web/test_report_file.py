"""The report as one file: what is embedded cannot break out."""

import base64
import hashlib
import json
import re

from mujica_jax.web.report_file import MODULES, json_in_html, report_file
from tests.helpers.viewed_runs import write_run

BREAKS_OUT = "</script><script>alert(1)</script><!-- & \u2028 ]]>"


def test_no_text_ends_the_script_element():
    embedded = json_in_html({"question": BREAKS_OUT})
    assert "<" not in embedded
    assert json.loads(embedded) == {"question": BREAKS_OUT}


def test_a_hostile_setting_stays_inside_the_data(run_directory):
    path = run_directory / "config.json"
    config = json.loads(path.read_text())
    config["config"]["name"] = BREAKS_OUT
    path.write_text(json.dumps(config))
    text = report_file([str(run_directory)])
    assert text.count("<script") == 2
    assert "alert(1)</script>" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["runs"][0]["settings"]["name"] == BREAKS_OUT


def test_the_policy_allows_this_script_and_this_style_alone(run_directory):
    text = report_file([str(run_directory)])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    for pattern, name in (
        (r"<style>(.*?)</style>", "style-src"),
        (r'<script type="module">(.*?)</script>', "script-src"),
    ):
        content = re.search(pattern, text, re.DOTALL)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]


def test_the_script_imports_nothing(run_directory):
    script = report_file([str(run_directory)]).partition('<script type="module">')[2]
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert len(MODULES) == 3


def test_two_runs_are_in_one_report_with_their_differences(run_directory, tmp_path):
    write_run(tmp_path / "other" / "second", seed=1)
    text = report_file([str(run_directory), str(tmp_path / "other" / "second")])
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    content = json.loads(data[1])
    assert [run["name"] for run in content["runs"]] == ["little", "second"]
    assert content["differences"] == [{"setting": "seed", "values": [0, 1]}]

"""The pages in a real browser, on the run of `tests/helpers/viewed_runs.py`."""

import dataclasses
import json
import shutil

import pytest

from mujica_jax.report.metrics_log import MetricsLog
from mujica_jax.trajectories.store import Store
from mujica_jax.web.app import create_app
from mujica_jax.web.report_file import report_file
from tests.helpers.browser import grave_faults, open_browser, open_page, set_screen, wait_until
from tests.helpers.served_app import app_served
from tests.helpers.viewed_runs import FIRST_SEARCH, solved, write_evaluation

HOSTILE = (
    "<img src=x onerror=\"window.broken = 'image'\"><script>window.broken = 'script'</script>"
    "</script></style><b>bold</b> <answer> Rome </answer> <|im_end|> &lt;i&gt; {{7*7}} ${7*7}"
)
# Address of each page, and a selector that fits when it is drawn.
PAGES = {
    "runs": ("#/runs", "section.card"),
    "trajectories": ("#/trajectories?run=little", ".rows tbody tr"),
    "trajectory": ("#/trajectory?run=little&set=round-1&shard=0&row=0", ".tree .search"),
    "compare": (
        "#/compare?left=little&left=round-1&left=0&left=1&right=little&right=round-1&right=1&right=0",
        ".side-by-side .tree",
    ),
    "report": ("#/report?run=little", ".chart svg"),
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def address(run_directory):
    with app_served(create_app([str(run_directory)])) as served:
        yield served


@pytest.fixture
def page(driver, address):
    """A function that opens one of PAGES and returns the driver."""

    def open_one(name, width=1200, dark=False):
        path, ready = PAGES[name]
        set_screen(driver, width, dark=dark)
        open_page(driver, f"{address}/{path}", ready=ready)
        return driver

    return open_one


def all_of(driver, selector):
    return driver.find_elements("css selector", selector)


def one(driver, selector):
    (element,) = all_of(driver, selector)
    return element


def questions(driver):
    return [element.text for element in all_of(driver, ".rows tbody th")]


def wait_for_count(driver, text):
    wait_until(driver, lambda: one(driver, "p.grow").text == text)


def choose(driver, name, value):
    one(driver, f"select[name={name}] option[value='{value}']").click()


def test_filters_narrow_the_list(page):
    driver = page("trajectories")
    wait_for_count(driver, "1 to 4 of 4 trajectories")
    one(driver, "input[name=text]").send_keys("oslo")
    wait_for_count(driver, "1 to 2 of 2 trajectories that fit, out of 4")
    choose(driver, "kept", "true")
    wait_for_count(driver, "1 to 1 of 1 trajectories that fit, out of 4")
    assert questions(driver) == ["In which city was the director of Snow born?"]
    # The address holds the filters.
    assert "text=oslo" in driver.current_url
    assert "kept=true" in driver.current_url

    one(driver, ".filters button").click()
    wait_for_count(driver, "1 to 4 of 4 trajectories")


def test_a_list_without_rows_says_so(page):
    driver = page("trajectories")
    one(driver, "input[name=reward_min]").send_keys("5")
    wait_until(driver, lambda: one(driver, ".rows").text == "No trajectory fits these filters.")


def test_the_keyboard_sorts_the_list_and_keeps_the_focus(page):
    driver = page("trajectories")
    driver.execute_script("document.querySelector('[data-sort=reward]').focus()")
    driver.switch_to.active_element.send_keys("\ue007")
    wait_until(driver, lambda: all_of(driver, "th[aria-sort=ascending]"))
    rewards = [element.text for element in all_of(driver, "td[data-label=Reward]")]
    assert rewards == ["0", "0.5", "1", "1"]
    wait_until(
        driver, lambda: driver.switch_to.active_element.get_attribute("data-sort") == "reward"
    )
    driver.switch_to.active_element.send_keys("\ue007")
    wait_until(driver, lambda: all_of(driver, "th[aria-sort=descending]"))


def test_two_chosen_rows_lead_to_their_comparison(page):
    driver = page("trajectories")
    boxes = all_of(driver, ".rows input[type=checkbox]")
    boxes[1].click()
    boxes[2].click()
    one(driver, ".bar a.button").click()
    wait_until(driver, lambda: len(all_of(driver, ".side-by-side .tree")) == 2)
    assert one(driver, "h1").text == "Who directed Snow?"


def test_the_tree_marks_what_was_selected_and_what_is_gold(page):
    driver = page("trajectory")
    first, second = all_of(driver, ".search")
    materials = [element.text for element in first.find_elements("css selector", "li")]
    assert materials == [
        "✓ selected ★ gold Snow: Snow is a film by Ada Crane.",
        "Snow (band): Snow is a band.",
    ]
    assert "Worker: Ada Crane was born in Oslo." in second.text


def test_the_token_view_tells_each_token(page):
    driver = page("trajectory")
    all_of(driver, "[role=tab]")[2].click()
    tokens = wait_until(driver, lambda: all_of(driver, ".turn.model .token"))
    # Token n of a turn has log-probability -n, so the third has p = exp(-2) = 0.135.
    assert "p3" in tokens[2].get_attribute("class").split()
    assert "p0" in tokens[0].get_attribute("class").split()
    assert "trained" in tokens[0].get_attribute("class").split()
    special = all_of(driver, ".turn.model .token.special")
    assert [element.text for element in special] == ["<end>"]
    assert not all_of(driver, ".token.context.trained")

    driver.execute_script("arguments[0].focus()", tokens[0])
    for _ in range(2):
        driver.switch_to.active_element.send_keys("\ue014")
    line = one(driver, ".token-line")
    wait_until(driver, lambda: line.text.startswith("token 3 of 38 · "))
    assert '"e" · log-probability -2.0000 (p 0.135) · trained: carries loss' in line.text


def test_the_arrow_keys_change_the_view(page):
    driver = page("trajectory")
    all_of(driver, "[role=tab]")[0].send_keys("\ue014")
    wait_until(driver, lambda: driver.switch_to.active_element.text == "Transcript")
    assert one(driver, "[role=tab][aria-selected=true]").text == "Transcript"
    assert "Obs: Ada Crane directed Snow." in one(driver, "[role=tabpanel]").text


def test_a_trajectory_lists_the_other_attempts_at_its_question(page, address):
    driver = page("trajectory")
    open_page(
        driver,
        f"{address}/#/trajectory?run=little&set=round-1&shard=0&row=1",
        ready="section[aria-label='Other attempts'] td a",
    )
    one(driver, "section[aria-label='Other attempts'] td a").click()
    wait_until(driver, lambda: len(all_of(driver, ".side-by-side .tree")) == 2)


def test_two_runs_are_compared_on_one_question(driver, run_directory):
    other = shutil.copytree(run_directory, run_directory.with_name("other"))
    with app_served(create_app([str(run_directory), str(other)])) as address:
        set_screen(driver, 1200)
        open_page(
            driver,
            f"{address}/#/trajectory?run=little&set=eval-warm-up&shard=0&row=0",
            ready="section[aria-label='Other attempts'] td a",
        )
        one(driver, "section[aria-label='Other attempts'] td a").click()
        wait_until(driver, lambda: len(all_of(driver, ".side-by-side .tree")) == 2)
        headings = [element.text for element in all_of(driver, ".side-by-side h2 a")]
        assert headings == [
            "little, evaluation after warm-up, attempt 0",
            "other, evaluation after warm-up, attempt 0",
        ]
        open_page(driver, f"{address}/#/report?run=little&run=other", ready=".chart svg")
        assert "other: K" in one(driver, "section[aria-label=Curves]").text
        assert (
            "The runs have the same settings." in one(driver, "section[aria-label=Settings]").text
        )


def test_curves_grow_while_the_run_goes_on(page, run_directory):
    driver = page("report")

    def numbers(title):
        return driver.execute_script(
            "const figure = [...document.querySelectorAll('.chart')]"
            ".find((node) => node.querySelector('h3').textContent.startsWith(arguments[0]));"
            "return [...figure.querySelectorAll('td')].map((cell) => cell.textContent);",
            title,
        )

    assert numbers("Threshold K") == ["0.6"]
    with MetricsLog(run_directory) as log:
        log.write("mygo", 2, {"k": 0.75})
        wait_until(driver, lambda: numbers("Threshold K") == ["0.6", "0.75"])
    Store(run_directory).write_json_once("summary.json", {"phases": []})
    wait_until(driver, lambda: all_of(driver, "#report .tag.good, .page .tag.good"))


def test_the_arrow_keys_read_the_values_of_a_chart(page):
    driver = page("report")
    frame = driver.execute_script(
        "return [...document.querySelectorAll('.chart')]"
        ".find((node) => node.querySelector('h3').textContent.startsWith('Loss'))"
        ".querySelector('[role=group]')"
    )
    frame.send_keys("\ue014\ue014")
    readout = frame.find_element("xpath", "following-sibling::p")
    wait_until(driver, lambda: readout.text == "step 20: warm-up 1.5")


def test_hostile_text_is_only_text(driver, run_directory):
    store = Store(run_directory)
    search = dataclasses.replace(
        FIRST_SEARCH, query=HOSTILE, materials=(HOSTILE,), sentence=HOSTILE, entity=HOSTILE
    )
    conversations = tuple(
        dataclasses.replace(
            conversation,
            role=HOSTILE,
            turns=tuple(dataclasses.replace(turn, text=HOSTILE) for turn in conversation.turns),
        )
        for conversation in solved().conversations
    )
    hostile = dataclasses.replace(
        solved(),
        question_id="q3",
        answer=HOSTILE,
        searches=(search,),
        conversations=conversations,
        rewards_by_part={HOSTILE: 1.0},
        counts={HOSTILE: 1.0},
    )
    write_evaluation(store, "hostile", hostile)
    predictions = run_directory / "eval" / "hostile.predictions.jsonl"
    record = json.loads(predictions.read_text())
    record |= {"question": HOSTILE, "kind": HOSTILE, "answers": [HOSTILE]}
    predictions.write_text(json.dumps(record) + "\n")

    place = "run=little&set=eval-hostile"
    with app_served(create_app([str(run_directory)])) as address:
        set_screen(driver, 1200)
        open_page(driver, f"{address}/#/trajectories?{place}", ready=".rows tbody tr")
        assert questions(driver) == [HOSTILE]
        open_page(driver, f"{address}/#/trajectory?{place}&shard=0&row=0", ready=".tree .search")
        assert one(driver, "h1").text == HOSTILE
        assert HOSTILE in one(driver, ".search li").text
        for tab in all_of(driver, "[role=tab]"):
            tab.click()
            assert not all_of(driver, "main img, main script, main b, main answer, main i")
        assert driver.execute_script("return window.broken") is None


def test_the_report_file_works_without_a_server(driver, run_directory, tmp_path):
    config = json.loads((run_directory / "config.json").read_text())
    config["config"]["name"] = HOSTILE
    (run_directory / "config.json").write_text(json.dumps(config))
    file = tmp_path / "report.html"
    file.write_text(report_file([str(run_directory)]))
    set_screen(driver, 1200)
    open_page(driver, file.as_uri(), ready=".chart svg")
    assert "warm-up" in one(driver, "section[aria-label=Scores] table").text
    all_of(driver, "section[aria-label=Settings] summary")[0].click()
    assert json.dumps(HOSTILE) in one(driver, "pre").text
    assert not all_of(driver, "main img, main script, main b")
    assert driver.execute_script("return window.broken") is None
    assert grave_faults(driver) == []


def test_a_page_that_does_not_exist_is_named(driver, address):
    open_page(driver, f"{address}/#/runz", ready="h1")
    assert one(driver, "h1").text == "No such page"


def test_the_sentence_of_an_error_is_shown(driver, address):
    open_page(
        driver, f"{address}/#/trajectory?run=little&set=round-9&shard=0&row=0", ready=".fault"
    )
    assert one(driver, ".fault").text == (
        "run little has no round or evaluation 'round-9'; did you mean round-1?"
    )


@pytest.mark.parametrize("name", list(PAGES))
def test_a_narrow_screen_needs_no_sideways_scrolling(page, name):
    driver = page(name, width=400)
    assert driver.execute_script("return document.documentElement.scrollWidth") == 400


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", list(PAGES))
def test_a_page_has_no_serious_fault_of_accessibility(page, name, dark):
    driver = page(name, dark=dark)
    assert grave_faults(driver) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_token_view_has_no_serious_fault_of_accessibility(page, dark):
    driver = page("trajectory", dark=dark)
    all_of(driver, "[role=tab]")[2].click()
    wait_until(driver, lambda: all_of(driver, ".turn.model .token"))
    assert grave_faults(driver) == []


def test_the_pages_cause_no_error_in_the_console(page):
    driver = page("runs")
    driver.get_log("browser")
    for name in PAGES:
        page(name)
    assert driver.get_log("browser") == []

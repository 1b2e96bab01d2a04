"""The page that asks, in a real browser."""

import contextlib
import threading

import pytest

from mujica_jax.tasks.task import Material
from mujica_jax.web.app import create_app
from mujica_jax.web.model_routes import model_routers
from tests.helpers.browser import grave_faults, open_browser, open_page, set_screen, wait_until
from tests.helpers.little_agent import FILM, GRAPH, QUESTION, LittleWorld, answer, search
from tests.helpers.served_agent import OTHER, PLANS, READS, UNKNOWN, WHO, PausedPolicy, served_agent
from tests.helpers.served_app import app_served

HOSTILE = "<img src=x onerror=\"window.broken = 'image'\"><script>window.broken = 1</script>"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@contextlib.contextmanager
def page(driver, policy=None, world=None, *, width=1200, dark=False):
    with (
        served_agent(policy, world) as served,
        app_served(create_app([], model_routers=model_routers(served))) as url,
    ):
        set_screen(driver, width, dark=dark)
        open_page(driver, f"{url}/#/ask", ready="#question")
        yield url


def all_of(driver, selector):
    return driver.find_elements("css selector", selector)


def texts(driver, selector):
    return [element.text for element in all_of(driver, selector)]


def ask(driver, question=QUESTION.text):
    (box,) = all_of(driver, "#question")
    box.clear()
    box.send_keys(question)
    (button,) = all_of(driver, "button[type=submit]")
    button.click()


def test_the_tree_grows_while_the_episode_is_played(driver):
    policy = PausedPolicy()
    policy.pause()
    with page(driver, policy):
        ask(driver)
        wait_until(driver, lambda: "The planner thinks" in texts(driver, ".episode")[0])
        assert all_of(driver, ".search") == []

        # The first turn asks two sub-questions, which stand side by side.
        policy.permits.release()
        wait_until(driver, lambda: len(texts(driver, ".reply")) == 2)
        assert texts(driver, ".search h4") == [WHO, OTHER]
        left, right = all_of(driver, ".search")
        assert left.rect["y"] == right.rect["y"]
        assert left.rect["x"] < right.rect["x"]
        assert texts(driver, ".search .selected")[0].endswith("Amber Tide, director, Ilse Vand")
        assert all_of(driver, ".final") == []

        policy.permits.release(2)
        wait_until(driver, lambda: all_of(driver, ".final"))
        assert texts(driver, ".final") == ["Ghent"]
        assert "3 searches" in texts(driver, ".end")[0]

        # A link leads to the transcript and the tokens.
        (link,) = all_of(driver, ".episode a")
        link.click()
        wait_until(driver, lambda: all_of(driver, "[role=tab]"))
        assert texts(driver, "h1") == [QUESTION.text]
        all_of(driver, "[role=tab]")[2].click()
        wait_until(driver, lambda: all_of(driver, ".turn.model .token"))


def test_a_turn_appears_while_it_is_written_and_the_whole_turn_replaces_it(driver):
    policy = PausedPolicy()
    policy.halves = threading.Semaphore(0)
    with page(driver, policy):
        ask(driver)
        wait_until(driver, lambda: texts(driver, ".tree > .draft"))
        assert PLANS[0].startswith(texts(driver, ".tree > .draft")[0])
        assert all_of(driver, ".tree h3") == []

        # The two workers write at the same time, each in the box of its sub-question.
        policy.halves.release()
        wait_until(driver, lambda: len(texts(driver, ".search .draft")) == 2)
        drafts = texts(driver, ".search .draft")
        for draft, query in zip(drafts, (WHO, OTHER), strict=True):
            assert draft
            assert READS[query].startswith(draft)
        assert all_of(driver, ".tree > .draft") == []

        policy.halves.release(10)
        wait_until(driver, lambda: texts(driver, ".final") == ["Ghent"])
        assert all_of(driver, ".draft") == []


def test_a_stopped_episode_ends_and_another_one_can_be_asked(driver):
    policy = PausedPolicy()
    policy.pause()
    with page(driver, policy):
        ask(driver)
        wait_until(driver, lambda: all_of(driver, "button[type=button]:enabled"))
        stop = next(b for b in all_of(driver, "button[type=button]") if b.text == "Stop")
        stop.click()
        wait_until(driver, lambda: texts(driver, "[role=alert]") == ["You stopped the episode."])
        policy.permits.release(100)
        ask(driver)
        wait_until(driver, lambda: texts(driver, ".final") == ["Ghent"])


def test_an_example_fills_in_the_question_and_enter_asks_it(driver):
    with page(driver):
        all_of(driver, "summary")[0].click()
        all_of(driver, ".example")[0].click()
        (box,) = all_of(driver, "#question")
        assert box.get_attribute("value") == QUESTION.text
        box.send_keys("\n")
        wait_until(driver, lambda: texts(driver, ".final") == ["Ghent"])


def test_the_reason_of_a_refusal_is_shown(driver):
    with page(driver):
        ask(driver, "Who?")
        wait_until(driver, lambda: texts(driver, "[role=alert]") == [UNKNOWN])


def test_hostile_text_is_only_text(driver):
    world = LittleWorld({**GRAPH, FILM.id: (Material(text=f"{HOSTILE}, director, Ilse Vand"),)})
    plans = (search((0, WHO)), answer(HOSTILE))
    with page(driver, PausedPolicy(plans), world):
        ask(driver, f"{HOSTILE} Amber Tide?")
        wait_until(driver, lambda: all_of(driver, ".final"))
        assert HOSTILE in texts(driver, ".materials")[0]
        assert texts(driver, ".final") == [HOSTILE]
        assert driver.execute_script("return window.broken") is None
        assert all_of(driver, "main img, main script") == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_narrow_page_scrolls_only_downwards_and_has_no_serious_fault(driver, dark):
    with page(driver, width=400, dark=dark):
        assert grave_faults(driver) == []
        ask(driver)
        wait_until(driver, lambda: texts(driver, ".final") == ["Ghent"])
        assert driver.execute_script("return document.documentElement.scrollWidth") == 400
        assert grave_faults(driver) == []


def test_the_page_asks_for_the_api_key(driver):
    with served_agent() as served:
        app = create_app([], model_routers=model_routers(served), api_key="secret")
        with app_served(app) as url:
            driver.get(f"{url}/#/ask")
            alert = wait_until(driver, lambda: alert_of(driver))
            alert.send_keys("secret")
            alert.accept()
            wait_until(driver, lambda: all_of(driver, "#question"))


def alert_of(driver):
    from selenium.common.exceptions import NoAlertPresentException

    try:
        return driver.switch_to.alert
    except NoAlertPresentException:
        return None

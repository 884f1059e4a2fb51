"""The page of `meridian top --web` in a headless Chromium: what is to be read and seen on it."""

import re
from pathlib import Path

import pytest
from browser import CHROMIUM, browsing
from fake_server import Page

from meridian_patch.operate.scrape import ScrapeError, parse
from meridian_patch.operate.top.source import recorded
from meridian_patch.operate.top.view import view
from meridian_patch.operate.top.web import server as web
from meridian_patch.operate.top.web.history import History

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: scripts/ci_packages chromium"),
]
RECORDING = Path(__file__).parents[1] / "support" / "recordings" / "seats.txt"
IS_SHOWN = "!document.querySelector('main').hidden"
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def browser():
    with browsing() as started:
        yield started


@pytest.fixture
def replayed():
    """Address of the page of a recording."""
    history = History("seats.txt", None)
    for ended_at_s, shown in recorded(RECORDING):
        history.add(ended_at_s, shown)
    with web.serving(history, "127.0.0.1", 0) as (address, _):
        yield address


def window(number, model="m", **exits):
    """A window of 1 second; counters are those that 8 such windows would make."""
    page = Page()
    for reason, count in exits.items():
        page.changes["meridian_thoughts_ended_total", reason] = float(count)
    text = page.text().replace('model_name="m"', f'model_name="{model}"')
    return view(parse(Page().text(), number - 1.0), parse(text, float(number)))


def corners(browser, selector):
    """Of each area in a chart: its name, and how many corners it has."""
    script = f"[...document.querySelectorAll('{selector} .band')].map(e => "
    paths = browser.evaluate(script + "[e.dataset.name, e.getAttribute('d')])")
    assert not [path for _, path in paths if re.search("NaN|undefined|Infinity", path)]
    return {name: path.count(" ") for name, path in paths}


def test_a_recording_is_shown(browser, replayed):
    """Phases, exits, tiers and the verdict, in words and as areas."""
    browser.open(replayed)
    browser.wait_for(IS_SHOWN)
    assert "Bottleneck: seats" in browser.text("#verdict")
    assert "36 wait though the KV cache is 34% full" in browser.text("#verdict")
    assert "Change: raise --max-num-seqs" in browser.text("#verdict")
    phases = browser.text("#chart-phases .legend")
    for words in ("36 waiting", "1 prefill", "2 think", "4 answer"):
        assert words in " ".join(phases.split())
    exits = " ".join(browser.text("#chart-exits .legend").split())
    assert "33 natural: the model ended its thought itself" in exits
    assert "0 hard cap" in exits
    assert "87 think complete" in " ".join(browser.text("#chart-evictions .legend").split())
    assert "first token" in browser.text("#latency")
    assert "2.21 s" in browser.text("#latency")
    # Two windows: three times, there and back.
    bands = corners(browser, "#chart-phases")
    assert bands == dict.fromkeys(("answer", "think", "prefill", "waiting"), 6)
    assert corners(browser, "#chart-exits") == {"natural": 6}
    assert corners(browser, "#chart-evictions") == {"think_complete": 6}
    assert browser.said == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_dark", (False, True))
def test_it_fits_narrow_and_wide_windows(browser, replayed, width, is_dark):
    """No sideways scrolling, no text over the edge of its box; dark where the system is."""
    browser.open(replayed, width=width, is_dark=is_dark)
    browser.wait_for(IS_SHOWN)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    script = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert (sum(browser.evaluate(script)) < 3 * 128) == is_dark
    plots = browser.evaluate("document.querySelectorAll('.plot svg').length")
    assert plots == 7
    script = "[...document.querySelectorAll('.plot svg')].every(e => e.clientWidth > 250)"
    assert browser.evaluate(script)


def test_any_window_can_be_looked_at(browser, replayed):
    """By the slider, by a click into a chart, and back to the newest."""
    browser.open(replayed)
    browser.wait_for(IS_SHOWN)
    move = "const s = document.getElementById('moment'); s.value = 0;"
    browser.evaluate(f"{{ {move} s.dispatchEvent(new Event('input')); }}")
    assert "67 wait" in browser.text("#numbers")
    assert "1 of 2" in browser.text("#moment-words")
    browser.evaluate("document.getElementById('newest').click()")
    assert "36 wait" in browser.text("#numbers")
    box = "document.querySelector('#chart-phases svg').getBoundingClientRect()"
    x, y = browser.evaluate(f"(b => [b.left + b.width / 2, b.top + 20])({box})")
    for kind in ("mousePressed", "mouseReleased"):
        place = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
        browser.command("Input.dispatchMouseEvent", **place)
    browser.wait_for("document.getElementById('numbers').innerText.includes('67 wait')")


def test_what_a_server_sends_is_text(browser):
    """Names of its labels and model are shown, never run; nor are names that every object has."""
    evil = "<img src=x onerror=document.title=1>"
    history = History(evil, 2.0)
    page = Page().text()
    for name in (evil, "constructor", "__proto__"):
        page += f'meridian_thoughts_ended_total{{reason="{name}"}} 5\n'
    page = page.replace('model_name="m"', f'model_name="{evil}"')
    history.add(1.0, view(parse(Page().text(), 0.0), parse(page, 1.0)))
    history.add(2.0, ScrapeError(evil))
    with web.serving(history, "127.0.0.1", 0) as (address, _):
        browser.open(address)
        browser.wait_for(IS_SHOWN)
        assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert browser.text("#where") == f"{evil}, model {evil}"
        assert browser.text("#trouble") == f"{evil}; trying again"
        shown = browser.text("#chart-exits .legend")
        assert shown.count("5") == 3
        assert evil in shown
        assert "native code" not in shown
    browser.said.clear()


def test_a_running_server_that_goes_and_comes_back(browser):
    """The page says what is missing, goes on by itself, and marks gap and restart."""
    history = History("http://host:8000", 0.1)
    with web.serving(history, "127.0.0.1", 0) as (address, _):
        browser.open(address)
        browser.wait_for("document.getElementById('state').innerText.startsWith('waiting')")
        history.add(1.0, ScrapeError("http://host:8000 cannot be reached: refused"))
        browser.wait_for("document.getElementById('state').innerText == 'no numbers'")
        assert "cannot be reached: refused; trying again" in browser.text("#trouble")
        history.add(2.0, window(2, natural=4))
        browser.wait_for(IS_SHOWN)
        assert browser.text("#state") == "live"
        history.add(3.0, window(3, natural=4, hard_cap=2))
        browser.wait_for(
            "document.querySelector('#chart-exits [data-name=hard_cap] b').innerText == '2'"
        )
        history.add(4.0, ScrapeError("gone"))
        browser.wait_for("document.getElementById('state').innerText == 'old numbers'")
        assert browser.evaluate("document.querySelectorAll('#chart-exits .gap').length") == 2
        restarted = view(parse(PAGE_OF_9, 4.0), parse(Page().text(), 5.0))
        assert restarted.is_reset
        history.add(5.0, restarted)
        browser.wait_for("document.getElementById('state').innerText == 'live'")
        assert "started anew" in browser.text("#reset")
        assert browser.evaluate("document.querySelectorAll('#chart-exits .reset').length") == 1
        assert browser.said == []


PAGE_OF_9 = (
    Page()
    .text()
    .replace('prefix_cache_hits_total{engine="0"} 0', 'prefix_cache_hits_total{engine="0"} 9')
)


def test_the_program_itself_may_be_started_anew(browser):
    """The page is told all windows of the new one, and forgets those of the old one."""
    first = History("first", 0.1)
    first.add(1.0, window(1, natural=4))
    with web.serving(first, "127.0.0.1", 0) as (address, _):
        browser.open(address)
        browser.wait_for(IS_SHOWN)
    browser.wait_for("!document.getElementById('trouble').hidden")
    assert "meridian top does not reply" in browser.text("#trouble")
    second = History("second", 0.1)
    second.add(1.0, window(1, natural=7))
    with web.serving(second, "127.0.0.1", int(address.rpartition(":")[2])):
        browser.wait_for("document.getElementById('state').innerText == 'live'")
        assert browser.text("#where") == "second, model m"
        assert "7 natural" in " ".join(browser.text("#chart-exits .legend").split())
    browser.said.clear()


def test_a_stock_server_is_shown_as_far_as_it_tells(browser):
    page = Page()
    page.is_patched = False
    history = History("stock", 0.1)
    history.add(1.0, view(parse(page.text(), 0.0), parse(page.text(), 1.0)))
    with web.serving(history, "127.0.0.1", 0) as (address, _):
        browser.open(address)
        browser.wait_for(IS_SHOWN)
        assert "this server runs stock vLLM" in browser.text("#phaseless")
        assert "2 running" in " ".join(browser.text("#chart-phases .legend").split())
        assert browser.text("#chart-exits") == "This server does not tell it."
        assert browser.said == []

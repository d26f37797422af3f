"""Open the report's page in headless Chromium: charts are drawn and fit their window, and nothing is loaded."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from handmade import led_by_ddp, made_plan, solved_plan
from marks import for_release

pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")
pytest.importorskip("selenium")

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from autosplit.plan.record import with_devices
from autosplit.tools.report_page import write_page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Chromium and chromedriver: Debian has both packed"),
]

FLAGS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)

LOOK = """
const shown = element => element.getClientRects().length > 0;
const marks = "path, use, rect, text, line, polygon";
const box = element => { const b = element.getBBox(); return b.width + b.height; };
const parsed = color => color.match(/[0-9.]+/g).map(Number);
const light = color => {
  const [r, g, b] = parsed(color).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = element => {
  for (let e = element; e; e = e.parentElement) {
    const color = getComputedStyle(e).backgroundColor;
    if (!(parsed(color)[3] === 0)) return color;
  }
  return "rgb(255, 255, 255)";
};
const contrast = (a, b) => {
  const [x, y] = [light(a), light(b)];
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
};
const words = [...document.querySelectorAll("h1, h2, h3, p, li, dt, dd, th, td, figcaption, summary, code, svg text")];
const pictures = [...document.querySelectorAll(".chart svg")].filter(shown);
return {
  width: document.documentElement.scrollWidth,
  inner: innerWidth,
  figures: document.querySelectorAll("figure").length,
  pictures: pictures.map(svg => ({
    marks: [...svg.querySelectorAll(marks)].filter(m => !m.closest("defs") && box(m) > 0).length,
    width: svg.getBoundingClientRect().width,
    font: Math.min(...[...svg.querySelectorAll("text")].map(t =>
      parseFloat(getComputedStyle(t).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)),
    outside: [...svg.querySelectorAll("text")].filter(t => {
      const [a, b] = [t.getBoundingClientRect(), svg.getBoundingClientRect()];
      return a.left < b.left - 2 || a.right > b.right + 2;
    }).map(t => t.textContent),
  })),
  faint: words.filter(shown).filter(w => w.textContent.trim()).map(w => {
    const style = getComputedStyle(w);
    const ink = w.ownerSVGElement ? style.fill : style.color;
    return [w.textContent.slice(0, 40), contrast(ink, behind(w.ownerSVGElement || w))];
  }).filter(([, ratio]) => ratio < 4.5),
  page: getComputedStyle(document.body).backgroundColor,
};
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@contextmanager
def served(folder):
    """Serve a folder, and record the page's requests."""
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


PLANS = {
    "cards": lambda: solved_plan((100, 96, 30, 30), kind="sim"),
    "one": lambda: solved_plan((256,), kind="cuda"),
    "ranks": lambda: solved_plan(region=None, trials=()),
    "bare": lambda: made_plan(complete=False),
    "led": lambda: led_by_ddp(solved_plan((100, 96, 30, 30)), 90, 90, 38, 38),
}
PICTURES = {"cards": 7, "one": 4, "ranks": 4, "bare": 5, "led": 3}
"""Number of charts of each plan."""


def wait_for_charts(browser, number):
    """Wait until this many charts are drawn. The caller asserts the number, to show what it saw."""
    with suppress(TimeoutException):
        WebDriverWait(browser, 60).until(lambda b: len(b.execute_script(LOOK)["pictures"]) == number)


def test_marks_show_their_figures_and_names_are_no_markup(browser, tmp_path):
    hostile = "<img src=x onerror=alert(1)>"
    named = with_devices(solved_plan(), lambda _, device: replace(device, label=hostile))
    write_page(named, tmp_path / "report.html")
    browser.set_window_size(1440, 1000)
    browser.get(f"file://{tmp_path / 'report.html'}")
    wait_for_charts(browser, 6)
    bar = browser.find_element(By.CSS_SELECTOR, "[data-chart=devices] .mark-rect path")
    ActionChains(browser).move_to_element(bar).perform()
    tip = WebDriverWait(browser, 60).until(lambda b: b.find_element(By.CSS_SELECTOR, "#vg-tooltip-element.visible"))
    assert tip.text == f"{hostile}: parameters, 1 GiB"
    assert browser.find_elements(By.TAG_NAME, "img") == []


def test_a_button_copies_the_code(browser, tmp_path):
    write_page(made_plan(), tmp_path / "report.html")
    origin = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", origin)
    browser.get(f"file://{tmp_path / 'report.html'}")
    button = browser.find_element(By.CSS_SELECTOR, "div.copied button")
    code = browser.find_element(By.CSS_SELECTOR, "div.copied code").get_attribute("textContent")
    button.click()
    WebDriverWait(browser, 60).until(lambda b: button.text == "Copied")
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, error => done(String(error)))"
    assert browser.execute_async_script(read) == code
    assert "plan.wrap(model)" in code


@pytest.mark.parametrize("name", PLANS)
def test_the_page_is_drawn_fits_its_window_and_asks_for_nothing(browser, tmp_path, name):
    write_page(PLANS[name](), tmp_path / "report.html")
    pages = {}
    browser.get("about:blank")  # ends requests of the page before
    for log in ("browser", "performance"):
        browser.get_log(log)
    with served(tmp_path) as (address, asked):
        for scheme in ("light", "dark"):
            emulated = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
            for width in (360, 768, 1440):
                metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
                browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                browser.get(f"{address}/report.html")
                wait_for_charts(browser, PICTURES[name])
                seen = browser.execute_script(LOOK)
                where = (name, scheme, width, seen)
                assert seen["inner"] == width, where
                assert seen["width"] <= seen["inner"], where
                assert len(seen["pictures"]) == PICTURES[name], where
                assert all(one["marks"] >= 8 for one in seen["pictures"]), where
                assert all(one["font"] >= 10.5 for one in seen["pictures"]), where
                assert all(not one["outside"] for one in seen["pictures"]), where
                assert seen["faint"] == [], where
                pages[scheme] = seen["page"]
        assert pages["light"] != pages["dark"]
        assert set(asked) == {"/report.html"}
    assert browser.get_log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in sent if one["method"] == "Network.requestWillBeSent"]
    assert {url.removeprefix(address) for url in urls if not url.startswith("data:")} <= {"/report.html"}


@pytest.mark.parametrize("name", ["cards", *map(for_release, [*PLANS][1:])])
def test_on_paper_nothing_is_cut_off(browser, tmp_path, name):
    """Tables ran off the sheet, where users cannot scroll, and the table of trials stayed folded."""
    write_page(PLANS[name](), tmp_path / "report.html")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    metrics = {"width": 718, "height": 1000, "deviceScaleFactor": 1, "mobile": False}  # A4 without its margins
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get(f"file://{tmp_path / 'report.html'}")
        wait_for_charts(browser, PICTURES[name])
        seen = browser.execute_script(LOOK)
        tables = browser.execute_script(
            "return [...document.querySelectorAll('table')].map(t => t.getBoundingClientRect())"
            ".map(b => [b.height, b.right])"
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert seen["width"] <= seen["inner"], seen
    assert seen["faint"] == []
    assert all(one["font"] >= 9 for one in seen["pictures"]), seen
    assert all(height > 0 and right <= 718 for height, right in tables), tables

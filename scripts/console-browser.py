"""Walks through the console in a real browser; see console-browser.sh."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

HELIX = sys.argv[1]
SERVER = str(pathlib.Path(HELIX).with_name("helix-server"))
SCREENS = pathlib.Path(sys.argv[2])



def free_ports():
    """Returns a first port whose neighbours are free too: of clients, peers and admin ports."""
    for base in range(21_000, 30_000, 700):
        wanted = [base + step + node for step in (0, 100, 552) for node in range(3)]
        wanted += [base + 50, base + 51]
        opened = []
        try:
            for port in wanted:
                opened.append(socket.create_server(("127.0.0.1", port)))
            return base
        except OSError:
            continue
        finally:
            for server in opened:
                server.close()
    raise SystemExit("no ports are free")


PORT = free_ports()
ADMIN = PORT + 552
SCRIPT = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
WIDTHS = (360, 1440)
PATIENCE = 30


def helix(*arguments, text="", check=True):
    command = [HELIX, *arguments, "--addr", f"127.0.0.1:{PORT}"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=60)
    if check and done.returncode:
        raise SystemExit(f"{command} failed: {done.stderr}")
    return done.stdout


def wait(what, check, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := check():
                return found
        except Exception:  # noqa: BLE001 - tried again until the deadline
            pass
        time.sleep(0.1)
    raise SystemExit(f"not in time: {what}")


def is_ready(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as response:
        return response.status == 200


def browser(has_scripts=True, dark=False):
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                     "--disable-dev-shm-usage"):
        options.add_argument(argument)
    if dark:
        options.add_argument("--force-dark-mode")
        options.add_argument("--blink-settings=preferredColorScheme=0")
    if not has_scripts:
        content = {"profile.managed_default_content_settings.javascript": 2}
        options.add_experimental_option("prefs", content)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path="/usr/bin/chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(30)
    return driver


def resize(driver, width, height=900):
    # The window of the headless browser has a least width; the emulated screen has none.
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def check_page(driver, name, width):
    """Checks the width, the title and the console's log, and takes a picture."""
    driver.save_screenshot(str(SCREENS / f"{name}-{width}.png"))
    wide = driver.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width, f"{name} at {width} px is {wide} px wide"
    assert "owned" not in driver.title, f"{name}: a record became markup"
    unnamed = driver.execute_script(
        "return [...document.querySelectorAll('input:not([type=hidden]), select')]"
        ".filter(it => !it.labels?.length && !it.ariaLabel).map(it => it.name)")
    assert not unnamed, f"{name}: fields without a label: {unnamed}"


def check_log(driver, name):
    """Fails on errors of scripts and on what the content policy has refused."""
    errors = [entry["message"] for entry in driver.get_log("browser")
              if entry["level"] == "SEVERE"
              and "Failed to load resource" not in entry["message"]]
    assert not errors, f"{name}: {errors}"


def url(path, node=0):
    return f"http://127.0.0.1:{ADMIN + node}/console/{path}"


def fill(cluster):
    """Makes topics, records and groups: one that reads, one that lags, and records with markup."""
    helix("topic", "create", "orders", "--partitions", "4", "--retention-time", "7d")
    helix("topic", "create", "payments", "--partitions", "2", "--cleanup", "compact+delete")
    for number in range(12):
        helix("topic", "create", f"events-{number:02}", "--partitions", "3")
    lines = "".join(f'order-{n}\t{{"id":{n},"total":{n * 7 % 100}.50,"items":[{n},{n + 1}]}}\n'
                    for n in range(400))
    helix("produce", "orders", "--key-separator", "\t", text=lines)
    helix("produce", "events-00", "-p", "0", text=f"plain text\n{SCRIPT}\n")
    helix("produce", "payments", "--key-separator", "\t", text="alice\t10 EUR\nbob\t7 EUR\n")
    for group in ("billing", "reporting"):
        helix("group", "seek", group, "orders", "--to", "earliest")
    reader = subprocess.Popen(
        [HELIX, "consume", "orders", "--group", "billing", "--follow", "--addr",
         f"127.0.0.1:{PORT}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cluster.append(reader)


PAGES = [
    ("cluster", ""),
    ("topics", "topics"),
    ("topic", "topics/orders"),
    ("records", "topics/orders/records?partition=1&from=earliest&count=5"),
    ("markup", "topics/events-00/records?partition=0&from=earliest"),
    ("tail", "topics/orders/tail?partition=0"),
    ("groups", "groups"),
    ("group-lag", "groups/reporting"),
    ("group", "groups/billing"),
    ("slow", "slow"),
    ("search", "topics/orders/records?partition=1&text=1&count=5"),
    ("access", "access"),
    ("missing", "topics/none"),
]


def walk(driver, suffix=""):
    for name, path in PAGES:
        for width in WIDTHS:
            resize(driver, width)
            driver.get(url(path))
            assert driver.find_element(By.TAG_NAME, "h1").text, name
            check_page(driver, name + suffix, width)
        check_log(driver, name)


def tail_under_load(driver):
    """New records appear at the top while a producer writes many."""
    resize(driver, 1440)
    driver.get(url("topics/events-01/tail?partition=0"))
    state = driver.find_element(By.CSS_SELECTOR, "[data-tail-state]")
    wait("the tail is live", lambda: "Live" in state.text)
    lines = "".join(f"load {n}\n" for n in range(20_000))
    writer = threading.Thread(
        target=helix, args=("produce", "events-01", "-p", "0"), kwargs={"text": lines})
    writer.start()
    newest = lambda: driver.find_elements(By.CSS_SELECTOR, ".record.new pre")  # noqa: E731
    wait("records appear", newest)
    writer.join()
    helix("produce", "events-01", "-p", "0", text=f"the last one {SCRIPT}\n")
    wait("the newest record is at the top", lambda: "the last one" in newest()[0].text)
    assert "<script>" in newest()[0].text, "the text is shown as it is"
    count = len(driver.find_elements(By.CSS_SELECTOR, ".record"))
    assert count <= 200, f"{count} records are kept"
    check_page(driver, "tail-load", 1440)
    check_log(driver, "tail")


def keys(driver):
    driver.get(url(""))
    body = driver.find_element(By.TAG_NAME, "body")
    body.send_keys("g", "t")
    wait("g t leads to the topics", lambda: driver.current_url.endswith("/topics"))
    driver.find_element(By.TAG_NAME, "body").send_keys("/")
    focused = driver.switch_to.active_element
    assert focused.get_attribute("name") == "prefix", "/ goes to the search"
    focused.send_keys("events-0", Keys.ENTER)
    wait("the search is made", lambda: "prefix=events-0" in driver.current_url)
    assert len(driver.find_elements(By.CSS_SELECTOR, "tbody tr")) == 10


def change(driver):
    """Creates and deletes a topic through the forms."""
    driver.get(url("topics"))
    driver.find_element(By.TAG_NAME, "summary").click()
    driver.find_element(By.ID, "name").send_keys("made-here")
    driver.find_element(By.CSS_SELECTOR, "details button").click()
    wait("the topic is created", lambda: driver.find_element(By.CLASS_NAME, "notice"))
    assert driver.find_element(By.TAG_NAME, "h1").text == "made-here"
    driver.find_elements(By.TAG_NAME, "summary")[1].click()
    driver.find_element(By.ID, "confirm").send_keys("made-here")
    driver.find_element(By.CSS_SELECTOR, ".danger button").click()
    wait("the topic is deleted", lambda: "done=deleted" in driver.current_url)
    driver.get(url("groups/reporting"))
    driver.find_element(By.TAG_NAME, "summary").click()
    driver.find_element(By.ID, "topic").send_keys("orders")
    driver.find_element(By.ID, "to").send_keys("latest")
    driver.find_element(By.CSS_SELECTOR, "details button").click()
    wait("the seek is shown", lambda: "Nothing is changed yet" in driver.page_source)
    check_page(driver, "seek", 1440)
    driver.find_element(By.CSS_SELECTOR, ".panel button").click()
    wait("the seek is made", lambda: "done=sought" in driver.current_url)


def node_killed(driver):
    """The open page of the cluster shows that a node was killed, without a reload."""
    resize(driver, 1440)
    driver.get(url(""))
    helix_dev("kill", "3")
    seen = lambda: "NOT healthy" in driver.find_element(By.CLASS_NAME, "verdict").text  # noqa: E731
    wait("the page shows the loss", seen)
    check_page(driver, "node-down", 1440)
    helix_dev("restart", "3")
    wait("the page shows the return", lambda: not seen(), 60)


def helix_dev(*arguments):
    command = [HELIX, "dev", *arguments, "--port", str(PORT)]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)


def sign_in(directory):
    """A node that checks callers: a wrong token, the right one, and the end of the session."""
    token_file = pathlib.Path(directory, "token")
    port, admin = PORT + 50, PORT + 51
    node = subprocess.Popen(
        [SERVER, "--listen-addr", f"127.0.0.1:{port}", "--admin-addr", f"127.0.0.1:{admin}",
         "--storage", "memory", "--auth", "required", "--admin-token-file", str(token_file)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=directory)
    driver = None
    try:
        wait("the node is ready", lambda: is_ready(admin))
        token = wait("the first token", lambda: token_file.read_text().strip())
        driver = browser()
        resize(driver, 360)
        driver.get(f"http://127.0.0.1:{admin}/console/topics")
        for text in ("wrong", token):
            field = driver.find_element(By.ID, "token")
            field.send_keys(text)
            check_page(driver, "sign-in", 360)
            field.send_keys(Keys.ENTER)
            if text == "wrong":
                wait("a wrong token is refused", lambda: driver.find_element(By.CLASS_NAME, "alert"))
        wait("the page is shown", lambda: driver.find_element(By.TAG_NAME, "h1").text == "Topics")
        assert not driver.execute_script("return document.cookie"), "no script reads the cookie"
        check_page(driver, "signed-in", 360)
        driver.find_element(By.CSS_SELECTOR, ".who button").click()
        wait("the session ends", lambda: driver.find_element(By.ID, "token"))
    finally:
        if driver:
            driver.quit()
        node.terminate()
        node.wait(20)


def main():
    running = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HELIX_CONFIG_DIR"] = directory
        command = [HELIX, "dev", "--nodes", "3", "--port", str(PORT), "--dir",
                   str(pathlib.Path(directory, "data")), "--set", "shards=2"]
        log = open(pathlib.Path(directory, "log"), "w+", encoding="utf-8")
        dev = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=directory)
        drivers = []
        try:
            for node in range(3):
                wait(f"node {node + 1} is ready", lambda: is_ready(ADMIN + node), 60)
            fill(running)
            driver = browser()
            drivers.append(driver)
            wait("the ring has samples", lambda: driver.get(url("")) or "points=\"2" in
                 driver.page_source)
            walk(driver)
            print("every page at", *WIDTHS)
            keys(driver)
            tail_under_load(driver)
            print("a live tail under load, keys")
            change(driver)
            print("changes through the forms")
            node_killed(driver)
            print("a node killed while the page was open")
            dark = browser(dark=True)
            drivers.append(dark)
            walk(dark, "-dark")
            plain = browser(has_scripts=False)
            drivers.append(plain)
            resize(plain, 1440)
            for name, path in PAGES:
                plain.get(url(path))
                assert plain.find_element(By.TAG_NAME, "h1").text, name
            print("dark, and without scripts")
            sign_in(directory)
            print("sign-in")
        except BaseException:
            log.flush()
            log.seek(0)
            print(log.read()[-3000:], file=sys.stderr)
            raise
        finally:
            for driver in drivers:
                driver.quit()
            for process in [*running, dev]:
                process.terminate()
            for process in [*running, dev]:
                process.wait(30)
    print(f"screenshots: {SCREENS}")


main()

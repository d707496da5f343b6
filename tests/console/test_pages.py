"""The console's pages in a real browser: what a person sees, does, and is protected from.

`SLUICE_TEST_SCREENSHOTS=DIR` keeps the pictures of the pages, which are those of the README.
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin does not declare its exports for type checkers.

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from axe_playwright_python.sync_playwright import Axe
from confluent_kafka import Consumer, Producer, TopicPartition
from playwright.sync_api import Browser, Page, expect

from gateway.console.groups import MAX_OFFSETS
from tests.conftest import gateways
from tests.console.consoles import Consoled, start_consoled
from tests.gateway_process import GatewayFactory, free_ports
from tests.postgres import Databases
from tests.steps.waiting import wait_for
from tests.tokens import Issuer, key_set, oauth_settings, published

ORDERS, BILLING = "orders", "billing"
PAGES = (
    "/",
    "/#/groups",
    f"/#/group?id={BILLING}",
    "/#/topics",
    f"/#/topic?name={ORDERS}",
    "/#/transactions",
    "/#/share",
    "/#/nodes",
    "/#/access",
    "/#/settings",
)
EVIL = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e{{7*7}}'
NARROW, USUAL, WIDE = 360, 1280, 2560
"""Widths of windows, in pixels."""
SCREENSHOTS = os.environ.get("SLUICE_TEST_SCREENSHOTS")

WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


@contextmanager
def opened(
    browser: Browser, console: Consoled, path: str, *, width: int = USUAL, height: int = 860, dark: bool = False
) -> Iterator[Page]:
    """Open a page. Fail if a script fails, if the content security policy blocks something, or if a name was rendered
    as markup.
    """
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", timezone_id="UTC"
    )
    context.add_init_script(WATCH)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.set_default_timeout(30_000)
    try:
        page.goto(console.url + path)
        page.wait_for_selector("main h1")
        yield page
        assert page.evaluate("window.violations") == []
        assert page.evaluate("window.hacked") is None
        assert errors == []
    finally:
        context.close()


@contextmanager
def flowing(console: Consoled, partitions: int) -> Iterator[None]:
    """Write records to all partitions while the block runs."""
    ended = threading.Event()

    def write() -> None:
        producer = Producer({"bootstrap.servers": console.gateway.bootstrap, "linger.ms": 20})
        number = 0
        while not ended.wait(0.01):
            number += 1
            producer.produce(ORDERS, json.dumps({"order": number}), f"customer-{number % 40}", number % partitions)
            producer.poll(0)
        producer.flush(10)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def linger(page: Page, seconds: float) -> None:
    """Wait until the timeline of a picture has filled. Without pictures, do not wait."""
    if SCREENSHOTS:
        page.wait_for_timeout(seconds * 1000)


def picture(page: Page, name: str, *, whole: bool = True) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=whole)


def width_of(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollWidth")


def resize(page: Page, width: int) -> None:
    """Change the width of the window, and wait until the page has drawn its timeline anew."""
    page.set_viewport_size({"width": width, "height": 860})
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def demand_accessible(page: Page) -> None:
    result = Axe().run(page, options={"resultTypes": ["violations"]})
    found: list[dict[str, Any]] = result.response["violations"]
    told = [f"{each['id']}: {each['help']}: {node['html'][:200]}" for each in found for node in each["nodes"][:3]]
    assert not told, "\n".join(told)


@pytest.fixture(scope="module")
def busy(console: Consoled) -> Consoled:
    """The module's console with records, and with a group of three members that commit."""
    console.topic(ORDERS, 6)
    for partition in range(6):
        value = json.dumps({"order": partition, "customer": {"name": "Ana"}, "total": 12.5})
        console.produce(ORDERS, [(f"customer-{n}", value, [("trace", b"7f3a")]) for n in range(20)], partition)
    for name in ("ana", "bo", "cy"):
        console.join(BILLING, f"billing-{name}", ORDERS)
    person = console.person
    wait_for(
        lambda: sum(bool(member["owned"]) for member in person.get("group", id=BILLING)["members"]) == 3,
        "three members own partitions",
    )
    wait_for(lambda: person.get("group", id=BILLING)["state"] == "Stable", "a stable group")
    wait_for(
        lambda: sum(row["lag"] == 0 for row in person.get("group", id=BILLING)["offsets"]) == 6, "everything committed"
    )
    return console


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.long)], ids=["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_page_fits_its_window_is_accessible_and_breaks_no_policy(
    busy: Consoled, browser: Browser, path: str, dark: bool
):
    with opened(browser, busy, path, width=NARROW, dark=dark) as page:
        page.wait_for_load_state("load")
        assert width_of(page) <= NARROW
        if path.startswith("/#/group?"):
            demand_accessible(page)
        resize(page, WIDE)
        assert width_of(page) <= WIDE
        resize(page, USUAL)
        demand_accessible(page)


def test_timeline_shows_one_lane_for_each_partition_in_the_colour_of_its_owner(busy: Consoled, browser: Browser):
    with opened(browser, busy, f"/#/group?id={BILLING}") as page:
        expect(page.locator("svg .tl-base")).to_have_count(6)
        expect(page.locator(".legend")).to_contain_text("billing-ana")
        colours = page.evaluate(
            "new Set([...document.querySelectorAll('.tl-span')].map((span) => getComputedStyle(span).fill)).size"
        )
        assert colours >= 3
        label = page.locator(".timeline svg").get_attribute("aria-label") or ""
        assert "6 partitions, 3 members" in label


def test_timeline_moves_and_zooms_by_keyboard_and_button(busy: Consoled, browser: Browser):
    with opened(browser, busy, f"/#/group?id={BILLING}") as page:
        live = page.get_by_role("button", name="Live")
        expect(live).to_have_attribute("aria-pressed", "true")
        timeline = page.locator(".timeline svg")
        timeline.focus()
        page.keyboard.press("ArrowLeft")
        expect(live).to_have_attribute("aria-pressed", "false")
        page.keyboard.press("End")
        expect(live).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="1 week").click()
        expect(page.get_by_role("button", name="1 week")).to_have_attribute("aria-pressed", "true")
        assert page.locator("svg .tl-tick").count() >= 4
        for _ in range(24):
            page.keyboard.press("+") if timeline.evaluate(
                "each => each === document.activeElement"
            ) else timeline.focus()
        assert page.locator("svg .tl-axis").first.text_content()


def test_live_button_stops_the_timeline_and_follows_again(busy: Consoled, browser: Browser):
    with opened(browser, busy, f"/#/group?id={BILLING}") as page:
        live = page.get_by_role("button", name="Live")
        live.click()
        expect(live).to_have_attribute("aria-pressed", "false")
        live.click()
        expect(live).to_have_attribute("aria-pressed", "true")


def test_durations_carry_into_the_next_unit(busy: Consoled, browser: Browser):
    with opened(browser, busy, "/") as page:
        said = page.evaluate("async () => [59990, 119600, 3599900, 7199000].map((await import('/dom.js')).ago)")
    assert said == ["1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 0 min"]


def test_killed_consumer_is_told_on_the_page_while_it_happens(gateway_factory: GatewayFactory, browser: Browser):
    """The story of the README: one of three consumers is killed, and one page shows what happened, why and for how
    long.
    """
    console = start_consoled(gateway_factory, {"group.connection.grace.ms": "4000"})
    try:
        console.topic(ORDERS, 6)
        console.join(BILLING, "billing-ana", ORDERS)
        console.join(BILLING, "billing-di", ORDERS)
        victim = console.join(BILLING, "billing-bo", ORDERS)
        person = console.person
        wait_for(
            lambda: sum(len(each["owned"]) == 2 for each in person.get("group", id=BILLING)["members"]) == 3,
            "three owners",
        )
        watched = opened(browser, console, f"/#/group?id={BILLING}", width=1440, height=1000)
        with flowing(console, 6), watched as page:
            expect(page.locator(".legend")).to_contain_text("billing-bo")
            page.get_by_role("button", name="1 min").click()
            expect(page.locator(".story")).to_have_count(0)
            linger(page, 20)
            victim.send_signal(signal.SIGKILL)
            story = page.locator(".story").first
            expect(story).to_contain_text("billing-bo was lost", timeout=40_000)
            expect(story).to_contain_text("without a reader", timeout=40_000)
            expect(story).to_contain_text("went to billing-")
            expect(page.locator(".tl-mark.lost")).to_have_count(1)
            expect(page.locator(".tl-silent").first).to_be_visible()
            expect(page.locator(".words")).to_contain_text("billing-bo is lost")
            assert story.locator(".cost").text_content()
            linger(page, 6)
            console.join(BILLING, "billing-cy", ORDERS)
            expect(page.locator(".legend")).to_contain_text("billing-cy", timeout=30_000)
            story.get_by_role("button", name="Show").click()
            expect(page.get_by_role("button", name="Live")).to_have_attribute("aria-pressed", "false")
            page.get_by_role("button", name="Live").click()
            page.get_by_role("button", name="1 min").click()
            demand_accessible(page)
            linger(page, 8)
            picture(page, "group", whole=False)
        with opened(browser, console, f"/#/group?id={BILLING}", width=1440, height=1000, dark=True) as page:
            page.get_by_role("button", name="1 min").click()
            expect(page.locator(".story").first).to_be_visible()
            picture(page, "group-dark", whole=False)
        with opened(browser, console, "/") as page:
            expect(page.locator(".urgent")).to_contain_text("was lost")
            picture(page, "overview")
    finally:
        console.close()


def test_offsets_are_reset_after_a_preview_and_a_confirmation(busy: Consoled, browser: Browser):
    consumer = Consumer({"bootstrap.servers": busy.gateway.bootstrap, "group.id": "stopped"})
    consumer.commit(offsets=[TopicPartition(ORDERS, 0, 15)], asynchronous=False)
    consumer.close()
    with opened(browser, busy, "/#/group?id=stopped") as page:
        page.get_by_role("button", name="Reset offsets").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("reset offsets of orders[0] to the beginning")
        expect(dialog).to_contain_text("read 15 records again")
        demand_accessible(page)
        picture(page, "reset", whole=False)
        dialog.get_by_role("button", name="Do it").click()
        expect(page.get_by_role("status").first).to_contain_text("Done")
        expect(page.locator(".words")).to_contain_text("reset offsets of orders[0]")
    assert busy.person.get("group", id="stopped")["offsets"][0]["committed"] == 0


def test_reset_to_a_place_that_is_not_entered_yet_is_no_plan(busy: Consoled, browser: Browser):
    consumer = Consumer({"bootstrap.servers": busy.gateway.bootstrap, "group.id": "hesitating"})
    consumer.commit(offsets=[TopicPartition(ORDERS, 0, 15)], asynchronous=False)
    consumer.close()
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{busy.url}/#/group?id=hesitating")
    page.get_by_role("button", name="Reset offsets").click()
    dialog = page.get_by_role("dialog")
    for place, said in (
        ("time", "enter the time to reset to"),
        ("offset", "enter the offset to reset to"),
        ("shift", "enter how many records to move by"),
    ):
        dialog.get_by_label("Reset to").select_option(place)
        expect(dialog).to_contain_text(said)
        expect(dialog.get_by_role("button", name="Do it")).to_be_disabled()
    context.close()


def test_plan_that_has_changed_is_shown_anew(busy: Consoled, browser: Browser):
    consumer = Consumer({"bootstrap.servers": busy.gateway.bootstrap, "group.id": "moving"})
    consumer.commit(offsets=[TopicPartition(ORDERS, 0, 15)], asynchronous=False)
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{busy.url}/#/group?id=moving")
    page.get_by_role("button", name="Reset offsets").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("read 15 records again")
    consumer.commit(offsets=[TopicPartition(ORDERS, 0, 7)], asynchronous=False)
    consumer.close()
    dialog.get_by_role("button", name="Do it").click()
    expect(dialog).to_contain_text("The group has changed since you looked")
    expect(dialog).to_contain_text("read 7 records again")
    dialog.get_by_role("button", name="Do it").click()
    expect(page.get_by_role("status").first).to_contain_text("Done")
    context.close()
    assert busy.person.get("group", id="moving")["offsets"][0]["committed"] == 0


def test_closed_dialog_changes_nothing(busy: Consoled, browser: Browser):
    with opened(browser, busy, f"/#/group?id={BILLING}") as page:
        page.get_by_role("button", name="Delete group").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("The group has members")
        expect(dialog.get_by_role("button", name="Do it")).to_be_disabled()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
    assert busy.person.get("group", id=BILLING)["memberCount"] == 3


def test_nodes_page_shows_the_background_work_of_its_node(busy: Consoled, browser: Browser):
    with opened(browser, busy, "/#/nodes") as page:
        row = page.get_by_role("row").filter(has_text="removes records that a newer one with the same key replaces")
        expect(row.get_by_role("cell").last).to_contain_text("s ago")
        expect(page.get_by_role("columnheader", name="Node 1")).to_be_visible()


def test_records_are_searched_opened_produced_and_followed(busy: Consoled, browser: Browser):
    with opened(browser, busy, f"/#/topic?name={ORDERS}") as page:
        records = page.get_by_label("Records", exact=True)
        expect(records).to_contain_text("customer-19")
        picture(page, "topic")
        page.get_by_label("Key", exact=True).first.fill("customer-3")
        page.get_by_label("From").select_option("earliest")
        page.get_by_role("button", name="Search").click()
        expect(records).to_contain_text("6 found")
        records.get_by_role("button", name="3", exact=True).first.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text('"name": "Ana"')
        dialog.get_by_role("button", name="Close").click()
        page.get_by_label("Key", exact=True).first.fill("")
        page.get_by_role("button", name="Follow").click()
        expect(records).to_contain_text("Waiting for new records")
        page.get_by_text("Produce a record").click()
        page.get_by_label("Value", exact=True).fill("from the console")
        page.get_by_role("button", name="Produce", exact=True).click()
        expect(records).to_contain_text("from the console", timeout=30_000)
        page.get_by_role("button", name="Following").click()


def test_names_that_clients_choose_are_text_on_every_page(gateway_factory: GatewayFactory, browser: Browser):
    console = start_consoled(gateway_factory)
    bootstrap = console.gateway.bootstrap
    try:
        console.topic(ORDERS, 1)
        console.produce(ORDERS, [(EVIL, EVIL, [(EVIL, EVIL.encode())]), ("k", json.dumps({EVIL: EVIL}), None)])
        console.join(EVIL, EVIL, ORDERS)
        settings = {"bootstrap.servers": bootstrap, "transactional.id": EVIL, "client.id": EVIL}
        producer = Producer(settings)
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(ORDERS, EVIL.encode())
        producer.flush(30)
        _add_user(bootstrap, EVIL)
        person = console.person
        wait_for(lambda: person.get("group", id=EVIL)["offsets"], "a commit")
        with opened(browser, console, "/") as page:
            for path, text in (
                ("#/groups", EVIL[:30]),
                ("#/topics", ORDERS),
                ("#/transactions", EVIL[:30]),
                ("#/access", EVIL[:30]),
                (f"#/topic?name={ORDERS}", "onerror"),
            ):
                page.goto(f"{console.url}/{path}")
                expect(page.locator("main")).to_contain_text(text)
                assert page.evaluate("window.hacked") is None
            page.get_by_role("button", name="0", exact=True).first.click()
            expect(page.get_by_role("dialog")).to_contain_text("onerror")
            page.keyboard.press("Escape")
            page.goto(f"{console.url}/#/groups")
            page.locator("main a").first.click()
            expect(page.locator("main h1")).to_have_text(EVIL)
            expect(page.locator(".legend")).to_contain_text("onerror")
            page.locator(".timeline svg").hover(position={"x": 400, "y": 100})
            expect(page.locator(".words")).to_contain_text("onerror")
            page.get_by_role("button", name="Remove…").click()
            expect(page.get_by_role("dialog")).to_contain_text("onerror")
            page.keyboard.press("Escape")
            assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    finally:
        console.close()


def _add_user(bootstrap: str, name: str) -> None:
    from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

    admin = AdminClient({"bootstrap.servers": bootstrap})
    change = UserScramCredentialUpsertion(name, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), b"secret")
    admin.alter_user_scram_credentials([change])[name].result(30)


def test_person_logs_in_sees_a_page_and_logs_out(postgres: Databases, browser: Browser):
    authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    with gateways(postgres) as factory:
        console = start_consoled(
            factory, {"authorizer.class.name": authorizer, "super.users": "User:root;User:ANONYMOUS"}
        )
        _add_user(console.gateway.bootstrap, "root")
        with opened(browser, console, "/") as page:
            expect(page.locator("h1")).to_have_text("Log in")
            demand_accessible(page)
            page.get_by_label("User").fill("root")
            page.get_by_label("Password").fill("secret")
            page.get_by_role("button", name="Log in").click()
            expect(page.locator("h1")).to_have_text("Overview")
            expect(page.locator(".who")).to_contain_text("root")
            assert "secret" not in page.content()
            page.get_by_role("button", name="Log out").click()
            expect(page.locator("h1")).to_have_text("Log in")


def test_person_logs_in_by_access_token(gateway_factory: GatewayFactory, browser: Browser, tmp_path: Path):
    issuer = Issuer(tmp_path)
    first, second = free_ports(2)
    with published() as place:
        place.answers["/keys"] = key_set(issuer.jwk())
        settings = {
            "listeners": f"OPEN://127.0.0.1:{first},ASKING://127.0.0.1:{second}",
            "listener.security.protocol.map": "OPEN:PLAINTEXT,ASKING:SASL_PLAINTEXT",
            **oauth_settings(f"{place.url}/keys"),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:alice;User:ANONYMOUS",
        }
        console = start_consoled(gateway_factory, settings)
        with opened(browser, console, "/") as page:
            demand_accessible(page)
            page.get_by_label("Or an access token (OAUTHBEARER)").fill(issuer.token())
            page.get_by_role("button", name="Log in by token").click()
            expect(page.locator("h1")).to_have_text("Overview")
            expect(page.locator(".who")).to_contain_text("alice")
        context = browser.new_context()
        page = context.new_page()
        page.goto(console.url)
        token = page.get_by_label("Or an access token (OAUTHBEARER)")
        token.fill("wrong")
        page.get_by_role("button", name="Log in by token").click()
        expect(page.get_by_text("the access token is refused")).to_be_visible()
        expect(token).to_have_value("")
        context.close()


def test_wrong_password_is_told_on_the_page(postgres: Databases, browser: Browser):
    authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    with gateways(postgres) as factory:
        console = start_consoled(factory, {"authorizer.class.name": authorizer, "super.users": "User:ANONYMOUS"})
        context = browser.new_context()
        page = context.new_page()
        page.goto(console.url)
        page.get_by_label("User").fill("root")
        page.get_by_label("Password").fill("guess")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_have_text("user or password is wrong")
        context.close()


def test_read_only_console_offers_no_change(gateway_factory: GatewayFactory, browser: Browser):
    console = start_consoled(gateway_factory, {"console.read.only": "true"})
    try:
        console.topic(ORDERS, 1)
        console.join(BILLING, "reader", ORDERS)
        with opened(browser, console, f"/#/group?id={BILLING}") as page:
            expect(page.locator(".who")).to_contain_text("read-only")
            expect(page.get_by_role("button", name="Reset offsets")).to_have_count(0)
            expect(page.get_by_role("button", name="Remove…")).to_have_count(0)
        with opened(browser, console, f"/#/topic?name={ORDERS}") as page:
            expect(page.get_by_text("Produce a record")).to_have_count(0)
    finally:
        console.close()


MANY_GROUPS = """
insert into consumer_group (group_id, shard, group_type, state, state_timestamp_ms, generation_id, document)
select 'a' || n, 0, 'classic', 'Empty', 0, 0, '{}' from generate_series(1, 600) n
"""


def test_overview_of_many_groups_does_not_say_that_all_are_well(gateway_factory: GatewayFactory, browser: Browser):
    console = start_consoled(gateway_factory)
    console.topic(ORDERS, 1)
    console.produce(ORDERS, [(None, b"v", None)])
    consumer = Consumer({"bootstrap.servers": console.gateway.bootstrap, "group.id": "last"})
    consumer.commit(offsets=[TopicPartition(ORDERS, 0, 0)], asynchronous=False)
    consumer.close()
    assert console.gateway.database_url is not None
    with psycopg.connect(console.gateway.database_url) as connection:
        connection.execute(MANY_GROUPS)
    with opened(browser, console, "/") as page:
        expect(page.locator("main")).to_contain_text("500 groups")
        expect(page.locator("main")).not_to_contain_text("All groups are well")
        expect(page.locator("main")).to_contain_text("The first 500 groups are well")


def test_overview_goes_on_when_its_node_has_started_again(gateway_factory: GatewayFactory, browser: Browser):
    """A node forgets its sessions when it ends."""
    console = start_consoled(gateway_factory)
    context = browser.new_context()
    page = context.new_page()
    try:
        page.goto(console.url)
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        console.gateway.restart()
        expect(page.get_by_text("not connected; trying again")).to_be_visible(timeout=20_000)
        expect(page.get_by_text("live", exact=True)).to_be_visible(timeout=20_000)
    finally:
        context.close()


@pytest.mark.parametrize("path", ["/#/groups", f"/#/topic?name={ORDERS}"], ids=["groups", "topic"])
def test_page_says_that_its_node_is_away(gateway_factory: GatewayFactory, browser: Browser, path: str):
    console = start_consoled(gateway_factory)
    console.topic(ORDERS, 1)
    page = browser.new_page()
    try:
        page.goto(console.url + path)
        page.wait_for_selector("main h1")
        console.gateway.kill()
        expect(page.locator("#notice")).to_contain_text("The console does not answer", timeout=20_000)
    finally:
        page.close()


def test_follower_of_a_topic_says_that_its_node_is_away(gateway_factory: GatewayFactory, browser: Browser):
    console = start_consoled(gateway_factory)
    console.topic(ORDERS, 1)
    page = browser.new_page()
    try:
        page.goto(f"{console.url}/#/topic?name={ORDERS}")
        page.get_by_role("button", name="Follow").click()
        expect(page.get_by_text("Waiting for new records")).to_be_visible()
        expect(page.get_by_text("are missing")).to_be_hidden()
        console.gateway.restart()
        expect(page.get_by_text("not connected; trying again")).to_be_visible(timeout=20_000)
        expect(page.get_by_text("Waiting for new records")).to_be_visible(timeout=20_000)
        expect(page.get_by_text("are missing")).to_be_visible()
    finally:
        page.close()


MANY_TRANSACTIONS = """
insert into transactional_producer (
    transactional_id, producer_id, producer_epoch, last_producer_epoch, previous_producer_id, timeout_ms, state,
    revision, started_at, last_started_at, updated_at
)
select 'a' || n, 1000 + n, 0, -1, -1, 900000, 'Ongoing', 1, clock_timestamp(), clock_timestamp(), clock_timestamp()
from generate_series(1, 201) n
"""


def test_page_of_many_transactions_says_that_some_are_missing(gateway_factory: GatewayFactory, browser: Browser):
    console = start_consoled(gateway_factory)
    assert console.gateway.database_url is not None
    with psycopg.connect(console.gateway.database_url) as connection:
        connection.execute(MANY_TRANSACTIONS)
    with opened(browser, console, "/#/transactions") as page:
        expect(page.locator("tbody tr")).to_have_count(200)
        expect(page.locator("main")).to_contain_text("Only the 200 oldest transactions are shown.")


def test_pages_of_a_group_and_a_topic_of_many_partitions_say_that_some_are_missing(
    gateway_factory: GatewayFactory, browser: Browser
):
    """The list of groups counts the lag of all partitions."""
    console = start_consoled(gateway_factory)
    console.topic("vast", MAX_OFFSETS + 1)
    for partition in (0, MAX_OFFSETS):
        console.produce("vast", [(None, b"v", None)], partition)
    consumer = Consumer({"bootstrap.servers": console.gateway.bootstrap, "group.id": "vast"})
    consumer.commit(offsets=[TopicPartition("vast", index, 0) for index in range(MAX_OFFSETS + 1)], asynchronous=False)
    consumer.close()
    assert [row["lag"] for row in console.person.get("groups")["groups"]] == [2]
    with opened(browser, console, "/#/group?id=vast") as page:
        expect(page.locator(".facts")).to_contain_text("lag at least 1")
        expect(page.locator("main")).to_contain_text("Only the first 2,000 partitions are shown.")
        page.get_by_role("button", name="Delete group…").click()
        expect(page.get_by_role("dialog")).to_contain_text(
            "All its committed offsets are deleted. This cannot be undone."
        )
    with opened(browser, console, "/#/topic?name=vast") as page:
        expect(page.locator("main")).to_contain_text("Only the first 2,000 partitions are shown and counted.")


def test_page_of_access_shows_fractions_of_quotas(gateway_factory: GatewayFactory, browser: Browser):
    console = start_consoled(gateway_factory)
    set_quota = ["quotas", "set", "--bootstrap", console.gateway.bootstrap, "--client", "slow"]
    subprocess.run([sys.executable, "-m", "gateway.cli", *set_quota, "request_percentage=12.5"], check=True)
    with opened(browser, console, "/#/access") as page:
        expect(page.locator("main")).to_contain_text("request_percentage = 12.5")


@pytest.mark.alone
def test_first_paint_comes_soon(busy: Consoled, browser: Browser):
    with opened(browser, busy, "/") as page:
        page.reload()
        page.wait_for_selector("main h1")
        painted_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        print(f"first contentful paint after {painted_ms:.0f} ms")
        assert painted_ms < 1_000  # 200 ms is the aim; a busy machine takes longer

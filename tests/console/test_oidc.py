"""Login by an OpenID Connect provider, in a real browser and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from playwright.sync_api import Browser, expect

from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.definition import ConfigError
from gateway.console.oidc import Oidc
from gateway.console.sessions import MAX_ATTEMPTS
from tests.conftest import gateways
from tests.console.consoles import Answer, Consoled, Person, start_consoled
from tests.console.providers import Provider, provider
from tests.postgres import Databases
from tests.secured import AUTHORIZER
from tests.steps.waiting import wait_for


class Site:
    def __init__(self, console: Consoled, provider: Provider) -> None:
        self.console = console
        self.provider = provider


@pytest.fixture(scope="module")
def started(postgres: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with provider(tmp_path_factory.mktemp("provider")) as place, gateways(postgres) as factory:
        settings = {**AUTHORIZER, "super.users": "User:alice;User:ANONYMOUS", **place.settings()}
        yield Site(start_consoled(factory, settings), place)


@pytest.fixture
def site(started: Site) -> Iterator[Site]:
    yield started
    place = started.provider
    place.user, place.status = "alice", 200
    place.claims.clear()
    place.answer.clear()
    place.metadata.clear()
    # After a correct login the console forgets the failed logins, which it counts.
    assert _finish(started, *_begun(started)).headers["Location"] == "/#/?login=done"


def _begun(site: Site) -> tuple[Person, dict[str, str]]:
    """Begin a login. Return the person, who holds the login's cookie, and the query that the console sent to the
    provider.
    """
    person = Person(site.console.port)
    answer = person.ask("GET", "/api/oidc/login")
    assert answer.status == 303, answer.body
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert "Max-Age=600" in cookie
    target = urlsplit(answer.headers["Location"])
    assert f"{target.scheme}://{target.netloc}" == site.provider.issuer
    return person, {name: values[0] for name, values in parse_qs(target.query).items()}


def _finish(site: Site, person: Person, asked: dict[str, str], **other: str) -> Answer:
    """Follow the provider's redirect to the console. `other` replaces some of its parameters."""
    target = urlsplit(site.provider.redirect(asked))
    query = {name: values[0] for name, values in parse_qs(target.query).items()} | other
    return person.ask("GET", f"{target.path}?{urlencode(query)}")


def _refused(site: Site, answer: Answer, code: str) -> None:
    assert (answer.status, answer.headers["Location"]) == (303, f"/#/?login={code}")
    assert "sluice_console-" not in str(answer.headers.get("Set-Cookie"))


def test_person_logs_in_at_the_provider_and_returns_to_the_same_page(site: Site, browser: Browser):
    context = browser.new_context()
    page = context.new_page()
    try:
        page.goto(f"{site.console.url}/#/nodes")
        page.get_by_role("link", name="Log in at localhost").click()
        page.get_by_role("link", name="I am alice").click()
        expect(page.locator("#who")).to_contain_text("alice")
        expect(page.get_by_role("heading", level=1)).to_have_text("Nodes")
        assert page.url == f"{site.console.url}/#/nodes"
        (cookie,) = context.cookies()
        assert str(cookie.get("name")).startswith("sluice_console-")
        assert cookie.get("sameSite") == "Strict"
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("link", name="Log in at localhost")).to_be_visible()
    finally:
        context.close()


def test_subject_of_the_token_has_only_its_own_permissions(site: Site):
    site.provider.user = "mallory"
    person, asked = _begun(site)
    assert _finish(site, person, asked).headers["Location"] == "/#/?login=done"
    assert person.get("session")["user"] == "User:mallory"
    assert person.ask("GET", "/api/nodes").status == 403


def test_session_that_the_provider_opened_changes_nothing_without_the_pages_token(site: Site):
    person, asked = _begun(site)
    _finish(site, person, asked)
    assert person.post("action/plan", {"action": "delete", "group": "g"}).status == 403


def test_answers_to_no_login_of_the_browser_keep_nobody_from_logging_in(site: Site):
    """A page of another site can lead a browser to the callback as often as it likes."""
    for _ in range(MAX_ATTEMPTS + 1):
        answer = Person(site.console.port).ask("GET", "/api/oidc/callback?state=x&code=y")
        assert answer.headers["Location"] == "/#/?login=state"
    assert _finish(site, *_begun(site)).headers["Location"] == "/#/?login=done"


@pytest.mark.parametrize("given", ["", "wrong"])
def test_wrong_state_is_refused_and_no_code_is_exchanged(site: Site, given: str):
    person, asked = _begun(site)
    exchanges = site.provider.exchanges
    _refused(site, _finish(site, person, asked, state=given), "state")
    assert site.provider.exchanges == exchanges


def test_answer_in_another_browser_is_refused(site: Site):
    _, asked = _begun(site)
    for other in (Person(site.console.port), _begun(site)[0]):
        _refused(site, _finish(site, other, asked), "state")


def test_cookie_with_a_later_time_is_refused(site: Site):
    person, asked = _begun(site)
    name, _, begun_s = person.cookie.rpartition(".")
    person.cookie = f"{name}.{int(begun_s) + 1}"
    _refused(site, _finish(site, person, asked), "state")


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"exp": 60, "iat": 0},
        {"aud": "another client"},
        {"aud": None},
        {"iss": "http://localhost:1"},
        {"azp": "another client"},
        {"sub": None},
    ],
    ids=str,
)
def test_wrong_id_token_is_refused(site: Site, claims: dict[str, Any]):
    site.provider.claims = claims
    person, asked = _begun(site)
    _refused(site, _finish(site, person, asked), "token")
    assert person.get("session")["user"] is None


def test_answer_that_names_another_issuer_is_refused(site: Site):
    person, asked = _begun(site)
    _refused(site, _finish(site, person, asked, iss="https://attacker.example"), "provider")


def test_code_counts_once(site: Site):
    person, asked = _begun(site)
    cookie = person.cookie
    answer = _finish(site, person, asked, code=(code := "stolen"))
    _refused(site, answer, "provider")
    assert code not in site.console.gateway.log_text()
    person.cookie = cookie
    assert _finish(site, person, asked).headers["Location"] == "/#/?login=done"


def test_person_who_declines_is_told_so_on_the_page(site: Site, browser: Browser):
    site.provider.answer = {"error": "access_denied"}
    context = browser.new_context()
    page = context.new_page()
    try:
        page.goto(site.console.url)
        page.get_by_role("link", name="Log in at localhost").click()
        page.get_by_role("link", name="I am alice").click()
        expect(page.get_by_role("alert").first).to_have_text("The provider refused the login.")
    finally:
        context.close()


@pytest.mark.parametrize(
    "path", ["/api/oidc/login?next=https://attacker.example", "/api/oidc/login?redirect_uri=https://attacker.example"]
)
def test_login_leads_to_no_page_of_another_site(site: Site, path: str):
    person = Person(site.console.port)
    answer = person.ask("GET", path)
    assert "attacker" not in answer.headers["Location"]
    asked = {name: values[0] for name, values in parse_qs(urlsplit(answer.headers["Location"]).query).items()}
    assert asked["redirect_uri"] == f"{site.console.url}/api/oidc/callback"
    done = _finish(site, person, asked, next="https://attacker.example")
    assert done.headers["Location"] == "/#/?login=done"


def test_page_does_not_follow_a_place_outside_the_console(site: Site, browser: Browser):
    context = browser.new_context()
    page = context.new_page()
    try:
        page.goto(site.console.url)
        page.get_by_role("link", name="Log in at localhost").click()
        page.get_by_role("link", name="I am alice").wait_for()
        page.goto(f"{site.console.url}/icon.svg")
        page.evaluate("sessionStorage.setItem('sluice-place', 'https://attacker.example')")
        page.go_back()
        page.get_by_role("link", name="I am alice").click()
        expect(page.locator("#who")).to_contain_text("alice")
        assert page.url == f"{site.console.url}/#/"
    finally:
        context.close()


def test_provider_that_is_away_is_told_and_asked_again_later(postgres: Databases, tmp_path: Path):
    with provider(tmp_path) as place, gateways(postgres) as factory:
        place.status = 503
        site = Site(start_consoled(factory, {**AUTHORIZER, "super.users": "User:ANONYMOUS", **place.settings()}), place)
        person = Person(site.console.port)
        _refused(site, person.ask("GET", "/api/oidc/login"), "away")
        assert "the provider answered 503" in site.console.gateway.log_text()
        place.status = 200
        wait_for(
            lambda: "localhost" in person.ask("GET", "/api/oidc/login").headers["Location"], "the provider is back"
        )
        person, asked = _begun(site)
        place.status = 503
        _refused(site, _finish(site, person, asked), "away")


def test_provider_with_another_name_or_an_endless_answer_is_refused(postgres: Databases, tmp_path: Path):
    for metadata, told in (
        ({"issuer": "https://attacker.example"}, "the provider calls itself"),
        ({"token_endpoint": "http://attacker.example/token"}, "lacks an https URL"),
        ({"padding": "x" * 300_000}, "it is longer than"),
    ):
        with provider(tmp_path) as place, gateways(postgres) as factory:
            place.metadata = metadata
            console = start_consoled(factory, {**AUTHORIZER, "super.users": "User:ANONYMOUS", **place.settings()})
            answer = Person(console.port).ask("GET", "/api/oidc/login")
            assert answer.headers["Location"] in ("/#/?login=provider", "/#/?login=away")
            assert told in console.gateway.log_text()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"console.oidc.client.id": ""}, "console.oidc.client.id"),
        ({"console.oidc.issuer": "http://provider.example"}, "must be an https URL"),
        ({"loopback": "no"}, "console.oidc.redirect.uri"),
    ],
    ids=["no client id", "no TLS", "no address of its own"],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, str], told: str):
    given = {"console.oidc.issuer": "https://provider.example", "console.oidc.client.id": "sluice", **settings}
    is_loopback = given.pop("loopback", "yes") == "yes"
    with pytest.raises(ConfigError, match=told):
        Oidc(parse_broker_configs(given), None, is_loopback=is_loopback)

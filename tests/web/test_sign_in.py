"""A browser with a link or the token, and a program with the token, may read the pages."""

import html

import pytest
from starlette.testclient import TestClient

from lachesis.web import sign_in
from lachesis.web.app import create_app
from lachesis.web.sign_in import make_sign_in_link
from tests.web.recorded import ADDRESS, BEST, PAGES, SLOW

TOKEN = "the token of this home"


@pytest.fixture
def stranger(store):
    """A client of a server that asks for the token."""
    app = create_app(store=store, token=TOKEN)
    with TestClient(app, base_url=ADDRESS, follow_redirects=False) as client:
        yield client


@pytest.mark.parametrize("path", [*PAGES, "/", "/runs.csv", "/curves.json?runs=a&metrics=b", "/x"])
def test_a_stranger_sees_nothing(stranger, path):
    answer = stranger.get(path)
    assert answer.status_code == 401
    assert "Sign in to Lachesis." in answer.text
    for secret in (BEST, SLOW, "sums", TOKEN):
        assert secret not in html.unescape(answer.text).replace(path, "")


def test_a_link_signs_a_browser_in(stranger):
    link = make_sign_in_link(ADDRESS, TOKEN, f"/runs/{BEST}")
    assert TOKEN not in link
    answer = stranger.get(link)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{BEST}")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert TOKEN not in cookie
    assert stranger.get(f"/runs/{BEST}").status_code == 200


def test_a_link_is_valid_for_ten_minutes(stranger, monkeypatch):
    link = make_sign_in_link(ADDRESS, TOKEN)
    now = sign_in.time.time()
    monkeypatch.setattr(sign_in.time, "time", lambda: now + sign_in.LINK_LIFETIME_S + 2)
    answer = stranger.get(link)
    assert answer.status_code == 401
    assert "has expired" in answer.text


@pytest.mark.parametrize(
    "make_code",
    [
        lambda: "",
        lambda: "1.2",
        lambda: "9999999999.00",
        lambda: "²²²²²²²²²².ff",
        lambda: sign_in.sign("other", "link", 600),
        lambda: sign_in.sign(TOKEN, "cookie", 600),
    ],
    ids=["empty", "old", "unsigned", "no digits", "of another token", "a cookie"],
)
def test_another_code_signs_nobody_in(stranger, make_code):
    code = make_code()
    assert stranger.get("/sign-in", params={"code": code}).status_code == 401
    is_ascii_cookie = code.isascii() and not sign_in.is_valid(code, TOKEN, "cookie")
    if is_ascii_cookie:
        headers = {"Cookie": f"lachesis-8070={code}"}
        assert stranger.get("/runs", headers=headers).status_code == 401


def test_the_token_signs_in(stranger):
    form = {"token": f" {TOKEN}\n", "next": f"/compare?runs={BEST},{SLOW}"}
    answer = stranger.post("/sign-in", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, form["next"])
    assert stranger.get("/runs").status_code == 200
    assert stranger.post("/sign-in", data={"token": "wrong"}).status_code == 401
    assert stranger.post("/sign-in", data={"token": "x" * 20_000}).status_code == 401


@pytest.mark.parametrize("target", ["https://example.org", "//example.org", "/\\example.org", ""])
def test_signing_in_leads_to_no_other_server(stranger, target):
    answer = stranger.post("/sign-in", data={"token": TOKEN, "next": target})
    assert answer.headers["location"] == "/runs"


def test_a_program_sends_the_token(stranger):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert stranger.get("/runs.csv", headers=headers).status_code == 200
    assert stranger.get("/runs.csv", headers={"Authorization": "Bearer x"}).status_code == 401


def test_pages_of_other_sites_are_refused(client):
    assert client.get("/runs", headers={"Host": "example.org"}).status_code == 403
    assert client.get("/runs", headers={"Origin": "http://example.org"}).status_code == 403
    other = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert client.get("/runs", headers=other).status_code == 403
    link = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/runs", headers=link).status_code == 200

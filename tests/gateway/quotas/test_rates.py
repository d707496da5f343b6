"""Rates over windows, and the resulting waits."""

from __future__ import annotations

import random

import pytest

from gateway.quotas.rates import Rate, TokenBucket


def test_usage_counts_for_all_windows() -> None:
    rate = Rate(windows=11, window_s=1.0)
    rate.record(100, 50.0)
    assert rate.value(50.0) == 10
    assert rate.value(55.0) == 10
    assert rate.value(60.5) == pytest.approx(100 / 10.5)
    assert rate.value(61.0) == 0
    assert rate.is_idle(61.0)


def test_rate_returns_to_the_bound_after_the_wait() -> None:
    rate = Rate()
    rate.record(300, 0.0)
    assert rate.wait_s(30, 0.0) == 0
    wait_s = rate.wait_s(20, 0.0)
    assert wait_s == pytest.approx(5)
    assert rate.wait_s(0, 0.0) == 11


def test_refunded_usage_does_not_count() -> None:
    rate = Rate()
    rate.take_back(5)
    rate.record(100, 0.0)
    rate.record(50, 0.5)
    rate.take_back(50)
    assert rate.value(0.5) == 10


@pytest.mark.parametrize("seed", range(20))
def test_client_that_waits_as_asked_reaches_its_rate(seed: int) -> None:
    chance, rate, bound = random.Random(seed), Rate(), 1_000.0
    now_s = total = 0.0
    while now_s < 500:
        amount = chance.choice((10, 500, 4_000))
        rate.record(amount, now_s)
        total += amount
        now_s += rate.wait_s(bound, now_s) + chance.random() * 0.01
    assert total / now_s == pytest.approx(bound, rel=0.25)


def test_bucket_begins_full_and_allows_one_debt() -> None:
    bucket = TokenBucket()
    bucket.take(100, 10.0, 50.0)
    assert bucket.wait_s(10.0, 50.0) == 0
    bucket.take(30, 10.0, 50.0)
    assert bucket.wait_s(10.0, 50.0) == pytest.approx(2)
    assert bucket.wait_s(10.0, 51.5) == pytest.approx(0.5)
    assert not bucket.is_idle(51.5)
    assert bucket.wait_s(10.0, 52.0) == 0
    assert not bucket.is_idle(60.0)
    assert bucket.is_idle(63.0)


def test_bucket_in_debt_is_not_forgotten() -> None:
    bucket = TokenBucket()
    bucket.take(310, 10.0, 0.0)
    assert not bucket.is_idle(15.0)
    assert bucket.wait_s(10.0, 15.0) == pytest.approx(5)


def test_bucket_holds_at_most_the_tokens_of_all_windows() -> None:
    bucket = TokenBucket()
    bucket.take(0, 10.0, 0.0)
    bucket.take(115, 10.0, 1_000.0)
    assert bucket.wait_s(10.0, 1_000.0) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(20))
def test_client_that_retries_as_asked_uses_every_token(seed: int) -> None:
    chance, bucket, bound = random.Random(seed), TokenBucket(), 5.0
    now_s = taken = 0.0
    while now_s < 2_000:
        amount = chance.randint(1, 40)
        bucket.take(amount, bound, now_s)
        taken += amount
        now_s += bucket.wait_s(bound, now_s) + chance.random() * 0.01
    assert taken / now_s == pytest.approx(bound, rel=0.1)

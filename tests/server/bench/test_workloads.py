"""What is sent, for a seed."""

from __future__ import annotations

import pytest

from chairlift.server.bench import workloads
from chairlift.server.bench.options import BenchError, BenchOptions, Workload

URL = "http://127.0.0.1:8000"


def test_the_same_seed_sends_the_same() -> None:
    one, two = BenchOptions(URL, seed=5), BenchOptions(URL, seed=5)
    assert workloads.solo(one) == workloads.solo(two)
    assert workloads.batch(one) == workloads.batch(two)
    assert workloads.mixed(one) == workloads.mixed(two)
    assert workloads.conversations(one) == workloads.conversations(two)
    other = BenchOptions(URL, seed=6)
    assert workloads.mixed(one) != workloads.mixed(other)


def test_a_workload_does_not_depend_on_the_others() -> None:
    alone = BenchOptions(URL, workload=Workload.MIXED)
    together = BenchOptions(URL, workload=Workload.ALL)
    assert workloads.mixed(alone) == workloads.mixed(together)


def test_no_prompt_is_sent_twice() -> None:
    options = BenchOptions(URL)
    prompts = [
        planned.prompt
        for planned in [
            workloads.warm_up(options),
            *workloads.solo(options),
            *workloads.batch(options),
            *workloads.mixed(options),
            *(turn for conversation in workloads.conversations(options) for turn in conversation.turns),
        ]
    ]
    assert len(prompts) == 1 + 4 + 12 + 16 + 18
    assert len(set(prompts)) == len(prompts)


def test_batch_is_equal_work() -> None:
    planned = workloads.batch(BenchOptions(URL, clients=3, max_tokens=9))
    assert len(planned) == 6
    assert {len(each.prompt.split()) for each in planned} == {63}  # 50 words in a sentence of 13 more
    assert {each.max_tokens for each in planned} == {9}


def test_mixed_arrivals_and_sizes() -> None:
    options = BenchOptions(URL, requests=400, rate=2.0, max_tokens=10)
    planned = workloads.mixed(options)
    arrivals = [each.at for each in planned]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    # 399 exponential gaps of mean 0.5 s: the sum is 199.5 s with a standard deviation of 10 s.
    assert 160 < arrivals[-1] < 240
    assert {each.max_tokens for each in planned} == {5, 10, 20}
    long = [len(each.prompt.split()) for each in planned if each.kind == "long"]
    short = [len(each.prompt.split()) for each in planned if each.kind == "short"]
    assert len(long) == 100
    assert min(long) > 500 > 100 > max(short)
    assert [each.kind for each in planned[:5]] == ["short", "short", "short", "long", "short"]


def test_conversations_share_a_system_prompt() -> None:
    chats = workloads.conversations(BenchOptions(URL, clients=3, requests=8))
    assert len(chats) == 3
    assert len({chat.system for chat in chats}) == 1
    assert [len(chat.turns) for chat in chats] == [2, 2, 2]  # 8 // 3
    assert [turn.kind for turn in chats[0].turns] == ["turn 1", "turn 2"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000/",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000/v1/",
    ],
)
def test_url_with_or_without_v1(url: str) -> None:
    assert BenchOptions(url).url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://h:99999", "http://[::"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(BenchError, match="is no http URL"):
        BenchOptions(url)


@pytest.mark.parametrize(
    ("name", "value"), [("clients", 0), ("max_tokens", 0), ("requests", 0), ("rate", 0.0), ("timeout", -1.0)]
)
def test_settings_out_of_range(name: str, value: float) -> None:
    with pytest.raises(BenchError, match=f"^{name} must be"):
        BenchOptions(URL, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:1", True),
        ("http://[::1]:1", True),
        ("http://localhost", True),
        ("http://10.0.0.9", False),
    ],
)
def test_loopback(url: str, loopback: bool) -> None:
    assert BenchOptions(url).loopback is loopback

"""Which link is slow? Layer: pure functions on written-down speeds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.preflight.link_analysis import (
    GroupSpeed,
    Link,
    check_groups,
    check_links,
    check_skew,
    culprits,
    tournament,
)
from megatron_rl.preflight.report import Status


@settings(deadline=None)
@given(st.integers(1, 40))
def test_everybody_meets_everybody_once_in_disjoint_pairs(n):
    rounds = tournament(n)
    for pairs in rounds:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(
        itertools.combinations(range(n), 2)
    )
    assert len(rounds) <= n


def links_between(hosts: int, speed) -> list[Link]:
    """One rank per host; `speed(a, b)` in Gbit/s."""
    return [
        Link(ranks=(a, b), hosts=(f"n{a}", f"n{b}"), gbps=speed(a, b))
        for a, b in itertools.combinations(range(hosts), 2)
    ]


def test_slow_host_is_named_with_the_way_to_run_without_it():
    links = links_between(4, lambda a, b: 20.0 if 2 in (a, b) else 380.0)
    (finding,) = check_links(links, {f"n{i}": 400.0 for i in range(4)}, None)
    assert finding.status is Status.FAIL
    assert "every link of host n2 is slow" in finding.message
    assert "20.00 Gbit/s (nominal 400 Gbit/s)" in finding.message
    assert "sbatch --exclude=n2" in finding.fix


def test_slow_pair_is_named_when_no_host_explains_it():
    links = links_between(4, lambda a, b: 30.0 if (a, b) == (1, 3) else 390.0)
    (finding,) = check_links(links, {f"n{i}": 400.0 for i in range(4)}, None)
    assert finding.status is Status.FAIL
    assert finding.message.startswith("rank 1 on n1 – rank 3 on n3: 30.00 Gbit/s")


def test_several_ranks_share_the_nominal_speed_of_their_hosts():
    """Four rank pairs at 95 Gbit/s each fill a 400 Gbit/s port; alone one would be slow."""
    links = [Link(ranks=(i, 4 + i), hosts=("n0", "n1"), gbps=95.0) for i in range(4)]
    nominal = {"n0": 400.0, "n1": 400.0}
    assert [f.status for f in check_links(links, nominal, None)] == [Status.OK]
    assert [f.status for f in check_links(links[:1], nominal, None)] == [Status.FAIL]


@pytest.mark.parametrize(
    ("limit", "status"), [(5.0, Status.OK), (12.0, Status.FAIL), (None, Status.UNKNOWN)]
)
def test_without_a_nominal_speed_the_setting_decides(limit, status):
    links = [Link(ranks=(0, 1), hosts=("n0", "n1"), gbps=10.0)]
    (finding,) = check_links(links, {"n0": 400.0, "n1": None}, limit)
    assert finding.status is status
    if status is Status.FAIL:
        assert "monitor.min_link_gbps is 12" in finding.message


def test_without_any_limit_a_link_far_below_the_others_is_a_warning():
    links = links_between(4, lambda a, b: 1.0 if 3 in (a, b) else 10.0)
    (finding,) = check_links(links, {}, None)
    # Half of the links are slow, so the median (5.5) lies between; 1.0 is under a third of it.
    assert finding.status is Status.WARN
    assert "every link of host n3 is slow" in finding.message


def test_slow_rank_inside_a_host_is_named():
    links = [
        Link(ranks=(a, b), hosts=("n0", "n0"), gbps=50.0 if 1 in (a, b) else 900.0)
        for a, b in itertools.combinations(range(4), 2)
    ]
    (finding,) = check_links(links, {"n0": 400.0}, 100.0)
    assert "every link of rank 1 on n0 is slow" in finding.message


def test_everything_slow_blames_nobody():
    links = links_between(3, lambda a, b: 1.0)
    findings = check_links(links, {}, 50.0)
    assert len(findings) == 3 and all(" – " in f.message for f in findings)


def test_a_single_rank_has_nothing_to_measure():
    assert [f.status for f in check_links([], {}, None)] == [Status.UNKNOWN]


@settings(deadline=None)
@given(st.integers(3, 9), st.data())
def test_one_bad_end_is_always_found(n, data):
    bad = data.draw(st.integers(0, n - 1))
    pairs = list(itertools.combinations(range(n), 2))
    slow = [pair for pair in pairs if bad in pair]
    assert culprits(pairs, slow) == [bad]


@settings(deadline=None)
@given(st.integers(4, 9), st.data())
def test_one_bad_pair_blames_nobody(n, data):
    pairs = list(itertools.combinations(range(n), 2))
    assert culprits(pairs, [data.draw(st.sampled_from(pairs))]) == []


def test_groups_name_the_slowest():
    hosts = ["n0", "n0", "n1", "n1", "n2", "n2"]
    groups = [
        GroupSpeed(axis="tp", ranks=(0, 1), gbps=100.0),
        GroupSpeed(axis="tp", ranks=(2, 3), gbps=20.0),
        GroupSpeed(axis="tp", ranks=(4, 5), gbps=110.0),
        GroupSpeed(axis="world", ranks=tuple(range(6)), gbps=9.0),
    ]
    tp, world = check_groups(groups, hosts, None)
    assert tp.status is Status.WARN and "(ranks 2, 3 on n1)" in tp.message
    assert world.status is Status.OK and "n0, n1, n2" in world.message
    assert [f.status for f in check_groups(groups, hosts, 10.0)] == [Status.WARN, Status.FAIL]


def test_clock_skew():
    assert check_skew({"n0": 0.0}) == []
    assert check_skew({"n0": 0.0, "n1": 0.004})[0].status is Status.OK
    late = check_skew({"n0": 0.0, "n1": 0.01, "n2": -3.5})[0]
    assert late.status is Status.WARN and "3500.0 ms (n2)" in late.message
    assert "n2" in late.fix

"""The check of several hosts: on simulated hosts, each fault named with its culprit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

import warm
from lockstep.errors import UsageError
from lockstep.report.checks import host_exchange
from lockstep.report.checks.data_port import DataPort, probe_data_port
from lockstep.report.checks.host_exchange import HostEntry
from lockstep.report.checks.host_report import HostFacts, HostReport, Path, parse_report
from lockstep.report.checks.hosts import judge_hosts
from lockstep.report.host_check import check_hosts, find_own_index, parse_hosts

FACTS = HostFacts("h", "3.11.7", "2.13.0+cpu", "0.1.0", "AVX2")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(host_exchange, "GRACE", 0.5)
    monkeypatch.setattr(host_exchange, "CONNECT_TIMEOUT", 0.4)
    monkeypatch.setattr(host_exchange, "RETRY", 0.05)
    monkeypatch.setattr("lockstep.report.checks.data_port.TIMEOUT", 0.4)


def check(net, given=None, wait=20.0, absent=(), secrets=None, **facts):
    """Check simulated hosts in threads; return the findings, which are the same on each.

    `given` is the list of hosts, `facts` are those of a host that differ from FACTS, by its name.
    """
    entries = parse_hosts(given or ",".join(net.hosts))
    secrets = secrets or {}

    def on_host(index):
        name = list(net.hosts)[index]

        def collect(**network):
            return dataclasses.replace(FACTS, **facts.get(name, {}), **network)

        findings = check_hosts(entries, index, secrets.get(name), wait, collect=collect)
        return net[name].call(lambda: list(findings))

    present = [index for index, name in enumerate(net.hosts) if name not in absent]
    with ThreadPoolExecutor(len(present)) as pool:
        first, *others = pool.map(on_host, present)
    assert all(each == first for each in others), others
    return {(one.verdict, one.subject): one for one in first}


def drop(net, name, hook, rule):
    """Let the switch drop packets to (`egress`) or from (`ingress`) a host."""
    text = f"table netdev t {{ chain c {{ type filter hook {hook} device {name}0 priority 0;\n"
    net.filter(f"{text}{rule} drop;\n}}\n}}\n")


def test_hosts_without_a_fault(network):
    found = check(network("a", "b", "c"))
    assert [key for key in found if key[0] != "good"] == []
    connections = found["good", "connections"].what
    assert connections.startswith("a, b and c reach each other at port 29500 and at ports that")
    assert "c eth0 (10.77.0.3)" in found["good", "interfaces"].what
    assert "torch 2.13.0+cpu" in found["good", "versions"].what
    assert "at most" in found["good", "clocks"].what


def test_hosts_with_ipv6_only_and_a_name_at_loopback(network):
    net = network("a", "b", ipv6_only=True)
    net.a.write_hosts(f"127.0.1.1 a\n{net.b.address} b\n")
    found = check(net, f"a,[{net.b.address}]")
    assert ("good", "connections") in found, found
    assert f"eth0 ({net.a.address})" in found["good", "interfaces"].what


def test_a_name_that_a_host_cannot_resolve(network):
    net = network("a", "b")
    net.b.write_hosts("127.0.0.1 localhost\n127.0.1.1 b\n")
    finding = check(net)["bad", "b"]
    assert finding.what == "cannot resolve a"
    assert finding.advice.startswith("on b, add a to /etc/hosts or to the name server, or give")


def test_a_name_that_leads_to_the_host_itself_or_to_a_third_one(network):
    net = network("a", "b", "c")
    net.b.write_hosts(f"127.0.1.1 a\n{net.b.address} b\n{net.c.address} c\n")
    net.c.write_hosts(f"{net.b.address} a\n{net.b.address} b\n{net.c.address} c\n")
    found = check(net)
    assert found["bad", "b"].what.startswith("the name a is 127.0.1.1 there, the loopback interf")
    third = f"the name a is {net.b.address} there, where a host answers that takes itself for b"
    assert found["bad", "c"].what == third


def test_a_host_where_the_check_does_not_run(network):
    found = check(network("a", "b", "c"), wait=0.6, absent=["c"])
    finding = found["bad", "c"]
    assert finding.what == "does not answer at port 29500 to a and b: connection refused"
    assert finding.advice == "run the same command on c with the same --hosts"
    assert "a eth0" in found["good", "interfaces"].what


def test_a_closed_port_of_the_first_host(network):
    net = network("a", "b")
    drop(net, "a", "egress", "tcp dport 29500")
    finding = check(net)["bad", "a"]
    assert finding.what == "runs this check, but its port 29500 does not answer to b: timed out"
    assert finding.advice == "open port 29500 (TCP) of a in its firewall and in between"


def test_closed_ports_of_the_other_host(network):
    net = network("a", "b")
    drop(net, "b", "egress", "tcp dport != 29500 tcp flags syn / syn,ack")
    finding = check(net)["bad", "b"]
    assert finding.what == "ports that the system chooses do not answer to a: timed out"
    assert "open them on b for the hosts" in finding.advice


def test_large_packets_that_a_network_loses(network):
    net = network("a", "b")
    drop(net, "b", "ingress", "meta length > 1480")
    finding = check(net)["bad", "b"]
    assert finding.what == "small messages from b arrive at a, large ones do not"
    assert "set the smallest one, such as ip link set eth0 mtu 1400" in finding.advice


def test_versions_and_processors_that_differ(network):
    found = check(
        network("a", "b", "c"),
        b={"torch": "2.12.1+cpu", "backend": "it is not built: run `lockstep build`"},
        c={"instructions": "AVX512", "python": "3.11.9", "gpus": "H100"},
    )
    assert found["bad", "torch"].what == "b has 2.12.1+cpu, the other hosts have 2.13.0+cpu"
    assert found["bad", "processors"].what == "c has AVX512, the other hosts have AVX2"
    assert "ATEN_CPU_CAPABILITY" in found["bad", "processors"].advice
    assert found["note", "python"].what == "c has 3.11.9, the other hosts have 3.11.7"
    assert found["note", "gpus"].what == "c has H100, the other hosts have none"
    assert found["note", "b"].advice == "run `lockstep build`"
    two = check(network("a", "b"), b={"python": "3.12.1"})
    assert two["bad", "python"].what == "a has 3.11.7 and b has 3.12.1"


def test_the_secret_must_be_the_same(network):
    one, two = bytes(32), bytes([1] * 32)
    net = network("a", "b")
    assert check(net, secrets={"a": one, "b": one})["good", "connections"]
    entries = parse_hosts("a,b")
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(
                net[name].call,
                lambda index=index, secret=secret: list(
                    check_hosts(entries, index, secret, 0.6, collect=lambda **_: FACTS)
                ),
            )
            for index, (name, secret) in enumerate((("a", one), ("b", two)))
        ]
        for run, other in zip(runs, "ba", strict=True):
            (finding,) = run.result(30)
            assert (finding.verdict, finding.subject) == ("bad", other)
            assert finding.what.endswith("its secret is another one")
            assert finding.advice == "give every host a copy of the same --secret-file"


def test_another_program_at_the_port(network):
    net = network("a", "b")
    program = net.b.call(lambda: socket.create_server(("", 29500)))
    with program:
        found = check(net, wait=0.6, absent=["b"])
    assert "does not answer at port 29500 to a: another program, or" in found["bad", "b"].what


def test_the_port_of_this_host_is_in_use(network):
    net = network("a", "b")
    with (
        net.a.call(lambda: socket.create_server((net.a.address, 29500))),
        pytest.raises(UsageError, match=r"^--hosts: port 29500 at a is in use"),
    ):
        check(net, absent=["b"])


def test_the_command_on_two_hosts(network, tmp_path):
    net = network("a", "b")
    words = [*warm.LOCKSTEP, "doctor", "--hosts", "a:29400,b", "--json"]
    processes = [
        host.popen(
            words,
            start=warm.Popen,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=dict(os.environ),
            text=True,
        )
        for host in (net.a, net.b)
    ]
    printed = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in printed)
    assert first == second
    assert first["ok"]
    assert "at port 29400" in first["findings"][0]["what"]
    for number, (_, said) in enumerate(printed):
        assert f"this is host {number}, {'ab'[number]}:29400; run the same command on every" in said


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_strangers_do_not_keep_the_second_port_busy(address):
    with contextlib.closing(DataPort(address)) as port, contextlib.ExitStack() as strangers:
        for number in range(100):
            end = socket.create_connection(("127.0.0.1", port.port), timeout=10)
            strangers.enter_context(end)
            if number % 2:
                end.sendall(b"\0" * 1000)
        assert probe_data_port("127.0.0.1", port.port, port.token) == ""
        answer = probe_data_port("127.0.0.1", port.port, "0" * 32)
        assert answer == "another program answers"
    assert probe_data_port("127.0.0.1", port.port, port.token) == "connection refused"


# --- reports and findings, as plain values -------------------------------------------------------


def reports(*offsets, uncertainty=0.01):
    """Return the reports of hosts whose clocks differ by `offsets` from the first one's."""
    clocks = [0.0, *offsets]
    return [
        HostReport(
            index,
            FACTS,
            {
                other: Path("10.0.0.1", "", other, "", clocks[other] - own, uncertainty)
                for other in range(len(clocks))
                if other != index
            },
        )
        for index, own in enumerate(clocks)
    ]


def judge(given):
    return list(judge_hosts(parse_hosts(",".join("abcdefgh"[: len(given)])), given))


def test_clocks_that_are_far_apart():
    *_, two = judge(reports(7200.0))
    assert (two.verdict, two.subject) == ("note", "clocks")
    assert two.what.startswith("those of a and b are 2 h 0 min apart: compare date -u")
    *_, ahead, behind = judge(reports(0.1, 60.0, 0.0, -60.0))
    assert (ahead.subject, ahead.what) == ("c", "its clock is 1 min 0 s ahead of most others")
    assert (behind.subject, behind.what) == ("e", "its clock is 1 min 0 s behind most others")
    assert judge(reports(1.2, uncertainty=0.3))[-1].verdict == "good"


def test_clocks_are_compared_over_the_paths_that_there_are():
    first, second, third = reports(0.0, 60.0)
    first = dataclasses.replace(first, paths={1: first.paths[1]})
    second = dataclasses.replace(second, paths={})
    third = dataclasses.replace(third, paths={1: third.paths[1]})
    assert judge([first, second, third])[-1].subject == "c"


def test_a_host_that_only_some_reach():
    first, second, third = reports(0.0, 0.0)
    broken = Path("10.0.0.3", "timed out")
    first = dataclasses.replace(first, paths={**first.paths, 2: broken})
    assert judge([first, second, third])[0].what == (
        "runs this check, but its port 29500 does not answer to a: timed out"
    )
    found = judge([first, second, HostReport(2)])[0]
    assert (found.verdict, found.subject) == ("bad", "c")


TEXTS = st.text(st.characters(categories=["L", "N", "P"]), max_size=20)
FLOATS = st.floats(-1e9, 1e9)
PATHS = st.builds(Path, TEXTS, TEXTS, st.integers(-1, 3), TEXTS, FLOATS, FLOATS)
FACTS_OF_ANY = st.builds(HostFacts, *[TEXTS] * 9, st.integers(0, 65535), TEXTS)
REPORTS = st.builds(
    HostReport,
    st.integers(0, 3),
    st.none() | FACTS_OF_ANY,
    st.dictionaries(st.integers(0, 3), PATHS),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(REPORTS)
def test_a_report_arrives_as_it_was(report):
    assert parse_report(json.loads(json.dumps(report.as_data())), 4) == report


@given(st.data())
def test_other_data_is_not_a_report(data):
    report = data.draw(REPORTS).as_data()
    where = report
    for _ in range(data.draw(st.integers(0, 3))):
        if isinstance(where, dict) and where:
            where = where[data.draw(st.sampled_from(sorted(where)))]
        elif isinstance(where, list) and where:
            where = data.draw(st.sampled_from(where))
    if isinstance(where, dict):
        where[data.draw(st.sampled_from(["index", "facts", "paths", "x"]))] = data.draw(JSON)
    with contextlib.suppress(ValueError):
        parsed = parse_report(report, 4)
        list(judge_hosts(parse_hosts("a,b,c,d"), [parsed] * 4))


@pytest.mark.parametrize("change", [
    {"index": 4}, {"index": True}, {"index": -1}, {"paths": {}}, {"paths": [[0]]}, {"facts": []},
    {"paths": [[0, {}]] * 9}, {"facts": {"host_name": "x"}},
    {"facts": {**dataclasses.asdict(FACTS), "torch": 2}},
    {"facts": {**dataclasses.asdict(FACTS), "torch": "x" * 301}},
    {"facts": {**dataclasses.asdict(FACTS), "torch": "\x1b[2J"}},
    {"facts": {**dataclasses.asdict(FACTS), "port": 10**400}},
    {"paths": [[0, {**dataclasses.asdict(Path()), "offset": float("nan")}]]},
])  # fmt: skip
def test_a_report_with_other_types_or_sizes_is_refused(change):
    with pytest.raises(ValueError, match=r"\w"):
        parse_report({**HostReport(0, FACTS).as_data(), **change}, 4)


# --- the list of hosts ---------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "expected"), [
    ("a,b", [("a", 29500), ("b", 29500)]),
    ("a:29400, b", [("a", 29400), ("b", 29400)]),
    ("a,b:7", [("a", 29500), ("b", 7)]),
    ("gpu[01-02,07]", [("gpu01", 29500), ("gpu02", 29500), ("gpu07", 29500)]),
    ("[fd00::1]:29400,fd00::2", [("fd00::1", 29400), ("fd00::2", 29400)]),
    ("10.0.0.1,[fd00::2]", [("10.0.0.1", 29500), ("fd00::2", 29500)]),
])  # fmt: skip
def test_lists_of_hosts(text, expected):
    assert parse_hosts(text) == [HostEntry(*each) for each in expected]


@pytest.mark.parametrize("text", ["", "a", "a,a", "a,,b", "a:x,b", "a[001-999]"])
def test_lists_that_are_not_accepted(text):
    with pytest.raises(UsageError, match=r"^--hosts"):
        parse_hosts(text)


def test_a_host_finds_itself_by_address_or_name(network):
    net = network("a", "b")
    entries = parse_hosts("a,b")
    assert [net[name].call(lambda: find_own_index(entries)) for name in "ab"] == [0, 1]
    net.b.write_hosts("")
    assert net.b.call(lambda: find_own_index(entries)) == 1  # by its host name
    numbers = parse_hosts(f"10.77.0.9,{net.b.address}")
    assert net.b.call(lambda: find_own_index(numbers)) == 1
    with pytest.raises(
        UsageError, match=r"none of 10\.77\.0\.9, 10\.77\.0\.2 is .* \(10\.77\.0\.1"
    ):
        net.a.call(lambda: find_own_index(numbers))
    net.b.write_hosts("127.0.1.1 a b\n")
    net.b.rename("other")
    with pytest.raises(UsageError, match="a and b are all addresses of this host"):
        net.b.call(lambda: find_own_index(entries))

"""Simulated hosts: network and UTS namespaces joined by a bridge, on this machine alone.

    with hosts.network("a", "b") as net:
        with net.a.popen([*warm.LOCKSTEP, "run", ...], start=warm.Popen) as process: ...
        net.limit(1000)  # Mbit/s

          host a                 switch                  host b
     lo, eth0 10.77.0.1 ── a0 ── bridge 0 ── b0 ── eth0 10.77.0.2, lo
     (eth1    10.77.1.1 ── a1 ── bridge 1 ── b1 ── eth1 10.77.1.2)  with networks=2

The switch is a network namespace of its own: parallel tests never meet, and the machine sees none
of the addresses. A host has its own host name, /etc/hosts, /sys and an empty /dev/shm. It shares
the file system, the clock and the process numbers with the machine.

Namespaces belong to file descriptors of the tests' process and have no names: the kernel removes
them with the last process in them, also when that process is killed. Leaving a network kills the
processes in it, and fails if there were any.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")

CLONE_FS = 0x200
CLONE_NEWNS = 0x20000
CLONE_NEWUTS = 0x4000000
CLONE_NEWNET = 0x40000000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_BIND = 0x1000
KINDS = {"net": CLONE_NEWNET, "uts": CLONE_NEWUTS, "mnt": CLONE_NEWNS}
PATIENCE = 5.0  # seconds that a process may take to exit
REQUIRED = "LOCKSTEP_REQUIRE_HOSTS"

_libc = ctypes.CDLL(None, use_errno=True)


class Namespaces:
    """Namespaces of a host or of a switch: file descriptors by kind ("net", "uts", "mnt")."""

    def __init__(self, *kinds: str) -> None:
        def create() -> dict[str, int]:
            _call("unshare", sum(KINDS[kind] for kind in kinds))
            if "mnt" in kinds:
                _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
            here = "/proc/thread-self/ns"
            return {kind: os.open(f"{here}/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds}

        self.descriptors = _in_thread(create)

    @property
    def net(self) -> str:
        """A path to the network namespace, for `ip` and other processes of this machine."""
        return self._path("net")

    @property
    def command(self) -> list[str]:
        """The words before a command that run it in these namespaces."""
        words = [
            "nsenter",
            *(f"--{_OPTIONS[kind]}={self._path(kind)}" for kind in self.descriptors),
        ]
        return [*words, "--"]

    def call(self, function: Callable[[], Result]) -> Result:
        """Return what `function` returns in a thread inside: a socket that it opens stays there."""

        def enter() -> Result:
            _enter(list(self.descriptors.values()))
            return function()

        return _in_thread(enter)

    def run(self, *commands: Sequence[str], input: str | None = None) -> str:
        """Run commands inside; return what the last one printed."""
        printed = ""
        for command in commands:
            done = subprocess.run(
                [*self.command, *command], input=input, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
            printed = done.stdout
        return printed

    def ip(self, *lines: str) -> None:
        """Run lines of `ip -batch`."""
        self.run(["ip", "-batch", "-"], input="\n".join(lines))

    def list_processes(self) -> list[int]:
        """Return the processes inside."""
        inode = os.fstat(self.descriptors["net"]).st_ino
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has exited
                if os.stat(f"/proc/{pid}/ns/net").st_ino == inode:
                    found.append(int(pid))
        return found

    def close(self) -> None:
        """Forget the namespaces."""
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])

    def _path(self, kind: str) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptors[kind]}"


_OPTIONS = {"net": "net", "uts": "uts", "mnt": "mount"}


class Host:
    """One simulated host.

    Attributes:
        name: The host name.
        address: Its address in the first network: IPv4, or IPv6 where the network has no other.
        address6: Its IPv6 address in the first network.
        interface: The interface of the first network.
        namespaces: Where it lives: `host.namespaces.run(["ip", "route", "add", ...])`.
    """

    def __init__(self, name: str, number: int, networks: int, ipv6_only: bool) -> None:
        self.name = name
        self.interface = "eth0"
        self.interfaces = [f"eth{each}" for each in range(networks)]
        self.addresses = [f"10.77.{each}.{number}" for each in range(networks)]
        self.addresses6 = [f"fd77:{each + 1}::{number}" for each in range(networks)]
        self.address6 = self.addresses6[0]
        self.address = self.address6 if ipv6_only else self.addresses[0]
        self.namespaces = Namespaces("net", "uts", "mnt")
        self._hosts_file = self.namespaces.call(self._furnish)

    def popen(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        start: type[subprocess.Popen[Any]] = subprocess.Popen,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on this host, as `subprocess.Popen`, or as `start=warm.Popen`."""
        words = [os.fspath(word) for word in command]
        if start is not subprocess.Popen:  # a warm process: it enters by itself
            assert words[:2] == [sys.executable, "-c"], words
            paths = [f"/proc/{os.getpid()}/fd/{each}" for each in self._descriptors]
            words[2] = f"import hosts; hosts.enter({paths!r}); {words[2]}"
            return start(words, **options)
        where = os.path.abspath(options.pop("cwd", None) or os.getcwd())
        *entering, _ = self.namespaces.command
        return start([*entering, f"--wdns={where}", "--", *words], **options)

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        timeout: float,
        start: type[subprocess.Popen[Any]] = subprocess.Popen,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """As `subprocess.run` with `capture_output=True`, on this host."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(command, start=start, **streams, **options) as process:
            try:
                printed = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(list(command), process.returncode, *printed)

    def call(self, function: Callable[[], Result]) -> Result:
        """Return what `function` returns in a thread on this host; sockets that it opens stay."""
        return self.namespaces.call(function)

    def write_hosts(self, text: str) -> None:
        """Replace what programs on this host read as /etc/hosts."""
        os.ftruncate(self._hosts_file, 0)
        os.pwrite(self._hosts_file, text.encode(), 0)

    def rename(self, name: str) -> None:
        """Change the host name that programs get, also to an empty one."""
        words = name.encode()
        self.call(lambda: _call("sethostname", words, len(words)))

    def kill(self) -> None:
        """Kill all processes on this host, and wait until they are gone."""
        deadline = time.monotonic() + PATIENCE
        while (pids := self.namespaces.list_processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        assert not pids, f"killed on host {self.name}, but there: {pids}"

    def close(self) -> None:
        """Forget the namespaces; the kernel removes them with the last process in them."""
        if self.namespaces.descriptors:
            os.close(self._hosts_file)
        self.namespaces.close()

    @property
    def _descriptors(self) -> list[int]:
        return list(self.namespaces.descriptors.values())

    def _furnish(self) -> int:
        """Give the host its name, /sys, /dev/shm and /etc/hosts, in a thread inside."""
        name = self.name.encode()
        _call("sethostname", name, len(name))
        _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
        _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
        for which in ("all", "default"):  # addresses are usable at once, and nobody routes
            settings = Path(f"/proc/sys/net/ipv6/conf/{which}")
            (settings / "accept_dad").write_text("0")
            (settings / "accept_ra").write_text("0")
        if os.path.exists("/etc/nsswitch.conf"):  # no name server
            os.close(_mount_file("/etc/nsswitch.conf", "hosts: files\n"))
        return _mount_file("/etc/hosts", "")


class Network:
    """Hosts joined by one or more networks; made by `network`.

    Attributes:
        hosts: The hosts by name; also `net["a"]` and `net.a`.
        switch: The namespace of the bridges, which have a port `NAME0`, `NAME1`, ... per host.
    """

    def __init__(self, names: Sequence[str], networks: int, ipv6_only: bool) -> None:
        self.hosts: dict[str, Host] = {}
        self._delays: dict[str, subprocess.Popen[bytes]] = {}
        self._is_checked = True
        self.switch = Namespaces("net")
        try:
            for number, name in enumerate(names, 1):
                self.hosts[name] = Host(name, number, networks, ipv6_only)
            self._connect(networks, ipv6_only)
        except BaseException:
            self.close(check=False)
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __getattr__(self, name: str) -> Host:
        try:
            return self.__dict__["hosts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(check=kind is None)

    def limit(self, mbit: float | None) -> None:
        """Limit every link to `mbit` Mbit/s in each direction, or not at all (None)."""
        burst = max(128 * 1024, int((mbit or 0) * 1e6 / 8 / 1000))  # 1 ms, or two large packets
        kind = f"tbf rate {(mbit or 0) * 1e6:.0f} burst {burst} latency 20ms"
        for name, host in self.hosts.items():
            ends = [(host.namespaces, each) for each in host.interfaces]
            ends += [(self.switch, port) for port in self._ports(name)]
            for namespaces, device in ends:
                if mbit is None:
                    namespaces.run(["tc", "qdisc", "replace", "dev", device, "root", "pfifo"])
                else:
                    words = ["tc", "qdisc", "replace", "dev", device, "root", *kind.split()]
                    namespaces.run(words)

    def cut(self, name: str, interface: str | None = None) -> None:
        """Pull the cable of a host, or of one of its interfaces: no packet, no error, no reset."""
        self._set_ports(name, interface, "down")

    def restore(self, name: str, interface: str | None = None) -> None:
        """Plug the cable in again."""
        self._set_ports(name, interface, "up")

    def vanish(self, name: str) -> None:
        """Take a host away as a power failure does: first its link, then its processes."""
        self.cut(name)
        self[name].kill()

    def lose(self, name: str, fraction: float) -> None:
        """Lose this fraction of the packets to and from a host, at random; 0 ends it.

        These are packets of TCP and UDP, each of up to 64 kB; hosts go on finding each other.
        """
        rule = f"meta l4proto {{ tcp, udp }} numgen random mod 1000000 < {fraction * 1e6:.0f}"
        rules = "".join(
            f"chain {port}_{hook} {{\n type filter hook {hook} device {port} priority 0;\n"
            f" {rule} counter drop;\n}}\n"
            for port in self._ports(name)
            for hook in ("ingress", "egress")
        )
        table = f"table netdev loss_{name}"
        text = f"{table}\ndelete {table}\n"
        self.filter(text + (f"{table} {{\n{rules}}}\n" if fraction else ""))

    def filter(self, rules: str) -> None:
        """Give the switch rules of nftables; its ports are named `<host>0`, `<host>1`, ..."""
        if shutil.which("nft") is None:
            _refuse("needs nft to lose packets (Debian's package nftables)")
        self.switch.run(["nft", "-f", "-"], input=rules)

    def count_lost(self, name: str) -> int:
        """Return how many packets `lose` has dropped."""
        printed = self.switch.run(["nft", "-j", "list", "table", "netdev", f"loss_{name}"])
        rules = [entry["rule"] for entry in json.loads(printed)["nftables"] if "rule" in entry]
        return sum(
            part["counter"]["packets"]
            for rule in rules
            for part in rule["expr"]
            if "counter" in part
        )

    def delay(self, name: str, seconds: float) -> None:
        """Hold each packet to and from a host for `seconds`: round trips take twice that longer.

        A process between the host's cable and the bridge forwards the packets (this kernel has no
        netem): some 20,000 per second, each of up to 64 kB. 0 ends it.
        """
        if (running := self._delays.pop(name, None)) is not None:
            _end(running)
        for port in self._ports(name):
            joined = f"{port}d"
            bridge = f"bridge{port[len(name) :]}"
            if running is not None:
                self.switch.ip(f"link del {joined}", f"link set {port} master {bridge}")
            if seconds:
                self.switch.ip(
                    f"link set {port} nomaster",
                    f"link add {joined} type veth peer name {port}e",
                    f"link set {joined} master {bridge}",
                    f"link set {joined} up",
                    f"link set {port}e up",
                )
        if seconds:
            relay = Path(__file__).with_name("frame_relay.py")
            ends = [end for port in self._ports(name) for end in (port, f"{port}e")]
            process = subprocess.Popen(
                [*self.switch.command, sys.executable, "-SE", str(relay), str(seconds), *ends],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._delays[name] = process
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"

    def close(self, *, check: bool = True, patience: float = PATIENCE) -> None:
        """Kill what runs on the hosts and remove them.

        Args:
            check: Whether to fail if something still ran.
            patience: Seconds that it may take to exit.
        """
        left = self._list_left(patience if check else 0)
        for name in list(self._delays):
            _end(self._delays.pop(name))
        for host in self.hosts.values():
            if host.namespaces.descriptors:
                host.kill()
            host.close()
        self.switch.close()
        assert not (check and left), f"left running: {left}"

    def _list_left(self, seconds: float) -> list[str]:
        """Return the processes that are on the hosts after so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            left = [
                f"{_command_line(pid)} on host {name}"
                for name, host in self.hosts.items()
                if host.namespaces.descriptors
                for pid in host.namespaces.list_processes()
            ]
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(0.01)

    def _connect(self, networks: int, ipv6_only: bool) -> None:
        lines = []
        for each in range(networks):
            lines += [f"link add bridge{each} type bridge mcast_snooping 0 forward_delay 0"]
            lines += [f"link set bridge{each} addrgenmode none up"]
            for name, host in self.hosts.items():
                peer = f"peer name eth{each} netns {host.namespaces.net}"
                lines += [
                    f"link add {name}{each} type veth {peer}",
                    f"link set {name}{each} addrgenmode none master bridge{each} up",
                ]
        self.switch.ip(*lines)
        for host in self.hosts.values():
            lines = ["link set lo up"]
            for device, ipv4, ipv6 in zip(
                host.interfaces, host.addresses, host.addresses6, strict=True
            ):
                lines += [f"link set {device} up"]
                lines += [] if ipv6_only else [f"addr add {ipv4}/24 dev {device}"]
                lines += [f"addr add {ipv6}/64 dev {device} nodad"]
            host.namespaces.ip(*lines)
            others = "".join(f"{each.address} {each.name}\n" for each in self.hosts.values())
            host.write_hosts(f"127.0.0.1 localhost\n::1 localhost\n{others}")

    def _set_ports(self, name: str, interface: str | None, state: str) -> None:
        host = self[name]
        number = {device: str(each) for each, device in enumerate(host.interfaces)}
        chosen = host.interfaces if interface is None else [interface]
        self.switch.ip(*(f"link set {name}{number[each]} {state}" for each in chosen))

    def _ports(self, name: str) -> list[str]:
        return [f"{name}{number}" for number in range(len(self[name].interfaces))]


def network(
    *names: str, mbit: float | None = None, networks: int = 1, ipv6_only: bool = False
) -> Network:
    """Return simulated hosts; use it in a `with` statement, or through the fixture `network`.

    Every host finds every other one, and itself, by name (`host.write_hosts` changes that). Skips
    the test where hosts cannot be simulated.

    Args:
        *names: Host names, of at most ten letters and digits.
        mbit: Limit of every link in each direction, in Mbit/s.
        networks: Number of networks that join the hosts: eth0, eth1, ...
        ipv6_only: Give the hosts no IPv4 address other than that of lo.
    """
    if (reason := reason_unavailable()) is not None:
        _refuse(reason)
    made = Network(names, networks, ipv6_only)
    if mbit is not None:
        made.limit(mbit)
    return made


def reason_unavailable() -> str | None:
    """Return why no hosts can be simulated here; None where they can."""
    if sys.platform != "linux":
        return "simulated hosts need Linux"
    for program in ("ip", "tc", "nsenter"):
        if shutil.which(program) is None:
            return f"simulated hosts need {program}"
    try:
        Namespaces("net", "uts", "mnt").close()
    except OSError as error:
        return f"simulated hosts need root: {error}"
    return None


def enter(paths: Sequence[str]) -> None:
    """Enter namespaces from inside a program that has one thread, and stay in its folder."""
    where = os.getcwd()
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    _enter(descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(where)


@contextlib.contextmanager
def closing_networks() -> Iterator[Callable[..., Network]]:
    """Yield `network`, and close at the end what it has returned: the fixture `network`."""
    made: list[Network] = []

    def create(*names: str, **options: Any) -> Network:
        made.append(network(*names, **options))
        return made[-1]

    try:
        yield create
    finally:
        for each in made:
            each.close()


def _refuse(reason: str) -> None:
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _in_thread(function: Callable[[], Result]) -> Result:
    """Return what `function` returns in a thread: namespaces that it enters end with it."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _call("unshare", CLONE_FS)
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _enter(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        _call("setns", descriptor, 0)


def _mount_file(path: str, text: str) -> int:
    """Put a new file in the place of another, inside a host; return its descriptor."""
    staged = "/dev/shm/staged"
    descriptor = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.write(descriptor, text.encode())
    _call("mount", staged.encode(), path.encode(), None, MS_BIND, None)
    os.unlink(staged)
    return descriptor


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = ["(gone)"]
    return f"process {pid} ({' '.join(words)[:200].strip()})"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def get_free_port(host: Host, family: socket.AddressFamily = socket.AF_INET) -> int:
    """Return a port that is free on a host."""

    def bind() -> int:
        with socket.socket(family) as listening:
            listening.bind(("", 0))
            return int(listening.getsockname()[1])

    return host.call(bind)

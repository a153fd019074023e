"""The process that holds the packets of a simulated host (`hosts.Network.delay`).

    python frame_relay.py SECONDS END OTHER_END [END OTHER_END]...

Each pair of interfaces is a cable: what arrives at one end leaves at the other one SECONDS later.
Frames keep the kernel's header about checksums and segments, so that large ones pass whole. The
process ends with its standard input.
"""

import collections
import select
import socket
import sys
import time

SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
ALL_PROTOCOLS = 3
LARGEST = 10 + 14 + 4 + 65536  # header about segments, Ethernet, VLAN, packet


def open_end(interface):
    """Return a socket that receives and sends whole frames of an interface."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 32 << 20)
    end.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 32 << 20)
    end.bind((interface, ALL_PROTOCOLS))
    end.setblocking(False)
    return end


def main():
    seconds, *interfaces = sys.argv[1:]
    held_for = float(seconds)
    ends = [open_end(interface) for interface in interfaces]
    others = {end: ends[number ^ 1] for number, end in enumerate(ends)}
    waiting = collections.deque()  # (time to send, socket, frame)
    print("ready", flush=True)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([sys.stdin, *ends], [], [], pause)
        if sys.stdin in ready:
            return
        for end in ready:
            for _ in range(64):
                try:
                    frame = end.recv(LARGEST)
                except (BlockingIOError, OSError):  # nothing more, or the interface is down
                    break
                waiting.append((time.monotonic() + held_for, others[end], frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, frame = waiting.popleft()
            try:
                end.send(frame)
            except OSError:  # a full queue or a pulled cable loses the frame
                continue


main()

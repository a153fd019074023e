"""A script that speaks the messages of elastic runs itself, and a launcher of it.

An operation adds 12 numbers, each computed by one rank: the sum is the same with every number of
ranks. A rank kills itself where KILLS says, such as "2:5:barrier 4:r1:ready" (member, operation or
round, place); with REPEATED_KILLS, the last rank of every full round does. The script ends after
STEPS operations, with RANKS ranks.
"""

from __future__ import annotations

from pathlib import Path

import warm

CLI = [*warm.LOCKSTEP, "run"]

SCRIPT = """
import json, os, signal, sys, threading
from contextlib import contextmanager
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import PrefixStore
from lockstep.comm import backend
from lockstep.launcher.private_store import attach_store
from lockstep.launcher.rank_process import receive_from_launcher, report_to_launcher

STEPS, RANKS = int(os.environ["STEPS"]), int(os.environ["RANKS"])
if "RAISES" in os.environ:  # stop as a trainer does: at the next step
    signal.signal(signal.SIGTERM, lambda *_: None)
REPEATED_KILLS = int(os.environ.get("REPEATED_KILLS", "0"))
CAN_STAY = "CAN_STAY" not in os.environ
KILLS = {tuple(kill.split(":")) for kill in os.environ.get("KILLS", "").split()}
MEMBER = int(os.environ["LOCKSTEP_MEMBER"])
assert os.environ["LOCKSTEP_ELASTIC"] == "1"
backend.register()


class Lost(Exception):
    pass


class Member:
    def __init__(self):
        self.round, self.sums, self.prepared, self.newcomers = 0, [], None, 0
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.has_state = "LOCKSTEP_JOIN" not in os.environ
        self.is_admitting = False

    def at(self, place):
        is_last = self.rank == self.size - 1 and self.size == RANKS
        is_doomed = is_last and place == "prepare" and self.round < 2 * REPEATED_KILLS
        here = {(str(MEMBER), str(len(self.sums)), place), (str(MEMBER), f"r{self.round}", place)}
        if is_doomed or here & KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{MEMBER}:{len(self.sums)}:{place}" == os.environ.get("RAISES"):
            raise OSError("out of paper")
        if f"{MEMBER}:{len(self.sums)}:{place}" == os.environ.get("LOSES") and not self.round:
            raise Lost  # as where a busy machine connects a group too late

    def next_message(self):
        received = receive_from_launcher(60)
        assert received is not None, "the launcher does not answer"
        message = received[0]
        if message["kind"] == "leave":
            print("leaves")
            os._exit(0)
        return message

    def connect(self, address, is_admission):
        store = PrefixStore(str(self.round), attach_store(address))
        self.at("connect")
        with self.watch_launcher(address):
            try:
                dist.init_process_group(
                    "lockstep", store=store, rank=self.rank, world_size=self.size,
                    timeout=timedelta(seconds=30),
                )
            except RuntimeError as error:
                raise Lost from error
        if is_admission:
            self.share()
        self.has_state = True

    @contextmanager
    def watch_launcher(self, address):
        "Give up the group that is being connected once the launcher says that a member is lost."
        is_connected = threading.Event()
        def watch():
            while not is_connected.is_set():
                if self.poll(0.002):
                    store = PrefixStore(f"{self.round}/0//cpu/", attach_store(address))
                    store.set("lockstep/refused/0", "a member is lost")
                    store.set("lockstep/address/0", "")
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_connected.set()
            thread.join()

    def poll(self, timeout):
        "Read a message; return whether it says that a member of this round is lost."
        received = receive_from_launcher(timeout)
        if received is None or received[0]["round"] != self.round:
            return False
        if received[0]["kind"] == "newcomers":
            self.newcomers = received[0]["count"]
        return received[0]["kind"] == "lost"

    def share(self):
        count = self.reduce(torch.tensor([len(self.sums) if self.rank == 0 else 0]))
        sums = torch.tensor(self.sums) if self.rank == 0 else torch.zeros(int(count), dtype=int)
        self.at("share")
        self.sums = self.reduce(sums).tolist()

    def reduce(self, tensor):
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise Lost from error
        return tensor

    def prepare(self):
        self.at("prepare")
        own = [m * (len(self.sums) + 1) for m in range(12) if m % self.size == self.rank]
        self.poll(0)
        found = self.reduce(torch.tensor([sum(own), self.newcomers])).tolist()
        self.prepared, self.is_admitting = found[0], found[1] > 0

    def run(self):
        self.at("barrier")
        self.reduce(torch.zeros(1))
        self.at("commit")
        self.commit()

    def commit(self):
        self.sums.append(self.prepared)
        self.prepared = None

    def end_round(self, reason):
        if str(MEMBER) == os.environ.get("SILENT"):  # as in a collective that nothing interrupts
            signal.pause()
        self.at(reason)
        report_to_launcher({
            "kind": "round_over", "round": self.round, "operation": len(self.sums),
            "is_prepared": self.prepared is not None, "reason": reason,
            "can_stay": CAN_STAY, "can_transfer_state": True, "part": 0, "parts": 1,
            "microbatches": 0, "has_state": self.has_state,
        })
        self.at("reported")
        if dist.is_initialized():
            dist.destroy_process_group()
        message = self.next_message()
        while message["kind"] not in ("round", "transfer_state"):
            message = self.next_message()
        if message["commit"] and len(self.sums) == message["operation"]:
            assert self.prepared is not None
            self.commit()
        self.prepared, self.is_admitting, self.newcomers = None, False, 0
        if message["kind"] == "transfer_state":
            self.at("transfer_state")
            with open(os.path.join(message["folder"], "sums"), "w") as file:
                json.dump(self.sums, file)
            report_to_launcher({"kind": "transferred"})
            os._exit(0)
        return message

    def enter(self, message):
        self.round, self.rank, self.size = message["round"], message["rank"], message["world_size"]
        if self.rank == 0:
            print(json.dumps({key: value for key, value in message.items() if key != "store"}))
        self.connect(message["store"], bool(message["joined"]))

    def follow(self, act, reason="lost"):
        while True:
            try:
                return act()
            except Lost:
                pass
            message = self.end_round("lost")
            act = lambda: self.enter(message)


def main():
    member = Member()
    if "READS_INPUT" in os.environ and os.environ["RANK"] == "0":
        print("input:", sys.stdin.read())
    if folder := os.environ.get("LOCKSTEP_HANDOVER"):
        with open(os.path.join(folder, "sums")) as file:
            member.sums = json.load(file)
        report_to_launcher({"kind": "resumed"})
    if member.has_state:
        address = " ".join(os.environ["LOCKSTEP_STORE"].split()[2:])
        member.round = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        member.follow(lambda: member.connect(address, False))
    else:
        member.at("start")
        report_to_launcher({"kind": "ready"})
        member.at("ready")
        message = member.next_message()
        member.follow(lambda: member.enter(message))
    while (
        len(member.sums) < STEPS or member.size != RANKS or member.round < 2 * REPEATED_KILLS
    ):
        if member.is_admitting and member.prepared is None:
            message = member.end_round("admit")
            member.follow(lambda: member.enter(message))
        elif member.prepared is None:
            member.follow(member.prepare)
        else:
            member.follow(member.run)
    assert member.sums == [66 * (step + 1) for step in range(len(member.sums))], member.sums
    member.at("end")
    dist.destroy_process_group()
    if member.rank == 0:
        print("right", member.size)
    sys.stdout.flush()
    os._exit(0)


main()
"""


def write_script(folder: Path, **environ: str) -> dict[str, str]:
    """Write the script; return the variables for it."""
    (folder / "train.py").write_text(SCRIPT)
    return {"STEPS": "20", "RANKS": "3", **environ}

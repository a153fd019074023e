"""The script log answers the calls of a script in the order in which they were made."""

import json

import pytest

from lockstep.checkpoint.encoding import decode, encode
from lockstep.kernel.errors import UsageError
from lockstep.training.resume.script_log import ScriptLog


class Batches:
    """The batches of an epoch, as far as the log knows them."""

    def __init__(self, epoch=0, samples=8, batch_size=2, seed=0, shuffle=True, drop_last=False):
        self.epoch = epoch
        self.position = 0
        self.identity = {
            "samples": samples, "batch_size": batch_size, "seed": seed, "shuffle": shuffle,
            "drop_last": drop_last,
        }  # fmt: skip

    def state_dict(self):
        return {"position": self.position, "epoch": self.epoch, "content": [], **self.identity}


class Script:
    """Makes calls as a trainer passes them on; `steps` are those that are finished."""

    def __init__(self, log=None):
        self.log = log or ScriptLog()
        self.steps = 0

    def begin(self, epoch=0, **options):
        opened, entry = self.log.begin_epoch(Batches(epoch, **options))
        if entry is not None and not entry["complete"]:
            opened.batches.position = entry["state"]["position"]
        return opened

    def next(self, opened, step=True):
        """Take a batch, and a step on it."""
        opened.begun_at = self.steps
        opened.batches.position += 1
        self.steps += step

    def done(self, opened):
        opened.begun_at = -1
        if self.log.is_outermost(opened):
            self.log.complete_batches()

    def train(self, epoch=0, batches=4, **options):
        opened = self.begin(epoch, **options)
        if opened is not None:
            for _ in range(batches - opened.batches.position):
                self.next(opened)
                self.done(opened)
            self.log.end_epoch(opened, self.steps)

    def call(self, kind, **fields):
        self.log.record(kind, self.steps, **fields)

    def raw_step(self, batch):
        self.steps += 1
        self.log.record_step(self.steps, self.steps / 8, batch)

    def resume(self):
        """Return a script that begins again with this one's log, saved and loaded."""
        text = json.dumps(encode(self.log.state_dict(self.steps), {}, "script"))
        log = ScriptLog()
        log.load_state_dict(decode(json.loads(text), {}))
        return Script(log)


def refused(function, *arguments, **options):
    with pytest.raises(UsageError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_answers_come_in_order_and_then_calls_have_effects():
    first = Script()
    first.train(0)
    first.call("evaluation", samples=30, ema=False, result={"loss": 0.5})
    first.call("save", result=None)
    first.train(1)
    second = first.resume()
    log = second.log
    assert log.is_replaying
    assert second.begin(0) is None
    answer = log.answer("evaluation", samples=30, ema=False)
    assert (answer["result"], answer["steps"]) == ({"loss": 0.5}, 4)
    assert log.answer("save")["steps"] == 4
    assert log.is_replaying
    assert second.begin(1) is None
    assert not log.is_replaying
    log.require_finished()
    assert log.answer("evaluation", samples=30, ema=False) is None
    opened = second.begin(2)
    assert opened.resumed is None
    # what is saved now is what the uninterrupted script would have saved
    first.begin(2)
    assert log.state_dict(8) == first.log.state_dict(8)


def test_a_batch_without_a_step_is_yielded_again():
    script = Script()
    opened = script.begin()
    script.next(opened)
    script.done(opened)
    script.next(opened, step=False)  # saved before its step
    assert script.log.state_dict(1)["entries"][0]["state"]["position"] == 1
    script.steps += 1  # saved after its step, in the body
    assert script.log.state_dict(2)["entries"][0]["state"]["position"] == 2
    script.next(opened, step=False)
    script.done(opened)  # a batch that the script skips is done
    assert script.log.state_dict(2)["entries"][0]["state"]["position"] == 3


@pytest.mark.parametrize("step", [True, False])
def test_of_zipped_iterations_each_continues_at_the_same_batch(step):
    script = Script()
    a = b = None
    for _ in range(3):  # as zip(a, b) does
        if a is not None:
            script.done(a)
        a = a or script.begin(0)
        script.next(a, step=False)
        if b is not None:
            b.begun_at = -1
        b = b or script.begin(7, samples=9)
        script.next(b, step=False)
        script.steps += step
    script.done(a)
    entries = script.log.state_dict(script.steps)["entries"]
    assert [each["state"]["position"] for each in entries] == [3, 3]
    second = script.resume()
    assert second.begin(0).resumed["position"] == 3
    assert second.begin(7, samples=9).resumed["position"] == 3
    # the second one is not begun again if the first one yields nothing more
    fourth = script.resume()
    opened = fourth.begin(0)
    fourth.log.end_epoch(opened, script.steps)
    assert not fourth.log.is_replaying
    # the first one ends, and with it the second
    script.log.end_epoch(a, script.steps)
    script.log.end_epoch(b, script.steps)
    third = script.resume()
    assert third.begin(0) is None
    assert not third.log.is_replaying


@pytest.mark.parametrize("batches", ["acb", "aab", "abd"])
def test_raw_batches_in_another_order_are_refused(batches):
    first = Script()
    for batch in "abc":
        first.raw_step(batch)
    log = first.resume().log
    log.answer_step(batches[0])
    log.answer_step(batches[1])
    said = refused(log.answer_step, batches[2])
    assert said.startswith("the batches of the first 3 steps are not those of the interrupted run")


def test_a_manual_step_outside_of_a_loop_is_not_forgotten():
    first = Script()
    first.train(0)
    for _ in range(3):
        first.steps += 1
        first.log.record_manual_step(first.steps)
    entries = first.log.state_dict(first.steps)["entries"]
    assert [(each["kind"], each["steps"]) for each in entries] == [("epoch", 4), ("manual", 7)]
    second = first.resume()
    second.begin(0)
    assert second.log.is_replaying
    assert "where the interrupted run takes a manual step outside" in refused(second.begin, 1)
    inside = Script()
    opened = inside.begin(0)
    inside.log.record_manual_step(1)
    inside.log.record_manual_step(2)
    inside.log.end_epoch(opened, 2)
    assert [each["kind"] for each in inside.log.state_dict(2)["entries"]] == ["epoch"]


def trained():
    script = Script()
    script.train(0)
    script.call("evaluation", samples=30, ema=False, result={"loss": 0.5})
    return script.resume()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.log.answer("save"), "the script saves weights where"),
        (lambda s: s.log.answer_step("x"), "the script calls trainer.step(batch) with its own"),
        (lambda s: s.begin(1), "the script iterates over batches of epoch 1"),
        (
            lambda s: s.log.answer("evaluation", samples=30, ema=False),
            "the script evaluates on 30 samples where the interrupted run iterates over batches of "
            "epoch 0 (call 1): a resumed script makes the same calls from its beginning",
        ),
        (lambda s: s.begin(0, samples=9), "epoch 0: the interrupted run had samples 8, these"),
        (lambda s: s.begin(0, batch_size=4), "batch size 2, these batches have 4"),
        (lambda s: s.begin(0, seed=1), "seed 0, these batches have 1"),
        (lambda s: s.begin(0, shuffle=False), "shuffle True, these batches have False"),
        (lambda s: s.begin(0, drop_last=True), "drop last False, these batches have True"),
        (lambda s: s.log.require_finished(), "run iterates over batches of epoch 0 next: resume"),
        (
            lambda s: (s.begin(0), s.log.answer("evaluation", samples=31, ema=True)),
            "evaluates on 31 samples with the averaged weights where the interrupted run evaluates "
            "on 30 samples (call 2)",
        ),
    ],
)  # fmt: skip
def test_another_call_is_named(call, words):
    assert words in refused(call, trained())


@pytest.mark.parametrize(
    ("train", "advice"),
    [
        (lambda script: script.train(1), "resume with at least as many epochs"),
        (lambda script: script.raw_step("x"), "resume with at least as many steps"),
        (lambda script: script.log.record_manual_step(5), "resume with at least as many steps"),
        (lambda script: script.call("save", result=None), "make this call here, too"),
    ],
)
def test_what_a_script_that_ends_early_should_do_depends_on_the_call(train, advice):
    script = Script()
    script.train(0)
    train(script)
    second = script.resume()
    second.begin(0)
    assert advice in refused(second.log.require_finished)
    assert f": {advice}, or write" in refused(second.log.answer_digest, "digest", 4)


def test_only_calls_that_train_have_to_be_repeated_before_the_script_trains_on():
    script = Script()
    script.train(0)
    script.call("save", result=None)
    script.call("evaluation", samples=30, ema=False, result={"loss": 0.5})
    second = script.resume()
    assert second.log.skip_end() == ""  # epoch 0 is still to be repeated
    second.begin(0)
    assert second.log.skip_end() == "saves weights"
    assert not second.log.is_replaying
    assert second.begin(1).resumed is None
    assert second.log.skip_end() == ""


def test_the_end_of_a_run_is_no_call_to_be_repeated():
    script = Script()
    script.train(0)
    script.log.record_end(script.steps)
    second = script.resume()
    assert second.log.has_end
    assert second.begin(0) is None
    assert not second.log.is_replaying
    assert second.log.size == 1
    second.log.require_finished()
    assert not second.resume().log.has_end  # also a log of an older version


def test_a_log_of_an_older_version_has_no_drop_last():
    script = trained()
    del script.log._answers[0]["state"]["drop_last"]
    assert script.begin(0) is None


def test_a_script_that_has_begun_cannot_be_resumed():
    script = Script()
    script.train(0)
    assert refused(script.log.load_state_dict, script.log.state_dict(4)).startswith("resume before")
    script = Script()
    script.begin(0)
    assert refused(script.log.load_state_dict, script.log.state_dict(4)).startswith("resume before")

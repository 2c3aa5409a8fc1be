"""The judge of kill_campaign.py: which errors of a survivor it accepts."""

import pytest

import kill_campaign

PLAN = {"victim": 1, "size": 3, "horovod": True, "moment": 2, "during_us": None, "steps": ["hvd_reduce"] * 4, "after": "raise", "fault": "kill"}
FAULT = {"event": "fault", "time": 10.0}
LOST = "lost rank 1 (host vm): its process has ended"


class Job:
    def __init__(self, **events):
        self.recorded = {2: [], **{int(rank[1:]): found for rank, found in events.items()}}

    def event(self, rank, name):
        return next((event for event in self.recorded[rank] if event["event"] == name), None)

    def survivors(self):
        return [0, 2]


def error(kind="PeerLostError", rank=1, text=LOST, time=10.5, internal=True):
    return {"event": "error", "type": kind, "rank": rank, "text": text, "time": time, "internal": internal}


def defects(*events, fault="kill", others=()):
    return kill_campaign.judge_error({**PLAN, "fault": fault}, Job(r0=list(events), r1=[], r2=list(others)), 0, FAULT)[0]


def test_right_errors():
    assert not defects(error())
    assert not defects(error("StalledError", None, "allreduce 'a': rank 1 has not submitted it"), fault="hang")
    assert not defects(error("ShutdownError", None, "rank 1 has called shutdown()"), fault="exit")
    ended = {"event": "ending", "time": 10.2}
    assert not defects(error(rank=2, text="lost rank 2: it failed: lost rank 1"), others=[ended])
    assert not defects({"event": "steps made", "time": 10.1}, error("DistBackendError", None, LOST, internal=False))


@pytest.mark.parametrize("events, others, fault", (
    ((), (), "kill"),  # it has not raised
    ((error(rank=2, text="lost rank 2"),), (), "kill"),
    ((error(rank=2, text="lost rank 2: it failed: lost rank 1"),), (), "kill"),  # rank 2 has not ended
    ((error(rank=2, text="lost rank 2: it failed: lost rank 1"),), ({"event": "ending", "time": 10.6},), "kill"),  # later
    ((error(rank=2, text="lost rank 2: it failed"),), ({"event": "ending", "time": 10.2},), "kill"),  # not because of rank 1
    ((error(text="lost rank 12"),), (), "kill"),
    ((error("StalledError", None, "rank 1 has not submitted it"),), (), "kill"),
    ((error("RuntimeError", None, LOST, internal=False),), (), "kill"),
    ((error("DistBackendError", None, LOST, internal=False),), (), "kill"),
    ((error(time=20.0),), (), "kill"),  # late
    ((error("MismatchError", None, "rank 1 differs"),), (), "hang"),
), ids=range(11))
def test_wrong_errors(events, others, fault):
    assert defects(*events, fault=fault, others=others)

"""Reads RSOCK_SUMMARY's lines and judges whether a run was really accelerated.

One line per process: {"pid","exe","streams","lifted":{"shm","rdma"},"set_down",
"bytes_sent":{"tcp","shm","rdma"},"bytes_received":{...},"zero_copy_bytes","not_lifted":{...}},
and, beyond the contract, "refused":{...}: what a peer offered and we did not take, and "set_down_for":{...}: why lifted
streams went back to TCP; "queue_pairs":{"made","reused"}.
"""

import collections
import json

# Below this part of its bytes on the fast path, a run measured something else.
MIN_SHARE = 0.80


class Proof:
    """What the summaries say about one path, over the processes of one run or of many."""

    def __init__(self, path):
        self.path = path
        self.runs = 0
        self.streams = 0
        self.lifted = 0
        self.bytes_on_path = 0
        self.bytes_total = 0
        self.reasons = collections.Counter()
        self.faults = []

    @property
    def ok(self):
        return self.runs > 0 and not self.faults

    @property
    def share(self):
        return self.bytes_on_path / self.bytes_total if self.bytes_total else 0.0

    def add(self, other):
        self.runs += other.runs
        self.streams += other.streams
        self.lifted += other.lifted
        self.bytes_on_path += other.bytes_on_path
        self.bytes_total += other.bytes_total
        self.reasons.update(other.reasons)
        for fault in other.faults:
            if fault not in self.faults:
                self.faults.append(fault)

    def text(self):
        if self.ok:
            # Rounded down: 99.996 % is not all of it.
            percent = int(self.share * 1000) / 10
            return f"lifted: {self.path} {self.lifted}/{self.streams} streams, {percent:.1f}% of bytes"
        if self.runs == 0 and not self.faults:
            return "no run"
        why = "; ".join(self.faults)
        if self.reasons:
            counts = ", ".join(f"{name} {count}" for name, count in self.reasons.most_common())
            why += f"; reasons: {counts}"
        return f"NOT LIFTED ({why})"

    def as_json(self):
        return {
            "path": self.path, "lifted": self.ok, "runs": self.runs, "streams": self.streams,
            "lifted_streams": self.lifted, "bytes_on_path": self.bytes_on_path,
            "bytes_total": self.bytes_total, "share": self.share, "not_lifted": dict(self.reasons),
            "faults": self.faults,
        }


def _count(value):
    """A count from the file; anything that is not one counts as nothing."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _counts(value):
    return {str(k): _count(v) for k, v in value.items()} if isinstance(value, dict) else {}


def parse(text):
    """The lines by pid. A broken line is left out: its process then counts as silent."""
    by_pid = {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and _count(entry.get("pid")):
            by_pid[entry["pid"]] = entry
    return by_pid


def prove(text, pids, path, measured=None):
    """pids: {"server": pid, "client": pid}. Each of them must have lifted a stream onto path. Where the two ran on
    hosts of their own, which may give both the same pid, text is {"server": text, "client": text}.

    measured: the bytes of one direction that the figures are about, after a warm-up in which the stream was to lift.
    What went over TCP before, which in a lab may be faster, then does not count against it.
    """
    proof = Proof(path)
    proof.runs = 1
    arrived = 0
    for role, pid in pids.items():
        entry = parse(text if isinstance(text, str) else text.get(role, "")).get(pid)
        if entry is None:
            proof.faults.append(f"no summary from the {role}")
            continue
        lifted = _counts(entry.get("lifted")).get(path, 0)
        proof.streams += _count(entry.get("streams"))
        proof.lifted += lifted
        proof.reasons.update(_counts(entry.get("not_lifted")))
        for reason, count in _counts(entry.get("refused")).items():
            proof.reasons[f"refused: {reason}"] += count
        if lifted == 0:
            proof.faults.append(f"no stream of the {role} went onto {path}")
        for direction in ("bytes_sent", "bytes_received"):
            for name, count in _counts(entry.get(direction)).items():
                proof.bytes_total += count
                if name == path:
                    proof.bytes_on_path += count
                    arrived = max(arrived, count if direction == "bytes_received" else 0)
    if not proof.faults and measured is not None:
        if arrived < MIN_SHARE * measured:
            proof.faults.append(f"of {measured} bytes that were measured, {arrived} went over {path}")
    elif not proof.faults and proof.share < MIN_SHARE:
        proof.faults.append(f"only {100 * proof.share:.1f}% of bytes went over {path}")
    return proof

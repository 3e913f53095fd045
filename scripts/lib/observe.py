"""What a run costs that no program tells: system calls while it is busy, pinned memory, queue pairs.

Both ends' processes are looked at from outside, on their hosts; see LabRunner.pair.
"""

import collections
import re
import time

import runner
from lab import LabTimeout

WINDOW = 1.0  # seconds of counting

# Counted by the kernel's own event histograms: strace would slow the very calls that it counts, and what is posted
# while a call is slow is gathered into fewer writes.
_COUNT = """
T=/sys/kernel/tracing
mountpoint -q $T || mount -t tracefs tracefs $T || exit
calls=$T/events/raw_syscalls/sys_enter/trigger
writes=$T/events/syscalls/sys_enter_write/trigger
by_call='hist:keys=common_pid,id.syscall:size=8192'
by_fd='hist:keys=common_pid,fd:size=8192'
for pid in {pids}; do
  for task in /proc/$pid/task/*; do echo "task ${{task##*/}} $pid"; done
  echo "of $pid"
  ls -l /proc/$pid/fd
done
echo "$by_call" >$calls && echo "$by_fd" >$writes || exit
began=$EPOCHREALTIME
sleep {window}
ended=$EPOCHREALTIME
cat ${{calls%trigger}}hist ${{writes%trigger}}hist
echo "!$by_call" >$calls
echo "!$by_fd" >$writes
echo "window $began $ended"
for pid in {pids}; do test -e /proc/$pid/exe || echo "gone $pid"; done
"""
_CALL = re.compile(r"\{ common_pid:\s*(\d+), id: (\S*)\s*\[\s*\d+\]\s*\} hitcount:\s*(\d+)")
_WRITE = re.compile(r"\{ common_pid:\s*(\d+), fd:\s*(\d+)\s*\} hitcount:\s*(\d+)")


def read_counts(text):
    """(seconds, {call: count}) of the processes that the text names; "post": a write() to a verbs device."""
    window = re.search(r"^window (\S+) (\S+)$", text, re.M)
    owner = dict(re.findall(r"^task (\d+) (\d+)$", text, re.M))
    verbs, pid = set(), None
    for line in text.splitlines():
        if line.startswith("of "):
            pid = line[3:]
        elif device := re.search(r" (\d+) -> /dev/infiniband/uverbs", line):
            verbs.add((pid, device[1]))
    if not window or not owner:
        raise runner.RunError("no system calls can be counted here: " + runner.tail(text))
    if "\ngone " in text:
        raise runner.RunError("a process ended while its system calls were counted")
    if not verbs:
        raise runner.RunError("neither process has opened a verbs device")
    counts = collections.Counter()
    for task, call, count in _CALL.findall(text):
        if task in owner:
            counts[call.removeprefix("sys_")] += int(count)
    posts = sum(int(count) for task, fd, count in _WRITE.findall(text) if (owner.get(task), fd) in verbs)
    counts["write"] -= posts
    counts["post"] = posts
    return float(window[2]) - float(window[1]), counts


def system_calls(ends, warm):
    """{call: calls a second} of both ends together, `warm` seconds after the client's start.

    A post is a write() to the verbs device: rxe's way to ring the doorbell (and to arm a completion queue), where
    hardware is told by a store to its registers.
    """
    time.sleep(warm)
    by_host = {}
    for host, process in ends:
        by_host.setdefault(host, []).append(str(process.pid))
    rates = collections.Counter()
    # One after the other, where there are two hosts: each has its own window, and rates add up.
    for host, pids in by_host.items():
        result = host.run(_COUNT.format(window=WINDOW, pids=" ".join(pids)))
        seconds, counts = read_counts(result.out + result.err)
        for call, count in counts.items():
            rates[call] += count / seconds
    return rates


def per_message(report, rates):
    """Posts, other system calls, and the most frequent of these, per message and per MB of the receiver's rate."""
    messages, megabytes = report["messages_per_s"], report["bytes_per_s"] / 1e6
    calls = sum(rates.values()) - rates["post"]
    figures = {"calls_per_message": calls / messages, "posts_per_message": rates["post"] / messages,
               "calls_per_mb": calls / megabytes, "posts_per_mb": rates["post"] / megabytes}
    frequent = sorted((call for call in rates if call != "post"), key=lambda call: -rates[call])[:5]
    return figures | {f"{call}_per_message": rates[call] / messages for call in frequent if rates[call]}


def pinned(ends):
    """{"pinned_mb", "queue_pairs"} of both ends together, once the client says that it is steady."""
    client = ends[-1][1]
    try:
        client.wait_for(lambda: "steady" in client.errors() or client.rc is not None, 120, "it is not steady")
    except LabTimeout as fault:
        raise runner.RunError(runner.tail(str(fault))) from None
    found = {"pinned_mb": 0.0, "queue_pairs": 0}
    for host, process in ends:
        text = host.run(f"cd /proc/{process.pid} && grep VmPin status; ls task; rdma resource show qp").out
        pages = re.search(r"VmPin:\s+(\d+) kB", text)
        if not pages:
            raise runner.RunError("the process was gone before it was looked at")
        found["pinned_mb"] += int(pages[1]) / 1024
        # The kernel notes the thread that made it.
        tasks = re.findall(r"^\d+$", text, re.M)
        found["queue_pairs"] += sum(task in tasks for task in re.findall(r"type RC .*\bpid (\d+)", text))
    if not found["queue_pairs"]:
        raise runner.RunError("NOT LIFTED: neither end has a queue pair")
    return found
